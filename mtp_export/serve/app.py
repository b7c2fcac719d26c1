"""Routes of the server, and the lives of requests between client and engine."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.resources import files

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from mtp_checkpoints.errors import MtpExportError
from mtp_export import __version__
from mtp_export.busy_machine import LEAST_COST, MOST_WAITING, TOO_BUSY
from mtp_export.serve.activity import SECONDS_BETWEEN_LINES, Activity
from mtp_export.serve.engine_thread import EngineThread
from mtp_export.serve.errors import ApiError
from mtp_export.serve.forms import ChatForm, CompletionForm, Facts, Form
from mtp_export.serve.intake import BODY, Intake, take
from mtp_export.serve.limits import (
    MAX_CHOICES,
    MAX_LOGPROBS_TOLD,
    MAX_PROMPT_TOKENS,
    PREPARING_THREADS,
    SMALL_BODY_BYTES,
)
from mtp_export.serve.metrics import ServerMetrics
from mtp_export.serve.protocol import ChatBody, CompletionBody, body_of
from mtp_export.serve.replies import Reply, ReplyStream
from mtp_runtime import LLM, SamplingParams

Body = CompletionBody | ChatBody

# The page loads nothing, and talks to its own server alone.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; img-src data:;"
    " style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class ServerOptions:
    """Options of a server: its name of the model, its key, how many requests may wait, and where it
    tells what it does while it is busy."""

    model_name: str
    api_key: str | None = None
    max_queued_requests: int = 512
    tell: Callable[[str], object] | None = None


class Server:
    """An LLM behind OpenAI's protocol."""

    def __init__(self, llm: LLM, options: ServerOptions) -> None:
        self._llm = llm
        self._name = options.model_name
        self._started = int(time.time())
        self._tell = options.tell
        self._page = _page()
        self.metrics = ServerMetrics(llm.engine, options.model_name, llm.expert_cache)
        most = llm.engine.config.max_batch_size + options.max_queued_requests
        self.engine = EngineThread(llm.engine, self.metrics, most)
        # One large body is parsed and tokenized at a time, and one chat, as there is one process
        # that renders them: those that wait here take no thread from others.
        self._large, self._chats = asyncio.Semaphore(), asyncio.Semaphore()
        self._threads = asyncio.Semaphore(PREPARING_THREADS)
        self.app: ASGIApp = Intake(self._routes(), options.api_key)

    def _routes(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/", self._index),
                Route("/health", self._health),
                Route("/version", self._version),
                Route("/metrics", self._metrics),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ],
            exception_handlers={ApiError: _refused, HTTPException: _no_such, Exception: _failed},
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.engine.start()
        await run_in_threadpool(list)  # imports what the first request would wait for
        telling = asyncio.create_task(self._tell_activity())
        try:
            yield
        finally:
            telling.cancel()
            await self.engine.stop()

    async def _tell_activity(self) -> None:
        activity = Activity(self._llm.engine)
        while self._tell is not None:
            await asyncio.sleep(SECONDS_BETWEEN_LINES)
            if line := activity.line(SECONDS_BETWEEN_LINES):
                self._tell(line)

    async def _index(self, request: HttpRequest) -> Response:
        return HTMLResponse(self._page, headers=_PAGE_HEADERS)

    async def _health(self, request: HttpRequest) -> Response:
        return Response(status_code=200 if self.engine.is_alive else 503)

    async def _version(self, request: HttpRequest) -> Response:
        return JSONResponse({"version": __version__})

    async def _metrics(self, request: HttpRequest) -> Response:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(self.metrics.text(), headers={"Content-Type": kind})

    async def _models(self, request: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_facts()]})

    async def _model(self, request: HttpRequest) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model_facts())

    async def _completions(self, request: HttpRequest) -> Response:
        return await self._answer(CompletionBody, request.scope[BODY])

    async def _chat(self, request: HttpRequest) -> Response:
        return await self._answer(ChatBody, request.scope[BODY])

    def _model_facts(self) -> Facts:
        return {
            "id": self._name,
            "object": "model",
            "created": self._started,
            "owned_by": "mtp-export",
            "max_model_len": self._llm.engine.model.config.max_positions,
            "draft_tokens": self._llm.engine.config.speculation.draft_tokens,
        }

    def _check_model(self, name: str | None) -> None:
        """Refuse another model's name; none at all is this model's."""
        if name not in (None, self._name):
            words = f"There is no model {name!r} here, only {self._name!r}"
            raise ApiError(404, words, param="model", code="model_not_found")

    async def _answer(self, kind: type[Body], body: bytearray) -> Response:
        reply = await self._prepare(kind, body)
        answer = self.engine.submit(reply.requests)
        give_up = partial(self.engine.abort, answer)
        if reply.body.stream:
            return ReplyStream(reply.lines(answer), give_up)
        try:
            parts = [part async for part in answer.parts() if reply.body.speculation]
        finally:
            give_up()
        whole = await run_in_threadpool(reply.whole, parts)
        return Response(whole, media_type="application/json")

    async def _prepare(self, kind: type[Body], body: bytearray) -> Reply:
        """Prepare a request in its turn; a client that goes away before leaves the queue."""
        turns = [self._threads]
        if len(body) > SMALL_BODY_BYTES:
            turns = [self._large, *turns]
        elif kind is ChatBody:
            turns = [self._chats, *turns]
        async with AsyncExitStack() as taken:
            for turn in turns:
                await taken.enter_async_context(turn)
            working = asyncio.ensure_future(self._work(taken.pop_all(), kind, body))
        # A client that goes away ends no thread: what it does still has its turns until it ends.
        working.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(working)

    async def _work(self, turns: AsyncExitStack, kind: type[Body], body: bytearray) -> Reply:
        async with turns:
            return await run_in_threadpool(self._prepared, kind, body)

    def _prepared(self, kind: type[Body], raw: bytearray) -> Reply:
        """Parse and tokenize a request and check its numbers (ApiError); this may take a while."""
        body = body_of(kind, take(raw))
        self._check_model(body.model)
        if body.count > MAX_CHOICES:
            raise ApiError(400, f"Ask for at most {MAX_CHOICES} choices in all", param="n")
        try:
            prompts = self._prompts(body)
            each = [
                (prompt, params)
                for prompt in prompts
                for params in body.sampling(self._room(prompt))
            ]
            _check_amount(each)
            requests = self._llm.requests([prompt for prompt, _ in each], [own for _, own in each])
            form = self._form(body)
        except MtpExportError as error:
            raise ApiError(400, str(error)) from None
        return Reply(body, requests, form, self._name)

    def _prompts(self, body: Body) -> list[tuple[int, ...]]:
        """Return the tokens of a request's prompts (MtpExportError)."""
        if isinstance(body, ChatBody):
            return [self._llm.chat_prompt([message.as_message() for message in body.messages])]
        return [
            self._llm.text_prompt(prompt) if isinstance(prompt, str) else tuple(prompt)
            for prompt in body.prompts
        ]

    def _room(self, prompt: Sequence[int]) -> int:
        """Return how many tokens may follow a prompt, in the model and in the cache."""
        engine = self._llm.engine
        pages, drafts = engine.pages, engine.config.speculation.draft_tokens
        in_cache = pages.pages * pages.page_size - drafts
        return min(engine.model.config.max_positions, in_cache) - len(prompt)

    def _form(self, body: Body) -> Form:
        tokenizer, shown = self._llm.tokenizer, body.shown_logprobs is not None
        if isinstance(body, ChatBody):
            return ChatForm(tokenizer, shown)
        if not body.echo:
            return CompletionForm(tokenizer, shown, echoed=None)
        tokenizer.require()
        texts = [p if isinstance(p, str) else tokenizer.decode(p) for p in body.prompts]
        return CompletionForm(tokenizer, shown, echoed=[t for t in texts for _ in range(body.n)])


