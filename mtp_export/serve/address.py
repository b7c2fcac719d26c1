"""Place where the server listens: what may be one, and its socket, bound before a model is loaded.

Nothing here imports torch.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

from mtp_checkpoints.errors import IoError, UsageError
from mtp_export.serve.intake import is_this_machine

_BACKLOG = 2048  # connections that wait to be taken


@dataclass(frozen=True)
class Address:
    """Place where the server listens, and the seconds that requests have to end at SIGTERM.

    Port 0 is any free one.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    shutdown_seconds: int = 60

    def check(self, api_key: str | None) -> None:
        """Refuse an open door, and a key that no header can hold (UsageError)."""
        if api_key is not None and (
            not api_key.isprintable() or api_key.strip() != api_key or not api_key
        ):
            raise UsageError(
                "The API key is none that a client can send",
                expected="printable characters, without spaces around them",
                found="an empty one" if not api_key else "others",
            )
        if api_key is None and not is_this_machine(self.host):
            raise UsageError(
                "Without a key the server listens on this machine alone",
                expected="--api-key, or --host 127.0.0.1",
                found=f"--host {self.host}",
            )

    def bound(self) -> socket.socket:
        """Return a socket that is bound to this address and does not listen yet, so that clients
        are refused until listen is called (IoError where the address is taken or no address).

        asyncio has connections send what they have at once where their socket names its protocol,
        which accepted ones do not; without it the body of a reply waits 40 ms for the client to
        confirm its head.
        """
        is_ipv6 = ":" in self.host
        bound = socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET, socket.SOCK_STREAM)
        try:
            # The port of a server that has just ended is free, though its connections linger.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Connections that are accepted inherit it.
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if is_ipv6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.bind((self.host, self.port))
        except OSError as error:
            bound.close()
            raise self._refusal(error) from None
        return bound

    def listen(self, bound: socket.socket) -> None:
        """Let clients connect to a socket of this address (IoError where another program has
        listened there since it was bound)."""
        try:
            bound.listen(_BACKLOG)
        except OSError as error:
            raise self._refusal(error) from None

    def _refusal(self, error: OSError) -> IoError:
        return IoError(
            "The server cannot listen",
            where=f"{self.host}:{self.port}",
            found=error.strerror or error,
            todo="Choose another --port, or --host",
        )
