"""Layers that can be computed in several ways, with equal results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mtp_kernels.cpu.team import Team
from mtp_runtime.layers import moe
from runtime.harness import Walk, load, prompts_of


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


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_bits(small: Path, threads: int) -> None:
    """A team of any size computes what one thread does, prefill and steps."""
    model = load(small)
    (tokens,) = prompts_of([90], 96)
    expected = Walk(model).feed(tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Team, "threads_for", staticmethod(lambda multiplications: threads))
        walk = Walk(model)
        parts = [walk.feed(part) for part in (tokens[:70], tokens[70:89], tokens[89:])]
    for index, tensor in enumerate(expected):
        assert torch.equal(torch.cat([part[index] for part in parts]), tensor)
