"""Causes of failures of a checkpoint that another config.json describes."""

from __future__ import annotations

import json
from collections.abc import Sequence

from mtp_checkpoints.containers.base import QUANTIZATION
from mtp_checkpoints.families.signs import COUNT_FIELDS


def field_misdescribes(config: str, field: str, *, said: object, stored: object, fits: bool) -> str:
    """config: the name of the one that has the field. said: None where that is missing. fits: the
    other part is stored as the field says."""
    words = f"says {field} {said}" if said is not None else f"has no {field}"
    words = f"{config} {words}, and every weight is stored as by {stored}"
    if not fits:
        return f"{words}: set {field} to {stored}"
    return (
        f"{words}; the other part is stored as it says, so that no {field} is right for both:"
        " quantize the layer again, or graft the original's"
    )


OF_KEYS = (
    ". These fields stand for the keys of the GGUF file, which are to be corrected:"
    " num_hidden_layers for block_count less nextn_predict_layers, which counts MTP modules"
)


_MOST_VALUES = 4


def values_misdescribe(values: Sequence[tuple[str, object, object]], folder: str) -> str:
    """values: fields, each with what config.json says and that by which tensors are stored. folder:
    that of a draft of its own, whose config.json is meant, "" for the main model's."""
    values, more = values[:_MOST_VALUES], len(values) - _MOST_VALUES
    said = " and ".join(f"{field} {json.dumps(wrong)}" for field, wrong, _ in values)
    stored = " and ".join(json.dumps(value) for *_, value in values)
    put = " and ".join(f"{field} to {json.dumps(value)}" for field, _, value in values)
    if folder:
        return (
            f"config.json of {folder} says {said}, and its tensors are as by the main model's"
            f" {stored}: set {put} there, or engines look for tensors of other names"
        )
    words = f"config.json says {said}, and all tensors are stored as by {stored}: set {put}"
    if more > 0:
        return f"{words}, and {more} more likewise: put the original's config.json back"
    if len(values) > 1:
        return f"{words}, or put the original's config.json back"
    ((field, wrong, value),) = values
    if field.rpartition(".")[2] == "num_hidden_layers" and int(str(value)) < int(str(wrong)):
        return f"{words}, unless the last main layers were lost: then put them back"
    if not wrong and field.rpartition(".")[2] in COUNT_FIELDS:
        return f"{words}. Engines read it there, and would serve without speculation"
    return words


def text_part_elsewhere(found: str, place: str) -> str:
    return (
        f"the fields of the text part are in {found}, and engines look for them in {place}: move"
        " them there; by them all tensors are as stored"
    )


def no_method(config: str) -> str:
    """config: the name of the field that describes the quantization."""
    return (
        f"config.json's {config} names no quant_method, so that no engine knows how to read"
        " the codes: put the one back that they were quantized with"
    )


def quantization_elsewhere(place: str, field: str) -> str:
    """field: quantization_config, by the name that it has."""
    if field != QUANTIZATION:
        readers = "no engine reads it there: they end, or"
    else:
        readers = "vLLM looks there too, SGLang and transformers do not, and"
    return (
        f"config.json has its {field} in {place}: {readers} would load codes as weights. Move it"
        " to config.json itself"
    )


def nothing_is_quantized(where: str) -> str:
    """where: the field of config.json, or the file, that describes the quantization."""
    return (
        f"{where} describes a quantization, and no weight is quantized: it was left behind by a"
        f" conversion. Engines look for codes and scales: remove {where}"
    )


def no_quantization_config(count: int, module: str) -> str:
    return (
        f"{count:,} matrices, such as {module}, are stored quantized, and config.json has no"
        " quantization_config, so that engines build them unquantized: put the one back that they"
        " were quantized with"
    )


def experts_misdescribed(
    part: str, other: str, field: str, said: int, stored: int, *, can_graft: bool
) -> str:
    """other: the part that is stored as the field says, "" for none. can_graft: the original's
    layer mends it."""
    words = f"config.json says {field} {said}, and every layer of {part} has {stored} experts"
    if not other:
        return f"{words}: set {field} to {stored}"
    words += (
        f", those of {other} {said}: experts were pruned from one part alone, or one is another"
        " model's, and engines build as many in both. Prune those of "
    )
    if stored > said:
        return f"{words}{part} alike, with the rows of its gates"
    words += f"{other} alike, with the rows of its gates, and set {field} to {stored}"
    return f"{words}, or graft the original's layer" if can_graft else words
