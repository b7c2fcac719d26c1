"""Download rate of an export against plain HTTP clients that get the same bytes, on loopback.

    python -m benchmarks.bench_hub /data/scratch

tests/hub_server serves a checkpoint of DeepSeek-V3's layer shapes with 32 experts, which is made
first, from the page cache. It takes 8 GB of disk. Rows, in turn, medians of --runs; all write
files, and `sync` counts:
  (a) this tool, --part mtp: with its start, the headers, checksums and comparisons
  (b) httpx2, as huggingface_hub has it, 8 threads, ranges of 32 MB into files
  (c) the same ranges with http.client, read into a buffer of 1 MiB: little else than the sockets
Rates are bytes of these ranges per second; memory and seconds of computing are the kernel's figures
for the process. Modules are read as an installed program's are, compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.measure import Measured, machine, measure
from benchmarks.make_checkpoint import REAL_CONFIG, make_checkpoint

_REPOSITORY = "local/source"
_CONFIG = REAL_CONFIG | {
    "first_k_dense_replace": 1,
    "n_routed_experts": 32,
    "num_hidden_layers": 2,
    "vocab_size": 16_384,
}
_SHARD_BYTES = 1_300_000_000
_PROGRAM = [sys.executable, "-c", "from mtp_export.cli import main; main()"]
_CLIENT = """
import json, queue, sys, threading
from pathlib import Path
output, pieces = Path(sys.argv[1]), queue.SimpleQueue()
for piece in json.loads(sys.argv[2]):
    pieces.put(piece)

def work():
    while True:
        try:
            url, start, end = pieces.get_nowait()
        except queue.Empty:
            return
        path = output / f"{url.rpartition('/')[2]}.{start}"
        with path.open("wb", buffering=0) as file:
            get(url, {"Range": f"bytes={start}-{end - 1}"}, file)

def run():
    output.mkdir(parents=True)
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""
_HTTPX = """
import httpx2
client = httpx2.Client(follow_redirects=True)

def get(url, headers, file):
    with client.stream("GET", url, headers=headers) as response:
        for chunk in response.iter_raw():
            file.write(chunk)

run()
"""
_HTTP_CLIENT = """
from http.client import HTTPConnection
from urllib.parse import urljoin, urlsplit

def get(url, headers, file):
    while True:
        parts = urlsplit(url)
        connection = HTTPConnection(parts.netloc)
        connection.request("GET", f"{parts.path}?{parts.query}", headers=headers)
        response = connection.getresponse()
        if response.status != 302:
            break
        url = urljoin(url, response.headers["Location"])
    buffer = memoryview(bytearray(1 << 20))
    while count := response.readinto(buffer):
        file.write(buffer[:count])
    connection.close()

run()
"""


@contextmanager
def served(source: Path) -> Iterator[str]:
    """Serve a checkpoint in a process of its own; provide its endpoint."""
    command = [sys.executable, "-m", "tests.hub_server", str(source), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        endpoint = next(line for line in server.stdout if "HF_ENDPOINT" in line)
        yield endpoint.strip().partition("=")[2]
    finally:
        server.terminate()
        server.wait()


def downloads(output: Path) -> list[tuple[str, int, int]]:
    """Return the ranges that the export downloads: file, start and end."""
    from mtp_checkpoints.sources.byte_source import Address
    from mtp_export.bundle.export import plan_export
    from mtp_export.bundle.options import BundleOptions, ContentOptions, Part

    content = ContentOptions(part=Part.MTP)
    plan = plan_export(BundleOptions(Address(f"hf://{_REPOSITORY}"), output, content=content))
    assert plan.downloads is not None
    return [(piece.file.path.name, piece.start, piece.end) for piece in plan.downloads.pieces]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rows", default="abc")
    parser.add_argument("--result", type=Path, default=Path("benchmarks/results/hub.json"))
    arguments = parser.parse_args()
    source, output = arguments.scratch / "source", arguments.scratch / "out"
    if not (source / "config.json").exists():
        mtp = f"model.layers.{_CONFIG['num_hidden_layers']}."
        own = (mtp, "model.embed_tokens.", "lm_head.")
        make_checkpoint(
            source, _CONFIG, max_shard_bytes=_SHARD_BYTES, filled=lambda name: name.startswith(own)
        )
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Into the page cache; by another process, as a child's peak memory begins with its parent's.
    subprocess.run(["cat", *source.glob("*.safetensors")], stdout=subprocess.DEVNULL, check=True)
    with served(source) as endpoint:
        os.environ["HF_ENDPOINT"] = endpoint
        ranges = downloads(output)
        size_bytes = sum(end - start for _, start, end in ranges)
        urls = [(f"{endpoint}/{_REPOSITORY}/resolve/main/{name}", *ends) for name, *ends in ranges]
        export = [*_PROGRAM, "--input-dir", f"hf://{_REPOSITORY}", "--part", "mtp", "--quiet"]
        plain = [str(output), json.dumps(urls)]
        commands = {
            "(a) mtp-export": [*export, "--output-dir", str(output)],
            "(b) httpx2, 8 threads": [sys.executable, "-c", _CLIENT + _HTTPX, *plain],
            "(c) http.client, 8 threads": [sys.executable, "-c", _CLIENT + _HTTP_CLIENT, *plain],
        }
        measured: dict[str, list[Measured]] = {}
        for number in range(arguments.runs):
            for name, command in commands.items():
                if name[1] in arguments.rows:
                    shutil.rmtree(output, ignore_errors=True)
                    os.sync()
                    measured.setdefault(name, []).append(measure(command, cold=False))
                    print(f"run {number + 1}: {name}: {measured[name][-1]}", flush=True)
        shutil.rmtree(output, ignore_errors=True)
    result = {"machine": machine(), "downloaded_bytes": size_bytes}
    result |= {"rows": {name: row(runs, size_bytes) for name, runs in measured.items()}}
    result |= {"ratios": ratios(result["rows"])}
    text = json.dumps(result, indent=2)
    arguments.result.write_text(text + "\n")
    print(text)


def row(runs: list[Measured], size_bytes: int) -> dict[str, Any]:
    """A row's rate by its median, all its runs, what they computed, and its peak memory."""
    seconds = median(run.seconds for run in runs)
    return {
        "mb_per_second": round(size_bytes / seconds / 1e6, 1),
        "seconds": [round(run.seconds, 2) for run in runs],
        "cpu_seconds_per_gb": round(median(run.cpu_seconds for run in runs) / size_bytes * 1e9, 2),
        "peak_bytes": max(run.peak_bytes for run in runs),
        "load_average": round(os.getloadavg()[0], 1),
    }


def ratios(rows: dict[str, Any]) -> dict[str, float]:
    """The rate to reach, against each client."""
    rates = {name[1]: row["mb_per_second"] for name, row in rows.items()}
    wanted = {"a / b (at least 0.7)": "ab", "a / c": "ac"}
    return {
        name: round(rates[one] / rates[other], 3)
        for name, (one, other) in wanted.items()
        if one in rates and other in rates
    }


if __name__ == "__main__":
    main()
