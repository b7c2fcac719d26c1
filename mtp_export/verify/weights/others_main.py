"""The main model that another tool quantized, in a checkpoint or a graft, compared with --source
tensor by tensor by decoded values: within the noise of its formats, or by scales that tools move
between the weights of a layer, as they may in an MTP layer too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from mtp_checkpoints.families.base import Role, weight_name
from mtp_checkpoints.families.signs import in_layer
from mtp_checkpoints.formats import WeightFormat
from mtp_checkpoints.weights.weight_values import WeightOnDisk
from mtp_export.progress import counted
from mtp_export.verify.check import Item, Problem, not_tested, verdict
from mtp_export.verify.diagnosis.causes import relations
from mtp_export.verify.diagnosis.causes import weights as causes
from mtp_export.verify.diagnosis.weight_bugs import explain
from mtp_export.verify.evidence.weight_facts import WeightFacts

if TYPE_CHECKING:
    from mtp_checkpoints.families.spec import ModelSpec
    from mtp_export.verify.diagnosis.channel_scales import LayerWeight

_EXPLAINED = 3  # wrong weights whose cause is looked for
_NAME = "main: weights against the source"


def compared_by_values(
    facts: Sequence[WeightFacts], family: ModelSpec, weights: Mapping[str, WeightOnDisk]
) -> Iterator[Item]:
    """Every weight of the main part. weights: the source's by their released names."""
    alone = [
        Problem(name, causes.not_in_source(name))
        for name in (f.weight.stored.weight.name for f in facts if f.against is None)
    ]
    count = len(facts) - len(alone)
    for failure in (fact.against.failure for fact in facts if fact.against is not None):
        if failure is not None:
            raise failure
    yield verdict("main: weights that the source has", alone, f"{count:,}")
    wrong, scaled = unlike_and_scaled(facts, family)
    if _is_rotated(wrong, count):
        yield not_tested(_NAME, relations.ROTATED, figure=f"{len(wrong):,} of {count:,} unlike")
        return
    problems = [_problem(fact, weights, explained=n < _EXPLAINED) for n, fact in enumerate(wrong)]
    moved = f", {counted(len(scaled), 'weight')} with scales of channels" if scaled else ""
    yield verdict(_NAME, problems, f"{count:,} by values{moved}", "within the noise of their forms")


def unlike_and_scaled(
    facts: Sequence[WeightFacts], family: ModelSpec
) -> tuple[list[WeightFacts], list[WeightFacts]]:
    """Return the weights that are not the source's within the noise of their formats: those that
    nothing makes up for, and those with scales of channels that others of their layer undo."""
    by_layer: dict[str, list[WeightFacts]] = defaultdict(list)
    for fact in (fact for fact in facts if fact.against is not None):
        by_layer[in_layer(fact.weight.stored.weight.name)[0]].append(fact)
    wrong, scaled = list[WeightFacts](), list[WeightFacts]()
    for layer in by_layer.values():
        apart = [fact for fact in layer if not _is_near(fact)]
        unexplained = _wrong(apart, layer, family) if apart else []
        known = {id(fact) for fact in unexplained}
        wrong += unexplained
        scaled += [fact for fact in apart if id(fact) not in known]
    return wrong, scaled


def unscaled_problems(wrong: Sequence[WeightFacts]) -> list[Problem]:
    """Problems of the weights that lack scales by which others undo a norm's, of all wrong ones."""
    names = [fact.weight.name for fact in wrong if _is_near(fact)]
    return [Problem(name, relations.not_scaled(name)) for name in names]


def _is_near(fact: WeightFacts) -> bool:
    """Return whether a weight is the source's within the noise of its format."""
    against = fact.against
    assert against is not None, "compared"
    if against.difference is None:
        return against.equal and not against.error
    return against.difference.sqnr_db >= _least_db(fact.weight.stored.format)


def _least_db(weight_format: WeightFormat) -> float:
    """The bound of a format; MLX's has that of four bits for fewer too."""
    bits, usual = getattr(weight_format, "bits", 4), weight_format.gate.sqnr_db
    return min(usual, 5.0 * bits - 6.0) if bits < 4 else usual


