"""Number of a process among those that a launcher started, torchrun or any that sets its variables,
and its share of its machine's cores."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.distributed.distributed_c10d import Store

from mtp_checkpoints.errors import UsageError

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_THREADS = "OMP_NUM_THREADS"
_TORCHRUN = "TORCHELASTIC_RUN_ID"  # which sets one thread per process where nobody asks for more


class LaunchedProcess(NamedTuple):
    """Number of a process, its rank, among all of the launch and among those of its machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @property
    def is_alone(self) -> bool:
        """True where no other process was started."""
        return self.world_size == 1


def launched_process(variables: Mapping[str, str]) -> LaunchedProcess:
    """Read a process's ranks (UsageError); without a launcher it is alone."""
    if not all(variables.get(name) for name in _VARIABLES):
        return LaunchedProcess()
    numbers = [variables[name] for name in ("RANK", "WORLD_SIZE")]
    local = variables.get("LOCAL_RANK") or "0"
    decimal = all(number.isdecimal() for number in (*numbers, local))
    if not decimal or int(numbers[0]) >= int(numbers[1]):
        raise UsageError(
            "The launcher's variables make no sense",
            expected="RANK below WORLD_SIZE, and LOCAL_RANK, in decimal digits",
            found=f"RANK={numbers[0]}, WORLD_SIZE={numbers[1]}, LOCAL_RANK={local}",
        )
    return LaunchedProcess(int(numbers[0]), int(numbers[1]), int(local))


@contextmanager
def shared_cores(
    store: Store, launched: LaunchedProcess, variables: Mapping[str, str]
) -> Iterator[None]:
    """Give torch the local share of the cores, unless OMP_NUM_THREADS was chosen.

    Every rank tells the others by a store which cores it may use, so that a launcher that has
    divided them already is not taken for one that has not.
    """
    cores = sorted(os.sched_getaffinity(0))
    store.set(str(launched.rank), f"{socket.gethostname()} {cores}")
    names = [str(rank) for rank in range(launched.world_size)]
    usable = store.multi_get(names)
    before = torch.get_num_threads()
    if not _are_chosen(variables):
        torch.set_num_threads(local_share(len(cores), usable, launched.rank))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def local_share(cores: int, usable: Sequence[bytes], rank: int) -> int:
    """Return a rank's number of cores out of those that it may use; usable names every rank's."""
    equal = [other for other, mask in enumerate(usable) if mask == usable[rank]]
    place = equal.index(rank)
    return max(1, (place + 1) * cores // len(equal) - place * cores // len(equal))


def _are_chosen(variables: Mapping[str, str]) -> bool:
    """Return True where somebody chose the threads, and not torchrun by default."""
    chosen = variables.get(_THREADS)
    return chosen is not None and (chosen != "1" or _TORCHRUN not in variables)
