"""Variants of an MTP module's mixture of experts: its router's bias and rows in another order or of
the other sign; two experts exchanged, gate and up of one or of all, a matrix of all in another
order, one negated, multiplied or left out. An expert runs on the rows that it is picked for, and a
variant only mixes results anew, so that many cost little."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, product
from math import comb

import torch

from mtp_export.verify.diagnosis.causes import balance
from mtp_export.verify.diagnosis.causes import decoding as causes
from mtp_export.verify.diagnosis.changed_weight import gate_and_up_exchanged
from mtp_export.verify.diagnosis.tensor_variants import (
    OF_MATRICES,
    Place,
    mlp_places,
    tensor_variants,
)
from mtp_export.verify.evidence.corpus import Corpus
from mtp_runtime.drafters.base import ScoredVariant
from mtp_runtime.layers.decoder_layer import Nothing
from mtp_runtime.layers.moe import Mlp, Moe, Router, SigmoidRouter, SoftmaxRouter
from mtp_runtime.models.execution import Head
from mtp_runtime.models.model import MtpModule
from mtp_runtime.teacher_forcing import WORST_SCORE, DraftInputs, best_and_score, draft_states

# Experts that are exchanged with each other: 256 have 32640 pairs. Of more, those are that drafts
# do best without.
MOST_EXPERTS = 16
# Routed experts whose single tensors are changed: those that drafts do best without.
_LOOKED_INTO = 2
# Factors by which what an expert adds is tried.
LEFT_OUT = 0.0
SCALES = (LEFT_OUT, 0.5, 2.0)
SHARED = "the shared expert"
# The matrices of an expert that are stacked apart, and the experts that those of one stack may be
# of, with the moves [e] that mend it.
_STACKED = {"down_proj": "down", "gate_proj and up_proj": "gate_up"}
_OTHERS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the expert before it": lambda experts: experts.roll(-1),
    "the expert after it": lambda experts: experts.roll(1),
    "the expert as far from the other end": lambda experts: experts.flip(0),
    "the expert half of all further on": lambda experts: experts.roll(len(experts) // 2),
}


@dataclass(frozen=True)
class _Moved:
    """A variant: its change and cause in words, and the difference [n, d] of the feed-forward's
    output in rows [n]. by_acceptance is that of a ScoredVariant. left_out: the expert that is."""

    change: str
    cause: str
    rows: torch.Tensor
    difference: torch.Tensor
    by_acceptance: bool = False
    left_out: int | None = None

    @classmethod
    def of(cls, change: str, cause: str, difference: torch.Tensor) -> _Moved:
        """Return the variant of a difference of all rows [A, d]."""
        rows = difference.any(dim=1).nonzero()[:, 0]
        return cls(change, cause, rows, difference[rows])

    def among(self, where: torch.Tensor) -> _Moved:
        """Return the variant in those rows alone where a mask [A] is true."""
        kept = where.to(self.rows.device)[self.rows]
        return replace(self, rows=self.rows[kept], difference=self.difference[kept])


def mixture(module: MtpModule) -> Moe | None:
    """Return the experts of a module; None for a dense one."""
    moe = module.layer.feed_forward
    return moe if isinstance(moe, Moe) else None


def has_many(module: MtpModule) -> bool:
    """True for more experts than are all exchanged with each other."""
    moe = mixture(module)
    return moe is not None and moe.routed_experts > MOST_EXPERTS


def expert_variant_count(module: MtpModule) -> int:
    """Return the number of variants that there are of a module's mixture of experts."""
    moe = mixture(module)
    if moe is None:
        return 0
    routers = sum(1 for _ in router_variants(moe.router))
    first = next(moe.experts.each([0]))
    gated = int(first.is_gated)
    of_one = 1 + gated + len(SCALES)
    stacks = len(_STACKED) * len(_OTHERS)
    pairs = comb(min(moe.routed_experts, MOST_EXPERTS), 2)
    looked_into = len(moe.experts) - moe.routed_experts + min(moe.routed_experts, _LOOKED_INTO)
    of_tensors = sum(1 for _ in tensor_variants(first, _places_of(first)))
    of_each = of_one * len(moe.experts) + gated + looked_into * of_tensors
    return routers + of_each + stacks + pairs


