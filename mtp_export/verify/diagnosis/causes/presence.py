"""Causes of failures of a checkpoint's MTP modules as its headers show them."""

from __future__ import annotations


def another_kind(kind: str, sign: str) -> str:
    return (
        f"the draft here is {kind}, not MTP ({sign}): engines draft with it by a method of its own,"
        " and fail by method mtp"
    )


def not_announced(count: int) -> str:
    modules = "an MTP module is" if count == 1 else f"{count} MTP modules are"
    return (
        f"{modules} there, and config.json has no field that counts any"
        " (num_nextn_predict_layers, mtp_num_hidden_layers or the like): engines read it there, and"
        " would serve without speculation"
    )


def none_at_all(*, of_family: bool) -> str:
    words = "config.json announces no MTP module, and no tensor is named like one's"
    if not of_family:
        return words
    return f"{words}; models of this type are released with one, which a graft gives back"


def lost(wanted: str, habit: str) -> str:
    known = f" {habit[0].upper()}{habit[1:]}." if habit else ""
    return (
        f"config.json announces {wanted} and no tensor of any is there: whatever wrote this folder"
        f" left it out.{known} Engines fail when they load it, or draft with weights that nobody"
        " wrote"
    )


def partly_lost(wanted: str, count: int) -> str:
    return f"config.json announces {wanted}, and tensors of {count} are there"


def no_projection(name: str) -> str:
    return (
        f"no tensor beside {name} is of a projection of embedding and hidden state (eh_proj, fc or"
        " the like): the module cannot draft"
    )


def renamed(wanted: str, found: str, count: int) -> str:
    return (
        f"tensors of the module are there under other names ({count}): they begin with"
        f" {found or 'nothing'}, where engines look for {wanted or 'nothing'}"
    )


def transposed(name: str, shape: list[int]) -> str:
    return f"{name} is stored transposed, {shape}: engines but Paddle's read {shape[::-1]}"


def codes_without_scale(name: str, dtype: str) -> str:
    return f"{name} holds {dtype} codes, and no scale is beside it"


def scale_without_codes(name: str) -> str:
    return f"{name} is a scale, and no weight is beside it"


def not_in_index(file: str) -> str:
    return (
        f"{file} is not in the index: engines that follow the index, as vLLM does, will not load"
        " it, and transformers never opens it. An export writes its tensors into an index"
    )
