"""Continuous batching: every step runs prompts in chunks and blocks of drafts in one forward pass.

A request is prefilling while more than one of its tokens is uncached, and decoding from then on;
both are rows of the same pass. The same lines commit a block whatever the verdict.

Any number of threads may add, abort and run requests: all are in one batch, and one thread at a
time steps it for all of them. Where several ranks divide the model, each has an engine: rank 0
takes the requests and decides, and before each step it tells the others what came.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

import torch

from mtp_checkpoints.errors import ResourceError, UsageError
from mtp_runtime.acceptance.base import Draft, Verdict
from mtp_runtime.allocators import allocator_for
from mtp_runtime.cache import lay_out
from mtp_runtime.config import EngineConfig
from mtp_runtime.draft_length import Step, draft_length
from mtp_runtime.drafters import DRAFTERS
from mtp_runtime.drafters.base import Drafter, DrafterParts, Pass
from mtp_runtime.judging import Group, Judge, score_prompts
from mtp_runtime.memory import state_pages
from mtp_runtime.models.model import Model, States
from mtp_runtime.parallel import group as ranks
from mtp_runtime.request import Arrival, Request, RequestMetrics, TokenEvent, Turn
from mtp_runtime.static_graph.steps import Graphs, steps_by


class Engine:
    """Runs requests to their end; its state is the queue, the batch and the cache.

    build_drafter: a value of DRAFTERS, or any function that builds a drafter. graphs: a way to
    repeat the target's steps of decoding, which are computed operation by operation without it.
    group: ranks with engines like this one; those after the first follow it.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        build_drafter: Callable[[DrafterParts], Drafter],
        draft_model: Model | None = None,
        graphs: Graphs | None = None,
        group: ranks.Group = ranks.LONE,
    ) -> None:
        self.model = model
        self.config = config
        self.pages = allocator_for(
            config,
            modules=len(model.mtp_modules),
            state_pages=state_pages(model, config.page_size),
            with_spare=graphs is not None,
        )
        self.cache = model.new_cache(self.pages)
        self.pages.keep_states_of(self.cache)
        self._steps = steps_by(graphs, model, self.cache, self.pages, config)
        if config.poison_freed:
            self.pages.poison_freed(self.cache)
        self.drafter = build_drafter(
            DrafterParts(
                target=model,
                pages=self.pages,
                cache=self.cache,
                config=config,
                draft_model=draft_model,
            )
        )
        self.judge = Judge(model.head, config.speculation)
        drafts = DRAFTERS.get(config.speculation.method)
        by_module = drafts is not None and drafts.needs_mtp
        self._length = draft_length(config.speculation, model.draft_cost if by_module else None)
        self.totals = RequestMetrics()
        self._group = group
        self._arriving: deque[Request] = deque()  # since the last step
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._aborted: list[int] = []  # since the last step
        self._next, self._stepping = Lock(), Lock()

    @property
    def has_work(self) -> bool:
        return bool(self._arriving or self._waiting or self._running)

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._arriving) + len(self._waiting)

    @property
    def running(self) -> int:
        """Number of requests in the batch."""
        return len(self._running)

    def add(self, request: Request) -> None:
        """Queue a request (UsageError or ResourceError for one that can never be run).

        This does not wait for the step that another thread is in.
        """
        positions = len(request.prompt) + request.params.max_tokens
        if not request.prompt:
            raise UsageError("A prompt is empty", expected="at least one token")
        if not 0 <= min(request.prompt) <= max(request.prompt) < self.model.config.vocab:
            raise UsageError(
                "A prompt has a token outside the vocabulary",
                expected=f"ids from 0 to {self.model.config.vocab - 1}",
                found=f"{min(request.prompt)} to {max(request.prompt)}",
            )
        self.model.config.check_positions(positions)
        needed = self.pages.pages_for(positions + self.config.speculation.draft_tokens)
        needed += self.pages.state_pages
        if needed > self.pages.pages:
            raise ResourceError(
                "A request does not fit the cache",
                expected=f"at least {needed * self.config.page_size} cache_tokens",
                found=self.pages.pages * self.config.page_size,
            )
        self._arriving.append(request)

    def abort(self, requests: Iterable[Request]) -> None:
        """End requests that have not ended, queued or running, and free their cache."""
        with self._alone():
            for request in [r for r in requests if r.finish_reason is None]:
                request.finish_reason = "abort"
                if request in self._arriving:
                    self._arriving.remove(request)
                else:
                    self._drop(request)
                    self._aborted.append(request.request_id)

    def _drop(self, request: Request) -> None:
        if request in self._running:
            self._running.remove(request)
            self._release(request)
        elif request in self._waiting:
            self._waiting.remove(request)

    def step(self) -> None:
        """Run one forward pass of the target over the batch; the new tokens are events of their
        requests.

        A failure, or Ctrl-C, leaves the requests waiting: whoever steps next computes them anew.
        """
        with self._alone():
            self._step()

    def run(self, requests: Sequence[Request]) -> Generator[TokenEvent]:
        """Queue requests, and yield their events until they have ended; an early end aborts them.

        Steps serve the requests of other threads too, as theirs do these. Raises what ended one of
        these requests by an error of its own.
        """
        try:
            for request in requests:
                self.add(request)
            while self._advance(requests):
                for request in requests:
                    yield from request.take_events()
                    if request.error is not None:
                        raise request.error
        finally:
            if any(request.finish_reason is None for request in requests):
                self.abort(requests)

    def _advance(self, requests: Sequence[Request]) -> bool:
        """Step unless there are events to take; False where none are left and none will come."""
        with self._alone():
            if any(request.events for request in requests):
                return True
            if all(request.finish_reason is not None for request in requests):
                return False
            self._step()
            return True

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other threads out. The one that waited first is next in line, so that a thread which
        steps in a loop cannot shut the others out."""
        with self._next:
            self._stepping.acquire()
        try:
            yield
        finally:
            self._stepping.release()

    def follow(self, make: Callable[..., Request]) -> None:
        """Step as the first rank's engine does, until its program ends; make makes a request of an
        Arrival."""
        while True:
            turn: Turn = self._group.shared(None)
            self._waiting += [make(*arrival) for arrival in turn.arrivals]
            for request in [*self._running, *self._waiting]:
                if request.request_id in turn.aborted:
                    self._drop(request)
            self._admit()
            self._compute(turn.drafts)

    def _step(self) -> None:
        try:
            with self._group.together():
                self._pass()
        except BaseException:
            for request in self._running[::-1]:
                if request.finish_reason is None:
                    self._preempt(request)
                else:
                    self._drop(request)
            raise

    def _pass(self) -> None:
        start, turn = time.perf_counter(), self._next_turn()
        self._group.shared(turn)
        blocks = self._compute(turn.drafts)
        if blocks:
            self._length.observe(Step(blocks, turn.drafts, time.perf_counter() - start))

    def _next_turn(self) -> Turn:
        """Take in what came since the last step, and choose the number of drafts."""
        arrivals = []
        while self._arriving:
            request = self._arriving.popleft()
            self._waiting.append(request)
            number, prompt, params = request.request_id, request.prompt, request.params
            arrivals.append(Arrival(number, prompt, params, request.seed))
        aborted, self._aborted = tuple(self._aborted), []
        self._admit()
        decoding = sum(request.is_decoding for request in self._running)
        drafts = self._length.choose(decoding) if decoding else 0
        return Turn(tuple(arrivals), aborted, drafts)

    @torch.inference_mode()
    def _compute(self, drafts: int) -> list[tuple[int, int]]:
        """Verify up to `drafts` of each request; return how many each had and how many were
        accepted where all decode, and none without drafts."""
        groups = self._plan(drafts)
        all_draft = all(group.is_decoding and group.request.params.use_drafts for group in groups)
        states = self._forward(groups)
        verdicts = self.judge.verdicts(groups, states.after)
        score_prompts(groups, states.after, self.model.head)
        self._observe(groups, verdicts, states)
        if not all_draft:
            return []
        return [
            (len(group.draft.tokens), verdict.accepted)
            for group, verdict in zip(groups, verdicts, strict=True)
            if verdict is not None
        ]

    def _observe(
        self, groups: Sequence[Group], verdicts: Sequence[Verdict | None], states: States
    ) -> None:
        """Commit what was accepted, and show the drafter the hidden states of what is.

        Those of requests that end are shown for the pages that a prefix cache keeps of them; those
        of requests without drafts are not, so that these cost what plain decoding does.
        """
        hidden, taps = self.model.mtp_input(states.before, states.after), states.taps
        passes: list[Pass] = []
        row = 0
        for group, verdict in zip(groups, verdicts, strict=True):
            request = group.request
            if verdict is not None:
                try:
                    self._commit(group, verdict)
                except Exception as error:  # such as of its tokenizer
                    request.fail(error)
            shown = self.pages.keeps_prefixes and request.error is None
            if request.params.use_drafts and (request.finish_reason is None or shown):
                count = request.cached.length - group.start
                rows = slice(row, row + count)
                tapped = None if taps is None else taps[rows]
                passes.append(Pass(request, group.start, hidden[rows], tapped))
            row += group.rows
        ended = [group.request for group in groups if group.request.finish_reason is not None]
        self._running = [request for request in self._running if request not in ended]
        self._aborted += [request.request_id for request in ended if request.error is not None]
        try:
            self.drafter.observe(passes)
            for p in passes:
                self.pages.remember(p.request.cached, p.request.tokens)
        finally:
            for request in ended:
                self._release(request)

    def _admit(self) -> None:
        """Admit requests while there are pages for all their tokens and a first block."""
        block = 1 + self.config.speculation.draft_tokens
        while self._waiting and len(self._running) < self.config.max_batch_size:
            request = self._waiting[0]
            if request.params.prompt_logprobs is None:
                # Drafts want the state before the last token of an output.
                known = request.tokens[:-1] if request.has_output else request.tokens
                self.pages.adopt(request.cached, known)
            needed = self.pages.missing_pages(request.cached, len(request.tokens) + block)
            if needed > self.pages.free_pages:
                self.pages.truncate(request.cached, 0)
                return
            self.pages.reserve(request.cached, len(request.tokens))
            self._running.append(self._waiting.popleft())
            if not request.metrics.admitted_seconds:
                request.metrics.admitted_seconds = time.monotonic()
                request.metrics.cached_tokens = request.cached.adopted
                self.totals.prompt_tokens += len(request.prompt)
                self.totals.cached_tokens += request.cached.adopted

    def _plan(self, length: int) -> list[Group]:
        """Group decoding requests with up to `length` drafts, prefilling ones with a chunk; oldest
        first."""
        budget, drafted = self.config.max_step_tokens, self.config.speculation.draft_tokens > 0
        spans: list[tuple[Request, int, int]] = []
        drafting: list[Request] = []
        counts: list[int] = []
        for request in list(self._running):
            count = self._draft_count(request, length)
            rows = min(request.due(drafted), self.config.prefill_chunk, budget)
            rows = self.pages.chunk(request.cached.length, rows, len(request.tokens))
            if rows <= 0 or rows + count > budget or request not in self._running:
                continue
            if not self._make_room(request, request.cached.length + rows + count):
                continue
            budget -= rows + count
            spans.append((request, request.cached.length, request.cached.length + rows))
            if rows == request.uncached:
                request.begin_block()
            if count:
                drafting.append(request)
                counts.append(count)
        proposals = self.drafter.propose(drafting, counts) if drafting else []
        drafts = {r.request_id: d for r, d in zip(drafting, proposals, strict=True)}
        return [
            Group(request, start, end, drafts.get(request.request_id, Draft()))
            for request, start, end in spans
        ]

    def _draft_count(self, request: Request, length: int) -> int:
        """Return how many drafts to verify: those of a step for decoding requests, as far as they
        may generate more than the next token, none for others."""
        if not (request.is_decoding and request.params.use_drafts):
            return 0
        if request.names_seed and self.config.speculation.k_schedule:
            length = self._length.choose(1)  # whatever the batch is, so that its tokens come again
        return min(length, request.tokens_left - 1, self.config.max_step_tokens - 1)

    def _make_room(self, request: Request, length: int) -> bool:
        """Reserve pages, taking them from the youngest requests; False if it lost its own."""
        while self.pages.missing_pages(request.cached, length) > self.pages.free_pages:
            youngest = self._running[-1]
            self._preempt(youngest)
            if youngest is request:
                return False
        self.pages.reserve(request.cached, length)
        return True

    def _preempt(self, request: Request) -> None:
        """Take a request's pages; it keeps its tokens and is recomputed from them."""
        self._running.remove(request)
        self._release(request)
        for metrics in (request.metrics, self.totals):
            metrics.preemptions += 1
        self._waiting.appendleft(request)

    def _forward(self, groups: Sequence[Group]) -> States:
        """Return the hidden states of all rows."""
        tokens = [
            token
            for group in groups
            for token in (*group.request.tokens[group.start : group.end], *group.draft.tokens)
        ]
        for group in groups:
            self.pages.append(group.request.cached, group.rows)
        sequences = [group.request.cached for group in groups]
        spans = [(group.start, group.start + group.rows) for group in groups]
        states = self.pages.advance(sequences, spans, [g.end - g.start for g in groups])
        layout = lay_out(self.pages, sequences, spans, self.model.device, states)
        ids = torch.tensor(tokens, device=self.model.device)
        return self._steps(ids, layout=layout)

    def _commit(self, group: Group, verdict: Verdict) -> None:
        """Append what was accepted, and forget the cache of what was not."""
        request, drafts = group.request, group.draft.tokens
        before = request.metrics.output_tokens
        tokens = (*drafts[: verdict.accepted], verdict.last)
        for metrics in (request.metrics, self.totals):
            metrics.count(len(drafts), verdict.accepted)
        request.commit(tokens, verdict.accepted, verdict.logprobs)
        self.totals.output_tokens += request.metrics.output_tokens - before
        self.pages.truncate(request.cached, len(request.tokens) - 1)

    def _release(self, request: Request) -> None:
        """Free a request's cache."""
        self.pages.truncate(request.cached, 0)
        self.drafter.forget(request)
