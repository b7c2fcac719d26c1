"""Check `acceptance`: drafts accepted per position, with intervals, and causes of a low share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from mtp_checkpoints.errors import UnsupportedError
from mtp_export.verify import gates
from mtp_export.verify.check import (
    EQUAL,
    MTP_MODULE,
    Item,
    failed,
    judged,
    measured,
    not_tested,
    passed,
)
from mtp_export.verify.context import Context
from mtp_export.verify.decoding.changed import explained, explaining
from mtp_export.verify.decoding.drafter_agreement import drafter_bug, drafter_items, equal_tokens
from mtp_export.verify.decoding.training import beside_in_module
from mtp_export.verify.diagnosis.alternatives import (
    LEAST_GAIN_NATS,
    Alternative,
    alternatives,
    best_of,
    extra_alternatives,
    first_token,
    with_main_layers,
)
from mtp_export.verify.diagnosis.causes import decoding as causes
from mtp_export.verify.diagnosis.causes.pointed import mended_in_part
from mtp_export.verify.diagnosis.layer_variants import LayerVariant
from mtp_export.verify.diagnosis.trainable_module import harm_of
from mtp_export.verify.diagnosis.undone import undone
from mtp_export.verify.diagnosis.variants import LOADING, Variant
from mtp_export.verify.evidence.corpus import Corpus
from mtp_export.verify.evidence.decode import Decoded
from mtp_export.verify.evidence.extra_drafts import ExtraDraft
from mtp_export.verify.evidence.statistics import Estimate, ratio
from mtp_runtime.models.load import LoadOptions
from mtp_runtime.streaming import open_streamed

# Acceptance of a draft over that of the one before it, both given that all before were accepted.
LEAST_KEPT = 0.6
_KEPT, _BAND = "later drafts hold", "sanity band of draft 1"
_OTHERS, _FIRST_TOKEN = "no other layout drafts better", "first-token handling"
_CONTRACT = "contract"


def run(context: Context) -> Iterator[Item]:
    """Acceptance per k, then the module compared with its variants and with its drafter, or a draft
    in its place with its variants; what a damaged main model accepts tells nothing of a module."""
    corpus = context.corpus
    for k in context.options.ks:
        yield from of_k(corpus.speculative(k), k)
    if corpus.draft is not None:
        yield from _without_module(context, corpus.draft)
        return
    if context.main_damage:
        why = causes.main_damaged(context.main_damage)
        names = (_KEPT, _BAND, _OTHERS, _FIRST_TOKEN, _CONTRACT)
        yield from (not_tested(name, why) for name in names)
        yield from drafter_items(corpus, max(context.options.ks))
        return
    tried = alternatives(corpus)
    yield _no_collapse(corpus, max(context.options.ks), one_cause(best_of(tried)))
    yield from _with_activations(context, max(context.options.ks))
    yield from drafter_items(corpus, max(context.options.ks))
    yield from diagnosed(corpus, tried, context=context)


def _without_module(context: Context, draft: ExtraDraft) -> Iterator[Item]:
    """The draft of a model without MTP modules, by the drafts that were verified."""
    corpus = context.corpus
    yield _in_band(conditional(corpus.speculative(min(context.options.ks)), 0), causes.NO_KNOWN_BUG)
    yield _no_collapse(corpus, max(context.options.ks), "")
    yield from _with_activations(context, max(context.options.ks))
    yield _extra_diagnosed(corpus, draft)


def _with_activations(context: Context, k: int) -> Iterator[Item]:
    """Acceptance with --activations, beside the usual one."""
    kind, usual_options = context.options.activations, LoadOptions(context.options.device)
    if kind == usual_options.activations:
        return
    name = f"activations {kind}"
    try:
        options = replace(usual_options, activations=kind)
    except UnsupportedError as error:
        yield not_tested(name, str(error))
        return
    if reason := context.why_not_loaded(options):
        yield not_tested(name, reason)
        return
    usual = context.corpus.speculative(k)
    other = context.corpus_with(options).speculative(k)
    yield from of_k(other, k, name)
    equal = sum(a == b for a, b in zip(usual.outputs, other.outputs, strict=True))
    data = {"k": k, "activations": kind, "equal_texts": equal}
    yield measured(
        f"{name}, k={k}, texts", f"{equal} of {len(usual.outputs)} as with float32", data
    )


def extra_drafts(context: Context) -> Iterator[Item]:
    """Acceptance of each extra draft per k, then the draft compared with its variants."""
    for extra in context.extra_drafts:
        corpus = context.corpus
        for k in context.options.ks:
            decoded = extra.speculative(corpus.prompts, corpus.params, k, corpus.show_count)
            yield from of_k(decoded, k, extra.method)
        yield _extra_diagnosed(corpus, extra)


def _extra_diagnosed(corpus: Corpus, extra: ExtraDraft) -> Item:
    """A draft compared with its variants: one that drafts better names a known bug."""
    tried = extra_alternatives(corpus, extra.draft)
    name = f"{extra.method}: no other reading drafts better"
    if not tried:
        return not_tested(name, "there are no variants of it, or no two prompts to compare them on")
    return _none_better(name, tried)


def diagnosed(
    corpus: Corpus,
    tried: Sequence[Alternative] | None = None,
    *,
    generated: bool = True,
    context: Context | None = None,
) -> Iterator[Item]:
    """The module compared with its variants: one that drafts better names a known bug. generated:
    the texts are the model's own, so that drafts should hit them. context: of the bundle, damage of
    whose module may be named already, of which refused drafts and better variants are the
    consequence, and whose module may be trained."""
    tried = alternatives(corpus) if tried is None else tried
    damage = "" if context is None else context.named_damage
    is_refused = not damage and not _drafts(corpus)
    if context is not None and is_refused and not _is_enough(best_of(tried)):
        streamed = open_streamed(context.folder, context.options.device, context.mtp_folder)
        tried = with_main_layers(corpus, streamed.layers(0), tried)
    better = [] if damage else best_of(tried)
    named = causes.damaged(damage) if damage else ""
    others = not_tested(_OTHERS, named) if damage else _none_better(_OTHERS, tried)
    if better:
        untrained = others
        others = others if context is None else _beside_training(others, better, context)
        named = others.cause if _is_enough(better) or others is not untrained else ""
    if generated:
        subject = others.subject if named else MTP_MODULE
        yield _in_band(first_draft(corpus), named or causes.NO_KNOWN_BUG, subject)
    yield others
    is_mixed_up = bool(better) and better[0].kind == LOADING and is_refused
    if damage or is_mixed_up:
        why = causes.damaged(damage) if damage else causes.loaded_wrongly(_OTHERS)
        yield not_tested(_FIRST_TOKEN, why)
    else:
        yield _first_token(corpus)
    yield _contract(corpus, tried)


def _is_enough(better: Sequence[Alternative]) -> bool:
    """True where the best alternative drafts as a working module does."""
    return bool(better) and (better[0].other or 0.0) >= gates.LEAST_ACCEPTANCE


def loaded_wrongly(failures: Iterable[Item]) -> str:
    """The item among the check's failures that found the MTP module to draft better with its
    tensors in other places; "" where none did."""
    return next((i.name for i in failures if i.name == _OTHERS and i.subject == MTP_MODULE), "")


def one_cause(better: Sequence[Alternative]) -> str:
    """The alternatives that explain a fault equally, as a sentence; "" without any."""
    if not better:
        return ""
    sentences = [one.explained for one in better]
    if len(better) == 1 or not all(one.leaves_most_refused for one in better):
        return causes.one_of(sentences)
    halves, kinds = {one.half for one in better}, {one.wrong for one in better}
    if len(halves) == 1 < len(kinds) and (half := halves.pop()):
        return mended_in_part(harm_of(half), sentences)
    return causes.one_of(sentences) + causes.OR_ANOTHER_LAYER


def _beside_training(failure: Item, better: Sequence[Alternative], context: Context) -> Item:
    """The failure by several alternatives, or by one that mends some, with what training of the
    module, which no check before found damaged, betters as much or more."""
    variants = [one.variant for one in better if isinstance(one.variant, Variant)]
    is_sure = len(variants) < len(better) or any(one.mends_most for one in better)
    if is_sure or better[0].kind != LOADING or better[0].depth > 1 or context.module_damage:
        return failure
    of_tensors = {one.as_of_layer: one for one in better}
    modules = [(c.as_of_layer, one.module) for c, one in zip(better, variants, strict=True)]
    tried = [one for one in beside_in_module(context, modules) if one.gains(0)]
    equal = [one.variant for one in explaining(tried)] if tried else []
    if of_tensors.keys() >= {*equal}:
        return failure
    found = replace(explained(failure.name, tried, tried, failure.bound), subject=failure.subject)
    halves = {one.half for one in equal}
    kinds = {_wrong(one, of_tensors) for one in equal if not one.is_trained}
    if equal[0] not in of_tensors or len(halves) > 1 or "" in halves or len(kinds) == 1:
        return found
    words = mended_in_part(harm_of(halves.pop()), [one.cause for one in equal])
    best = tried[0]
    return replace(found, cause=causes.likelier(words, best.gain.value, best.variant.change))


def _wrong(one: LayerVariant, known: Mapping[LayerVariant, Alternative]) -> str:
    """The fault that a change undoes, whatever tensor has it: "" for any size."""
    if one in known:
        return known[one].wrong
    return "" if one.is_size else one.cause


def conditional(decoded: Decoded, position: int) -> Estimate | None:
    """Drafts accepted at a position (from 0), over those whose predecessors were all accepted."""
    return _over(decoded, position, top="accepted", bottom="reached")


def cumulative(decoded: Decoded, position: int) -> Estimate | None:
    """Drafts accepted at a position (from 0), over those drafted there."""
    return _over(decoded, position, top="accepted", bottom="drafted")


def accepted_length(decoded: Decoded) -> Estimate | None:
    """Output tokens per verified block, the target's own included."""
    blocks = [(m.metrics.drafted or [0])[0] for m in decoded.requests]
    tokens = [
        block + sum(r.metrics.accepted) for block, r in zip(blocks, decoded.requests, strict=True)
    ]
    return ratio(tokens, blocks)


