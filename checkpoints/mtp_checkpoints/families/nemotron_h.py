"""Nemotron-H and Nemotron-3: Mamba-2, attention without positions, and experts without gates, each
a layer of its own, and an MTP module of two such layers.

Source: transformers' nemotron_h; vLLM's and SGLang's nemotron_h_mtp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mtp_checkpoints.families.base import Role
from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.gated_delta_decoder import at_most_one_mtp_layer
from mtp_checkpoints.families.listed_decoder import listed_decoder
from mtp_checkpoints.families.moe_decoder import check_expert_count, main_layers
from mtp_checkpoints.families.parts.feed_forward import Router
from mtp_checkpoints.families.parts.listed import NOTHING, Entry, Listed, grouped, matrix, norm
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec, MtpModules, MtpSpec
from mtp_checkpoints.families.text_part import TextPart

_CONTRACT = MtpContract(source="vLLM and SGLang")
WORDS = {
    "M": "linear_attention",
    "*": "full_attention",
    "E": "moe",
    "-": "mlp",
    "mamba": "linear_attention",
    "attention": "full_attention",
}
_KINDS = frozenset(WORDS.values())
MTP_KINDS = ("full_attention", "moe")


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json."""
    return decoder(TextPart.whole(fields), main_parts(fields), mtp_parts(fields))


def decoder(
    part: TextPart, main: Sequence[Listed], module: Sequence[Listed], root: str = ""
) -> ModelSpec:
    """Describe a decoder by the parts of its main layers and of its MTP module, an attention and
    experts behind it; root: what the names of all its tensors begin with."""
    layers = [_layer(f"{root}backbone.layers.{at}", one) for at, one in enumerate(main)]
    mtp = [_mtp(f"{root}mtp", *module)] if at_most_one_mtp_layer(part.fields, 0) else []
    described = listed_decoder(part, layers, mtp, _CONTRACT, mtp_prefix=f"{root}mtp")
    embedding = f"{root}backbone.embeddings"
    return replace(
        described,
        embedding=embedding,
        norm=f"{root}backbone.norm_f",
        head=embedding if part.is_tied else f"{root}lm_head",
        linear_projection=True,
    )


def main_parts(fields: Fields) -> list[Listed]:
    """Return the parts of the main layers, by a pattern or a list of their kinds."""
    kinds = _kinds(fields, "hybrid_override_pattern", "layers_block_type", main_layers(fields))
    check_expert_count(fields, "n_routed_experts", kinds.count("moe") + 1)
    parts = {kind: part_of(fields, kind) for kind in _KINDS}
    return [parts[kind] for kind in kinds]


def mtp_parts(fields: Fields) -> list[Listed]:
    """Return the parts of the MTP module."""
    key = "mtp_hybrid_override_pattern"
    if fields.has(key) or fields.has("mtp_layers_block_type"):
        kinds = _kinds(fields, key, "mtp_layers_block_type", 2)
        if kinds != [*MTP_KINDS]:
            raise fields.unusable(key, "*E, as in every release")
    return [part_of(fields, kind) for kind in MTP_KINDS]


def _layer(prefix: str, part: Listed) -> LayerSpec:
    return LayerSpec(prefix, part, NOTHING, part.name, feed_forward_name="", norms=("norm",))


def _kinds(fields: Fields, pattern: str, listed: str, layers: int) -> list[str]:
    """Return the kinds of layers, by the letters of a pattern or as words."""
    value = fields.values.get(pattern if fields.has(pattern) else listed)
    found = list(value) if isinstance(value, str | list) else []
    kinds = [WORDS.get(one, one) for one in found if isinstance(one, str)]
    if len(kinds) != layers or not _KINDS.issuperset(kinds):
        raise fields.unusable(pattern, f"M, *, E or - for each of {layers} layers")
    return kinds


def _mtp(prefix: str, attention: Listed, moe: Listed) -> MtpSpec:
    layer = LayerSpec(
        f"{prefix}.layers",
        replace(attention, name="0.mixer"),
        replace(moe, name="1.mixer"),
        attention_name="0.mixer",
        feed_forward_name="1.mixer",
        norms=("0.norm", "1.norm"),
    )
    names = ("0.enorm", "0.hnorm", "0.eh_proj", "1.final_layernorm")
    return MtpSpec(layer, MtpModules.without_copies(layer.prefix, names), prefix=prefix)


def part_of(fields: Fields, kind: str) -> Listed:
    """Return the part of a layer of a kind, by its word or letter."""
    make = {
        "linear_attention": _mamba,
        "full_attention": _attention,
        "moe": _experts,
        "mlp": _mlp,
    }
    return make[WORDS.get(kind, kind)](fields)


def _attention(fields: Fields) -> Listed:
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    own = grouped(hidden, heads, fields.whole("num_key_value_heads"), fields.whole("head_dim"))
    return Listed("attention without positions", "mixer", own)


def _mlp(fields: Fields) -> Listed:
    hidden, inner = fields.whole("hidden_size"), fields.whole("intermediate_size")
    return Listed("an MLP of squared rectifiers", "mixer", _up_down("", hidden, inner, _DENSE))


def _experts(fields: Fields) -> Listed:
    hidden, experts = fields.whole("hidden_size"), fields.whole("n_routed_experts")
    Router.of(fields, experts)  # refuses groups that experts do not fill, and the like
    inner = fields.whole("moe_intermediate_size")
    latent = fields.without_nulls().whole("moe_latent_size", hidden)
    shared = fields.whole("moe_shared_expert_intermediate_size")
    entries = [
        matrix("gate", experts, hidden, Role.ROUTER),
        Entry("gate.e_score_correction_bias", (experts,), Role.ROUTER),
        *_up_down("shared_experts.", hidden, shared, Role.SHARED_EXPERT),
    ]
    if fields.has("moe_latent_size"):
        entries.append(matrix("fc1_latent_proj", latent, hidden, Role.SHARED_EXPERT))
        entries.append(matrix("fc2_latent_proj", hidden, latent, Role.SHARED_EXPERT))
    for expert in range(experts):
        entries += _up_down(f"experts.{expert}.", latent, inner, Role.ROUTED_EXPERT)
    return Listed("experts without gates", "mixer", tuple(entries))


_DENSE = Role.DENSE_MLP


def _up_down(prefix: str, hidden: int, inner: int, role: Role) -> tuple[Entry, Entry]:
    return (
        matrix(f"{prefix}up_proj", inner, hidden, role),
        matrix(f"{prefix}down_proj", hidden, inner, role),
    )


def _mamba(fields: Fields) -> Listed:
    hidden, heads = fields.whole("hidden_size"), fields.whole("mamba_num_heads")
    inner = heads * fields.whole("mamba_head_dim")
    channels = inner + 2 * fields.whole("n_groups") * fields.whole("ssm_state_size")
    width = fields.whole("conv_kernel")
    gates = Role.DELTA_GATES
    return Listed(
        "Mamba-2",
        "mixer",
        (
            matrix("in_proj", inner + channels + heads, hidden, Role.ATTENTION),
            Entry("conv1d.weight", (channels, 1, width), Role.CONVOLUTION),
            Entry("conv1d.bias", (channels,), Role.CONVOLUTION),
            Entry("A_log", (heads,), gates),
            Entry("D", (heads,), gates),
            Entry("dt_bias", (heads,), gates),
            norm("norm", inner),
            matrix("out_proj", hidden, inner, Role.ATTENTION),
        ),
    )
