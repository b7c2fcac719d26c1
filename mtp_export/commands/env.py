"""mtp-export env: versions and the machine, for reports of defects."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from mtp_checkpoints.layouts import target_names
from mtp_export import __version__
from mtp_export.commands.output import FiguresTable, Reporting, print_result
from mtp_export.progress import format_bytes

_DISTRIBUTION = "mtp-export"
_NONE = "none"


@dataclass(frozen=True)
class EnvCommand:
    """Options of mtp-export env."""

    reporting: Reporting = Reporting()


def env(options: EnvCommand) -> None:
    """Show versions, processor, disk, extras, engines and the kernel cache, for reports of
    defects."""
    facts = environment_facts()
    table = FiguresTable(show_header=False)
    table.add_words("what", "found")
    for name, found in facts.items():
        table.add_row(name.replace("_", " "), _in_words(name, found))
    print_result(facts, table, options.reporting)


def environment_facts() -> dict[str, Any]:
    """Return versions, processor, free disk in bytes, extras and engines; of a token of the Hub
    only whether there is one."""
    return {
        "version": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": _version("torch"),
        "cores": len(os.sched_getaffinity(0)),
        "amx": _amx(),
        "free_disk_bytes": shutil.disk_usage(Path.cwd()).free,
        "extras": _extras(),
        "engines": _installed(target_names()),
        "kernel_cache": _kernel_cache(),
        "hub_token": _has_token(),
    }


def _in_words(name: str, found: Any) -> str:
    if name == "free_disk_bytes":
        return format_bytes(found)
    if isinstance(found, bool):
        return "yes" if found else "no"
    if isinstance(found, dict):
        return ", ".join(f"{each} {number}" for each, number in found.items()) or _NONE
    if isinstance(found, list):
        return ", ".join(found) or _NONE
    return _NONE if found is None else str(found)


def _version(name: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(name)
    return None


def _installed(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of the distributions that are installed."""
    versions = {name: _version(name) for name in names}
    return {name: found for name, found in versions.items() if found is not None}


def _extras() -> list[str]:
    """Return the extras of this distribution of which every package is installed; none where it
    runs from its sources, which name none."""
    packages: dict[str, list[str]] = {}
    with suppress(PackageNotFoundError):
        for line in requires(_DISTRIBUTION) or []:
            package, _, marker = line.partition(";")
            if "extra ==" in marker:
                name = "".join(c if c.isalnum() or c in "-_" else " " for c in package).split()[0]
                packages.setdefault(marker.split("extra ==")[1].strip(" \"'"), []).append(name)
    return [extra for extra, names in packages.items() if all(map(_version, names))]


def _amx() -> list[str]:
    """Return the processor's AMX units, as Linux names them."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return sorted(flag for flag in line.split() if flag.startswith("amx"))
    return []


def _kernel_cache() -> str | None:
    from mtp_kernels.cpu.cache import cache_home

    with suppress(RuntimeError):
        return str(cache_home())
    return None


def _has_token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None
