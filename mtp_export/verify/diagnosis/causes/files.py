"""Causes of failures of a bundle's files: manifest, headers, configs and tokenizers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from mtp_checkpoints.families.base import SGLANG_DRAFT
from mtp_export.progress import counted, shortened

_MOST_SHARES = 12
_MOST_ENTRIES = 6  # of a list that are named one by one
_SINGLE_EXPERT = re.compile(r"\.experts\\?\.\d")

# --- Files and tensors compared with the manifest -------------------------------------------------

PART_NOT_IN_BUNDLE = "the part is in the manifest but not in the bundle"
PART_NOT_IN_MANIFEST = "the part is in the bundle but not in the manifest"


def file_missing(file: str) -> str:
    return f"{file} is missing"


def file_changed(file: str) -> str:
    return f"{file} was changed after the export"


def file_not_in_manifest(file: str) -> str:
    return f"{file} is not in the manifest: a stale or foreign file that engines load"


def another_size(file: str, found: int, wanted: object) -> str:
    return f"{file} has {found} bytes, not {wanted}: truncated or replaced"


def another_header(file: str) -> str:
    return f"{file} has another header than the shard it was linked from: swapped or edited"


def tensor_only_in(tensor: str, file: str, place: str) -> str:
    """place: "shard" or "manifest"."""
    return f"tensor {tensor} of {file} is only in the {place}"


def tied_beside_a_head(head: str) -> str:
    return (
        f"config.json sets tie_word_embeddings, and {head} is stored: engines would compute the"
        " head with the embedding. Set it to false, as the releases have it"
    )


NO_VOCABULARY = "the GGUF file has no tokens: prompts have to be token ids"
NO_TOKENIZER_BESIDE = "there is no tokenizer.json to compare with, beside it or in --source"


def key_differs(field: str, said: object, wanted: object) -> str:
    """said: what the keys make of a field of config.json."""
    return (
        f"by the keys of the GGUF file {field} is {said}, and config.json has {wanted}: llama.cpp"
        " reads the keys alone"
    )


def another_vocabulary(count: int, number: int, found: object, wanted: object) -> str:
    return (
        f"the GGUF file has another vocabulary than tokenizer.json: {counted(count, 'token')},"
        f" the first number {number}, {str(found)[:40]!r} where {str(wanted)[:40]!r} belongs"
    )


def tensor_changed(tensor: str, file: str) -> str:
    return f"{tensor} in {file} has other bytes than the export wrote: damaged or replaced since"


def export_unfinished(journal: str) -> str:
    return f"{journal} is there: the export did not finish, or is still running"


def bundle_unfinished(bundle: str, done: int, shards: int) -> str:
    made = f"{done} of {counted(shards, 'shard')}"
    return f"{bundle} is unfinished ({made}): its run was stopped, or still runs"


def shares_unfinished(bundle: str, missing: Sequence[str], count: int) -> str:
    if not missing:
        return f"{bundle} is unfinished: its {count} shares are made and not put together"
    return (
        f"{bundle} is unfinished: of its {count} shares, {len(missing)}"
        f" {'is' if len(missing) == 1 else 'are'} missing or still made"
        f" ({shortened(missing, _MOST_SHARES)})"
    )


def repeated_differ(count: int, compared: int, first: str) -> str:
    return (
        f"It matters which is loaded: {count} of the {compared} tensors compared differ, such as"
        f" {first}"
    )


def repeated_alike(compared: int, total: int) -> str:
    return (
        f"It does not matter which is loaded, as far as was looked: {compared} of the {total} were"
        " compared by 4 kB of each, and are equal"
    )


def of_something_else(tensors: str, first: Sequence[str]) -> str:
    """first: the first tensor of a file, if it has any."""
    named = f", such as {first[0]}, none named as the index's are" if first else ""
    return f"{tensors}{named}: the index does not name it, and engines pass it over"


# --- config.json compared with the releases' ------------------------------------------------------


def not_released(field: str, found: object, released: Sequence[object]) -> str:
    """As beside_released, in a sentence."""
    return f"no release of the family has this value: {beside_released(field, found, released)}"


def beside_released(field: str, found: object, released: Sequence[object]) -> str:
    """A value beside those of the releases; of two objects, the entries that differ."""
    if isinstance(found, Mapping) and isinstance(released[0], Mapping):
        keys = [key for key, value in released[0].items() if found.get(key) != value]
        released = [{key: released[0][key] for key in keys}]
        found = {key: found.get(key) for key in keys}
    theirs = " or ".join(json.dumps(value) for value in released)
    return f"{field} {json.dumps(found)} (releases: {theirs})"


# --- config.json compared with the tensors --------------------------------------------------------


def mtp_layers_not_advertised(field: str) -> str:
    return (
        f"main/config.json has no {field}, though mtp/ is there: engines read it there, and would"
        " serve without speculation"
    )


def advertised_without_mtp(layers: int) -> str:
    return f"main/config.json advertises {layers} MTP layer, and the bundle has no mtp/"


def tensor_missing(tensor: str, expected: str) -> str:
    return f"{tensor} is missing ({expected})"


def tensor_unlike_promised(tensor: str, problem: str, found: str) -> str:
    return f"{tensor} is {problem} (found {found})"


def scales_without_weight(module: str, stored: str, weight: str) -> str:
    return f"{module} has {stored} without its weight {weight}"


def scales_missing(scales: str) -> str:
    return f"{scales} is missing, though its weight is there"


def stray_tensors(module: str, stray: str) -> str:
    return (
        f"{module} has {stray} beside its weight, which is not a tensor of this model by its"
        " config.json: engines fail on it, or take the weight for quantized"
    )


COPY_NOT_NEEDED = " (engines take the main model's: leave this copy out)"


def another_dtype_or_shape(module: str, stored: str, expected: str) -> str:
    return f"{module} holds {stored}, expected {expected}"


def stored_transposed(module: str, stored: str, expected: str) -> str:
    return f"{module} is stored transposed: it holds {stored}, expected {expected}"


def in_another_shape(module: str, stored: str, expected: str) -> str:
    return f"{module} has its numbers in another shape: it holds {stored}, expected {expected}"


def holds_nothing(module: str, stored: str) -> str:
    return (
        f"{module} holds nothing ({stored}), as DeepSpeed's ZeRO-3 and FSDP leave parameters that"
        " were not gathered: save the model again, with all of them gathered"
    )


def lies_under_another_name(found: str, wanted: str) -> str:
    return (
        f"{found} lies where engines look for {wanted}, and has its dtype and shape: rename it so,"
        " in the files and in the index, if it is the same"
    )


def another_storage(module: str, stored: str, storage: str, expected: str) -> str:
    return (
        f"{module} is stored as {stored}, and by quantization_config an engine expects {storage}:"
        f" {expected}"
    )


def misread_by_engine(reason: str, problem: object) -> str:
    """reason: of the engine's own reading of the draft."""
    return f"{reason}: {problem}"


