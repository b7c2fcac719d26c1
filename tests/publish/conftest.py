"""A bundle with a report that it passed, and a local Hub to push it to."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _http

from cases import export, make_checkpoint, run_program
from hub_server import HubServer
from mtp_checkpoints.sources import transfers


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source, a bundle of it in several shards, and a report; not to be changed."""
    folder = tmp_path_factory.mktemp("pushed")
    source = make_checkpoint(folder / "source")
    small = ("--max-shard-size", "150kB", "--quiet")
    assert export(source, folder / "bundle", *small).code == 0
    arguments = ("--level", "files", "--report", folder / "report.json", "--quiet")
    assert run_program("verify", folder / "bundle", *arguments).code == 0
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """An empty Hub, this process's own; waits between attempts are short."""
    monkeypatch.setattr(transfers, "FIRST_WAIT_SECONDS", 0.002)
    monkeypatch.setattr(transfers, "MAX_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 5)
    monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=lambda _: None, time=time.time))
    server = HubServer()
    monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
    monkeypatch.setenv("HF_TOKEN", server.token)
    with server.running():
        yield server
