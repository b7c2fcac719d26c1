"""Joining of the ranks that torchrun, or any launcher that sets the same variables, has started."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from mtp_checkpoints.errors import IoError
from mtp_runtime.parallel.group import LONE, Group, Split
from mtp_runtime.parallel.launcher import LaunchedProcess, launched_process, shared_cores
from mtp_runtime.parallel.watch import Watch

_JOINING_SECONDS = 600
# A rank may wait for the next request for any time; the watch notices whoever is gone.
_WAITING = timedelta(days=365)
# Accelerators by torch's device type, and the library that their collectives are of.
_BACKENDS = {"cuda": "nccl", "npu": "hccl"}


@contextmanager
def joined(variables: Mapping[str, str] = os.environ, *, watched: bool = True) -> Iterator[Group]:
    """Join the ranks, and let them go at the end; one alone is LONE.

    watched: end this process soon after another falls silent. While the block runs, torch has the
    local share of the machine's cores. Raises IoError where the others do not come.
    """
    launched = launched_process(variables)
    if launched.is_alone:
        yield LONE
        return
    store, device = _store(launched), _own_device(launched.local_rank)
    watch = Watch(PrefixStore("watch", store), launched.rank, launched.world_size)
    group = Group(Split(launched.rank, launched.world_size), device)
    with _signals(launched.rank), shared_cores(PrefixStore("cores", store), launched, variables):
        if watched:
            watch.start()
        try:
            yield group
        finally:
            watch.stop()
    dist.destroy_process_group()


def _store(launched: LaunchedProcess) -> Store:
    try:
        meeting = rendezvous("env://", timeout=timedelta(seconds=_JOINING_SECONDS))
        store: Store = next(meeting)[0]
        kind = _accelerator()
        backend = "gloo" if kind is None else f"cpu:gloo,{kind}:{_BACKENDS[kind]}"
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=launched.rank,
            world_size=launched.world_size,
            timeout=_WAITING,
        )
    except RuntimeError as error:
        raise IoError(
            "The processes of this run do not find each other",
            where=f"rank {launched.rank} of {launched.world_size}",
            found=str(error).partition("\n")[0][:200],
            todo="Check the address and the port of the first machine",
        ) from error
    return store


def _own_device(local_rank: int) -> torch.device:
    """Choose the accelerator of this rank on its machine, the CPU where there is none."""
    kind = _accelerator()
    if kind is None:
        return torch.device("cpu")
    module = getattr(torch, kind)
    device = torch.device(kind, local_rank % module.device_count())
    module.set_device(device)
    return device


def _accelerator() -> str | None:
    """Return the torch device type of this machine's accelerators."""
    modules = {kind: getattr(torch, kind, None) for kind in _BACKENDS}
    return next(
        (kind for kind, module in modules.items() if module and module.is_available()), None
    )


@contextmanager
def _signals(rank: int) -> Iterator[None]:
    """Take a launcher's SIGTERM as an error on rank 0; the others end when it does."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    if rank == 0:
        signal.signal(signal.SIGTERM, _told_to_end)
    else:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _told_to_end(number: int, frame: FrameType | None) -> None:
    raise IoError(
        "This run was told to end (SIGTERM)",
        todo="If another of its processes has failed, its own message says why",
    )