def _over(decoded: Decoded, position: int, top: str, bottom: str) -> Estimate | None:
    def counts(name: str) -> list[int]:
        lists: Sequence[list[int]] = [getattr(r.metrics, name) for r in decoded.requests]
        return [counts[position] if position < len(counts) else 0 for counts in lists]

    return ratio(counts(top), counts(bottom))


def of_k(decoded: Decoded, k: int, method: str = "") -> Iterator[Item]:
    """Acceptance of a run with k drafts, by position; a method that is named is one of its own."""
    own, data = (f"{method}, ", {"method": method}) if method else ("", {})
    for position in range(k):
        given, overall = conditional(decoded, position), cumulative(decoded, position)
        name = f"{own}k={k}, draft {position + 1}"
        if given is None or overall is None:
            yield not_tested(name, "no draft reached this position")
            continue
        yield measured(
            name,
            f"{given.shown()} of {given.count}; cumulative {overall.shown()}",
            data
            | {
                "k": k,
                "position": position + 1,
                "conditional": given.as_json(),
                "cumulative": overall.as_json(),
            },
        )
    length = accepted_length(decoded)
    if length is not None:
        lengths = data | {"k": k, "accepted_length": length.as_json()}
        yield measured(f"{own}k={k}, mean accepted length", length.shown(2), lengths)


