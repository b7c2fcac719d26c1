"""Cores of a machine, shared by the ranks that run on it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch.distributed.distributed_c10d import Store

from mtp_runtime.parallel.launcher import LaunchedProcess

_THREADS = "OMP_NUM_THREADS"
_TORCHRUN = "TORCHELASTIC_RUN_ID"  # which sets one thread per process where nobody asks for more


@contextmanager
def shared_cores(
    store: Store, launched: LaunchedProcess, variables: Mapping[str, str]
) -> Iterator[None]:
    """Give torch the own share of the cores, unless OMP_NUM_THREADS was chosen.

    Every rank tells the others by a store which cores it may use, so that a launcher that has
    divided them already is not taken for one that has not.
    """
    cores = sorted(os.sched_getaffinity(0))
    store.set(str(launched.rank), f"{socket.gethostname()} {cores}")
    names = [str(rank) for rank in range(launched.world_size)]
    usable = store.multi_get(names)
    before = torch.get_num_threads()
    if not _are_chosen(variables):
        torch.set_num_threads(own_share(len(cores), usable, launched.rank))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def own_share(cores: int, usable: Sequence[bytes], rank: int) -> int:
    """Return a rank's number of cores out of those that it may use; usable names every rank's."""
    equal = [other for other, own in enumerate(usable) if own == usable[rank]]
    place = equal.index(rank)
    return max(1, (place + 1) * cores // len(equal) - place * cores // len(equal))


def _are_chosen(variables: Mapping[str, str]) -> bool:
    """Return True where somebody chose the threads, and not torchrun by default."""
    chosen = variables.get(_THREADS)
    return chosen is not None and (chosen != "1" or _TORCHRUN not in variables)
