"""Memory that a model takes, from its headers alone, and memory that this machine has."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from pathlib import Path

from mtp_checkpoints.weights.weight_values import weights_on_disk
from mtp_export.progress import format_bytes
from mtp_export.verify.evidence.bundle_parts import PartLayout

_MEMINFO = Path("/proc/meminfo")
_DENSE_BYTES = 4  # the runtime holds every weight in fp32


def dense_bytes(layouts: Iterable[PartLayout]) -> int:
    """Bytes of all weights in fp32, whatever form they are stored in."""
    return _DENSE_BYTES * sum(
        prod(weight.stored.weight.shape)
        for layout in layouts
        for weight in weights_on_disk(layout.stored, layout.checkpoint.tensors)
    )


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


def why_too_large(layouts: Iterable[PartLayout]) -> str | None:
    """The reason why the model does not fit into memory, None if it does."""
    needed, available = dense_bytes(layouts), available_bytes()
    if available is None or needed < available:
        return None
    return (
        f"the weights take {format_bytes(needed)} in fp32 and {format_bytes(available)} of memory"
        " are free: use --stream"
    )
