"""Check `weights`: the weights are the source's, copied tensors bit for bit, converted ones within
the quantization noise of their form."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from mtp_checkpoints.containers.base import CONFIG_NAME
from mtp_checkpoints.families.signs import flattened
from mtp_checkpoints.quantization.native import DTYPE_KEYS, QUANTIZATION_FIELDS
from mtp_checkpoints.sources.byte_source import Place
from mtp_checkpoints.tensors.bundle_folder import MAIN, MTP
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_checkpoints.tensors.untied_head import with_head_like
from mtp_checkpoints.weights.weight_values import WeightOnDisk
from mtp_export.bundle.tuning import trainings_of
from mtp_export.progress import counted, format_bytes
from mtp_export.verify.check import Item, Problem, not_tested, verdict
from mtp_export.verify.diagnosis.causes import weights as causes
from mtp_export.verify.diagnosis.weight_bugs import explain, explain_within
from mtp_export.verify.evidence.parts import Part, PartLayout
from mtp_export.verify.evidence.weight_facts import AgainstSource, WeightFacts
from mtp_export.verify.weights.moved_layers import moved_layers
from mtp_export.verify.weights.others_main import (
    compared_by_values,
    unlike_and_scaled,
    unscaled_problems,
)

if TYPE_CHECKING:
    from mtp_export.verify.context import Context

_NUMBER = re.compile(r"layers\.(\d+)\.")
_EXPLAINED = 3  # wrong weights per item whose cause is looked for
_NOTHING_DB = 3.0  # of a weight that is another
_BELOW_DB = 1.0  # below the median of its role and form, a weight within its bound is looked into
_WORST = 10  # weights per item that are named in data


@dataclass(frozen=True)
class Compared:
    """A weight, and its comparison with the source's."""

    weight: WeightOnDisk
    against: AgainstSource

    @property
    def sqnr_db(self) -> float | None:
        """Infinite if nothing was lost, None for a copied weight."""
        difference = self.against.difference
        return None if difference is None else difference.sqnr_db

    @property
    def max_error(self) -> float:
        return 0.0 if self.against.difference is None else self.against.difference.largest

    @property
    def failed(self) -> bool:
        """True if the weight is not the source's within the bound of its form."""
        if self.against.error:
            return True
        if self.sqnr_db is None:
            return not self.against.equal
        return self.sqnr_db < self.weight.stored.format.gate.sqnr_db

    @property
    def layer(self) -> int | None:
        """The decoder layer, None for a weight outside them."""
        found = _NUMBER.search(self.weight.stored.weight.name)
        return None if found is None else int(found[1])


def run(context: Context) -> Iterator[Item]:
    """Every weight compared with --source; without one, the figures that the export recorded."""
    if context.source is None:
        yield from _recorded(context)
        return
    yield _config(context, _original_config(context, context.source))
    source_weights = context.source_weights
    assert source_weights is not None, "there is a source"
    if (moved := moved_layers([*_wrong(context)], source_weights.weights)) is not None:
        yield moved
    for layout in context.layouts:
        facts = context.walks.of(layout.name).facts
        if layout.name in context.parts_of_others:
            yield from compared_by_values(facts, layout.stored.family, source_weights.weights)
            continue
        names = [one.weight.stored.weight.name for one in facts if one.against is None]
        alone = [Problem(name, causes.not_in_source(name)) for name in names]
        compared = [Compared(one.weight, one.against) for one in facts if one.against is not None]
        for failure in (one.against.failure for one in compared if one.against.failure):
            raise failure
        yield verdict(f"{layout.name}: weights that the source has", alone, f"{len(compared):,}")
        tuned = _tuned(context, layout.name, compared)
        if tuned:
            why = "the manifest records that tune trained them: they are the source's no more"
            yield not_tested(f"{layout.name}: tuned weights", why, figure=f"{len(tuned):,}")
        scaled, unscaled = _scaled(context, layout, facts)
        if scaled:
            name, figure = "scales of channels that others undo", counted(len(scaled), "weight")
            yield verdict(f"{layout.name}: {name}", unscaled, figure)
        kept = [one for one in compared if one.weight.name not in tuned | scaled]
        yield from _part_items(layout.name, kept, source_weights.weights, _named(context))
    yield _tokenizers(context)


def _wrong(context: Context) -> Iterator[WeightOnDisk]:
    """Yield the weights of all parts that are not the source's: of parts that another tool
    quantized, with scales that it may have moved, those that have next to nothing of it."""
    for layout in context.layouts:
        of_others = layout.name in context.parts_of_others
        for fact in context.walks.of(layout.name).facts:
            if fact.against is None:
                continue
            compared = Compared(fact.weight, fact.against)
            is_near = (compared.sqnr_db or -math.inf) >= _NOTHING_DB
            if compared.failed and not (of_others and is_near):
                yield fact.weight


