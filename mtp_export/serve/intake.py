"""Outermost layer of the server: who may ask, bodies of bounded size, and clients that go away."""

from __future__ import annotations

import asyncio
import hmac
from contextlib import suppress
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mtp_export.serve.errors import ApiError

MAX_BODY_BYTES = 16 << 20
_BODY_SECONDS = 60.0
_PROTECTED = "/v1/"


class Intake:
    """Reads each request's body whole, and cancels the work on it when its client has gone.

    Without an API key only names of this machine are answered to, so that no page of a stranger
    reaches the server through a browser here.
    """

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._api_key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
            body = await _body(receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        if body is not None:
            await self._work(scope, body, receive=receive, send=send)

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

    async def _work(self, scope: Scope, body: bytes, *, receive: Receive, send: Send) -> None:
        """Run the app on a body, until it ends or the client has gone."""
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            if messages:
                return messages.pop()
            never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
            return await never  # cancelled with the work

        work = asyncio.ensure_future(self._app(scope, replay, send))
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


async def _body(receive: Receive) -> bytes | None:
    """Return a body, None where the client went away (ApiError for one too large or too slow)."""
    chunks, size = [], 0
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                chunks.append(message.get("body", b""))
                size += len(chunks[-1])
                if size > MAX_BODY_BYTES:
                    raise ApiError(413, f"The body is larger than {MAX_BODY_BYTES} bytes")
                if not message.get("more_body", False):
                    return b"".join(chunks)
    except TimeoutError:
        raise ApiError(408, f"The body took longer than {_BODY_SECONDS:g} seconds") from None


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
