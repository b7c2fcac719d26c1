"""Start and end of the server: its socket, its signals, and draining."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import uvicorn

from mtp_checkpoints.errors import IoError, UsageError
from mtp_export.serve.app import Server
from mtp_export.serve.intake import is_this_machine


@dataclass(frozen=True)
class Address:
    """Place where the server listens, and the seconds that requests have to end at SIGTERM.

    Port 0 is any free one.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    shutdown_seconds: int = 60

    def check(self, api_key: str | None) -> None:
        """Refuse an open door (UsageError)."""
        if api_key is None and not is_this_machine(self.host):
            raise UsageError(
                "Without a key the server listens on this machine alone",
                expected="--api-key, or --host 127.0.0.1",
                found=f"--host {self.host}",
            )


def run_server(server: Server, address: Address, announce: Callable[[str], object]) -> None:
    """Serve until SIGTERM or Ctrl-C: no new connections then, and an end when all requests have
    theirs. announce is called with the server's URL when it listens.

    Raises IoError where the address cannot be listened on.
    """
    with listening(address) as listener:
        config = uvicorn.Config(
            server.app,
            log_config=None,
            access_log=False,
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=address.shutdown_seconds,
        )
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        announce(f"http://{shown}:{port}")
        # uvicorn raises the signal that ended it once more, for whoever handled it before.
        before = signal.signal(signal.SIGTERM, _ended)
        try:
            uvicorn.Server(config).run(sockets=[listener])
        finally:
            signal.signal(signal.SIGTERM, before)


def listening(address: Address) -> socket.socket:
    """Return a socket that listens at an address; its connections send what they have at once.

    asyncio sees to that for sockets that name their protocol alone, which accepted ones do not;
    without it the body of a reply waits 40 ms for the client to confirm its head.
    Raises IoError where the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        listener = socket.create_server((address.host, address.port), family=family, backlog=2048)
    except OSError as error:
        raise IoError(
            "The server cannot listen",
            where=f"{address.host}:{address.port}",
            found=error.strerror or error,
            todo="Choose another --port, or --host",
        ) from None
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit it
    return listener


def _ended(number: int, frame: FrameType | None) -> None:
    """Take SIGTERM as the ordinary end that it is."""
