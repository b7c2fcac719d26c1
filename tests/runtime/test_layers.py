"""Layers that can be computed in several ways, with equal results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from mtp_checkpoints.formats import unquantized
from mtp_kernels.cpu.team import Team
from mtp_runtime.layers import moe
from mtp_runtime.layers.linear import Linear
from runtime.harness import Walk, load, prompts_of

F32 = torch.float32


@pytest.mark.parametrize("rows", [1, 2, 7, 100])
def test_pairs_sorted_by_expert(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    picked = torch.rand(rows, 8, generator=generator).topk(3, dim=1)[1]
    order = moe.sort_by_expert(picked)
    sorted_experts: list[int] = []
    for expert, end in zip(order.experts, order.ends, strict=True):
        sorted_experts += [expert] * (end - len(sorted_experts))
    assert sorted_experts == sorted(picked.flatten().tolist())
    assert picked.flatten()[order.pairs].tolist() == sorted_experts
    assert order.pairs.sort()[0].equal(torch.arange(3 * rows))


@dataclass(frozen=True)
class RandomRouter:
    """Picks three of the first five experts for every row."""

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.rand(len(x), 5, generator=torch.Generator().manual_seed(1))
        weights, picked = scores.topk(3, dim=1)
        return picked, weights


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("shared", [0, 2])
def test_experts_in_memory_are_mixed_row_by_row(
    monkeypatch: pytest.MonkeyPatch, rows: int, shared: int
) -> None:
    monkeypatch.setattr(moe, "MLP_ROWS", 7)
    generator = torch.Generator().manual_seed(0)
    mlps = tuple(
        moe.Mlp(
            Linear.build(unquantized(torch.randn(2 * 6, 10, generator=generator)), F32, True),
            Linear.build(unquantized(torch.randn(10, 6, generator=generator)), F32, True),
        )
        for _ in range(5 + shared)
    )
    x = torch.randn(rows, 10, generator=generator)
    mixed = moe.Moe(RandomRouter(), moe.HeldExperts(mlps), shared)
    assert mixed.routed_experts == 5
    picked, weights = RandomRouter()(x)
    for row, found in enumerate(mixed(x)):
        expected = torch.zeros(10)
        for mlp in mlps[5:]:
            expected = expected + mlp(x[row : row + 1])[0]
        for expert, weight in zip(picked[row].tolist(), weights[row], strict=True):
            expected = expected + weight * mlps[expert](x[row : row + 1])[0]
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


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
