"""A head in int8 outside of the table's rows: what the runtime multiplies with, a graft beside it,
what `inspect` says of the copies, and heads that a release left out of fp8 by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from cases import (
    MTP_LAYER,
    edit_json,
    make_checkpoint,
    quantize,
    read_json,
    read_tensors,
    run_program,
)
from faults.small_model import write_dense
from mtp_checkpoints.families import family_of
from mtp_checkpoints.families.base import Role, weight_name
from mtp_checkpoints.formats import Int8Channel
from mtp_checkpoints.quantization.methods import quant_config_of
from mtp_checkpoints.quantization.stored import stored_model
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_export.inspection import shared_tensors
from mtp_runtime.models.load import LoadOptions, load_model, open_model
from quantize_rows import CONFIGS, HEADS, INT8_HEAD, pair
from runtime.checkpoints import SMALL_CONFIGS, write_checkpoint

INT8 = pair("weight_only_int8", "weight_only_int8", *INT8_HEAD)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("bf16") / "source", CONFIGS["bf16"])


@pytest.fixture(scope="module")
def bundle(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head") / "bundle"
    assert quantize(source, folder, *INT8, "--quiet").code == 0
    return folder


def by_definition(folder: Path) -> torch.Tensor:
    """The head in float64, unpacked by the layout's definition."""
    stored = read_tensors(folder)
    words, scale = stored["lm_head.weight_packed"], stored["lm_head.weight_scale"]
    codes = torch.stack([(words >> (8 * place)) & 255 for place in range(4)], dim=2).flatten(1)
    return (codes - 128).double() * scale.double()


@pytest.mark.parametrize("at_load", [True, False])
def test_logits_are_those_of_the_dequantized_head(at_load: bool, bundle: Path) -> None:
    """Compiled kernels and torch; the MTP module has the main model's head."""
    options = LoadOptions(dequantize_at_load=at_load)
    opened = open_model(bundle, options, packs=options.compiled)
    assert opened.source.packed_form("lm_head.weight") == Int8Channel()
    model = load_model(bundle, options).model
    assert model.mtp is not None and model.mtp.head.outputs is model.head.outputs
    head = by_definition(bundle / "main")
    x = torch.randn(5, head.shape[1], generator=torch.Generator().manual_seed(1))
    expected = x.double() @ head.T
    error = (model.head.logits(x).double() - expected).abs().max()
    assert error <= 1e-5 * expected.abs().max()


