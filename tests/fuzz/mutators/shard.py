"""A shard as its header's bytes and its data, whatever they hold."""

from __future__ import annotations

from pathlib import Path


def read_shard(path: Path) -> tuple[bytes, bytes]:
    """Return header and data of a shard, empty ones where it is too damaged to have any."""
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    return raw[8:end], raw[end:]


def write_shard(path: Path, header: bytes, data: bytes) -> None:
    """Write a shard that tells its header's length rightly."""
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
