"""Check 2: every tensor is accounted for and looks like a weight of its kind: finite, written, of a
sane scale; and the draft's embedding and head are the main model's."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

from mtp_export.errors import MtpExportError, ResourceError, UnsupportedError
from mtp_export.progress import format_bytes
from mtp_export.schemes.storage import Storage
from mtp_export.schemes.transforms import one_torch_thread
from mtp_export.verify import gates
from mtp_export.verify.check import Item, Problem, Status, verdict
from mtp_export.verify.evidence.parallel import in_threads
from mtp_export.verify.files.layout import PartLayout, layouts
from mtp_export.verify.weights.tensor_facts import TensorFacts, facts_of
from mtp_export.verify.weights.values import WeightOnDisk, weights_on_disk

if TYPE_CHECKING:
    from mtp_export.verify.context import Context


def run(context: Context) -> Iterator[Item]:
    """The loader's ledger, then one pass over every tensor of each part."""
    yield _loader(context)
    found = layouts(context)
    for part in context.parts:
        if part.name not in [layout.name for layout in found]:
            why = "its config or index cannot be followed: see check files"
            yield Item(f"{part.name}: tensors", Status.NOT_TESTED, cause=why)
    facts = {layout.name: _facts(context, layout) for layout in found}
    every = [fact for part in facts.values() for fact in part]
    for layout in found:
        yield from _part_items(layout, facts[layout.name], every)
    yield _scales_alike(every)
    yield _no_twins(facts)
    yield from _shared(context, found)


def _loader(context: Context) -> Item:
    """What became of each tensor in the reference runtime; it refuses what nothing explains."""
    name = "runtime loads it: every tensor explained"
    if context.why_not_run is not None:
        return Item(name, Status.NOT_TESTED, cause=context.why_not_run)
    from mtp_runtime.models.build import LoadOptions

    try:
        ledger = context.loaded(LoadOptions(context.options.device)).ledger
    except (UnsupportedError, ResourceError) as error:
        return Item(name, Status.NOT_TESTED, cause=str(error))
    except MtpExportError as error:
        return Item(name, Status.FAIL, subject=str(error.where), cause=str(error))
    counts = {
        "expected": len(ledger.expected),
        "loaded": len(ledger.loaded),
        "tied": len(ledger.tied),
        "skipped": len(ledger.skipped),
    }
    figure = ", ".join(f"{count:,} {what}" for what, count in counts.items() if what != "expected")
    return Item(name, Status.PASS, figure, "0 unexplained", data=counts)


def _facts(context: Context, layout: PartLayout) -> list[TensorFacts]:
    weights = weights_on_disk(layout.stored, layout.checkpoint.tensors)
    total_bytes = sum(weight.size_bytes for weight in weights)
    title = f"{layout.name}: values"
    with context.show_progress(title, total_bytes) as progress, one_torch_thread():
        return list(
            in_threads(lambda weight: facts_of(weight, progress), weights, context.options.workers)
        )


def _part_items(
    layout: PartLayout, facts: Sequence[TensorFacts], every: Sequence[TensorFacts]
) -> Iterator[Item]:
    part, count = layout.name, f"{len(facts):,} weights"
    size = format_bytes(sum(fact.weight.size_bytes for fact in facts))
    yield verdict(
        f"{part}: finite values, sound scales",
        [Problem(f.weight.name, f"{f.weight.name}: {f.error}") for f in facts if f.error],
        f"{count}, {size}",
    )
    constant = [fact for fact in facts if fact.constant and _must_vary(fact, every)]
    yield verdict(
        f"{part}: no constant tensor",
        [Problem(f.weight.name, _constant_words(f)) for f in constant],
        count,
    )
    integer = [fact for fact in facts if fact.outer_share is not None]
    if integer:
        yield _codes(part, integer)
    native = [fact for fact in facts if fact.blocks]
    if native:
        yield _blocks(part, native)


def _must_vary(fact: TensorFacts, every: Sequence[TensorFacts]) -> bool:
    """A matrix always does; a vector does when others with its role do."""
    spec = fact.weight.stored.weight
    if len(spec.shape) == 2:
        return True
    return any(
        not other.constant and not other.error
        for other in every
        if other.weight.stored.weight.role is spec.role
        and len(other.weight.stored.weight.shape) == 1
    )


def _constant_words(fact: TensorFacts) -> str:
    value = "zero" if fact.rms == 0 else f"{fact.rms:.4g}"
    return (
        f"{fact.weight.name} is constant ({value}): it was never written, or dropped and filled in"
    )


def _codes(part: str, facts: Sequence[TensorFacts]) -> Item:
    wrong = [fact for fact in facts if (fact.outer_share or 0.0) > gates.OUTER_CODES]
    problems = []
    for fact in wrong:
        offset = 128 if fact.weight.stored.storage is Storage.INT8_CHANNEL else 8
        words = (
            f"{fact.weight.name}: {fact.outer_share:.0%} of its codes lie at the ends of their"
            f" range: the offset {offset} was dropped (or added) when they were packed"
        )
        problems.append(Problem(fact.weight.name, words))
    most = max(fact.outer_share or 0.0 for fact in facts)
    item = verdict(
        f"{part}: codes around zero", problems, f"{len(facts):,} weights",
        f"≤ {gates.OUTER_CODES:.0%} outside",
    )  # fmt: skip
    return item if problems else Item(item.name, item.status, f"≤ {most:.0%} outside", item.bound)


