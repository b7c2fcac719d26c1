"""Answers on their way from the engine's thread to the clients, each in a bounded buffer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from mtp_export.serve.errors import ApiError
from mtp_runtime.request import Request, TokenEvent

MAX_BUFFERED_TOKENS = 4096


@dataclass(frozen=True)
class Part:
    """New tokens of one choice; finish_reason is set with its last ones."""

    choice: int
    events: Sequence[TokenEvent]
    finish_reason: str | None


class Answer:
    """The choices of one client's request, as the engine decodes them.

    Everything but the requests themselves belongs to the event loop.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self._parts: deque[Part] = deque()
        self._failure: ApiError | None = None
        self._arrived = asyncio.Event()

    @property
    def overflows(self) -> bool:
        """True where the client takes its tokens too slowly."""
        return sum(len(part.events) for part in self._parts) > MAX_BUFFERED_TOKENS

    def put(self, part: Part) -> None:
        """Add what the engine has decoded."""
        self._parts.append(part)
        self._arrived.set()

    def fail(self, failure: ApiError) -> None:
        """End the answer with a failure; the first one counts."""
        self._failure = self._failure or failure
        self._arrived.set()

    async def parts(self) -> AsyncIterator[Part]:
        """Yield the parts until all choices have ended, with a turn for other clients after each;
        raises the failure, if there is one."""
        open_choices = set(range(len(self.requests)))
        while open_choices:
            while not self._parts and self._failure is None:
                self._arrived.clear()
                await self._arrived.wait()
            if self._failure is not None:
                raise self._failure
            part = self._parts.popleft()
            if part.finish_reason == "error":
                raise ApiError(500, "The engine failed on this request", kind="server_error")
            if part.finish_reason is not None:
                open_choices.discard(part.choice)
            yield part
            await asyncio.sleep(0)
