"""Weights as compiled kernels pack them, kept in a folder of the user's for the next start."""

from __future__ import annotations

import hashlib
import json
import mmap
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import ENOENT
from functools import cache
from glob import escape
from pathlib import Path

from mtp_checkpoints.errors import InvalidInputError, IoError
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_kernels.cpu.memory import Arena
from mtp_kernels.cpu.packed_file import (
    PART,
    FilledArena,
    PackedFileError,
    PackedIoError,
    remove_left,
    written_file,
)
from mtp_runtime.loading.on_demand import READERS

SUFFIX = ".packed"


@dataclass(frozen=True)
class KeptWeights:
    """The file of a model's packed weights in a folder, which may not be there yet.

    use: names the model and how it is loaded; content: a digest of its files, too, and of the code.
    """

    folder: Path
    use: str
    content: str

    @classmethod
    def of(
        cls, folder: Path, path: Path, checkpoints: Iterable[Checkpoint], how: str
    ) -> KeptWeights:
        """Name the file for a model at a path: by the identities of its files, how it is loaded,
        and the code that packs it (IoError for files that are not there)."""
        place = f"{path.resolve()} {how}"
        content = hashlib.sha256(f"{place} {_version()}".encode())
        for checkpoint in checkpoints:
            content.update(json.dumps(checkpoint.config, sort_keys=True).encode())
            for shard in checkpoint.shards:
                content.update(_identity(Path(str(shard.path))).encode())
        use = f"{path.resolve().name}-{hashlib.sha256(place.encode()).hexdigest()[:12]}"
        return cls(folder, use, content.hexdigest()[:24])

    @property
    def path(self) -> Path:
        """Where the file is or will be."""
        return self.folder / f"{self.use}-{self.content}{SUFFIX}"

    @property
    def size_bytes(self) -> int:
        """Bytes of the file, 0 where there is none."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    @contextmanager
    def arena(self, advance: Callable[[int], object]) -> Iterator[Arena]:
        """Yield an arena with the weights, or one that keeps what is packed into it while the block
        runs; advance takes the bytes that are read of a file that is there.

        Raises IoError where the file cannot be read or written.
        """
        try:
            filled = self._filled()
            if filled is None:
                with written_file(self.path) as arena:
                    yield arena or Arena()
                self._remove_others()
                return
            with ThreadPoolExecutor(READERS) as pool:
                filled.read(pool, advance)
            yield filled
            filled.check_taken()
        except PackedIoError as error:
            raise IoError(
                "Packed weights cannot be kept",
                where=self.path,
                found=error.strerror,
                todo="Make room there, name another folder, or leave --packed-cache out",
            ) from error
        except PackedFileError as error:
            raise InvalidInputError(
                "A file of packed weights does not hold this model",
                where=self.path,
                found=str(error),
                todo="Remove it: the weights are packed anew",
            ) from error

    def _filled(self) -> FilledArena | None:
        """Return the weights of the file; a damaged one is made anew."""
        try:
            return FilledArena(self.path)
        except PackedIoError as error:
            if error.errno == ENOENT:
                return None
            raise
        except PackedFileError:
            self.path.unlink(missing_ok=True)
            return None

    def _remove_others(self) -> None:
        """Remove what was packed of earlier files of this model, or by another version."""
        earlier = f"{escape(self.use)}-*{SUFFIX}"
        for path in self.folder.glob(earlier):
            if path != self.path:
                with suppress(OSError):
                    path.unlink()
        for part in self.folder.glob(f"{earlier}{PART}"):
            remove_left(part)


@contextmanager
def arena_of(kept: KeptWeights | None, advance: Callable[[int], object]) -> Iterator[Arena]:
    """Yield an arena for weights, that of a file where they are kept; as KeptWeights.arena."""
    if kept is None:
        yield Arena()
        return
    with kept.arena(advance) as arena:
        yield arena


@cache
def _version() -> str:
    """Return a digest of the code that reads and packs weights, and of what lays out memory."""
    digest = hashlib.sha256(f"{platform.machine()} {mmap.PAGESIZE}".encode())
    for package in ("mtp_checkpoints", "mtp_kernels", "mtp_runtime"):
        for path in sorted(Path(str(sys.modules[package].__file__)).parent.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _identity(path: Path) -> str:
    """Return what is another once a file is written to, or another file has its path (IoError)."""
    try:
        stat = path.stat()
    except OSError as error:
        raise IoError("A file of the model cannot be read", where=path) from error
    return f"{stat.st_dev} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}\n"
