"""Variants of an MTP module's mixture of experts: its router's bias and rows in another order or of
the other sign; two experts exchanged, gate and up of one or of all, one negated. Each expert runs
once on all rows, and a variant only mixes the results anew, so that many cost little."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, combinations
from math import comb

import torch

from mtp_export.verify.diagnosis.causes import decoding as causes
from mtp_export.verify.diagnosis.variants import reordered
from mtp_export.verify.evidence.corpus import Corpus
from mtp_runtime.drafters.base import ScoredVariant
from mtp_runtime.layers.linear import Linear
from mtp_runtime.layers.moe import Moe, Router, SigmoidRouter, SoftmaxRouter
from mtp_runtime.models.model import MtpModule
from mtp_runtime.teacher_forcing import WORST_SCORE, DraftInputs, best_and_score, draft_states

# More experts than this are too many to try one by one: 256 have 32640 pairs.
MOST_EXPERTS = 16


# Factors by which what an expert adds is tried.
SCALES = (0.5, 2.0)


@dataclass(frozen=True)
class _Moved:
    """A variant: its change and cause in words, and the difference of the feed-forward's output
    [A, d]. by_acceptance is that of a ScoredVariant."""

    change: str
    cause: str
    difference: torch.Tensor
    by_acceptance: bool = False


@dataclass(frozen=True)
class _AddsNothing:
    """A feed-forward that adds nothing, so that the input of the real one shows."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)


def expert_variant_count(module: MtpModule) -> int:
    """Return the number of variants that there are of a module's mixture of experts."""
    moe = _small_moe(module)
    if moe is None:
        return 0
    routers = sum(1 for _ in _routers(moe.router))
    of_one = 2 + len(SCALES)
    return routers + of_one * len(moe.experts) + 1 + comb(moe.routed_experts, 2)


def _small_moe(module: MtpModule) -> Moe | None:
    """Return the experts of a module; None for a dense one, or one of more than MOST_EXPERTS."""
    moe = module.layer.feed_forward
    return moe if isinstance(moe, Moe) and moe.routed_experts <= MOST_EXPERTS else None


@torch.inference_mode()
def expert_variants(
    corpus: Corpus, own: torch.Tensor, own_hit: torch.Tensor
) -> Iterator[ScoredVariant]:
    """Every variant, scored at depth 1 in all rows; own, own_hit [A]: scores of the module as it
    is, and where it drafts the target's best token. Yields nothing for a dense module, or one of
    more than MOST_EXPERTS."""
    module, anchors = corpus.module, corpus.everywhere
    moe = _small_moe(module)
    if moe is None:
        return
    bare = replace(module, layer=replace(module.layer, feed_forward=_AddsNothing()))
    stream = draft_states([bare], DraftInputs(corpus.texts, corpus.hidden, anchors), 1)[0]
    normed = module.layer.post_norm(stream)
    added = moe(normed)
    whole = stream + added
    wanted = corpus.choices[anchors.rows + 1]
    moves = chain(_of_router(moe, normed, added), _of_experts(moe, normed))
    for move in moves:
        moved = move.difference
        rows = moved.any(dim=1).nonzero()[:, 0]
        scores, hit = own.clone(), own_hit.clone()
        x, places = module.head.normed(whole[rows] + moved[rows]), rows.cpu()
        best, score = best_and_score(module.head, x, wanted[places])
        scores[places], hit[places] = score.clamp(min=WORST_SCORE), best == wanted[places]
        yield ScoredVariant(
            name="experts",
            change=move.change,
            cause=move.cause,
            scores=scores,
            before=own,
            hit=hit,
            hit_before=own_hit,
            by_acceptance=move.by_acceptance,
        )


def _routers(router: Router) -> Iterator[tuple[str, str, Router]]:
    """Change, cause and router, per variant of a router."""
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
    yield (
        "the router's rows, or the experts, are in reverse order",
        causes.ROUTER_ROWS_REVERSED,
        replace(router, weight=weight.flip(1)),
    )
    for places, back in ((1, "back"), (-1, "on")):
        yield (
            f"the router's rows are moved {back} by one",
            causes.router_rolled("on" if back == "back" else "back"),
            replace(router, weight=weight.roll(-places, dims=1)),
        )


def _of_router(moe: Moe, normed: torch.Tensor, added: torch.Tensor) -> Iterator[_Moved]:
    """The variants of the router; added [A, d]: the feed-forward's output as it is."""
    for change, cause, router in _routers(moe.router):
        yield _Moved(change, cause, replace(moe, router=router)(normed) - added)


def _of_experts(moe: Moe, normed: torch.Tensor) -> Iterator[_Moved]:
    """The variants of single experts, of all of them, and of pairs."""
    routed = moe.routed_experts
    picked, chosen = moe.router(normed)
    weights = torch.zeros_like(normed[:, :1]).repeat(1, len(moe.experts))  # [A, e]
    weights[:, :routed].scatter_(1, picked, chosen.to(weights.dtype))
    weights[:, routed:] = 1.0
    outputs = [one(normed) for one in moe.experts.every()]
    every = torch.zeros_like(outputs[0])
    for expert, one in enumerate(moe.experts.every()):
        name = f"expert {expert}" if expert < routed else "the shared expert"
        other = replace(one, gate_up=_output_halves_exchanged(one.gate_up))(normed)
        moved = weights[:, expert, None] * (other - outputs[expert])
        every += moved
        cause = causes.gate_and_up_swapped(name)
        yield _Moved(f"gate and up of {name} are exchanged", cause, moved)
        yield from _scaled(name, weights[:, expert, None] * outputs[expert])
    cause = causes.gate_and_up_swapped("every expert")
    yield _Moved("gate and up of every expert are exchanged", cause, every)
    for a, b in combinations(range(routed), 2):
        moved = (weights[:, a] - weights[:, b])[:, None] * (outputs[b] - outputs[a])
        yield _Moved(f"experts {a} and {b} are exchanged", causes.experts_swapped(a, b), moved)


def _scaled(name: str, adds: torch.Tensor) -> Iterator[_Moved]:
    """The variants of an expert that are multiples of what it adds [A, d]."""
    yield _Moved(f"the output of {name} is negated", causes.expert_negated(name), -2 * adds)
    for factor in SCALES:
        change = f"the output of {name} is multiplied by {factor:g}"
        cause = causes.expert_scaled(name, 1 / factor)
        yield _Moved(change, cause, (factor - 1) * adds, by_acceptance=True)


def _output_halves_exchanged(linear: Linear) -> Linear:
    rows = linear.weight.shape[0]
    return reordered(linear, torch.arange(rows).roll(rows // 2))
