"""Causes of failures of a checkpoint's MTP modules as its headers show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mtp_export.progress import shortened

_NAMED = 3
_SINGLY = 5  # that are named one by one: the report's data has all


def another_kind(kind: str, sign: str) -> str:
    return (
        f"the draft here is {kind}, not MTP ({sign}): engines draft with it by a method of its own,"
        " and fail by method mtp"
    )


def not_announced(count: int, field: str) -> str:
    """field: the one of config.json that counts modules, with what it says, "" for none."""
    modules = "an MTP module is" if count == 1 else f"{count} MTP modules are"
    said, put = "has no field that counts any", "put the original's back"
    if field:
        said, put = f"says {field}", f"set it to {count}"
    else:
        put += f" (num_nextn_predict_layers, mtp_num_hidden_layers or the like, {count})"
    return (
        f"{modules} there, and config.json {said}: engines read it there, and would serve without"
        f" speculation; {put}"
    )


def none_at_all(*, of_family: bool) -> str:
    words = "config.json announces no MTP module, and no tensor is named like one's"
    if not of_family:
        return words
    return f"{words}; models of this type are released with one, which a graft gives back"


def lost(
    wanted: str, names: Sequence[str], writer: str, loss: str, pickled: str, by_hand: str
) -> str:
    """names: those of the modules, where they are known. writer: the tool that wrote the folder;
    loss: what is known of it; pickled: a file that is the module's by its name, and a pickle; ""
    for unknown or none. by_hand: what to do where no graft gives the module back, "" where one
    does."""
    wrote = f"{writer}, which wrote this folder," if writer else "whatever wrote this folder"
    known = f" {loss[0].upper()}{loss[1:]}." if loss else ""
    by_hand = f". {by_hand}" if by_hand else ""
    named = f" ({shortened(names, _NAMED)})" if names else ""
    if pickled:
        return (
            f"config.json announces {wanted}, and no safetensors file has a tensor of any{named}:"
            f" {pickled}, by its name the module's, is a pickle, which engines do not load beside"
            " safetensors and which nothing here opens, since it may run code. If you trust its"
            f" source, write its tensors into a safetensors file and into the index{by_hand}"
        )
    return (
        f"config.json announces {wanted} and no tensor of any{named} is there: {wrote} left it"
        f" out.{known} Engines fail when they load it, or draft with weights that nobody"
        f" wrote{by_hand}"
    )


def main_layers_lost(
    count: int, lost: Sequence[int], others: Sequence[str], *, fewer: int | None, module: bool
) -> str:
    """count: main layers that config.json announces. others: what else of the main model is not
    there. fewer: layers of a model that would be whole. module: the MTP module is not there
    either."""
    layers = [_run(lost)] if lost[-1] - lost[0] == len(lost) - 1 else [f"{one}" for one in lost]
    gone = [
        f"main layers {shortened(layers, _NAMED)}" if len(lost) > 1 else f"main layer {lost[0]}"
    ]
    gone += [*others[:_NAMED], *(["the MTP module"] if module else [])]
    words = (
        f"config.json announces {count} main layers, and nothing is there of"
        f" {', '.join(gone[:-1])}{' and ' if gone[1:] else ''}{gone[-1]}: this is a part of the"
        " checkpoint, as a download or a save that was cut off leaves it. Download it again, or"
        " save it again from the original: no graft gives main layers back"
    )
    if fewer is None:
        return words
    return (
        f"{words}. Or config.json is a larger model's: where the original of these layers says"
        f" num_hidden_layers {fewer}, put its config.json here"
    )


def _run(numbers: Sequence[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 2 else " and ".join(map(str, numbers))


def lost_beside(wanted: str, kind: str, sign: str) -> str:
    """kind: the draft that is there instead; sign: what tells it."""
    return (
        f"config.json announces {wanted} and no tensor of any is there: {another_kind(kind, sign)}."
        " To draft with it alone, have config.json count no MTP module"
    )


# graft reads neither every model nor every quantization.
BY_HAND = (
    "graft does not read this model, its quantization, or a main model that is not as config.json"
    " says: put a file of the original's MTP tensors"
    " beside these and list it in the index, and the module in what the quantization leaves out"
)


def in_a_folder(file: str) -> str:
    return (
        f"{file} lies in a folder of its own, where no loader looks, and was not read: if it holds"
        " the module, put it beside the other files and list its tensors in the index"
    )


def flattened(name: str) -> str:
    return (
        f"{name} has all numbers of its layer in one row, as FSDP keeps them while it trains, and"
        " no engine looks for it: save the whole state dict again (FULL_STATE_DICT), or graft the"
        " original's layer"
    )


def not_in_folder(folder: str, wanted: str) -> str:
    return (
        f"config.json announces {wanted}, and {folder}, which --mtp names, has no tensor of any:"
        " name the folder that has, or the original"
    )


def counted_as_main(projection: str, *, is_announced: bool) -> str:
    """is_announced: config.json counts modules too."""
    layer = projection.partition(".layers.")[2].partition(".")[0]
    return (
        f"{projection} is of an MTP module, and config.json counts its layer among the main ones:"
        f" set num_hidden_layers to {layer}{'' if is_announced else _AND_THE_COUNT}, as the"
        " original has it, unless a merge wrote a main"
        " layer over the module, which --level weights tells. Engines compute the module as a main"
        " layer, and have no draft"
    )


_AND_THE_COUNT = ", and the field that counts MTP modules to their number"


def partly_lost(wanted: str, count: int, lost: Sequence[str], field: str, *, are_last: bool) -> str:
    """lost: the names of the modules that are not there, none where they are not known. field: the
    one of config.json that counts modules. are_last: none that is there follows one of them."""
    verb, counts = "is" if len(lost) == 1 else "are", field.split()[0] if field else "its count"
    missing = f" ({shortened(lost, _SINGLY)} {verb} missing)" if lost else ""
    words = (
        f"config.json announces {wanted}, and tensors of {count} are there{missing}: the others"
        " were lost, and a graft gives them back"
    )
    if not are_last:
        return words
    return f"{words}; or config.json counts too many, and {counts} is to be {count}"


def more_than_announced(wanted: str, more: Sequence[str]) -> str:
    """more: the names of the modules that are too many."""
    return (
        f"config.json announces {wanted}, and beside what it announces there is"
        f" {shortened(more, _NAMED)}, of which no engine looks for any tensor: a copy, or a module"
        " of another name. Leave it out, in the index too"
    )


def no_projection(name: str) -> str:
    return (
        f"no tensor beside {name} is of a projection of embedding and hidden state (eh_proj,"
        " mtp.fc or the like): it was lost, and without it the module cannot draft"
    )


def left_out_of_index(file: str) -> str:
    return f". They lie in {file}, which the index does not name, so that engines pass it over"


def of_another_kind(part: str, wanted: Sequence[str], found: Sequence[str]) -> str:
    """wanted and found: modules of a part of a layer."""
    return (
        f"{part} is of another kind than config.json says: it has"
        f" {shortened(found, _NAMED)}, and lacks {shortened(wanted, _NAMED)}."
        " The layer is another model's"
    )


def of_another_width(norm: str, own: int, wanted: int) -> str:
    """norm: the name of one of the module's."""
    return (
        f"{norm} and the module's other norms are of hidden states of {own} channels, and"
        f" config.json and the main model have {wanted}: the module is another model's"
    )


