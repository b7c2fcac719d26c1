"""Values of every tensor: each looks like a weight of its kind (finite, written, in proportion)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING

from mtp_checkpoints.families.base import FLOATS, Role
from mtp_checkpoints.families.signs import in_layer, main_layers, projection_in_main
from mtp_checkpoints.tensors.bundle_folder import MAIN, MTP
from mtp_checkpoints.weights.weight_values import WeightOnDisk
from mtp_export.progress import counted, format_bytes
from mtp_export.verify import gates
from mtp_export.verify.check import (
    KNOWS_MORE,
    Item,
    Problem,
    failed,
    not_tested,
    verdict,
)
from mtp_export.verify.diagnosis.causes import parts_lost
from mtp_export.verify.diagnosis.causes import weights as causes
from mtp_export.verify.evidence.parts import PartLayout
from mtp_export.verify.evidence.unwritten import WRITTEN
from mtp_export.verify.evidence.weight_facts import WeightFacts
from mtp_export.verify.weights.extents import not_finite_words
from mtp_export.verify.weights.folded_norms import folded_item, folded_norms, folded_with
from mtp_export.verify.weights.main_layer_copies import in_other_formats, vectors_taken
from mtp_export.verify.weights.sizes import (
    has_scales_of_one,
    parts_alike,
    scales_alike,
    varies,
    written_facts,
)
from mtp_export.verify.weights.table_copies import copies_of_tables

if TYPE_CHECKING:
    from mtp_export.verify.context import Context

_SCALES = 3  # of a weight's tensors: its codes, their scales, and a number of the whole matrix
_FEW = 16  # values, whose sizes tell nothing
_MOST_OF = (0.1, 0.9)  # of sizes: where most of them begin and end
# Roles whose matrices no training leaves equal, beside those of linears.
_NOT_QUANTIZED = frozenset(
    {
        *(Role.ROUTER, Role.ATTENTION_GATES, Role.CONVOLUTION, Role.DELTA_GATES),
        Role.INDEXER_HEADS,
    }
)


def run(context: Context) -> Iterator[Item]:
    """One pass over every tensor of each part, then the parts beside each other."""
    found, followed = context.read_layouts, {layout.name for layout in context.layouts}
    for part in context.parts:
        if part.name not in followed:
            why = "its config or index cannot be followed: see check files"
            yield not_tested(f"{part.name}: tensors", why)
        elif part.name not in {layout.name for layout in found}:
            yield not_tested(f"{part.name}: tensors", "the MTP module's bytes alone are downloaded")
    facts = {layout.name: context.walks.of(layout.name).facts for layout in found}
    every = [fact for part in facts.values() for fact in part]
    for one in context.unwritten:
        words = parts_lost.not_written_to_its_end(
            str(one.file), (one.start, one.stop, one.size), one.first, len(one.tensors)
        )
        yield failed(WRITTEN, words, subject=str(one.file))
    of_main = frozenset[str]()
    written = {name: written_facts(context, part) for name, part in facts.items()}
    for layout in found:
        own = written[layout.name]
        of_main = folded_norms(layout, own) if layout.name == MAIN else of_main
        folded = of_main if layout.name == MAIN else folded_with(of_main, layout, own)
        yield from _part_items(layout, own, every, folded)
        yield from _opaque(layout)
    if every:
        yield scales_alike([fact for part in written.values() for fact in part])
    if MAIN in facts and MTP in facts:
        offset = found[0].stored.family.facts.norm_offset
        yield from parts_alike(written[MAIN], written[MTP], offset)
        yield from in_other_formats(written[MAIN], written[MTP])
        yield vectors_taken(written[MAIN], written[MTP])
    if every:
        yield _no_twins(context, written)
    yield from copies_of_tables(context, found, facts)


def _part_items(
    layout: PartLayout,
    facts: Sequence[WeightFacts],
    every: Sequence[WeightFacts],
    folded: frozenset[str],
) -> Iterator[Item]:
    part, count = layout.name, counted(len(facts), "weight")
    size = format_bytes(sum(fact.weight.size_bytes for fact in facts))
    yield verdict(
        f"{part}: finite values, sound scales",
        [Problem(f.weight.name, words) for f in facts if (words := _why_unsound(f))],
        f"{count}, {size}",
    )
    sound = [fact for fact in facts if fact.statistics.is_sound]
    flat = [f for f in sound if f.statistics.is_constant and _must_vary(f, every)]
    constant = [f for f in flat if f.weight.name not in folded]
    yield verdict(
        f"{part}: no constant tensor",
        [Problem(f.weight.name, _constant_words(f)) for f in constant],
        count,
    )
    if len(constant) < len(flat):  # of a model that was trained
        yield folded_item(
            part, folded, sum(f.weight.stored.weight.role is Role.NORM for f in facts)
        )
    integer = [f for f in sound if f.weight.stored.format.code_offset is not None]
    if integer:
        yield _codes(part, integer)
    native = [fact for fact in sound if fact.statistics.blocks]
    if native:
        yield _blocks(part, native)


def _opaque(layout: PartLayout) -> Iterator[Item]:
    """The tensors of a part in types that nothing decodes."""
    tensors = layout.checkpoint.opaque
    if tensors:
        yield not_tested(
            f"{layout.name}: values of every tensor",
            causes.not_decoded(sorted({one.dtype.removeprefix("GGML_") for one in tensors})),
            figure=f"{counted(len(tensors), 'tensor')} not read",
            subject=tensors[0].name,
        )


def _why_unsound(fact: WeightFacts) -> str:
    """Find the values that are not finite, by dequantizing, or are no norm's; "" for none."""
    import torch

    if fact.statistics.is_sound and ((words := _why_memory(fact)) or not _is_huge(fact)):
        return words
    weight, wrong, huge = fact.weight, list[torch.Tensor](), False
    for start, stop in weight.pieces():
        try:
            values = weight.encoded(start, stop).dequantize()
            wrong.append(~(values.abs() <= gates.LARGEST_VALUE))
            huge |= bool((wrong[-1] & values.isfinite()).any())
        except ValueError as error:
            first, last = _undecodable(weight, start, stop)
            return causes.unsound(weight.name, causes.not_decodable(first, last, error))
    found = torch.cat(wrong)  # beside values that are not finite, those that no weight has
    assert found.any(), f"{weight.name}: its statistics are unsound, its values are not"
    return causes.unsound(weight.name, not_finite_words(found, huge=huge))


