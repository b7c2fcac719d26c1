"""State of one request in the engine, and the counts kept for it."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mtp_runtime.acceptance.base import Draft
from mtp_runtime.cache import CachedSequence
from mtp_runtime.logprobs import TokenLogprobs
from mtp_runtime.sampling import Choices, SamplingParams, SeededChoices, random_seed
from mtp_runtime.stop_texts import StopTexts
from mtp_runtime.tokenizer import Decode, TextStream

logger = logging.getLogger(__name__)


@dataclass
class RequestMetrics:
    """Counts of one request, or of all requests of an engine.

    drafted[j] counts the blocks in which a draft at position j was verified, reached[j] those of
    them in which all drafts before it were accepted, accepted[j] those in which it was accepted as
    well. target_steps counts verified blocks; output tokens over target_steps is the mean accepted
    length. cached_tokens are those of the prompt that the prefix cache had. Times are of the
    monotonic clock.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    target_steps: int = 0
    preemptions: int = 0
    drafted: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    arrival_seconds: float = 0.0
    admitted_seconds: float = 0.0
    first_token_seconds: float = 0.0
    finished_seconds: float = 0.0

    def count(self, drafted: int, accepted: int) -> None:
        """Note one verified block."""
        self.target_steps += 1
        missing = drafted - len(self.drafted)
        self.drafted += [0] * missing
        self.reached += [0] * missing
        self.accepted += [0] * missing
        for position in range(drafted):
            self.drafted[position] += 1
            self.reached[position] += position <= accepted
            self.accepted[position] += position < accepted

    @property
    def time_to_first_token_seconds(self) -> float:
        return self.first_token_seconds - self.arrival_seconds

    @property
    def time_per_output_token_seconds(self) -> float:
        """Mean time between tokens after the first."""
        later = max(1, self.output_tokens - 1)
        return (self.finished_seconds - self.first_token_seconds) / later

    @property
    def tokens_per_step(self) -> float:
        return self.output_tokens / max(1, self.target_steps)


@dataclass(frozen=True)
class TokenEvent:
    """One streamed token.

    text: what it added to the output, perhaps nothing yet; decoded: there is a tokenizer to make
    text. draft_position: from 1, that of the accepted draft in its block; 0 for a token that the
    target chose itself.
    """

    request_id: int
    token: int
    text: str
    decoded: bool
    draft_position: int = 0
    logprobs: TokenLogprobs | None = None

    @property
    def from_draft(self) -> bool:
        return self.draft_position > 0