def test_memory_is_that_of_the_codes(bundle: Path, source: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    assert quantize(source, plain, *INT8[:4], "--quiet").code == 0
    with_codes, without = (
        open_model(folder, LoadOptions()).memory_plan(LoadOptions()).weight_bytes
        for folder in (bundle, plain)
    )
    rows, columns = by_definition(bundle / "main").shape
    assert without - with_codes == rows * columns - 4 * rows  # scales in float32


def test_a_graft_beside_it(bundle: Path, source: Path, tmp_path: Path) -> None:
    """The layer's own head, in bf16, is the main model's but for rounding."""
    options = ("--main", bundle / "main", "--mtp", source, "--output-dir", tmp_path / "out")
    assert run_program("graft", *options, "--mtp-quant", "bf16", "--quiet").code == 0
    config = quant_config_of(read_json(tmp_path / "out/main/config.json")["quantization_config"])
    assert config.format_of("lm_head", Role.HEAD) == Int8Channel()
    assert config.format_of(HEADS[1], Role.HEAD) is None
    outcome = run_program("verify", tmp_path / "out", "--level", "files", "--quiet")
    assert outcome.code == 0, outcome.err


def test_inspect_finds_both_copies(bundle: Path) -> None:
    main, mtp = (Checkpoint.open(bundle / part) for part in ("main", "mtp"))
    tensors = {**main.tensors, **mtp.tensors}
    said = shared_tensors(tensors, stored_model(main.config))
    assert said[f"{HEADS[1]}.weight_packed"] == "own copy, same dtype and shape as lm_head.weight"


@pytest.mark.parametrize("left_out", ["lm_head", f"model.layers.{MTP_LAYER}"])
def test_a_head_that_the_release_left_out_of_fp8(left_out: str, tmp_path: Path) -> None:
    """A name in modules_to_not_convert says nothing of the head that is written."""
    source = make_checkpoint(tmp_path / "source", CONFIGS["fp8"])
    fp8 = CONFIGS["fp8"]["quantization_config"]
    if left_out == "lm_head":
        listed = fp8 | {"modules_to_not_convert": [left_out]}
        edit_json(source / "config.json", lambda c: c.update(quantization_config=listed))
    else:
        config = CONFIGS["bf16"] | {"quantization_config": fp8 | {"ignored_layers": [left_out]}}
        source = make_checkpoint(tmp_path / "other", config)
    options = pair("a8w8_fp8", "a8w8_fp8", *INT8_HEAD)
    outcome = quantize(source, tmp_path / "out", *options, "--quiet")
    assert outcome.code == 0, outcome.err
    config = quant_config_of(read_json(tmp_path / "out/main/config.json")["quantization_config"])
    for head in (*HEADS, f"model.layers.{MTP_LAYER}.head"):
        assert config.format_of(head, Role.HEAD) == Int8Channel(), head


@pytest.fixture(scope="module", params=["qwen3_5_text", "qwen3_5"])
def tied(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose head is its embedding."""
    folder = tmp_path_factory.mktemp("tied") / "source"
    return write_dense(folder, config=SMALL_CONFIGS[request.param])


@pytest.fixture(scope="module")
def untied(tied: Path) -> Path:
    """Its bundle with a quantized head."""
    folder = tied.parent / "bundle"
    scheme = ("--base-quant", "weight_only_int8", "--mtp-quant", "weight_only_int8")
    options = (*scheme, *INT8_HEAD, "--int8-scope", "linears", "--quiet")
    assert quantize(tied, folder, *options).code == 0
    return folder


def test_a_head_that_is_the_embedding_becomes_a_tensor_of_its_own(tied: Path, untied: Path) -> None:
    """In int8 beside the embedding, which stays; config.json says so wherever it can."""
    embedding = weight_name(family_of(read_json(tied / "config.json")).embedding)
    rows = read_tensors(tied)[embedding]
    assert torch.equal(read_tensors(untied / "main")[embedding], rows)
    head = by_definition(untied / "main")
    steps = rows.double().abs().amax(dim=1, keepdim=True) / 127
    assert ((head - rows.double()).abs() <= 0.6 * steps).all()
    for part in ("main", "mtp"):
        config = read_json(untied / part / "config.json")
        for fields in (config, config.get("text_config", config)):
            assert fields["tie_word_embeddings"] is False
    assert "lm_head.weight" not in read_tensors(tied)


def test_the_embedding_that_is_the_head_weighs_once(tied: Path, untied: Path) -> None:
    """In the size before, although two tensors are made of it."""
    held = sum(tensor.numel() * tensor.itemsize for tensor in read_tensors(tied).values())
    assert read_json(untied / "mtp_export.json")["sizes"]["bytes_before"] == held


def test_it_is_the_source_s_by_verify(tied: Path, untied: Path, tmp_path: Path) -> None:
    level = ("--level", "weights", "--source", tied, "--quiet")
    assert run_program("verify", untied, *level).code == 0
    damaged = tmp_path / "bundle"
    shutil.copytree(untied, damaged)
    edit_json(damaged / "main/config.json", lambda c: c.update(tie_word_embeddings=True))
    assert "lm_head" in run_program("verify", damaged, *level, "--json").out


def test_its_logits_are_those_of_the_dequantized_head(untied: Path) -> None:
    model = load_model(untied, LoadOptions()).model
    head = by_definition(untied / "main")
    x = torch.randn(5, head.shape[1], generator=torch.Generator().manual_seed(1))
    expected = x.double() @ head.T
    assert model.mtp is not None and model.mtp.head.outputs is model.head.outputs
    error = (model.head.logits(x).double() - expected).abs().max()
    assert error <= 1e-5 * expected.abs().max()


def test_a_lost_module_is_grafted_beside_it(tied: Path, untied: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    options = ("--main", untied / "main", "--mtp", tied, "--output-dir", output, "--quiet")
    assert run_program("graft", *options).code == 0
    assert run_program("verify", output, "--level", "files", "--quiet").code == 0


def test_a_head_of_another_model_that_is_its_embedding_is_refused(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", CONFIGS["bf16"])
    edit_json(source / "config.json", lambda c: c.update(tie_word_embeddings=True))
    outcome = quantize(source, tmp_path / "out", *INT8)
    assert outcome.code == 4 and "tie_word_embeddings" in outcome.err
    assert not (tmp_path / "out").exists()


def test_a_head_that_engines_find_as_a_plain_weight_is_refused(tmp_path: Path) -> None:
    """DeepSeek-V4's, `head.weight`, of which vLLM renames no codes."""
    write_checkpoint(tmp_path / "source", SMALL_CONFIGS["deepseek_v4"])
    outcome = quantize(tmp_path / "source", tmp_path / "out", *INT8)
    assert outcome.code == 4 and "Found head.weight" in outcome.err, outcome.err
    assert quantize(tmp_path / "source", tmp_path / "out", *INT8[:4], "--dry-run").code == 0
    assert not (tmp_path / "out").exists()
