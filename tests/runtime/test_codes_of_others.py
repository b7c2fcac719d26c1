"""Codes of GGUF's blocks, of nvfp4, mxfp4 and mxfp8, and of others' integers with zero points,
multiplied as they are stored by compiled kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.load_plan import held_bytes
from cases import UNQUANTIZED, make_checkpoint, nightly_but, quantize
from gguf_files import gguf_model
from mtp_runtime.llm import LLM
from mtp_runtime.models.load import LoadOptions, load_model, open_model
from mtp_runtime.sampling import SamplingParams
from quantized_by_others import write
from runtime.harness import Walk, prompts_of

PROMPTS = prompts_of([9, 40, 3], UNQUANTIZED["vocab_size"])
TABLES = 64 << 20


def bundle(scheme: str) -> Callable[[Path, Path], Path]:
    def write(source: Path, place: Path) -> Path:
        assert quantize(source, place, "--base-quant", scheme, "--mtp-quant", scheme).code == 0
        return place

    return write


def gguf(kind: str) -> Callable[[Path, Path], Path]:
    def write(source: Path, place: Path) -> Path:
        return gguf_model(source, kind).write(place.with_suffix(".gguf"))

    return write


MADE = {
    **{kind: gguf(kind) for kind in ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1")},
    "gguf mxfp4": gguf("mxfp4"),
    "mxfp4": bundle("weight_only_mxfp4"),
    "mxfp8": bundle("a8w8_mxfp8"),
    "nvfp4": bundle("weight_only_nvfp4"),
}


@pytest.mark.parametrize("name", nightly_but(["q4_0", "nvfp4"], MADE))
def test_codes_are_multiplied_as_they_are_stored(name: str, tmp_path: Path) -> None:
    place = MADE[name](make_checkpoint(tmp_path / "source", UNQUANTIZED), tmp_path / "made")
    options = LoadOptions()
    model = load_model(place, options).model
    dense = load_model(place, LoadOptions(dequantize_at_load=False)).model
    found, expected = (Walk(one).feed(PROMPTS[1])[0] for one in (model, dense))
    assert (found - expected).norm() < 1e-5 * expected.norm()
    plan = open_model(place, options, packs=True).memory_plan(options)
    assert plan.dense_bytes < 0.2 * plan.weight_bytes  # kv_b_proj of GGUF files, put together
    assert plan.weight_bytes <= held_bytes([model]) <= plan.weight_bytes + TABLES
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    outputs = [
        [output.token_ids for output in llm.generate(PROMPTS, params)]
        for llm in (LLM(place, speculate_method="none"), LLM(place))
    ]
    assert outputs[0] == outputs[1]


OTHERS = ("awq", "gptq, asymmetric", "auto-round, 8 bits, whole rows", "gptq, permuted")


@pytest.mark.parametrize("name", nightly_but(["awq"], OTHERS))
def test_zero_points_are_multiplied_as_they_are_stored(name: str, tmp_path: Path) -> None:
    """Those of permuted groups become dense, as they are planned."""
    place, options = tmp_path / "made", LoadOptions()
    write(make_checkpoint(tmp_path / "source", UNQUANTIZED), place, name)
    model = load_model(place, options).model
    dense = load_model(place, LoadOptions(dequantize_at_load=False)).model
    found, expected = (Walk(one).feed(PROMPTS[1])[0] for one in (model, dense))
    assert (found - expected).norm() < 1e-5 * expected.norm()
    plan = open_model(place, options, packs=True).memory_plan(options)
    assert plan.experts is not None  # embedding and head are unquantized
    assert (plan.experts.dense_bytes == 0) == (name != "gptq, permuted")
    assert plan.weight_bytes <= held_bytes([model]) <= plan.weight_bytes + TABLES
    llm, params = (
        LLM(place, speculate_method="none"),
        SamplingParams(max_tokens=8, ignore_eos=True),
    )
    batch = [output.token_ids for output in llm.generate(PROMPTS, params)]
    assert batch == [llm.generate([prompt], params)[0].token_ids for prompt in PROMPTS]
