"""Sampling: logits to probabilities to tokens, one request at a time.

All randomness passes through Choices, so that a test can walk through every outcome.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np

from mtp_checkpoints.errors import UsageError
from mtp_runtime.config import check_count, check_flag, check_range

Probabilities = np.ndarray[Any, np.dtype[np.float64]]


MAX_LOGPROBS = 20
_LAST_ID = (1 << 31) - 1


def random_seed() -> int:
    """Return a seed for a request that names none, small enough for every JSON reader."""
    return secrets.randbits(32)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling and end of one request; the names are vLLM's.

    temperature 0 takes the best token. top_k 0 and top_p 1 keep every token. A request without a
    seed gets a random one, which its output names. stop: texts that end the output, and are cut
    from it. min_tokens: no end token is generated, and no stop text looked for, before so many
    tokens. logprobs: number of most probable tokens to report beside each token, prompt_logprobs
    the same for the prompt; they are those of the target's own logits, before temperature, top_k,
    top_p and min_tokens. use_drafts: False decodes without drafts, in whatever engine.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 64
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    use_drafts: bool = True

    def __post_init__(self) -> None:
        _check_ids("stop_token_ids", self.stop_token_ids)
        check_flag("ignore_eos", self.ignore_eos)
        check_flag("use_drafts", self.use_drafts)
        check_range("temperature", self.temperature, 0.0, 100.0)
        check_range("top_p", self.top_p, 0.0, 1.0)
        check_count("top_k", self.top_k, 0, 1 << 30)
        check_count("max_tokens", self.max_tokens, 1, 1 << 30)
        check_count("min_tokens", self.min_tokens, 0, self.max_tokens)
        for option, number, most in (
            ("seed", self.seed, (1 << 64) - 1),
            ("logprobs", self.logprobs, MAX_LOGPROBS),
            ("prompt_logprobs", self.prompt_logprobs, MAX_LOGPROBS),
        ):
            if number is not None:
                check_count(option, number, 0, most)
        if not all(isinstance(text, str) and text for text in self.stop_texts):
            raise UsageError("Option stop is no text, or an empty one", found=repr(self.stop))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return tuple(self.stop_token_ids or ())

    @property
    def stop_texts(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        if isinstance(self.stop, list | tuple):
            return tuple(self.stop)
        return (cast(str, self.stop),)  # __post_init__ refuses anything else


def _check_ids(option: str, given: Any) -> None:
    """Raise UsageError for an option that is no token ids; None is none of them."""
    if isinstance(given, str | bytes) or not isinstance(given or (), Sequence):
        raise UsageError(
            f"Option {option} cannot be read", expected="token ids", found=repr(given)[:100]
        )
    for token in given or ():
        check_count(option, token, 0, _LAST_ID)


class Choices(Protocol):
    """Source of a request's random decisions."""

    def accept(self, probability: float) -> bool:
        """Return True with the probability."""

    def draw(self, probabilities: Probabilities) -> int:
        """Draw an index of probabilities [vocab], which sum to 1."""


class SeededChoices:
    """Decisions of one seed, the same whatever else is in the batch: each block of an output has a
    stream of its own, so that one which is computed again decides as before."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.begin(0)

    def begin(self, position: int) -> None:
        """Begin the decisions of the block at a position of the output."""
        self._random = np.random.Generator(np.random.Philox([self._seed, position]))

    def accept(self, probability: float) -> bool:
        return bool(self._random.random() < probability)

    def draw(self, probabilities: Probabilities) -> int:
        cumulative = np.cumsum(probabilities)
        at = np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right")
        return int(min(at, np.flatnonzero(probabilities)[-1]))


def probabilities_of(
    logits: np.ndarray[Any, np.dtype[np.float32]], params: SamplingParams
) -> Probabilities:
    """Return the next token's distribution [..., vocab], float64, for logits [..., vocab].

    Temperature first, then the top_k best tokens, then the smallest set of best tokens whose mass
    reaches top_p, at least one. Of equal tokens the lower id is the better one.
    """
    scores = logits.astype(np.float64)
    if params.greedy:
        return one_hot(scores.argmax(axis=-1), scores.shape[-1])
    scores -= scores.max(axis=-1, keepdims=True)
    with np.errstate(over="ignore"):  # a temperature near 0 takes all but the best to -inf
        probabilities: Probabilities = np.exp(scores / params.temperature)
    probabilities /= probabilities.sum(axis=-1, keepdims=True)
    if params.top_k == 0 and params.top_p >= 1.0:
        return probabilities
    order = np.argsort(-probabilities, axis=-1, kind="stable")
    best_first = np.take_along_axis(probabilities, order, axis=-1)
    if params.top_k:
        best_first[..., params.top_k :] = 0.0
        best_first /= best_first.sum(axis=-1, keepdims=True)
    if params.top_p < 1.0:
        mass_before = np.cumsum(best_first, axis=-1) - best_first
        left_out = mass_before >= params.top_p
        left_out[..., 0] = False
        best_first[left_out] = 0.0
        best_first /= best_first.sum(axis=-1, keepdims=True)
    np.put_along_axis(probabilities, order, best_first, axis=-1)
    return probabilities


def one_hot(tokens: int | np.ndarray[Any, np.dtype[np.int64]], vocab: int) -> Probabilities:
    """Return the certainty of each of tokens [...] as probabilities [..., vocab]."""
    ids = np.asarray(tokens)
    probabilities = np.zeros((*ids.shape, vocab))
    np.put_along_axis(probabilities, ids[..., None], 1.0, axis=-1)
    return probabilities
