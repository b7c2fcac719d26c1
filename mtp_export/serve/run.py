"""Start and end of the server: its socket, its signals, and draining."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import ClassVar

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mtp_export.serve.address import Address
from mtp_export.serve.app import Server
from mtp_export.serve.engine_thread import END_SECONDS, THREAD_NAME
from mtp_export.serve.errors import unavailable
from mtp_export.serve.limits import (
    HEAD_SECONDS,
    MAX_REFUSED,
    REFUSED_SECONDS,
    max_connections,
)

_READ_BYTES = 16 << 10
_WORKING_THREADS = (THREAD_NAME, "AnyIO worker thread")


class HttpServer(uvicorn.Server):
    """uvicorn's server, which at its end gives requests their time, and then an error each.

    announce is called when it listens and a signal ends it in order.
    """

    def __init__(
        self, server: Server, shutdown_seconds: int, announce: Callable[[], object]
    ) -> None:
        config = uvicorn.Config(
            server.app,
            loop="asyncio",
            http=_Connection,
            log_config=None,
            access_log=False,
            ws="none",
            server_header=False,
            # What has no end then is cancelled; the lifespan's end stops the engine.
            timeout_graceful_shutdown=shutdown_seconds + END_SECONDS,
        )
        super().__init__(config)
        self._shutdown_seconds = shutdown_seconds
        self._announce = announce
        self._engine = server.engine

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        ending = loop.call_later(self._shutdown_seconds, self._engine.end_requests)
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()


class _Connection(H11Protocol):
    """HTTP/1.1 connection, which reads little at once: bodies in chunks of one byte take long.

    One too many is refused, and one that sends no whole head of a request in time is closed.
    """

    _without_request: asyncio.TimerHandle | None = None
    _refused: ClassVar[set[_Connection]] = set()  # none of them keeps others from being served

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = _READ_BYTES  # type: ignore[attr-defined]  # of asyncio's own loop
        if len(self.connections) > max_connections():
            self._refuse()
        else:
            self._expect_request()

    def _refuse(self) -> None:
        """Send the refusal, and read on until the client has it: bytes that are not read when a
        connection is closed reset it, and take from the client what it has not read yet."""
        self.connections.discard(self)
        self._refused.add(self)
        self.transport.write(_refusal())
        stays = len(self._refused) <= MAX_REFUSED
        self._without_request = self.loop.call_later(
            REFUSED_SECONDS if stays else 0, self.transport.close
        )
        with suppress(OSError):  # the client is gone
            self.transport.write_eof()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_expecting()
        self._refused.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self in self._refused:
            return
        super().data_received(data)
        if self._is_answering:
            self._stop_expecting()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # which begins with the next request, if it is there
        if not self._is_answering:
            self._expect_request()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_request(self) -> None:
        self._stop_expecting()
        self._without_request = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_expecting(self) -> None:
        if self._without_request is not None:
            self._without_request.cancel()
            self._without_request = None


def _refusal() -> bytes:
    """Return the response to a connection that is one too many."""
    response = unavailable("Too many connections").response()
    head = [b"HTTP/1.1 503 Service Unavailable", b"connection: close"]
    head += [b": ".join(header) for header in response.raw_headers]
    return b"\r\n".join([*head, b"", bytes(response.body)])


def run_server(
    server: Server,
    address: Address,
    bound: socket.socket,
    *,
    announce: Callable[[str], object],
    take_leave: Callable[[], object],
) -> None:
    """Serve at an address, whose bound socket this is, until SIGTERM or Ctrl-C: no new connections
    then, and an end when all requests have theirs. announce is called with the server's URL when it
    listens, take_leave at the end.

    Where a thread does not end in time, it ends the process. Raises IoError where the address
    cannot be listened on.
    """
    address.listen(bound)
    host, port = bound.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    http_server = HttpServer(
        server, address.shutdown_seconds, lambda: announce(f"http://{shown}:{port}")
    )
    # uvicorn raises the signal that ended it once more, for whoever handled it before.
    before = signal.signal(signal.SIGTERM, _ended)
    try:
        with suppress(KeyboardInterrupt):
            http_server.run(sockets=[bound])
        take_leave()
    finally:
        signal.signal(signal.SIGTERM, before)
        _leave_threads()


def _leave_threads() -> None:
    """End the process where a thread works on: Python's own end would wait for it, or end what it
    computes with under it."""
    end = time.monotonic() + END_SECONDS
    others = [thread for thread in threading.enumerate() if thread.name in _WORKING_THREADS]
    for thread in others:
        thread.join(max(0.0, end - time.monotonic()))
    if any(thread.is_alive() for thread in others):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _ended(number: int, frame: FrameType | None) -> None:
    """Take SIGTERM as the ordinary end that it is."""
