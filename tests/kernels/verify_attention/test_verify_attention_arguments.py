"""The one public function: what it refuses, what it imports, what "auto" means."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import Case, build, check

from mtp_kernels.verify_attention import BACKENDS, make_workspace, verify_attention

CASE = Case((2, 1), (20, 5), heads=2)


def changed(name: str, value: Any) -> dict[str, Any]:
    return build(CASE) | {name: value}


@pytest.mark.parametrize(
    "backend", ["auto", *sorted(BACKENDS.keys() - {"ascend_npu", "triton_cuda"})]
)
def test_every_cpu_backend_agrees(backend: str) -> None:
    check(CASE, *verify_attention(**build(CASE), backend=backend))


def test_every_backend_can_be_imported_by_name() -> None:
    for module in BACKENDS.values():
        __import__(module)


@pytest.mark.parametrize("name", ["q_latent", "q_rope", "kv_cache", "page_table", "kv_lens"])
def test_wrong_dtypes_name_the_tensor(name: str) -> None:
    wrong = build(CASE)[name].to(torch.int64)
    with pytest.raises(TypeError, match=f"^{name}: expected dtype .*, found torch.int64"):
        verify_attention(**changed(name, wrong))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "q_rope",
            torch.zeros(3, 1, 16),
            r"q_rope: expected shape \[3, 2, r\], found",
        ),
        ("kv_cache", torch.zeros(9, 16, 47), r"expected shape \[pages, page, 48\]"),
        ("kv_lens", torch.zeros(3, dtype=torch.int32), r"expected shape \[2\], found \[3\]"),
        ("q_latent", torch.zeros(32, 2, 3).mT.transpose(0, 1), "q_latent: expected contiguous"),
        ("kv_scale", torch.ones(9, 16), "expected one with a float8_e4m3fn kv_cache"),
        ("cu_q", torch.tensor([0, 4, 3], dtype=torch.int32), r"cu_q: .* found \[0, 4, 3\]"),
        ("cu_q", torch.tensor([0, 2, 4], dtype=torch.int32), r"expected 0 rising to 3"),
        ("kv_lens", torch.tensor([65, 1], dtype=torch.int32), r"kv_lens: expected 0 to 64"),
        ("kv_lens", torch.tensor([-1, 1], dtype=torch.int32), r"kv_lens: expected 0 to 64"),
        ("kv_lens", torch.tensor([33, 1], dtype=torch.int32), r"found 2147483647 at \[0, 2\]"),
        (
            "backend",
            "gpu",
            r"expected auto or one of \['ascend_npu', 'compiled_cpu', 'reference', 't",
        ),
    ],
)
def test_wrong_values_say_what_was_expected(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verify_attention(**changed(name, value))


def test_no_tensor_is_no_tensor() -> None:
    with pytest.raises(TypeError, match="kv_lens: expected a tensor, found list"):
        verify_attention(**changed("kv_lens", [1, 2]))


def test_triton_refuses_cpu_tensors() -> None:
    with pytest.raises(ValueError, match="expected tensors on a CUDA device, found cpu"):
        verify_attention(**build(CASE), backend="triton_cuda")


def test_compiled_cpu_computes_in_float32() -> None:
    arguments = build(replace(CASE, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="expected float32 queries .* found torch.bfloat16"):
        verify_attention(**arguments, backend="compiled_cpu")


def test_a_small_workspace_is_refused() -> None:
    workspace = make_workspace(
        batch=1, queries=1, max_q_len=1, kv_tokens=16, heads=1, page=16, dtype=torch.float32,
        latent=32, rope=16,
    )  # fmt: skip
    with pytest.raises(ValueError, match="workspace: expected at least"):
        verify_attention(**build(CASE), workspace=workspace)
    with pytest.raises(ValueError, match="workspace sizes: expected all at least 1"):
        make_workspace(
            batch=0, queries=1, max_q_len=1, kv_tokens=16, heads=1, page=16, dtype=torch.float32
        )


def test_an_empty_batch_is_fine() -> None:
    out, lse = verify_attention(**build(Case((), (), heads=2)))
    assert out.shape == (0, 2, 32) and lse.shape == (0, 2)
