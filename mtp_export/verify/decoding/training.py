"""Parts of a main model of few layers, and of its MTP module, trained on plain code: what was
damaged gains on other code what nothing of a good model does."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

import torch

from mtp_checkpoints.errors import UnsupportedError
from mtp_export.verify.check import EQUAL, MTP_MODULE, Item, Status, not_tested, passed
from mtp_export.verify.context import Context
from mtp_export.verify.decoding.changed import CONFIDENCE, Changed, best_first, compared, explained
from mtp_export.verify.decoding.several_vectors import of_several
from mtp_export.verify.diagnosis.causes import decoding as causes
from mtp_export.verify.diagnosis.causes.pointed import knows_no_text
from mtp_export.verify.diagnosis.layer_variants import LayerVariant
from mtp_export.verify.diagnosis.neurons import agreements
from mtp_export.verify.diagnosis.slopes import pointed
from mtp_export.verify.diagnosis.trainable import Spot, Trainable
from mtp_export.verify.diagnosis.trainable_module import TrainableModule
from mtp_export.verify.diagnosis.trained import SMALL_STEPS, Half, Parts, Trials, Tried, small
from mtp_export.verify.evidence.likelihood import Likelihood
from mtp_export.verify.evidence.plain_text import (
    JUDGING,
    JUDGING_PASSAGES,
    MORE_JUDGING_PASSAGES,
    MORE_TRAINING,
    TRAINING,
    TRAINING_PASSAGES,
    PlainTexts,
)
from mtp_export.verify.evidence.side_by_side import SideBySide, VariantsOf
from mtp_export.verify.gates import (
    LEAST_POINTED_NATS,
    LEAST_SHARE_NATS,
    LEAST_SMALL_SHARE_NATS,
    LEAST_TRAINED_NATS,
)
from mtp_runtime.models.model import MtpModule
from mtp_runtime.streaming import StreamedModel, open_streamed
from mtp_runtime.tokenizer import Tokenizer

NAME = "no part of the main model gains by training"
OF_MODULE = f"no part of {MTP_MODULE} gains by training"
# Of a model that is trained, its stored tensors: in float32, with gradients, eight times as many.
MOST_BYTES = 256 << 20
LEAST_TEXTS = 16  # to train on, and to judge by
MOST_HALVES = 2  # whose tensors are trained each alone
LEAST_RIVAL = 0.5  # of the best half's gain
MOST_UNDONE = 2  # tensors of each, whose changes are undone, beside those that are small
MOST_SMALL = 3  # tensors, of all that are trained together, whose steps are taken back
# Of a model that knows no text: what a part must gain, and times what any other gains. Parts of
# random weights gain up to 0.08, and 1.1 times what others do.
LEAST_STANDING_NATS, MOST_OTHERS = 0.2, 2.0
LEAST_AGREEMENT = 6.0  # of sizes of rows with counts of tokens, in standard errors


def none_gains(streamed: StreamedModel, tokenizer: Tokenizer, context: Context) -> Iterator[Item]:
    """No half of a main layer gains by training beside all others, nor one of the MTP module alone,
    nor either by what slopes point to, what a good one does not; where some do, tensors of the best
    are trained each alone, and changes of the best of these undone."""
    trials = _trials(streamed, tokenizer)
    if isinstance(trials, Item):
        yield trials
        return
    item = _none_of(trials, NAME, context, _with_more_texts(trials, tokenizer))
    yield item
    if item.status is Status.FAIL or context.why_no_module:  # that is fed what a bad model makes
        return
    if context.named_damage:
        yield not_tested(OF_MODULE, causes.damaged(context.named_damage))
        return
    try:
        module = TrainableModule.of(streamed)
    except UnsupportedError as error:
        yield not_tested(OF_MODULE, str(error))
    else:
        yield _none_of(trials.of_module(module), OF_MODULE, context)


def stands_out(streamed: StreamedModel, tokenizer: Tokenizer, context: Context) -> Item | None:
    """The failure of one part of a model that knows no text, of which training, or a change undone
    of the embedding or the head, gains far more than of any other; None where none does, and of
    random weights."""
    trials = _trials(streamed, tokenizer)
    if isinstance(trials, Item) or not _was_trained(trials):
        return None
    found = [*_trained_halves(trials, trials.halves, context), *pointed(trials)]
    ends = (spot for spots in trials.halves.values() for spot in spots if trials.is_end(spot))
    tried = compared(trials.own, chain(found, *map(trials.undone, ends)))
    best = tried[0]
    # An embedding or head that is trained makes up for a damaged layer: no rival of one.
    rivals = [one for one in tried if _is_end(trials, best) or not _is_end(trials, one)]
    others = [one.gain.value for one in rivals if _half(one) != _half(best)]
    if best.gain.value < max(LEAST_STANDING_NATS, MOST_OTHERS * max(others)):
        return None
    alone = _alone(trials, [_half(best)], context)
    is_one = len(trials.halves[_half(best)]) == 1  # tensor, which is trained alone
    own = (one for one in tried if _half(one) == _half(best) and one.variant.is_trained)
    better = [] if is_one else [*own]
    bound = f"gains {MOST_OTHERS:g} times as much as any other"
    return explained(NAME, [*alone, *tried], best_first([*better, *alone]), bound)


def beside(
    streamed: StreamedModel,
    tokenizer: Tokenizer,
    context: Context,
    half: Half,
    variants: VariantsOf[LayerVariant],
    *,
    is_left_out: bool,
) -> list[Changed]:
    """Variants of a layer beside what slopes point to and, where no part of it is better left out,
    what training of the tensors of half of it, each alone, betters, and changes undone of the best,
    all on the same texts; nothing where that is not trained."""
    trials = _trials(streamed, tokenizer)
    if isinstance(trials, Item) or half not in trials.halves:
        return []
    found = SideBySide.of(streamed, trials.judging, variants)
    of_variants = compared(found.own, found.tried)
    alone = [] if is_left_out else _alone(trials, [half], context)
    return _merged(of_variants, alone, compared(trials.own, pointed(trials)))


def beside_in_module(
    context: Context, changes: Sequence[tuple[LayerVariant, MtpModule]]
) -> list[Changed]:
    """Changes of the MTP module beside what slopes point to and what training of its halves, and of
    single tensors, betters, all on the same texts, best first; nothing where it is not trained."""
    streamed = open_streamed(context.folder, context.options.device, context.mtp_folder)
    trials = _fed_trials(streamed, context)
    if isinstance(trials, Item):
        return []
    own = compared(trials.own, ((one, trials.under_layer(0, other)) for one, other in changes))
    told, where = {one.change for one, _ in changes}, f" of {trials.model.noun}"
    pointed_to = compared(trials.own, pointed(trials))
    undone = (one for one in pointed_to if one.variant.change.replace(where, "") not in told)
    halves = compared(trials.own, _trained_halves(trials, trials.halves, context))
    found = _merged(own, undone)
    suspected = dict.fromkeys(map(_half, (*found[:1], halves[0])))
    spots = [spot for half in suspected for spot in trials.halves.get(half, ())]
    return _merged(found, halves, compared(trials.own, map(trials.trained, spots)))


def _fed_trials(streamed: StreamedModel, context: Context) -> Trials | Item:
    """Read the module of a main model of any depth, which texts are streamed through."""
    texts = _texts(streamed, Tokenizer.find(streamed.opened.folder))
    if isinstance(texts, Item):
        return texts
    try:
        module = TrainableModule.of(streamed)
    except UnsupportedError as error:
        return not_tested(OF_MODULE, str(error))
    layers = len(texts) * streamed.config.layers
    with context.show_count("acceptance, with the module trained", layers, "layers") as advance:
        last = [(some, Likelihood.of(streamed, some, advance=advance).states) for some in texts]
    return Trials.fed(module, streamed.rest().head, *last)


def _trials(streamed: StreamedModel, tokenizer: Tokenizer) -> Trials | Item:
    """Read a model, and take the texts through it; the reason why not as an item."""
    texts = _texts(streamed, tokenizer)
    if isinstance(texts, Item):
        return texts
    try:
        return Trials.of(Trainable.of(streamed), *texts)
    except UnsupportedError as error:
        return not_tested(NAME, str(error))


def _texts(streamed: StreamedModel, tokenizer: Tokenizer) -> tuple[PlainTexts, PlainTexts] | Item:
    """The texts to train on and to judge by; the reason why not as an item."""
    if streamed.opened.size_bytes > MOST_BYTES:
        return not_tested(NAME, f"models of more than {MOST_BYTES >> 20} MiB are not trained")
    if not tokenizer.found:
        return not_tested(NAME, "there is no tokenizer to read plain text with")
    trained = PlainTexts.of_modules(tokenizer, TRAINING, TRAINING_PASSAGES)
    judging = PlainTexts.of_modules(tokenizer, JUDGING, JUDGING_PASSAGES)
    if min(len(trained.kinds), len(judging.kinds)) < LEAST_TEXTS:
        return not_tested(NAME, "this Python has no source of its standard library")
    return trained, judging


def _with_more_texts(trials: Trials, tokenizer: Tokenizer) -> Trials:
    """The same model, whose layers are trained together on more texts."""
    modules, model = (*TRAINING, *MORE_TRAINING), trials.model
    trained = PlainTexts.of_modules(tokenizer, modules, TRAINING_PASSAGES)
    judging = PlainTexts.of_modules(tokenizer, JUDGING, MORE_JUDGING_PASSAGES)
    first = [model.embedded(trained.table)]  # all that such training needs
    return Trials(model, trained, first, judging, model.states(judging.table))


def _was_trained(trials: Trials) -> bool:
    """True where sizes of embeddings, or of the head's rows, go with how often a token comes."""
    tokens, ends = trials.code.texts.tokens, trials.model.ends
    counts = torch.bincount(tokens, minlength=len(ends.rows)).double()
    head = ends.head.linear.matrix(torch.float32).t()
    sizes = (rows.norm(dim=1).double() for rows in (ends.rows, head))
    return any(
        abs(float(agreements(torch.stack([counts, one]))[0, 1])) > LEAST_AGREEMENT for one in sizes
    )


