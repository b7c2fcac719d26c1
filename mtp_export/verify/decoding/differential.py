"""Check 7: the export against its source on the same texts: the target's law, its best token, and
acceptance by position. This is the release gate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch

from mtp_export.verify.check import Item, Status
from mtp_export.verify.context import Context
from mtp_export.verify.evidence.corpus import Corpus
from mtp_export.verify.evidence.statistics import Estimate, ratio
from mtp_export.verify.gates import Gate, gate_of
from mtp_runtime.layers.rope import softmax_scale
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.models.model import Model
from mtp_runtime.teacher_forcing import (
    PagedTexts,
    Texts,
    logits_by_chunk,
    target_states,
    through_layer,
)

# Of the drafts that a module makes, those whose loss decides; more are reported by acceptance.
_DEPTHS = 2
# A layer whose error is so many times the layer before's broke something.
_JUMP = 4.0


@dataclass(frozen=True)
class Side:
    """A model on the shared texts: hidden states [T, d], its best token of every row [T]."""

    model: Model
    before: torch.Tensor
    after: torch.Tensor
    best: torch.Tensor

    @classmethod
    def of(cls, model: Model, texts: Texts) -> Side:
        before, after = target_states(model, texts)
        parts = [rows.argmax(dim=-1).cpu() for _, rows in logits_by_chunk(model.head, after)]
        return cls(model, before, after, torch.cat(parts))


def run(context: Context) -> Iterator[Item]:
    """Target, then module; a failure is followed to the part and the layer that it comes from."""
    if context.options.source is None:
        yield Item("all of it", Status.NOT_TESTED, cause="no --source was given")
        return
    corpus = context.corpus
    options = LoadOptions(context.options.device)
    source = load_model(context.options.source, options).model
    if source.config.vocab != corpus.model.config.vocab:
        cause = "the source has another vocabulary: it is another model"
        yield Item("one vocabulary", Status.FAIL, cause=cause)
        return
    recorded = context.manifest.get("options", {}) if context.manifest else {}
    yield from compared(corpus, source, *gate_of(recorded))


def compared(corpus: Corpus, source: Model, scheme: str, gate: Gate) -> Iterator[Item]:
    """The corpus's model against its source, by the gate of its scheme."""
    yield _configs(source, corpus.model)
    with torch.inference_mode():
        wanted, found = (Side.of(model, corpus.texts) for model in (source, corpus.model))
        yield from _target(corpus, wanted, found, scheme, gate)
        yield from _module(corpus, wanted, found, scheme, gate)


def _configs(source: Model, export: Model) -> Item:
    """Both configs ask for the same arithmetic."""
    name = "config asks for the same arithmetic"
    pairs = [
        (field.name, getattr(source.config, field.name), getattr(export.config, field.name))
        for field in fields(source.config)
    ]
    differing = [(name, a, b) for name, a, b in pairs if a != b]
    figure = f"{len(pairs) - len(differing)} of {len(pairs)} fields equal"
    if not differing:
        return Item(name, Status.PASS, figure, "all")
    causes = [f"{field} is {b!r}, the source's {a!r}" for field, a, b in differing]
    one, other = source.config.rope, export.config.rope
    if one and other and softmax_scale(one, 1) != softmax_scale(other, 1):
        causes.insert(0, "yarn's attention scale was dropped or changed")
    return Item(name, Status.FAIL, figure, "all", cause="; ".join(causes))


def _target(corpus: Corpus, wanted: Side, found: Side, scheme: str, gate: Gate) -> Iterator[Item]:
    divergence = _divergence(wanted, found)
    texts = corpus.texts
    sizes = [len(text.tokens) for text in texts.texts]
    rows = [slice(start, start + size) for start, size in zip(texts.starts, sizes, strict=True)]
    kl = ratio([float(divergence[own].sum()) for own in rows], sizes)
    same = (wanted.best == found.best).double()
    top1 = ratio([float(same[own].sum()) for own in rows], sizes)
    assert kl is not None and top1 is not None
    kl_fails, top1_fails = kl.value > gate.kl_nats, top1.value < gate.top1
    cause = ""
    if kl_fails or top1_fails:
        cause = where_it_starts(corpus.texts, wanted.model, found.model)
    for name, estimate, bound, fails in (
        ("KL of the target's law", kl, f"at most {gate.kl_nats:g} nats ({scheme})", kl_fails),
        ("top-1 agreement", top1, f"at least {gate.top1:g} ({scheme})", top1_fails),
    ):
        yield Item(
            name,
            Status.FAIL if fails else Status.PASS,
            f"{estimate.value:.2e}" if name.startswith("KL") else estimate.shown(),
            bound,
            cause=cause if fails else "",
            data=estimate.as_json() | {"gate": bound},
        )


