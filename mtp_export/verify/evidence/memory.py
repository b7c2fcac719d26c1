"""Memory that a model takes, from its headers alone, and memory that this machine has."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from pathlib import Path

from mtp_export.checkpoint.reader import Checkpoint
from mtp_export.progress import format_bytes

_MEMINFO = Path("/proc/meminfo")
_DENSE_BYTES = 4  # the runtime holds every weight in fp32
# Weights in one stored element, where it holds more than one.
_PACKED = {"weight_packed": {"I32": 8}, "weight": {"I8": 2}}


def dense_bytes(checkpoints: Iterable[Checkpoint]) -> int:
    """Bytes of the weights in fp32, integers unpacked."""
    total = 0
    for checkpoint in checkpoints:
        for tensor in checkpoint.tensors.values():
            last = tensor.name.rpartition(".")[2]
            total += prod(tensor.shape) * _PACKED.get(last, {}).get(tensor.dtype, 1)
    return total * _DENSE_BYTES


def available_bytes() -> int | None:
    """Memory available to new work without swapping, None if the system does not tell."""
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None


def why_too_large(checkpoints: Iterable[Checkpoint]) -> str | None:
    """The reason why the model does not fit into memory, None if it does."""
    needed, available = dense_bytes(checkpoints), available_bytes()
    if available is None or needed < available:
        return None
    return (
        f"the weights take {format_bytes(needed)} in fp32 and {format_bytes(available)} of memory"
        " are free: use --stream"
    )