def _trained_halves(trials: Trials, halves: Collection[Half], context: Context) -> list[Tried]:
    """Some halves trained, each alone."""
    title = f"likelihood, with halves of {trials.model.noun} trained"
    with context.show_count(title, len(halves), "halves") as advance:
        found = []
        for half in halves:
            found.append(trials.trained_half(half))
            advance(1)
    return found


def _trained_together(
    trials: Trials, parts: Parts, noun: str, context: Context, *how: int
) -> list[Changed]:
    """Parts of layers trained together, with what is lost where the steps of each are taken back.
    how: in so many steps, of the most that lose most."""
    found, title = list[Changed](), f"likelihood, with {noun} of all {trials.model.noun} trained"
    with context.show_count(title, min([len(parts), *how[1:]]), noun) as advance:
        for variant, without, trained in trials.taken_back(parts, *how):
            if (lost := without.fitted_gain(trained, CONFIDENCE)) is not None:
                found.append(Changed(variant, trained, lost))
            advance(1)
    return found


def _none_of(trials: Trials, name: str, context: Context, more: Trials | None = None) -> Item:
    """No half gains, nor a small tensor. more: with the texts that layers are trained together on;
    without it each is trained alone."""
    undone = compared(trials.own, chain(pointed(trials), trials.rerouted() if more else ()))
    shares, small_ones, parts = list[Changed](), list[Changed](), Parts()
    if more is not None:
        parts = more.small_ones()
        shares = _trained_together(more, more.layers_whole(), "halves", context)
        how = SMALL_STEPS, MOST_SMALL
        small_ones = _trained_together(more, parts, "small tensors", context, *how)
    shared = {_half(one) for one in shares}
    halves = _trained_halves(trials, [o for o in trials.halves if o not in shared], context)
    alone = compared(trials.own, halves)
    tried = _merged(undone, shares, small_ones, alone)
    of_shares = f"{LEAST_SHARE_NATS} nats beside all others, {LEAST_SMALL_SHARE_NATS} if small"
    beside = f"{of_shares}, " if shares else ""
    least = f"{beside}{LEAST_TRAINED_NATS} alone, or {LEAST_POINTED_NATS} by an undone change"
    bound = f"none of {len(tried)} gains {least}, by its interval"
    far_small = [one for one in small_ones if one.gains(LEAST_SMALL_SHARE_NATS)]
    least_of = (undone, LEAST_POINTED_NATS), (shares, LEAST_SHARE_NATS), (alone, LEAST_TRAINED_NATS)
    far = best_first(one for some, least in least_of for one in some if one.gains(least))
    if not far and not far_small:
        figure = f"{tried[0].gain.value:+.3f} nats when {tried[0].variant.change}"
        return passed(name, figure=figure, bound=bound)
    spots = (spot for one in far_small for spot in parts[one.variant])
    changed = compared(trials.own, chain.from_iterable(map(trials.undone, spots)))
    suspected = _suspected(trials, far)
    single = _alone(trials, suspected, context) if suspected else []
    single = _merged(undone, changed, single, small_ones)
    better = [one for one in single if one.gains(0)]
    if better and (several := of_several(trials, better[0])) is not None:
        better = [several]
    found = explained(name, _merged(better, single, tried), better or far, bound)
    is_main = more is not None
    return found if is_main else or_useless(found, trials, (better or far)[0])


