"""Direct I/O: reads and writes that bypass the page cache, where the file system can.

Bytes that are read or written once would fill the cache, which costs more than the disk and evicts
what is of use there.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

PAGE_BYTES = 4096  # direct offsets, lengths and addresses are multiples of it
MIN_DIRECT_BYTES = 1 << 20  # smaller transfers gain nothing
SLACK_BYTES = 2 * PAGE_BYTES  # of memory beyond a read's: bytes begin and end inside a page


def page_memory(size_bytes: int) -> memoryview:
    """Return memory that begins at a page, as direct reads and writes need it."""
    return memoryview(mmap.mmap(-1, size_bytes))


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy bytes while other threads run Python: a slice assignment would keep them from it."""
    import numpy as np

    np.copyto(np.asarray(target), np.asarray(source))


def equal_bytes(one: memoryview, other: memoryview) -> bool:
    """Return whether two pieces have the same bytes, while other threads run Python."""
    import numpy as np

    return np.array_equal(np.asarray(one), np.asarray(other))


def open_directly(path: Path, flags: int) -> int | None:
    """Return a descriptor of an existing file that bypasses the page cache; None if unsupported."""
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None
