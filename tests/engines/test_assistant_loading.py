"""vLLM's class of Gemma-4's assistants loads every tensor of them, beside their target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_runs import process
from safetensors.torch import load_file
from test_resolvers import FUSED

from cases import quantize, run_program
from mtp_checkpoints.families import family_of
from mtp_checkpoints.tensors.reader import Checkpoint
from runtime.gemma import CLASSES, VOCAB, write_assistant, write_target

HEADS = {"head_dim": 32, "global_head_dim": 64}  # that vLLM's attention has on a CPU
IDS = "masked_embedding.token_ordering"  # no parameter
PADDED = -VOCAB % 64  # rows of zeros of the embedding, as vLLM makes it


def test_vllm_loads_every_tensor(tmp_path: Path) -> None:
    job: dict[str, object] = {}
    for kind in CLASSES:
        target, assistant = tmp_path / kind / "target", tmp_path / kind / "assistant"
        write_target(target, kind, **HEADS)
        write_assistant(assistant, kind, **HEADS)
        job[kind] = {"main": str(target), "draft": str(assistant), "method": "mtp"}
    script = Path(__file__).with_name("vllm_drafts.py")
    status, log, result = process(script, job, tmp_path / "vllm")
    assert status == 0, log[-3000:]
    for kind, found in json.loads(result.read_text()).items():
        folder = tmp_path / kind / "assistant"
        assert (found["class"], found["untouched"]) == ("Gemma4MTP", [])
        tensors = load_file(folder / "model.safetensors")
        spec = family_of(json.loads((folder / "config.json").read_text()))
        assert tensors.keys() == spec.tensors.keys()
        no_parameters = {IDS, *(name for name in tensors if name.endswith("layer_scalar"))}
        stored = sum(
            tensor.numel() for name, tensor in tensors.items() if name not in no_parameters
        )
        assert found["elements"] == stored + PADDED * spec.facts.hidden


PLAIN = {"pre_projection", "post_projection", "embed_tokens", "lm_head"} | {
    "per_layer_input_gate",
    "per_layer_projection",
    "per_layer_model_projection",
    "embed_tokens_per_layer",
}
PAIRS = {
    "fp8": ("a8w8_fp8", "a8w8_fp8"),
    "int8": ("weight_only_int8", "weight_only_int8"),
    "apart": ("a8w8_fp8", "bf16"),
}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, result = tmp_path_factory.mktemp("bundles"), {}
    for kind in CLASSES:
        own = folder / kind
        write_target(own / "target", kind, **HEADS)
        write_assistant(own / "assistant", kind, **HEADS)
        pair = ("--main", own / "target", "--mtp", own / "assistant")
        assert run_program("graft", *pair, "--output-dir", own / "bundle").code == 0
        for name, (base, mtp) in PAIRS.items():
            result[f"{name} of {kind}"] = output = own / name
            options = ("--base-quant", base, "--mtp-quant", mtp, "--allow-untested-pair")
            made = quantize(own / "bundle", output, *options, "--target", "vllm")
            assert made.code == 0, made.err
    return result


def test_vllm_builds_every_linear_as_it_is_stored(bundles: dict[str, Path], tmp_path: Path) -> None:
    """By the config.json of either folder, under vLLM's own names of their modules."""
    job: dict[str, object] = {
        name: {"main": str(folder / "main"), "mtp": str(folder / "assistant")}
        for name, folder in bundles.items()
    }
    script = Path(__file__).with_name("vllm_modules.py")
    status, log, result = process(script, job, tmp_path / "vllm")
    assert status == 0, log[-3000:]
    for name, found in json.loads(result.read_text()).items():
        for part, noted in found.items():
            folder = bundles[name] / ("main" if part == "main" else "assistant")
            codes, plain = (
                {
                    own
                    for one in noted
                    if (one["method"] == "unquantized") == is_plain
                    for last in [one["module"].rpartition(".")[2]]
                    for own in FUSED.get(last, (last,))
                }
                for is_plain in (False, True)
            )
            quantized = _quantized(folder)
            assert codes - {"experts"} == quantized and codes.isdisjoint(PLAIN), (name, part)
            if part == "mtp" and quantized:
                assert {"pre_projection", "post_projection"} <= plain, name


def _quantized(folder: Path) -> set[str]:
    """Last components of the linears that are in codes."""
    scales = ("weight_scale", "weight_scale_inv")
    names = (name.split(".") for name in Checkpoint.open(folder).tensors)
    return {parts[-2] for parts in names if parts[-1] in scales}