def _scaled(
    context: Context, layout: PartLayout, facts: Sequence[WeightFacts]
) -> tuple[set[str], list[Problem]]:
    """Names of the weights of a part that another tool quantized with scales that it moved, and
    problems of those that lack such scales."""
    if not context.parts_of_others or context.is_bundle:
        return set(), []
    wrong, scaled = unlike_and_scaled(facts, layout.stored.family)
    return {fact.weight.name for fact in scaled}, unscaled_problems(wrong)


def _named(context: Context) -> frozenset[str]:
    """Return the tensors, and other subjects, of which check files told that they are damaged."""
    items = context.failures.get("files", ())
    return frozenset(one["subject"] for item in items for one in item.data.get("problems", ()))


def _tuned(context: Context, part: str, compared: Sequence[Compared]) -> set[str]:
    """Names of the weights that tuning was to change, by the manifest."""
    training = (context.recorded("tune") or {}).get(MTP)
    if part != MTP or training is None:
        return set()
    if training == trainings_of(context.options.source).get(MTP):
        return set()  # the source has the same training behind it
    from mtp_runtime.training.weights import is_trained

    return {one.weight.name for one in compared if is_trained(one.weight.stored.weight)}


def _part_items(
    part: str,
    compared: Sequence[Compared],
    weights: Mapping[str, WeightOnDisk],
    named: Collection[str],
) -> Iterator[Item]:
    """Items about the weights of a part. named: tensors of which an earlier check told damage."""
    copied = [one for one in compared if one.sqnr_db is None and not one.against.error]
    if copied:
        size = format_bytes(sum(one.weight.size_bytes for one in copied))
        wrong = [one for one in copied if one.failed]
        yield verdict(
            f"{part}: copied weights",
            _problems(wrong, weights),
            figure=f"{len(copied):,}, {size}",
            bound="bit for bit",
        )
    groups: dict[tuple[str, str], list[Compared]] = defaultdict(list)
    for one in compared:
        if one.sqnr_db is not None or one.against.error:
            key = one.weight.stored.storage, str(one.weight.stored.weight.role)
            groups[key].append(one)
    for (storage, role), group in groups.items():
        yield _group_item(f"{part}: {role} as {storage}", group, weights, named)


def _group_item(
    name: str,
    group: Sequence[Compared],
    weights: Mapping[str, WeightOnDisk],
    named: Collection[str],
) -> Item:
    """SQNR of the weights of one role and form; the worst are named in data."""
    ordered = sorted(group, key=lambda one: -math.inf if one.sqnr_db is None else one.sqnr_db)
    levels = [one.sqnr_db for one in ordered if one.sqnr_db is not None]
    wrong = [one for one in ordered if one.failed]
    least = median(levels) - _BELOW_DB if levels else -math.inf
    apart = [one for one in ordered if not one.failed and (one.sqnr_db or math.inf) < least]
    bound = f"≥ {group[0].weight.stored.format.gate.sqnr_db:.0f} dB"
    figure = f"{len(group):,}: exact"
    if levels and levels[0] < math.inf:
        figure = f"{len(group):,}: min {_db(levels[0])}, median {_db(median(levels))}"
    unnamed = [one for one in apart if not any(t.name in named for t in one.weight.tensors)]
    problems = [*_problems(wrong, weights), *_problems_within(unnamed[:_EXPLAINED])]
    item = verdict(name, problems, figure=figure, bound=bound)
    subject = item.subject or ordered[0].weight.name
    return replace(item, subject=subject, data={**item.data, **_data(ordered)})


def _data(ordered: Sequence[Compared]) -> dict[str, Any]:
    by_layer: dict[int, list[float]] = defaultdict(list)
    for one in ordered:
        if one.sqnr_db is not None and math.isfinite(one.sqnr_db) and one.layer is not None:
            by_layer[one.layer].append(one.sqnr_db)
    return {
        "storage": str(ordered[0].weight.stored.storage),
        "role": str(ordered[0].weight.stored.weight.role),
        "max_error": max(one.max_error for one in ordered),
        "sqnr_db_by_layer": [
            {"layer": layer, "min": round(min(values), 2), "median": round(median(values), 2)}
            for layer, values in sorted(by_layer.items())
        ],
        "worst": [
            {"tensor": one.weight.name, "sqnr_db": _finite(one.sqnr_db), "max_error": one.max_error}
            for one in ordered[:_WORST]
        ],
    }


def _finite(sqnr_db: float | None) -> float | None:
    return round(sqnr_db, 2) if sqnr_db is not None and math.isfinite(sqnr_db) else None


def _db(value: float) -> str:
    return "exact" if value == math.inf else f"{value:.1f} dB"


def _problems(wrong: Sequence[Compared], weights: Mapping[str, WeightOnDisk]) -> list[Problem]:
    """Problems of wrong weights, the first few with their causes."""
    problems = []
    for number, one in enumerate(wrong):
        level = None if one.sqnr_db is None else _db(one.sqnr_db)
        cause = None
        if number < _EXPLAINED:
            cause = one.against.error or explain(one.weight, one.against.source, weights)
        problems.append(
            Problem(one.weight.name, causes.not_the_sources(one.weight.name, level, cause))
        )
    return problems


