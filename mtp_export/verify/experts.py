"""Experts of an MTP module another way: two exchanged, or one's gate and up exchanged. All variants
share one attention, so that a few matrix products each tell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

import torch

from mtp_export.verify.corpus import Corpus, scores_of
from mtp_export.verify.variants import dense_linear, dtype_of
from mtp_runtime.layers.linear import Linear
from mtp_runtime.layers.moe import Moe
from mtp_runtime.teacher import draft_states

# More experts than this are too many to try one by one: 256 have 32640 pairs.
MOST_EXPERTS = 16


@dataclass(frozen=True)
class ExpertVariant:
    """A feed-forward another way, and how the text's tokens score with it [A]."""

    change: str
    cause: str
    scores: torch.Tensor


@dataclass(frozen=True)
class _Nothing:
    """A feed-forward that adds nothing, to see what goes into the real one."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)


@torch.inference_mode()
def expert_variants(corpus: Corpus) -> Iterator[ExpertVariant]:
    """Scores at depth 1 for every variant; nothing where there are too many experts, or none."""
    module = corpus.module
    moe = module.layer.feed_forward
    if not isinstance(moe, Moe) or moe.router.bias.shape[0] > MOST_EXPERTS:
        return
    bare = replace(module.layer, feed_forward=_Nothing())  # type: ignore[arg-type]
    stream = draft_states(
        corpus.model,
        replace(module, layer=bare),
        corpus.texts,
        corpus.hidden,
        corpus.anchors,
        1,
    )[0]
    normed = module.layer.post_norm(stream)
    wanted = corpus.texts.tokens[corpus.anchors.rows + 2]
    for change, cause, other in _changed(moe):
        x = stream + other(normed)
        yield ExpertVariant(change, cause, scores_of(module, module.head.normed(x), wanted))


def _changed(moe: Moe) -> Iterator[tuple[str, str, Moe]]:
    routed = moe.router.bias.shape[0]
    for expert in range(len(moe.gate_up)):
        name = f"expert {expert}" if expert < routed else "the shared expert"
        gate_up = list(moe.gate_up)
        gate_up[expert] = _output_halves_exchanged(gate_up[expert])
        yield (
            f"gate and up of {name} are exchanged",
            f"gate_proj and up_proj of {name} are swapped",
            replace(moe, gate_up=tuple(gate_up)),
        )
    for a, b in combinations(range(routed), 2):
        gate_up, down = list(moe.gate_up), list(moe.down)
        gate_up[a], gate_up[b] = gate_up[b], gate_up[a]
        down[a], down[b] = down[b], down[a]
        yield (
            f"experts {a} and {b} are exchanged",
            f"experts {a} and {b} are swapped",
            replace(moe, gate_up=tuple(gate_up), down=tuple(down)),
        )


def _output_halves_exchanged(linear: Linear) -> Linear:
    matrix = linear.matrix(dtype_of(linear))  # [in, out]
    half = matrix.shape[1] // 2
    return dense_linear(torch.cat([matrix[:, half:], matrix[:, :half]], dim=1))
