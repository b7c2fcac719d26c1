"""GGUF files of others, judged: what they hold, whether it is the source's, and whether drafts are
accepted."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.make_checkpoint import TINY_CONFIG, make_checkpoint
from cases import run_program
from gguf_files import GgufModel, GgufTensor, gguf_model, is_of_module
from mtp_checkpoints.containers.gguf_file import read_header
from mtp_checkpoints.containers.gguf_values import Value, f32, texts, u32
from mtp_checkpoints.sources.local_folder import LocalFolder

FIXTURE = Path("fixtures/deepseek-v3-tiny").resolve()
CONFIG = {key: value for key, value in TINY_CONFIG.items() if key != "quantization_config"}
LAYERS = CONFIG["num_hidden_layers"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("source") / "tiny", CONFIG)


@pytest.fixture(scope="module")
def model(source: Path) -> GgufModel:
    return gguf_model(source)


def verified(place: Path, source: Path) -> tuple[int, str]:
    found = run_program("verify", place, "--level", "weights", "--source", source)
    return found.code, " ".join((found.out + found.err).split())


@pytest.mark.parametrize("kind", [None, "q8_0", "q4_0"])
def test_a_sound_file_is_inspected_and_passes(
    kind: str | None, source: Path, tmp_path: Path
) -> None:
    place = gguf_model(source, kind).write(tmp_path / "tiny.gguf")
    found = run_program("inspect", place, "--json")
    assert found.code == 0, found.err
    facts = json.loads(found.out)
    assert (facts["model_type"], facts["layout"]) == ("deepseek_v3", "llama.cpp")
    assert (facts["mtp_layers"], facts["parts"]) == ([LAYERS], ["main", "mtp"])
    assert not facts["problems"] and not facts["missing_files"]
    code, said = verified(place, source)
    assert code == 0, said
    assert "no fault in files and weights" in said


def test_drafts_of_a_file_are_accepted(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt_token_ids": [5, 17, 300, 41, 900, 12, 77]}))
    place = gguf_model(FIXTURE, "q8_0").write(tmp_path / "tiny.gguf")
    found = run_program("generate", place, "--prompts", prompts, "--max-new-tokens", 24)
    assert found.code == 0, found.err
    accepted = re.search(r"\((\d+) of (\d+)\)", found.out + found.err)
    assert accepted is not None and int(accepted[1]) > 0.5 * int(accepted[2]), found.err


Fault = Callable[[GgufModel], GgufModel]
MODULE = f"blk.{LAYERS}."


def with_tensors(model: GgufModel, *changed: GgufTensor) -> GgufModel:
    return GgufModel(model.keys, {**model.tensors, **{one.name: one for one in changed}})


def with_keys(**changed: Value) -> Fault:
    keys = {f"deepseek2.{name}": value for name, value in changed.items()}
    return lambda model: GgufModel({**model.keys, **keys}, model.tensors)


def without_module(model: GgufModel) -> GgufModel:
    of_module = is_of_module(model)
    return model.only(lambda name: not of_module(name))


def uncounted(model: GgufModel) -> GgufModel:
    counted = with_keys(block_count=u32(LAYERS), nextn_predict_layers=u32(0))
    return counted(without_module(model))


def in_another_block(model: GgufModel) -> GgufModel:
    def moved(name: str) -> str:
        return name.replace(MODULE, f"blk.{LAYERS + 1}.")

    tensors = {moved(name): replace(one, name=moved(name)) for name, one in model.tensors.items()}
    return GgufModel(model.keys, tensors)


def halves_exchanged(model: GgufModel) -> GgufModel:
    keys, values = (model.tensors[f"{MODULE}attn_{half}.weight"] for half in ("k_b", "v_b"))
    turned = values.values.transpose(1, 2).contiguous()
    return with_tensors(
        model,
        replace(keys, values=turned),
        replace(values, values=keys.values.transpose(1, 2).contiguous()),
    )


def not_transposed(model: GgufModel) -> GgufModel:
    keys = model.tensors[f"{MODULE}attn_k_b.weight"]
    rows = keys.values.transpose(1, 2).contiguous()
    return with_tensors(model, replace(keys, values=rows.view(keys.shape)))


def experts_in_another_order(model: GgufModel) -> GgufModel:
    experts = model.tensors[f"{MODULE}ffn_up_exps.weight"]
    return with_tensors(model, replace(experts, values=experts.values.roll(1, 0)))


def another_vocabulary(model: GgufModel) -> GgufModel:
    words = [f"word {number}" for number in range(CONFIG["vocab_size"])]
    return GgufModel({**model.keys, "tokenizer.ggml.tokens": texts(words)}, model.tensors)


FAULTS: dict[str, tuple[Fault, str]] = {
    "module dropped": (without_module, "MTP"),
    "module dropped and not counted": (uncounted, "MTP"),
    "another block": (
        in_another_block,
        f"begin with model.layers.{LAYERS + 1}, where engines look for model.layers.{LAYERS}",
    ),
    "halves exchanged": (halves_exchanged, "half are exchanged: attn_v_b lies in attn_k_b's place"),
    "keys not transposed": (not_transposed, "half is not transposed, as attn_k_b has to be"),
    "experts in another order": (
        experts_in_another_order,
        f"it holds model.layers.{LAYERS}.mlp.experts.3.up_proj.weight",
    ),
    "another gating function": (with_keys(expert_gating_func=u32(1)), "scoring_func is 'softmax'"),
    "another scale": (with_keys(expert_weights_scale=f32(1.0)), "routed_scaling_factor is 1.0"),
    "another vocabulary": (another_vocabulary, "another vocabulary than tokenizer.json"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault: str, source: Path, model: GgufModel, tmp_path: Path) -> None:
    plant, says = FAULTS[fault]
    code, said = verified(plant(model).write(tmp_path / "tiny.gguf"), source)
    assert code == 7, said
    assert says in said, said


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"block_count": LAYERS}, f"set num_hidden_layers to {LAYERS}. These fields stand for the"),
        ({"nextn_predict_layers": 0}, f"set num_hidden_layers to {LAYERS}, and the field that"),
        ({"expert_count": 64}, f"set n_routed_experts to {CONFIG['n_routed_experts']}"),
    ],
)
def test_keys_that_describe_another_model(
    keys: dict[str, int], says: str, model: GgufModel, tmp_path: Path
) -> None:
    changed = with_keys(**{name: u32(value) for name, value in keys.items()})(model)
    found = run_program("verify", changed.write(tmp_path / "tiny.gguf"), "--level", "files")
    said = " ".join(found.out.split())
    assert found.code == 7 and says in said, said
    assert "the keys of the GGUF file" in said and "is missing" not in said


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ours: of blocks, a file for the main model and one for the module."""
    folder = tmp_path_factory.mktemp("bundle") / "ours"
    source = make_checkpoint(folder.parent / "tiny", CONFIG | {"vocab_size": 2048})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FIXTURE / name, source / name)
    options = ("--target", "llama.cpp", "--base-quant", "q4_0", "--pre-tokenizer", "gpt-2")
    made = run_program("quantize", "--input-dir", source, "--output-dir", folder, *options)
    assert made.code == 0, made.err
    return folder


