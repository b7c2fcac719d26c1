"""Replies to a client's request: whole, or as a stream of server-sent events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from mtp_export.serve.answers import Answer, Part
from mtp_export.serve.errors import ApiError
from mtp_export.serve.forms import Facts, Form, speculation, usage
from mtp_export.serve.protocol import ChatBody, CompletionBody
from mtp_runtime.request import Request

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


@dataclass
class Reply:
    """A client's request with its choices in the engine, and the form of what it gets back."""

    body: CompletionBody | ChatBody
    requests: Sequence[Request]
    form: Form
    model_name: str
    created: int = field(default_factory=lambda: int(time.time()))
    name: str = field(default_factory=lambda: uuid.uuid4().hex)

    def whole(self, parts: Sequence[Part]) -> bytes:
        """Return the reply to a request whose choices have ended, given all parts of the answer if
        it tells of speculation."""
        choices = []
        for number, request in enumerate(self.requests):
            facts = self.form.whole(number, request)
            if self.body.speculation:
                own = [e for part in parts if part.choice == number for e in part.events]
                facts["speculation"] = speculation(own)
            choices.append(self._choice(number, facts, request.finish_reason))
        tokens = sum(request.metrics.output_tokens for request in self.requests)
        return _slowly(
            self._facts(self.form.whole_object, choices) | {"usage": self._usage(tokens)}
        )

    async def lines(self, answer: Answer) -> AsyncIterator[bytes]:
        """Yield the stream of an answer; a failure is its last chunk."""
        options, tokens = self.body.stream_options, 0
        opened: set[int] = set()
        try:
            async for part in answer.parts():
                tokens += len(part.events)
                if part.choice not in opened:
                    opened.add(part.choice)
                    # With the log-probabilities of a whole prompt, perhaps.
                    opening = await run_in_threadpool(self._opening, part.choice, tokens)
                    if opening is not None:
                        yield opening
                yield _event(self._chunk([self._part(part)], tokens))
            if options is not None and options.include_usage:
                yield _event(self._chunk([], tokens) | {"usage": self._usage(tokens)})
        except ApiError as error:
            yield _event(error.body())
        yield b"data: [DONE]\n\n"

    def _opening(self, number: int, tokens: int) -> bytes | None:
        """Return what a stream says of a choice before its first token, if anything."""
        opening = self.form.opening(number, self.requests[number])
        if opening is None:
            return None
        return _event(self._chunk([self._choice(number, opening, None)], tokens), _slowly)

    def _chunk(self, choices: Sequence[Facts], tokens: int) -> Facts:
        chunk, options = self._facts(self.form.part_object, choices), self.body.stream_options
        if options is not None and options.continuous_usage_stats:
            chunk["usage"] = self._usage(tokens)
        return chunk

    def _part(self, part: Part) -> Facts:
        """Return the choice of the chunk for new tokens."""
        logprobs = [event.logprobs for event in part.events if event.logprobs is not None]
        facts = self.form.part(part.choice, "".join(e.text for e in part.events), logprobs)
        if self.body.speculation:
            facts["speculation"] = speculation(part.events)
        return self._choice(part.choice, facts, part.finish_reason)

    def _choice(self, number: int, facts: Facts, finish_reason: str | None) -> Facts:
        request = self.requests[number]
        reason = request.stop_reason if finish_reason else None
        ends = {"finish_reason": finish_reason, "stop_reason": reason, "seed": request.seed}
        return {"index": number, **facts, **ends}

    def _facts(self, kind: str, choices: Sequence[Facts]) -> Facts:
        return {
            "id": f"{self.form.prefix}-{self.name}",
            "object": kind,
            "created": self.created,
            "model": self.model_name,
            "choices": choices,
        }

    def _usage(self, completion_tokens: int) -> Facts:
        return usage(self.requests, self.body.n, completion_tokens)


class ReplyStream(StreamingResponse):
    """Stream of a reply, which calls give_up however it ends."""

    def __init__(self, lines: AsyncIterator[bytes], give_up: Callable[[], None]) -> None:
        super().__init__(lines, media_type="text/event-stream")
        self._give_up = give_up

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._give_up()


def _slowly(facts: Facts) -> bytes:
    """Return long JSON, made in small steps: in one the encoder keeps other threads waiting."""
    text = bytearray()
    for piece in _ENCODER.iterencode(facts):
        text += piece.encode()
    return bytes(text)


def _at_once(facts: Facts) -> bytes:
    return _ENCODER.encode(facts).encode()


def _event(facts: Facts, encode: Callable[[Facts], bytes] = _at_once) -> bytes:
    return b"data: %b\n\n" % encode(facts)
