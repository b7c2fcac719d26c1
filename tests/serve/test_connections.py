"""Connections without requests: their number is bounded, and so is their life."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import pytest

from mtp_export.serve import limits, run
from mtp_runtime import LLM
from mtp_runtime.engine import Engine
from mtp_runtime.models.load import Loaded
from serve.conftest import FIXTURE
from serve.running import Running, running, wait_for

MOST = 4
SECONDS = 60.0  # that a test waits at most
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
# An answer that takes 2 seconds at least, each of its passes being late.
LONG = {"prompt": "Once upon a time", "max_tokens": 40, "ignore_eos": True}
LATE_SECONDS = 0.05


@pytest.fixture
def server(loaded: Loaded) -> Iterator[Running]:
    with running(LLM(FIXTURE, loaded=loaded, cache_tokens=4096)) as server:
        yield server


def connected(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS)


def rest_of(connection: socket.socket) -> bytes:
    """Return all that the server sends until it closes the connection."""
    with connection:
        return rest_of_open(connection)


def rest_of_open(connection: socket.socket) -> bytes:
    """Return all that the server sends until it ends its side."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def is_served(server: Running) -> bool:
    client = server.client()
    try:
        return client.ask("GET", "/health").status == 200
    except OSError:
        return False
    finally:
        client.close()


def test_a_connection_too_many_is_refused(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others stay, and each that goes makes room."""
    monkeypatch.setattr(limits, "MAX_CONNECTIONS", MOST)
    idle = [connected(server) for _ in range(MOST)]
    for one in idle:  # the server has taken it
        one.sendall(HEALTH)
        assert one.recv(65536).startswith(b"HTTP/1.1 200")
    for sends in (b"", HEALTH, HEALTH * 10_000):
        late = connected(server)
        late.sendall(sends)
        head, _, body = rest_of(late).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in head
        assert json.loads(body)["error"]["message"] == "Too many connections"
    idle.pop().close()
    wait_for(lambda: is_served(server))
    for one in idle:
        one.close()


def test_a_refused_connection_is_closed_in_time(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the client goes on sending, or where so many are refused that none may stay."""
    monkeypatch.setattr(limits, "MAX_CONNECTIONS", 0)
    monkeypatch.setattr(run, "REFUSED_SECONDS", 0.1)
    late = connected(server)
    assert rest_of_open(late).startswith(b"HTTP/1.1 503 ")
    with pytest.raises(OSError, match="reset|pipe"):
        for _ in range(600):
            late.sendall(HEALTH)
            time.sleep(0.1)
    late.close()
    monkeypatch.setattr(run, "REFUSED_SECONDS", SECONDS)
    monkeypatch.setattr(run, "MAX_REFUSED", -1)
    later = connected(server)
    assert rest_of_open(later).startswith(b"HTTP/1.1 503 ")
    with pytest.raises(OSError, match="reset|pipe"):
        for _ in range(20):
            later.sendall(HEALTH)
            time.sleep(0.1)
    later.close()


def test_refused_connections_take_nobody_s_place(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(run, "REFUSED_SECONDS", 10 * SECONDS)
    idle = connected(server)
    idle.sendall(HEALTH)
    assert idle.recv(65536).startswith(b"HTTP/1.1 200")
    refused = [connected(server) for _ in range(3)]
    assert all(rest_of_open(late).startswith(b"HTTP/1.1 503 ") for late in refused)
    idle.close()
    wait_for(lambda: is_served(server))
    for late in refused:
        late.close()


def test_refused_connections_that_are_gone(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Their system answers the refusal with a reset, which is no error."""
    monkeypatch.setattr(limits, "MAX_CONNECTIONS", 0)
    refusal = run._refusal()
    monkeypatch.setattr(run, "_refusal", lambda: time.sleep(0.1) or refusal)  # they are gone then
    for _ in range(3):
        connected(server).close()
    assert rest_of(connected(server)).startswith(b"HTTP/1.1 503 ")
    assert caplog.messages == []


def test_the_bound_follows_the_files_that_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, most in ((1024, 512), (1 << 20, 2048)):
        monkeypatch.setattr("resource.getrlimit", lambda _, files=files: (files, files))
        assert limits.max_connections() == most


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("sent", [b"", HEALTH[:20]], ids=["nothing", "half a head"])
def test_a_connection_without_a_request_is_closed(
    sent: bytes, answered: bool, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "HEAD_SECONDS", 1.0)
    connection = connected(server)
    if answered:
        connection.sendall(HEALTH)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    connection.sendall(sent)
    assert rest_of(connection) == b""


def test_an_answer_may_take_longer(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Than a connection may be without a request; the next one is served by the same connection."""
    real = Engine._pass
    monkeypatch.setattr(Engine, "_pass", lambda own: time.sleep(LATE_SECONDS) or real(own))
    monkeypatch.setattr(run, "HEAD_SECONDS", 1.0)
    client = server.client()
    chunks = [*client.stream("/v1/completions", **LONG)]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    monkeypatch.setattr(run, "HEAD_SECONDS", SECONDS)
    own = connected(server)
    for _ in range(2):
        own.sendall(HEALTH)
        assert own.recv(65536).startswith(b"HTTP/1.1 200")
    own.close()
