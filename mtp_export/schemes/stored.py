"""What must lie on disk, from config.json alone: every tensor of a folder by name, and the weight
of the model that it belongs to."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mtp_export.errors import InvalidInputError
from mtp_export.families import family_of
from mtp_export.families.base import ModelFamily, Role, TensorSpec
from mtp_export.schemes.readings import Form, Reading, reading_of
from mtp_export.schemes.storage import W4AFP8_GROUP, Storage, stored_tensors
from mtp_export.targets.base import Target

_WEIGHT = ".weight"
# Linears that engines load as one matrix, and the names they look it up by.
_TOGETHER = {
    ("gate_proj", "up_proj"): ("gate_up_proj",),
    ("q_a_proj", "kv_a_proj_with_mqa"): ("fused_qkv_a_proj", "fused_qkv_a_proj_with_mqa"),
}
_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A tensor of the model, and the folder's tensors that hold it.

    weight has the released name and the shape [N, K]. tensors have the folder's names and shapes,
    the one with the elements first; then come scale, and weight_shape or input_scale. BF16 stands
    for whatever is stored in the dtype that the model computes in. transposed: matrices are [K, N].
    """

    weight: TensorSpec
    storage: Storage
    tensors: tuple[TensorSpec, ...]
    transposed: bool = False

    @property
    def released_names(self) -> tuple[str, ...]:
        """The tensors' names in the released layout."""
        own = self.tensors[0].name
        module = own.rpartition(".")[0]
        if len(self.tensors) == 1:
            return (self.weight.name,)
        return tuple(
            # an input_scale lies beside the module
            self.weight.module + tensor.name.removeprefix(module)
            if tensor.name.startswith(f"{module}.")
            else tensor.name
            for tensor in self.tensors
        )


@dataclass(frozen=True)
class Stored:
    """Everything that a folder must hold, by the released names of what it stands for."""

    weights: Mapping[str, StoredWeight]

    @cached_property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Every tensor by its name on disk, ready to be compared with what is there."""
        return {tensor.name: tensor for one in self.weights.values() for tensor in one.tensors}

    @cached_property
    def weight_of(self) -> Mapping[str, StoredWeight]:
        """The weight that each tensor on disk belongs to."""
        return {tensor.name: one for one in self.weights.values() for tensor in one.tensors}

    @property
    def main(self) -> Stored:
        """The main model's part alone."""
        return self._part(lambda one: one.weight.mtp_layer is None)

    @property
    def mtp(self) -> Stored:
        """The MTP layers' part alone."""
        return self._part(lambda one: one.weight.mtp_layer is not None)

    def _part(self, wanted: Callable[[StoredWeight], bool]) -> Stored:
        return Stored({name: one for name, one in self.weights.items() if wanted(one)})


def model_family(config: Mapping[str, Any]) -> ModelFamily:
    """The family of a config.json whatever it says of quantization: what it expects are the
    tensors as the model computes with them.

    Raises what family_of raises.
    """
    return family_of({k: v for k, v in config.items() if k != "quantization_config"})


def stored_model(config: Mapping[str, Any]) -> Stored:
    """What a folder in the released layout holds, main and MTP, by its config.json.

    Raises UnsupportedError for a model or quantization that this tool does not know,
    InvalidInputError for a config that contradicts itself or that engines cannot follow.
    """
    specs = model_family(config).expected.values()
    return stored(specs, config.get("quantization_config"))


def stored_draft(config: Mapping[str, Any], target: Target, main_layers: int = 1) -> Stored:
    """What a draft folder made for a target holds, by its own config.json.

    main_layers is the main model's num_hidden_layers, of which single-layer drafts know nothing;
    only the released names in the answer depend on it. Raises as stored_model.
    """
    family = model_family(target.released_config(config, main_layers))
    specs = [spec for spec in family.expected.values() if spec.mtp_layer is not None]
    layers = {spec.name: layer for spec in specs if (layer := spec.mtp_layer) is not None}
    return stored(
        specs,
        config.get("quantization_config"),
        lambda name: target.mtp_name(name, layers[name]),
        target.transposes,
    )


