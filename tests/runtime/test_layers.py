"""Layers with more than one way to the same result."""

from __future__ import annotations

import pytest
import torch

from mtp_runtime.layers import moe
from mtp_runtime.layers.norm import RmsNorm


@pytest.mark.parametrize("limit", [0, 1 << 20])
@pytest.mark.parametrize("rows", [2, 7, 100])
def test_pairs_sorted_by_expert(monkeypatch: pytest.MonkeyPatch, limit: int, rows: int) -> None:
    monkeypatch.setattr(moe, "MAX_PAIRS_IN_PYTHON", limit)
    generator = torch.Generator().manual_seed(rows)
    picked = torch.rand(rows, 8, generator=generator).topk(3, dim=1)[1]
    order = moe.sort_by_expert(picked, 8)
    sorted_experts: list[int] = []
    for expert, end in order.ends:
        sorted_experts += [expert] * (end - len(sorted_experts))
    assert sorted_experts == sorted(picked.flatten().tolist())
    assert torch.tensor(sorted_experts)[order.places].equal(picked.flatten())
    assert order.rows[order.places].equal(torch.arange(rows).repeat_interleave(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_norm_is_torchs(dtype: torch.dtype, size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(5, 96, generator=generator) * size).to(dtype)
    weight = torch.randn(96, generator=generator)
    expected = torch.rms_norm(x.float(), (96,), weight, 1e-6)
    found = RmsNorm.build(weight, 1e-6)(x)
    assert found.dtype == dtype
    tolerance = 1e-6 if dtype is torch.float32 else 1e-2
    assert torch.allclose(found.float(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(RmsNorm.build(weight, 1e-6)(torch.zeros(1, 96)), torch.zeros(1, 96))
