"""The Triton kernels compile for Hopper without a device, and keep everything in registers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from mtp_kernels.quantize import triton_cuda, triton_rows  # noqa: E402

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
TYPES = {
    **dict.fromkeys(("signal", "error"), "*fp64"),
    **dict.fromkeys(("max_error", "scale", "block_scale", "factors"), "*fp32"),
    **dict.fromkeys(("codes", "packed", "pairs"), "*u8"),
    **dict.fromkeys(("n", "k", "group_size"), "i32"),
    "power_of_two": "i1",
}
ROWS = {"ROWS": triton_cuda.ROWS}
CASES = [
    *(
        (kernel, {**ROWS, **constants}, {"source": source})
        for source in ("*u8", "*u16", "*fp32")
        for kernel, constants in (
            ("quantize_int8_channel", {}),
            ("quantize_int4_group", {"factor_count": 1, "group_size": 128}),
        )
    ),
    ("quantize_int4_group", {**ROWS, "factor_count": 10, "group_size": 32}, {"source": "*u8"}),
    ("quantize_int4_group", {**ROWS, "factor_count": 10, "group_size": 128}, {"source": "*u8"}),
    ("block_scales", {}, {"source": "*u16"}),
    ("quantize_fp8_block", ROWS, {"source": "*u16"}),
    ("dequantize_fp8_block", ROWS, {"out": "*u16"}),
    ("dequantize_fp8_block", ROWS, {"out": "*fp32"}),
    ("dequantize_int8_channel", ROWS, {"out": "*u16"}),
    ("dequantize_int4_group", ROWS, {"out": "*u16"}),
]


@pytest.mark.parametrize(("kernel", "constants", "types"), CASES)
def test_compiles_for_hopper_without_spills(
    kernel: str, constants: dict[str, int], types: dict[str, str], tmp_path: Path
) -> None:
    function = getattr(triton_rows, kernel)
    signature = {
        name: "constexpr" if name in constants else types.get(name) or TYPES[name]
        for name in function.arg_names
    }
    compiled = triton.compile(
        ASTSource(function, signature=signature, constexprs=constants),
        target=GPUTarget("cuda", 90, 32),
        options=triton_cuda.OPTIONS,
    )
    assert "fma." not in compiled.asm["ptx"] and ".ftz" not in compiled.asm["ptx"]
    assert "div.full" not in compiled.asm["ptx"] and "div.approx" not in compiled.asm["ptx"]
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run(
        [CUOBJDUMP, "-res-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    # Triton 3.6 keeps two registers of the largest kernel on the stack.
    assert ("STACK:0 " in usage or "STACK:8 " in usage) and "LOCAL:0 " in usage, usage
    # Nor does the assembler contract, in the energies; divisions are made of FFMA.
    code = subprocess.run(
        [CUOBJDUMP, "-sass", cubin], capture_output=True, text=True, check=True
    ).stdout
    assert "DFMA" not in code
