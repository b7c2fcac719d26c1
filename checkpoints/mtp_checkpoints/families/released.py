"""Facts of released models: the shapes of DeepSeek-V3, for figures about the real model, by
config.json of the released checkpoint; and the values that no shape depends on, compared with those
that the families' files have of their releases.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mtp_checkpoints.families import EVERY, name_of
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.parts.feed_forward import Moe
from mtp_checkpoints.families.parts.gqa import Gqa
from mtp_checkpoints.families.parts.rope import PLAIN, Rope
from mtp_checkpoints.families.releases import Values
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

_SCALING, _PARAMETERS, _ROTATED = "rope_scaling", "rope_parameters", "partial_rotary_factor"
# Values of rope_scaling that rope_parameters may hold beside others.
_OF_SCALING = frozenset(
    {
        *("type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim"),
    }
)
# Names that families have for the factor of what routed experts add.
_SCALES = ("routed_scaling_factor", "router_scaling_factor", "moe_router_scaling_factor")
# By the names of families, what their files say of their releases.
RELEASES: dict[str, Values | None] = {
    name: releases[name]
    for name, spec in EVERY.items()
    if name in (releases := vars(sys.modules[spec.__module__]).get("RELEASES", {}))
}


def released_values(config: Mapping[str, Any]) -> Values:
    """Return the values of the releases of a config.json's family; none where none was read."""
    return RELEASES.get(name_of(config) or "") or {}


@dataclass(frozen=True)
class UnreleasedValue:
    """A field of config.json whose value no release of the family has, beside theirs."""

    field: str
    found: Any
    released: tuple[Any, ...]


def unreleased_values(config: Mapping[str, Any], spec: ModelSpec) -> tuple[UnreleasedValue, ...]:
    """Return the values of a config.json that no release of its family has, of a model as that
    describes it: what a config leaves out is what its readers take, where the description says.
    None of a family of whose releases none was read."""
    return tuple(_unreleased(config, spec))


def _unreleased(config: Mapping[str, Any], spec: ModelSpec) -> Iterator[UnreleasedValue]:
    described, text = _values_of(spec), text_fields(config)
    for field, released in released_values(config).items():
        theirs = [_as_read(field, value) for value in released]
        if field in described:
            found = [value for value in described[field] if value not in theirs]
            if found and len(described[field]) == 1:
                found = [_as_written(text, field, found[0])]
        else:
            found = [one for one in _written(text, field) if _as_read(field, one) not in theirs]
        if found:
            yield UnreleasedValue(field, found[0], released)


def with_value(config: Mapping[str, Any], field: str, value: Any) -> dict[str, Any]:
    """Return a config.json with another value of a field that releases have, wherever its readers
    look for that."""
    text = dict(text_fields(config))
    parameters = dict(text.get(_PARAMETERS) or {})
    by_kind = {
        kind: {**one, field: value}
        for kind, one in parameters.items()
        if isinstance(one, Mapping) and field in one
    }
    if field == _SCALING:
        text[_SCALING] = value
        if parameters:
            kept = {key: one for key, one in parameters.items() if key not in _OF_SCALING}
            text[_PARAMETERS] = kept | {"rope_type": (value or {}).get("type", PLAIN)}
    elif by_kind or field in parameters:
        text[_PARAMETERS] = parameters | (by_kind or {field: value})
    else:
        text[field] = value
    return text if text_fields(config) is config else {**config, **_nested(config, text)}


def _nested(config: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field of a config.json that holds the text part, with another text part."""
    own = text_fields(config)
    return {key: text for key, value in config.items() if value is own}


def _values_of(spec: ModelSpec) -> dict[str, list[Any]]:
    """Return what a model's config.json was read as, by field: of attention, each kind's."""
    kinds = list(dict.fromkeys(layer.attention for layer in spec.every_layer))
    ropes = [kind.rope for kind in kinds if kind.rope is not None]
    found: dict[str, list[Any]] = {
        "rms_norm_eps": [spec.facts.norm_eps],
        "rope_theta": [rope.theta for rope in ropes],
        _SCALING: [_scaling(rope) for rope in ropes],
        _ROTATED: [
            kind.sizes.rope / kind.sizes.head
            for kind in kinds
            if isinstance(kind, Gqa) and kind.rope is not None
        ],
    }
    moe = next((p for p in spec.parts if isinstance(p, Moe)), None)
    if moe is not None:
        router, routing = moe.router, moe.router.routing
        found |= {
            "scoring_func": [router.scoring],
            "topk_method": [router.method],
            **dict.fromkeys(("norm_topk_prob", "route_norm"), [routing.normalises]),
            **dict.fromkeys(_SCALES, [routing.scale]),
            "n_group": [routing.groups],
            "topk_group": [routing.groups_per_token],
        }
    return {field: list(dict.fromkeys(values)) for field, values in found.items() if values}


def _scaling(rope: Rope) -> object:
    return rope.yarn or rope.scaling


def _as_read(field: str, value: Any) -> object:
    """Return a written value as the readers of config.json take it."""
    return _scaling(Rope.of(Fields({_SCALING: value}), 2)) if field == _SCALING else value


def _written(text: Mapping[str, Any], field: str) -> list[Any]:
    """Return the values of a field that no description has: by itself or in rope_parameters, and
    there for all layers or by their kinds; each of a list of layers'."""
    parameters = text.get(_PARAMETERS) or {}
    by_kind = [one for one in parameters.values() if isinstance(one, Mapping)]
    if field == _SCALING:
        return [] if by_kind else [text.get(_SCALING) or _scaling_in(parameters) or None]
    found = [place[field] for place in (text, parameters, *by_kind) if field in place]
    return [one for value in found for one in (value if isinstance(value, list) else [value])]


def _as_written(text: Mapping[str, Any], field: str, read: object) -> Any:
    """Return a field as config.json has it; what its readers take, where that leaves it out."""
    parameters = text.get(_PARAMETERS) or {}
    if field == _SCALING:
        return text.get(_SCALING) or _scaling_in(parameters) or None
    return parameters.get(field, text.get(field, read))


def _scaling_in(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in parameters.items() if key != "rope_theta"}
