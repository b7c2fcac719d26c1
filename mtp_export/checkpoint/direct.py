"""Files read and written past the page cache, where the file system can: to fill the cache with
bytes that only pass by costs more than to read or write them, and evicts what is of use there."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

PAGE_BYTES = 4096  # direct offsets, lengths and addresses are multiples of it
DIRECT_LEAST_BYTES = 1 << 20  # less than that is not worth it


def page_memory(size_bytes: int) -> memoryview:
    """Memory that begins at a page, as a disk can read and write it directly."""
    return memoryview(mmap.mmap(-1, size_bytes))


def open_directly(path: Path, flags: int) -> int | None:
    """A descriptor of an existing file past the page cache; None where there is no such thing."""
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None
