"""The draft of a folder as its engines will read it: each by its own names, and by the config and
the lists that it follows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mtp_checkpoints.containers.base import CONFIG_NAME, TensorInfo
from mtp_checkpoints.errors import InvalidInputError, MtpExportError, UnsupportedError
from mtp_checkpoints.families.base import FLOATS, Role, weight_name
from mtp_checkpoints.families.engine_draft import EngineDraft
from mtp_checkpoints.families.parts import Moe
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.formats import mixes_groups_with_fp8
from mtp_checkpoints.layouts.base import (
    NVFP4_OF_MODELOPT,
    DraftReading,
    Engine,
    unquantized_drafts,
)
from mtp_checkpoints.quantization.absent import with_projection_listed
from mtp_checkpoints.quantization.fusion_rules import EXPERTS
from mtp_checkpoints.quantization.method import projections_of
from mtp_checkpoints.quantization.methods import METHODS, quant_config_of, undecoded_of
from mtp_checkpoints.quantization.mismatches import is_recomputed
from mtp_checkpoints.quantization.native import method_of, quantization_of
from mtp_checkpoints.quantization.readers import NotTriedError, with_renamed_entries
from mtp_checkpoints.quantization.sglang_quark import QuarkDraft
from mtp_checkpoints.quantization.stored import StoredModel, StoredWeight
from mtp_checkpoints.tensors.bundle_folder import MAIN
from mtp_export.progress import counted
from mtp_export.schemes import SCHEMES
from mtp_export.schemes.scheme import GRAFTED
from mtp_export.verify.check import (
    ENGINE,
    LEFT_OUT,
    TO_ADD,
    TO_TAKE,
    Item,
    Problem,
    failed,
    not_tested,
    verdict,
)
from mtp_export.verify.diagnosis.causes import lists
from mtp_export.verify.evidence.parts import PartLayout
from mtp_export.verify.files.described import undecoded_main
from mtp_export.verify.files.left_out import ListedDraft, lacking
from mtp_export.verify.files.tensor_problems import COPIED, sorted_out

if TYPE_CHECKING:
    from mtp_export.verify.context import Context

_EXCLUDE = "exclude"  # Quark's list
_Configs = tuple[Any, Any]  # a quantization_config as an engine takes it, and as it is written


def draft_items(context: Context, layout: PartLayout) -> Iterator[Item]:
    """The draft compared with what each engine that reads it expects."""
    tensors = layout.checkpoint.tensors
    of_main = _storages_of_main(context)
    chosen = context.options.engine_for(context.recorded_options)
    for engine in _readers(context, layout.stored.family):
        assert engine.draft_reading is not None, f"_readers returned {engine.name}"
        method = engine.draft_reading.method
        reader = f"{engine.title} ({method})" if method else engine.title
        name = f"{layout.name}: precision as {reader} reads it"
        if chosen not in (None, engine.name):
            yield not_tested(name, _chosen_words(context, chosen), data={LEFT_OUT: True})
            continue
        if unread := " and ".join(sorted(of_main - engine.storages)):
            yield not_tested(name, f"{engine.title} does not read a main model in {unread}")
            continue
        reading, draft = engine.draft_reading, engine.draft_reading.draft(layout.stored.family)
        config = layout.checkpoint.config
        if reading.by_main_config:
            if context.main is None:
                yield not_tested(name, "there is no main model, or it cannot be opened")
                continue
            config = context.main.config
            if (known := undecoded_main(context)) is not None:
                yield not_tested(name, known.why_not_tested)
                continue
        class_of = reading.by_class.get(method_of(quantization_of(config)))
        if class_of is not None and class_of(config) is None:
            yield not_tested(name, f"how {engine.title} renames these lists is not repeated here")
            continue
        written, config = quantization_of(config), with_renamed_entries(config, draft)
        if not context.is_bundle:
            main = context.main.tensors if context.main is not None else ()
            try:
                config = reading.reads(config, {*main, *tensors})
            except (UnsupportedError, InvalidInputError) as error:
                refused = isinstance(error, UnsupportedError) and chosen is None
                unknown = isinstance(error, NotTriedError)
                yield (
                    not_tested(name, str(error))
                    if unknown or refused  # by one that nobody asked for
                    else failed(name, str(error), subject=CONFIG_NAME, data={ENGINE: engine.name})
                )
                continue
            if draft.projection is None:
                config = with_projection_listed(config, tensors)
        plain = unquantized_drafts(draft, of_main)
        reason = _reason(engine, draft, plain, config)
        configs = (None if plain else quantization_of(config), written)
        item = _as_read(name, layout, engine, configs, reason)
        yield replace(item, data={**item.data, ENGINE: engine.name})


def _chosen_words(context: Context, engine: str) -> str:
    """Why a draft is judged for an engine alone."""
    if context.options.engine is None:
        return f"the bundle was made with --target {engine}"
    return f"--engine {engine} leaves it out"


def _reason(
    engine: Engine, draft: EngineDraft, plain: str | None, config: Mapping[str, Any]
) -> str:
    """Why an engine builds a draft as it does. plain: which drafts it builds unquantized."""
    assert engine.draft_reading is not None, f"_readers returned {engine.name}"
    if plain is not None:
        return lists.built_unquantized(engine.title, plain)
    if draft.layer is None:
        return engine.draft_reading.reason
    renames = draft.listed and method_of(quantization_of(config)) in draft.renames
    replaced = draft.listed[0][0] if renames else ""
    return lists.layer_known_as(engine.title, draft.layer, replaced)


def _storages_of_main(context: Context) -> set[str]:
    """Storages of the main part; the title of a method whose models have no layout here."""
    mains = (one.stored.kinds for one in context.layouts if one.name == MAIN)
    known = undecoded_of(context.main.config) if context.main is not None else None
    titles = {known.title} if known is not None and known.renames else set()
    return {kind.format.storage for kinds in mains for kind in kinds} | titles


def with_lists(
    item: Item, listed: ListedDraft, more: Mapping[str, Any] = MappingProxyType({})
) -> Item:
    """The item with the entries that lists lack, `more` of them, and that are too many."""
    to_add = {key: _joined(listed.to_add.get(key), one) for key, one in more.items()}
    data = {TO_ADD: {**listed.to_add, **to_add}, TO_TAKE: listed.to_take}
    return replace(item, data={**item.data, **{key: one for key, one in data.items() if one}})


def _joined(some: Any, more: Any) -> Any:
    """Entries of one list or object, and more of them."""
    if isinstance(more, Mapping):
        return {**(some or {}), **more}
    return [*dict.fromkeys([*(some or ()), *more])]


def _readers(context: Context, family: ModelSpec) -> list[Engine]:
    """Engines whose reading of the draft is known and that the bundle was written for.

    Integers beside fp8 in the main part, and configs that each describe one folder, are written for
    engines of the recorded dialect only. A graft records one where that alone describes the draft.
    So is a draft whose layer SGLang knows by the name of a main one.
    """
    base = str(context.recorded("base_quant"))
    scheme = SCHEMES.get(base)
    storages = scheme.recorded_storages(context.recorded_options) if scheme else frozenset()
    engines = [
        engine
        for engine in context.target.engines
        if engine.draft_reading is not None
        and storages <= engine.storages
        and (context.target.model_types is not None or engine.name in family.engines)
    ]
    of_dialect = [
        engine
        for engine in engines
        if engine.dialect is not None and engine.dialect.name == context.recorded("reader")
    ]
    own_config = any(engine.dialect and engine.dialect.own_config for engine in of_dialect)
    if base == GRAFTED:
        return of_dialect or engines
    renames = scheme is not None and not _names_layer(family)
    return of_dialect if own_config or renames or mixes_groups_with_fp8(storages) else engines


def _names_layer(family: ModelSpec) -> bool:
    """Return whether lists that are written here have SGLang's name of the draft's layer, which is
    built by them."""
    own, draft = [module.layer.prefix for module in family.mtp], family.sglang
    listed = {*own, *family.mtp_names, *map(draft.entry_of, own)}
    known = draft.by_config and not draft.modules
    return known and listed.issuperset(draft.name_of(own, one) for one in own)


def built_plain(context: Context, layout: PartLayout) -> tuple[list[str], str]:
    """Return the modules of a draft that all engines build unquantized whatever a config says, of
    those that are asked, and these in words."""
    chosen, config = context.options.engine, layout.stored.quantization
    found = {
        engine.title: _built_plain(layout, config, engine.draft_reading)
        for engine in _readers(context, layout.stored.family)
        if chosen in (None, engine.name) and engine.draft_reading is not None
    }
    first, *others = found.values() or [[]]
    return [one for one in first if all(one in own for own in others)], " and ".join(found)


def _built_plain(layout: PartLayout, config: Any, reading: DraftReading) -> list[str]:
    """Return the modules of a draft that an engine builds unquantized whatever a config says."""
    family = layout.stored.family
    draft, projections = reading.draft(family), projections_of(family)
    plain = [f"{module.layer.prefix}.{one}" for module in family.mtp for one in draft.plain]
    if draft.projection is None:
        own = _class_of(layout, config, reading)
        return [*plain, *(projections if own is None or not own.projection else ())]
    if draft.projection_in_nvfp4 or not config:
        return plain
    known = quant_config_of(config)
    built = {one: known.format_of(draft.projection or one, Role.ATTENTION) for one in projections}
    of_nvfp4 = (one for one, form in built.items() if form and form.storage in NVFP4_OF_MODELOPT)
    return [*plain, *of_nvfp4]


def _class_of(layout: PartLayout, config: Any, reading: DraftReading) -> QuarkDraft | None:
    """Return an engine's own class of a draft in the method of a config, where it matters."""
    class_of = reading.by_class.get(method_of(config)) if config else None
    return None if class_of is None else class_of(layout.checkpoint.config)


