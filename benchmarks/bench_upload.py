"""Bytes and seconds that judging a repository of DeepSeek-V3's size takes, on loopback.

    python -m benchmarks.bench_upload /data/scratch

tests/hub_server serves V3's 163 shards, with tensors that are holes in sparse files: only their
headers take disk, and checksums are made up. `verify hf://... --level files` runs --runs times,
with its start; bytes are all that the server sent. cpu_seconds are those that the program computed,
which other work on the machine changes little.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.measure import PROGRAM, Measured, machine, measure
from benchmarks.make_checkpoint import REAL_CONFIG, make_checkpoint

_REPOSITORY = "local/real"
_SHARD_BYTES = 4_300_000_000
_BOUNDS = {"seconds": 3.0, "megabytes": 20.0}


def main() -> None:
    from tests.hub_server import HubServer, StoredFile

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--result", type=Path, default=Path("benchmarks/results/upload.json"))
    arguments = parser.parse_args()
    source = arguments.scratch / "source"
    if not (source / "config.json").exists():
        make_checkpoint(
            source, REAL_CONFIG, max_shard_bytes=_SHARD_BYTES, filled=lambda name: False
        )
    # Hashing 670 GB of zeros would take minutes; nothing here reads a whole shard.
    for name in ("sha256", "oid"):
        setattr(StoredFile, name, property(partial(_checksum, vars(StoredFile)[name].func)))
    server = HubServer()
    server.serve(_REPOSITORY, source)
    runs: list[Measured] = []
    sent_bytes: list[int] = []
    with server.running():
        os.environ["HF_ENDPOINT"] = server.endpoint
        command = [*PROGRAM, "verify", f"hf://{_REPOSITORY}", "--level", "files", "--quiet"]
        for number in range(arguments.runs):
            server.log.clear()
            runs.append(measure(command, cold=False))
            sent_bytes.append(server.sent_bytes)
            print(f"run {number + 1}: {runs[-1]}, {sent_bytes[-1]:,} bytes", flush=True)
    result = {
        "machine": machine(),
        "shards": len(list(source.glob("*.safetensors"))),
        "seconds": [round(run.seconds, 2) for run in runs],
        "cpu_seconds": round(median(run.cpu_seconds for run in runs), 2),
        "sent_bytes": max(sent_bytes),
        "peak_bytes": max(run.peak_bytes for run in runs),
        "load_average": round(os.getloadavg()[0], 1),
        "bounds": _BOUNDS,
    }
    text = json.dumps(result, indent=2)
    arguments.result.write_text(text + "\n")
    print(text)


def _checksum(real: Callable[[Any], str], file: Any) -> str:
    """A shard's checksum by its name, and another file's own."""
    return hashlib.sha256(file.name.encode()).hexdigest() if file.is_large else real(file)


if __name__ == "__main__":
    main()
