"""Disk under the program: its calls counted or failed, and what a power cut leaves of its files.

The program reaches the disk through functions of the module os alone, which are therefore the one
place to stand in; `test_every_byte_is_seen` fails if a byte gets to a bundle another way. A layer
of the program's own or a preloaded library would be more code, for the program or for the tests.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from os import rename as real_rename
from pathlib import Path
from typing import Any

PAGE_BYTES = 4096
DISK_CALLS = (
    *("open", "posix_fallocate", "pwrite", "fsync", "replace", "unlink", "close"),
    *("link", "mkdir", "rmdir", "rename"),
)
_FSYNC = os.fsync
# Called before each disk call of any thread, with its name and arguments; what it raises, the call
# raises.
Watcher = Callable[[str, tuple[Any, ...]], None]


def watch_disk(watcher: Watcher) -> Callable[[], None]:
    """Have a watcher called before every disk call; return what ends that.

    The machine's own disk is not waited for: no fsync reaches it.
    """
    real = {name: getattr(os, name) for name in DISK_CALLS}

    def watched(name: str, *arguments: Any, **options: Any) -> Any:
        watcher(name, arguments)
        return None if real[name] is _FSYNC else real[name](*arguments, **options)

    def restore() -> None:
        for name, function in real.items():
            setattr(os, name, function)

    for name in DISK_CALLS:
        setattr(os, name, partial(watched, name))
    return restore


@contextmanager
def watched_disk(watcher: Watcher) -> Iterator[None]:
    """Have a watcher called before every disk call inside the block."""
    restore = watch_disk(watcher)
    try:
        yield
    finally:
        restore()


@dataclass
class Fault:
    """The n-th call of one kind fails with an error number, and all later ones too if it lasts.

    met: the call was made.
    """

    call: str
    number: int
    error: int
    lasts: bool
    met: bool = False
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __call__(self, call: str, arguments: tuple[Any, ...]) -> None:
        if call != self.call:
            return
        number = next(self._numbers)
        if number == self.number or (self.lasts and number > self.number):
            self.met = True
            raise OSError(self.error, os.strerror(self.error))


@dataclass(frozen=True)
class Survival:
    """Probabilities that what was not synced survives a power cut: a name or size, and a page."""

    names: float
    pages: float


Entry = bytes | dict[str, int]  # a file's content, or the inodes of a folder's names
Tree = dict[str, "Tree | bytes"]


class Platter:
    """Certain content of a disk: files and folders as they were when last synced, by inode.

    It is kept in a folder, since the process that syncs may be killed. Inodes are held open: their
    numbers are not used again.
    """

    def __init__(self, keep: Path, *durable: Path) -> None:
        self._keep = keep
        self._open: dict[int, int] = {}
        self._numbers = itertools.count()
        keep.mkdir()
        for root in durable:
            for folder, _, names in os.walk(root):
                for path in (Path(folder), *(Path(folder, name) for name in names)):
                    fd = os.open(path, os.O_RDONLY)
                    self.sync(fd)
                    os.close(fd)

    def __call__(self, call: str, arguments: tuple[Any, ...]) -> None:
        """Watch a disk: keep what is synced."""
        if call == "fsync":
            self.sync(arguments[0])

    def sync(self, fd: int) -> None:
        """Keep what a file or folder holds."""
        status = os.fstat(fd)
        if status.st_ino not in self._open:
            self._open[status.st_ino] = os.dup(fd)
        if stat.S_ISDIR(status.st_mode):
            with os.scandir(fd) as entries:
                names = {entry.name: entry.inode() for entry in entries}
            place, content = self._folder(status.st_ino), json.dumps(names).encode()
        else:
            place, content = self._file(status.st_ino), Path(f"/proc/self/fd/{fd}").read_bytes()
        fresh = self._keep / f"new-{next(self._numbers)}"
        fresh.write_bytes(content)
        real_rename(fresh, place)  # whole, should the process die meanwhile

    def cut_power(self, root: Path, survival: Survival, chance: random.Random) -> None:
        """Leave below a folder what a disk may hold after a power cut: all that was synced, and
        each name, size and page that was not as chance has it."""
        cut = _Cut(self, _contents(root), survival=survival, chance=chance)
        after = cut.folder(root.stat().st_ino)
        _empty(root)
        _write(root, after)

    def close(self) -> None:
        """Let go of the inodes."""
        for fd in self._open.values():
            os.close(fd)

    def names(self, inode: int) -> dict[str, int] | None:
        """Names of a folder when it was synced; None if it never was."""
        place = self._folder(inode)
        return json.loads(place.read_bytes()) if place.exists() else None

    def content(self, inode: int) -> bytes:
        """Content of a file when it was synced; nothing if it never was."""
        place = self._file(inode)
        return place.read_bytes() if place.exists() else b""

    def _folder(self, inode: int) -> Path:
        return self._keep / f"folder-{inode}"

    def _file(self, inode: int) -> Path:
        return self._keep / f"file-{inode}"


@dataclass
class _Cut:
    platter: Platter
    current: dict[int, Entry]
    survival: Survival
    chance: random.Random

    def folder(self, inode: int) -> Tree:
        kept, now = self.platter.names(inode) or {}, self.current.get(inode)
        names: dict[str, int | None] = dict(kept)
        if isinstance(now, dict):
            for name in sorted(kept.keys() | now.keys()):
                if self._survives(self.survival.names):
                    names[name] = now.get(name)
        return {n: self.entry(inode) for n, inode in names.items() if inode is not None}

    def entry(self, inode: int) -> Tree | bytes:
        now = self.current.get(inode)
        if isinstance(now, dict) or self.platter.names(inode) is not None:
            return self.folder(inode)
        kept = self.platter.content(inode)
        return kept if now is None or now == kept else self.file(kept, now)

    def file(self, kept: bytes, now: bytes) -> bytes:
        size = len(now if self._survives(self.survival.names) else kept)
        pages = []
        for place in range(0, size, PAGE_BYTES):
            page = (now if self._survives(self.survival.pages) else kept)[place:][:PAGE_BYTES]
            pages.append(page.ljust(PAGE_BYTES, b"\0"))
        return b"".join(pages)[:size]

    def _survives(self, probability: float) -> bool:
        return self.chance.random() < probability


def _contents(root: Path) -> dict[int, Entry]:
    """Files and folders from a folder on, by inode."""
    found: dict[int, Entry] = {}
    for folder, folders, names in os.walk(root):
        place = Path(folder)
        found[place.stat().st_ino] = {n: (place / n).stat().st_ino for n in (*folders, *names)}
        for name in names:
            found[(place / name).stat().st_ino] = (place / name).read_bytes()
    return found


def _empty(root: Path) -> None:
    for folder, folders, names in os.walk(root, topdown=False):
        for name in names:
            os.unlink(Path(folder, name))
        for name in folders:
            os.rmdir(Path(folder, name))


def _write(folder: Path, content: Tree) -> None:
    folder.mkdir(exist_ok=True)
    for name, entry in content.items():
        if isinstance(entry, bytes):
            (folder / name).write_bytes(entry)
        else:
            _write(folder / name, entry)
