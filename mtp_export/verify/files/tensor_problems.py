"""Problems of a folder's tensors by what its config.json promises: tensors that are missing or not
promised, and weights in another form."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.families.base import Role
from mtp_checkpoints.families.name_parts import module_of, place_of
from mtp_checkpoints.formats.base import SCALES_OF_CODES
from mtp_checkpoints.quantization.mismatches import Mismatch
from mtp_checkpoints.quantization.native import field_of
from mtp_checkpoints.quantization.stored import StoredModel, StoredWeight
from mtp_export.verify.check import Problem
from mtp_export.verify.diagnosis.causes import files as causes

_WHOLE = ".kv_b_proj."
_OTHER_HALF = {
    "attn_k_b": "attn_v_b",
    "attn_v_b": "attn_k_b",
    "embed_q": "unembed_out",
    "unembed_out": "embed_q",
}
NO_SUCH_TENSOR = "no such tensor"  # of what was found
COPIED = (Role.EMBEDDING, Role.HEAD)
"""Roles of which a draft may have copies of the main model's."""


def sorted_out(
    differences: Sequence[Mismatch], tensors: Mapping[str, TensorInfo], promised: StoredModel
) -> tuple[list[Problem], list[Problem]]:
    """Problems of presence, one per tensor, and of precision, one per weight."""
    if not differences:
        return [], []
    presence: list[Problem] = []
    modules = _by_module(tensors)
    astray: dict[str, StoredWeight] = {}
    biases = _lost_biases(differences, promised)
    for found in differences:
        module = found.tensor.rpartition(".")[0]
        weight = promised.weight_of.get(found.tensor) or _weight_of_module(promised, module)
        own = tensors.get(found.tensor)
        if (module, own and tuple(own.shape)) in biases or found.tensor in biases.values():
            presence.append(Problem(found.tensor, _presence_words(found)))
        elif weight is not None and _stored_of(weight, modules, promised):
            astray.setdefault(weight.weight.name, weight)
        else:
            presence.append(Problem(found.tensor, _presence_words(found)))
    precision = [
        _precision(weight, _stored_of(weight, modules, promised), field_of(promised.quantization))
        for weight in astray.values()
    ]
    return _of_lost_halves(presence), precision


def _of_lost_halves(problems: Sequence[Problem]) -> list[Problem]:
    """Return problems of presence, those of a half of kv_b_proj, as GGUF and MLX have it, and of
    the whole as that of the other half, which is lost."""
    halves = dict[int, tuple[str, str]]()
    for problem in problems:
        module, _, half = module_of(problem.subject).rpartition(".")
        if half in _OTHER_HALF:
            names = (problem.subject, f"{module}.{_OTHER_HALF[half]}.weight")
            halves.setdefault(place_of(problem.subject)[0], names)
    wholes = {place_of(one.subject)[0]: one.subject for one in problems if _WHOLE in one.subject}
    told = list[Problem]()
    for problem in problems:
        layer = place_of(problem.subject)[0]
        is_half = problem.subject == wholes.get(layer) or _is_half(problem.subject)
        if is_half and layer in halves and layer in wholes:
            words = causes.half_missing(*halves[layer], wholes[layer])
            problem = replace(problem, words=words)
        told.append(problem)
    return told


def _is_half(name: str) -> bool:
    return module_of(name).rpartition(".")[2] in _OTHER_HALF


def _lost_biases(
    differences: Sequence[Mismatch], promised: StoredModel
) -> dict[tuple[str, tuple[int, ...] | None], str]:
    """Biases and the like that are missing, by their modules and shapes: a strange tensor of the
    same may be one under another name, and is no scale of the module's weight."""
    found = dict[tuple[str, tuple[int, ...] | None], str]()
    for one in differences:
        module, _, last = one.tensor.rpartition(".")
        weight = promised.weight_of.get(one.tensor)
        is_alone = weight is not None and len(weight.tensors) == 1 and last not in SCALES_OF_CODES
        if weight is not None and is_alone and one.found == NO_SUCH_TENSOR:
            found[module, tuple(weight.weight.shape)] = one.tensor
    return found


def _stored_of(
    weight: StoredWeight, modules: Mapping[str, Mapping[str, TensorInfo]], promised: StoredModel
) -> dict[str, TensorInfo]:
    """The tensors of a weight's module but for those of its other weights, such as a bias."""
    module = weight.tensors[0].name.rpartition(".")[0]
    return {
        last: tensor
        for last, tensor in modules.get(module, {}).items()
        if promised.weight_of.get(tensor.name, weight) is weight
    }


def _weight_of_module(promised: StoredModel, module: str) -> StoredWeight | None:
    """The weight that a module's tensors hold in another form than promised; of bitsandbytes, whose
    constants have names below the weight's, that weight."""
    for name in (module, module.rpartition(".")[0]):
        if (weight := promised.weight_of.get(name)) is not None:
            return weight
    for suffix in SCALES_OF_CODES:
        if (weight := promised.weight_of.get(f"{module}.{suffix}")) is not None:
            return weight
    return None