@torch.inference_mode()
def expert_variants(
    corpus: Corpus, own: torch.Tensor, own_hit: torch.Tensor, sample: torch.Tensor
) -> Iterator[ScoredVariant]:
    """Every variant, scored at depth 1: in the sample's rows, of the mask [A], and in all unless it
    is worse there; own, own_hit [A]: scores of the module as it is, and where it drafts the
    target's best token. Yields nothing for a dense module."""
    module, anchors = corpus.module, corpus.everywhere
    moe = mixture(module)
    if moe is None:
        return
    bare = replace(module, layer=replace(module.layer, feed_forward=Nothing()))
    stream = draft_states([bare], DraftInputs(corpus.texts, corpus.hidden, anchors), 1)[0]
    normed = module.layer.post_norm(stream)
    added = moe(normed)
    whole = stream + added
    wanted = corpus.choices[anchors.rows + 1]
    scored = _Scored(module.head, whole, wanted, own, own_hit)
    without = dict[int, float]()  # each expert: the gain
    weights = _weights(moe, normed)
    for move in chain(
        _of_router(moe, normed, added),
        _of_each(moe, normed, weights),
        _of_stacks(moe, normed, weights),
        _every_tensor(moe, normed, weights, without),
        _of_pairs(moe, normed, weights, without),
    ):
        scores, hit, where = scored.of(move, sample)
        if move.left_out is not None:
            without[move.left_out] = float((scores - own).sum())
        yield ScoredVariant(
            name="experts",
            change=move.change,
            cause=move.cause,
            scores=scores,
            before=own,
            hit=hit,
            hit_before=own_hit,
            by_acceptance=move.by_acceptance,
            where=where,
        )


