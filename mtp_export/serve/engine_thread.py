"""The one thread that steps the engine, between the event loop that clients are served in."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from mtp_checkpoints.errors import MtpExportError
from mtp_export.serve.answers import Answer, Part
from mtp_export.serve.errors import ApiError, unavailable
from mtp_export.serve.limits import MAX_LIVE_PROMPT_TOKENS
from mtp_export.serve.metrics import ServerMetrics
from mtp_runtime.engine import Engine
from mtp_runtime.request import Request

logger = logging.getLogger(__name__)

THREAD_NAME = "engine"
END_SECONDS = 2  # that clients have to take a last error, and threads their last step


@dataclass
class _Live:
    """A request in the engine, the answer that it is a choice of, and when its last token came."""

    request: Request
    answer: Answer
    choice: int
    last_seconds: float = 0.0


class EngineThread:
    """Steps an engine while there is work, and hands out what it decodes.

    max_requests bounds those in the batch and in the queue together.
    """

    def __init__(self, engine: Engine, metrics: ServerMetrics, max_requests: int) -> None:
        self.engine = engine
        self.max_requests = max_requests
        self._metrics = metrics
        self._live: dict[Request, _Live] = {}
        self._aborted: list[Request] = []
        self._stopping = False
        self._changed = threading.Condition()  # guards the three above
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread; answers go to the event loop that runs now."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def end_requests(self) -> None:
        """Take no more requests, and end those that are left; their clients are told."""
        with self._changed:
            self._stopping = True
            self._aborted += self._live
            answers = {id(live.answer): live.answer for live in self._live.values()}
            self._changed.notify()
        for answer in answers.values():
            answer.fail(unavailable("The server ended the request"))

    async def stop(self) -> None:
        """End what is left, and the thread; one that does not end in time is left behind."""
        self.end_requests()
        end = time.monotonic() + END_SECONDS
        while self.is_alive and time.monotonic() < end:
            await asyncio.sleep(0.01)

    def submit(self, requests: Sequence[Request]) -> Answer:
        """Queue the choices of a client's request.

        Raises ApiError: 503 where the queue has no room, 400 for requests that can never run.
        """
        answer = Answer(requests)
        with self._changed:
            if self._stopping:
                raise unavailable("The server is shutting down")
            if len(requests) > self.max_requests:
                raise ApiError(400, f"More than {self.max_requests} choices in one request")
            waiting = sum(len(request.prompt) for request in (*self._live, *requests))
            if (
                len(self._live) + len(requests) > self.max_requests
                or waiting > MAX_LIVE_PROMPT_TOKENS
            ):
                self._metrics.reject("queue_full")
                raise unavailable("The queue is full")
            self._live |= {r: _Live(r, answer, choice) for choice, r in enumerate(requests)}
            try:
                for request in requests:
                    self.engine.add(request)
            except MtpExportError as error:
                self._aborted += requests
                raise ApiError(400, str(error)) from None
            finally:
                self._changed.notify()
        return answer

    def abort(self, answer: Answer) -> None:
        """Give up what is left of an answer; its cache is free before the next step."""
        with self._changed:
            self._aborted += [r for r in answer.requests if r.finish_reason is None]
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._aborted or self._stopping or self.engine.has_work
                )
                aborted, self._aborted = self._aborted, []
                if self._stopping and not aborted and not self.engine.has_work:
                    return
            self._abort(aborted)
            if self.engine.has_work:
                self._step()
            self._deliver()

    def _abort(self, requests: Iterable[Request]) -> None:
        """End requests, also those that the engine never took."""
        requests = list(requests)
        if requests:
            self.engine.abort(requests)

    def _step(self) -> None:
        """Step; a failure ends all requests, and the next ones are served again."""
        try:
            self.engine.step()
        except Exception:
            logger.exception("A step of the engine failed")
            with self._changed:
                live = list(self._live.values())
            self._abort(one.request for one in live)
            failure = ApiError(500, "The engine failed", kind="server_error")
            for answer in {id(one.answer): one.answer for one in live}.values():
                self._in_loop(answer.fail, failure)

    def _deliver(self) -> None:
        """Send new tokens to the event loop, in one call for all."""
        with self._changed:
            live = list(self._live.values())
        now, parts = time.monotonic(), []
        for one in live:
            events, reason = list(one.request.take_events()), one.request.finish_reason
            if not events and reason is None:
                continue
            self._metrics.observe(one.request, len(events), now - one.last_seconds)
            one.last_seconds = now
            parts.append((one.answer, Part(one.choice, events, reason)))
            if reason is not None:
                with self._changed:
                    del self._live[one.request]
        if parts:
            self._in_loop(self._put, parts)

    def _put(self, parts: Sequence[tuple[Answer, Part]]) -> None:
        """Fill the answers' buffers, in the event loop."""
        for answer, part in parts:
            answer.put(part)
            if answer.overflows:
                answer.fail(ApiError(408, "The answer is read too slowly", kind="timeout"))
                self.abort(answer)

    def _in_loop(self, call: object, *arguments: object) -> None:
        assert self._loop is not None, "the thread was started in an event loop"
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(call, *arguments)  # type: ignore[arg-type]
