"""Rows to train on: texts that the target wrote, its hidden states and its distributions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from mtp_export.errors import UsageError
from mtp_export.verify.evidence.corpus import texts_of
from mtp_export.verify.evidence.decode import decode
from mtp_runtime.models.model import Model, States
from mtp_runtime.sampling import SamplingParams
from mtp_runtime.streaming import StreamedModel, pass_through
from mtp_runtime.teacher_forcing import PagedTexts, Text, Texts, logits_by_chunk, model_states

GOALS = 64  # tokens of a distribution that are kept
WRITING_DRAFTS = 3


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
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """Return all rows of several parts."""
        texts = Texts(tuple(text for part in parts for text in part.texts.texts))
        columns = zip(*((p.hidden, p.ids, p.log_probs) for p in parts), strict=True)
        return cls(texts, *(torch.cat(list(column)) for column in columns))

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each text."""
        return tuple(len(text.tokens) for text in self.texts.texts)


@dataclass(frozen=True)
class Writer:
    """The target, which answers prompts greedily and reads texts.

    fed: what the draft takes of its states. new_tokens is the length of answers, text_tokens that
    at which texts are cut. streamed: the target on disk, of which model has the head alone; it
    reads, and answers nothing.
    """

    model: Model
    fed: Callable[[Model, States], Tensor]
    new_tokens: int
    text_tokens: int
    streamed: StreamedModel | None = None

    @torch.inference_mode()
    def rows(self, lines: Sequence[Line], dtype: torch.dtype) -> Rows:
        """Return what the target writes after prompts without an answer, and computes of all;
        dtype is that of hidden states on disk."""
        texts = self._texts(lines)
        states = self._states(texts)
        ids, log_probs = [], []
        for _, logits in logits_by_chunk(self.model.head, states.after):
            best, found = logits.log_softmax(dim=-1).topk(min(GOALS, logits.shape[1]), dim=-1)
            log_probs.append(best.cpu())
            ids.append(found.int().cpu())
        hidden = self.fed(self.model, states).to(dtype).cpu()
        return Rows(texts, hidden, torch.cat(ids), torch.cat(log_probs))

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

    def _texts(self, lines: Sequence[Line]) -> Texts:
        """Answer the prompts that have no answer; prompts are cut to leave room."""
        prompts = [line.prompt[: self.text_tokens - self.new_tokens] for line in lines]
        open_lines = [number for number, line in enumerate(lines) if line.answer is None]
        written = self._written([prompts[number] for number in open_lines])
        texts = dict(zip(open_lines, written.texts, strict=True))
        for number, line in enumerate(lines):
            if line.answer is not None:
                tokens = (*line.prompt, *line.answer)[: self.text_tokens]
                texts[number] = Text(tokens, min(len(line.prompt), len(tokens)))
        return Texts(tuple(texts[number] for number in range(len(lines))))

    def _written(self, prompts: Sequence[tuple[int, ...]]) -> Texts:
        """Let the target answer prompts (UsageError for one on disk)."""
        if not prompts:
            return Texts(())
        if self.streamed is not None:
            raise UsageError(
                "A target that is read layer by layer answers no prompts",
                expected="a completion in every line of the data, with --stream",
                found=f"{len(prompts)} prompts without one",
                todo="Let the engine that serves the bundle answer them greedily",
            )
        method = "mtp" if self.model.mtp_modules else "none"
        params = SamplingParams(max_tokens=self.new_tokens, ignore_eos=True)
        done = decode(self.model, prompts, params, method=method, k=WRITING_DRAFTS)
        return texts_of(done)
