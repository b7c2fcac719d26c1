"""Experts of an MTP module another way: two exchanged, or one's gate and up exchanged. Each expert
is run once on all rows, and a variant only mixes them anew, so that many variants cost little."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

import torch

from mtp_export.verify.diagnosis.variants import dense_linear, dtype_of
from mtp_export.verify.evidence.corpus import Corpus, best_and_score
from mtp_runtime.layers.linear import Linear
from mtp_runtime.layers.moe import Moe, gated
from mtp_runtime.teacher_forcing import DraftInputs, draft_states

# More experts than this are too many to try one by one: 256 have 32640 pairs.
MOST_EXPERTS = 16


@dataclass(frozen=True)
class ExpertVariant:
    """A feed-forward another way, and how the target's choices score with it [A]."""

    change: str
    cause: str
    scores: torch.Tensor


@dataclass(frozen=True)
class _Nothing:
    """A feed-forward that adds nothing, to see what goes into the real one."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)


@torch.inference_mode()
def expert_variants(corpus: Corpus, own: torch.Tensor) -> Iterator[ExpertVariant]:
    """Scores at depth 1, everywhere, for every variant; own [A] are the module's as it is. Nothing
    where there are too many experts, or none."""
    module, anchors = corpus.module, corpus.everywhere
    moe = module.layer.feed_forward
    if not isinstance(moe, Moe) or moe.routed_experts > MOST_EXPERTS:
        return
    bare = replace(module, layer=replace(module.layer, feed_forward=_Nothing()))
    stream = draft_states([bare], DraftInputs(corpus.texts, corpus.hidden, anchors), 1)[0]
    normed = module.layer.post_norm(stream)
    whole = stream + moe(normed)
    wanted = corpus.choices[anchors.rows + 1]
    for change, cause, moved in _changed(moe, normed):
        rows = moved.any(dim=1).nonzero()[:, 0]
        scores = own.clone()
        x = module.head.normed(whole[rows] + moved[rows])
        scores[rows.cpu()] = best_and_score(module, x, wanted[rows.cpu()])[1]
        yield ExpertVariant(change, cause, scores)


def _changed(moe: Moe, normed: torch.Tensor) -> Iterator[tuple[str, str, torch.Tensor]]:
    """What each variant adds to the feed-forward's output [A, d]."""
    routed = moe.routed_experts
    picked, chosen = moe.router(normed)
    weights = torch.zeros_like(normed[:, :1]).repeat(1, len(moe.gate_up))  # [A, e]
    weights[:, :routed].scatter_(1, picked, chosen.to(weights.dtype))
    weights[:, routed:] = 1.0
    outputs = [
        down(gated(gate_up(normed))) for gate_up, down in zip(moe.gate_up, moe.down, strict=True)
    ]
    for expert, (gate_up, down) in enumerate(zip(moe.gate_up, moe.down, strict=True)):
        name = f"expert {expert}" if expert < routed else "the shared expert"
        other = down(gated(_output_halves_exchanged(gate_up)(normed)))
        yield (
            f"gate and up of {name} are exchanged",
            f"gate_proj and up_proj of {name} are swapped",
            weights[:, expert, None] * (other - outputs[expert]),
        )
    for a, b in combinations(range(routed), 2):
        yield (
            f"experts {a} and {b} are exchanged",
            f"experts {a} and {b} are swapped",
            (weights[:, a] - weights[:, b])[:, None] * (outputs[b] - outputs[a]),
        )


def _output_halves_exchanged(linear: Linear) -> Linear:
    matrix = linear.matrix(dtype_of(linear))  # [in, out]
    half = matrix.shape[1] // 2
    return dense_linear(torch.cat([matrix[:, half:], matrix[:, :half]], dim=1))
