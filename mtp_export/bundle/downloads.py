"""Downloads that a run needs when its source is remote; of a local one there are none."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.sources.byte_source import Place, RemoteFile
from mtp_checkpoints.sources.pieces import (
    PIECE_BYTES,
    Extent,
    Piece,
    held_bytes,
    plan_pieces,
)
from mtp_checkpoints.sources.staged_file import StagedFile
from mtp_checkpoints.sources.staging import DOWNLOADS_NAME, Staging, ahead_bytes
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_export.bundle.tied_weights import TiedCopies
from mtp_export.plan import COPY, PartPlan

# Key of the comparisons that belong to no output shard; output shards have a folder in theirs.
CHECKS = "checks"

# Resident memory of an HTTP client with its transfers.
REMOTE_BYTES = 80_000_000


@dataclass(frozen=True)
class Inputs:
    """Source tensors of a run by name.

    finishing wraps the end of each job: what it raises keeps the job's output from being finished.
    stopping is set when the run ends early.
    """

    tensors: Mapping[str, TensorInfo]
    finishing: Callable[[str], AbstractContextManager[None]] = lambda job: nullcontext()
    stopping: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class Downloads:
    """Pieces of a remote source in the order of their use, and the jobs of the run that use them.

    whole: by job, the shards that it reads entirely, and whose checksums are compared therefore.
    """

    jobs: tuple[str, ...] = ()
    pieces: tuple[Piece, ...] = ()
    whole: Mapping[str, tuple[RemoteFile, ...]] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Bytes to download."""
        return sum(piece.size_bytes for piece in self.pieces)

    def disk_bytes(self, workers: int, readers: int) -> int:
        """Return the most disk space that downloads take up at a time."""
        checks = sum(piece.size_bytes for piece in self.pieces if CHECKS in piece.jobs)
        held = held_bytes(self.jobs, self.pieces, workers) + checks + ahead_bytes(readers)
        return min(held, self.size_bytes)

    @property
    def verified_shards(self) -> tuple[str, ...]:
        """Names of the shards whose checksums are compared."""
        return tuple(sorted({file.path.name for files in self.whole.values() for file in files}))


# A tensor that a job reads, or a pair that it reads side by side to compare them.
Read = tuple[TensorInfo, ...]


def tensors_read(
    parts: Sequence[PartPlan], tensors: Mapping[str, TensorInfo], tied: TiedCopies
) -> dict[str, list[Read]]:
    """Return the source tensors that each job reads, in the run's order.

    Copies are compared as they are copied, or else by CHECKS.
    """
    reads: dict[str, list[Read]] = {}
    apart = dict(tied.alike)
    for part in parts:
        for shard in (shard for shard in part.shards if shard.is_read):
            names: list[tuple[str, ...]] = []
            for step in shard.steps:
                main = apart.pop(step.inputs[0], None) if step.operation == COPY else None
                names += [(step.inputs[0], main)] if main else [(name,) for name in step.inputs]
            reads[f"{part.name}/{shard.file_name}"] = [
                tuple(tensors[name] for name in group) for group in names
            ]
    checks: list[Read] = [(tensors[own], tensors[main]) for own, main in apart.items()]
    checks += [(tensors[name],) for name in tied.unlike_tensors]
    return reads | ({CHECKS: checks} if checks else {})


def plan_downloads(checkpoint: Checkpoint, reads: Mapping[str, Sequence[Read]]) -> Downloads | None:
    """Return the downloads for what each job reads, in its order; None for a local source."""
    remote = _remote_files(checkpoint)
    if not remote:
        return None
    whole: dict[str, tuple[RemoteFile, ...]] = {}
    extents: dict[str, list[Extent]] = {}
    for job, groups in reads.items():
        counts = Counter(place for place, _ in {(t.path, t.name) for read in groups for t in read})
        entire = [s for s in checkpoint.shards if counts[s.path] == len(s.tensors) > 0]
        entire = [shard for shard in entire if shard.path in remote and shard.file.sha256]
        whole[job] = tuple(remote[shard.path] for shard in entire)
        heads = [Extent(remote[s.path], 0, s.tensors[0].offset_bytes) for s in entire]
        extents[job] = heads + [
            Extent(remote[tensor.path], tensor.offset_bytes + start, tensor.offset_bytes + end)
            for read in groups
            for start, end in _advances(read)
            for tensor in read
            if tensor.path in remote
        ]
    return Downloads(tuple(extents), plan_pieces(extents), whole)


def _advances(read: Read) -> list[tuple[int, int]]:
    """Return the bytes of each tensor of a read that are needed together, in order."""
    size_bytes = read[0].size_bytes
    step = size_bytes if len(read) == 1 else PIECE_BYTES
    starts = range(0, size_bytes, max(1, step))
    return [(start, min(start + step, size_bytes)) for start in starts]


@contextmanager
def opened_inputs(
    checkpoint: Checkpoint, downloads: Downloads | None, output: Path, jobs: Collection[str]
) -> Iterator[Inputs]:
    """Provide the source tensors for jobs; those of a remote source are downloaded meanwhile."""
    if downloads is None:
        yield Inputs(checkpoint.tensors)
        return
    stopping = threading.Event()
    staging = Staging(
        folder=output / DOWNLOADS_NAME,
        pieces=downloads.pieces,
        jobs=jobs,
        whole=downloads.whole,
        stopping=stopping,
    )
    with staging.start(checkpoint.readers):
        files = {
            path: StagedFile(file, staging) for path, file in _remote_files(checkpoint).items()
        }
        tensors = {
            name: tensor._replace(file=files.get(tensor.path, tensor.file))
            for name, tensor in checkpoint.tensors.items()
        }
        yield Inputs(tensors, staging.finishing, stopping)


def _remote_files(checkpoint: Checkpoint) -> dict[Place, RemoteFile]:
    """Return the shards that have to be downloaded, by their paths."""
    files = (shard.file for shard in checkpoint.shards)
    return {file.path: file for file in files if isinstance(file, RemoteFile)}
