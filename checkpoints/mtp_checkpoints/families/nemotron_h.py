"""Nemotron-H and Nemotron-3: Mamba-2, attention without positions, and experts without gates, each
a layer of its own, and an MTP module of two such layers.

Source: transformers' nemotron_h; vLLM's and SGLang's nemotron_h_mtp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.engine_draft import VLLM_LINEAR, EngineDraft
from mtp_checkpoints.families.examples import NEMOTRON_H, Example, Reader
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.gated_delta_decoder import at_most_one_mtp_layer
from mtp_checkpoints.families.listed_decoder import listed_decoder
from mtp_checkpoints.families.moe_decoder import check_expert_count, main_layers
from mtp_checkpoints.families.parts.listed import NOTHING
from mtp_checkpoints.families.parts.mamba2 import Mamba2
from mtp_checkpoints.families.parts.plain_gqa import PlainGqa
from mtp_checkpoints.families.parts.ungated import UngatedMlp, UngatedMoe
from mtp_checkpoints.families.releases import PLAIN_GROUPS, Releases
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec, MtpModules, MtpSpec
from mtp_checkpoints.families.text_part import TextPart

_CONTRACT = MtpContract(source="vLLM and SGLang")
_PROJECTION = "mtp.layers.0.eh_proj"
_SGLANG = EngineDraft(
    "mtp.layers", projection=_PROJECTION, listed=(("language_model.mtp.", "mtp."),)
)
Part = Mamba2 | PlainGqa | UngatedMoe | UngatedMlp
_PARTS: dict[str, type[Part]] = {
    "linear_attention": Mamba2,
    "full_attention": PlainGqa,
    "moe": UngatedMoe,
    "mlp": UngatedMlp,
}
WORDS = {
    "M": "linear_attention",
    "*": "full_attention",
    "E": "moe",
    "-": "mlp",
    "mamba": "linear_attention",
    "attention": "full_attention",
}
MTP_KINDS = ("full_attention", "moe")
# What config.json says of what parts compute, in every release.
_USUAL = {
    "use_conv_bias": True,
    **dict.fromkeys(("use_bias", "mamba_proj_bias", "attention_bias", "mlp_bias"), False),
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "n_shared_experts": 1,
}
_NORM_EPS = 1e-5  # transformers' default


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json; that of Nemotron-3-Ultra lists its layers and does not count them."""
    listed = fields.values.get("layers_block_type")
    if isinstance(listed, list):
        fields = fields.with_defaults(num_hidden_layers=len(listed))
    return decoder(TextPart.whole(fields), main_parts(fields), mtp_parts(fields))


def decoder(
    part: TextPart, main: Sequence[Part], module: Sequence[Part], root: str = ""
) -> ModelSpec:
    """Describe a decoder by the parts of its main layers and of its MTP module, an attention and
    experts behind it; root: what the names of all its tensors begin with."""
    named = part.fields.named(rms_norm_eps="layer_norm_epsilon")
    part = replace(part, fields=named.with_defaults(rms_norm_eps=_NORM_EPS))
    layers = [_layer(f"{root}backbone.layers.{at}", one) for at, one in enumerate(main)]
    mtp = [_mtp(f"{root}mtp", *module)] if at_most_one_mtp_layer(part.fields, 0) else []
    described = listed_decoder(
        part,
        layers,
        mtp,
        _CONTRACT,
        mtp_prefix=f"{root}mtp",
        vllm=VLLM_LINEAR,
        sglang=_SGLANG,
    )
    embedding = f"{root}backbone.embeddings"
    return replace(
        described,
        embedding=embedding,
        norm=f"{root}backbone.norm_f",
        head=embedding if part.is_tied else f"{root}lm_head",
        uncomputed=_uncomputed(part.fields),
    )


def main_parts(fields: Fields) -> list[Part]:
    """Return the parts of the main layers, by a pattern or a list of their kinds."""
    kinds = _kinds(fields, "hybrid_override_pattern", "layers_block_type", main_layers(fields))
    check_expert_count(fields, "n_routed_experts", kinds.count("moe") + 1)
    parts = {kind: part_of(fields, kind) for kind in dict.fromkeys(kinds)}
    return [parts[kind] for kind in kinds]


def mtp_parts(fields: Fields) -> list[Part]:
    """Return the parts of the MTP module."""
    key = "mtp_hybrid_override_pattern"
    if fields.has(key) or fields.has("mtp_layers_block_type"):
        kinds = _kinds(fields, key, "mtp_layers_block_type", 2)
        if kinds != [*MTP_KINDS]:
            raise fields.unusable(key, "*E, as in every release")
    return [part_of(fields, kind) for kind in MTP_KINDS]


def _layer(prefix: str, part: Part) -> LayerSpec:
    names, norms = (part.name, ""), ("norm",)
    if isinstance(part, Mamba2 | PlainGqa):
        return LayerSpec(prefix, part, NOTHING, *names, norms=norms)
    return LayerSpec(prefix, NOTHING, part, *names[::-1], norms=norms)


def _kinds(fields: Fields, pattern: str, listed: str, layers: int) -> list[str]:
    """Return the kinds of layers, by the letters of a pattern or as words."""
    value = fields.values.get(pattern if fields.has(pattern) else listed)
    found = list(value) if isinstance(value, str | list) else []
    kinds = [WORDS.get(one, one) for one in found if isinstance(one, str)]
    if len(kinds) != layers or not _PARTS.keys() >= set(kinds):
        raise fields.unusable(pattern, f"M, *, E or - for each of {layers} layers")
    return kinds


def _mtp(prefix: str, attention: Part, moe: Part) -> MtpSpec:
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


def part_of(fields: Fields, kind: str) -> Part:
    """Return the part of a layer of a kind, by its word or letter."""
    return _PARTS[WORDS.get(kind, kind)].of(fields, "mixer")


def _uncomputed(fields: Fields) -> str:
    """Return what config.json has of parts as no release does, which the runtime does not compute;
    "" for none."""
    known = fields.without_nulls().values
    others = (name for name, usual in _USUAL.items() if known.get(name, usual) != usual)
    return ", ".join(f"{fields.prefix}{name} is {known[name]!r:.40}" for name in others)


EXAMPLES = {
    "nemotron_h": Example(
        NEMOTRON_H,
        vllm=Reader("NemotronHMTP", needs_gpu=True),
    ),
}
# Nemotron-3-Nano and 3.5-Lightning, then Super and Ultra: config.json in NVIDIA's aiconfigurator.
RELEASES: Releases = {
    "nemotron_h": {
        **PLAIN_GROUPS,
        "layer_norm_epsilon": (1e-5,),
        "norm_eps": (1e-5,),
        "norm_topk_prob": (True,),
        "routed_scaling_factor": (2.5, 5.0),
    }
}
