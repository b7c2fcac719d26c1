"""LongCat-Flash: two latent attentions and two dense MLPs in every layer, beside experts of which
some do nothing, and a dense MTP layer with an embedding of its own.

Source: transformers' longcat_flash; vLLM's longcat_flash_mtp, SGLang's longcat_flash_nextn.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

from mtp_checkpoints.families.base import ModulePatterns, Role, TensorMaker
from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.engine_draft import EngineDraft
from mtp_checkpoints.families.examples import ENDS, HEADS, PLAIN, SMALL, Config, Example, Reader
from mtp_checkpoints.families.facts import ModelFacts, refuse_set
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.gated_delta_decoder import at_most_one_mtp_layer
from mtp_checkpoints.families.listed_decoder import listed_decoder, listed_layer
from mtp_checkpoints.families.moe_decoder import check_expert_count, main_layers
from mtp_checkpoints.families.parts.listed import Entry, Listed, gated_mlp, matrix
from mtp_checkpoints.families.parts.mla import Mla
from mtp_checkpoints.families.releases import Releases
from mtp_checkpoints.families.signs import USUAL_COUNTS
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec, MtpModules, MtpSpec
from mtp_checkpoints.families.text_part import TextPart

_CONTRACT = MtpContract(source="vLLM and SGLang")
_MTP = "model.mtp"
_PROJECTION = f"{_MTP}.layers.0.eh_proj"
_SGLANG = EngineDraft("", (("transformer_layer.mlp.", "mlps."),), projection="eh_proj")
_NORMS = tuple(
    f"{norm}.{half}" for half in (0, 1) for norm in ("input_layernorm", "post_attention_layernorm")
)
_FIELDS = {
    "num_hidden_layers": "num_layers",
    "intermediate_size": "ffn_hidden_size",
    "moe_intermediate_size": "expert_ffn_hidden_size",
}


def _vllm(main: int) -> EngineDraft:
    """Return vLLM's class of drafts, which counts both attentions of a layer as layers."""
    return EngineDraft(
        f"model.layers.{2 * main}", (("transformer_layer.", ""),), projection="eh_proj"
    )


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json."""
    for key in ("attention_bias", "tie_word_embeddings"):
        refuse_set(fields, key)
    known = fields.named(**_FIELDS)
    main, count = main_layers(known), at_most_one_mtp_layer(known, USUAL_COUNTS["longcat_flash"])
    check_expert_count(known, "n_routed_experts", main)
    attention, feed_forward = _attentions(known), _feed_forwards(known)
    layers = [
        listed_layer(f"model.layers.{index}", attention, feed_forward, _NORMS)
        for index in range(main)
    ]
    described = listed_decoder(
        TextPart.whole(known),
        layers,
        [_mtp(known)] * count,
        _CONTRACT,
        mtp_prefix=_MTP,
        vllm=_vllm(main),
        sglang=_SGLANG,
    )
    return _Model(**vars(described))


@dataclass(frozen=True)
class _Model(ModelSpec):
    """The model, of whose fp8 release the projection is any linear, in fp8 as attention's."""

    def as_stored(self, names: Collection[str]) -> ModelSpec:
        """Return the model with its projection as tensors of these names have it."""
        if not any(name.startswith(f"{_PROJECTION}.weight_") for name in names):
            return self
        hidden = self.facts.hidden
        linear = matrix(_PROJECTION, hidden, 2 * hidden, Role.ATTENTION)
        mtp = (
            replace(m, modules=m.modules._replace(projection=None), more=(*m.more, linear))
            for m in self.mtp
        )
        return replace(self, mtp=tuple(mtp))

    @cached_property
    def patterns(self) -> ModulePatterns:
        """Module names of its linears; the projection is one where it is stored so."""
        usual: ModulePatterns = super().patterns
        if any(module.modules.projection for module in self.mtp):
            return usual
        name = _PROJECTION.rpartition(".")[2]
        attention = f"({usual.linears[Role.ATTENTION]}|{name}$)"
        others = (one for one in usual.other_matrices if one != f"re:.*{name}$")
        linears = {**usual.linears, Role.ATTENTION: attention}
        return replace(usual, linears=linears, other_matrices=tuple(others))


