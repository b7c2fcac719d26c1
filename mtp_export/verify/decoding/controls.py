"""Check `controls`: negative controls. A module fed spoilt input must lose acceptance, and a later
token must not change earlier logits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mtp_export.progress import CountCallback
from mtp_export.verify.check import Item, Shown, Status, failed, judged, not_tested, passed
from mtp_export.verify.context import Context
from mtp_export.verify.decoding.acceptance import first_draft, is_in_band, loaded_wrongly
from mtp_export.verify.diagnosis.causes import decoding as causes
from mtp_export.verify.diagnosis.variant_drafts import acceptance, drafts_of
from mtp_export.verify.diagnosis.variants import contract_variants, layout_variants
from mtp_export.verify.evidence.corpus import Corpus, Drafts
from mtp_export.verify.evidence.statistics import Estimate, ratio
from mtp_export.verify.gates import LEAST_LOSS
from mtp_runtime.layers.norm import RmsNorm
from mtp_runtime.models.model import MtpModule
from mtp_runtime.teacher_forcing import DraftInputs, Text, Texts, draft_states, target_states

# After a norm whose weights differ by less than this, the module's own norm cannot tell the two
# sides of it apart.
UNIFORM_SPREAD = 0.15
# The module as it is, and under each control.
_DRAFTINGS = 6
# Of drafts none of which differed, the share that may differ nevertheless, times their number: with
# a probability of 5 %, the rule of three.
_UNSEEN = 3.0


@dataclass(frozen=True)
class Control:
    """Drafts of a spoilt module or input, and the draft position that must lose acceptance.

    cause: what is wrong if it does not. norm: the norm of which the other side is taken.
    """

    name: str
    drafts: Drafts
    depth: int
    cause: str
    norm: RmsNorm | None = None


def run(context: Context) -> Iterator[Item]:
    """Each control compared with the module as it is, then causality of target and module."""
    if context.why_no_module:
        yield not_tested("spoilt input", context.why_no_module)
    else:
        yield from items_of(context.corpus, loaded_wrongly(context.failures.get("acceptance", ())))
    yield from _causality(context.corpus)


def items_of(corpus: Corpus, found_by: str = "") -> Iterator[Item]:
    """The loss of acceptance under each control. found_by: the item of check `acceptance` that
    found the module to be loaded wrongly, for which the other side of a norm may be better."""
    with corpus.show_count("controls, with spoilt input", _DRAFTINGS, "draftings") as advance:
        own, first = corpus.drafts(2), first_draft(corpus)
        advance(1)
        controls = []
        for control in _controls(corpus):
            controls.append(control)
            advance(1)
    too_low = ""
    if first is not None and not is_in_band(first):
        share = f"{first.value:.2f}"
        too_low = f"only {share} of the drafts are accepted as it is: check acceptance says why"
    for control in controls:
        item = _lowers(corpus, own, control, too_low)
        if found_by and control.norm is not None and item.status is Status.FAIL:
            why = causes.loaded_wrongly(found_by)
            item = not_tested(item.name, why, figure=item.figure, bound=item.bound)
        yield item


def _controls(corpus: Corpus) -> Iterator[Control]:
    module, hidden = corpus.module, corpus.hidden
    yield Control(
        name="hidden state of the token before",
        drafts=corpus.drafts(1, hidden=hidden.roll(1, dims=0)),
        depth=1,
        cause=causes.HIDDEN_STATE_UNUSED_OR_SHIFTED,
    )
    yield Control(
        name="hidden state zeroed",
        drafts=corpus.drafts(1, hidden=torch.zeros_like(hidden)),
        depth=1,
        cause=causes.HIDDEN_STATE_UNUSED,
    )
    swapped = next(v for v in layout_variants(corpus.model, module) if v.name == "concatenation")
    yield Control(
        name="halves of eh_proj exchanged",
        drafts=drafts_of(corpus, swapped, 1),
        depth=1,
        cause=causes.EH_PROJ_REVERSED_OR_UNTRAINED,
    )
    norms = {"target_hidden": corpus.model.head.norm, "recycled_hidden": module.head.norm}
    for variant in contract_variants(module):
        if variant.name in norms:
            yield Control(
                name=variant.change,
                drafts=drafts_of(corpus, variant, variant.depth),
                depth=variant.depth,
                cause=causes.contract_wrong(variant.cause),
                norm=norms[variant.name],
            )


def _lowers(corpus: Corpus, own: Drafts, control: Control, too_low: str) -> Item:
    """Loss of acceptance, paired over the same places; both modules are judged by the texts.
    too_low: why there is too little acceptance to be lost, "" where there is enough."""
    depth = control.depth
    before, after = acceptance(own, depth), acceptance(control.drafts, depth)
    loss = _loss(corpus, own=own, other=control.drafts, depth=depth)
    shown = Shown(figure=f"{before:.3f} to {after:.3f}", bound="lower, by its 95 % interval")
    if loss is None or loss.low is None or loss.high is None:
        return not_tested(control.name, "it takes two prompts with drafts", **shown)
    shown["data"] = {"own": before, "spoilt": after, "loss": loss.as_json()}
    if loss.low > 0:
        return passed(control.name, **shown)
    if control.norm is not None and loss.high >= 0:
        spread = norm_spread(control.norm)
        if spread < UNIFORM_SPREAD:
            reason = (
                f"the norm's weights are nearly uniform (spread {spread:.0%} of their mean), so"
                " that the module's own norm makes both sides the same"
            )
            return not_tested(control.name, reason, **shown)
    if too_low:
        return not_tested(control.name, too_low, **shown)
    highest = max(loss.high, loss.value + _UNSEEN / loss.count)
    if highest > (0 if before > 0.5 else LEAST_LOSS):
        return not_tested(control.name, too_few(loss), **shown)
    return failed(control.name, causes.acceptance_not_lower(control.cause), **shown)


def too_few(loss: Estimate) -> str:
    """Return the sentence on a loss whose interval holds both none and that of a working module:
    with the number of drafts at which it would hold only one of them, if the loss stays."""
    assert loss.low is not None and loss.high is not None
    wanted = max(loss.value, LEAST_LOSS - loss.value)
    by_spread = loss.count * ((loss.high - loss.low) / 2 / wanted) ** 2
    needed = math.ceil(max(by_spread, _UNSEEN / wanted))
    found = f"loss {loss.shown()} by {loss.count:,} drafts"
    if needed <= loss.count:
        return f"the loss is too small to tell: {found}"
    return (
        f"too few drafts to tell: {found}, and it takes about {needed:,}; give more prompts"
        " (--prompts), or longer outputs (--max-new-tokens)"
    )


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
    """Logits before the last token of some texts do not change with it, but for rounding."""
    vocab = corpus.model.config.vocab
    originals = [text for text in corpus.texts.texts if len(text.tokens) > 3][:4]
    if not originals:
        yield not_tested("no row sees a later token", "texts are too short")
        return
    changed = [
        Text((*text.tokens[:-1], (text.tokens[-1] + 1) % vocab), text.prompt_size)
        for text in originals
    ]
    one, other = Texts(tuple(originals)), Texts(tuple(changed))
    limit = corpus.noise * 4
    with corpus.show_count("controls, with a later token changed", 4, "passes") as advance:
        first, second, *drafted = _changed(corpus, one, other, advance)
    yield _unmoved(
        "target: no row sees a later token",
        [
            (corpus.model.head.logits(a), corpus.model.head.logits(b))
            for a, b in _earlier(one, first=first, second=second, cut=1)
        ],
        limit,
    )
    if not drafted:
        return
    module = corpus.module
    yield _unmoved(
        "MTP module: no row sees a later token",
        [
            (module.head.logits(module.head.normed(a)), module.head.logits(module.head.normed(b)))
            for a, b in _earlier(one, first=drafted[0], second=drafted[1], cut=2)
        ],
        limit,
    )


def _changed(
    corpus: Corpus, one: Texts, other: Texts, advance: CountCallback
) -> Iterator[torch.Tensor]:
    """Hidden states [T, d] of both texts, then the MTP module's outputs [T, d] on them, if there is
    one."""
    first = target_states(corpus.model, one)[1]
    advance(1)
    yield first
    yield target_states(corpus.model, other)[1]
    advance(1)
    for texts in (one, other) if corpus.draft is None else ():
        yield _module_rows(corpus, module=corpus.module, texts=texts, after=first)
        advance(1)


def _module_rows(
    corpus: Corpus, module: MtpModule, texts: Texts, after: torch.Tensor
) -> torch.Tensor:
    """MTP outputs [T, d] of the rows that drafts can start from, zero elsewhere. Both texts are fed
    the same hidden states `after` [T, d], so that the token alone differs."""
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
    return judged(name, moved <= limit, causes.MASK_LEAKS, figure=figure, bound=bound)
