"""Embeddings and heads that are stored twice: the draft's are the main model's, and a head that is
stored beside a tied embedding is that embedding."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from mtp_checkpoints.families.base import weight_name
from mtp_checkpoints.families.signs import in_layer
from mtp_checkpoints.tensors.bundle_folder import MAIN
from mtp_checkpoints.tensors.untied_head import spare_head
from mtp_checkpoints.weights.weight_values import Rounding
from mtp_export.progress import format_bytes
from mtp_export.verify import gates
from mtp_export.verify.check import Item, Problem, not_tested, passed, verdict
from mtp_export.verify.diagnosis.causes import copies, parts_lost
from mtp_export.verify.diagnosis.causes import weights as causes
from mtp_export.verify.diagnosis.weight_bugs import damaged_elements, elements, lost_rows
from mtp_export.verify.evidence.parts import PartLayout
from mtp_export.verify.evidence.weight_facts import WeightFacts
from mtp_export.verify.weights.labels import mislabelled_copy

if TYPE_CHECKING:
    from mtp_checkpoints.families.spec import ModelSpec
    from mtp_export.verify.context import Context


def copies_of_tables(
    context: Context, found: Sequence[PartLayout], facts: Mapping[str, Sequence[WeightFacts]]
) -> Iterator[Item]:
    """Every such copy compared with the tensor that engines use in its place."""
    main = next((part for part in found if part.name == MAIN), None)
    if main is not None:
        yield from _spare_head(main, facts[MAIN])
    yield from _shared(context, found, facts)


def _spare_head(main: PartLayout, facts: Sequence[WeightFacts]) -> Iterator[Item]:
    """The head that is stored beside a tied embedding is that embedding."""
    family = main.stored.family
    spare, embedding = spare_head(family), weight_name(family.embedding)
    by_name = {fact.weight.stored.weight.name: fact for fact in facts}
    if spare is None or not {spare, embedding} <= by_name.keys():
        return
    own, original = by_name[spare], by_name[embedding]
    words = copies.spare_head_differs(spare, embedding)
    problems = [] if _equal(own, original) else [Problem(own.weight.name, words)]
    figure = format_bytes(own.weight.size_bytes)
    yield verdict("main: the head that is stored is the embedding", problems, figure)


def _shared(
    context: Context, found: Sequence[PartLayout], facts: Mapping[str, Sequence[WeightFacts]]
) -> Iterator[Item]:
    """The draft's embedding and head are the main model's: engines use those for both."""
    if len(found) < 2:
        return
    main, draft = (
        {fact.weight.stored.weight.name: fact for fact in facts[part.name]} for part in found
    )
    family = found[0].stored.family
    shared, beside = family.shared, _beside(context, family, draft)
    in_folder = [name for name in beside if name in main]
    unequal = [
        pair.mtp_name
        for pair in shared
        if pair.mtp_name in draft
        and pair.main_name in main
        and not _equal(draft[pair.mtp_name], main[pair.main_name])
    ]
    for pair in (pair for pair in shared if pair.main_name not in in_folder):
        own, original = draft.get(pair.mtp_name), main.get(pair.main_name)
        name = _item_name(pair.mtp_name)
        if own is None or original is None:
            tables = [part.stored.tables for part in found]
            both = [one.get(pair.main_name, one.get(pair.mtp_name)) for one in tables]
            opaque = any(one is not None and not one.format.is_decoded for one in both)
            why = "not in the bundle: engines take the main model's"
            yield not_tested(name, causes.NOT_COMPARED if opaque else why)
        elif not context.unwritten_tensors.isdisjoint((own.weight.name, original.weight.name)):
            yield not_tested(name, parts_lost.NOT_WRITTEN, subject=own.weight.name)
        elif pair.mtp_name not in unequal:
            yield passed(name, figure=format_bytes(own.weight.size_bytes))
        elif context.recorded("allow_untied"):
            why = "it differs, and was exported with --allow-untied"
            yield not_tested(name, why, subject=own.weight.name)
        elif (damage := _damage(own, original, own.weight.name)) is not None:
            yield verdict(name, [damage])
        elif not context.is_bundle and len(unequal) == 1 and _is_tuned(own, original):
            yield not_tested(name, copies.TUNED_COPY, subject=own.weight.name)
        else:
            words = copies.another_checkpoint(own.weight.name, original.weight.name)
            yield verdict(name, [Problem(own.weight.name, words)])
    for table in in_folder:
        copied = next((pair.mtp_name for pair in shared if pair.main_name == table), table)
        yield _in_folder(context, _item_name(copied), beside[table], main[table])


def _item_name(tensor: str) -> str:
    return f"draft's {in_layer(tensor)[1].removeprefix('model.')} is the main model's"


def _beside(
    context: Context, family: ModelSpec, draft: Collection[str]
) -> Mapping[str, WeightFacts]:
    """Facts of the embedding and head that lie beside the MTP part in its folder, under the main
    model's names and in its sizes, where the part has no copies of its own."""
    copied = {pair.main_name for pair in family.shared if pair.mtp_name in draft}
    tables = {weight_name(family.embedding), weight_name(family.head)} - copied
    layout = context.tables_beside
    if layout is None or tables.isdisjoint(layout.stored.weights):
        return {}
    by_name = {one.weight.stored.weight.name: one for one in context.walks.of(layout.name).facts}
    return {
        name: fact
        for name, fact in by_name.items()
        if name in tables and fact.weight.stored.weight.shape == family.tensors[name].shape
    }


