"""Slots of routed experts: the least recently used one is given up, within a pool for all layers or
one for each."""

from __future__ import annotations

import pytest

from mtp_kernels.decoder.compiled_cpu.expert_slots import SlotPool, pools_of


def test_the_expert_that_was_not_used_for_longest_gives_its_slot_up() -> None:
    pool = SlotPool([0, 1, 2])
    slots = {expert: pool.take((0, expert), ()) for expert in (4, 5, 6)}
    assert set(slots.values()) == {0, 1, 2} and not pool.free
    assert pool.touch((0, 4)) and not pool.touch((1, 4))
    assert pool.take((1, 4), ()) == slots[5]
    assert not pool.touch((0, 5))
    assert pool.take((1, 5), ()) == slots[6]


def test_experts_of_a_wave_keep_their_slots() -> None:
    pool = SlotPool([0, 1])
    first = pool.take((0, 0), ())
    second = pool.take((0, 1), ())
    assert pool.take((0, 2), [(0, 0), (0, 2)]) == second
    assert pool.touch((0, 0)) and pool.held[0, 0] == first


def test_an_expert_that_is_dropped_leaves_a_free_slot() -> None:
    pool = SlotPool([7])
    pool.take((0, 0), ())
    pool.drop((0, 0))
    pool.drop((0, 0))
    assert pool.free == [7] and not pool.touch((0, 0)) and pool.size == 1


@pytest.mark.parametrize(
    ("slots", "sizes"),
    [
        (24, [24]),  # two tokens' experts: 2 * 2 picks * 6 layers
        (23, [3, 4, 4, 4, 4, 4]),
        (6, [1] * 6),
        (5, [5]),  # less than one a layer
    ],
)
def test_layers_share_slots_from_two_tokens_experts_on(slots: int, sizes: list[int]) -> None:
    pools = pools_of(slots, layers=6, picked=2)
    assert [pool.size for pool in pools] == sizes
    assert sorted(slot for pool in pools for slot in pool.free) == list(range(slots))
