"""Memory of an export from the Hub: as many tensors and shards as the release has, and more bytes
of the MTP layer than it may take."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.make_checkpoint import REAL_CONFIG, make_checkpoint
from cases import read_json
from hub_server import HubServer
from hub_server.storage import Repository, StoredFile
from peak_memory import peak_bytes

BOUND_BYTES = 400_000_000
MTP_LAYER = REAL_CONFIG["num_hidden_layers"]
# A sixteenth of the release's bytes in as many tensors.
NARROW = REAL_CONFIG | {
    "hidden_size": 1792,
    "intermediate_size": 4608,
    "moe_intermediate_size": 512,
    "vocab_size": 8192,
}
SHARD_BYTES = 270_000_000


@dataclass(frozen=True)
class UnreadFile(StoredFile):
    """A file that nobody is to read whole: its checksums are made up, which takes no time."""

    @property
    def sha256(self) -> str:  # type: ignore[override]
        return hashlib.sha256(self.name.encode()).hexdigest()

    @property
    def oid(self) -> str:  # type: ignore[override]
        return hashlib.sha1(self.name.encode()).hexdigest()


@pytest.mark.nightly
def test_an_export_takes_less_than_the_layer(tmp_path: Path) -> None:
    source, server = tmp_path / "source", HubServer()
    make_checkpoint(
        source, NARROW, max_shard_bytes=SHARD_BYTES, filled=lambda name: False, parted=False
    )
    shards = read_json(source / "model.safetensors.index.json")["weight_map"]
    assert len(shards) > 90_000 and len(set(shards.values())) > 140
    own = {file for name, file in shards.items() if f".{MTP_LAYER}." in name}
    unread = set(shards.values()) - own
    server.repositories["acme/narrow"] = repository = Repository()
    kinds = {path: UnreadFile if path.name in unread else StoredFile for path in source.iterdir()}
    repository.commit_files({path.name: kind(path, path.name) for path, kind in kinds.items()})
    with server.running():
        variables = {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(tmp_path)}
        peak = peak_bytes("hf://acme/narrow", tmp_path / "out", "--part", "mtp", **variables)
        assert server.sent_bytes > 1.5 * BOUND_BYTES
    assert peak < BOUND_BYTES
