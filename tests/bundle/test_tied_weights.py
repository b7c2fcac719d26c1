"""Comparison of a tied tensor with its twin: where they differ, and what was passed on before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from cases import MTP_LAYER, read_shard, shard_of, write_shard
from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.dtypes import DType
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.sources.disk_queue import DiskQueue
from mtp_checkpoints.sources.local_folder import LocalFolder
from mtp_checkpoints.tensors.tensor_stream import TensorStream
from mtp_export.bundle.export import plan_export
from mtp_export.bundle.options import BundleOptions
from mtp_export.bundle.tied_weights import TiedCopies, compare_tied, first_difference

SIZE, PIECE = 20_001, 8192
OWN = [f"model.layers.{MTP_LAYER}.{name}.weight" for name in ("embed_tokens", "shared_head.head")]
CONTENT = os.urandom(SIZE)


@pytest.fixture
def queue() -> Iterator[DiskQueue]:
    with DiskQueue(2, PIECE) as queue:
        yield queue


def tensor(folder: Path, name: str, content: bytes) -> TensorInfo:
    (folder / name).write_bytes(b"head" + content)
    file = LocalFolder(folder).file(name)
    return TensorInfo(name, DType.U8, (len(content),), file, 4, len(content))


def changed_at(*places: int) -> bytes:
    changed = bytearray(CONTENT)
    for place in places:
        changed[place] ^= 1
    return bytes(changed)


def test_equal_tensors_are_passed_on_whole(tmp_path: Path, queue: DiskQueue) -> None:
    one, other = tensor(tmp_path, "one", CONTENT), tensor(tmp_path, "other", CONTENT)
    for compare in (first_difference, compare_tied):
        seen: list[bytes] = []
        use = lambda piece, seen=seen: seen.append(bytes(piece))  # noqa: E731
        with TensorStream(one, queue) as ours, TensorStream(other, queue) as theirs:
            assert compare(ours, theirs, use) is None
        assert b"".join(seen) == CONTENT
        assert len(seen) == 3


@pytest.mark.parametrize(
    ("places", "passed_on"), [((0,), 0), ((5, 9), 0), ((PIECE,), 1), ((SIZE - 1,), 2)]
)
def test_the_first_byte_that_differs(
    places: tuple[int, ...], passed_on: int, tmp_path: Path, queue: DiskQueue
) -> None:
    one = tensor(tmp_path, "one", CONTENT)
    other = tensor(tmp_path, "other", changed_at(*places))
    seen: list[bytes] = []
    use = lambda piece: seen.append(bytes(piece))  # noqa: E731
    with TensorStream(one, queue) as ours, TensorStream(other, queue) as theirs:
        assert first_difference(ours, theirs, use) == places[0]
    assert b"".join(seen) == CONTENT[: passed_on * PIECE]
    with (
        TensorStream(one, queue) as ours,
        TensorStream(other, queue) as theirs,
        pytest.raises(InvalidInputError) as refusal,
    ):
        compare_tied(ours, theirs, use)
    error = refusal.value
    assert error.what == "The MTP layer's one differs from the main model's other"
    assert error.where == tmp_path / "one"
    assert str(error.expected).startswith("equal bytes")
    assert error.found == f"a difference at byte {places[0]}"
    assert "--allow-untied exports it nevertheless" in str(error.todo)


def test_tensors_of_two_sizes_are_not_compared(tmp_path: Path, queue: DiskQueue) -> None:
    one, other = tensor(tmp_path, "one", CONTENT), tensor(tmp_path, "other", CONTENT[:PIECE])
    with (
        TensorStream(one, queue) as ours,
        TensorStream(other, queue) as theirs,
        pytest.raises(ValueError, match="shorter"),
    ):
        first_difference(ours, theirs, lambda piece: None)


@pytest.mark.parametrize("own", OWN)
def test_the_copies_of_a_checkpoint(own: str, source: Path, output: Path, queue: DiskQueue) -> None:
    """Embedding and head of the MTP layer, each with the main model's."""
    plan = plan_export(BundleOptions(source, output))
    tied, tensors, proceeded = plan.tied, plan.checkpoint.tensors, list[None]()
    assert tied.alike == dict(
        zip(OWN, ("model.embed_tokens.weight", "lm_head.weight"), strict=True)
    )
    assert (tied.unlike, tied.unlike_tensors) == ({}, ())
    proceed = partial(proceeded.append, None)
    tied.compare(tensors, tied.alike, queue, proceed)
    assert proceeded
    nothing = TiedCopies.nothing(plan.stored)
    assert (nothing.stored, nothing.alike, nothing.unlike) == (plan.stored, {}, {})
    path = shard_of(source, own)
    header, data = read_shard(path)
    end = header[own]["data_offsets"][1]
    write_shard(path, header, data[: end - 1] + bytes([data[end - 1] ^ 1]) + data[end:])
    damaged = plan_export(BundleOptions(source, output)).checkpoint.tensors
    tied.compare(damaged, [name for name in OWN if name != own], queue, proceed)
    with pytest.raises(InvalidInputError, match=f"{own} differs from the main model's"):
        tied.compare(damaged, OWN, queue, proceed)
