"""Several ranks on this machine: the test's process leads, and others follow it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_runtime.models.sliced import SlicedLayers
from mtp_runtime.parallel.group import Group
from mtp_runtime.parallel.join import joined

_FOLLOW = """
from mtp_runtime.parallel.join import joined
with joined(watched=False) as group:
    group.follow()
"""
_TESTS = Path(__file__).resolve().parents[1]


def launch_variables(size: int) -> dict[str, str]:
    """Variables that torchrun sets, but for the rank."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {"WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"} | address


@contextmanager
def ranks(size: int) -> Iterator[Group]:
    """Start ranks; a failure of one is an IoError in the others."""
    variables = launch_variables(size)
    paths = [str(_TESTS), str(_TESTS.parent), *sys.path]
    others = os.environ | variables | {"PYTHONPATH": os.pathsep.join(paths)}
    followers = [
        subprocess.Popen([sys.executable, "-c", _FOLLOW], env=others | {"RANK": str(rank)})
        for rank in range(1, size)
    ]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (variables | {"RANK": "0"}).items():
            patch.setenv(name, value)
        with joined(watched=False) as group:
            yield group
    assert [follower.wait(60) for follower in followers] == [0] * (size - 1)


def of_each(group: Group, function: Any, *arguments: Any) -> list[list[float]]:
    """Numbers that function(group, ...) returns on every rank."""
    found = group.everywhere(_numbers, function, arguments)
    return [list(map(float, row)) for row in found.tolist()]


def _numbers(group: Group, function: Any, arguments: tuple[Any, ...]) -> torch.Tensor:
    own = torch.tensor([function(group, *arguments)], dtype=torch.float64)
    return group.rows_to_first(own, [1] * group.size)


def bytes_read() -> int:
    """Bytes that this process has read from files."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def held_bytes(group: Group) -> list[int]:
    """Bytes of the packed layers that a rank holds."""
    return [
        sum(
            tensor.numel() * tensor.element_size()
            for layers in group.parts.values()
            if isinstance(layers, SlicedLayers)
            for layer in layers.decoder.layers
            for tensor in layer.tensors
        )
    ]