def _problems_within(apart: Sequence[Compared]) -> Iterator[Problem]:
    """Problems of weights within the bound of their form that lie apart from others of their role:
    the bound leaves room for other scales, and for a few rows that are not the source's."""
    for one in apart:
        cause = explain_within(one.weight, one.against.source)
        if cause is not None:
            level = None if one.sqnr_db is None else _db(one.sqnr_db)
            words = causes.not_the_sources(one.weight.name, level, cause)
            yield Problem(one.weight.name, words)


def _original_config(context: Context, source: Checkpoint) -> Mapping[str, Any]:
    """Return the source's config.json, which says of a head that is the embedding what it says of
    one that was quantized."""
    return source.config if context.main is None else with_head_like(source, context.main).config


def _config(context: Context, source: Mapping[str, Any]) -> Item:
    """config.json equals the source's but for the storage of weights."""
    problems: list[Problem] = []
    count = 0
    of_place: dict[Place, Part] = {}  # a checkpoint's parts have one config
    for part in (part for part in context.parts if part.name not in context.parts_of_others):
        of_place.setdefault(part.place, part)
    for part in of_place.values():
        found = {} if part.checkpoint is None else flattened(part.checkpoint.config)
        wanted = flattened(source if part.name == MAIN else context.target.mtp_config(source))
        keys = sorted(_compared_fields(context, found, wanted)) if found else []
        count += len(keys)
        for key in keys:
            if found.get(key) != wanted.get(key):
                file = f"{part.name}/{CONFIG_NAME}" if context.is_bundle else CONFIG_NAME
                words = causes.config_differs(
                    key, found=found.get(key), wanted=wanted.get(key), file=file
                )
                problems.append(Problem(file, words))
    return verdict(
        "config is the source's", problems, figure=counted(count, "value"), bound="all but storage"
    )


# Fields that tools write of themselves.
_OF_TOOLS = QUANTIZATION_FIELDS | {*DTYPE_KEYS, "transformers_version", "_name_or_path"}


def _compared_fields(
    context: Context, found: Mapping[str, Any], wanted: Mapping[str, Any]
) -> set[str]:
    """Fields to compare: all of a bundle, and of another's checkpoint those that both have, as
    tools add defaults and drop what they do not know."""
    if context.is_bundle:
        families = [layout.stored.family for layout in context.layouts]
        fields = chain.from_iterable(family.quantized_fields for family in families)
        of_codes = {key for key, value in fields if found.get(key) == value}
        return {*wanted, *found} - QUANTIZATION_FIELDS - of_codes
    both = wanted.keys() & found.keys()
    return {key for key in both if key.rpartition(".")[2] not in _OF_TOOLS}


def _tokenizers(context: Context) -> Item:
    """Tokenizer files equal the source's."""
    assert context.source is not None
    files, problems, count = context.source.files, [], 0
    compared = {} if context.parts_of_others else {part.folder: part for part in context.parts}
    for part in compared.values():
        for path in sorted(filter(Path.is_file, part.folder.glob("tokenizer*"))):
            count += 1
            wanted = files.read(path.name) if path.name in files.names() else None
            if wanted is None or not _holds(path, wanted):
                own = f"{part.name}/{path.name}" if context.is_bundle else path.name
                words = causes.another_tokenizer(own)
                problems.append(Problem(str(path), words))
    return verdict(
        "tokenizer is the source's", problems, figure=counted(count, "file"), bound="byte for byte"
    )


def _holds(path: Path, content: bytes) -> bool:
    """True for a file with this content; another size is not read at all."""
    return path.stat().st_size == len(content) and path.read_bytes() == content


def _recorded(context: Context) -> Iterator[Item]:
    """SQNR of converted tensors as the export recorded it in the manifest."""
    why = "without --source nothing is compared"
    if not context.is_bundle and context.main is not None and context.mtp is not None:
        why += (
            ". An MTP layer of another finetune or merge of the same base looks as sound as this"
            " model's: acceptance at level run tells them apart, or --source"
        )
    noted: dict[tuple[str, str], list[float]] = defaultdict(list)
    parts: Mapping[str, Any] = (context.manifest or {}).get("parts", {})
    for part, entry in parts.items():
        for shard in entry.get("shards", {}).values():
            for facts in shard.get("tensors", {}).values():
                if facts.get("sqnr_db") is not None:
                    noted[part, str(facts.get("operation"))].append(facts["sqnr_db"])
    if not noted:
        yield not_tested("weights against the source", why)
    for (part, operation), levels in noted.items():
        figure = f"{len(levels):,}: min {min(levels):.1f} dB, median {median(levels):.1f} dB"
        yield not_tested(f"{part}: {operation}, as the export noted it", why, figure=figure)
