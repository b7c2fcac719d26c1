"""Products with stored weights in Triton: interpreted, compiled for devices that are not here, and
on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from stored_cases import CASES, DENSE, FORMS, damaged_cases, values, wrong_cases

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402

from benchmarks.compiled_resources import resources  # noqa: E402
from cases import nightly_but  # noqa: E402
from mtp_kernels.stored_linear import linear, triton_cuda  # noqa: E402
from mtp_kernels.stored_linear.triton_compile import compile_product  # noqa: E402

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
# The least that GPUs from compute capability 8.0 on have for a program, those of 8.6 and 12.0.
SHARED_BYTES = 101_376
CAPABILITIES = [80, 90, 100]


@pytest.mark.parametrize(
    ("conversion", "cases"),
    nightly_but([("bits", "few")], [("bits", "few"), ("bits", "all"), ("device", "all")]),
)
@pytest.mark.timeout(1200)
def test_interpreted_products_are_those_of_the_dense_matrix(conversion: str, cases: str) -> None:
    path = os.pathsep.join(str(folder) for folder in (HERE, ROOT / "kernels"))
    run = subprocess.run(
        [sys.executable, HERE / "stored_cases.py", conversion, cases],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr


LAUNCHES = [
    (kind, launch, form)
    for kind, launches in triton_cuda.LAUNCHES.items()
    for launch in launches
    for form in ("fp8 blocks", "fp8 channels", "int8", "int4 in 32", "int4 in 128")
]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("kind", "launch", "form"),
    nightly_but(
        [case for case in LAUNCHES if case[1].rows == 16 and case[2] == "fp8 blocks"], LAUNCHES
    ),
)
def test_every_launch_compiles_without_spills(
    capability: int, kind: str, launch: triton_cuda.Launch, form: str
) -> None:
    weight = FORMS[form](values(256, 256))
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    target = GPUTarget("cuda", capability, 32)
    for experts in (0, 256):
        kernel = compile_product(target, weight, launch, dtype=dtype, experts=experts)
        found = resources(kernel)
        assert found["spilled_bytes"] == 0, found
        assert found["shared_bytes"] <= SHARED_BYTES, found
        tensor_cores = found["wgmma"] + found["mma"] + found["tcgen05"]
        assert (tensor_cores > 0) == (kind != "fp32"), found
        assert ("e4m3x2" in kernel.asm["ptx"]) == (form.startswith("fp8") and capability >= 89)


DENSE_LAUNCHES = [
    (kind, launch, form)
    for kind, form in (("16 bit", "bf16"), ("fp32", "float32"), ("fp32", "bf16"))
    for launch in triton_cuda.LAUNCHES[kind]
]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("kind", "launch", "form"), nightly_but([DENSE_LAUNCHES[2]], DENSE_LAUNCHES)
)
def test_dense_experts_compile_without_spills(
    capability: int, kind: str, launch: triton_cuda.Launch, form: str
) -> None:
    target, weight = GPUTarget("cuda", capability, 32), DENSE[form](values(256, 256))
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    found = resources(compile_product(target, weight, launch, dtype=dtype, experts=256))
    assert found["spilled_bytes"] == 0, found
    assert found["shared_bytes"] <= SHARED_BYTES, found


@pytest.mark.parametrize("form", nightly_but(["fp8 blocks"], ["fp8 blocks", "int4 in 128"]))
def test_it_compiles_for_amd(form: str) -> None:
    """The largest tile, into the 64 KB that a program has there; fp8 by its bits."""
    target, launch = GPUTarget("hip", "gfx942", 64), triton_cuda.LAUNCHES["16 bit"][-1]
    kernel = compile_product(
        target, FORMS[form](values(256, 256)), launch, dtype=torch.bfloat16, experts=256
    )
    assert "mfma" in kernel.asm["amdgcn"] and kernel.metadata.shared <= 65_536


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", FORMS)
def test_products_on_a_gpu_are_those_of_the_dense_matrix(form: str, dtype: torch.dtype) -> None:
    cases = [case for case in CASES if case[0] == form]
    assert cases and wrong_cases(cases, [dtype], "cuda", "triton_cuda") == []


@pytest.mark.cuda
def test_damaged_codes_on_a_gpu_are_not_hidden() -> None:
    assert damaged_cases("cuda") == []


@pytest.mark.cuda
def test_calls_can_be_captured_in_a_graph() -> None:
    weight = FORMS["int4 in 128"](values(64, 256))
    on_gpu = type(weight)(**{name: tensor.cuda() for name, tensor in vars(weight).items()})
    x = values(4, 256).cuda()
    linear(x, on_gpu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear(x, on_gpu)
    x.copy_(values(4, 256, seed=9))
    graph.replay()
    torch.testing.assert_close(y, linear(x, on_gpu))


def test_triton_leaves_the_cpu_to_others() -> None:
    with pytest.raises(ValueError, match="does not multiply torch.float32 rows on cpu"):
        linear(values(2, 256), FORMS["int8"](values(8, 256)), backend="triton_cuda")
