"""Architecture of a GGUF file: the names that llama.cpp has for a model's tensors, and the keys
that describe it.

Source: llama.cpp's `conversion/` and `gguf-py/gguf/constants.py`, as llama-cpp-python 0.3.36 has
them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

from mtp_checkpoints.containers.gguf_values import Keys, Value, text, u32
from mtp_checkpoints.families.spec import ModelSpec

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
    keys and of the names of a file's tensors, which raises InvalidInputError.
    """

    name: str
    model_types: tuple[str, ...]
    modules: Mapping[str, str]
    described: Callable[[ModelSpec, str], dict[str, Value]]
    config: Callable[[Keys, Collection[str]], dict[str, Any]]

    def keys(self, spec: ModelSpec, modules: int) -> dict[str, Value]:
        """Return the keys of a file with so many MTP modules beside the main layers, or of them
        alone; those of the vocabulary and of the file itself are not among them."""
        layers = len(spec.layers) + modules
        counted = {"block_count": layers} | ({"nextn_predict_layers": modules} if modules else {})
        return {
            ARCHITECTURE: text(self.name),
            **{f"{self.name}.{key}": u32(count) for key, count in counted.items()},
            **self.described(spec, self.name),
        }

    def place(self, released: str, module_alone: int | None = None) -> Place | None:
        """Return where a tensor of a released name is, None for one that no file holds.

        module_alone: the layer of the module that a file holds without a main model; its own
        embedding and head stand there in place of the main model's.
        """
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
        self, name: str, experts: int = 1, module_alone: int | None = None
    ) -> Released | None:
        """Return the released names of what a file's tensor holds, None for one that is not known.

        experts: first size of the tensor, if it holds those of all. module_alone as in place.
        """
        if name in self._released_around:
            own = self._released_around[name]
            if module_alone is None:
                return Released((own,))
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


def _split(rest: str, modules: Mapping[str, str]) -> tuple[str, str]:
    """Return module and suffix of a name in a layer; a whole name that is known has none."""
    if rest in modules:
        return rest, ""
    for suffix in _SUFFIXES:
        if rest.endswith(suffix):
            return rest.removesuffix(suffix), suffix
    return rest, ""
