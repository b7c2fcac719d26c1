"""The texts that run-level checks share: prompts with their plain greedy outputs by the bundle's
own model, and its hidden states at every token of them, computed once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from mtp_export.progress import CountCallback, ShowCount, uncounted
from mtp_export.verify.evidence.decode import Decoded, decode, decode_one_by_one
from mtp_export.verify.evidence.extra_drafts import ExtraDraft
from mtp_export.verify.evidence.noise import measured_noise
from mtp_export.verify.evidence.prompts import Prompt
from mtp_runtime.models.execution import DraftModule, Head
from mtp_runtime.models.model import Model, MtpModule
from mtp_runtime.sampling import SamplingParams
from mtp_runtime.teacher_forcing import (
    Anchors,
    DraftInputs,
    Recycle,
    Text,
    Texts,
    best_and_score,
    best_tokens,
    draft_states,
    target_states,
)

# A prompt of one token leaves nothing for a drafter to see.
_LEAST_PROMPT_TOKENS = 2
_SAMPLED_TOKENS = 16


@dataclass(frozen=True)
class Drafts:
    """Drafts of an MTP module at every anchor, by depth.

    best [A]: the module's best token. hit [A]: that is the wanted token. room [A]: the text goes
    that far. scores [A]: the module's log-probability of the wanted token, in nats.
    """

    best: tuple[torch.Tensor, ...]
    hit: tuple[torch.Tensor, ...]
    room: tuple[torch.Tensor, ...]
    scores: tuple[torch.Tensor, ...]

    def reached(self, depth: int) -> torch.Tensor:
        """Mask [A] of anchors whose first `depth` drafts are all accepted; depth 0: everywhere."""
        result = torch.ones_like(self.room[0])
        for hit in self.hit[:depth]:
            result = result & hit
        return result


@dataclass
class Corpus:
    """Texts of a model; everything about them is computed on first use.

    given, given_states: texts and hidden states that were computed elsewhere. show_count: opens a
    progress bar of tokens. draft: what drafts for a model without MTP modules.
    """

    model: Model
    prompts: tuple[Prompt, ...]
    new_tokens: int
    given: Texts | None = None
    given_states: tuple[torch.Tensor, torch.Tensor] | None = None
    show_count: ShowCount = uncounted
    draft: ExtraDraft | None = None
    _decoded: dict[int, Decoded] = field(default_factory=dict)
    _outputs: list[torch.Tensor] = field(default_factory=list, init=False)  # of the module as it is

    def __post_init__(self) -> None:
        self.prompts = (
            tuple(p for p in self.prompts if len(p) >= _LEAST_PROMPT_TOKENS) or self.prompts
        )

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.new_tokens)

    @property
    def module(self) -> MtpModule:
        assert self.model.mtp is not None, "a bundle with an mtp part"
        return self.model.mtp

    def modules(self, first: MtpModule | None = None) -> tuple[MtpModule, ...]:
        """The modules by depth, with another one in place of the first where it is given."""
        return (first or self.module, *self.model.mtp_modules[1:])

    def module_at(self, depth: int) -> MtpModule:
        """The module that drafts at a depth, from 0."""
        return self.modules()[: depth + 1][-1]

    @cached_property
    def plain(self) -> Decoded:
        """Plain greedy decoding of all prompts together."""
        with self._shown("plain decoding") as advance:
            return decode(self.model, self.prompts, self.params, advance=advance)

    @cached_property
    def noise(self) -> float:
        """Rounding noise of the model's logits, on these texts."""
        return measured_noise(self.model, self.plain)

    def speculative(self, k: int) -> Decoded:
        """Greedy decoding with k drafts."""
        if k not in self._decoded:
            with self._shown(f"decoding with k={k}") as advance:
                self._decoded[k] = self.drafted(self.prompts, self.params, k, advance)
        return self._decoded[k]

    @property
    def method(self) -> str:
        """The drafting method."""
        return "mtp" if self.draft is None else self.draft.method

    def drafted(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        k: int,
        advance: CountCallback = int,
        at_once: int | None = None,
    ) -> Decoded:
        """Decode prompts with k drafts per step, of the MTP module or of the draft in its place;
        at_once and advance as in decode."""
        if self.draft is not None:
            return self.draft.decode(prompts, params, k, advance, at_once)
        return decode(
            self.model, prompts, params, method="mtp", k=k, at_once=at_once, advance=advance
        )

    def _shown(self, title: str) -> AbstractContextManager[CountCallback]:
        """A progress bar of the tokens of all prompts."""
        return self.show_count(title, len(self.prompts) * self.new_tokens, "tokens")

    def one_by_one(self, k: int) -> Decoded:
        """Greedy decoding with k drafts of the MTP modules after every token, none accepted, and
        with log-probabilities."""
        with self._shown("golden file") as advance:
            return decode_one_by_one(self.model, self.prompts, self.params, k, advance)

    def sampled(self, k: int) -> tuple[Corpus, Decoded]:
        """Sampling at temperature 1 with k drafts of the MTP module: a corpus of the sampled texts,
        and the run."""
        params = [
            SamplingParams(temperature=1.0, max_tokens=_SAMPLED_TOKENS, seed=seed, ignore_eos=True)
            for seed in range(len(self.prompts))
        ]
        most_tokens = len(self.prompts) * _SAMPLED_TOKENS
        with self.show_count(f"acceptance, sampling with k={k}", most_tokens, "tokens") as advance:
            decoded = self.drafted(self.prompts, params, k, advance)
        return Corpus(
            model=self.model,
            prompts=self.prompts,
            new_tokens=_SAMPLED_TOKENS,
            given=texts_of(decoded),
        ), decoded

    @cached_property
    def texts(self) -> Texts:
        if self.given is not None:
            return self.given
        return texts_of(self.plain)

    @cached_property
    def states(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [T, d] before and after the last norm."""
        if self.given_states is not None:
            return self.given_states
        with torch.inference_mode():
            return target_states(self.model, self.texts)

    def every_nth(self, step: int, first: int = 0, most_tokens: int | None = None) -> Corpus:
        """A corpus of every nth text, from one on, or of so many first tokens of each, whose states
        are those computed here."""
        texts = self.texts
        kept = [replace(one, tokens=one.tokens[:most_tokens]) for one in texts.texts[first::step]]
        places = zip(texts.starts[first::step], kept, strict=True)
        rows = torch.cat([torch.arange(len(text.tokens)) + start for start, text in places])
        before, after = self.states
        return Corpus(
            model=self.model,
            prompts=tuple(text.tokens[: text.prompt_size] for text in kept),
            new_tokens=self.new_tokens,
            given=Texts(tuple(kept)),
            given_states=(before[rows], after[rows]),
        )

    @property
    def hidden(self) -> torch.Tensor:
        """Hidden states of the target as the module is fed them [T, d]."""
        return self.model.mtp_input(*self.states)

    @cached_property
    def anchors(self) -> Anchors:
        """Rows where an engine would draft: those of generated tokens."""
        return self.texts.anchors()

    @cached_property
    def everywhere(self) -> Anchors:
        """All rows that drafts can start from, those of prompts included."""
        return self.texts.anchors(0)

    @cached_property
    def choices(self) -> torch.Tensor:
        """The target's best token after every row [T]."""
        with torch.inference_mode():
            return best_tokens(self.model.head, self.states[1]).cpu()

    @torch.inference_mode()
    def drafts(
        self,
        depths: int,
        module: MtpModule | None = None,
        hidden: torch.Tensor | None = None,
        recycle: Recycle | None = None,
    ) -> Drafts:
        """Drafts of a module, by default the corpus's own, at every anchor."""
        states = self.draft_outputs(depths, module=module, hidden=hidden, recycle=recycle)
        return judge(self.modules(module), texts=self.texts, anchors=self.anchors, states=states)

    @torch.inference_mode()
    def draft_outputs(
        self,
        depths: int,
        module: MtpModule | None = None,
        hidden: torch.Tensor | None = None,
        recycle: Recycle | None = None,
        anchors: Anchors | None = None,
    ) -> list[torch.Tensor]:
        """MTP outputs [A, d] before the norm at every anchor, one per depth; those of the module as
        it is are kept."""
        is_own = all(one is None for one in (module, hidden, recycle, anchors))
        if is_own and depths <= len(self._outputs):
            return self._outputs[:depths]
        hidden = self.hidden if hidden is None else hidden
        inputs = DraftInputs(self.texts, hidden, anchors or self.anchors)
        found = draft_states(self.modules(module), inputs, depths, recycle)
        if is_own:
            self._outputs = found
        return found

    def by_text(
        self, values: torch.Tensor, where: torch.Tensor, anchors: Anchors | None = None
    ) -> list[float]:
        """Sums of values [A] over the anchors of each text where the mask [A] is true."""
        owners = (anchors or self.anchors).owners
        sums = torch.zeros(len(self.texts.texts), dtype=torch.float64)
        sums.index_add_(0, owners[where], values[where].double())
        return [float(value) for value in sums]


def texts_of(decoded: Decoded) -> Texts:
    """Prompts and outputs of a run."""
    return Texts(tuple(Text(tuple(r.tokens), len(r.prompt)) for r in decoded.requests))


def judge(
    modules: Sequence[DraftModule],
    texts: Texts,
    anchors: Anchors,
    states: Sequence[torch.Tensor],
    following: torch.Tensor | None = None,
) -> Drafts:
    """Best tokens and log-probabilities of MTP outputs, one [A, d] per depth. following [T]: the
    wanted token after each row, by default the texts' own next token."""
    heads = [modules[:depth][-1].head for depth in range(1, len(states) + 1)]
    normed = [head.normed(x) for head, x in zip(heads, states, strict=True)]
    return judge_normed(heads, texts=texts, anchors=anchors, normed=normed, following=following)


def judge_normed(
    heads: Sequence[Head],
    texts: Texts,
    anchors: Anchors,
    normed: Sequence[torch.Tensor],
    following: torch.Tensor | None = None,
) -> Drafts:
    """Judge outputs [A, d] that passed the norm, with the head of each depth."""
    following = texts.tokens.roll(-1) if following is None else following
    best, hits, rooms, scores = [], [], [], []
    for depth, (head, x) in enumerate(zip(heads, normed, strict=True), start=1):
        room = texts.room(anchors, depth)
        wanted = following[(anchors.rows + depth).clamp(max=len(following) - 1)]
        found, score = best_and_score(head, x, wanted)
        best.append(found)
        hits.append((found == wanted) & room)
        rooms.append(room)
        scores.append(score)
    return Drafts(best=tuple(best), hit=tuple(hits), room=tuple(rooms), scores=tuple(scores))
