"""Codes of GGUF's Q8_0, Q4_0 and MXFP4, of nvfp4, mxfp4 and mxfp8, multiplied as they are stored
by compiled kernels."""

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
    "q8_0": gguf("q8_0"),
    "q4_0": gguf("q4_0"),
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
    outputs = [
        [output.token_ids for output in llm.generate(PROMPTS, params)]
        for llm in (LLM(place, speculate_method="none"), LLM(place))
        for params in [SamplingParams(max_tokens=8, ignore_eos=True)]
    ]
    assert outputs[0] == outputs[1]