def _as_read(name: str, layout: PartLayout, engine: Engine, configs: _Configs, reason: str) -> Item:
    """The draft's tensors compared with what an engine expects by a quantization_config. reason:
    why it builds the draft as it does."""
    reading, (config, written) = engine.draft_reading, configs
    assert reading is not None, f"_readers returned {engine.name}"
    specs = [one.weight for one in layout.stored.weights.values()]
    tensors = _by_released_names(layout)
    family, draft = layout.stored.family, reading.draft(layout.stored.family)
    layers = tuple(dict.fromkeys(module.layer.prefix for module in family.mtp))
    rename = partial(draft.name_of, layers)
    named = tuple(filter(None, dict.fromkeys(map(rename, layers))))
    tensors = {rename(key): tensor for key, tensor in tensors.items()}
    refused, built = _refused(layout, reading), [*_built_quantized(layout, config, reading)]
    if refused:
        return verdict(name, refused, counted(len(specs), "weight"))
    try:
        read = layout.stored.reread(config, rename)
    except MtpExportError as error:
        cause = lists.misread_by_engine(reason, error)
        return failed(name, cause, subject="config.json")
    if not reading.loads_tables:
        tables = {_module_of(table) for table in read.tables.values()}
        tensors = {n: one for n, one in tensors.items() if n.rpartition(".")[0] not in tables}
        read = read.of_tensors(lambda spec: spec.role not in COPIED)
    listed = ListedDraft(
        read,
        tensors,
        config,
        named,
        written=written,
        rename=draft.entry_of,
        plain=_built_plain(layout, config, reading),
        engines=engine.title,
    )
    unread, problems = listed.unread(), listed.problems()
    if unread or problems or built:  # of which each tensor's are the consequence
        misread = partial(lists.misread_by_engine, reason)
        problems = [*(Problem(one.subject, misread(one.words)) for one in problems), *unread]
        found = [problem for problem, _ in built]
        problems += found if problems or draft.layer is None else _with_reason(reason, found)
        more = lacking(config, written, [module for _, module in built])
        return with_lists(verdict(name, problems, counted(len(specs), "weight")), listed, more)
    # What is missing or strange by the released names is said of these.
    absent = {*map(rename, layout.stored.tensors.keys() ^ layout.checkpoint.tensors.keys())}
    entries_are_own = named != tuple(dict.fromkeys(map(draft.entry_of, layers)))
    problems = _differing(tensors, read, absent, listed.plain, linears_alone=entries_are_own)
    to_add = {}
    if not problems and (built := [*_built_projections(layout, config, reading)]):
        problems, to_add = [one for one, _ in built], {_EXCLUDE: [module for _, module in built]}
    item = verdict(name, _with_reason(reason, problems), counted(len(specs), "weight"))
    return replace(item, data={**item.data, TO_ADD: to_add}) if to_add else item


