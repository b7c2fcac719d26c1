"""Several ranks on this machine: the test's process leads, and others follow it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compiled_once import compile_once
from forked import Forked
from mtp_runtime.layers.tensor_parallel import VocabParallelEmbedding
from mtp_runtime.models.sharded import ShardedLayers
from mtp_runtime.parallel.group import Group
from mtp_runtime.parallel.join import joined


def launch_variables(size: int) -> dict[str, str]:
    """Variables that torchrun sets, but for the rank."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {"WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"} | address


@contextmanager
def ranks(size: int, *, killed: bool = False) -> Iterator[Group]:
    """Start ranks; a failure of one is an IoError in the others. killed: none ends in peace."""
    variables = launch_variables(size)
    followers = [
        Forked(_follow, environment=os.environ | variables | {"RANK": str(rank)})
        for rank in range(1, size)
    ]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (variables | {"RANK": "0"}).items():
            patch.setenv(name, value)
        with joined(watched=False) as group, group.leading():
            yield group
    codes = [follower.wait(60) for follower in followers]
    assert all(codes) if killed else not any(codes), codes


def _follow() -> None:
    compile_once()
    with joined(watched=False) as group:
        group.follow()


def of_each(group: Group, function: Any, *arguments: Any) -> list[list[float]]:
    """Numbers that function(group, ...) returns on every rank."""
    rows: torch.Tensor = group.everywhere(_numbers, function, arguments)
    return [list(map(float, row)) for row in rows.tolist()]


def _numbers(group: Group, function: Any, arguments: tuple[Any, ...]) -> torch.Tensor:
    own = torch.tensor([function(group, *arguments)], dtype=torch.float64)
    return group.rows_to_first(own, [1] * group.size)


def bytes_read() -> int:
    """Bytes that this process has read from files."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def draft_bytes(weights: object) -> int:
    """Bytes that a rank holds of a draft, but for the layers that it was packed of."""
    assert is_dataclass(weights)
    held = {field.name: getattr(weights, field.name) for field in fields(weights)}
    packed = packed_bytes(getattr(weights, "layers", None))
    held.pop("layers", None)
    held.pop("layer", None)
    return packed + dense_bytes(list(held.values()))


def packed_bytes(layers: object) -> int:
    """Bytes of packed layers."""
    if not isinstance(layers, ShardedLayers):
        return 0
    held: list[torch.Tensor | np.ndarray] = []
    for layer in layers.decoder.layers:
        held += layer.layer.arrays
        for mlp in layer.mlps:
            assert isinstance(mlp.down.memory, np.ndarray)
            held += *mlp.packed.panels, mlp.down.memory
    return sum(part.nbytes for part in held)


def dense_bytes(parts: object) -> int:
    """Bytes of torch's tensors in parts of a model, each storage once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in _tensors_in(parts)
    }
    return sum(storages.values())


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors_in(one)
    elif isinstance(value, VocabParallelEmbedding):
        yield from _tensors_in(vars(value)["_table"])
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors_in(getattr(value, field.name))