def first_draft(corpus: Corpus) -> Estimate | None:
    """Acceptance of the first draft at every position of the texts; None where none was drafted."""
    drafts = corpus.drafts(1)
    hit, room = drafts.hit[0].double(), drafts.room[0]
    return ratio(corpus.by_text(hit, room), corpus.by_text(torch.ones_like(hit), room))


def is_in_band(found: Estimate) -> bool:
    """True for an acceptance that its interval does not tell from a working module's."""
    return (found.high or found.value) >= gates.LEAST_ACCEPTANCE


def _drafts(corpus: Corpus) -> bool:
    """True for a module that drafts as a working one does, or does not draft at all."""
    found = first_draft(corpus)
    return found is None or is_in_band(found)


def _in_band(found: Estimate | None, cause: str, subject: str = MTP_MODULE) -> Item:
    """The acceptance of first drafts, and the cause of one below a working module's."""
    name, bound = _BAND, f"at least {gates.LEAST_ACCEPTANCE}"
    if found is None:
        return not_tested(name, "nothing was drafted: the texts are too short")
    return judged(
        name,
        holds=is_in_band(found),
        cause=cause,
        subject=subject,
        figure=found.shown(),
        bound=bound,
    )


def _no_collapse(corpus: Corpus, k: int, known: str) -> Item:
    """Each later draft keeps most of the acceptance of the one before it."""
    name, bound = _KEPT, f"each at least {LEAST_KEPT} of the one before"
    if k < 2:
        return not_tested(name, "--k asks for one draft alone")
    decoded = corpus.speculative(k)
    found = [conditional(decoded, position) for position in range(k)]
    kept = [
        (position, (now.high if now.high is not None else now.value) / before.value)
        for position, (before, now) in enumerate(zip(found, found[1:], strict=False), start=2)
        if before is not None and now is not None and is_in_band(before)
    ]
    if not kept:
        return not_tested(name, "no draft after an accepted one was reached")
    position, worst = min(kept, key=lambda pair: pair[1])
    figure = f"draft {position}: at most {worst:.2f}"
    if worst >= LEAST_KEPT:
        return passed(name, figure=figure, bound=bound)
    bug = None
    if corpus.draft is None:
        bug = drafter_bug(corpus, decoded, depths=k, compare=equal_tokens)
    cause = causes.acceptance_collapses(position, bug[0] if bug else known)
    return failed(name, cause, figure=figure, bound=bound)


