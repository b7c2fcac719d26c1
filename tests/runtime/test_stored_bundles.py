"""Bundles in every precision and for every target run as what they store: against a checkpoint of
the same numbers in float32, decoded here by code of this file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.common.dequantized import write_dequantized
from cases import (
    MTP_LAYER,
    SAFETENSORS_TARGETS,
    WHOLE_TILES,
    edit_json,
    export,
    make_checkpoint,
    quantize,
    read_tensors,
)
from mtp_checkpoints.errors import InvalidInputError, UnsupportedError
from mtp_checkpoints.layouts import TARGETS
from mtp_runtime.cache import lay_out
from mtp_runtime.models.load import Loaded, LoadOptions, load_model
from mtp_runtime.models.model import Model
from mtp_runtime.sampling import SamplingParams
from quantize_rows import INT8_HEAD
from runtime.harness import Walk, load, prompts_of, run

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
VOCAB = WHOLE_TILES["vocab_size"]
INT4_INT8 = ("weight_only_int4", "weight_only_int8")
ROWS: dict[str, tuple[str, ...]] = {
    "wint4, vLLM": ("a8w8_fp8_wint4", "a8w8_fp8"),
    "wint4, SGLang": ("a8w8_fp8_wint4", "a8w8_fp8", "--target", "sglang"),
    "w4afp8": ("a8w8_fp8_wint4", "a8w8_fp8", "--format", "w4afp8", "--target", "sglang"),
    "int4": ("weight_only_int4", "weight_only_int8", "--group-size", "32"),
    "int4 everywhere": ("weight_only_int4", "weight_only_int8", "--int4-scope", "all"),
    "int4 linears": ("weight_only_int4", "weight_only_int8", "--int4-scope", "linears"),
    "fp8": ("a8w8_fp8", "a8w8_fp8"),
    "int8": ("weight_only_int8", "weight_only_int8"),
    "int8 linears": ("weight_only_int8", "weight_only_int8", "--int8-scope", "linears"),
    "bf16": ("bf16", "bf16"),
    "int4, int8 head": (*INT4_INT8, "--group-size", "32", *INT8_HEAD),
    "fp8, int8 head": ("a8w8_fp8", "a8w8_fp8", *INT8_HEAD),
}


@pytest.fixture(scope="module", params=[1, 2], ids=["one shared", "two shared"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random fp8 checkpoint; several shared experts are stored as one."""
    config = WHOLE_TILES | {"n_shared_experts": request.param}
    return make_checkpoint(tmp_path_factory.mktemp("fp8") / "source", config)


def in_float32(bundle: Path, config: dict[str, Any], folder: Path) -> Path:
    """Both parts of a bundle in one folder, every weight decoded the plainest way."""
    stored = read_tensors(bundle / "main") | read_tensors(bundle / "mtp")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        module, _, last = name.rpartition(".")
        if last == "weight_packed":
            tensors[f"{module}.weight"] = unpacked(tensor, stored, module)
        elif last == "weight" and tensor.dtype is torch.int8:
            low, high = (tensor.int() << 28) >> 28, tensor.int() >> 4
            codes = torch.stack([low, high], dim=2).flatten(1)
            scale = stored[f"{name}_scale_inv"]
            tensors[name] = codes * scale.repeat_interleave(128, 1)
        elif last == "weight" and tensor.dtype is torch.float8_e4m3fn:
            scale = stored.get(f"{name}_scale_inv", stored.get(f"{name}_scale"))
            wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            tensors[name] = tensor.float() * wide[: tensor.shape[0], : tensor.shape[1]]
        elif last in ("weight", "e_score_correction_bias"):
            tensors[name] = tensor.float()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(plain | {"torch_dtype": "float32"}))
    return folder


