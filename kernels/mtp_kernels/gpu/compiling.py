"""Compilation of Triton kernels for GPUs that need not be here."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def compile_for(
    target: GPUTarget,
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, object],
    options: Mapping[str, object],
) -> Any:
    """Compile a kernel as a launch with aligned arguments would, so that the launch finds it.

    types: of the run-time arguments, as Triton writes them; a "*" begins a pointer, and "i32:16"
    is an integer divisible by 16. constants are the other arguments.
    """
    names = kernel.arg_names
    aligned = [name for name, kind in types.items() if kind.startswith("*") or ":" in kind]
    source = ASTSource(
        kernel,
        {
            name: "constexpr" if name in constants else types[name].partition(":")[0]
            for name in names
        },
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Triton 3.9 announces a default of 3.10
        return triton.compile(source, target=target, options=dict(options))
