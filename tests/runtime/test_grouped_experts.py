"""Routed experts multiplied in one call per matrix: the sums of one expert after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from mtp_checkpoints.formats import FORMATS, EncodedWeight, FormatOptions, unquantized
from mtp_runtime.layers import grouped, moe
from mtp_runtime.layers.grouped import GroupedExperts
from mtp_runtime.layers.linear import Linear, Weight, stack
from mtp_runtime.layers.moe import HeldExperts, Mlp, Moe

EXPERTS, SHARED, HIDDEN, INNER = 5, 1, 256, 128
STORAGES = [
    *("fp8_block", "fp8_channel", "int8_channel", "int4_group"),
    "bf16",
]


def stored(storage: str, rows: int, columns: int, generator: torch.Generator) -> Weight:
    weights = torch.randn(rows, columns, generator=generator) * 0.1
    if storage == "bf16":
        return unquantized(weights)
    if storage == "fp8_channel":
        from mtp_checkpoints.formats import Fp8Channel

        scale = weights.abs().amax(dim=1, keepdim=True) / 448
        return EncodedWeight(Fp8Channel(), (weights / scale).to(torch.float8_e4m3fn), scale)
    form = FORMATS[storage].of_options(FormatOptions())
    tensors, _ = form.quantize(weights, "minmax")
    return EncodedWeight(form, *tensors[:2])


def mlp(storage: str, generator: torch.Generator) -> Mlp:
    gate, up = (stored(storage, INNER, HIDDEN, generator) for _ in range(2))
    return Mlp(Linear(stack([gate, up])), Linear(stored(storage, HIDDEN, INNER, generator)))


def held(storage: str) -> HeldExperts:
    generator = torch.Generator().manual_seed(0)
    return HeldExperts(tuple(mlp(storage, generator) for _ in range(EXPERTS + SHARED)))


@dataclass(frozen=True)
class LopsidedRouter:
    """Picks three of the first four experts, the fourth for few rows; never the last."""

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        scores = torch.rand(len(x), EXPERTS, generator=generator)
        scores[:, 3] *= 0.5
        scores[:, 4] = 0.0
        weights, picked = scores.topk(3, dim=1)
        return picked, weights


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("rows", [1, 23])
def test_sums_are_those_of_one_expert_after_the_other(
    monkeypatch: pytest.MonkeyPatch, storage: str, rows: int
) -> None:
    monkeypatch.setattr(grouped, "GROUPED_ROWS", 10)
    experts = held(storage)
    together = GroupedExperts.of(experts, EXPERTS)
    assert together is not None and len(together) == EXPERTS + SHARED
    x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(2))
    expected = Moe(LopsidedRouter(), experts, SHARED)(x)
    found = Moe(LopsidedRouter(), together, SHARED)(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    alone = Moe(LopsidedRouter(), together, SHARED)(x[:1])
    torch.testing.assert_close(alone, found[:1], rtol=1e-5, atol=1e-5)


def test_an_expert_shares_the_memory_of_all() -> None:
    experts = held("int8_channel")
    together = GroupedExperts.of(experts, EXPERTS)
    assert together is not None
    x = torch.randn(3, HIDDEN)
    for one, other in zip(experts.every(), together.every(), strict=True):
        assert torch.equal(one(x), other(x))
    part = together.down.one(2).codes
    assert part.data_ptr() == together.down.all.codes[2].data_ptr()


def test_experts_that_are_not_stored_alike_stay_apart() -> None:
    mixed = [*held("int8_channel").held]
    for other in ("fp8_block", "bf16"):
        mixed[1] = held(other).held[1]
        assert GroupedExperts.of(HeldExperts(tuple(mixed)), EXPERTS) is None
    dense = held("bf16").held
    joined = Mlp(Linear(unquantized(torch.zeros(2 * INNER, HIDDEN))), dense[0].down)
    assert GroupedExperts.of(HeldExperts((joined, *dense)), EXPERTS) is None
    halves = Mlp(dense[0].gate_up, Linear(unquantized(torch.zeros(HIDDEN, INNER).bfloat16())))
    assert GroupedExperts.of(HeldExperts((halves, *dense)), EXPERTS) is None


def test_experts_that_are_trained_stay_apart() -> None:
    """Their gradients go to each of them."""
    dense = held("bf16")
    assert GroupedExperts.of(dense, EXPERTS) is not None
    for mlp in dense.held:
        for weight in (*mlp.gate_up.weight.parts, mlp.down.weight):  # type: ignore[attr-defined]
            weight.codes.requires_grad_()
    assert GroupedExperts.of(dense, EXPERTS) is None


def test_gate_and_up_may_be_one_matrix() -> None:
    apart = held("bf16")
    joined = HeldExperts(
        tuple(
            Mlp(
                Linear.build(mlp.gate_up.weight, torch.float32, keep_dense=True),
                Linear.build(mlp.down.weight, torch.float32, keep_dense=True),
            )
            for mlp in apart.held
        )
    )
    x = torch.randn(9, HIDDEN)
    found, expected = (GroupedExperts.of(experts, EXPERTS) for experts in (joined, apart))
    assert found is not None and expected is not None
    assert (len(found.gate_up), len(expected.gate_up)) == (1, 2)
    torch.testing.assert_close(
        found.routed(x, *LopsidedRouter()(x)), expected.routed(x, *LopsidedRouter()(x))
    )
    for one, other in zip(found.every(), expected.every(), strict=True):
        torch.testing.assert_close(one(x), other(x))


def test_the_loop_over_experts_is_the_same_for_all_that_are_held() -> None:
    experts, x = held("int8_channel"), torch.randn(4, HIDDEN)
    picked, weights = LopsidedRouter()(x)
    assert torch.equal(
        experts.routed(x, picked, weights), moe.expert_by_expert(experts, x, picked, weights)
    )


def test_nothing_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without data, of which nothing could be."""
    products: list[tuple[int, ...]] = []

    def product(
        x: torch.Tensor, rows: torch.Tensor | None, ends: torch.Tensor, weight: Any
    ) -> torch.Tensor:
        count = len(x) if rows is None else len(rows)
        products.append((count, len(ends)))
        return x.new_empty(count, weight.codes.shape[-2])

    together = GroupedExperts.of(held("fp8_block"), EXPERTS)
    assert together is not None
    monkeypatch.setattr(grouped, "grouped_product", product)
    x = torch.empty(7, HIDDEN, dtype=torch.bfloat16, device="meta")
    picked = torch.empty(7, 3, dtype=torch.int64, device="meta")
    found = together.routed(x, picked, torch.empty(7, 3, device="meta"))
    assert found.shape == (7, HIDDEN) and found.dtype is torch.float32
    assert products == [(21, EXPERTS)] * 3
