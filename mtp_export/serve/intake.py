"""Outermost layer of the server: who may ask, bodies of bounded size, and clients that go away."""

from __future__ import annotations

import asyncio
import hmac
from contextlib import suppress
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mtp_export.serve.errors import ApiError, unavailable
from mtp_export.serve.limits import (
    MAX_BODIES_BYTES,
    MAX_BODY_BYTES,
    PIECE_BYTES,
    SMALL_BODY_BYTES,
)

_BODY_SECONDS = 60.0
_PROTECTED = "/v1/"
BODY = "mtp_export.body"  # of a scope: a bytearray, for take


class Intake:
    """Reads each request's body whole, into its scope, and cancels the work on it when its client
    has gone. Work that the server itself cancels, at its end, is answered with an error.

    Without an API key only names of this machine are answered to, so that no page of a stranger
    reaches the server through a browser here.
    """

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._api_key = api_key
        self._bodies: dict[int, bytearray] = {}  # that are read or parsed, by their id()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def note_start(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._serve(scope, receive, note_start)
        except asyncio.CancelledError:  # by the server, which does not wait any longer
            if not started:
                await unavailable("The server ended the request").response()(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = scope[BODY] = bytearray()
        self._bodies[id(body)] = body
        try:
            self._check(scope)
            if await self._fill(body, receive):
                await self._work(scope, receive, send)
        except ApiError as error:
            await error.response()(scope, receive, send)
        finally:
            del self._bodies[id(body)]
            body.clear()  # work on it that goes on is in vain

    def _check(self, scope: Scope) -> None:
        """Refuse strangers, and bodies that are no JSON by their own account (ApiError)."""
        headers = Headers(scope=scope)
        if self._api_key is None and not is_this_machine(_host(headers.get("host", ""))):
            raise ApiError(403, "Without --api-key only this machine's own names are served")
        if not scope["path"].startswith(_PROTECTED):
            return
        if self._api_key is not None:
            given = headers.get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, f"Bearer {self._api_key}".encode()):
                raise ApiError(401, "The API key is missing or wrong", code="invalid_api_key")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and kind != "application/json":
            raise ApiError(415, "The body's Content-Type is not application/json")

    async def _fill(self, body: bytearray, receive: Receive) -> bool:
        """Read a body; False where the client went away. ApiError for one too large or too slow,
        and where many others are read."""
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return False
                    body += message.get("body", b"")
                    if len(body) > MAX_BODY_BYTES:
                        raise ApiError(413, f"The body is larger than {MAX_BODY_BYTES} bytes")
                    if len(body) > SMALL_BODY_BYTES and self._held > MAX_BODIES_BYTES:
                        raise unavailable("Too many large bodies at once")
                    if not message.get("more_body", False):
                        return True
        except TimeoutError:
            raise ApiError(408, f"The body took longer than {_BODY_SECONDS:g} seconds") from None

    @property
    def _held(self) -> int:
        """Bytes of all bodies but small ones."""
        sizes = map(len, self._bodies.values())
        return sum(size for size in sizes if size > SMALL_BODY_BYTES)

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app on a body, until it ends or the client has gone."""
        work = asyncio.ensure_future(self._app(scope, _nothing, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            for task in (work, gone):
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task


def take(body: bytearray) -> bytes:
    """Return what a body holds, and empty it, in any thread: the interpreter's lock is kept for a
    piece at a time, and not while long pieces are joined. It may be emptied meanwhile."""
    whole = b"".join(
        [bytes(body[at : at + PIECE_BYTES]) for at in range(0, len(body), PIECE_BYTES)]
    )
    body.clear()
    return whole


async def _nothing() -> Message:
    """Receive nothing more for the app: the body is in the scope, and a client that goes away ends
    its work."""
    never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    return await never


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _host(header: str) -> str:
    """Return the host of a Host header, without port and brackets."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


def is_this_machine(host: str) -> bool:
    """Return True for names that lead to this machine alone."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