def unpacked(packed: torch.Tensor, stored: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    """pack-quantized: code + 2^(bits - 1), least significant first."""
    rows, columns = stored[f"{module}.weight_shape"].tolist()
    per_word = columns // packed.shape[1]
    bits = 32 // per_word
    codes = torch.stack([(packed >> (bits * i)) & (2**bits - 1) for i in range(per_word)], dim=2)
    scale = stored[f"{module}.weight_scale"].float()
    wide = scale.repeat_interleave(columns // scale.shape[1], 1)
    return (codes.flatten(1) - 2 ** (bits - 1)).float() * wide


def config_of(source: Path) -> dict[str, Any]:
    config = json.loads((source / "config.json").read_text())
    assert isinstance(config, dict)
    return config


def same_model(ours: Model, theirs: Model) -> None:
    """Every linear has the same numbers: logits, drafts and what they are accepted for."""
    (tokens,) = prompts_of([9], VOCAB)
    expected_logits = Walk(theirs).feed(tokens)[0]
    error = (Walk(ours).feed(tokens)[0] - expected_logits).abs().max()
    assert error <= 2e-6 * expected_logits.abs().max()
    hidden = mtp_output(theirs)
    assert (mtp_output(ours) - hidden).abs().max() <= 2e-6 * hidden.abs().max()


def mtp_output(model: Model) -> torch.Tensor:
    assert model.mtp is not None
    walk = Walk(model)
    walk.pages.append(walk.sequence, 6)
    layout = lay_out(walk.pages, [walk.sequence], [(0, 6)], model.device)
    hidden = torch.randn(6, model.config.hidden, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        out = model.mtp(torch.arange(3, 9), hidden, walk.cache.mtp[0], layout)
        return model.mtp.head.logits(model.mtp.head.normed(out))


def write_row(source: Path, folder: Path, row: str) -> Path:
    base, mtp, *more = ROWS[row]
    options = ("--base-quant", base, "--mtp-quant", mtp, *more)
    assert quantize(source, folder, *options).code == 0
    return folder


@pytest.mark.parametrize("row", ROWS)
def test_every_row(row: str, source: Path, tmp_path: Path) -> None:
    """Dequantized at load, and in every call."""
    bundle = write_row(source, tmp_path / "out", row)
    dense = load(in_float32(bundle, config_of(source), tmp_path / "dense"))
    stored = {*read_tensors(bundle / "main"), *read_tensors(bundle / "mtp")}
    for at_load in (True, False):
        loaded = load_model(bundle, LoadOptions(dequantize_at_load=at_load))
        same_model(loaded.model, dense)
        ledger = loaded.ledger
        assert ledger.loaded | ledger.tied == stored and not ledger.skipped


@pytest.fixture(scope="module")
def original(pristine: Path) -> Loaded:
    return load_model(pristine, LoadOptions())


@pytest.mark.parametrize("shared", ["keep", "drop"])
@pytest.mark.parametrize("target", sorted(set(SAFETENSORS_TARGETS) - {"xllm"}))
def test_every_target(
    target: str, shared: str, pristine: Path, original: Loaded, tmp_path: Path
) -> None:
    """Ragged tiles too: the same tokens and the same acceptance as the source."""
    options = ("--target", target, "--shared-weights", shared)
    if shared == "drop" and TARGETS[target].needs_shared_weights:
        return
    assert export(pristine, tmp_path / "out", *options).code == 0
    prompts = prompts_of([6, 11], VOCAB)
    loaded = load_model(tmp_path / "out", LoadOptions())
    expected = run(original.model, prompts, PARAMS, method="mtp", k=3)
    found = run(loaded.model, prompts, PARAMS, method="mtp", k=3)
    assert found.outputs == expected.outputs
    # A target that stores the values of codes has products that are rounded elsewhere.
    assert torch.allclose(mtp_output(loaded.model), mtp_output(original.model), atol=1e-7)
    ledger, names = loaded.ledger, original.ledger
    assert ledger.expected == names.expected and ledger.loaded <= names.loaded | names.tied


def test_xllm_s_draft_is_the_source_s_in_bf16(pristine: Path, tmp_path: Path) -> None:
    assert export(pristine, tmp_path / "out", "--target", "xllm").code == 0
    (tmp_path / "dense").mkdir()
    dense = write_dequantized(pristine, tmp_path / "dense")
    tensors = load_file(dense / "model.safetensors")
    for name, tensor in tensors.items():
        if name.startswith(f"model.layers.{MTP_LAYER}.") and tensor.dim() == 2:
            tensors[name] = tensor.bfloat16().float()
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    same_model(load(tmp_path / "out"), load(dense))


def other_head(bundle: Path) -> None:
    edit_json(bundle / "mtp/config.json", lambda c: c.update(vocab_size=c["vocab_size"] + 1))


def other_experts(bundle: Path) -> None:
    edit_json(bundle / "mtp/config.json", lambda c: c.update(n_routed_experts=2))


def no_manifest(bundle: Path) -> None:
    (bundle / "mtp_export.json").unlink()


def other_target(bundle: Path) -> None:
    edit_json(bundle / "mtp_export.json", lambda m: m["options"].update(target="xllm"))


def unknown_target(bundle: Path) -> None:
    edit_json(bundle / "mtp_export.json", lambda m: m["options"].update(target="nope"))


def more_layers(bundle: Path) -> None:
    edit_json(bundle / "main/config.json", lambda c: c.update(num_nextn_predict_layers=2))


@pytest.fixture(scope="module")
def for_lightllm(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lightllm") / "out"
    assert export(pristine, folder, "--target", "lightllm").code == 0
    return folder


@pytest.mark.parametrize(
    "damage", [other_head, other_experts, no_manifest, other_target, unknown_target, more_layers]
)
def test_a_draft_of_something_else_is_refused(
    damage: Callable[[Path], None], for_lightllm: Path, tmp_path: Path
) -> None:
    bundle = Path(shutil.copytree(for_lightllm, tmp_path / "out"))
    load_model(bundle, LoadOptions())
    damage(bundle)
    with pytest.raises(InvalidInputError):
        load_model(bundle, LoadOptions())


def rewrite(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            tensors[name] = change(tensors[name])
            save_file(tensors, path, metadata={"format": "pt"})


EXPERT = "model.layers.1.mlp.experts.0"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Bundles by their row of the table, not to be changed."""
    source = make_checkpoint(tmp_path_factory.mktemp("source") / "source", WHOLE_TILES)

    @cache
    def bundle(row: str) -> Path:
        return write_row(source, tmp_path_factory.mktemp("row") / "out", row)

    return bundle


@pytest.mark.parametrize(
    ("row", "name", "change"),
    [
        ("int8", f"{EXPERT}.up_proj.weight_shape", lambda t: t + 1),
        ("int4", f"{EXPERT}.up_proj.weight_shape", lambda t: t.flip(0) * 2),
        ("int8", f"{EXPERT}.up_proj.weight_scale", torch.zeros_like),
        ("int4", f"{EXPERT}.up_proj.weight_scale", lambda t: t * torch.nan),
        ("w4afp8", f"{EXPERT}.up_proj.weight_scale_inv", torch.neg),
        ("w4afp8", f"{EXPERT}.w1.input_scale", torch.zeros_like),
        ("wint4, vLLM", "model.layers.0.mlp.up_proj.weight_scale", lambda t: t / 0),
        ("int8", f"{EXPERT}.up_proj.weight_scale", lambda t: t.float()),
        ("w4afp8", f"{EXPERT}.w1.input_scale", lambda t: t.repeat(2)),
    ],
)
def test_damaged_forms_are_refused(
    row: str,
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    rows: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    bundle = Path(shutil.copytree(rows(row), tmp_path / "out"))
    rewrite(bundle / "main", name, change)
    with pytest.raises(InvalidInputError):
        load_model(bundle, LoadOptions())


def test_a_quantization_nobody_knows_is_refused(pristine: Path, tmp_path: Path) -> None:
    assert export(pristine, tmp_path / "out", "--link", "copy").code == 0
    change = {"quantization_config": {"quant_method": "hqq"}}
    edit_json(tmp_path / "out/mtp/config.json", lambda c: c.update(change))
    with pytest.raises(UnsupportedError, match="hqq"):
        load_model(tmp_path / "out", LoadOptions())
