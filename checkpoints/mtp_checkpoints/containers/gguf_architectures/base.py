"""Architecture of a GGUF file: the names that llama.cpp has for a model's tensors, and the keys
that describe it.

Source: llama.cpp's `conversion/` and `gguf-py/gguf/constants.py`, as llama-cpp-python 0.3.36 has
them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

from mtp_checkpoints.containers.gguf_forms import Form
from mtp_checkpoints.containers.gguf_values import Keys, Value, booleans, text, u32
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec

ARCHITECTURE = "general.architecture"
_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_AROUND = {_EMBEDDING: "token_embd.weight", _NORM: "output_norm.weight", _HEAD: "output.weight"}
# Tensors of a module that a file of it alone has in place of the main model's, as llama.cpp takes
# them from there.
_ALONE = {"embed_tokens.weight": _EMBEDDING, "shared_head.head.weight": _HEAD}
_LAYER = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,3})\.(.+)", re.ASCII)
_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.(.+)", re.ASCII)
_EXPERT = re.compile(r"(mlp\.experts)\.(0|[1-9][0-9]{0,4})(\.(?:gate|up|down)_proj)", re.ASCII)
_MERGED = "mlp.experts."
_SUFFIXES = (".weight", ".bias")
# Of a decoder beside a vision tower, which no such file holds: in names, and of its own config.
TEXT_PREFIX, TEXT_CONFIG = "model.language_model.", "text_config"
_MODULE, _MODULE_LAYER = "mtp.", "mtp.layers.0."
# Modules of a file that are named mtp. in checkpoints, with those of a layer after the last.
OF_MTP: Mapping[str, str] = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}
_FROM_MTP = {module: name for name, module in OF_MTP.items()}

# Modules of a layer, or whole names of tensors, with the names of a block; all architectures here
# have these.
COMMON: Mapping[str, str] = {
    "input_layernorm": "attn_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "eh_proj": "nextn.eh_proj",
    "embed_tokens": "nextn.embed_tokens",
    "shared_head.norm": "nextn.shared_head_norm",
    "shared_head.head": "nextn.shared_head_head",
}
# With those of grouped attention.
GROUPED: Mapping[str, str] = {
    **COMMON,
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}


class Change(StrEnum):
    """Half of kv_b_proj that a tensor holds, by head."""

    KEYS = "k_b"  # transposed: [h, c, n]
    VALUES = "v_b"  # [h, v, c]


HALVES: Mapping[Change, str] = {half: f"self_attn.{half}_proj" for half in Change}
LATENT_UP = "self_attn.kv_b_proj"


def halves_of(released: str) -> tuple[str, ...]:
    """Return the names of both halves of a projection of latents, keys first; none for another
    tensor."""
    if f".{LATENT_UP}." not in released:
        return ()
    return tuple(released.replace(LATENT_UP, module) for module in HALVES.values())


class Place(NamedTuple):
    """Tensor of a file, and which expert of it, where it holds those of all."""

    name: str
    expert: int | None = None


class Whole(NamedTuple):
    """Released tensor of which files have parts: its name, its form, and the names of the parts."""

    name: str
    form: Form
    parts: tuple[str, ...]


class Released(NamedTuple):
    """Released names of what a tensor of a file holds: those of all experts, or of one tensor, of
    which it is a half where change says so; none where a module alone does not own it."""

    names: tuple[str, ...]
    change: Change | None = None


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp, by its name in general.architecture.

    model_types: those of config.json that it stands for. modules: names of a layer's modules, or of
    whole tensors, with those of a block. described: the keys of a model; config: the config.json of
    keys and of the names of a file's tensors, which raises InvalidInputError. forms: by the keys,
    those of modules, or of whole tensors, that files have in others than checkpoints.
    has_mtp_names: the module's tensors are named mtp. in checkpoints, and it has no embedding and
    no head of its own.
    layer_flags: keys with a flag for every layer; false for modules.
    """

    name: str
    model_types: tuple[str, ...]
    modules: Mapping[str, str]
    described: Callable[[ModelSpec, str], dict[str, Value]]
    config: Callable[[Keys, Collection[str]], dict[str, Any]]
    forms: Callable[[Keys], Mapping[str, Form]] | None = None
    has_mtp_names: bool = False
    layer_flags: Mapping[str, Callable[[LayerSpec], bool]] = field(default_factory=dict)

    def keys(self, spec: ModelSpec, modules: int) -> dict[str, Value]:
        """Return the keys of a file with so many MTP modules beside the main layers, or of them
        alone; those of the vocabulary and of the file itself are not among them."""
        layers = len(spec.layers) + modules
        counted = {"block_count": layers} | ({"nextn_predict_layers": modules} if modules else {})
        return {
            ARCHITECTURE: text(self.name),
            **{f"{self.name}.{key}": u32(count) for key, count in counted.items()},
            **self.described(spec, self.name),
            **{
                f"{self.name}.{key}": booleans([*map(flag, spec.layers), *([False] * modules)])
                for key, flag in self.layer_flags.items()
            },
        }

    def form_in(self, keys: Keys, mtp_layer: int | None) -> Callable[[str], Form | None]:
        """Return what gives the form of a tensor by its released name, None for one that is as
        released; mtp_layer as in place."""
        if self.forms is None:
            return lambda released: None
        forms = self.forms(keys)
        return lambda released: form_of(forms, self._usual(released, mtp_layer))

    def whole_in(self, keys: Keys) -> Callable[[str], Whole | None]:
        """Return what gives the tensor that another, by its name, is a part of; None for one that
        is no part."""
        forms = {} if self.forms is None else self.forms(keys)
        whole_of = {part: module for module, form in forms.items() for part, _ in form.parts}

        def whole(name: str) -> Whole | None:
            part = next((part for part in whole_of if f".{part}." in name), None)
            if part is None:
                return None
            form = forms[whole_of[part]]
            parts = tuple(name.replace(part, own) for own, _ in form.parts)
            return Whole(name.replace(part, whole_of[part]), form, parts)

        return whole

    def _usual(self, released: str, mtp_layer: int | None) -> str:
        """Return a released name as if the decoder were alone, and the module a layer after the
        last."""
        if released.startswith(TEXT_PREFIX):
            released = f"model.{released.removeprefix(TEXT_PREFIX)}"
        if not self.has_mtp_names or not released.startswith(_MODULE):
            return released
        rest = released.removeprefix(_MODULE_LAYER)
        if rest == released:
            module, suffix = _split(released.removeprefix(_MODULE), OF_MTP)
            rest = OF_MTP.get(module, module) + suffix
        return f"model.layers.{mtp_layer}.{rest}"

    def _as_released(self, usual: str, mtp_layer: int | None) -> str:
        """Return the released name of a decoder alone."""
        prefix = f"model.layers.{mtp_layer}."
        if not self.has_mtp_names or not usual.startswith(prefix):
            return usual
        rest = usual.removeprefix(prefix)
        module, suffix = _split(rest, _FROM_MTP)
        return f"mtp.{_FROM_MTP[module]}{suffix}" if module in _FROM_MTP else _MODULE_LAYER + rest

    def place(
        self, released: str, module_alone: int | None = None, mtp_layer: int | None = None
    ) -> Place | None:
        """Return where a tensor of a released name is, None for one that no file holds.

        module_alone: the layer of the module that a file holds without a main model; its own
        embedding and head stand there in place of the main model's. mtp_layer: the layer of the
        module, which not all names tell; module_alone, if it is given.
        """
        released = self._usual(released, mtp_layer if module_alone is None else module_alone)
        if released in _AROUND:
            return Place(_AROUND[released])
        match = _LAYER.fullmatch(released)
        if match is None:
            return None
        layer, rest = int(match[1]), match[2]
        if layer == module_alone and rest in _ALONE:
            return Place(_AROUND[_ALONE[rest]])
        expert = _EXPERT.match(rest)
        if expert is not None:
            rest = f"{expert[1]}{expert[3]}{rest[expert.end() :]}"
        module, suffix = _split(rest, self.modules)
        if module not in self.modules or rest.startswith(_MERGED) is not (expert is not None):
            return None
        name = f"blk.{layer}.{self.modules[module]}{suffix}"
        return Place(name, None if expert is None else int(expert[2]))

    def released(
        self,
        name: str,
        experts: int = 1,
        module_alone: int | None = None,
        mtp_layer: int | None = None,
    ) -> Released | None:
        """Return the released names of what a file's tensor holds, None for one that is not known.

        experts: first size of the tensor, if it holds those of all. module_alone and mtp_layer as
        in place.
        """
        found = self._found(name, experts, module_alone)
        layer = mtp_layer if module_alone is None else module_alone
        if found is None or layer is None:
            return found
        return found._replace(names=tuple(self._as_released(own, layer) for own in found.names))

    def _found(self, name: str, experts: int, module_alone: int | None) -> Released | None:
        if name in self._released_around:
            own = self._released_around[name]
            if module_alone is None:
                return Released((own,))
            if self.has_mtp_names:
                return Released(())
            alone = next((rest for rest, around in _ALONE.items() if around == own), None)
            return Released(() if alone is None else (f"model.layers.{module_alone}.{alone}",))
        match = _BLOCK.fullmatch(name)
        if match is None:
            return None
        prefix = f"model.layers.{match[1]}"
        module, suffix = _split(match[2], self._released_modules)
        if module not in self._released_modules:
            return None
        own = self._released_modules[module]
        if own.startswith(_MERGED):
            last = own.removeprefix(_MERGED)
            return Released(tuple(f"{prefix}.{_MERGED}{e}.{last}{suffix}" for e in range(experts)))
        for half, module in HALVES.items():
            if own == module:
                return Released((f"{prefix}.{LATENT_UP}{suffix}",), half)
        return Released((f"{prefix}.{own}{suffix}",))

    @cached_property
    def _released_modules(self) -> Mapping[str, str]:
        return {block: released for released, block in self.modules.items()}

    @property
    def _released_around(self) -> Mapping[str, str]:
        return {name: released for released, name in _AROUND.items()}


def form_of(forms: Mapping[str, Form], usual: str) -> Form | None:
    """Return the form of a tensor by its name in a decoder alone; None for one as released."""
    match = _LAYER.fullmatch(usual)
    rest = usual if match is None else match[2]
    return forms.get(_split(rest, forms)[0])


def _split(rest: str, modules: Collection[str]) -> tuple[str, str]:
    """Return module and suffix of a name in a layer; a whole name that is known has none."""
    if rest in modules:
        return rest, ""
    for suffix in _SUFFIXES:
        if rest.endswith(suffix):
            return rest.removesuffix(suffix), suffix
    return rest, ""