def _wrong(
    apart: Sequence[WeightFacts], layer: Sequence[WeightFacts], family: ModelSpec
) -> list[WeightFacts]:
    """The weights of a layer that are not the source's, nor with scales that others undo, and those
    without the scales by which others undo a norm's."""
    from mtp_export.verify.diagnosis.channel_scales import makes_up_for

    known = {id(fact): _layer_weight(fact, family) for fact in layer if _is_decoded(fact)}
    others = list(known.values())
    wrong = []
    for fact in apart:
        own = known.get(id(fact))
        fits = own is not None and (
            not own.is_matrix or own.scaled.sqnr_db >= _least_db(fact.weight.stored.format)
        )
        if own is None or not fits or not makes_up_for(own, others):
            wrong.append(fact)
    unexplained, far = ({id(fact) for fact in facts} for facts in (wrong, apart))
    vectors = [fact for fact in apart if len(fact.weight.stored.weight.shape) == 1]
    norms = [fact for fact in vectors if id(fact) not in unexplained]
    near = [fact for fact in layer if id(fact) in known.keys() - far]
    return wrong + [fact for norm in norms for fact in _unscaled(norm, near, known, family)]


def _unscaled(
    norm: WeightFacts,
    near: Sequence[WeightFacts],
    known: Mapping[int, LayerWeight],
    family: ModelSpec,
) -> Iterator[WeightFacts]:
    """Yield the weights that take what a norm makes and whose columns have not the scales that it
    was divided by. A square one may be the attention's output, which does not take it."""
    from mtp_export.verify.diagnosis.channel_scales import undoes

    name, size = norm.weight.stored.weight.name, norm.weight.rows
    layers = (*family.layers, *(mtp.layer for mtp in family.mtp))
    prefixes = {weight_name(one.input_norm): one.attention_prefix for one in layers}
    prefixes |= {weight_name(one.post_norm): one.feed_forward_prefix for one in layers}
    if name not in prefixes or any(one.norms_after for one in layers):
        return
    for fact in near:
        stored = fact.weight.stored.weight
        is_taker = stored.name.startswith(f"{prefixes[name]}.") and len(stored.shape) == 2
        takes = is_taker and stored.shape[1] == size != stored.shape[0]
        if takes and not undoes(known[id(norm)], known[id(fact)]):
            yield fact


def _is_decoded(fact: WeightFacts) -> bool:
    return (
        fact.against is not None
        and not fact.against.error
        and fact.statistics.is_sound
        and len(fact.weight.stored.weight.shape) <= 2
    )


def _layer_weight(fact: WeightFacts, family: ModelSpec) -> LayerWeight:
    from mtp_export.verify.diagnosis.channel_scales import LayerWeight

    assert fact.against is not None, "decoded"
    is_norm = fact.weight.stored.weight.role is Role.NORM
    return LayerWeight(fact.weight, fact.against, family.facts.norm_offset if is_norm else 0.0)


def _is_rotated(wrong: Sequence[WeightFacts], count: int) -> bool:
    """Return whether most weights, and the embedding, are unlike, whose rows are as long as the
    source's: a rotation of the stream leaves that."""
    embedding = [one for one in wrong if one.weight.stored.weight.role is Role.EMBEDDING]
    if 2 * len(wrong) < count or not embedding or embedding[0].against is None:
        return False
    own, source = (
        one.encoded(0, min(one.rows, 1024)).dequantize().float().norm(dim=1)
        for one in (embedding[0].weight, embedding[0].against.source)
    )
    return bool(own.allclose(source, rtol=0.02))


def _problem(fact: WeightFacts, weights: Mapping[str, WeightOnDisk], *, explained: bool) -> Problem:
    against, name = fact.against, fact.weight.name
    assert against is not None, "compared"
    level = None if against.difference is None else f"{against.difference.sqnr_db:.1f} dB"
    cause = None
    if _is_near(fact):
        return Problem(name, relations.not_scaled(name))
    if explained:
        cause = against.error or explain(fact.weight, against.source, weights)
    return Problem(name, causes.not_the_sources(name, level, cause))