def _page() -> str:
    """Return the page, with the rule of what a busy machine cannot tell."""
    rule = {"words": TOO_BUSY, "mostWaiting": MOST_WAITING, "leastCost": LEAST_COST}
    page = (files("mtp_export.serve") / "page.html").read_text(encoding="utf-8")
    return page.replace("BUSY_RULE", json.dumps(rule))


def _check_amount(each: Sequence[tuple[Sequence[int], SamplingParams]]) -> None:
    """Refuse a request with too much to compute from, or to tell (ApiError)."""
    if sum(len(prompt) for prompt, _ in each) > MAX_PROMPT_TOKENS:
        raise ApiError(400, f"The prompts of all choices have more than {MAX_PROMPT_TOKENS} tokens")
    told = sum(
        (params.max_tokens + (0 if params.prompt_logprobs is None else len(prompt)))
        * (1 + params.logprobs)
        for prompt, params in each
        if params.logprobs is not None
    )
    if told > MAX_LOGPROBS_TOLD:
        words = f"More than {MAX_LOGPROBS_TOLD} log-probabilities in all: ask for fewer tokens"
        raise ApiError(400, words, param="logprobs")


async def _refused(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _no_such(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return ApiError(error.status_code, f"{error.detail}: {request.url.path}").response()


async def _failed(request: HttpRequest, error: Exception) -> Response:
    return ApiError(500, "Internal error", kind="server_error").response()
