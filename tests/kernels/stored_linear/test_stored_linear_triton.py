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

from benchmarks.common.compiled_resources import inner_loop, resources  # noqa: E402
from cases import nightly_but  # noqa: E402
from mtp_kernels.stored_linear import linear, triton_cuda  # noqa: E402
from mtp_kernels.stored_linear.triton_compile import compile_product  # noqa: E402
from mtp_kernels.stored_linear.triton_kernels import (  # noqa: E402
    add_shares_kernel,
    product_kernel,
)

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
        if found["spilled_bytes"]:  # some numbers for the end, over the loop
            assert found["spilled_bytes"] <= 16, found
            assert not [line for line in inner_loop(kernel) if "LDL" in line or "STL" in line]
        assert found["shared_bytes"] <= SHARED_BYTES, found
        tensor_cores = found["wgmma"] + found["mma"] + found["tcgen05"]
        assert (tensor_cores > 0) == (kind != "fp32"), found
        assert ("e4m3x2" in kernel.asm["ptx"]) == (form.startswith("fp8") and capability >= 89)


@pytest.mark.parametrize("form", ["fp8 blocks", "fp8 channels", "int8", "int4 in 128", "w4afp8"])
def test_few_rows_read_weights_in_the_widest_loads_and_convert_them_at_full_rate(form: str) -> None:
    """A decode step is bound by them. Conversions from integers, and from float16 to bfloat16,
    have a fraction of the other instructions' rate."""
    launch = triton_cuda.LAUNCHES["16 bit"][0]
    target, weight = GPUTarget("cuda", 90, 32), FORMS[form](values(256, 256))
    kernel = compile_product(target, weight, launch, dtype=torch.bfloat16, experts=0)
    loop = inner_loop(kernel)
    loads = [line.split("LDGSTS.")[1].split()[0] for line in loop if "LDGSTS." in line]
    step = triton_cuda.step_of(triton_cuda.codes_of(weight, target), launch)
    stored_bytes = launch.columns * step // (2 if "4" in form else 1)
    loaded_bytes = stored_bytes + launch.rows * step * 2
    assert loads.count("E.BYPASS.128") >= loaded_bytes // (32 * launch.warps * 16), loads
    assert not [line for line in loads if "64" in line]
    assert not [line for line in loop if "I2F" in line or "F2F." in line]


def test_a_batch_s_rows_choose_no_other_compilation() -> None:
    for kernel, names in ((product_kernel, ["count", "steps"]), (add_shares_kernel, ["size"])):
        assert [one.name for one in kernel.params if one.do_not_specialize] == names


@pytest.mark.parametrize(
    ("shape", "experts", "shares"),
    [
        ((2112, 7168), 0, 8),  # the projections down, which 33 tiles make
        ((7168, 16384), 0, 4),
        ((24576, 1536), 0, 1),
        ((4096, 7168), 256, 1),
        ((512, 7168), 256, 8),  # an eighth of each expert
    ],
)
def test_columns_are_shared_where_tiles_are_too_few(
    shape: tuple[int, int], experts: int, shares: int
) -> None:
    """On 132 processors; prompts fill them by their rows."""
    codes = torch.empty(shape, dtype=torch.uint8, device="meta")
    stored = triton_cuda.Codes(codes, None, shape[0], "fp8", 0, 128, 128)
    few, *many = triton_cuda.LAUNCHES["16 bit"]
    steps = triton_cuda.steps_of(stored, few, shape[1], experts, 132)
    assert -(-shape[1] // (128 * steps)) == shares
    for launch in many:
        assert 128 * triton_cuda.steps_of(stored, launch, shape[1], experts, 132) >= shape[1]


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