def recomputed_not_skipped(tensor: str) -> str:
    return (
        f"{tensor} is a rotary frequency that other engines skip, and this one's loader of the"
        " draft ends with a KeyError: leave it out of the shard and of the index"
    )


def not_left_out(count: int, module: str, part: str, idle: Sequence[str]) -> str:
    """idle: entries that are there and act on nothing."""
    others = f", like {len(idle) - 1} more," if len(idle) > 1 else ""
    blamed = f" ({idle[0]}{others} {_idle_words(idle[0])})" if idle else ""
    return (
        f"{count:,} matrices of {part}, such as {module}, are stored unquantized, and"
        f" quantization_config leaves them out nowhere{blamed}, so that they are built quantized"
    )


def _idle_words(entry: str) -> str:
    if _SINGLE_EXPERT.search(entry):
        return "acts on nothing: all experts of a layer are one module here"
    return "matches no module of it"


def lists_corrected(taken: Mapping[str, Sequence[str]], added: Mapping[str, Sequence[str]]) -> str:
    """taken, added: entries by their lists, of which --json has all."""
    by_names = dict[tuple[str, ...], list[str]]()
    for key, names in added.items():
        by_names.setdefault(tuple(names), []).append(key)
    steps = [f"take {_named(names, 'to_take')} out of {key}" for key, names in taken.items()]
    for own, keys in by_names.items():
        lists = "it" if keys == [*taken] else " and to ".join(keys)
        steps.append(f"add {_named(own, 'to_add')} to {lists}")
    words = f": {' and '.join(steps)}"
    entries = (entry.replace("\\", "") for own in by_names for entry in own)
    if any(SGLANG_DRAFT in entry for entry in entries):
        words += f" ({SGLANG_DRAFT} is SGLang's name of the draft's layer)"
    return words


def _named(names: Sequence[str], field: str) -> str:
    if len(names) <= _MOST_ENTRIES:
        return ", ".join(names)
    rest = f"{len(names) - 2} more, each by its whole name (data.{field} of --json),"
    return f"{', '.join(names[:2])} and {rest}"


