"""A server in this process, on a port of its own, and plain HTTP to it."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from mtp_export.serve.address import Address
from mtp_export.serve.app import Server, ServerOptions
from mtp_export.serve.run import HttpServer
from mtp_runtime import LLM

BANNER_END = "Ctrl-C stops it."


@dataclass(frozen=True)
class Reply:
    """Status, headers and body of an HTTP response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Client:
    """HTTP client over one connection."""

    port: int
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 60.0  # that an answer may take

    def __post_init__(self) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.seconds)

    def send(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> http.client.HTTPResponse:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self._connection.request(method, path, body, self.headers | named)
        return self._connection.getresponse()

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Reply:
        response = self.send(method, path, body, **headers)
        return Reply(response.status, dict(response.getheaders()), response.read())

    def post(self, path: str, **body: Any) -> Reply:
        return self.ask("POST", path, json.dumps(body).encode(), Content_Type="application/json")

    def stream(self, path: str, **body: Any) -> Iterator[Any]:
        """The chunks of a stream; closing this closes the connection."""
        raw = json.dumps(body | {"stream": True}).encode()
        response = self.send("POST", path, raw, Content_Type="application/json")
        assert response.status == 200, response.read()
        try:
            for line in response:
                if line.startswith(b"data: ") and line != b"data: [DONE]\n":
                    yield json.loads(line[6:])
        finally:
            self.close()

    def close(self) -> None:
        self._connection.close()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's values with these labels."""
        found = 0.0
        for line in self.ask("GET", "/metrics").body.decode().splitlines():
            wanted = [f'{key}="{value}"' for key, value in labels.items()]
            if line.startswith(f"{name}{{") and all(words in line for words in wanted):
                found += float(line.rpartition(" ")[2])
        return found


@dataclass
class Running:
    """A server that runs, with its engine in reach."""

    llm: LLM
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **headers: str) -> Client:
        return Client(self.port, headers)

    def is_idle(self) -> bool:
        engine = self.llm.engine
        return not engine.has_work and engine.pages.free_pages == engine.pages.pages


@contextmanager
def running(llm: LLM, **options: Any) -> Iterator[Running]:
    """Serve an LLM while the block runs."""
    server = Server(llm, ServerOptions(**{"model_name": "tiny"} | options))
    listener = Address(port=0).bound()
    uvicorn_server = HttpServer(server, shutdown_seconds=60, announce=int)
    thread = threading.Thread(target=uvicorn_server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_for(lambda: uvicorn_server.started)
        yield Running(llm, listener.getsockname()[1])
    finally:
        uvicorn_server.should_exit = True
        thread.join(30)
        listener.close()
        assert not thread.is_alive()


def announced_port(lines: Iterable[str]) -> int:
    """The port of the banner that a server prints when it listens, read to its end."""
    port = 0
    for line in lines:
        if line.startswith("Page "):
            port = int(line.strip().rstrip("/").rpartition(":")[2])
        if line.startswith(BANNER_END):
            return port
    raise AssertionError("it does not serve")


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until something is so, which takes no longer than a broken test may."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.01)