def _none_better(name: str, tried: Sequence[Alternative]) -> Item:
    bound = f"none of {len(tried)} gains {LEAST_GAIN_NATS} nats by its interval"
    if all(a.gain.low is None for a in tried):
        return not_tested(name, "it takes two prompts whose texts have drafts")
    better = best_of(tried)
    best = better[0] if better else tried[0]
    figure = f"{best.gain.value:+.3f} nats when {best.variant.change}"
    if not better:
        return passed(name, figure=figure, bound=bound)
    # Which the original's layer mends.
    subject = MTP_MODULE if best.kind == LOADING and not best.is_of_main else ""
    data = {**undone((one.variant.change, one.gain) for one in tried), EQUAL: len(better)}
    cause = one_cause(better)
    return failed(name, cause, figure=figure, bound=bound, subject=subject, data=data)


def _first_token(corpus: Corpus) -> Item:
    name = _FIRST_TOKEN
    found = first_token(corpus)
    if found is None or found.gain.low is None:
        return not_tested(name, "it takes two prompts")
    figure = f"overlap {found.own:.3f} as recorded, {found.other:.3f} otherwise"
    cause = f"{found.explained}, of position 0"
    return judged(name, not found.better, cause, figure=figure, bound="not better otherwise")


def _contract(corpus: Corpus, tried: Sequence[Alternative]) -> Item:
    """A recorded contract other than the family's must draft better than the family's."""
    own, usual = corpus.module.contract, corpus.module.usual_contract
    figure = (
        f"target {own.target_hidden}, recycled {own.recycled_hidden}, first embedding "
        f"{'zeroed' if own.zero_first_embedding else 'kept'}"
    )
    figure = figure.replace("_", " ")
    bound = "the family's, or drafts better"
    by_name = {a.variant.name: a for a in tried}
    for field in ("target_hidden", "recycled_hidden", "zero_first_embedding"):
        found = by_name.get(field)
        if getattr(own, field) == getattr(usual, field) or found is None:
            continue
        proven = found.gain.high is not None and found.gain.high < -LEAST_GAIN_NATS
        if not proven:
            cause = causes.contract_unproven(
                found.variant.cause,
                field=field,
                own=getattr(own, field),
                usual=getattr(usual, field),
            )
            return failed(_CONTRACT, cause, figure=figure, bound=bound)
    return passed(_CONTRACT, figure=figure, bound=bound)
