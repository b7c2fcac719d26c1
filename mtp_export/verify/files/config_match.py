"""config.json compared with the tensors: what it promises is there, in the precision that an engine
will take it for, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mtp_checkpoints.containers.base import CONFIG_NAME, TensorInfo, quantization_field
from mtp_checkpoints.errors import MtpExportError, UnsupportedError
from mtp_checkpoints.families.base import FLOATS
from mtp_checkpoints.families.facts import UnreleasedField
from mtp_checkpoints.families.signs import (
    COUNT_FIELDS,
    announced,
    count_field,
    main_layers,
    projection_in_main,
)
from mtp_checkpoints.quantization.fusion_rules import UnlikeLinears
from mtp_checkpoints.quantization.native import is_gguf, lacks_method, quantization_of
from mtp_checkpoints.tensors.bundle_folder import MAIN, MTP
from mtp_checkpoints.tensors.untied_head import TIED, UNTIED_HEAD
from mtp_export.progress import counted
from mtp_export.verify.check import (
    TO_ADD,
    TO_TAKE,
    Item,
    Problem,
    Status,
    failed,
    not_tested,
    verdict,
)
from mtp_export.verify.diagnosis.causes import configs as config_causes
from mtp_export.verify.diagnosis.causes import files as causes
from mtp_export.verify.diagnosis.causes.names import no_values_by_its_name
from mtp_export.verify.evidence.parts import Part, PartLayout
from mtp_export.verify.files.corrected import with_correction
from mtp_export.verify.files.described import (
    misdescribed,
    misdescribed_by_a_field,
    misdescribed_by_config,
    quantization_elsewhere,
    quantized_by_config_alone,
    quantized_without_config,
    undecoded_main,
)
from mtp_export.verify.files.engine_readings import built_plain, draft_items, with_lists
from mtp_export.verify.files.left_out import ListedDraft, lacking
from mtp_export.verify.files.list_entries import entries_to_blame
from mtp_export.verify.files.repair import graft_command
from mtp_export.verify.files.summed_up import of_lost_experts, of_one_rank
from mtp_export.verify.files.tensor_problems import NO_SUCH_TENSOR, sorted_out

if TYPE_CHECKING:
    from mtp_export.verify.context import Context


def run(context: Context) -> Iterator[Item]:
    """Each part compared with its own config, and the draft as its engines will read it."""
    if context.is_bundle:
        yield _advertised(context)
    yield from with_correction(context, [*_items(context)], _items)


def _items(context: Context) -> Iterator[Item]:
    wrong = (
        misdescribed_by_config(context)
        or quantization_elsewhere(context)
        or quantized_by_config_alone(context)
        or quantized_without_config(context)
    )
    if wrong is not None:
        yield wrong  # which all below would repeat
        return
    for part in context.parts:
        if part.checkpoint is None:
            yield not_tested(f"{part.name}: tensors", "it cannot be opened")
            continue
        try:
            layout = context.layout(part)
        except MtpExportError as error:
            wrong = misdescribed_by_a_field(context, part)
            yield wrong or _not_followed(context, part, error)
            yield from _lost_by_names(context, part)
            continue
        if not layout.stored.specs:  # config.json announces no such part: `presence` says so
            continue
        of_checkpoint = not context.is_bundle and len(context.parts) > 1
        if part.name == MTP and of_checkpoint and not is_gguf(layout.stored.quantization):
            found = _left_out(context, layout)
            if found.status is Status.FAIL:  # which precision would repeat
                yield from _left_out_by_engines(context, layout, found)
                yield _tensors_item(layout, _sorted_out(layout)[0])
                continue
            yield found
        if (wrong := misdescribed(context, layout)) is not None:
            yield wrong  # which all below would repeat
            continue
        yield from _part_items(layout, of_main=part.name == MAIN and not context.is_bundle)
        if part.name == MTP:
            yield from draft_items(context, layout)


def _left_out_by_engines(context: Context, layout: PartLayout, found: Item) -> Iterator[Item]:
    """The failure of the released names, or, where an engine finds the draft in order by its own,
    what each engine finds."""
    items = [*draft_items(context, layout)]
    yield from items if any(item.status is Status.PASS for item in items) else [found]


def _not_followed(context: Context, part: Part, error: MtpExportError) -> Item:
    """A config that no layout follows from: in a bundle damage, in another's checkpoint it may be
    of a model or a quantization that is not known here."""
    name = f"{part.name}: config"
    known = undecoded_main(context)
    if known is not None and part.name == MAIN:
        return not_tested(name, known.why_not_tested)
    config = {} if part.checkpoint is None else part.checkpoint.config
    if not context.is_bundle and lacks_method(quantization_of(config)):
        words = config_causes.no_method(quantization_field(config))
        return failed(name, words, subject=CONFIG_NAME)
    if not context.is_bundle and isinstance(error, UnsupportedError):
        ties = isinstance(error, UnreleasedField) and error.field == TIED
        if ties and part.checkpoint and UNTIED_HEAD in part.checkpoint.tensors:
            return failed(name, causes.tied_beside_a_head(UNTIED_HEAD), subject=CONFIG_NAME)
        return not_tested(name, str(error))
    data = (
        _unlike(context, part, error) if isinstance(error, UnlikeLinears) and error.left_out else {}
    )
    return failed(name, str(error), subject=str(part.place / CONFIG_NAME), data=data)


def _lost_by_names(context: Context, part: Part) -> Iterator[Item]:
    """The weights that a part lacks by its names alone, where its quantization is not read."""
    named = context.by_names.part(part.name)
    if context.by_names is context or named is None:
        return
    layout = context.by_names.layout(named)
    missing = (one for one in layout.differences if one.found == NO_SUCH_TENSOR)
    lost = [Problem(one.tensor, no_values_by_its_name(one.tensor)) for one in missing]
    if lost:
        lost = of_lost_experts(layout, lost) if part.name == MAIN else lost
        yield verdict(f"{part.name}: weights by their names", lost)


def _unlike(context: Context, part: Part, error: UnlikeLinears) -> dict[str, Any]:
    """The entries that leave out one of two linears that engines load together, where it is
    quantized, or that lack for the other, where that is not."""
    assert part.checkpoint is not None, "asked for a part that could not be opened"
    config = quantization_of(part.checkpoint.config)
    tensors = {
        name: one for own in context.checkpoints.values() for name, one in own.tensors.items()
    }
    if not _is_float(error.left_out, tensors):
        return {TO_TAKE: entries_to_blame(config, error.left_out)}
    if _is_float(error.quantized, tensors):
        return {TO_ADD: lacking(config, config, [error.quantized])}
    return {}


def _is_float(module: str, tensors: Mapping[str, TensorInfo]) -> bool:
    weight = tensors.get(f"{module}.weight")
    return weight is not None and weight.dtype in FLOATS


def _advertised(context: Context) -> Item:
    """The main config, which engines read, has the right number of MTP layers."""
    name = "MTP layers advertised"
    if context.main is None:
        return not_tested(name, "main/ is not there or cannot be opened")
    config = context.main.config
    found = announced(config)
    promised = 0 if found is None else found.count or 0
    has_part = context.part(MTP) is not None
    problems = []
    if promised and not has_part and context.recorded("part") != MAIN:
        problems.append(Problem("main/config.json", causes.advertised_without_mtp(promised)))
    if has_part and not promised:
        field = count_field(config).partition(" ")[0] or COUNT_FIELDS[0]
        problems.append(Problem("main/config.json", causes.mtp_layers_not_advertised(field)))
    return verdict(name, problems, str(promised))


def _part_items(layout: PartLayout, *, of_main: bool) -> Iterator[Item]:
    """The promised tensors are there, and each weight in the promised form. of_main: where a list
    leaves out what is quantized, its entry is named in place of the weights."""
    tensors, stored = layout.checkpoint.tensors, layout.stored
    presence, precision = _sorted_out(layout)
    data = {}
    if of_main and precision:
        names = [stored.weight_of[problem.subject].weight.name for problem in precision]
        listed = ListedDraft(stored, tensors, stored.quantization, (), "the main model")
        if by_lists := listed.by_lists(names):
            precision, data = by_lists, {TO_ADD: listed.to_add, TO_TAKE: listed.to_take}
    if of_main:
        presence, precision = of_lost_experts(layout, presence), of_one_rank(layout, precision)
    others = _of_other_layers(layout, presence) if of_main and presence else presence
    if presence and not others:
        yield not_tested(f"{layout.name}: tensors", causes.OF_MODULE_COUNTED_AS_MAIN)
    else:
        yield _tensors_item(layout, others)
    weights = counted(len(layout.stored.specs), "weight")
    item = verdict(f"{layout.name}: precision on disk", precision, weights)
    yield replace(item, data={**item.data, **data})


def _sorted_out(layout: PartLayout) -> tuple[list[Problem], list[Problem]]:
    return sorted_out(layout.differences, layout.checkpoint.tensors, layout.stored)


def _tensors_item(layout: PartLayout, presence: Sequence[Problem]) -> Item:
    figure = counted(len(layout.checkpoint.tensors), "tensor")
    return verdict(f"{layout.name}: tensors", presence, figure)


def _of_other_layers(layout: PartLayout, problems: Sequence[Problem]) -> list[Problem]:
    """Problems but for those of an MTP module that config.json counts among the main layers, of
    which check `presence` tells."""
    tensors, layers = layout.checkpoint.tensors, main_layers(layout.checkpoint.config)
    projection = projection_in_main(tensors, layers)
    if projection is None:
        return [*problems]
    layer = f"{'.'.join(projection.split('.')[:-2])}."
    return [problem for problem in problems if not problem.subject.startswith(layer)]


def _left_out(context: Context, layout: PartLayout) -> Item:
    """The draft of a checkpoint is quantized where its quantization_config says so."""
    stored = layout.stored
    plain, engines = built_plain(context, layout)
    layers = tuple(layer.layer.prefix for layer in stored.family.mtp)
    listed = ListedDraft(
        stored,
        layout.checkpoint.tensors,
        stored.quantization,
        layers,
        written=quantization_of(layout.checkpoint.config),
        plain=plain,
        engines=engines,
    )
    figure = counted(len(stored.weights), "weight")
    problems = [*listed.problems(), *listed.unread()]
    item = with_lists(verdict("mtp: left out of quantization as stored", problems, figure), listed)
    # A graft reads a main model by the same quantization_config, which then is what lacks.
    mended = problems and stored.quantization
    return replace(item, repair=graft_command(context)) if mended else item
