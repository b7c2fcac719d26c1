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

from mtp_export.errors import IoError, UsageError
from mtp_runtime.parallel.group import LONE, Group, Split
from mtp_runtime.parallel.watch import Watch

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_JOINING_SECONDS = 600
# A rank may wait for the next request for any time; the watch notices whoever is gone.
_WAITING = timedelta(days=365)
# Accelerators by torch's device type, and the library that their collectives are of.
_BACKENDS = {"cuda": "nccl", "npu": "hccl"}


def world_size(variables: Mapping[str, str]) -> int:
    """Return the number of ranks that were started, 1 where no launcher says so (UsageError)."""
    if not all(variables.get(name) for name in VARIABLES):
        return 1
    numbers = [variables[name] for name in ("RANK", "WORLD_SIZE")]
    if not all(number.isdecimal() for number in numbers) or int(numbers[0]) >= int(numbers[1]):
        raise UsageError(
            "The launcher's variables make no sense",
            expected="RANK below WORLD_SIZE",
            found=f"RANK={numbers[0]}, WORLD_SIZE={numbers[1]}",
        )
    return int(numbers[1])


@contextmanager
def joined(variables: Mapping[str, str] = os.environ, *, watched: bool = True) -> Iterator[Group]:
    """Join the ranks, and let them go at the end; one alone is LONE.

    watched: end this process soon after another falls silent. Raises IoError where the others do
    not come. What ends this block by an error on rank 0, between two steps, ends the others in
    peace.
    """
    size = world_size(variables)
    if size == 1:
        yield LONE
        return
    rank, device = int(variables["RANK"]), _device(variables)
    store = _store(rank, size)
    watch = Watch(PrefixStore("watch", store), rank, size)
    group = Group(Split(rank, size), device)
    with _signals(rank):
        if watched:
            watch.start()
        try:
            yield group
        finally:
            if rank == 0 and group.in_step:
                group.end()
            watch.stop()
    dist.destroy_process_group()


def _store(rank: int, size: int) -> Store:
    try:
        meeting = rendezvous("env://", timeout=timedelta(seconds=_JOINING_SECONDS))
        store: Store = next(meeting)[0]
        kind = _accelerator()
        backend = "gloo" if kind is None else f"cpu:gloo,{kind}:{_BACKENDS[kind]}"
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=rank,
            world_size=size,
            timeout=_WAITING,
        )
    except RuntimeError as error:
        raise IoError(
            "The processes of this run do not find each other",
            where=f"rank {rank} of {size}",
            found=str(error).partition("\n")[0][:200],
            todo="Check the address and the port of the first machine",
        ) from error
    return store


def _device(variables: Mapping[str, str]) -> torch.device:
    """Return the accelerator of this rank on its machine, the CPU where there is none."""
    kind = _accelerator()
    if kind is None:
        return torch.device("cpu")
    count = getattr(torch, kind).device_count()
    return torch.device(kind, int(variables.get("LOCAL_RANK", "0")) % count)


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
