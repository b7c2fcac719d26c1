"""Fields of config.json from the keys of a GGUF file."""

from __future__ import annotations

import struct
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from mtp_checkpoints.containers.gguf_architectures.keys_written import GATING, LOG_MULTIPLIER
from mtp_checkpoints.containers.gguf_values import Keys, Scalar
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.families.parts.feed_forward import BIASED, GREEDY
from mtp_checkpoints.families.parts.rope import YARN

TOKENS, PRE_TOKENIZER = "tokenizer.ggml.tokens", "tokenizer.ggml.pre"
_ROUTER_BIAS = ".exp_probs_b.bias"
_DIGITS = 9  # that tell any number of single precision from its neighbours
_SCORING = {number: name for name, number in GATING.items()}


@dataclass(frozen=True)
class KeyReader:
    """Keys of a file behind its architecture and a dot, each of the type that its reader asks for.

    Every reader raises InvalidInputError for a key that is missing or of another type; the bounds
    of values are checked where the config is read.
    """

    keys: Keys
    architecture: str

    def has(self, key: str) -> bool:
        """Return whether a key is there."""
        return f"{self.architecture}.{key}" in self.keys

    @property
    def vocabulary(self) -> int:
        """Number of tokens, of the key or of the list."""
        listed = self.keys[TOKENS].data if TOKENS in self.keys else None
        return self.whole("vocab_size", len(listed) if isinstance(listed, tuple) else None)

    def whole(self, key: str, default: int | None = None) -> int:
        """Return a whole number; of one for each layer, which all must be alike, that one."""
        value = self._data(key, default)
        if type(value) is not int:
            raise self._unusable(key, "a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number, as the shortest decimal that its single precision holds."""
        value = self._data(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._unusable(key, "a number")
        return _shortest(float(value))

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self._data(key, default)
        if type(value) is not bool:
            raise self._unusable(key, "true or false")
        return value

    def word(self, key: str, default: str) -> str:
        """Return a text."""
        value = self._data(key, default)
        if type(value) is not str:
            raise self._unusable(key, "a text")
        return value

    def flags(self, key: str) -> list[bool]:
        """Return an array of flags, or of numbers that stand for some."""
        value = self.keys[f"{self.architecture}.{key}"]
        if not value.is_array or not isinstance(value.data, tuple):
            raise self._unusable(key, "an array of flags")
        return [bool(flag) for flag in value.data]

    def numbers(self, key: str) -> tuple[Scalar, ...]:
        """Return an array; an empty one where the key is not there."""
        if not self.has(key):
            return ()
        value = self.keys[f"{self.architecture}.{key}"]
        if not value.is_array or not isinstance(value.data, tuple):
            raise self._unusable(key, "an array")
        return value.data

    def _data(self, key: str, default: Scalar | None) -> Scalar | None:
        value = self.keys.get(f"{self.architecture}.{key}")
        if value is None:
            if default is None:
                raise self._unusable(key, "the key")
            return default
        if not isinstance(value.data, tuple):
            return value.data
        if len(set(value.data)) != 1:
            raise self._unusable(key, "one value for all layers")
        return value.data[0]

    def _unusable(self, key: str, expected: str) -> InvalidInputError:
        name = f"{self.architecture}.{key}"
        value = self.keys.get(name)
        return InvalidInputError(
            f"The GGUF file has no usable key {name}",
            expected=expected,
            found="no such key" if value is None else repr(value.data)[:100],
            todo="Get the file again from its source, or another one of the same model",
        )


def _shortest(number: float) -> float:
    try:
        single = struct.pack("<f", number)
    except OverflowError:
        return number
    for digits in range(1, _DIGITS + 1):
        decimal = float(f"{number:.{digits}g}")
        if struct.pack("<f", decimal) == single:
            return decimal
    return number


def model_fields(reader: KeyReader, names: Collection[str]) -> dict[str, Any]:
    """Return the fields of the whole model, of its experts and special tokens; names: those of the
    file's tensors."""
    modules = reader.whole("nextn_predict_layers", 0)
    inner = reader.whole("expert_feed_forward_length")
    biased = any(name.endswith(_ROUTER_BIAS) for name in names)
    return {
        "vocab_size": reader.vocabulary,
        "hidden_size": reader.whole("embedding_length"),
        "num_hidden_layers": reader.whole("block_count") - modules,
        "num_nextn_predict_layers": modules,
        "max_position_embeddings": reader.whole("context_length"),
        "rms_norm_eps": reader.number("attention.layer_norm_rms_epsilon"),
        "intermediate_size": reader.whole("feed_forward_length", inner),
        "first_k_dense_replace": reader.whole("leading_dense_block_count", 0),
        "moe_intermediate_size": inner,
        "n_routed_experts": reader.whole("expert_count"),
        "n_shared_experts": reader.whole("expert_shared_count", 0),
        "num_experts_per_tok": reader.whole("expert_used_count"),
        "n_group": reader.whole("expert_group_count", 1),
        "topk_group": reader.whole("expert_group_used_count", 1),
        "routed_scaling_factor": reader.number("expert_weights_scale", 1.0),
        "norm_topk_prob": reader.flag("expert_weights_norm", False),
        "scoring_func": _scoring(reader),
        "topk_method": BIASED if biased else GREEDY,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **special_tokens(reader.keys),
    }


def latent_fields(reader: KeyReader) -> dict[str, Any]:
    """Return the fields of latent attention and of its rotary positions."""
    rope, heads = reader.whole("rope.dimension_count"), reader.whole("attention.head_count")
    ranked = reader.has("attention.q_lora_rank")
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": reader.whole("attention.q_lora_rank") if ranked else None,
        "kv_lora_rank": reader.whole("attention.kv_lora_rank"),
        "qk_nope_head_dim": reader.whole("attention.key_length_mla") - rope,
        "qk_rope_head_dim": rope,
        "v_head_dim": reader.whole("attention.value_length_mla"),
        **rope_fields(reader),
    }


def rope_fields(reader: KeyReader) -> dict[str, Any]:
    """Return the fields of rotary positions."""
    fields: dict[str, Any] = {"rope_theta": reader.number("rope.freq_base", 10000.0)}
    kind = reader.word("rope.scaling.type", "none")
    if kind == "none":
        return fields
    scaling: dict[str, Any] = {"type": kind, "factor": reader.number("rope.scaling.factor", 1.0)}
    if kind == YARN:
        multiplier = reader.number("rope.scaling.yarn_log_multiplier", 0.0)
        scales = float(f"{multiplier / LOG_MULTIPLIER:.6g}")
        scaling |= {
            "beta_fast": reader.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": reader.number("rope.scaling.yarn_beta_slow", 1.0),
            **({"mscale": scales, "mscale_all_dim": scales} if scales else {}),
        }
        if reader.has("rope.scaling.original_context_length"):
            positions = reader.whole("rope.scaling.original_context_length")
            scaling["original_max_position_embeddings"] = positions
    return {**fields, "rope_scaling": scaling}


def _scoring(reader: KeyReader) -> str:
    """Return the router's scoring. Files of before the key had one of softmax, but for those of
    GLM-4.7-Flash, as llama.cpp tells them."""
    if reader.has("expert_gating_func"):
        number = reader.whole("expert_gating_func")
        return _SCORING.get(number, f"gating function {number}")
    glm = reader.architecture != "deepseek2" or pre_tokenizer(reader.keys) == "glm4"
    return "sigmoid" if glm else "softmax"


def pre_tokenizer(keys: Keys) -> str:
    """Return the name of the file's pre-tokenizer, empty without one."""
    value = keys.get(PRE_TOKENIZER)
    return value.data if value is not None and isinstance(value.data, str) else ""


def special_tokens(keys: Keys) -> dict[str, Any]:
    """Return the fields of the ids of tokens that begin and end texts."""
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id"}
    found = {field: keys.get(f"tokenizer.ggml.{name}") for field, name in names.items()}
    return {field: value.data for field, value in found.items() if value is not None}
