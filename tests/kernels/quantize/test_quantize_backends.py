"""All backends give the same bits, however many threads run them."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import pytest
from quantize_cases import disagreements, fp8_source, gaussian, operations, same_bits, sources

from cases import nightly_but
from mtp_kernels.quantize import BACKENDS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
SHAPES = [(260, 384), (7, 256), (129, 96), (5, 130), (1, 1), (3, 36), (130, 4)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cpu_is_the_reference_to_the_bit(shape: tuple[int, int]) -> None:
    assert disagreements([shape], "cpu") == []


@pytest.mark.parametrize("shapes", nightly_but([1], (1, 4)))
def test_triton_interpreted_is_the_reference_to_the_bit(shapes: int) -> None:
    pytest.importorskip("triton")
    path = os.pathsep.join(str(folder) for folder in (HERE, ROOT / "kernels"))
    run = subprocess.run(
        [sys.executable, HERE / "quantize_interpreted.py", str(shapes)],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(512, 7168), *SHAPES], ids=str)
def test_triton_on_a_gpu_is_the_reference_to_the_bit(shape: tuple[int, int]) -> None:
    """A test each: kernels are compiled for what is known of a size, and the reference is slow."""
    assert disagreements([shape], "triton_cuda", "cuda") == []


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_threads_do_not_change_the_bits(workers: int) -> None:
    cases = [
        run
        for seed in range(4)
        for source in (gaussian(140, 512, seed), fp8_source(140, 512, seed=seed))
        for _, run in operations(source, 512)
    ]
    alone = [run("cpu") for run in cases]
    with ThreadPoolExecutor(workers) as pool:
        together = list(pool.map(lambda run: run("cpu"), cases))
    assert all(same_bits(one, other) for one, other in zip(together, alone, strict=True))


def test_strided_sources_count_as_what_they_show() -> None:
    weights = gaussian(256, 128)
    for (_, run), (_, expected) in zip(
        operations(weights.T, 256), operations(weights.T.contiguous(), 256), strict=True
    ):
        assert same_bits(run("cpu"), expected("cpu"))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_offers_every_operation(name: str) -> None:
    if name == "triton_cuda":
        pytest.importorskip("triton")
    module = import_module(BACKENDS[name])
    for function in (
        "supports",
        "dequantize_fp8_block",
        "quantize_fp8_block",
        "quantize_int8_channel",
        "quantize_int4_group",
        "dequantize_int8_channel",
        "dequantize_int4_group",
    ):
        assert callable(getattr(module, function))


def test_auto_is_the_cpu_backend_in_main_memory() -> None:
    source = sources(7, 256)["fp8"]
    for _, run in operations(source, 256):
        assert same_bits(run("auto"), run("cpu"))
