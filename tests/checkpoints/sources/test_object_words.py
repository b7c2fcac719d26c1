"""Refusals of object stores whose answers cannot be used."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import object_server
from mtp_checkpoints.errors import IoError
from mtp_checkpoints.sources.byte_source import Address
from mtp_checkpoints.sources.object_store import open_object_store
from object_server import ObjectServer

pytest.importorskip("obstore", reason="the extra cloud is not installed")

ADDRESS = Address("s3://weights/tiny")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """A store with one object in a folder, as the cloud of this process."""
    (tmp_path / "config.json").write_text("{}")
    server = ObjectServer()
    server.fill("weights", "tiny", tmp_path)
    for name, value in server.environment("s3").items():
        monkeypatch.setenv(name, value)
    with server.running():
        yield server


def test_an_object_without_an_etag(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_object_store(ADDRESS).names() == {"config.json"}
    real = object_server._contents
    monkeypatch.setattr(
        object_server, "_contents", lambda *page: re.sub("<ETag>.*?</ETag>", "", real(*page))
    )
    with pytest.raises(IoError) as refusal:
        open_object_store(ADDRESS)
    error = refusal.value
    assert error.where == ADDRESS / "config.json"
    assert error.expected == "an ETag, by which a change of the object is noticed"
    assert error.found == "none"