@dataclass(frozen=True)
class _Scored:
    """Rows [A, d] of a module before its head, the tokens wanted of them [A], their scores and
    where they hit [A]."""

    head: Head
    rows: torch.Tensor
    wanted: torch.Tensor
    scores: torch.Tensor
    hit: torch.Tensor

    def of(
        self, move: _Moved, sample: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return scores and hits [A] of a variant, and the mask [A] of what was scored: the sample
        where it is worse there, unless an expert is left out; else None, all of it."""
        scores, hit = self.scores.clone(), self.hit.clone()
        self._score(move.among(sample), scores, hit)
        if move.left_out is None and not float((scores - self.scores).sum()) > 0:
            return scores, hit, sample
        self._score(move.among(~sample), scores, hit)
        return scores, hit, None

    def _score(self, move: _Moved, scores: torch.Tensor, hit: torch.Tensor) -> None:
        """Put in scores and hits [A] of the rows of a variant."""
        places = move.rows.cpu()
        x, wanted = self.head.normed(self.rows[move.rows] + move.difference), self.wanted[places]
        best, score = best_and_score(self.head, x, wanted)
        scores[places], hit[places] = score.clamp(min=WORST_SCORE), best == wanted


def router_variants(router: Router) -> Iterator[tuple[str, str, Router]]:
    """Yield change, cause, which has {layer} in it, and router, per variant of a router."""
    if not isinstance(router, SigmoidRouter | SoftmaxRouter):
        return
    if isinstance(router, SigmoidRouter):
        bias = router.bias
        yield (
            "the router's bias is negated",
            causes.ROUTER_BIAS_NEGATED,
            replace(router, bias=-bias),
        )
        yield (
            "the router's bias is in reverse order",
            causes.ROUTER_BIAS_REVERSED,
            replace(router, bias=bias.flip(0)),
        )
    weight = router.weight  # [d, e]
    yield "the router is negated", causes.ROUTER_NEGATED, replace(router, weight=-weight)
    for change in OF_MATRICES:
        if change.rows is not None:
            yield (
                change.done.format("the router"),
                causes.router_reordered(change.wrong),
                replace(router, weight=weight[:, change.rows(weight.shape[1])]),
            )
    for places, back in ((1, "back"), (-1, "on")):
        yield (
            f"the router's rows are moved {back} by one",
            causes.router_rolled(1 if back == "back" else -1),
            replace(router, weight=weight.roll(-places, dims=1)),
        )


def _of_router(moe: Moe, normed: torch.Tensor, added: torch.Tensor) -> Iterator[_Moved]:
    """The variants of the router; added [A, d]: the feed-forward's output as it is."""
    for change, cause, router in router_variants(moe.router):
        cause = cause.format(layer=causes.MTP_LAYER)
        yield _Moved.of(change, cause, replace(moe, router=router)(normed) - added)


def _weights(moe: Moe, normed: torch.Tensor) -> torch.Tensor:
    """The factors of each expert's output [A, e]; 0 where it is not picked."""
    picked, chosen = moe.router(normed)
    weights = torch.zeros_like(normed[:, :1]).repeat(1, len(moe.experts))
    weights.scatter_(1, picked, chosen.to(weights.dtype))
    gate = moe.shared_gate
    shared = 1.0 if gate is None else torch.mv(normed.float(), gate).sigmoid()[:, None]
    weights[:, moe.routed_experts :] = shared
    return weights


def _of_each(moe: Moe, normed: torch.Tensor, weights: torch.Tensor) -> Iterator[_Moved]:
    """The variants of single experts, and of all of them."""
    every = torch.zeros_like(normed)
    for expert, one in enumerate(moe.experts.every()):
        name = f"expert {expert}" if expert < moe.routed_experts else SHARED
        rows = weights[:, expert].nonzero()[:, 0]
        x, share = normed[rows], weights[rows, expert, None]
        adds = share * one(x)
        if one.is_gated:
            moved = share * gate_and_up_exchanged(one)(x) - adds
            every[rows] += moved
            cause = causes.gate_and_up_swapped(name)
            yield _Moved(f"gate and up of {name} are exchanged", cause, rows, moved)
        yield from _scaled(name, expert, rows, adds)
    if not every.any():
        return
    cause = causes.gate_and_up_swapped("every expert")
    yield _Moved.of("gate and up of every expert are exchanged", cause, every)


def _of_stacks(moe: Moe, normed: torch.Tensor, weights: torch.Tensor) -> Iterator[_Moved]:
    """The variants of all routed experts in which one of their matrices is another expert's."""
    numbers = torch.arange(moe.routed_experts)
    for (part, field), (whose, moved) in product(_STACKED.items(), _OTHERS.items()):
        every = torch.zeros_like(normed)
        others = moe.experts.each(moved(numbers).tolist())
        experts = zip(moe.experts.each(numbers.tolist()), others, strict=True)
        for expert, (one, other) in enumerate(experts):
            rows = weights[:, expert].nonzero()[:, 0]
            x, share = normed[rows], weights[rows, expert, None]
            mended = replace(one, **{field: getattr(other, field)})
            every[rows] += share * (mended(x) - one(x))
        done = f"{part} of every routed expert is given to {whose}"
        yield _Moved.of(done, balance.stacked_apart(part, whose), every)


def _scaled(name: str, expert: int, rows: torch.Tensor, adds: torch.Tensor) -> Iterator[_Moved]:
    """The variants of an expert that are multiples of what it adds [n, d] to rows [n]."""
    negated = causes.expert_negated(name)
    yield _Moved(f"the output of {name} is negated", negated, rows, -2 * adds)
    for factor in SCALES:
        is_out = factor == LEFT_OUT
        done = "left out" if is_out else f"multiplied by {factor:g}"
        harm = causes.of_tensor(name, causes.MTP_LAYER, causes.DOES_HARM)
        yield _Moved(
            f"the output of {name} is {done}",
            harm if is_out else causes.expert_scaled(name, 1 / factor),
            rows,
            (factor - 1) * adds,
            by_acceptance=not is_out,
            left_out=expert if is_out else None,
        )


def _of_tensors(
    moe: Moe, normed: torch.Tensor, weights: torch.Tensor, numbers: Sequence[int]
) -> Iterator[_Moved]:
    """The variants of single tensors of some experts."""
    for number, one in zip(numbers, moe.experts.each(numbers), strict=True):
        expert = SHARED if number >= moe.routed_experts else f"expert {number}"
        rows = weights[:, number].nonzero()[:, 0]
        x, share = normed[rows], weights[rows, number, None]
        adds = one(x)
        for place, change, other in tensor_variants(one, _places_of(one)):
            name = f"{place.name} of {expert}"
            yield _Moved(
                change.done.format(name),
                causes.of_tensor(name, causes.MTP_LAYER, change.wrong),
                rows,
                share * (other(x) - adds),
                by_acceptance=change.is_size,
            )


def _best_without(moe: Moe, without: Mapping[int, float], count: int) -> list[int]:
    """The routed experts that drafts do best without, by the gains of that."""
    routed = [expert for expert in without if expert < moe.routed_experts]
    return sorted(sorted(routed, key=lambda one: -without[one])[:count])


def _every_tensor(
    moe: Moe, normed: torch.Tensor, weights: torch.Tensor, without: Mapping[int, float]
) -> Iterator[_Moved]:
    """The variants of single tensors of the shared experts, and of routed ones that do harm."""
    shared = range(moe.routed_experts, len(moe.experts))
    routed = _best_without(moe, without, _LOOKED_INTO)
    yield from _of_tensors(moe, normed, weights, [*shared, *routed])


def _places_of(one: Mlp) -> list[Place]:
    return [replace(place, adds="") for place in mlp_places(one, SHARED)]


def _of_pairs(
    moe: Moe, normed: torch.Tensor, weights: torch.Tensor, without: Mapping[int, float]
) -> Iterator[_Moved]:
    """The exchanges of two experts, of those that drafts do best without by the gains."""
    tried = _best_without(moe, without, MOST_EXPERTS)
    rows = weights[:, tried].any(dim=1).nonzero()[:, 0]
    x = normed[rows]
    outputs = dict(zip(tried, (one(x) for one in moe.experts.each(tried)), strict=True))
    for a, b in combinations(tried, 2):
        share = (weights[rows, a] - weights[rows, b])[:, None]
        moved = share * (outputs[b] - outputs[a])
        where = share[:, 0].nonzero()[:, 0]
        change, cause = f"experts {a} and {b} are exchanged", causes.experts_swapped(a, b)
        yield _Moved(change, cause, rows[where], moved[where])