def _presence_words(found: Mismatch) -> str:
    if found.found == NO_SUCH_TENSOR:
        return causes.tensor_missing(found.tensor, found.expected)
    return causes.tensor_unlike_promised(found.tensor, found.problem, found.found)


def _by_module(tensors: Mapping[str, TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    """Tensors by module, then by the last component of their names."""
    modules: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        modules[module][last] = tensor
    return modules


def _precision(weight: StoredWeight, stored_as: Mapping[str, TensorInfo], config: str) -> Problem:
    """The problem of a weight in another form than config.json's field of this name makes an engine
    expect."""
    name = weight.tensors[0].name
    module = name.rpartition(".")[0]
    wanted = {tensor.name.rpartition(".")[2]: tensor for tensor in weight.tensors}
    first, *scales = weight.tensors
    stored = _shown(stored_as.values())
    if first.name.rpartition(".")[2] not in stored_as and stored_as.keys() <= wanted.keys():
        words = causes.scales_without_weight(module, stored, first.name)
    elif stored_as.keys() < wanted.keys() and _agree(stored_as, wanted):
        missing = ", ".join(t.name for t in scales if t.name.rpartition(".")[2] not in stored_as)
        words = causes.scales_missing(missing)
    elif stored_as.keys() > wanted.keys() and _agree({k: stored_as[k] for k in wanted}, wanted):
        stray = [tensor for key, tensor in stored_as.items() if key not in wanted]
        words = causes.stray_tensors(module, _shown(stray))
    elif stored_as.keys() == wanted.keys():
        words = causes.another_dtype_or_shape(module, stored, _promised(weight))
        if any(0 in tensor.shape for tensor in stored_as.values()):
            words = causes.holds_nothing(module, stored)
        elif _is_transposed(stored_as, wanted):
            words = causes.stored_transposed(module, stored, _promised(weight))
        elif _is_in_another_shape(stored_as, wanted):
            words = causes.in_another_shape(module, stored, _promised(weight))
        if weight.weight.mtp_layer is not None and weight.weight.role in COPIED:
            tokens = {one.shape[0] for one in stored_as.values() if len(one.shape) > 1}
            of_others = tokens != {weight.weight.shape[0]}
            words += causes.ANOTHER_VOCABULARY if of_others else causes.COPY_NOT_NEEDED
    elif (other := _under_another_name(stored_as, wanted)) is not None:
        words = causes.lies_under_another_name(*other)
    else:
        words = causes.another_storage(
            module,
            stored=stored,
            config=config,
            storage=weight.storage,
            expected=_promised(weight),
        )
    return Problem(name, words)


def _under_another_name(
    found: Mapping[str, TensorInfo], wanted: Mapping[str, Any]
) -> tuple[str, str] | None:
    """Return the names of the tensor that is the one that is missing, by its dtype and shape, and
    of that one, where all others are as promised."""
    strange = found.keys() - wanted.keys()
    missing = {key for key in wanted.keys() - found.keys() if not wanted[key].optional}
    rest = {key: found[key] for key in found.keys() & wanted.keys()}
    if len(strange) != 1 or len(missing) != 1 or not rest or not _agree(rest, wanted):
        return None
    own, theirs = found[strange.pop()], wanted[missing.pop()]
    is_it = own.dtype in theirs.dtypes and tuple(own.shape) == tuple(theirs.shape)
    return (own.name, theirs.name) if is_it else None


def _is_transposed(found: Mapping[str, TensorInfo], wanted: Mapping[str, Any]) -> bool:
    """Return whether a matrix alone is as promised, but for rows in the place of columns."""
    ((key, tensor), *others) = found.items()
    shape = tuple(wanted[key].shape)
    is_turned = tuple(tensor.shape) == (*shape[:-2], *shape[:-3:-1]) != shape
    return not others and is_turned and tensor.dtype in wanted[key].dtypes


def _is_in_another_shape(found: Mapping[str, TensorInfo], wanted: Mapping[str, Any]) -> bool:
    """Return whether a weight alone has as many numbers as promised, in another shape."""
    ((key, tensor), *others) = found.items()
    is_whole = prod(tensor.shape) == prod(wanted[key].shape) and tensor.dtype in wanted[key].dtypes
    return not others and is_whole and tuple(tensor.shape) != tuple(wanted[key].shape)


def _agree(found: Mapping[str, TensorInfo], wanted: Mapping[str, Any]) -> bool:
    return all(
        tensor.dtype in wanted[key].dtypes and tensor.shape == wanted[key].shape
        for key, tensor in found.items()
    )


def _shown(tensors: Iterable[TensorInfo]) -> str:
    return ", ".join(
        f"{tensor.name.rpartition('.')[2]} {tensor.dtype} {list(tensor.shape)}"
        for tensor in tensors
    )


def _promised(weight: StoredWeight) -> str:
    return ", ".join(
        f"{t.name.rpartition('.')[2]} {' or '.join(t.dtypes)} {list(t.shape)}"
        for t in weight.tensors
    )