def _with_reason(reason: str, problems: list[Problem]) -> list[Problem]:
    """The problems, the first of which says the reason too."""
    if not problems:
        return []
    first = problems[0]
    return [Problem(first.subject, lists.misread_by_engine(reason, first.words)), *problems[1:]]


def _built_quantized(
    layout: PartLayout, config: Any, reading: DraftReading
) -> Iterator[tuple[Problem, str]]:
    """Yield what is stored unquantized and is no matrix that a list is asked for, and that an
    engine builds quantized, each with its module: fused experts, and the projection of a module of
    names of its own."""
    if not config:
        return
    tensors, known = layout.checkpoint.tensors, quant_config_of(config)
    as_one = METHODS[method_of(config)].experts_as_one
    family = layout.stored.family
    draft, layers = reading.draft(family), [module.layer.prefix for module in family.mtp]
    plain = {weight_name(module) for module in _built_plain(layout, config, reading)}
    for name, single, role in _asked_as_others(family, draft, layers):
        layer, experts, _ = single.partition(EXPERTS)
        module = f"{layer}{experts.rstrip('.')}" if as_one else single
        built, tensor = known.format_of(module, role), tensors.get(name)
        if built is None or tensor is None or tensor.dtype not in FLOATS:
            continue
        if tensor.name not in plain:
            words = lists.built_quantized(name.removesuffix(".weight"), str(built.storage))
            yield Problem(name, words), module