def or_useless(found: Item, trials: Trials, best: Changed) -> Item:
    """The failure of a module; where the best change leaves it worse than the frequencies of tokens
    it names nothing, and the module is wrong as a whole."""
    frequencies = trials.by_frequencies()
    if best.under.fitted() > frequencies:
        return found
    cause = knows_no_text(trials.model.noun, -trials.own.fitted(), -frequencies)
    return replace(found, cause=cause, data={**found.data, EQUAL: 1})


def _suspected(trials: Trials, far: Sequence[Changed]) -> list[Half]:
    """The half that gains most by training, and others that gain as much but for a share of it; no
    embedding or head, which is trained alone and makes up for a damaged layer."""
    of_halves = [one for one in far if one.variant.layer is not None]
    ordered = [one for one in of_halves if one.variant.is_trained] or of_halves
    least = LEAST_RIVAL * ordered[0].gain.value if ordered else 0.0
    rivals = (o for o in ordered[1:] if o.gain.value >= least and not _is_end(trials, o))
    return [*dict.fromkeys(map(_half, (*ordered[:1], *rivals)))][:MOST_HALVES]


def _merged(*some: Iterable[Changed]) -> list[Changed]:
    """Each change once, best first."""
    found = {(one.variant.change, one.variant.cause): one for one in chain(*some)}
    return best_first(found.values())


