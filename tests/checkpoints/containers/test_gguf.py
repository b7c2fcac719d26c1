"""Checkpoints of GGUF files: released names and shapes, whole or in parts, with modules or without
them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from benchmarks.make_checkpoint import TINY_CONFIG, make_checkpoint
from gguf_files import GgufModel, gguf_model, is_of_module
from mtp_checkpoints.containers.gguf_values import text, texts, u16, u32
from mtp_checkpoints.dtypes import DType
from mtp_checkpoints.errors import InvalidInputError, UnsupportedError
from mtp_checkpoints.quantization.stored import stored_model
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_checkpoints.weights.weight_values import weights_on_disk

CONFIG = {key: value for key, value in TINY_CONFIG.items() if key != "quantization_config"}
LAYERS = CONFIG["num_hidden_layers"]
LATENT_UP = "model.layers.0.self_attn.kv_b_proj.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("source") / "tiny", CONFIG)


@pytest.fixture(scope="module")
def model(source: Path) -> GgufModel:
    return gguf_model(source)


@pytest.fixture(scope="module")
def quantized(source: Path) -> GgufModel:
    return gguf_model(source, "q8_0")


def alone(model: GgufModel) -> GgufModel:
    """The module alone, with its copies of embedding and head in the main model's places."""
    of_module = is_of_module(model)
    around = ("token_embd.weight", "output.weight", "output_norm.weight")
    return model.only(lambda name: of_module(name) or name in around)


def equal_to(source: Path, opened: Checkpoint, names: list[str]) -> None:
    theirs = Checkpoint.open(source)
    for name in names:
        found, wanted = opened.tensor(name), theirs.tensor(name)
        assert found.shape == wanted.shape, name
        assert torch.equal(found.float(), wanted.float()), name


def test_tensors_have_released_names_shapes_and_values(
    source: Path, model: GgufModel, tmp_path: Path
) -> None:
    opened = Checkpoint.open(model.write(tmp_path / "tiny.gguf"))
    theirs = Checkpoint.open(source)
    assert opened.tensors.keys() == theirs.tensors.keys()
    equal_to(source, opened, [*opened.tensors])
    assert opened.tensors[LATENT_UP].dtype is DType.BF16
    stored = stored_model(opened.config, opened.tensors)
    assert not stored.differences(opened.tensors)


def test_the_config_is_that_of_the_keys(source: Path, model: GgufModel, tmp_path: Path) -> None:
    config = Checkpoint.open(model.write(tmp_path / "tiny.gguf")).config
    theirs = Checkpoint.open(source).config
    for key in ("model_type", "hidden_size", "num_hidden_layers", "num_nextn_predict_layers"):
        assert config[key] == theirs[key]
    assert config["quantization_config"] == {"quant_method": "gguf", "formats": {}}


def test_blocks_are_told_by_the_element_types(
    source: Path, quantized: GgufModel, tmp_path: Path
) -> None:
    opened = Checkpoint.open(quantized.write(tmp_path / "tiny.gguf"))
    stored = stored_model(opened.config, opened.tensors)
    assert not stored.differences(opened.tensors)
    experts = "model.layers.1.mlp.experts.3.down_proj.weight"
    assert stored.weights[experts].storage == "q8_0"
    assert opened.tensors[LATENT_UP].dtype is DType.F32
    assert stored.weights["model.norm.weight"].storage == "bf16"
    theirs = Checkpoint.open(source)
    for weight in weights_on_disk(stored, opened.tensors):
        found = weight.encoded(0, weight.rows).dequantize()
        wanted = theirs.tensor(weight.name).float()
        assert (found - wanted).norm() <= 0.01 * wanted.norm(), weight.name


@pytest.mark.parametrize("count", [2, 5])
def test_parts_are_one_model(count: int, source: Path, model: GgufModel, tmp_path: Path) -> None:
    paths = model.write_parts(tmp_path, "tiny", count)
    for place in (tmp_path, paths[0], paths[-1]):
        opened = Checkpoint.open(place)
        assert [shard.path for shard in opened.shards] == paths
        equal_to(source, opened, [*Checkpoint.open(source).tensors])


def test_halves_in_two_parts_are_put_together(
    source: Path, model: GgufModel, tmp_path: Path
) -> None:
    half = "blk.0.attn_v_b.weight"
    last = {**model.only(lambda name: name != half).tensors, half: model.tensors[half]}
    GgufModel(model.keys, last).write_parts(tmp_path, "tiny", 3)
    equal_to(source, Checkpoint.open(tmp_path), [LATENT_UP])


def test_a_file_of_a_module_lies_beside_the_model(
    source: Path, model: GgufModel, tmp_path: Path
) -> None:
    of_module = is_of_module(model)
    main = model.only(lambda name: not of_module(name))
    place = main.write(
        tmp_path / "tiny.gguf",
        {"deepseek2.block_count": u32(LAYERS)} | {"deepseek2.nextn_predict_layers": u32(0)},
    )
    alone(model).write(tmp_path / "mtp-tiny.gguf")
    theirs = Checkpoint.open(source)
    for there in (tmp_path, place):
        opened = Checkpoint.open(there)
        assert opened.config["num_nextn_predict_layers"] == 1
        assert opened.config["num_hidden_layers"] == LAYERS
        assert opened.tensors.keys() == theirs.tensors.keys()
        equal_to(source, opened, [*opened.tensors])
        assert not stored_model(opened.config, opened.tensors).differences(opened.tensors)