def of_other_shapes(count: int, shapes: Mapping[str, tuple[list[int], list[int]]]) -> str:
    """shapes: those of some of `count` tensors, with those that they should have."""
    some = [f"{name} {own} in place of {wanted}" for name, (own, wanted) in shapes.items()]
    return (
        f"it is another model's layer: {count} tensors have other shapes than config.json says and"
        f" the main model's have, such as {'; '.join(some[:_NAMED])}"
    )


def fewer_experts(names: Sequence[str], found: int, count: int) -> str:
    """names: tensors of all experts."""
    return (
        f"{shortened(names, _NAMED)} hold {found} of {count} experts: the others were lost, as"
        " where one rank of several saved its own"
    )


def of_one_rank(count: int, parts: int, first: tuple[str, tuple[list[int], list[int]]]) -> str:
    """first: one of `count` tensors, with its shape and the one that it should have."""
    name, (own, wanted) = first
    return (
        f"{count} matrices are one of {parts} parts of themselves, by rows or by columns, such as"
        f" {name} {own} in place of {wanted}: one rank of {parts} saved its own of a layer that"
        " tensor parallelism divides. Join all ranks' parts, or graft the original's layer"
    )


def in_each_others_place(one: str, other: str, count: int) -> str:
    pairs = f" ({count:,} pairs of them)" if count > 1 else ""
    return (
        f"{one} and {other} are in each other's place by their shapes{pairs}: give each the other's"
        " name"
    )


