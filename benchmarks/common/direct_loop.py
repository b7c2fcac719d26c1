"""The limit of a disk: bytes read and written past the page cache by a loop that does nothing else.

    python -m benchmarks.common.direct_loop SPEC.json DEPTH

The spec has "reads", pieces of files as [path, start, end], "write_bytes", and "output", the file
that they are written to. DEPTH reads and as many writes of 4 MiB are under way at once.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

BLOCK_BYTES = 4 << 20
PAGE_BYTES = 4096


def blocks_of(reads: list[tuple[str, int, int]]) -> Iterator[tuple[str, int, int]]:
    """Yield whole pages of blocks that cover the pieces."""
    for path, start, end in reads:
        first = start // PAGE_BYTES * PAGE_BYTES
        for at in range(first, end, BLOCK_BYTES):
            size = min(BLOCK_BYTES, end - at)
            yield path, at, -(-size // PAGE_BYTES) * PAGE_BYTES


Item = TypeVar("Item")


def shared(items: Iterator[Item]) -> Callable[[], Item | None]:
    """Return a function that gives each item to one thread."""
    lock = threading.Lock()

    def take() -> Item | None:
        with lock:
            return next(items, None)

    return take


def run(reads: list[tuple[str, int, int]], write_bytes: int, output: Path, depth: int) -> None:
    """Move the bytes, as deep as is wanted, and bring them to disk."""
    files = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path, _, _ in reads}
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o666)
    size = -(-write_bytes // PAGE_BYTES) * PAGE_BYTES
    if size:
        os.posix_fallocate(written, 0, size)
    next_read = shared(blocks_of(reads))
    next_write = shared(iter(range(0, size, BLOCK_BYTES)))
    content = os.urandom(BLOCK_BYTES)

    def read() -> None:
        memory = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        while (block := next_read()) is not None:
            path, at, count = block
            os.preadv(files[path], [memory[:count]], at)

    def write() -> None:
        memory = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        memory[:] = content
        while (at := next_write()) is not None:
            os.pwrite(written, memory[: min(BLOCK_BYTES, size - at)], at)

    with ThreadPoolExecutor(2 * depth) as pool:
        for future in [pool.submit(action) for action in (read, write) for _ in range(depth)]:
            future.result()
    os.fsync(written)


if __name__ == "__main__":
    spec = json.loads(Path(sys.argv[1]).read_text())
    run(spec["reads"], spec["write_bytes"], Path(spec["output"]), int(sys.argv[2]))