def _half(one: Changed) -> Half:
    layer = one.variant.layer
    assert layer is not None, "half of one layer is trained"
    return layer, one.variant.half


def _is_end(trials: Trials, one: Changed) -> bool:
    return any(map(trials.is_end, trials.halves[_half(one)]))


def _alone(trials: Trials, halves: Sequence[Half], context: Context) -> list[Changed]:
    """Each tensor of some halves trained alone, and changes undone of the best of each half and of
    its small tensors: those of the half in which one gains most, best first."""
    title, tried = "likelihood, with single tensors trained", list[list[Changed]]()
    count = sum(len(trials.halves[half]) for half in halves)
    with context.show_count(title, count, "tensors") as advance:
        for half in halves:
            found = dict[LayerVariant, tuple[Spot, Likelihood]]()
            for spot in trials.halves[half]:
                variant, under = trials.trained(spot)
                found[variant] = spot, under
                advance(1)
            trained = compared(trials.own, ((one, under) for one, (_, under) in found.items()))
            best = [found[one.variant][0] for one in trained[:MOST_UNDONE]]
            spots = dict.fromkeys([*best, *small(trials.halves[half])])
            changed = (one for spot in spots for one in trials.undone(spot))
            tried.append(best_first([*trained, *compared(trials.own, changed)]))
    return max(tried, key=lambda ones: ones[0].gain.value)
