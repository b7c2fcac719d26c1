"""States that a command resumes from are whole or not there, and a full disk is told in figures."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from mtp_checkpoints.errors import IoError
from mtp_export.kept_states import keep_state

STATE = {"layer": 1, "hidden": torch.zeros(100), "more": {"rows": [torch.ones(50), torch.ones(25)]}}
NUMBERS = {"full": errno.ENOSPC, "over quota": errno.EDQUOT, "broken": errno.EIO}


class Room(NamedTuple):
    """Room of a disk, as shutil tells it."""

    free: int


def failing(number: int, after: int) -> Callable[..., int]:
    """A pwrite that fails once some bytes are written, each call a hundred of them at most."""
    real = os.pwrite

    def pwrite(fd: int, data: Any, position: int) -> int:
        if position >= after:
            raise OSError(number, os.strerror(number))
        return real(fd, data[:100], position)

    return pwrite


def test_a_state_is_what_torch_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", failing(errno.ENOSPC, 1 << 20))
    keep_state(tmp_path / "state.pt", STATE, "It cannot")
    found = torch.load(tmp_path / "state.pt", weights_only=True)
    assert found["layer"] == 1 and torch.equal(found["more"]["rows"][0], torch.ones(50))


@pytest.mark.parametrize("trouble", NUMBERS)
@pytest.mark.parametrize("after", [0, 500, 1000])
def test_what_a_disk_refuses(
    trouble: str, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, number = tmp_path / "state.pt", NUMBERS[trouble]
    path.write_bytes(b"the state before")
    monkeypatch.setattr(os, "pwrite", failing(number, after))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Room(6000 * (folder == tmp_path)))
    with pytest.raises(IoError) as refused:
        keep_state(path, STATE, "It cannot")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {
        "state.pt": b"the state before"
    }
    again = "then run the same command again: it goes on where it stopped."
    full = (
        f"It cannot ({path}). Expected room for 700 B, beside the state before it. Found a full"
        f" disk, with 6.0 kB free. Free some space, or give a --workdir with more room, {again}"
    )
    broken = (
        f"It cannot ({path}). Found Input/output error. Check that its folder is there and may be"
        f" written, {again}"
    )
    assert str(refused.value) == (broken if number == errno.EIO else full)


def test_a_folder_that_vanished(tmp_path: Path) -> None:
    with pytest.raises(IoError, match="No such file or directory. Check that its folder"):
        keep_state(tmp_path / "gone/state.pt", STATE, "It cannot")


def test_what_torch_itself_refuses_is_no_trouble_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*given: object) -> None:
        raise RuntimeError("torch's own")

    monkeypatch.setattr(torch, "save", refuses)
    with pytest.raises(RuntimeError, match="torch's own"):
        keep_state(tmp_path / "state.pt", STATE, "It cannot")
