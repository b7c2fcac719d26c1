"""Compilation of Triton kernels for GPUs that need not be here."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import MockTensor, create_function_from_signature


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
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    examples = {name: _example(kind) for name, kind in types.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Triton 3.9 announces a default of 3.10
        # What Triton itself makes of a launch: its cache tells kernels apart by all of it.
        bound, kinds, rest = bind(**examples, **constants, **options)
        parsed, *forms = kernel._pack_args(backend, dict(options), bound, kinds, rest)
        return triton.compile(ASTSource(kernel, *forms), target=target, options=parsed.__dict__)


def _example(kind: str) -> object:
    """Return an argument of a type."""
    if kind.startswith("*"):
        return MockTensor(kind[1:])
    return {"i32:16": 16, "i32": 17, "fp32": 0.5}[kind]