def no_expert(module: str, count: int, names: Sequence[str]) -> str:
    """names: of what is missing, in the form of the main layers' experts."""
    return (
        f"the routed experts of {module}, all {count}, are missing, and other tensors of it are"
        f" there. By the names that the main layers have for theirs: {shortened(names, _SINGLY)}"
    )


def fused(name: str) -> str:
    by = "vLLM has them in memory" if ".experts.w" in name else "transformers 5 saves them"
    return (
        f"{name} holds all experts in one tensor, as {by}, and engines look for each by its number:"
        " save it with the released names"
    )


def transposed(name: str, shape: list[int]) -> str:
    return f"{name} is stored transposed, {shape}: engines but Paddle's read {shape[::-1]}"


def transposed_beside_main(name: str, shape: Sequence[int], main: Sequence[int]) -> str:
    return (
        f"{name} is stored transposed, {list(shape)}: every main layer's of its name is"
        f" {list(main)}, and engines read both alike"
    )


def another_shape(name: str, shape: Sequence[int], main: Sequence[int]) -> str:
    return f"{name} is {list(shape)}, and every main layer's of its name {list(main)}"


def other_shapes(first: str, count: int, compared: int) -> str:
    """first: a sentence on the first of `count` tensors."""
    return (
        f"{count} of {compared} have others, and there is no family here that says theirs: {first}"
    )


WHOLE_IN_PADDLE_LAYOUT = (
    "the whole checkpoint stores its linears with inputs as rows, as Paddle does: no other engine"
    " reads it. Convert it into the released layout, or serve it with Paddle"
)


def codes_without_scale(name: str, dtype: str) -> str:
    return f"{name} holds {dtype} codes, and no scale is beside it"


def scale_without_codes(name: str) -> str:
    return f"{name} is a scale, and its weight is missing: none is beside it"


def scale_beside_floats(name: str, dtype: str, scale: str) -> str:
    return (
        f"{name} is {dtype}, and its {scale} is beside it: codes were cast and not multiplied by"
        " their scale, or the scale was left behind. Engines have no place for it"
    )


NO_MODEL_TYPE = (
    "config.json has no model_type, by which transformers and engines know a model: put the"
    " original's back"
)
NO_CLASS = (
    "config.json has no architectures, by which vLLM and SGLang find the model's class: put the"
    " original's back"
)


def class_of_another(architecture: str, model_type: str) -> str:
    return (
        f"config.json's architectures name {architecture}, the class of another model than"
        f" model_type {model_type}: engines build that, and cannot load these tensors. Put the"
        " original's name back"
    )


def class_of_a_draft(architecture: str) -> str:
    return (
        f"config.json's architectures name {architecture}, the class of a draft, and a main model"
        " is here: engines build the draft alone. Put the original's name back"
    )


def not_in_index(file: str, engines: str) -> str:
    """engines: that follow the index and add no file of this name."""
    return (
        f"{file} is not in the index: {engines}, which follow it, will not load that file. An"
        " export writes its tensors into an index"
    )


NO_INDEX = "none: vLLM and SGLang load every file without one, transformers does not"


def added(file: str) -> str:
    return f"{file} is not in the index, and SGLang adds a file of this name to GLM's models"