def stored(
    specs: Iterable[TensorSpec],
    quantization: object,
    rename: Callable[[str], str] = str,
    transposes: bool = False,
) -> Stored:
    """How tensors of a model lie on disk under a quantization_config.

    specs are the model's own tensors, none of them quantized. rename gives a released name the
    folder's, which is what the config's patterns are held against.
    """
    reading = reading_of(quantization)
    forms: dict[str, Form | None] = {}
    weights: dict[str, StoredWeight] = {}
    for spec in specs:
        name = rename(spec.name)
        form = None
        if name.endswith(_WEIGHT) and len(spec.shape) == 2:
            # An engine takes a layer's experts for what its first one is.
            module = _EXPERT.sub(".experts.0.", name.removesuffix(_WEIGHT))
            if module not in forms:
                forms[module] = reading.form_of(module, spec.role)
            form = forms[module]
        weights[spec.name] = _stored_weight(spec, name, form, transposes)
    _check_experts(forms)
    _check_fused(reading, forms)
    return Stored(weights)


def _stored_weight(
    spec: TensorSpec, name: str, form: Form | None, transposes: bool
) -> StoredWeight:
    if form is None:
        tensors: tuple[TensorSpec, ...] = (replace(spec, name=name),)
    else:
        tensors = tuple(_quantized_tensors(spec, name, form))
    storage = Storage.BF16 if form is None else form.storage
    # An embedding is a lookup table, not a linear.
    if not transposes or len(spec.shape) != 2 or spec.role is Role.EMBEDDING:
        return StoredWeight(spec, storage, tensors)
    turned = tuple(
        replace(tensor, shape=tensor.shape[::-1]) if len(tensor.shape) == 2 else tensor
        for tensor in tensors
    )
    return StoredWeight(spec, storage, turned, transposed=True)


def _quantized_tensors(spec: TensorSpec, name: str, form: Form) -> Iterator[TensorSpec]:
    divisor = {
        Storage.INT8_CHANNEL: 4,
        Storage.INT4_GROUP: form.group_size,
        Storage.W4AFP8: W4AFP8_GROUP,
    }.get(form.storage, 1)
    if spec.shape[1] % divisor:
        raise InvalidInputError(
            f"config.json's quantization_config does not fit {spec.name}",
            expected=f"K divisible by {divisor} under {form.storage}",
            found=f"[N, K] = {list(spec.shape)}",
        )
    first: str | None = None
    shape = (spec.shape[0], spec.shape[1])
    for tensor in stored_tensors(name, shape, form.storage, form.group_size, form.fp8_scale_name):
        dtypes: tuple[str, ...] = (tensor.dtype,)
        if first is not None and form.storage is Storage.FP8_BLOCK:
            dtypes = form.fp8_scale_dtypes
        yield replace(spec, name=tensor.name, shape=tensor.shape, dtypes=dtypes, scale_of=first)
        first = first or tensor.name


def _check_fused(reading: Reading, forms: Mapping[str, Form | None]) -> None:
    """Linears that engines load together must have one form, also under the fused one's name."""
    for module, form in forms.items():
        parent, _, last = module.rpartition(".")
        for parts, fused_names in _TOGETHER.items():
            others = [f"{parent}.{part}" for part in parts[1:]]
            if last != parts[0] or not forms.keys() >= set(others):
                continue
            for other in others:
                if forms[other] != form:
                    raise _unlike(module, form, other, forms[other])
            if form is None or _EXPERT.search(module):
                continue
            for fused in (f"{parent}.{name}" for name in fused_names):
                if (found := reading.fused_form(fused, form)) != form:
                    raise _unlike(module, form, fused, found)


def _check_experts(forms: Mapping[str, Form | None]) -> None:
    """The three projections of an expert are one kernel's."""
    for module, form in forms.items():
        if module.endswith(".experts.0.down_proj"):
            up = module.replace("down_proj", "up_proj")
            if forms[up] != form:
                raise _unlike(module, form, up, forms[up])


def _unlike(
    module: str, form: Form | None, other: str, other_form: Form | None
) -> InvalidInputError:
    return InvalidInputError(
        f"config.json's quantization_config gives {module} and {other} different forms",
        expected="one form: engines load them together",
        found=f"{_words(form)} and {_words(other_form)}",
        todo="Correct its targets and ignore list; patterns must match fused names too",
    )


def _words(form: Form | None) -> str:
    return "not quantized" if form is None else str(form.storage)