def _divergence(wanted: Side, found: Side) -> torch.Tensor:
    """KL(source || export) of the next-token law [T], float64."""
    parts = []
    for rows, logits in logits_by_chunk(wanted.model.head, wanted.after):
        source = logits.double().log_softmax(dim=-1)
        export = found.model.head.logits(found.after[rows]).double().log_softmax(dim=-1)
        parts.append((source.exp() * (source - export)).sum(dim=-1).cpu())
    return torch.cat(parts)


def _module(corpus: Corpus, wanted: Side, found: Side, scheme: str, gate: Gate) -> Iterator[Item]:
    """Each module drafts for its own target; a draft stands when it is its target's best token."""
    ours, theirs = (_hits(corpus, side, side.model) for side in (found, wanted))
    for depth in range(1, _DEPTHS + 1):
        room = corpus.texts.room(corpus.anchors, depth)
        change = _change(corpus, ours[depth - 1] - theirs[depth - 1], room)
        if change is None:
            yield Item(
                f"acceptance change, draft {depth}",
                Status.NOT_TESTED,
                cause="the texts are too short for a draft here",
            )
            continue
        yield _acceptance_item(corpus, wanted, found, change, depth, scheme, gate)


def _hits(corpus: Corpus, side: Side, drafting: Model) -> list[torch.Tensor]:
    """Whether the draft of each depth is the side's own best token [A], as 0 or 1."""
    module = drafting.mtp
    assert module is not None, "both have an MTP module"
    drafts = corpus.drafts(_DEPTHS, module, drafting.mtp_input(side.before, side.after))
    last = len(side.best) - 1
    return [
        (best == side.best[(corpus.anchors.rows + depth).clamp(max=last)]).double()
        for depth, best in enumerate(drafts.best, start=1)
    ]


def _change(corpus: Corpus, change: torch.Tensor, room: torch.Tensor) -> Estimate | None:
    return ratio(corpus.by_text(change, room), corpus.by_text(torch.ones_like(change), room))


def _acceptance_item(
    corpus: Corpus,
    wanted: Side,
    found: Side,
    change: Estimate,
    depth: int,
    scheme: str,
    gate: Gate,
) -> Item:
    """Fails where the loss is beyond the gate by its interval; a loss that chance explains is no
    verdict either way."""
    points = 100 * change.value
    ends = (
        "" if change.low is None else f" [{100 * change.low:+.1f}, {100 * (change.high or 0):+.1f}]"
    )
    item_name, bound = (
        f"acceptance change, draft {depth}",
        (f"at least -{gate.acceptance_points:g} points ({scheme})"),
    )
    figure = f"{points:+.1f} points{ends}"
    data = {"depth": depth, "change": change.as_json(), "gate": bound}
    if points >= -gate.acceptance_points:
        return Item(item_name, Status.PASS, figure, bound, data=data)
    if change.high is None or 100 * change.high >= -gate.acceptance_points:
        reason = "too few drafts to tell: give more prompts or --max-new-tokens"
        return Item(item_name, Status.NOT_TESTED, figure, bound, cause=reason, data=data)
    # The export's target with the source's module: what remains lost is main's.
    crossed = _hits(corpus, found, wanted.model)[depth - 1]
    room = corpus.texts.room(corpus.anchors, depth)
    saved = float(crossed[room].mean()) - float(
        _hits(corpus, found, found.model)[depth - 1][room].mean()
    )
    if saved > -change.value / 2:
        cause = (
            f"the MTP part: with the source's module on this main acceptance is {100 * saved:.1f}"
            " points higher; check weights names the tensors"
        )
    else:
        cause = f"the main part: {where_it_starts(corpus.texts, wanted.model, found.model)}"
    return Item(item_name, Status.FAIL, figure, bound, cause=cause, data=data)


@torch.inference_mode()
def where_it_starts(texts: Texts, wanted: Model, found: Model) -> str:
    """The first layer whose result is off by much more than the layer's before it."""
    short = Texts(texts.texts[:2])
    tokens = short.tokens.to(found.device)
    xs = [torch.nn.functional.embedding(tokens, m.embedding) for m in (wanted, found)]
    error = _error(*xs)
    if error > 0.1:
        return "the embedding is of another checkpoint"
    if wanted.config != found.config:
        return "config.json asks for other arithmetic than the source's: see above"
    paged = PagedTexts.of(short)
    chunks = paged.chunks(found.device)
    pairs = zip(wanted.layers.each(), found.layers.each(), strict=False)
    for index, layers in enumerate(pairs):
        xs = [
            through_layer(layer, x, paged.pages, chunks)
            for layer, x in zip(layers, xs, strict=True)
        ]
        now = _error(*xs)
        if now > _JUMP * max(error, 0.01):
            return (
                f"layer {index} is the first to go wrong (error {error:.3f} before it, {now:.3f}"
                " after); check weights names its tensors"
            )
        error = max(error, now)
    return f"the error grows evenly over the layers to {error:.3f}: quantization noise"


def _error(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """Root mean square of the difference over that of what was wanted."""
    return float((wanted - found).norm() / wanted.norm())
