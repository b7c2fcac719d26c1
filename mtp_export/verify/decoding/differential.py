"""Check `differential`, the release gate: the export compared with its source on the same texts, by
the target's distribution, its best tokens, and acceptance per position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch

from mtp_checkpoints.formats.verification import RunGate
from mtp_checkpoints.quantization.stored import StoredModel, stored_model
from mtp_checkpoints.tensors.bundle_folder import MAIN, MTP
from mtp_export.progress import CountCallback
from mtp_export.verify.check import (
    WHOLE_CHECK,
    Item,
    Shown,
    failed,
    judged,
    not_tested,
    passed,
)
from mtp_export.verify.context import Context
from mtp_export.verify.diagnosis.causes import decoding as causes
from mtp_export.verify.diagnosis.causes.weights import YARN_SCALE_CHANGED
from mtp_export.verify.evidence.corpus import Corpus
from mtp_export.verify.evidence.statistics import Estimate, ratio
from mtp_export.verify.gates import gate_of, gate_of_storages
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

# Drafts whose loss decides; check `acceptance` reports those after them.
_DEPTHS = 2
# Over all texts: both models, their distributions compared, and both modules.
_PASSES = 5
# A layer is broken if its error is at least this multiple of that of the layer before it.
_JUMP = 4.0


@dataclass(frozen=True)
class Side:
    """A model on the shared texts: hidden states [T, d] before and after the last norm, and the
    best token [T] after every row."""

    model: Model
    before: torch.Tensor
    after: torch.Tensor
    best: torch.Tensor

    @classmethod
    def of(cls, model: Model, texts: Texts) -> Side:
        """Run a model over texts."""
        before, after = target_states(model, texts)
        parts = [rows.argmax(dim=-1).cpu() for _, rows in logits_by_chunk(model.head, after)]
        return cls(model=model, before=before, after=after, best=torch.cat(parts))


def run(context: Context) -> Iterator[Item]:
    """Target, then module; a failure is traced to its part and layer."""
    if context.options.source is None:
        yield not_tested(WHOLE_CHECK, "no --source was given")
        return
    if context.memory.why_one_model is not None:
        yield not_tested(WHOLE_CHECK, context.memory.why_one_model)
        return
    corpus = context.corpus
    options = LoadOptions(context.options.device)
    source = load_model(context.options.source, options).model
    if source.config.vocab != corpus.model.config.vocab:
        yield failed("one vocabulary", causes.ANOTHER_VOCABULARY)
        return
    yield from compared(corpus, source, *_gate(context))


def _gate(context: Context) -> tuple[str, RunGate]:
    """The gate of a bundle's schemes, or of the forms that others chose for a checkpoint."""
    if context.is_bundle:
        return gate_of(context.recorded_options)
    assert context.source is not None, "a source was loaded"
    parts = {layout.name: _storages(layout.stored) for layout in context.layouts}
    source = _storages(stored_model(context.source.config, context.source.tensors))
    return gate_of_storages(parts.get(MAIN, set()), parts.get(MTP, set()), source)


def _storages(stored: StoredModel) -> set[str]:
    return {kind.format.storage for kind in stored.kinds}


@dataclass(frozen=True)
class Pair:
    """Both models on the texts of the export, and the gate of its schemes."""

    corpus: Corpus
    source: Side
    export: Side
    scheme: str
    gate: RunGate

    def where_it_starts(self) -> str:
        """The cause of a difference, by the first layer that shows it."""
        return where_it_starts(self.corpus.texts, self.source.model, self.export.model)


def compared(corpus: Corpus, source: Model, scheme: str, gate: RunGate) -> Iterator[Item]:
    """The corpus's model compared with its source, by the gate of its schemes."""
    yield _configs(source, corpus.model)
    title = "differential, on the same texts"
    with torch.inference_mode(), corpus.show_count(title, _PASSES, "passes") as advance:
        sides = []
        for model in (source, corpus.model):
            sides.append(Side.of(model, corpus.texts))
            advance(1)
        pair = Pair(corpus, sides[0], export=sides[1], scheme=scheme, gate=gate)
        yield from _target(pair)
        advance(1)
        yield from _module(pair, advance)