def _blocks(part: str, facts: Sequence[TensorFacts]) -> Item:
    """A scale rounded to a power of two after quantizing shows: every block still fills its
    codes, which a scale rounded before never makes it do."""
    rounded = [fact for fact in facts if fact.power_of_two_scales]
    blocks = sum(fact.blocks for fact in rounded)
    share = sum(fact.full_blocks for fact in rounded) / max(1, blocks)
    problems = []
    if len(rounded) > len(facts) / 2 and share > gates.FULL_BLOCKS:
        name = rounded[0].weight.name
        words = (
            f"scales are powers of two (ue8m0), yet {share:.0%} of the blocks reach the largest"
            f" code, as in {name}: the scales were rounded after the weights were quantized, which"
            " puts weights off by up to a factor of two"
        )
        problems.append(Problem(name, words))
    return verdict(f"{part}: fp8 scales fit their codes", problems, f"{len(facts):,} weights")


def _kind(name: str) -> str:
    """A weight's name without its layer and expert; an MTP layer's is of the same kind."""
    return re.sub(r"\.\d+\.", ".*.", name)


def _scales_alike(facts: Sequence[TensorFacts]) -> Item:
    """The root mean square of matrices, absolute and against the others of their kind."""
    kinds: dict[str, list[TensorFacts]] = defaultdict(list)
    for fact in facts:
        if not fact.error and not fact.constant and len(fact.weight.stored.weight.shape) == 2:
            kinds[_kind(fact.weight.stored.weight.name)].append(fact)
    problems, most = [], 1.0
    for alike in kinds.values():
        middle = median(fact.rms for fact in alike)
        for fact in alike:
            ratio = max(fact.rms / middle, middle / fact.rms)
            most = max(most, ratio)
            low, high = gates.RMS_RANGE
            if ratio > gates.RMS_RATIO or not low <= fact.rms <= high:
                words = (
                    f"{fact.weight.name} has a root mean square of {fact.rms:.3g}, others of its"
                    f" kind {middle:.3g}: its scale is inverted, left out or another tensor's, or"
                    " it holds memory that was never written"
                )
                problems.append(Problem(fact.weight.name, words))
    figure = f"up to {most:.3g} times its kind's median"
    bound = f"≤ {gates.RMS_RATIO:.0f} times"
    item = verdict("sane size of every matrix", problems, figure, bound)
    return item if problems else Item(item.name, item.status, figure, bound)


def _no_twins(facts: dict[str, list[TensorFacts]]) -> Item:
    """No two linears hold the same codes: one was taken for the other."""
    first: dict[tuple[str, tuple[int, ...]], TensorFacts] = {}
    problems = []
    for fact in (fact for part in facts.values() for fact in part):
        spec = fact.weight.stored.weight
        if fact.error or fact.constant or not spec.is_linear_weight:
            continue
        twin = first.setdefault((fact.digest, spec.shape), fact)
        if twin is not fact:
            words = f"{fact.weight.name} holds the same as {twin.weight.name}: one was taken for"
            problems.append(Problem(fact.weight.name, f"{words} the other"))
    return verdict("no linear stands twice", problems)


def _shared(context: Context, found: Sequence[PartLayout]) -> Iterator[Item]:
    """The draft's embedding and head are the main model's: engines use those for both."""
    if len(found) < 2:
        return
    main, draft = (
        {weight.stored.weight.name: weight for weight in weights_on_disk(part.stored, tensors)}
        for part in found
        for tensors in (part.checkpoint.tensors,)
    )
    for pair in found[0].stored.family.shared:
        own, original = draft.get(pair.mtp_name), main.get(pair.main_name)
        name = f"draft's {pair.mtp_name.split('.', 3)[3]} is the main model's"
        if own is None or original is None:
            why = "not in the bundle: engines take the main model's"
            yield Item(name, Status.NOT_TESTED, cause=why)
        elif _equal(own, original):
            yield Item(name, Status.PASS, format_bytes(own.size_bytes))
        elif context.recorded("allow_untied"):
            why = "it differs, and was exported with --allow-untied"
            yield Item(name, Status.NOT_TESTED, subject=own.name, cause=why)
        else:
            words = (
                f"{own.name} differs from {original.name}: the draft is of another checkpoint than"
                " the main model (a V3 draft with an R1 main?)"
            )
            yield verdict(name, [Problem(own.name, words)])


def _equal(one: WeightOnDisk, other: WeightOnDisk) -> bool:
    import torch

    return all(
        torch.equal(one.encoded(start, stop).codes, other.encoded(start, stop).codes)
        for start, stop in one.pieces()
    )
