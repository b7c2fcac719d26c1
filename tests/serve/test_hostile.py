"""Bodies made to cost a server much: it refuses them, and the other clients never wait for it.

The server runs in a process of its own, which measures itself (serve/watched.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cases import nightly_but
from mtp_export.serve.limits import MAX_BODY_BYTES
from serve.hostile import KINDS, VALUES, places, put
from serve.running import BANNER_END, Client, announced_port
from serve.watched import WATCH

# The bounds that docs/serve.md states, in bytes and in seconds of computing: twice its 50 ms, for
# machines that are slower or busy.
MAX_MEMORY_BYTES = 1 << 30
MAX_KEPT_SECONDS = 0.1
CLIENTS = 8
FIXTURE = Path(__file__).resolve().parents[2] / "fixtures/deepseek-v3-tiny"
EVERY, FEW = 1, len(VALUES)  # shares of the bodies
# Of the model and its cache, 140 kB a token; the number of prompts of 250 tokens that fill it, so
# that no page of it counts as memory of the requests that are measured.
SERVER_MEMORY = {EVERY: ("1100MB", 18), FEW: ("650MB", 6)}
# Asks for the health of the server at a port until its input ends, and tells how long that took.
WATCHER = """
import http.client, json, select, sys, time
connection, seconds = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1])), []
while not select.select([sys.stdin], [], [], 0.02)[0]:
    start = time.monotonic()
    connection.request("GET", "/health")
    response = connection.getresponse()
    assert response.status == 200 and not response.read()
    seconds.append(time.monotonic() - start)
print(json.dumps(seconds))
"""
# Requests that may be made and take much: they are answered, or refused for what they ask. Many of
# their answers are long and their prompts short: attention to a long one takes minutes itself.
LARGE: tuple[dict[str, Any], ...] = (
    {
        "prompt": ["a b c d"] * 128,
        "max_tokens": 4,
        "stop": [f"{'a' * 1022}{n:02}" for n in range(64)],
    },
    {"prompt": [5] * 250, "n": 48, "logprobs": 20, "echo": True, "max_tokens": 1},
    {"prompt": [5] * 1000, "logprobs": 20, "echo": True, "max_tokens": 1, "stream": True},
    {"prompt": "a", "n": 128, "logprobs": 20, "max_tokens": 40, "ignore_eos": True},
    {"prompt": [5] * 250, "n": 128, "max_tokens": 1, "echo": True},
)


@dataclass
class Watched:
    """A server in a process of its own, and what was seen of it from outside."""

    process: subprocess.Popen[str]
    port: int
    health_seconds: list[float] = field(default_factory=list)
    measures: dict[str, Any] = field(default_factory=dict)

    def high_water(self) -> int:
        """Bytes that were resident at most."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) << 10

    @contextmanager
    def asked_for_health(self) -> Iterator[None]:
        """Ask for its health all the while, in a process of its own: this one makes bodies."""
        command = [sys.executable, "-c", WATCHER, str(self.port)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as watcher:
            yield
            out, _ = watcher.communicate("")
        assert watcher.returncode == 0
        self.health_seconds = json.loads(out)

    def end(self) -> float:
        """Send SIGTERM; return the seconds until the end, at which the measures are there."""
        start = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        out, _ = self.process.communicate(timeout=100)
        assert self.process.returncode == 0
        self.measures = json.loads(out.splitlines()[-1])
        return time.monotonic() - start


@contextmanager
def watched(folder: Path, share: int) -> Iterator[Watched]:
    """Serve the miniature, with room for a share of the bodies."""
    memory, prompts = SERVER_MEMORY[share]
    filling = {"prompt": [[token] * 250 for token in range(3, 3 + prompts)], "max_tokens": 1}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "serve.watched", str(FIXTURE), "--port", "0"]
    command += ["--shutdown-timeout", "1", "--enable-prefix-cache", "--max-memory", memory]
    with (folder / "stderr").open("w") as errors:
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        while BANNER_END not in (shown := (folder / "stderr").read_text()):
            assert process.poll() is None, shown
            time.sleep(0.05)
        server = Watched(process, announced_port(shown.splitlines()))
        assert send(server.port, "/v1/completions", b"{}") == 400  # it runs, with all it imports
        assert send(server.port, "/v1/completions", json.dumps(filling).encode()) == 200
        process.send_signal(WATCH)
        yield server
    finally:
        process.kill()
        process.communicate()


def send(port: int, path: str, body: bytes) -> int:
    """Send a body, as often as the server has no room for it; return the status."""
    while True:
        client = Client(port, seconds=1800)
        reply = client.ask("POST", path, body, Content_Type="application/json")
        client.close()
        if reply.status != 503:
            return reply.status
        assert reply.headers["retry-after"]
        time.sleep(0.1)


def hostile(share: int) -> list[tuple[str, str, bytes, str]]:
    """Paths, bodies with a mark, and the names of its place and of a value for it; every share-th
    of them, so that each place and each value comes."""
    marked = [(path, name, body) for path, kind in KINDS.items() for name, body in places(kind)]
    every = [
        (path, name, body, value)
        for number, (path, name, body) in enumerate(marked)
        for other, value in enumerate(VALUES)
        if (number + other) % share == 0
    ]
    assert {(path, name) for path, name, *_ in every} == {(path, name) for path, name, _ in marked}
    assert {value for *_, value in every} == set(VALUES)
    return every


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("share", nightly_but([FEW], (EVERY, FEW)))
def test_hostile_bodies_keep_nobody_waiting(share: int, tmp_path: Path) -> None:
    refused: list[int] = []
    with watched(tmp_path, share) as server, ThreadPoolExecutor(CLIENTS) as pool:
        before = server.high_water()

        def ask(case: tuple[str, str, bytes, str]) -> None:
            path, name, body, value = case
            status = send(server.port, path, put(body, VALUES[value](MAX_BODY_BYTES - 1000)))
            assert status in (200, 400, 404), (name, value, status)
            refused.append(status)

        large = LARGE if share == EVERY else LARGE[:1]
        bodies = [json.dumps(body).encode() for body in large]
        with server.asked_for_health():
            list(pool.map(ask, hostile(share)))
            statuses = list(pool.map(partial(send, server.port, "/v1/completions"), bodies))
        memory, seconds = server.high_water() - before, server.end()
    print(
        f"{len(refused)} bodies, {refused.count(200)} answered; large {statuses};"
        f" memory {memory >> 20} MiB; end in {seconds:.1f} s; {server.measures};"
        f" health in {max(server.health_seconds):.3f} s at most of {len(server.health_seconds)}"
    )
    assert "Traceback" not in (tmp_path / "stderr").read_text()
    assert memory <= MAX_MEMORY_BYTES
    assert server.measures["callback_seconds"] <= MAX_KEPT_SECONDS, server.measures
    assert server.measures["lock_seconds"] <= MAX_KEPT_SECONDS, server.measures
