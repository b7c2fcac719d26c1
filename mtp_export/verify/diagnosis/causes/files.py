"""Causes of failures of a bundle's files: manifest, headers, configs and tokenizers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from mtp_export.progress import counted, shortened

_MOST_SHARES = 12

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


def others_beside(count: int) -> str:
    return f"It matters which is loaded: {count:,} of its tensors are none of the index's"


def repeated_alike(compared: int, total: int) -> str:
    return (
        f"It does not matter which is loaded, as far as was looked: {compared} of the {total} were"
        " compared by 4 kB of each, and are equal"
    )


def loaded_in_place_of_index(file: str, lost: int, total: int) -> str:
    return (
        f"transformers loads {file} alone where it lies beside an index, and it lacks {lost:,} of"
        f" the {total:,} tensors of the main model, which would be left at random: delete it, as"
        " vLLM and SGLang load the files of the index"
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


def half_missing(half: str, other: str, whole: str) -> str:
    return f"{other} is missing: of {whole} there is {half} alone, its other half"


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
ANOTHER_VOCABULARY = (
    " (of another number of tokens: the layer is of another model, or its copies were cut. Engines"
    " take the main model's: if the layer is this model's, leave this copy out)"
)


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


def another_storage(module: str, stored: str, config: str, storage: str, expected: str) -> str:
    """config: the name of the field that describes the quantization."""
    return (
        f"{module} is stored as {stored}, and by {config} an engine expects {storage}: {expected}"
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
