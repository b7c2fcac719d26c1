"""Ranks of processes that a launcher has started, and their shares of a machine's cores."""

from __future__ import annotations

import os

import pytest
import torch

from mtp_checkpoints.errors import UsageError
from mtp_runtime.parallel.launcher import (
    LaunchedProcess,
    launched_process,
    local_share,
    shared_cores,
)

STARTED = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


def test_the_ranks_of_a_process() -> None:
    assert launched_process(STARTED) == LaunchedProcess(1, 4)
    assert launched_process(STARTED | {"LOCAL_RANK": "3"}) == LaunchedProcess(1, 4, 3)
    assert launched_process({}).is_alone
    for name in STARTED:
        assert launched_process(STARTED | {name: ""}).is_alone, "other launchers set some of them"


@pytest.mark.parametrize("changes", [{"RANK": "4"}, {"WORLD_SIZE": "x"}, {"LOCAL_RANK": "-1"}])
def test_variables_that_make_no_sense(changes: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="make no sense"):
        launched_process(STARTED | changes)


def test_ranks_share_the_cores_of_a_machine() -> None:
    """Two machines of eight cores; on the second a launcher gave each rank four of its own."""
    usable = [b"one", b"one", b"one", b"two 0-3", b"two 4-7"]
    assert [local_share(8, usable, rank) for rank in range(3)] == [2, 3, 3]
    assert [local_share(4, usable, rank) for rank in (3, 4)] == [4, 4]
    assert local_share(2, [b"one"] * 4, 1) == 1, "never none"


class Cell:
    """A store in which every rank has said the same."""

    def set(self, key: str, value: str) -> None:
        self.value = value.encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.value] * len(keys)


@pytest.mark.parametrize(
    ("variables", "chosen"),
    [
        ({}, False),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}, False),  # by torchrun itself
        ({"OMP_NUM_THREADS": "1"}, True),
        ({"OMP_NUM_THREADS": "3", "TORCHELASTIC_RUN_ID": "none"}, True),
    ],
)
def test_threads_that_were_chosen_stay(variables: dict[str, str], chosen: bool) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(7)
    try:
        launched = LaunchedProcess(1, 2)
        with shared_cores(Cell(), launched, variables):  # type: ignore[arg-type]
            cores = len(os.sched_getaffinity(0))
            assert torch.get_num_threads() == (7 if chosen else max(1, cores - cores // 2))
        assert torch.get_num_threads() == 7
    finally:
        torch.set_num_threads(before)
