"""DeepSeek-V3 and R1: MLA, mixture of experts, and MTP layers stored behind the last main layer.

Source: README_WEIGHTS.md and the index of the released checkpoints (91,991 tensors).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mtp_export.errors import InvalidInputError, UnsupportedError
from mtp_export.families.base import (
    ModulePatterns,
    Role,
    SharedTensor,
    TensorSpec,
    config_int,
)

_LAYERS_PREFIX = "model.layers."
_MAX_LAYERS = 1_000
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_PATTERNS = ModulePatterns(
    linears={
        Role.ATTENTION: "self_attn.*_proj.*",
        Role.DENSE_MLP: "mlp.(gate_proj|up_proj|gate_up_proj|down_proj)$",
        Role.SHARED_EXPERT: "mlp.shared_experts.*",
        Role.ROUTED_EXPERT: "mlp.experts.*",
    },
    other_matrices=(
        "lm_head",
        "re:.*mlp.gate$",
        "re:.*eh_proj$",
        "re:.*shared_head.*",
        "re:.*embed_tokens$",
    ),
    fused={
        ("gate_proj", "up_proj"): ("gate_up_proj",),
        ("q_a_proj", "kv_a_proj_with_mqa"): ("fused_qkv_a_proj", "fused_qkv_a_proj_with_mqa"),
    },
    absorbed=("kv_b_proj",),
)


@dataclass(frozen=True)
class DeepseekV3Family:
    """Tensors of one DeepSeek-V3 config."""

    config: Mapping[str, Any]
    num_hidden_layers: int
    mtp_layers: range
    dtype: str

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> DeepseekV3Family:
        """Read a config.json.

        Raises InvalidInputError for a missing or unusable field, UnsupportedError for a variant
        that no release has.
        """
        layers = config_int(config, "num_hidden_layers", maximum=_MAX_LAYERS)
        promised = config_int(
            config, "num_nextn_predict_layers", default=0, minimum=0, maximum=_MAX_LAYERS
        )
        mtp_layers = range(layers, layers + promised)
        for key in ("attention_bias", "tie_word_embeddings"):
            if config.get(key):
                raise UnsupportedError(
                    f"config.json sets {key}, which no released DeepSeek-V3 does",
                    expected="false",
                    found=config[key],
                )
        name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
        if not isinstance(name, str) or name not in _DTYPES:
            raise InvalidInputError(
                "config.json names an unknown torch_dtype",
                expected=", ".join(_DTYPES),
                found=repr(name)[:100],
            )
        return cls(config, layers, mtp_layers, _DTYPES[name])

    @property
    def patterns(self) -> ModulePatterns:
        """Module names as engines' quantization configs refer to them."""
        return _PATTERNS

    @cached_property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Every tensor that the config promises, main and MTP, by name."""
        return {spec.name: spec for spec in self._all()}

    @property
    def shared(self) -> tuple[SharedTensor, ...]:
        """Pairs of the MTP layers' copies of embedding and head and the main model's own."""
        return tuple(
            SharedTensor(f"{_LAYERS_PREFIX}{layer}.{own}", main)
            for layer in self.mtp_layers
            for own, main in (
                ("embed_tokens.weight", "model.embed_tokens.weight"),
                ("shared_head.head.weight", "lm_head.weight"),
            )
        )

    def mtp_layer_of(self, name: str) -> int | None:
        """Return the MTP layer that a tensor name belongs to, None for the main model's."""
        if not name.startswith(_LAYERS_PREFIX):
            return None
        digits = name.removeprefix(_LAYERS_PREFIX).partition(".")[0]
        return self._mtp_layer_of_digits.get(digits)

    @cached_property
    def _mtp_layer_of_digits(self) -> dict[str, int]:
        return {str(layer): layer for layer in self.mtp_layers}

    def _size(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        return config_int(self.config, key, default=default, minimum=minimum)

    def _all(self) -> Iterator[TensorSpec]:
        hidden, vocab = self._size("hidden_size"), self._size("vocab_size")
        yield TensorSpec(
            "model.embed_tokens.weight", (vocab, hidden), (self.dtype,), Role.EMBEDDING
        )
        yield self._norm("model.norm", hidden, None)
        yield TensorSpec("lm_head.weight", (vocab, hidden), (self.dtype,), Role.HEAD)
        for layer in range(self.num_hidden_layers):
            yield from self._layer(layer, None)
        for layer in self.mtp_layers:
            yield from self._layer(layer, layer)
            yield from self._mtp_extras(layer, hidden, vocab)

    def _layer(self, layer: int, mtp: int | None) -> Iterator[TensorSpec]:
        prefix, hidden = f"{_LAYERS_PREFIX}{layer}", self._size("hidden_size")
        yield self._norm(f"{prefix}.input_layernorm", hidden, mtp)
        yield self._norm(f"{prefix}.post_attention_layernorm", hidden, mtp)
        yield from self._attention(f"{prefix}.self_attn", hidden, mtp)
        dense_layers, every = (
            self._size("first_k_dense_replace", minimum=0),
            self._size("moe_layer_freq", 1),
        )
        if mtp is None and (layer < dense_layers or layer % every):
            size = self._size("intermediate_size")
            yield from self._mlp(f"{prefix}.mlp", size, Role.DENSE_MLP, mtp)
        else:
            yield from self._moe(f"{prefix}.mlp", hidden, mtp)

    def _attention(self, prefix: str, hidden: int, mtp: int | None) -> Iterator[TensorSpec]:
        heads, rope = self._size("num_attention_heads"), self._size("qk_rope_head_dim")
        nope, value = self._size("qk_nope_head_dim"), self._size("v_head_dim")
        latent = self._size("kv_lora_rank")
        shapes = {
            "kv_a_proj_with_mqa": (latent + rope, hidden),
            "kv_b_proj": (heads * (nope + value), latent),
            "o_proj": (hidden, heads * value),
        }
        if self.config.get("q_lora_rank") is None:
            shapes["q_proj"] = (heads * (nope + rope), hidden)
        else:
            q_rank = self._size("q_lora_rank")
            shapes["q_a_proj"] = (q_rank, hidden)
            shapes["q_b_proj"] = (heads * (nope + rope), q_rank)
            yield self._norm(f"{prefix}.q_a_layernorm", q_rank, mtp)
        yield self._norm(f"{prefix}.kv_a_layernorm", latent, mtp)
        for name, shape in shapes.items():
            yield self._linear(f"{prefix}.{name}", shape, Role.ATTENTION, mtp)

    def _mlp(self, prefix: str, size: int, role: Role, mtp: int | None) -> Iterator[TensorSpec]:
        hidden = self._size("hidden_size")
        yield self._linear(f"{prefix}.gate_proj", (size, hidden), role, mtp)
        yield self._linear(f"{prefix}.up_proj", (size, hidden), role, mtp)
        yield self._linear(f"{prefix}.down_proj", (hidden, size), role, mtp)

    def _moe(self, prefix: str, hidden: int, mtp: int | None) -> Iterator[TensorSpec]:
        experts, size = self._size("n_routed_experts"), self._size("moe_intermediate_size")
        kept = tuple(dict.fromkeys((self.dtype, "F32")))
        yield TensorSpec(f"{prefix}.gate.weight", (experts, hidden), kept, Role.ROUTER, mtp)
        if self.config.get("topk_method", "noaux_tc") == "noaux_tc":
            name = f"{prefix}.gate.e_score_correction_bias"
            yield TensorSpec(name, (experts,), kept[::-1], Role.ROUTER, mtp)
        if shared := self._size("n_shared_experts", 0, minimum=0):
            yield from self._mlp(f"{prefix}.shared_experts", size * shared, Role.SHARED_EXPERT, mtp)
        for expert in range(experts):
            yield from self._mlp(f"{prefix}.experts.{expert}", size, Role.ROUTED_EXPERT, mtp)

    def _mtp_extras(self, layer: int, hidden: int, vocab: int) -> Iterator[TensorSpec]:
        prefix = f"{_LAYERS_PREFIX}{layer}"
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            yield self._norm(f"{prefix}.{norm}", hidden, layer)
        projection = f"{prefix}.eh_proj.weight"
        yield TensorSpec(
            projection, (hidden, 2 * hidden), (self.dtype,), Role.MTP_PROJECTION, layer
        )
        for name, role in (("embed_tokens", Role.EMBEDDING), ("shared_head.head", Role.HEAD)):
            yield TensorSpec(
                f"{prefix}.{name}.weight",
                (vocab, hidden),
                (self.dtype,),
                role,
                layer,
                optional=True,
            )

    def _norm(self, module: str, size: int, mtp: int | None) -> TensorSpec:
        dtypes = tuple(dict.fromkeys((self.dtype, "F32")))
        return TensorSpec(f"{module}.weight", (size,), dtypes, Role.NORM, mtp)

    def _linear(
        self, module: str, shape: tuple[int, int], role: Role, mtp: int | None
    ) -> TensorSpec:
        return TensorSpec(f"{module}.weight", shape, (self.dtype,), role, mtp)
