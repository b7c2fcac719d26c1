"""MTP modules of a checkpoint, from its headers alone: those that config.json announces are there
and complete, loaders find them, and what bears their names is what it says."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mtp_checkpoints.containers.base import CONFIG_NAME, SINGLE_NAME, TensorInfo
from mtp_checkpoints.containers.safetensors import INDEX_NAME, whole_set
from mtp_checkpoints.families import FAMILIES
from mtp_checkpoints.families.class_names import draft_class, foreign_class
from mtp_checkpoints.families.other_names import other_names
from mtp_checkpoints.families.renamed import OtherNames
from mtp_checkpoints.families.signs import (
    Announced,
    are_transposed,
    count_field,
    expert_count,
    expert_gaps,
    experts_of,
    fused_experts,
    has_layers,
    hidden_size,
    is_transposed,
    lacks_projection,
    main_layers,
    other_draft,
    projection_in_main,
    sglang_adds,
)
from mtp_checkpoints.families.stored_names import as_weight
from mtp_checkpoints.quantization.fusion_rules import EXPERTS
from mtp_checkpoints.quantization.native import describe, is_gguf, is_mlx, quantization_of
from mtp_checkpoints.quantization.stored import StoredModel
from mtp_checkpoints.quantization.tools import known_loss
from mtp_checkpoints.tensors.bundle_folder import MAIN, MTP
from mtp_export.inspection import shared_tensors
from mtp_export.progress import counted
from mtp_export.verify.check import (
    ENGINE,
    LEFT_OUT,
    Item,
    Problem,
    failed,
    measured,
    not_tested,
    passed,
    verdict,
)
from mtp_export.verify.diagnosis.causes import presence as causes
from mtp_export.verify.diagnosis.causes.names import under_other_names
from mtp_export.verify.files.astray import Strange, each, with_pairs
from mtp_export.verify.files.described import of_keys
from mtp_export.verify.files.found import Found
from mtp_export.verify.files.lost_experts import lost_experts
from mtp_export.verify.files.lost_layers import lost_layers, may_have_lost
from mtp_export.verify.files.main_shapes import is_matrix, shapes_as_main
from mtp_export.verify.files.repair import unlike_source

if TYPE_CHECKING:
    from mtp_export.verify.context import Context


def run(context: Context) -> Iterator[Item]:
    """The writer of a checkpoint, and its MTP modules as announced and as stored."""
    if context.is_bundle or not context.checkpoints:
        return
    found = Found(context)
    yield _writer(found)
    if whole_set(context.files.names()) and INDEX_NAME not in context.files.names():
        yield measured("index", causes.NO_INDEX, {})
    if context.other_config:  # by which modules are counted: config_match says so
        if not found.count and found.announced and not context.other_config.counts:
            yield _presence(found)
        return
    whole = found.has_main and has_layers(found.tensors)
    other = other_draft(found.config, found.mtp_names if whole else found.tensors)
    if other is not None:
        yield not_tested("MTP modules", causes.another_kind(other.kind, other.sign))
        return
    main = found.tensors.keys() - {*found.mtp_names} if found.has_main else ()
    if has_layers(main) and (words := _unnamed(found)):
        yield failed("main model's class", words, subject=CONFIG_NAME)
    if (renamed := _renamed_main(found)) is not None:
        yield renamed
        if found.stored is not None and found.renames(found.stored.mtp):
            return
    elif (lost := _lost_layers(found)) is not None:
        yield lost
        if not found.count:
            return
    yield _presence(found)
    if found.modules:
        yield _complete(found)
        yield from _shapes(found)
        yield from _indexed(context, found)
        yield from _copies(found)


def _unnamed(found: Found) -> str:
    """Return why engines and transformers find no class, or another's, for a main model; "" where
    they do."""
    config = found.config
    if not config.get("model_type"):
        return "" if config.get("auto_map") else causes.NO_MODEL_TYPE
    if (draft := draft_class(config)) is not None:
        return causes.class_of_a_draft(draft)
    named = is_gguf(quantization_of(config)) or is_mlx(config)  # by model_type alone
    if found.stored_part(MAIN) is None or named:
        return ""
    if not config.get("architectures"):
        return causes.NO_CLASS
    other = foreign_class(config, FAMILIES)
    return causes.class_of_another(other, str(config["model_type"])) if other else ""


def _renamed_main(found: Found) -> Item | None:
    """The main model's weights, and perhaps the module's, are there under other names."""
    main = found.stored_part(MAIN)
    if main is None or _is_whole(main, found.tensors):
        return None
    others = found.others
    if others is None or not others.is_sure or not found.renames(main):
        return None
    item = verdict(f"{MAIN}: names", found.strange(under_other_names(others, "the model")))
    return with_pairs(item, others)


def _is_whole(stored: StoredModel, there: Collection[str]) -> bool:
    """Return whether all weights are there but for optional ones, without a list of 46,000."""
    needed = (kind for kind in stored.kinds if not kind.specs[0].optional)
    return all(
        tensor.optional or all(name in there for name in names)
        for kind in needed
        for tensor, names in zip(kind.tensors, kind.names, strict=True)
    )


def _lost_layers(found: Found) -> Item | None:
    main = found.tensors.keys() - {*found.mtp_names}
    if not found.has_main or not may_have_lost(main_layers(found.config), main):
        return None
    return None if found.stored is None else lost_layers(found.stored, found.tensors.keys())


_PICKLED_MODULE = re.compile(r"(?i)(mtp|nextn).*\.(bin|pt|pth)$")


def _writer(found: Found) -> Item:
    quantization = quantization_of(found.config)
    usable = not quantization or isinstance(quantization, dict)
    method = describe(found.config) if usable else "unusable"
    figure = f"{found.tool}, " if found.tool is not None else ""
    data = {"tool": str(found.tool or ""), "quantization": method}
    return measured("written by", f"{figure}quantization {method}", data)


def _presence(found: Found) -> Item:
    """The announced modules are there, and those that are there are announced."""
    name, wanted, count = "MTP modules announced and there", found.announced, found.count
    counted_as_main = projection_in_main(found.tensors, main_layers(found.config))
    if not count and counted_as_main is not None:
        words = causes.counted_as_main(counted_as_main, is_announced=wanted is not None)
        words += of_keys(found.context)
        figure = "" if wanted is None else _figure(0, wanted)
        return failed(name, words, figure=figure, subject=counted_as_main)
    if wanted is None:
        if count:
            words = causes.not_announced(count, count_field(found.config))
            return failed(name, words, subject="config.json")
        repair = found.repair
        words = causes.none_at_all(of_family=bool(repair))
        if (other := found.draft_beside) is not None:
            words = causes.another_kind(other.kind, other.sign)
        return not_tested(name, words, repair=repair)
    if not count:
        return _none_there(name, found, wanted)
    if wanted.count is not None and count < wanted.count:
        lost = found.modules_lost
        of_lost = tuple(f"{one}." for one in lost)
        if found.others and any(one.startswith(of_lost) for one in found.others.pairs.values()):
            return _there_renamed(name, found, found.others, _figure(count, wanted))
        is_rest_whole = all(name.startswith(of_lost) for name in found.differing)
        are_last = is_rest_whole and (lost == found.module_names[-len(lost) :] or not lost)
        field = count_field(found.config)
        words = causes.partly_lost(str(wanted), count, lost, field, are_last=are_last)
        names = [n for n in found.astray if n.startswith(of_lost)]
        item = verdict(name, each(names or [CONFIG_NAME], words))
        return replace(item, figure=_figure(count, wanted), repair=found.repair)
    if more := found.modules_more:
        words = causes.more_than_announced(str(wanted), list(more))
        return verdict(name, each([name for own in more.values() for name in own], words))
    tensors = sum(len(module.tensors) for module in found.modules)
    return passed(name, figure=f"{_figure(count, wanted)}, {counted(tensors, 'tensor')}")


def _none_there(name: str, found: Found, wanted: Announced) -> Item:
    """No module is there: it is not in the folder of --mtp, or lost."""
    figure, folder = _figure(0, wanted), found.context.options.mtp
    if folder is not None:
        words = causes.not_in_folder(str(folder), str(wanted))
        return failed(name, words, figure=figure, subject=str(folder), repair=found.repair)
    if found.stored is not None and found.others and found.renames(found.stored.mtp):
        return _there_renamed(name, found, found.others, figure)
    if (draft := found.draft_beside) is not None:
        words = causes.lost_beside(str(wanted), draft.kind, draft.sign)
        return failed(name, words, figure=figure, subject="config.json", repair=found.repair)
    loss = known_loss(found.tool) if found.tool else ""
    pickled = next(filter(_PICKLED_MODULE.search, sorted(found.context.files.names())), "")
    by_hand = "" if found.repair else unlike_source(found.context) or causes.BY_HAND
    if below := found.files_below:
        by_hand = causes.in_a_folder(below)
    of_tool = (str(found.tool or ""), loss)
    words = causes.lost(str(wanted), found.module_names, *of_tool, pickled, by_hand)
    return failed(name, words, figure=figure, subject="config.json", repair=found.repair)


def _there_renamed(name: str, found: Found, others: OtherNames, figure: str) -> Item:
    words = under_other_names(others)
    for file in found.files_of(others.pairs):
        words += causes.left_out_of_index(file)
    item = verdict(name, found.strange(words))
    return with_pairs(replace(item, figure=figure, repair=found.repair), others)


def _figure(count: int, wanted: Announced) -> str:
    return f"{count} of {wanted.count or 'some'}"


def _complete(found: Found) -> Item:
    """Each module has its projection, and all its experts with all their tensors."""
    problems: list[Problem] = []
    names = [name for module in found.modules for name in module.tensors]
    own = {name: found.tensors[name] for name in names}
    fused = fused_experts({name: one.shape for name, one in own.items()})
    if not any(_FIRST_EXPERT in name for name in found.wanted_names):
        fused = None  # as the model has them
    others = _other_names(found, own, are_fused=fused is not None)
    is_known = bool(found.wanted_names)  # of which config_match names each tensor that is missing
    if not is_known and found.has_main and lacks_projection(names):
        problems.append(Problem(names[0], causes.no_projection(names[0])))
    problems += _transposed(found, names)
    # A family may say it of the module itself, or of each layer.
    of_family = str(found.config.get("model_type")) in FAMILIES
    said = None if of_family else experts_of(found.config)
    experts, astray = expert_count(found.wanted_names) or said, found.astray
    for module in found.modules:
        there = module.tensors if others is None else others.by_own_names(module.tensors)
        for gap in expert_gaps(there, experts):
            first = gap.partition(" ")[0]
            problems += each([first, *found.of_weights(_below(first, astray))], gap)
    told = tuple(f"{problem.subject}." for problem in problems)
    of_others = ((name, words) for name, words in found.unpaired if not name.startswith(told))
    for name, words in of_others:
        problems += each(found.of_weights([name]), words)
    if fused is not None:
        of_experts = _below(f"{fused.partition(EXPERTS)[0]}{EXPERTS.rstrip('.')}", astray)
        problems[:0] = each([fused, *of_experts], causes.fused(fused))
    if others is None and found.mtp is not None:
        problems[:0] = lost_experts(found.mtp, own, found.tensors.keys() - own.keys())
    width = hidden_size(found.config)
    wrong = found.wrong_in_main if found.mtp is not None else ()
    strange = Strange(astray, found.wanted_names, found.tensors, own, width, wrong)
    problems[:0] = strange.problems(others)
    item = verdict("MTP modules complete", problems, counted(len(names), "tensor"))
    return with_pairs(replace(item, repair=found.repair), others) if problems else item


def _other_names(
    found: Found, own: Mapping[str, TensorInfo], *, are_fused: bool
) -> OtherNames | None:
    """A module's weights that are there under other names, the main model's too. own: its tensors.
    are_fused: its experts are in one tensor, which is told of them."""
    wanted, main = found.wanted_names, found.stored_part(MAIN)
    if found.differing and main is not None:
        there, weights = main.family.without_carried(found.tensors), {*map(as_weight, main.tensors)}
        own = {n: there[n] for n in there if n in own or as_weight(n) not in weights}
    if are_fused:
        wanted = {name: one for name, one in wanted.items() if EXPERTS not in name}
        own = {name: one for name, one in own.items() if EXPERTS not in name}
    return other_names(wanted, own, found.joins)


def _below(module: str, names: Sequence[str]) -> list[str]:
    return [name for name in names if name.startswith(f"{module}.")]


def _shapes(found: Found) -> Iterator[Item]:
    """Of a model without a family here, which `config_match` compares no shapes of."""
    if not found.has_main or found.wanted_names:
        return
    own = {name for module in found.modules for name in module.tensors}
    main = {name: one for name, one in found.tensors.items() if name not in own}
    mtp = {name: one for name, one in found.tensors.items() if name in own}
    yield from shapes_as_main(main, mtp, found.repair)


def _transposed(found: Found, names: Sequence[str]) -> list[Problem]:
    """Projections that are stored with their inputs as rows; where the main model's linears are
    too, that is one problem of the whole checkpoint."""
    hidden = hidden_size(found.config)
    shapes = {name: found.tensors[name].shape for name in names}
    wrong = [name for name in names if found.has_main and is_transposed(name, shapes[name], hidden)]
    if not wrong:
        return []
    others = ((name, one) for name, one in found.tensors.items() if name not in shapes)
    main = {name: one.shape for name, one in others if is_matrix(one) and name.endswith(".weight")}
    if are_transposed(main, hidden):
        return [Problem(wrong[0], causes.WHOLE_IN_PADDLE_LAYOUT)]
    return [Problem(name, causes.transposed(name, list(shapes[name]))) for name in wrong]


_FIRST_EXPERT = ".experts.0."


_INDEXED = "MTP modules in the index"
_FOR_SGLANG = {ENGINE: "sglang"}


def _indexed(context: Context, found: Found) -> Iterator[Item]:
    """No tensor of a module is in a file that the index leaves out, for engines that add none."""
    outside: dict[str, str] = {}
    for checkpoint in context.checkpoints.values():
        for shard in checkpoint.shards:
            if shard.path.name in checkpoint.unindexed:
                outside |= {tensor.name: shard.path.name for tensor in shard.tensors}
    lost = sorted(name for name in found.mtp_names if name in outside)
    files = list(dict.fromkeys(outside[name] for name in lost))
    added = files and all(sglang_adds(found.config, file) for file in files)
    engines = "vLLM and transformers" if added else "vLLM, SGLang and transformers"
    if SINGLE_NAME in files:  # which transformers loads in place of the index
        engines = "vLLM and SGLang"
    problems = [Problem(lost[0], causes.not_in_index(file, engines)) for file in files]
    if not added:
        yield verdict(_INDEXED, problems)
        return
    yield passed(f"{_INDEXED}, as SGLang reads it", figure=causes.added(files[0]), data=_FOR_SGLANG)
    name, chosen = f"{_INDEXED}, as vLLM reads it", context.options.engine
    if chosen == _FOR_SGLANG[ENGINE]:
        yield not_tested(name, f"--engine {chosen} leaves it out", data={LEFT_OUT: True})
    else:
        yield replace(verdict(name, problems), data={ENGINE: "vllm"})


def _copies(found: Found) -> Iterator[Item]:
    """Where the modules' embedding and head are, as far as headers tell."""
    layouts = {layout.name: layout.stored for layout in found.context.layouts}
    if layouts.keys() != {MAIN, MTP}:  # or config_match says why one cannot be followed
        return
    stored = layouts[MAIN].with_mtp_of(layouts[MTP], quantization_of(found.config))
    for name, state in shared_tensors(found.tensors, stored).items():
        yield measured(f"copy of {name.split('.', 3)[-1]}", state, {"tensor": name})
