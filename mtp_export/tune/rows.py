"""Rows to train on: texts that the target wrote, its hidden states and its distributions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor

from mtp_checkpoints.errors import UsageError
from mtp_checkpoints.families.contract import Hidden
from mtp_export.verify.evidence.decode import PassThroughDrafter, decode
from mtp_runtime.drafters import DRAFTERS
from mtp_runtime.drafters.base import DrafterParts, Pass
from mtp_runtime.models.model import Model, States
from mtp_runtime.request import Request
from mtp_runtime.sampling import SamplingParams
from mtp_runtime.streaming import StreamedModel, pass_through
from mtp_runtime.teacher_forcing import PagedTexts, Text, Texts, logits_by_chunk, model_states

GOALS = 64  # tokens of a distribution that are kept
WRITING_DRAFTS = 3
# An engine keeps no state of its last token, nor shows those of the last step of a request.
_UNSEEN_TOKENS = WRITING_DRAFTS + 2


class Fed(StrEnum):
    """States of the target that a draft is fed: on one side of its last norm, or of its taps."""

    BEFORE_NORM = Hidden.BEFORE_NORM
    AFTER_NORM = Hidden.AFTER_NORM
    TAPS = "taps"

    def of(self, states: States) -> Tensor:
        """Return them of a pass, [T, n]."""
        found = {
            Fed.BEFORE_NORM: states.before,
            Fed.AFTER_NORM: states.after,
            Fed.TAPS: states.taps,
        }[self]
        assert found is not None, "the model is tapped for the draft"
        return found


@dataclass(frozen=True)
class Line:
    """A prompt, and the answer to it where one is given."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...] | None


