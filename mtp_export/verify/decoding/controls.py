"""Check 8: negative controls. What must matter to the module, taken away, must lower acceptance;
and a token that comes later must not move anything before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from mtp_export.verify.check import Item, Status
from mtp_export.verify.context import Context
from mtp_export.verify.diagnosis.draft_causes import acceptance, drafts_of
from mtp_export.verify.diagnosis.variants import contract_variants, layout_variants
from mtp_export.verify.evidence.corpus import Corpus, Drafts
from mtp_export.verify.evidence.noise import measured_noise
from mtp_export.verify.evidence.statistics import Estimate, ratio
from mtp_runtime.layers.norm import RmsNorm
from mtp_runtime.models.model import MtpModule
from mtp_runtime.teacher_forcing import DraftInputs, Text, Texts, draft_states, target_states

# Norms whose weights are this much alike make both sides of them the same to the module's own norm.
UNIFORM_SPREAD = 0.15


@dataclass(frozen=True)
class Control:
    """A module or its input spoilt, and the draft position that must suffer."""

    name: str
    drafts: Drafts
    depth: int
    if_not: str
    norm: RmsNorm | None = None


def run(context: Context) -> Iterator[Item]:
    """Each control against the module as it is, then causality of target and module."""
    yield from items_of(context.corpus)
    yield from _causality(context.corpus)


def items_of(corpus: Corpus) -> Iterator[Item]:
    """What each control does to acceptance."""
    own = corpus.drafts(2)
    for control in _controls(corpus):
        yield _lowers(corpus, own, control)


def _controls(corpus: Corpus) -> Iterator[Control]:
    module = corpus.module
    hidden = corpus.hidden
    yield Control(
        "hidden state of the token before",
        corpus.drafts(1, hidden=hidden.roll(1, dims=0)),
        1,
        "the module does not use the target's hidden state, or is fed a shifted one as it is",
    )
    yield Control(
        "hidden state zeroed",
        corpus.drafts(1, hidden=torch.zeros_like(hidden)),
        1,
        "the module does not use the target's hidden state",
    )
    swapped = next(layout_variants(corpus.model, module))
    yield Control(
        "halves of eh_proj exchanged",
        drafts_of(corpus, swapped, 1),
        1,
        "the concatenation is reversed in the bundle, or eh_proj was never trained",
    )
    for variant in contract_variants(module):
        norms = {
            "target_hidden": corpus.model.head.norm,
            "recycled_hidden": module.head.norm,
        }
        if variant.name in norms:
            yield Control(
                variant.change,
                drafts_of(corpus, variant, 2),
                variant.depth,
                f"the contract is wrong: {variant.cause}",
                norms[variant.name],
            )


def _lowers(corpus: Corpus, own: Drafts, control: Control) -> Item:
    """Paired over the same places: both modules' first tokens against the text's."""
    depth = control.depth
    before = acceptance(own, depth)
    after = acceptance(control.drafts, depth)
    loss = _loss(corpus, own, control.drafts, depth)
    figure, bound = f"{before:.3f} to {after:.3f}", "lower, by its 95 % interval"
    item = Item(control.name, Status.PASS, figure, bound)
    if loss is None or loss.low is None or loss.high is None:
        return replace(item, status=Status.NOT_TESTED, cause="it takes two prompts with drafts")
    item = replace(item, data={"own": before, "spoilt": after, "loss": loss.as_json()})
    if loss.low > 0:
        return item
    if control.norm is not None and loss.high >= 0:
        spread = norm_spread(control.norm)
        if spread < UNIFORM_SPREAD:
            reason = (
                f"the norm's weights are nearly uniform (spread {spread:.0%} of their mean), so"
                " that the module's own norm makes both sides the same"
            )
            return replace(item, status=Status.NOT_TESTED, cause=reason)
    if loss.high > 0 and before > 0.5:
        reason = f"too few drafts to tell: loss {loss.shown()}"
        return replace(item, status=Status.NOT_TESTED, cause=reason)
    return replace(item, status=Status.FAIL, cause=f"acceptance is no lower: {control.if_not}")


def _loss(corpus: Corpus, own: Drafts, other: Drafts, depth: int) -> Estimate | None:
    room = own.room[depth - 1]
    lost = own.hit[depth - 1].double() - other.hit[depth - 1].double()
    return ratio(corpus.by_text(lost, room), corpus.by_text(torch.ones_like(lost), room))


def norm_spread(norm: RmsNorm) -> float:
    """Standard deviation of a norm's weights over their mean."""
    weights = norm.weight.abs()
    return float(weights.std() / weights.mean())


@torch.inference_mode()
def _causality(corpus: Corpus) -> Iterator[Item]:
    """The last token of some texts changed: no row before it may move by more than rounding."""
    vocab = corpus.model.config.vocab
    originals = [text for text in corpus.texts.texts if len(text.tokens) > 3][:4]
    if not originals:
        yield Item("no row sees a later token", Status.NOT_TESTED, cause="texts are too short")
        return
    changed = [
        Text((*text.tokens[:-1], (text.tokens[-1] + 1) % vocab), text.prompt_size)
        for text in originals
    ]
    one, other = Texts(tuple(originals)), Texts(tuple(changed))
    limit = measured_noise(corpus.model, corpus.plain) * 4
    first, second = (target_states(corpus.model, texts)[1] for texts in (one, other))
    yield _unmoved(
        "target: no row sees a later token",
        [
            (corpus.model.head.logits(a), corpus.model.head.logits(b))
            for a, b in _earlier(one, first, second, 1)
        ],
        limit,
    )
    module = corpus.module
    drafted = [_module_rows(corpus, module, texts, first) for texts in (one, other)]
    yield _unmoved(
        "MTP module: no row sees a later token",
        [
            (module.head.logits(module.head.normed(a)), module.head.logits(module.head.normed(b)))
            for a, b in _earlier(one, drafted[0], drafted[1], 2)
        ],
        limit,
    )


def _module_rows(
    corpus: Corpus, module: MtpModule, texts: Texts, after: torch.Tensor
) -> torch.Tensor:
    """MTP output of every row that drafts can start from, zero elsewhere; fed with one hidden
    state for both texts, so that the token alone differs."""
    anchors = texts.anchors(0)
    out = torch.zeros_like(after)
    out[anchors.rows] = draft_states([module], DraftInputs(texts, after, anchors), 1)[0]
    return out


def _earlier(
    texts: Texts, first: torch.Tensor, second: torch.Tensor, cut: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for start, text in zip(texts.starts, texts.texts, strict=True):
        rows = slice(start, start + len(text.tokens) - cut)
        yield first[rows], second[rows]


def _unmoved(name: str, pairs: list[tuple[torch.Tensor, torch.Tensor]], limit: float) -> Item:
    moved = max(float((a - b).abs().max()) for a, b in pairs)
    figure, bound = f"moved by {moved:.1e}", f"at most {limit:.1e}, 4 x the noise"
    if moved <= limit:
        return Item(name, Status.PASS, figure, bound)
    cause = "a later token changes earlier logits: the mask lets rows see what comes after them"
    return Item(name, Status.FAIL, figure, bound, cause=cause)
