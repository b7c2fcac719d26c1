"""Identity of a model: a hash by which it is known again, however its tensors are put into files.

It is of every tensor's name, dtype and shape, and of bytes from the middle of some of each kind, so
that it takes some hundreds of small reads of a model of any size. A model that was trained further,
or quantized otherwise, has another one; damage to a single tensor may leave it as it is.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import chain, groupby
from pathlib import Path

from mtp_checkpoints.containers import GGUF, SAFETENSORS
from mtp_checkpoints.containers.base import ShardHeader, TensorInfo
from mtp_checkpoints.containers.gguf_file import read_header
from mtp_checkpoints.containers.gguf_keys import written, written_text
from mtp_checkpoints.containers.gguf_values import Value, text
from mtp_checkpoints.sources.byte_source import RemoteFile
from mtp_checkpoints.sources.files import write_failure
from mtp_checkpoints.sources.local_folder import LocalFolder
from mtp_checkpoints.sources.remote_source import READERS
from mtp_checkpoints.sources.strict_json import parsed_json_object

# Where an MTP part has the identity of the main model that it was made with: its index in the
# metadata, its first GGUF file under a key of its own. Loaders leave both alone.
_METADATA, _KEY = "metadata", "main_identity"
_GGUF_KEY = f"mtp_export.{_KEY}"
_UNKNOWN = "0" * 64  # which takes the place of one in a GGUF file
_SAMPLED_TENSORS, _SAMPLE_BYTES = 16, 4096
_NUMBER = re.compile(r"[0-9]+")


def model_identity(tensors: Iterable[TensorInfo]) -> str:
    """Return the SHA-256 of a model's tensors: of each, in the order of names, a line of name,
    dtype and shape, and behind it the bytes that are sampled of it.

    Tensors whose names differ in numbers alone are of one kind: 16 of them are sampled, evenly in
    the order of these numbers, the 4096 bytes in the middle of each. Raises IoError.
    """
    ordered = sorted(tensors)
    samples = _samples(_sampled(ordered))
    digest = hashlib.sha256()
    for tensor in ordered:
        digest.update(f"{tensor.name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(samples.get(tensor.name, b""))
    return digest.hexdigest()


def with_main_identity(index: dict[str, object], identity: str) -> dict[str, object]:
    """Return the index of an MTP part with the identity of its main model."""
    metadata = index.get(_METADATA)
    assert isinstance(metadata, dict), "an index of ours"
    return index | {_METADATA: metadata | {_KEY: identity}}


def unknown_identity() -> dict[str, Value]:
    """Return the key of a GGUF file that is to have the identity of its main model."""
    return {_GGUF_KEY: text(_UNKNOWN)}


def record_main_identity(path: Path, head: bytes, identity: str) -> None:
    """Write the identity of its main model into a GGUF file that has none, and this head
    (IoError)."""
    key = written_text(_GGUF_KEY) + written(text(_UNKNOWN))
    try:
        with path.open("r+b") as file:
            file.seek(head.index(key) + len(key) - len(_UNKNOWN))
            file.write(identity.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise write_failure(path, error) from error


def recorded_main_identity(part: Path, shards: Iterable[ShardHeader] = ()) -> str | None:
    """Return the identity of the main model that an MTP part of these shards records; None where it
    has none.

    Raises InvalidInputError for an index that is not JSON, IoError.
    """
    for shard in shards:
        if shard.container == GGUF.name:
            value = read_header(shard.file).keys.get(_GGUF_KEY)
            if value is not None and value.data != _UNKNOWN:
                return value.data if isinstance(value.data, str) else None
    folder, name = LocalFolder(part), SAFETENSORS.index_name
    if name not in folder.names():
        return None
    metadata = parsed_json_object(part / name, folder.read(name)).get(_METADATA)
    identity = metadata.get(_KEY) if isinstance(metadata, dict) else None
    return identity if isinstance(identity, str) else None


def _sampled(tensors: Sequence[TensorInfo]) -> Iterator[TensorInfo]:
    kinds: dict[str, list[TensorInfo]] = {}
    for tensor in tensors:
        kinds.setdefault(_NUMBER.sub("#", tensor.name), []).append(tensor)
    for kind in kinds.values():
        kind.sort(key=lambda tensor: [int(number) for number in _NUMBER.findall(tensor.name)])
        count = min(len(kind), _SAMPLED_TENSORS)
        yield from (kind[number * len(kind) // count] for number in range(count))


def _samples(tensors: Iterable[TensorInfo]) -> dict[str, bytes]:
    """Return the bytes in the middle of tensors, by name: a remote source's are read file by file
    on several threads, since each takes a request."""
    in_files = sorted(tensors, key=lambda tensor: (str(tensor.path), tensor.offset_bytes))
    files = [list(in_file) for _, in_file in groupby(in_files, key=lambda tensor: str(tensor.path))]
    remote = any(isinstance(in_file[0].file, RemoteFile) for in_file in files)
    with ThreadPoolExecutor(READERS if remote else 1) as pool:
        return dict(chain.from_iterable(pool.map(_samples_of_file, files)))


def _samples_of_file(tensors: Sequence[TensorInfo]) -> list[tuple[str, bytes]]:
    with closing(tensors[0].file.open()) as file:
        found = []
        for tensor in tensors:
            size = min(tensor.size_bytes, _SAMPLE_BYTES)
            start = tensor.offset_bytes + (tensor.size_bytes - size) // 2
            found.append((tensor.name, file.read(start, start + size)))
        return found