@dataclass(frozen=True)
class Rows:
    """Texts side by side, T rows.

    hidden [T, d] is what the draft is fed of the target; ids and log_probs [T, g] are the most
    probable tokens after each row.
    """

    texts: Texts
    hidden: Tensor
    ids: Tensor
    log_probs: Tensor

    def state(self) -> dict[str, Any]:
        """Return the rows as tensors alone."""
        texts = self.texts.texts
        return {
            "tokens": self.texts.tokens.int(),
            "lengths": torch.tensor([len(text.tokens) for text in texts]),
            "prompt_sizes": torch.tensor([text.prompt_size for text in texts]),
            "hidden": self.hidden,
            "ids": self.ids,
            "log_probs": self.log_probs,
        }

    @classmethod
    def of(cls, state: dict[str, Any]) -> Self:
        """Return the rows of a state."""
        tokens = state["tokens"].split(state["lengths"].tolist())
        sizes = state["prompt_sizes"].tolist()
        pairs = zip(tokens, sizes, strict=True)
        texts = Texts(tuple(Text(tuple(own.tolist()), size) for own, size in pairs))
        return cls(texts, state["hidden"], state["ids"], state["log_probs"])

    @classmethod
    def made(cls, texts: Texts, hidden: Tensor, logits: Iterable[Tensor]) -> Self:
        """Make rows of the target's logits [n, vocab], some rows at a time."""
        ids, log_probs = [], []
        for own in logits:
            best, best_ids = own.log_softmax(dim=-1).topk(min(GOALS, own.shape[1]), dim=-1)
            log_probs.append(best.cpu())
            ids.append(best_ids.int().cpu())
        return cls(texts, hidden.cpu(), torch.cat(ids), torch.cat(log_probs))

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """Return all rows of several parts."""
        texts = Texts(tuple(text for part in parts for text in part.texts.texts))
        columns = zip(*((p.hidden, p.ids, p.log_probs) for p in parts), strict=True)
        return cls(texts, *(torch.cat(list(column)) for column in columns))

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each text."""
        return tuple(len(text.tokens) for text in self.texts.texts)


@dataclass
class StateKeeper(PassThroughDrafter):
    """Keeps what the target computed of the tokens of every request."""

    kept: dict[int, list[Pass]] = field(default_factory=dict)

    def observe(self, passes: Sequence[Pass]) -> None:
        """Keep the states; those of a request that lost its cache come again."""
        for p in passes:
            before = self.kept.get(p.request.request_id, [])
            self.kept[p.request.request_id] = [q for q in before if q.start < p.start] + [p]
        super().observe(passes)


@dataclass(frozen=True)
class Writer:
    """The target, which answers prompts greedily and reads texts.

    fed: what the draft takes of its states. new_tokens is the length of answers, text_tokens that
    at which texts are cut. streamed: the target on disk, of which model has the head alone; it
    reads, and answers nothing.
    """

    model: Model
    fed: Fed
    new_tokens: int
    text_tokens: int
    streamed: StreamedModel | None = None

    @torch.inference_mode()
    def rows(self, lines: Sequence[Line], dtype: torch.dtype) -> Rows:
        """Return what the target writes after prompts without an answer, and computes of all;
        dtype is that of hidden states on disk."""
        found = self._written(lines) | self._read(lines)
        texts = Texts(tuple(found[number][0] for number in range(len(lines))))
        states = _joined([found[number][1] for number in range(len(lines))])
        logits = (logits for _, logits in logits_by_chunk(self.model.head, states.after))
        return Rows.made(texts, self.fed.of(states).to(dtype), logits)

    def _states(self, texts: Texts) -> States:
        """Return the target's hidden states of every row."""
        if self.streamed is None:
            return model_states(self.model, texts)
        x, paged = self.streamed.embedded(texts.tokens), PagedTexts.of(texts)
        chunks, kept = paged.chunks(self.streamed.device), list[Tensor]()
        for number, layer in enumerate(self.streamed.layers(0)):
            if number in self.model.taps:
                kept.append(x.clone())
            pass_through(layer, x, paged, chunks)
        return States(x, self.model.head.normed(x), torch.cat(kept, dim=1) if kept else None)

    def _read(self, lines: Sequence[Line]) -> dict[int, tuple[Text, States]]:
        """Return the texts of lines with an answer, by number, and the states of their rows."""
        texts = {
            number: Text(
                (*line.prompt, *line.answer)[: self.text_tokens],
                min(len(line.prompt), self.text_tokens),
            )
            for number, line in enumerate(lines)
            if line.answer is not None
        }
        if not texts:
            return {}
        states = self._states(Texts(tuple(texts.values())))
        parts = _split(states, [len(text.tokens) for text in texts.values()])
        return dict(zip(texts, zip(texts.values(), parts, strict=True), strict=True))

    def _written(self, lines: Sequence[Line]) -> dict[int, tuple[Text, States]]:
        """Answer the lines without an answer (UsageError for a target on disk); their states are
        those that were computed for it. Prompts are cut to leave room."""
        prompts = {
            number: line.prompt[: self.text_tokens - self.new_tokens]
            for number, line in enumerate(lines)
            if line.answer is None
        }
        if not prompts:
            return {}
        if self.streamed is not None:
            raise UsageError(
                "A target that is read layer by layer answers no prompts",
                expected="a completion in every line of the data, with --stream",
                found=f"{len(prompts)} prompts without one",
                todo="Let the engine that serves the bundle answer them greedily",
            )
        answered = self._answered(list(prompts.values()))
        return dict(zip(prompts, answered, strict=True))

    def _answered(self, prompts: Sequence[tuple[int, ...]]) -> list[tuple[Text, States]]:
        """Return prompts with their answers, and the states of their rows."""
        keepers: list[StateKeeper] = []

        def keeping(parts: DrafterParts) -> StateKeeper:
            method = "mtp" if self.model.mtp_modules else "none"
            keepers.append(StateKeeper(DRAFTERS[method].build(parts)))
            return keepers[0]

        params = [
            SamplingParams(max_tokens=self._asked(len(prompt)), ignore_eos=True)
            for prompt in prompts
        ]
        done = decode(self.model, prompts, params, build=keeping, k=WRITING_DRAFTS)
        return [self._seen(r, keepers[0].kept[r.request_id]) for r in done.requests]

    def _asked(self, prompt_tokens: int) -> int:
        """Return how many tokens to ask for: some more than wanted, as far as contexts go."""
        room = self.model.config.max_positions - prompt_tokens
        return max(1, min(self.new_tokens + _UNSEEN_TOKENS, room))

    def _seen(self, request: Request, passes: Sequence[Pass]) -> tuple[Text, States]:
        """Return the tokens of a request whose states were seen, as many as are wanted."""
        fed = torch.cat([p.hidden for p in passes])
        taps = [p.taps for p in passes if p.taps is not None]
        length = min(len(fed), len(request.prompt) + self.new_tokens)
        text = Text(tuple(request.tokens[:length]), min(len(request.prompt), length))
        module = self.model.mtp
        is_normed = module is None or module.contract.target_hidden is Hidden.AFTER_NORM
        after = fed if is_normed else self.model.head.normed(fed)
        # The side of the norm that the module is not fed is fed to no other draft either.
        return text, _cut(States(fed, after, torch.cat(taps) if taps else None), 0, length)


def _cut(states: States, start: int, end: int) -> States:
    """Return the states of rows [start, end)."""
    taps = None if states.taps is None else states.taps[start:end]
    return States(states.before[start:end], states.after[start:end], taps)


def _split(states: States, lengths: Sequence[int]) -> list[States]:
    """Return the states of texts side by side, text by text."""
    ends = list(accumulate(lengths))
    return [_cut(states, end - length, end) for end, length in zip(ends, lengths, strict=True)]


def _joined(parts: Sequence[States]) -> States:
    """Return the states of several texts side by side."""
    taps = [part.taps for part in parts if part.taps is not None]
    return States(
        torch.cat([part.before for part in parts]),
        torch.cat([part.after for part in parts]),
        torch.cat(taps) if taps else None,
    )
