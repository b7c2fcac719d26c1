"""Downloads of a run: what each job reads of a remote source, and how much is held at once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from cases import MTP_LAYER
from checkpoints.sources.test_remote_source import ROOT, Remote
from mtp_checkpoints.sources import pieces
from mtp_checkpoints.sources.pieces import Piece
from mtp_checkpoints.sources.remote_source import RemoteSource
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_export.bundle import downloads as module
from mtp_export.bundle.downloads import (
    CHECKS,
    Downloads,
    Read,
    opened_inputs,
    plan_downloads,
    tensors_read,
)
from mtp_export.bundle.export import plan_export
from mtp_export.bundle.options import BundleOptions, ContentOptions, Part, SharedWeights
from mtp_export.plan import COPY

EMBEDDINGS = (f"model.layers.{MTP_LAYER}.embed_tokens.weight", "model.embed_tokens.weight")


@dataclass(frozen=True)
class Listed(Remote):
    """A file with its checksum."""

    sha256: str | None = None  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def exact_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Download nothing between two extents."""
    monkeypatch.setattr(pieces, "JOIN_BYTES", 0)


def remote(folder: Path, *, listed: bool = True) -> Checkpoint:
    """The checkpoint of a folder, as from a bucket."""
    files = {}
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        checksum = hashlib.sha256(data).hexdigest() if listed else None
        files[path.name] = Listed(data, ROOT / path.name, checksum)
    return Checkpoint.read_from(RemoteSource(ROOT, {}, files))


def single(tensors: object) -> list[Read]:
    return [(tensor,) for tensor in tensors]  # type: ignore[attr-defined]


def test_a_local_source_needs_none(pristine: Path, tmp_path: Path) -> None:
    local = Checkpoint.open(pristine)
    assert plan_downloads(local, {"main/a": single(local.tensors.values())}) is None
    with opened_inputs(local, None, tmp_path, ["main/a"]) as inputs:
        assert inputs.tensors == local.tensors
        assert not inputs.stopping.is_set()
        with inputs.finishing("main/a"):
            pass


def test_a_shard_that_one_job_reads_whole_is_compared(pristine: Path) -> None:
    checkpoint = remote(pristine)
    first, second, *_ = checkpoint.shards
    reads = {
        "main/a": single(first.tensors),
        "main/b": single(second.tensors[:-1]),
        "mtp/c": single(second.tensors[-1:]),
    }
    found = plan_downloads(checkpoint, reads)
    assert found is not None and found.jobs == tuple(reads)
    assert found.whole == {"main/a": (first.file,), "main/b": (), "mtp/c": ()}
    assert found.verified_shards == (first.path.name,)
    # With its header, which the checksum is of too.
    begins = {piece.start for piece in found.pieces if piece.file.path == first.path}
    assert 0 in begins
    part = second.tensors[0].offset_bytes
    assert min(p.start for p in found.pieces if p.file.path == second.path) == part
    wanted = first.size_bytes + sum(tensor.size_bytes for tensor in second.tensors)
    assert found.size_bytes == wanted
    unlisted = plan_downloads(remote(pristine, listed=False), reads)
    assert unlisted is not None and unlisted.verified_shards == ()


def test_a_tensor_that_is_read_twice_counts_once(pristine: Path) -> None:
    checkpoint = remote(pristine)
    shard = next(shard for shard in checkpoint.shards if len(shard.tensors) > 1)
    twice = [*single(shard.tensors[1:]), (shard.tensors[1], shard.tensors[1])]
    found = plan_downloads(checkpoint, {"main/a": twice})
    assert found is not None and found.whole == {"main/a": ()}


def test_a_pair_is_read_side_by_side(pristine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In advances of a piece of each, so that neither waits for the whole of the other."""
    for place in (pieces, module):
        monkeypatch.setattr(place, "PIECE_BYTES", 10_000)
    checkpoint = remote(pristine)
    own, main = (checkpoint.tensors[name] for name in EMBEDDINGS)
    found = plan_downloads(checkpoint, {CHECKS: [(own, main)]})
    assert found is not None
    order = [(piece.file.path, piece.start) for piece in found.pieces]
    for tensor in (own, main):
        starts = [start for path, start in order if path == tensor.path]
        assert starts == sorted(starts) and len(starts) > 2
    for count in range(len(order)):
        of_own = sum(path == own.path for path, _ in order[:count])
        assert abs(2 * of_own - count) <= 2, "neither is far ahead of the other"


def test_copies_are_read_where_they_are_copied(pristine: Path, output: Path) -> None:
    options = BundleOptions(pristine, output, content=ContentOptions(part=Part.MTP))
    plan = plan_export(options)
    tensors = plan.checkpoint.tensors
    reads = tensors_read(plan.parts, tensors, plan.tied)
    assert reads.keys() == {f"mtp/{shard.file_name}" for shard in plan.parts[0].shards}
    groups = [tuple(t.name for t in read) for job in reads.values() for read in job]
    assert EMBEDDINGS in groups and len(groups) == len({group[0] for group in groups})
    steps = [step for shard in plan.parts[0].shards for step in shard.steps]
    copied = [step.inputs[0] for step in steps if step.operation == COPY]
    assert sorted(group[0] for group in groups) == sorted(copied)
    dropped = replace(options, content=replace(options.content, shared_weights=SharedWeights.DROP))
    plan = plan_export(dropped)
    reads = tensors_read(plan.parts, tensors, plan.tied)
    assert [*reads][-1] == CHECKS
    assert EMBEDDINGS in [tuple(t.name for t in read) for read in reads[CHECKS]]
    assert all(len(read) == 1 for job in [*reads][:-1] for read in reads[job])


@pytest.mark.parametrize(
    ("workers", "ahead", "expected"), [(1, 0, 70), (2, 0, 90), (1, 15, 85), (1, 999, 110)]
)
def test_the_disk_that_downloads_take(
    workers: int, ahead: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of the jobs under way and of the comparisons, and those ahead of their readers."""
    file = Listed(bytes(200))
    sizes = {"a": 20, "b": 40, "c": 20, CHECKS: 30}
    found, start = list[Piece](), 0
    for job, size in sizes.items():
        found.append(Piece(file, start, start + size, frozenset({job})))
        start += size

    def ahead_bytes(readers: int) -> int:
        assert readers == 8
        return ahead

    monkeypatch.setattr(module, "ahead_bytes", ahead_bytes)
    downloads = Downloads(tuple(sizes), tuple(found))
    assert downloads.size_bytes == 110
    assert downloads.disk_bytes(workers, 8) == expected
