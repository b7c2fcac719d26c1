"""Functions that several processes of the tests need: one compiles them, and the others wait for
what it keeps. One of a whole model takes most of a minute."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from mtp_kernels.cpu.cache import KernelCache

LOCKS = Path(tempfile.gettempdir(), f"mtp-export-tests-{os.getuid()}")
_SECONDS = 120.0  # that another one's compilation may take


def compile_once() -> None:
    """Have this process wait for what others compile, from here on."""
    LOCKS.mkdir(exist_ok=True)
    load, save = KernelCache.load_overload, KernelCache.save_overload
    held: dict[str, int] = {}

    def load_overload(cache: KernelCache, types: Any, context: Any) -> Any:
        found, name = load(cache, types, context), _name_of(cache, types, context)
        if found is None and name and name not in held:
            held[name] = _locked(LOCKS / name)
            found = load(cache, types, context)
            if found is not None:
                os.close(held.pop(name))
        return found

    def save_overload(cache: KernelCache, types: Any, result: Any) -> None:
        save(cache, types, result)
        if (name := _name_of(cache, types, result.target_context)) in held:
            os.close(held.pop(name))

    KernelCache.load_overload = load_overload  # type: ignore[method-assign]
    KernelCache.save_overload = save_overload  # type: ignore[method-assign]


def _name_of(cache: KernelCache, types: Any, context: Any) -> str:
    """Return the lock's name of a function as compiled for some types, "" where none is kept."""
    with suppress(OSError):
        return hashlib.sha256(bytes(cache._path(types, context))).hexdigest()
    return ""


def _locked(path: Path) -> int:
    """Wait until no other process has a lock, and return its descriptor: of one that still has it
    after minutes, without."""
    lock, end = os.open(path, os.O_RDWR | os.O_CREAT), time.monotonic() + _SECONDS
    while time.monotonic() < end:
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        time.sleep(0.05)
    return lock
