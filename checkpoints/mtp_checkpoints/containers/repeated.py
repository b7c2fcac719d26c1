"""Shards that no index names and that hold tensors of shards that it does: leftovers of an upload
or a download, or tensors that were meant to take the others' place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from mtp_checkpoints.containers.base import SINGLE_NAME, Pair, Repeated, ShardHeader, TensorInfo
from mtp_checkpoints.errors import InvalidInputError

_SAMPLE_BYTES = 4096
_REMOTE_SAMPLES = 16  # tensors that are compared over a network
_STEP_BYTES = 1 << 20


class RepeatedTensorsError(InvalidInputError):
    """A shard that the index does not name repeats tensors of shards that it does, and others, or
    with other values. compared: tensors of which samples were compared; unlike: those that differ
    by them, by name; others: the number of its other tensors."""

    def __init__(
        self, shard: ShardHeader, pairs: Sequence[Pair], compared: int, unlike: Sequence[str]
    ) -> None:
        self.pairs, self.compared, self.unlike = tuple(pairs), compared, tuple(unlike)
        self.others = len(shard.tensors) - len(pairs)
        first, listed = pairs[0]
        others = "a loader that reads every file of the folder takes either"
        if shard.path.name == SINGLE_NAME:
            others = f"transformers loads {SINGLE_NAME} alone"
        super().__init__(
            "A shard that the index does not name repeats tensors of the index",
            where=shard.path,
            expected="each tensor in one file: vLLM and SGLang load the file that the index names,"
            f" and {others}",
            found=f"{len(pairs)} of its {len(shard.tensors)} tensors, such as {first.name}, also in"
            f" {listed.path.name}",
            todo="Delete the file if it is a leftover; if its tensors are the right ones, write the"
            " index again",
        )


def repeated_of(shard: ShardHeader, pairs: Sequence[Pair]) -> Repeated:
    """Return a shard with the tensors that it repeats, where these are all of it and samples of
    them are equal.

    Raises RepeatedTensorsError for another, IoError for a file that cannot be read.
    """
    local = isinstance(shard.path, Path)
    asked = pairs if local else pairs[:_REMOTE_SAMPLES]
    unlike = [own.name for own, listed in asked if _sample(own) != _sample(listed)]
    if unlike or len(pairs) < len(shard.tensors):
        raise RepeatedTensorsError(shard, pairs, len(asked), unlike)
    return Repeated(shard, tuple(pairs), len(asked))


def are_equal(pair: Pair) -> bool:
    """Return whether two tensors are of one dtype and shape and hold the same bytes (IoError)."""
    own, listed = pair
    if (own.dtype, own.shape, own.size_bytes) != (listed.dtype, listed.shape, listed.size_bytes):
        return False
    pieces = zip(_pieces(own), _pieces(listed), strict=True)
    return all(one == other for one, other in pieces)


def _pieces(tensor: TensorInfo) -> Iterator[bytes]:
    file, stop = tensor.file.open(), tensor.offset_bytes + tensor.size_bytes
    try:
        for start in range(tensor.offset_bytes, stop, _STEP_BYTES):
            yield file.read(start, min(start + _STEP_BYTES, stop))
    finally:
        file.close()


def _sample(tensor: TensorInfo) -> tuple[str, tuple[int, ...], bytes]:
    """Return dtype, shape, and bytes from the middle of a tensor."""
    middle = tensor.offset_bytes + max(0, tensor.size_bytes - _SAMPLE_BYTES) // 2
    stop = min(middle + _SAMPLE_BYTES, tensor.offset_bytes + tensor.size_bytes)
    file = tensor.file.open()
    try:
        return tensor.dtype, tensor.shape, file.read(middle, stop)
    finally:
        file.close()