def test_a_bundle_passes(bundle: Path) -> None:
    found = run_program("verify", bundle, "--level", "weights")
    assert found.code == 0, found.out + found.err


def test_damage_in_a_half_is_found(bundle: Path, tmp_path: Path) -> None:
    """Manifests have the halves by themselves, and what is read is put together of them."""
    damaged = tmp_path / "damaged"
    shutil.copytree(bundle, damaged)
    (path,) = (damaged / "main").glob("*.gguf")
    header = read_header(LocalFolder(path.parent).file(path.name))
    half = next(one for one in header.shard.tensors if one.name == "blk.1.attn_v_b.weight")
    data = bytearray(path.read_bytes())
    data[half.offset_bytes + 5] ^= 1
    path.write_bytes(data)
    found = run_program("verify", damaged, "--level", "files")
    assert found.code == 7
    assert "model.layers.1.self_attn.v_b_proj.weight" in found.out.replace("\n  ", " "), found.out


def test_keys_that_contradict_config_json(bundle: Path, tmp_path: Path) -> None:
    """llama.cpp reads the keys alone, and everything here config.json."""
    damaged = tmp_path / "damaged"
    shutil.copytree(bundle, damaged)
    (path,) = (damaged / "mtp").glob("*.gguf")
    data = path.read_bytes()
    key = b"deepseek2.expert_weights_scale" + struct.pack("<I", 6)
    assert data.count(key + struct.pack("<f", 2.5)) == 1
    path.write_bytes(data.replace(key + struct.pack("<f", 2.5), key + struct.pack("<f", 1.0)))
    found = run_program("verify", damaged, "--level", "files")
    said = " ".join(found.out.split())
    assert found.code == 7
    assert "routed_scaling_factor is 1.0, and config.json has 2.5" in said, said


def test_what_is_not_made_of_gguf_files(source: Path, model: GgufModel, tmp_path: Path) -> None:
    """A module that is lacking is grafted."""
    place = without_module(model).write(tmp_path / "tiny.gguf")
    for command in ((), ("quantize", "--base-quant", "bf16", "--mtp-quant", "bf16")):
        places = ("--input-dir", place, "--output-dir", tmp_path / "made")
        found = run_program(*command, *places)
        assert found.code == 4
        assert "Nothing is exported or quantized from GGUF files" in found.err
    said = verified(place, source)[1].replace(" \\", "")
    command = f"mtp-export graft --main {place} --mtp {source} --output-dir BUNDLE"
    shown = f"{command} --target llama.cpp".replace(" ", "")  # wherever its lines break
    assert shown in "".join(said.split()), said
    words = command.replace("BUNDLE", str(tmp_path / "made")).split()[1:]
    assert run_program(*words, "--target", "llama.cpp", "--quiet").code == 0
    (made,) = (tmp_path / "made/mtp").glob("*.gguf")
    shutil.copy(made, tmp_path)
    facts = json.loads(run_program("inspect", tmp_path, "--json").out)
    assert facts["parts"] == ["main", "mtp"] and not facts["problems"]


def test_parts_of_a_bundle_are_inspected_and_judged_alone(bundle: Path) -> None:
    for part in ("main", "mtp"):
        found = run_program("inspect", bundle / part, "--json")
        facts = json.loads(found.out)
        assert (facts["parts"], facts["layout"], facts["problems"]) == ([part], "llama.cpp", [])
        assert not [amount for amount in facts["amounts"] if amount["role"] == "unexpected"]
    assert run_program("verify", bundle / "mtp", "--level", "files").code == 0
    found = run_program("inspect", bundle / "mtp")
    assert "a draft as --target llama.cpp writes it" in " ".join(found.out.split())


def test_a_file_of_grouped_query_attention(tmp_path: Path) -> None:
    released = FIXTURE.parent / "glm4-moe-tiny"
    place = gguf_model(released, "q5_1").write(tmp_path / "glm.gguf")
    code, said = verified(place, released)
    assert code == 0, said