def _in_folder(context: Context, name: str, own: WeightFacts, original: WeightFacts) -> Item:
    """Such a table is the main model's, as far as that tells whose the draft is."""
    table = f"{own.weight.name} of {context.options.mtp}"
    if original.weight.name in context.unwritten_tensors:
        return not_tested(name, parts_lost.NOT_WRITTEN, subject=original.weight.name)
    if _equal(own, original):
        return passed(name, figure=format_bytes(own.weight.size_bytes))
    if (damage := _damage(own, original, table)) is not None:
        return verdict(name, [damage])
    if _is_tuned(own, original):
        return not_tested(name, copies.NEAR_TABLE, subject=table)
    words = copies.another_checkpoint(table, "the main model's")
    return verdict(name, [Problem(table, words)])


def _is_tuned(own: WeightFacts, original: WeightFacts) -> bool:
    """Return whether a copy is near the main model's, as one is that was trained on from it."""
    noise = power = 0.0
    for start, stop in own.weight.pieces():
        ours, theirs = (one.weight.encoded(start, stop).dequantize() for one in (own, original))
        noise += float((ours.double() - theirs.double()).square().sum())
        power += float(theirs.double().square().sum())
    return noise <= gates.TUNED_SHARE * power


def _damage(own: WeightFacts, original: WeightFacts, copy: str) -> Problem | None:
    """The damage of one of the two by which the draft's copy, in words, is not the main model's;
    None where neither shows any."""
    wanted = original.weight.name
    count, total = damaged_elements(own.weight, original.weight), elements(own.weight)
    like_source = [one.against is not None and one.against.equal for one in (own, original)]
    if count and like_source[0] != like_source[1]:
        damaged = wanted if like_source[0] else copy
        cause = causes.elements_damaged(count, total)
        return Problem(damaged, causes.not_the_sources(damaged, None, cause))
    if own.weight.form == original.weight.form and own.digest == original.digest:
        damaged = wanted if like_source[0] and not like_source[1] else copy
        return Problem(damaged, copies.scales_of_a_copy(copy, wanted))
    if words := mislabelled_copy(own.weight, original.weight):
        return Problem(copy, words)
    flaws = _flaw(own, original), _flaw(original, own)
    if any(flaws) and not all(flaws):
        damaged, sound = (copy, wanted) if flaws[0] else (wanted, copy)
        return Problem(damaged, copies.copy_damaged(damaged, sound, "".join(flaws)))
    return Problem(copy, copies.one_copy_damaged(copy, wanted, count, total)) if count else None


def _flaw(fact: WeightFacts, other: WeightFacts) -> str:
    """Damage that the values of a matrix tell, beside those of one that must hold the same; "" for
    none."""
    statistics, rms = fact.statistics, fact.statistics.root_mean_square
    if not statistics.is_sound:
        return causes.NOT_FINITE
    if statistics.is_constant:
        return causes.CONSTANT_VALUES
    if not gates.RMS_RANGE[0] <= rms <= gates.RMS_RANGE[1]:
        return causes.implausible_size(rms)
    lost = lost_rows(fact.weight, other.weight) if other.statistics.is_sound else 0
    return parts_lost.rows_lost(lost, fact.weight.stored.weight.shape[0]) if lost else ""


def _beside_codes(fact: WeightFacts) -> list[str]:
    """Checksums of a weight's scales and constants."""
    return [fact.checksums[tensor.name] for tensor in fact.weight.tensors[1:]]


def _equal(one: WeightFacts, other: WeightFacts) -> bool:
    """True for equal codes and scales, and for a copy in another precision that dequantizes to the
    same but for rounding."""
    if one.weight.form == other.weight.form:
        return one.digest == other.digest and _beside_codes(one) == _beside_codes(other)
    rounding = Rounding()
    for start, stop in one.weight.pieces():
        rounding.add(one.weight.encoded(start, stop), other.weight.encoded(start, stop))
    return rounding.is_all