def test_a_module_without_copies_of_its_own_has_those_of_its_file(
    source: Path, model: GgufModel, tmp_path: Path
) -> None:
    copies = [f"blk.{LAYERS}.nextn.{own}.weight" for own in ("embed_tokens", "shared_head_head")]
    alone(model).only(lambda name: name not in copies).write(tmp_path / "mtp-tiny.gguf")
    opened, theirs = Checkpoint.open(tmp_path), Checkpoint.open(source)
    for own, around in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        found = opened.tensor(f"model.layers.{LAYERS}.{own}.weight")
        assert torch.equal(found, theirs.tensor(f"{around}.weight"))


def test_a_tensor_that_two_of_a_file_hold(model: GgufModel, tmp_path: Path) -> None:
    whole = "blk.0.attn_kv_b.weight"
    half = model.tensors["blk.0.attn_v_b.weight"]
    rows = half.values.flatten(0, 1)
    twice = type(half)(whole, half.dtype, tuple(rows.shape), rows)
    GgufModel(model.keys, {**model.tensors, whole: twice}).write(tmp_path / "a.gguf")
    with pytest.raises(InvalidInputError, match="is in two tensors of a GGUF file"):
        Checkpoint.open(tmp_path)


def test_a_module_alone(model: GgufModel, tmp_path: Path) -> None:
    opened = Checkpoint.open(alone(model).write(tmp_path / "mtp-tiny.gguf"))
    assert all(name.startswith(f"model.layers.{LAYERS}.") for name in opened.tensors)
    assert f"model.layers.{LAYERS}.shared_head.head.weight" in opened.tensors
    assert opened.config["num_hidden_layers"] == LAYERS


def test_config_json_comes_before_keys(source: Path, model: GgufModel, tmp_path: Path) -> None:
    model.write(tmp_path / "tiny.gguf")
    shutil.copy(source / "config.json", tmp_path)
    config = Checkpoint.open(tmp_path).config
    theirs = json.loads((source / "config.json").read_text())
    assert config.pop("quantization_config")["quant_method"] == "gguf"
    assert config == theirs


def test_a_chosen_file_is_read_without_others(
    source: Path, model: GgufModel, quantized: GgufModel, tmp_path: Path
) -> None:
    place = model.write(tmp_path / "tiny-BF16.gguf")
    quantized.write(tmp_path / "tiny-Q8_0.gguf")
    (tmp_path / "mmproj-tiny.gguf").write_bytes(b"no text model")
    equal_to(source, Checkpoint.open(place), [LATENT_UP])
    with pytest.raises(InvalidInputError, match="does not hold one GGUF model") as refusal:
        Checkpoint.open(tmp_path)
    assert "2 models and 0 modules: tiny-BF16.gguf, tiny-Q8_0.gguf" in str(refusal.value)
    assert "Point at one of the files" in str(refusal.value)
    shutil.move(place, tmp_path / "mmproj-other.gguf")
    (tmp_path / "tiny-Q8_0.gguf").unlink()
    with pytest.raises(InvalidInputError, match="but of a vision tower"):
        Checkpoint.open(tmp_path)


def test_parts_that_are_missing_or_another_s(model: GgufModel, tmp_path: Path) -> None:
    paths = model.write_parts(tmp_path, "tiny", 3)
    paths[1].rename(tmp_path / "gone")
    with pytest.raises(InvalidInputError, match="part of a split GGUF file is missing") as refusal:
        Checkpoint.open(tmp_path)
    assert str(paths[1]) in str(refusal.value)
    (tmp_path / "gone").rename(paths[1])
    model.write(paths[0], {"split.count": u16(2)})
    with pytest.raises(InvalidInputError, match="does not count the parts"):
        Checkpoint.open(tmp_path)
    model.write(paths[0], {"split.count": u16(3)})
    with pytest.raises(InvalidInputError, match="is in two shards"):
        Checkpoint.open(tmp_path)


def test_an_architecture_that_is_not_read(model: GgufModel, tmp_path: Path) -> None:
    model.write(tmp_path / "a.gguf", {"general.architecture": text("llama")})
    with pytest.raises(UnsupportedError, match="architecture that this tool does not read"):
        Checkpoint.open(tmp_path)


def test_a_module_of_another_vocabulary(model: GgufModel, tmp_path: Path) -> None:
    of_module = is_of_module(model)
    model.only(lambda name: not of_module(name)).write(tmp_path / "tiny.gguf")
    words = [f"u{number}" for number in range(CONFIG["vocab_size"])]
    alone(model).write(tmp_path / "mtp-tiny.gguf", {"tokenizer.ggml.tokens": texts(words)})
    with pytest.raises(InvalidInputError, match="has another vocabulary than the main model"):
        Checkpoint.open(tmp_path)


def test_tensors_that_are_not_as_the_architecture_has_them(
    model: GgufModel, tmp_path: Path
) -> None:
    half = "blk.0.attn_v_b.weight"
    lacking = Checkpoint.open(model.only(lambda n: n != half).write(tmp_path / "a.gguf"))
    missing = [one.tensor for one in stored_model(lacking.config).differences(lacking.tensors)]
    assert missing == [LATENT_UP, "blk.0.attn_k_b.weight"]
    turned = model.tensors[half]
    shape = turned.shape[::-1]
    turned = type(turned)(half, turned.dtype, shape, turned.values.view(shape))
    GgufModel(model.keys, {**model.tensors, half: turned}).write(tmp_path / "a.gguf")
    with pytest.raises(InvalidInputError, match="are not the halves of one"):
        Checkpoint.open(tmp_path)
