"""Division of work among the threads of a team."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_kernels.cpu.jit import compiled
from mtp_kernels.cpu.team import Member, owns, share
from mtp_kernels.cpu.vectors import borrowed


@compiled
def owners(costs: np.ndarray, count: int) -> np.ndarray:
    """Mark the items of every member [members, items]."""
    out = np.zeros((count, costs.size), np.int64)
    for number in range(count):
        member = Member(number, count, costs)
        done = 0
        for item in range(costs.size):
            out[number, item] = owns(member, done, costs[item], costs.sum())
            done += costs[item]
    return out


@compiled
def shares(items: int, count: int) -> np.ndarray:
    """Return every member's range [members, 2]."""
    out, none = np.empty((count, 2), np.int64), np.empty(0, np.int64)
    for number in range(count):
        out[number, 0], out[number, 1] = share(Member(number, count, none), items)
    return out


@given(costs=st.lists(st.integers(1, 50), min_size=1, max_size=40), count=st.integers(1, 9))
@settings(deadline=None)
def test_every_item_has_one_owner(costs: list[int], count: int) -> None:
    """Members own items in order, and no more than an even part and one item."""
    marks = owners(np.array(costs), count)
    assert (marks.sum(axis=0) == 1).all()
    assert (np.diff(marks.argmax(axis=0)) >= 0).all()
    assert (marks @ np.array(costs)).max() <= sum(costs) / count + max(costs)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("items", [0, 1, 6, 100])
def test_shares_are_even(items: int, count: int) -> None:
    ranges = shares(items, count)
    assert ranges[0, 0] == 0 and ranges[-1, 1] == items
    assert (ranges[1:, 0] == ranges[:-1, 1]).all()
    sizes = ranges[:, 1] - ranges[:, 0]
    assert sizes.max() - sizes.min() <= 1


@compiled
def borrowed_part(named: tuple[np.ndarray, int], count: np.ndarray) -> tuple[np.ndarray, int]:
    """Return a borrowed array."""
    return borrowed((named, count))[0]


def test_borrowed_arrays_have_no_owner() -> None:
    """So that no reference to them is counted; numba gives an array of Python's one."""
    given = np.arange(6.0).reshape(2, 3)
    (taken, number) = borrowed_part((given, 7), given)
    assert taken.base is None and taken.ctypes.data == given.ctypes.data and number == 7
    assert (taken == given).all()