def _mtp(fields: Fields) -> MtpSpec:
    hidden, vocab = fields.whole("hidden_size"), fields.whole("vocab_size")
    mlp = Listed("gated MLP", "transformer_layer.mlp", _mlp(fields, ""))
    layer = LayerSpec(f"{_MTP}.layers.0", Mla.of(fields), mlp, feed_forward_name=mlp.name)
    names = ("layers.0.enorm.m", "layers.0.hnorm.m", "layers.0.eh_proj", "norm")
    own = Entry(f"{_MTP}.embed_tokens.weight", (vocab, hidden), Role.OWN_EMBEDDING)
    return MtpSpec(layer, MtpModules.without_copies(_MTP, names), prefix=_MTP, more=(own,))


def _attentions(fields: Fields) -> Listed:
    """Return both attentions of a layer."""
    make = TensorMaker(ModelFacts.of(fields).dtype)
    entries = tuple(
        Entry(spec.name, spec.shape, spec.role)
        for half in (0, 1)
        for spec in Mla.of(fields).tensors(f"{half}", make)
    )
    return Listed("two latent attentions in a layer", "self_attn", entries)


def _mlp(fields: Fields, prefix: str) -> tuple[Entry, ...]:
    sizes = fields.whole("hidden_size"), fields.whole("intermediate_size")
    return gated_mlp(prefix, *sizes, Role.DENSE_MLP)


def _feed_forwards(fields: Fields) -> Listed:
    """Return both MLPs of a layer, and its experts."""
    hidden, inner = fields.whole("hidden_size"), fields.whole("moe_intermediate_size")
    experts = fields.whole("n_routed_experts")
    every = experts + fields.whole("zero_expert_num", 0, minimum=0)
    entries = [
        *_mlp(fields, "mlps.0."),
        *_mlp(fields, "mlps.1."),
        matrix("mlp.router.classifier", every, hidden, Role.ROUTER),
        Entry("mlp.router.e_score_correction_bias", (every,), Role.ROUTER),
    ]
    for expert in range(experts):
        entries += gated_mlp(f"mlp.experts.{expert}.", hidden, inner, Role.ROUTED_EXPERT)
    return Listed("experts of which some do nothing", "", tuple(entries))


_LONGCAT_FLASH: Config = {
    **{key: PLAIN[key] for key in ("vocab_size", "hidden_size", *ENDS, *HEADS)},
    "architectures": ["LongcatFlashForCausalLM"],
    "model_type": "longcat_flash",
    "num_layers": 2,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 64,
    "n_routed_experts": 8,
    "zero_expert_num": 4,
    "moe_topk": 2,
    "head_dim": 8,
    **{key: SMALL[key] for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim")},
    **{key: SMALL[key] for key in ("qk_rope_head_dim", "v_head_dim")},
}
EXAMPLES = {
    "longcat_flash": Example(
        _LONGCAT_FLASH,
        vllm=Reader(
            "LongCatFlashMTP",
            {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "rope_theta": 1e6}
            | {
                "kv_lora_rank": 512,
                "qk_rope_head_dim": 64,
                "qk_nope_head_dim": 64,
                "v_head_dim": 32,
            },
        ),
        sglang=Reader(
            "LongcatFlashForCausalLMNextN",
            {"intermediate_size": _LONGCAT_FLASH["ffn_hidden_size"]}
            | {"mla_scale_q_lora": False, "mla_scale_kv_lora": False},
            module="longcat_flash_nextn",
        ),
    ),
}
# LongCat-Flash-Chat: the defaults of transformers' longcat_flash, which are made for it.
RELEASES: Releases = {
    "longcat_flash": {
        "rms_norm_eps": (1e-5,),
        "rope_theta": (1e7,),
        "routed_scaling_factor": (6.0,),
    }
}
