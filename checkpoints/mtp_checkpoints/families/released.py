"""Facts of released models: the shapes of DeepSeek-V3, for figures about the real model, and the
values that every release of a family has in config.json, of those that no shape depends on.

Source: config.json of the released checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.parts.feed_forward import Moe
from mtp_checkpoints.families.parts.gqa import Gqa
from mtp_checkpoints.families.parts.rope import PLAIN, Rope
from mtp_checkpoints.families.signs import text_fields
from mtp_checkpoints.families.spec import ModelSpec

DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}

Values = Mapping[str, tuple[Any, ...]]
_EPS, _THETA, _SCALING = "rms_norm_eps", "rope_theta", "rope_scaling"
_ROPE_PARAMETERS, _ROTATED = "rope_parameters", "partial_rotary_factor"
_YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_BIASED = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "norm_topk_prob": (True,)}
# V3, R1, their later versions, V3.1.
_DEEPSEEK: Values = _BIASED | {
    _EPS: (1e-6,),
    _THETA: (10000.0,),
    _SCALING: (_YARN,),
    "routed_scaling_factor": (2.5,),
    "n_group": (8,),
    "topk_group": (4,),
}
_GLM: Values = _BIASED | {
    _EPS: (1e-5,),
    _THETA: (1e6,),
    _SCALING: (None,),
    "n_group": (1,),
    "topk_group": (1,),
}
_QWEN: Values = {_EPS: (1e-6,), _THETA: (1e7,), _SCALING: (None,), _ROTATED: (0.25,)}
# By model_type, the values that its releases have of each field. A field that is not here may have
# any.
RELEASED_VALUES: dict[str, Values] = {
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "glm4_moe": {**_GLM, "routed_scaling_factor": (2.5, 1.0), _ROTATED: (0.5,)},  # 1.0: Air
    "glm4_moe_lite": {**_GLM, "routed_scaling_factor": (1.8,)},
    "glm_moe_dsa": {**_GLM, "routed_scaling_factor": (2.5,)},
    "qwen3_next": {**_QWEN, "norm_topk_prob": (True,)},
    "qwen3_5": _QWEN,
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe": _QWEN,
    "qwen3_5_moe_text": _QWEN,
}


@dataclass(frozen=True)
class UnreleasedValue:
    """A field of config.json whose value no release of the family has, beside theirs."""

    field: str
    found: Any
    released: tuple[Any, ...]


def unreleased_values(config: Mapping[str, Any], spec: ModelSpec) -> tuple[UnreleasedValue, ...]:
    """Return the values of a config.json that no release of its family has, of a model as that
    describes it: what a config leaves out is what its readers take. None of a family of whose
    releases no values are known."""
    known = RELEASED_VALUES.get(str(config.get("model_type")))
    if known is None:
        return ()
    read = dict(_values_of(spec))
    return tuple(
        UnreleasedValue(field, _as_written(config, field, read[field]), released)
        for field, released in known.items()
        if field in read and read[field] not in [_as_read(field, value) for value in released]
    )


def with_value(config: Mapping[str, Any], field: str, value: Any) -> dict[str, Any]:
    """Return a config.json with another value of a field of RELEASED_VALUES, wherever its readers
    look for that."""
    text = dict(text_fields(config))
    parameters = dict(text.get(_ROPE_PARAMETERS) or {})
    if field == _SCALING:
        text[_SCALING] = value
        if parameters:
            kept = {key: one for key, one in parameters.items() if key not in _YARN}
            text[_ROPE_PARAMETERS] = kept | {"rope_type": (value or {}).get("type", PLAIN)}
    elif field in parameters:
        text[_ROPE_PARAMETERS] = parameters | {field: value}
    else:
        text[field] = value
    return text if text_fields(config) is config else {**config, **_nested(config, text)}


def _nested(config: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field of a config.json that holds the text part, with another text part."""
    own = text_fields(config)
    return {key: text for key, value in config.items() if value is own}


def _values_of(spec: ModelSpec) -> Iterator[tuple[str, Any]]:
    """Yield what a model's config.json was read as, by field."""
    yield _EPS, spec.facts.norm_eps
    attention = next((a for layer in spec.every_layer if (a := layer.attention).rope), None)
    if attention is not None and attention.rope is not None:
        yield _THETA, attention.rope.theta
        yield _SCALING, _scaling(attention.rope)
    if isinstance(attention, Gqa):
        yield _ROTATED, attention.sizes.rope / attention.sizes.head
    moe = next((p for p in spec.parts if isinstance(p, Moe)), None)
    if moe is not None:
        router, routing = moe.router, moe.router.routing
        yield "scoring_func", router.scoring
        yield "topk_method", router.method
        yield "norm_topk_prob", routing.normalises
        yield "routed_scaling_factor", routing.scale
        yield "n_group", routing.groups
        yield "topk_group", routing.groups_per_token


def _scaling(rope: Rope) -> object:
    return rope.yarn or rope.scaling


def _as_read(field: str, value: Any) -> object:
    """Return a written value as the readers of config.json take it."""
    return _scaling(Rope.of(Fields({_SCALING: value}), 2)) if field == _SCALING else value


def _as_written(config: Mapping[str, Any], field: str, read: object) -> Any:
    """Return a field as config.json has it; what its readers take, where that leaves it out."""
    text = text_fields(config)
    parameters = text.get(_ROPE_PARAMETERS) or {}
    if field == _SCALING:
        return text.get(_SCALING) or {k: v for k, v in parameters.items() if k != _THETA} or None
    return text.get(field, parameters.get(field, read))