@dataclass(eq=False)
class Request:
    """State of one request: its tokens, its part of the cache, its random choices, and the events
    that nobody has taken yet. finish_reason is None until it has ended; stop_reason is then the
    stop text or the one of stop_token_ids that it met, error what ended it by reason "error".
    logprobs are those of the output, prompt_logprobs those of the prompt from its second token on,
    where they are wanted."""

    request_id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    decode: Decode | None = None
    tokens: list[int] = field(default_factory=list)
    cached: CachedSequence = field(default_factory=CachedSequence)
    draft: Draft = field(default_factory=Draft)
    text: str = ""
    streamed: int = 0  # characters of text that events have carried
    events: deque[TokenEvent] = field(default_factory=deque)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None
    seed: int | None = None  # of its random choices, in place of that of params
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        if self.seed is None:
            self.seed = random_seed() if self.params.seed is None else self.params.seed
        self.choices: Choices = SeededChoices(self.seed)
        self._text = None if self.decode is None else TextStream(self.decode)
        self._stops = StopTexts(self.params.stop_texts)
        self.metrics.prompt_tokens = len(self.prompt)
        self.metrics.arrival_seconds = time.monotonic()

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def tokens_left(self) -> int:
        """Number of tokens that may still be generated."""
        return self.params.max_tokens - self.metrics.output_tokens

    @property
    def uncached(self) -> int:
        """Number of tokens without cache entries; one while decoding, more while prefilling."""
        return len(self.tokens) - self.cached.length

    @property
    def is_decoding(self) -> bool:
        """True when the last token alone has no cache entry, and is one of the output: the drafter
        saw the one before, and drafts follow the same tokens whatever the step was planned with."""
        return self.has_output and self.uncached <= 1

    def due(self, drafted: bool) -> int:
        """Return how many tokens are to be computed. Where drafts are made the last token of an
        output whose cache was lost waits for a step of its own, in which the same ones follow it as
        at first."""
        return self.uncached - (drafted and self.has_output and not self.is_decoding)

    @property
    def has_output(self) -> bool:
        return len(self.tokens) > len(self.prompt)

    @property
    def names_seed(self) -> bool:
        """True for a request that samples, and is to give the same tokens whenever it is made."""
        return self.params.seed is not None and not self.params.greedy

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end the request."""
        params = self.params
        return (*params.stop_ids, *(() if params.ignore_eos else self.eos_token_ids))

    def begin_block(self) -> None:
        """Begin the random choices of the block that follows the tokens so far."""
        if isinstance(self.choices, SeededChoices):
            self.choices.begin(len(self.tokens) - len(self.prompt))

    def take_events(self) -> Iterator[TokenEvent]:
        """Take the events of the tokens so far, oldest first."""
        while self.events:
            yield self.events.popleft()

    def commit(
        self, tokens: Sequence[int], from_draft: int, logprobs: Sequence[TokenLogprobs] = ()
    ) -> None:
        """Append a block's tokens, with their events, up to the one that ends the request.

        The first from_draft of them were drafts; logprobs has one entry for each, or none. Sets
        finish_reason where the request ends.
        """
        for index, token in enumerate(tokens):
            if not self.metrics.output_tokens:
                self.metrics.first_token_seconds = time.monotonic()
            self.tokens.append(token)
            self.metrics.output_tokens += 1
            self.finish_reason = self._reason_to_finish(token)
            piece, decoded = self._take_piece(), self.decode is not None
            self.logprobs += logprobs[index : index + 1]
            self.events.append(
                TokenEvent(
                    request_id=self.request_id,
                    token=token,
                    text=piece,
                    decoded=decoded,
                    draft_position=index + 1 if index < from_draft else 0,
                    logprobs=logprobs[index] if logprobs else None,
                )
            )
            if self.finish_reason is not None:
                self.metrics.finished_seconds = time.monotonic()
                break

    def fail(self, error: Exception) -> None:
        """End the request by an error of its own."""
        logger.error("Request %d ends by an error", self.request_id, exc_info=error)
        self.finish_reason, self.error = "error", error
        self.metrics.finished_seconds = time.monotonic()

    def _reason_to_finish(self, token: int) -> str | None:
        """Take in the last token's text; return why the request ends, None if it goes on."""
        cut = None if self._text is None else self._grow(self._text.add(token))
        if self.metrics.output_tokens < self.params.min_tokens:
            return None
        if token in self.end_token_ids:
            self.stop_reason = token if token in self.params.stop_ids else None
            self._end_text()
            return "stop"
        if cut is None and self.tokens_left > 0:
            return None
        if cut is None:
            cut = self._end_text()
        if cut is None:
            return "length"
        at, self.stop_reason = cut
        self.text = self.text[:at]
        return "stop"

    def _end_text(self) -> tuple[int, str] | None:
        """Take in the text that was held back for tokens that do not come; returns as _grow."""
        return None if self._text is None else self._grow(self._text.end())

    def _grow(self, piece: str) -> tuple[int, str] | None:
        """Add to the text; return the place in it of a stop text that ends in the piece."""
        before = len(self.text)
        self.text += piece
        first = self._stops.first_in(piece)
        return None if first is None else (before + first[0], first[1])

    def _take_piece(self) -> str:
        """Return the text not streamed yet, without an end that may begin a stop text."""
        end = len(self.text)
        if self.finish_reason is None:
            end -= self._stops.held
        piece = self.text[self.streamed : end]
        self.streamed = max(self.streamed, end)
        return piece


class Arrival(NamedTuple):
    """A request as rank 0 tells of it, with the seed of its random choices."""

    request_id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int | None


@dataclass(frozen=True)
class Turn:
    """Message of rank 0 to the other ranks before a step: the requests that came, the numbers of
    those that were aborted, and how many drafts each that decodes gets."""

    arrivals: tuple[Arrival, ...]
    aborted: tuple[int, ...]
    drafts: int
