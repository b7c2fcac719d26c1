"""Bundles of remote checkpoints: what their tests set, what they count, and what they compare."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cases import tree
from hub_server import HubServer, Request
from mtp_checkpoints.sources import pieces, transfers

MANIFEST = "mtp_export.json"
MTP = ("--part", "mtp", "--quiet")
COPIES = (*MTP, "--link", "copy")
PIECE_BYTES = 40_000


def shrink_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set sizes at which a small checkpoint comes in many pieces, and waits that are short."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(pieces, "JOIN_BYTES", 500)
    monkeypatch.setattr(transfers, "FIRST_WAIT_SECONDS", 0.002)
    monkeypatch.setattr(transfers, "MAX_WAIT_SECONDS", 0.01)


def ranges(server: HubServer) -> list[Request]:
    """Return the requests that got bytes of shards."""
    return [request for request in server.log if request.status == 206]


def ranges_got(server: HubServer) -> set[tuple[str, str | None]]:
    """Return the ranges of shards that were asked for, each once, and forget all requests.

    Those of a client that was killed end when the server finds that nobody reads its answer.
    """
    server.settle()
    got = {(request.path, request.byte_range) for request in ranges(server)}
    server.log.clear()
    return got


def assert_equal(output: Path, local: dict[str, bytes]) -> None:
    """Compare a bundle with one from a folder; only the manifest's source may differ."""
    found = tree(output)
    assert found.keys() == local.keys()
    manifests = [json.loads(files.pop(MANIFEST)) for files in (found, dict(local))]
    assert found == {name: data for name, data in local.items() if name != MANIFEST}
    for key in ("parts", "options"):
        assert manifests[0][key] == manifests[1][key]