def refused_by_engine(engine: str, why: str) -> str:
    """why: what no entry mends."""
    return f". That alone mends nothing for {engine}: {why}"


def built_quantized(module: str, storage: str) -> str:
    return (
        f"{module} is stored unquantized and left out by no list: the engine builds it in"
        f" {storage}, and fails to load it, or reads its values as codes"
    )


def projection_built(module: str, storage: str, field: str) -> str:
    """module: as the engine calls it, so that no entry of the checkpoint's own name acts on it."""
    return (
        f"it is stored unquantized, and the engine builds it in {storage}, as {module}, which no"
        f" entry of {field} is for"
    )


def projection_quantized(module: str) -> str:
    return (
        f"{module} is stored quantized, and vLLM and SGLang build it as an unquantized linear: they"
        " cannot load it. Leave it out when quantizing, or graft the original's layer"
    )


NO_TARGET = "no target of config_groups is for them"


def left_out_though_quantized(
    count: int, module: str, entry: str, part: str, *, has_config: bool
) -> str:
    """entry: what leaves it out, "" where that is not one entry. has_config: there is a
    quantization_config."""
    blame = f" ({entry})" if entry else ""
    left_out, mend = f"quantization_config leaves them out{blame}", ""
    if not has_config:
        left_out = "config.json has no quantization_config"
        mend = ": put the one back that they were quantized with"
    return (
        f"{count:,} matrices of {part}, such as {module}, are stored quantized, and"
        f" {left_out}, so that they are built unquantized{mend}"
    )


def built_unquantized_beside(engine: str, storages: str) -> str:
    return f"{engine} builds every draft unquantized beside a main model in {storages}"


def quantized_in_vain(count: int, module: str) -> str:
    return (
        f"{count:,} matrices of the MTP module, such as {module}, are stored quantized: serve it"
        " with another engine, or graft the original's unquantized ones"
    )


OF_MODULE_COUNTED_AS_MAIN = (
    "those that config.json does not promise are of the MTP module that it counts among the main"
    " layers"
)


# --- Configs and tokenizers compared with each other ----------------------------------------------


def draft_config_differs(key: str, found: object, wanted: object) -> str:
    return (
        f"{key} is {found!r} in mtp/config.json, where main/config.json makes it {wanted!r}: the"
        " draft belongs to another model or target"
    )


def main_config_differs(key: str, found: object, wanted: object) -> str:
    unchanged = f"{key} is {wanted!r} in mtp/config.json, which is as it was exported"
    return f"{unchanged}, and {found!r} by main/config.json"


def yarn_scale_dropped(config: str, mscale: object) -> str:
    return (
        f"{config} has yarn's mscale {mscale} without mscale_all_dim: yarn's attention"
        " scale was dropped, and attention is flatter than in training"
    )


def no_tokenizer(folder: str, files: str) -> str:
    return f"no tokenizer: {folder} has none of {files}"


def source_without_tokenizer(folder: str, files: str) -> str:
    words = no_tokenizer(folder, files)
    return f"{words}; its source had none either: put one there before the export"


def no_token_id(token: object, found: object) -> str:
    return f"token {token!r} has the id {found!r}: damaged, an id is a whole number from 0 on"


def ids_do_not_fit(file: str, largest: int, vocabulary: int) -> str:
    return f"{file} has ids up to {largest}, the model {vocabulary}: another model's"


def another_special_token(key: str, token: str, found: int | None, wanted: object) -> str:
    return f"{key} {token!r} has id {found}, config.json says {wanted}: another model's tokenizer"


def file_in_one_part(file: str, one: str, other: str) -> str:
    return f"{file} is in one of {one}/ and {other}/ alone"


def tokenizers_differ(file: str, one: str, other: str) -> str:
    return f"{file} differs between {one}/ and {other}/: the draft would read other ids"


# --- Main and draft as they were made together ----------------------------------------------------

MAIN_REPLACED = (
    "the main model is not the one that was exported: its tensors, or bytes sampled of them, differ"
    " from what the manifest records"
)


def main_elsewhere(recorded: str) -> str:
    return (
        f"the main model that the draft was made with, {recorded}…, is not here: beside another one"
        " its acceptance is unknown. `mtp-export verify MAIN --mtp` judges the two together"
    )


def draft_of_another_main(recorded: str, found: str) -> str:
    return (
        f"the draft was made with the main model {recorded}…, and lies beside {found}…: its"
        " acceptance there is unknown. If that is a conversion of the same model, `mtp-export"
        " graft` pairs the two"
    )