def _configs(source: Model, export: Model) -> Item:
    """Both configs request the same arithmetic."""
    name = "config asks for the same arithmetic"
    wanted, found = _facts(source), _facts(export)
    pairs = [(field, wanted.get(field), found.get(field)) for field in {**wanted, **found}]
    differing = [(name, a, b) for name, a, b in pairs if a != b]
    figure = f"{len(pairs) - len(differing)} of {len(pairs)} fields equal"
    words = [causes.field_differs(field, found=b, wanted=a) for field, a, b in differing]
    one, other = source.config.rope, export.config.rope
    if one and other and softmax_scale(one, 1) != softmax_scale(other, 1):
        words.insert(0, YARN_SCALE_CHANGED)
    return judged(name, not differing, "; ".join(words), figure=figure, bound="all")


def _facts(model: Model) -> dict[str, object]:
    """Return what a model's config says of its arithmetic, by the names of fields."""
    config = model.config
    facts = {field.name: getattr(config, field.name) for field in fields(config)}
    for part in facts.pop("parts"):
        kind = type(part).__name__
        facts |= {f"{kind} {field.name}": getattr(part, field.name) for field in fields(part)}
    return facts


def _target(pair: Pair) -> Iterator[Item]:
    gate, texts = pair.gate, pair.corpus.texts
    divergence = _divergence(pair.source, pair.export)
    same = (pair.source.best == pair.export.best).double()
    sizes = [len(text.tokens) for text in texts.texts]
    rows = [slice(start, start + size) for start, size in zip(texts.starts, sizes, strict=True)]
    kl = ratio([float(divergence[own].sum()) for own in rows], sizes)
    top1 = ratio([float(same[own].sum()) for own in rows], sizes)
    assert kl is not None and top1 is not None, "a corpus has tokens"
    kl_holds, top1_holds = kl.value <= gate.kl_nats, top1.value >= gate.top1
    cause = "" if kl_holds and top1_holds else pair.where_it_starts()
    bound = f"at most {gate.kl_nats:g} nats ({pair.scheme})"
    yield judged(
        "KL of the target's distribution",
        kl_holds,
        cause,
        figure=f"{kl.value:.2e}",
        bound=bound,
        data=kl.as_json() | {"gate": bound},
    )
    bound = f"at least {gate.top1:g} ({pair.scheme})"
    yield judged(
        "top-1 agreement",
        top1_holds,
        cause,
        figure=top1.shown(),
        bound=bound,
        data=top1.as_json() | {"gate": bound},
    )


def _divergence(source: Side, export: Side) -> torch.Tensor:
    """KL(source || export) of the next-token distributions [T], float64, in nats."""
    parts = []
    for rows, logits in logits_by_chunk(source.model.head, source.after):
        ours = logits.double().log_softmax(dim=-1)
        theirs = export.model.head.logits(export.after[rows]).double().log_softmax(dim=-1)
        parts.append((ours.exp() * (ours - theirs)).sum(dim=-1).cpu())
    return torch.cat(parts)


def _module(pair: Pair, advance: CountCallback) -> Iterator[Item]:
    """Acceptance change per draft position; each module drafts for its own target. advance takes
    the passes over the texts."""
    corpus, hits = pair.corpus, []
    if corpus.draft is not None:
        yield not_tested("acceptance change", "of drafts by an MTP module alone")
        return
    for side in (pair.export, pair.source):
        hits.append(_hits(corpus, side, side.model))
        advance(1)
    export, source = hits
    for depth in range(1, _DEPTHS + 1):
        room = corpus.texts.room(corpus.anchors, depth)
        lost = export[depth - 1] - source[depth - 1]
        change = ratio(corpus.by_text(lost, room), corpus.by_text(torch.ones_like(lost), room))
        if change is None:
            name, reason = _change_name(depth), "the texts are too short for a draft here"
            yield not_tested(name, reason)
        else:
            yield _acceptance_change(pair, change, depth)