def _built_projections(
    layout: PartLayout, config: Any, reading: DraftReading
) -> Iterator[tuple[Problem, str]]:
    """Yield unquantized projections that an engine's own class of this draft builds quantized, each
    with the module that the engine has."""
    known = _class_of(layout, config, reading)
    if known is None or not known.projection:
        return
    built = quant_config_of(config).format_of(known.projection, Role.MTP_PROJECTION)
    for module in (one.modules.projection for one in layout.stored.family.mtp):
        tensor = layout.checkpoint.tensors.get(weight_name(module)) if module else None
        if built is not None and tensor is not None and tensor.dtype in FLOATS:
            words = lists.projection_built(known.projection, str(built.storage), _EXCLUDE)
            yield Problem(tensor.name, words), known.projection


def _asked_as_others(
    family: ModelSpec, draft: EngineDraft, layers: Sequence[str]
) -> Iterator[tuple[str, str, Role]]:
    """Yield tensors of the MTP layers, each with the linear and the role that an engine asks its
    config for."""
    for module in family.mtp:
        layer, projection = module.layer, module.modules.projection
        if projection and draft.projection is not None:
            yield weight_name(projection), draft.projection or projection, Role.ATTENTION
        if isinstance(layer.feed_forward, Moe):
            for fused, single in layer.feed_forward.apart(layer.feed_forward_prefix).items():
                asked = draft.name_of(layers, single[0].removesuffix(".weight"))
                yield fused, asked, Role.ROUTED_EXPERT


def _refused(layout: PartLayout, reading: DraftReading) -> list[Problem]:
    """Tensors that an engine has no place for in a draft of this model, and that others skip."""
    if layout.checkpoint.config.get("model_type") not in reading.refuses_recomputed:
        return []
    names = filter(is_recomputed, layout.checkpoint.tensors)
    return [Problem(name, lists.recomputed_not_skipped(name)) for name in names]


def _differing(
    tensors: Mapping[str, TensorInfo],
    read: StoredModel,
    absent: Set[str],
    plain: Collection[str],
    *,
    linears_alone: bool,
) -> list[Problem]:
    """Problems of a draft as an engine reads it. absent: tensors of which nothing is said, nor of
    the scales that an engine expects beside one that is not there. plain: what it builds plain.
    linears_alone: a release names its other matrices by the layer, and none is asked."""
    presence, precision = sorted_out(read.differences(tensors), tensors, read)
    asked = {
        weight.tensors[0].name
        for weight in read.weights.values()
        if weight.weight.role not in (Role.MTP_PROJECTION, Role.ROUTER)
        and weight.weight.module not in plain
        and (weight.weight.is_linear_weight or not linears_alone)
    }
    lost = {name.rpartition(".")[0] for name in absent - tensors.keys()}
    return [
        *(
            problem
            for problem in presence
            if problem.subject not in absent and problem.subject.rpartition(".")[0] not in lost
        ),
        *(problem for problem in precision if problem.subject in asked),
    ]


def _module_of(weight: StoredWeight) -> str:
    return weight.tensors[0].name.rpartition(".")[0]


def _by_released_names(layout: PartLayout) -> Mapping[str, TensorInfo]:
    """A draft's tensors by the names that engines find their precision by; unknown ones keep
    theirs."""
    released = {
        tensor.name: name
        for one in layout.stored.weights.values()
        for tensor, name in zip(one.tensors, one.released_names, strict=True)
    }
    return {released.get(key, key): tensor for key, tensor in layout.checkpoint.tensors.items()}