def _is_huge(fact: WeightFacts) -> bool:
    """Return whether a vector has values that no weight has; of a matrix the size tells."""
    ends = abs(fact.statistics.low), abs(fact.statistics.high)
    return len(fact.weight.stored.weight.shape) == 1 and max(ends) > gates.LARGEST_VALUE


def _why_memory(fact: WeightFacts) -> str:
    """Say of a norm that its values are memory that was never written, whose bits are any: most of
    them lie too far apart in size."""
    import torch

    weight, spec = fact.weight, fact.weight.stored.weight
    if spec.role is not Role.NORM or len(spec.shape) > 1 or fact.statistics.is_constant:
        return ""
    sizes = weight.encoded(0, weight.rows).dequantize().double().abs()
    sizes = sizes[sizes > 0]
    ends = sizes.quantile(torch.tensor(_MOST_OF, dtype=sizes.dtype)).tolist()
    if len(sizes) < _FEW or ends[1] / ends[0] <= gates.NORM_SPREAD:
        return ""
    return causes.unsound(weight.name, parts_lost.memory(*ends))


def _undecodable(weight: WeightOnDisk, start: int, stop: int) -> tuple[int, int]:
    """Return the first and the last of some rows that cannot be decoded: those whose scales are not
    finite, else all."""
    try:
        scale = weight.encoded(start, stop).scale_apart
    except ValueError:
        return start, stop - 1
    if scale is None or scale.dim() < 2:
        return start, stop - 1
    wrong = (~scale.float().isfinite()).flatten(1).any(dim=1).nonzero().flatten().tolist()
    rows = -(-(stop - start) // len(scale))  # of one scale
    if not wrong:
        return start, stop - 1
    return start + wrong[0] * rows, min(stop, start + (wrong[-1] + 1) * rows) - 1


def _must_vary(fact: WeightFacts, every: Sequence[WeightFacts]) -> bool:
    """True for every matrix, and for a vector if one of its kind varies; in a model that was
    trained, whose norms vary, for every router's bias, and for another if one of its role does."""
    spec = fact.weight.stored.weight
    if len(spec.shape) > 1:
        return True
    others = [one.weight.stored.weight for one in every if varies(one)]
    vectors = [one for one in others if len(one.shape) == 1]
    if any(in_layer(one.name)[1] == in_layer(spec.name)[1] for one in vectors):
        return True
    roles = {one.role for one in vectors}
    return Role.NORM in roles and (_is_router_bias(fact) or spec.role in roles)


def _constant_words(fact: WeightFacts) -> str:
    own = fact.statistics.low
    if own == 0 and (lost := _lost_scale(fact.weight)):
        return parts_lost.scale_never_written(fact.weight.name, *lost)
    value = "zero" if own == 0 else f"{own:.4g}"
    words = causes.router_bias_dropped if _is_router_bias(fact) else causes.never_written
    return words(fact.weight.name, value)


def _lost_scale(weight: WeightOnDisk) -> tuple[str, str] | None:
    """Return the scale of a weight by which every value of it is zero, and what it is."""
    for tensor, values in zip(weight.tensors[1:_SCALES], weight.others, strict=False):
        sizes = values.float().abs() if tensor.dtype in FLOATS else None
        if sizes is not None and (float(sizes.max()) == 0 or float(sizes.min()) == float("inf")):
            return tensor.name, "infinite" if sizes.max() else "zero"
    return None


def _is_router_bias(fact: WeightFacts) -> bool:
    spec = fact.weight.stored.weight
    return spec.role is Role.ROUTER and len(spec.shape) == 1


def _codes(part: str, facts: Sequence[WeightFacts]) -> Item:
    problems, most = [], 0.0
    for fact in facts:
        name, offset = fact.weight.name, fact.weight.stored.format.code_offset
        share = fact.statistics.outer_codes / max(1, fact.statistics.elements)
        most = max(most, share)
        if share == 1:
            problems.append(Problem(name, causes.every_code_at_an_end(name)))
        elif share > gates.OUTER_CODES and offset is not None:
            problems.append(Problem(name, causes.offset_dropped_from(name, share, offset)))
    return verdict(
        f"{part}: codes around zero",
        problems,
        figure=counted(len(facts), "weight") if problems else f"≤ {most:.0%} outside",
        bound=f"≤ {gates.OUTER_CODES:.0%} outside",
    )


def _blocks(part: str, facts: Sequence[WeightFacts]) -> Item:
    """Scales were not rounded to powers of two after quantizing: that leaves nearly every block
    reaching the largest code, which scales rounded before quantizing do not."""
    rounded = [fact for fact in facts if fact.statistics.power_of_two_scales]
    blocks = sum(fact.statistics.blocks for fact in rounded)
    share = sum(fact.statistics.full_blocks for fact in rounded) / max(1, blocks)
    problems = []
    is_many = len(rounded) > len(facts) / 2 and share > gates.FULL_BLOCKS
    if is_many and not all(has_scales_of_one(fact.weight) for fact in rounded):
        name = rounded[0].weight.name
        problems.append(Problem(name, causes.scales_rounded_late(name, share)))
    return verdict(f"{part}: fp8 scales fit their codes", problems, counted(len(facts), "weight"))


def _no_twins(context: Context, facts: Mapping[str, Sequence[WeightFacts]]) -> Item:
    """No two linears hold the same codes, nor two other matrices of layers the same values."""
    first: dict[tuple[str, tuple[int, ...]], WeightFacts] = {}
    twins: list[tuple[str, str]] = []
    for fact in (fact for part in facts.values() for fact in part):
        if not varies(fact) or not _is_like_no_other(fact):
            continue
        twin = first.setdefault((fact.digest, fact.weight.stored.weight.shape), fact)
        if twin is not fact:
            twins.append((fact.weight.name, twin.weight.name))
    over, twins = _overwritten(context, twins)
    problems = [*taken(twins, causes.taken_for_another)]
    item = verdict("no matrix of a layer is stored twice", [*over, *problems])
    # `presence` tells by names alone, which may also be those of a module that is whole.
    return replace(item, data={**item.data, KNOWS_MORE: True}) if over else item


def _is_like_no_other(fact: WeightFacts) -> bool:
    """True for a matrix of a layer; tables may be shared."""
    spec = fact.weight.stored.weight
    if spec.role in _NOT_QUANTIZED:
        return len(spec.shape) > 1 and fact.weight.tensors[0].dtype in FLOATS
    return spec.is_linear_weight


def taken(
    twins: Sequence[tuple[str, str]], words_of: Callable[[str, str, int], str]
) -> Iterator[Problem]:
    """Yield a problem per twin, those of one layer in another's place in the same words."""
    found: dict[tuple[str, ...], list[tuple[str, str]]] = defaultdict(list)
    for one, other in twins:
        (own_layer, own), (layer, theirs) = in_layer(one), in_layer(other)
        is_place = own_layer and layer and own == theirs
        found[(own_layer, layer) if is_place else (one, other)].append((one, other))
    for pairs in found.values():
        own, theirs = (_beginning(names) for names in zip(*pairs, strict=True))
        words = words_of(own, theirs, len(pairs))
        yield from (Problem(one, words) for one, _ in pairs)


def _beginning(names: Sequence[str]) -> str:
    """Return the components that some names begin with."""
    components = zip(*(name.split(".") for name in names), strict=False)
    same = takewhile(lambda ones: len({*ones}) == 1, components)
    return ".".join(ones[0] for ones in same)


def _overwritten(
    context: Context, twins: Sequence[tuple[str, str]]
) -> tuple[list[Problem], list[tuple[str, str]]]:
    """The module among the main layers that holds one of them, and the other twins."""
    main = context.main
    layers = None if main is None else main_layers(main.config)
    projection = projection_in_main(() if main is None else main.tensors, layers)
    if projection is None:
        return [], [*twins]
    layer = f"{'.'.join(projection.split('.')[:3])}."
    own = [pair for pair in twins if pair[0].startswith(layer)]
    problems = []
    if own:
        other = ".".join(own[0][1].split(".")[:3])
        words = causes.overwritten_by_main(layer.rstrip("."), other, len(own))
        problems.append(Problem(projection, words))
    return problems, [pair for pair in twins if pair not in own]
