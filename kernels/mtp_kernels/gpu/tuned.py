"""Tables of launch parameters that were tuned on this machine, one file per GPU and Triton in the
user's cache folder. `python -m benchmarks.gpu_report` writes them."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from mtp_kernels.gpu.devices import Gpu

# Kind of product -> launch parameters by ascending size, as a kernel's table has them.
Tables = dict[str, list[dict[str, int]]]


def path_of(gpu: Gpu) -> Path:
    """Return the file of a GPU under the installed Triton's minor version."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = re.sub(r"\W+", "-", gpu.name).strip("-").lower()
    version = ".".join(gpu.triton.split(".")[:2])
    return Path(caches, "mtp-export", "gpu", f"{name}-triton-{version}.json")


def read(gpu: Gpu, kernel: str) -> Tables:
    """Return a kernel's tables, none where it was not tuned (ValueError for a damaged file)."""
    path = path_of(gpu)
    try:
        text = path.read_bytes()
    except OSError:
        return {}
    try:
        table = json.loads(text)["tables"].get(kernel, {})
        return {
            str(kind): [{str(k): int(v) for k, v in row.items()} for row in rows]
            for kind, rows in table.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(path, repr(error)) from error


def write(gpu: Gpu, kernel: str, tables: Tables) -> Path:
    """Keep a kernel's tables in place of those before, beside other kernels'."""
    path = path_of(gpu)
    content: dict[str, Any] = {"gpu": gpu.name, "triton": gpu.triton, "tables": {}}
    with suppress(OSError, ValueError, KeyError, TypeError):  # a damaged file is written anew
        content["tables"] |= json.loads(path.read_bytes())["tables"]
    content["tables"][kernel] = tables
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(f".{os.getpid()}.tmp")
    whole.write_text(json.dumps(content, indent=1) + "\n")
    whole.replace(path)
    return path


def damaged(path: Path, found: str) -> ValueError:
    """Return the error of a table that cannot be read."""
    return ValueError(
        f"{path}: expected a table of launch parameters, found {found}; remove it, or tune again "
        "by python -m benchmarks.gpu_report"
    )