def _hits(corpus: Corpus, side: Side, drafting: Model) -> list[torch.Tensor]:
    """1 where a model's draft is the side's own best token, else 0: [A] per depth."""
    module = drafting.mtp
    assert module is not None, "both have an MTP module"
    drafts = corpus.drafts(_DEPTHS, module, drafting.mtp_input(side.before, side.after))
    last = len(side.best) - 1
    return [
        (best == side.best[(corpus.anchors.rows + depth).clamp(max=last)]).double()
        for depth, best in enumerate(drafts.best, start=1)
    ]


def _change_name(depth: int) -> str:
    return f"acceptance change, draft {depth}"


def _acceptance_change(pair: Pair, change: Estimate, depth: int) -> Item:
    """Fails if the whole interval lies beyond the gate; a loss that chance may explain is not
    tested."""
    name, least = _change_name(depth), -pair.gate.acceptance_points
    points = 100 * change.value
    bound = f"at least {least:g} points ({pair.scheme})"
    figure = f"{points:+.1f} points"
    if change.low is not None:
        figure += f" [{100 * change.low:+.1f}, {100 * (change.high or 0):+.1f}]"
    data = {"depth": depth, "change": change.as_json(), "gate": bound}
    shown = Shown(figure=figure, bound=bound, data=data)
    if points >= least:
        return passed(name, **shown)
    if change.high is None or 100 * change.high >= least:
        reason = "too few drafts to tell: give more prompts or --max-new-tokens"
        return not_tested(name, reason, **shown)
    return failed(name, _losing_part(pair, change, depth), **shown)


def _losing_part(pair: Pair, change: Estimate, depth: int) -> str:
    """The cause of a loss, by the part that makes it: the source's module on the export's target
    restores the acceptance that the MTP part lost."""
    corpus, export = pair.corpus, pair.export
    room = corpus.texts.room(corpus.anchors, depth)
    crossed, own = (
        float(_hits(corpus, export, side.model)[depth - 1][room].mean())
        for side in (pair.source, export)
    )
    if crossed - own > -change.value / 2:
        return causes.mtp_part_loses(own, crossed)
    return causes.main_part_loses(pair.where_it_starts())


@torch.inference_mode()
def where_it_starts(texts: Texts, wanted: Model, found: Model) -> str:
    """The cause of a difference, by the first layer whose result is off by much more than that of
    the layer before it."""
    short = Texts(texts.texts[:2])
    tokens = short.tokens.to(found.device)
    xs = [m.embedding(tokens) for m in (wanted, found)]
    error = _error(*xs)
    if error > 0.1:
        return causes.ANOTHER_EMBEDDING
    if wanted.config != found.config:
        return causes.ANOTHER_ARITHMETIC
    paged = PagedTexts.of(short)
    both = [
        paged.chunks(model.device, per_layer=model.beside(tokens, x))
        for model, x in zip((wanted, found), xs, strict=True)
    ]
    pairs = zip(wanted.layers.each(), found.layers.each(), strict=False)
    for index, layers in enumerate(pairs):
        xs = [
            through_layer(layer, x, paged.pages, chunks)
            for layer, x, chunks in zip(layers, xs, both, strict=True)
        ]
        now = _error(*xs)
        if now > _JUMP * max(error, 0.01):
            return causes.layer_goes_wrong(index, before=error, after=now)
        error = max(error, now)
    return causes.quantization_noise(error)


def _error(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """Norm of the difference over the norm of the wanted tensor."""
    return float((wanted - found).norm() / wanted.norm())
