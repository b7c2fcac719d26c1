"""Fields of config.json that the keys of a GGUF file say too, which is all that llama.cpp reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import isclose
from typing import Any, NamedTuple

from mtp_checkpoints.containers.base import ShardHeader
from mtp_checkpoints.containers.gguf_architectures import ARCHITECTURES
from mtp_checkpoints.containers.gguf_architectures.base import ARCHITECTURE, TEXT_CONFIG
from mtp_checkpoints.containers.gguf_file import read_header
from mtp_checkpoints.families.signs import COUNT_FIELDS, flattened

_TOLERANCE = 1e-6  # of numbers in single precision


class SaidTwice(NamedTuple):
    """A field as the keys say it, and as config.json has it."""

    field: str
    said: object
    wanted: object

    @property
    def is_alike(self) -> bool:
        return _alike(self.said, self.wanted)


def said_twice(
    shards: Iterable[ShardHeader], config: Mapping[str, Any], *, of_main: bool
) -> Iterator[SaidTwice]:
    """Yield the fields that the keys of a model's first file and its config.json both have.

    of_main: the file is the main model's, which need not count the modules of another.
    """
    headers = [read_header(shard.file) for shard in shards]
    keys = headers[0].keys
    names = {tensor.name for header in headers for tensor in header.shard.tensors}
    said = flattened(ARCHITECTURES[str(keys[ARCHITECTURE].data)].config(keys, names))
    wanted = flattened(config.get(TEXT_CONFIG, config))
    for field in sorted(said.keys() & wanted.keys()):
        if not of_main or field not in COUNT_FIELDS or said[field]:
            yield SaidTwice(field, said[field], wanted[field])


def _alike(said: object, wanted: object) -> bool:
    if isinstance(said, Mapping) and isinstance(wanted, Mapping):
        return all(_alike(said[field], wanted[field]) for field in said.keys() & wanted.keys())
    numbers = isinstance(said, int | float) and isinstance(wanted, int | float)
    if numbers and not isinstance(said, bool) and not isinstance(wanted, bool):
        assert isinstance(said, int | float) and isinstance(wanted, int | float)
        return isclose(said, wanted, rel_tol=_TOLERANCE)
    return said == wanted
