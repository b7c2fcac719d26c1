"""Memory that new work may take on this machine, as Linux reports it.

A process in a control group has what each group above it leaves: the limit, less what is used there
and cannot be given back (pages of files can). Sources: proc(5), the kernel's cgroup-v2 and
cgroup-v1/memory documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")
# Of memory.stat: what the kernel takes back before it kills for memory.
_RECLAIMED = ("active_file", "inactive_file", "slab_reclaimable")
_NO_LIMIT = 1 << 60  # cgroup v1 reports about 2**63 where there is none


def free_memory() -> dict[str, int]:
    """Return the bytes that each limit leaves, by its name; {} where the system does not tell."""
    limits = {}
    available = _fields(_MEMINFO).get("MemAvailable:")
    if available is not None:
        limits["available memory"] = available * 1024
    groups = [room for folder in _groups() if (room := _room(folder)) is not None]
    if groups:
        limits["a container's limit"] = max(0, min(groups))
    return limits


def _groups() -> Iterator[Path]:
    """Yield the folders of this process's control groups, each with those above it.

    Inside a container the own path may be the host's; the root is the container's then.
    """
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = _ROOT / controllers
        own = root / path.lstrip("/")
        yield from (own, *(parent for parent in own.parents if parent.is_relative_to(root)))
    yield _ROOT


def _room(folder: Path) -> int | None:
    """Return the bytes that a control group leaves, None without a limit."""
    for limits, usage in (
        (("memory.max", "memory.high"), "memory.current"),
        (("memory.limit_in_bytes",), "memory.usage_in_bytes"),
    ):
        found = [limit for name in limits if (limit := _number(folder / name)) is not None]
        used = _number(folder / usage)
        if found and min(found) < _NO_LIMIT and used is not None:
            stat = _fields(folder / "memory.stat")
            # cgroup v1 has the sums of a group and those below it by names of their own.
            reclaimed = (stat.get(f"total_{name}", stat.get(name, 0)) for name in _RECLAIMED)
            return min(found) - used + sum(reclaimed)
    return None


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _fields(path: Path) -> dict[str, int]:
    """Return the numbers of a file of lines "name number"."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    words = (line.split() for line in lines)
    return {each[0]: int(each[1]) for each in words if len(each) > 1 and each[1].isdigit()}
