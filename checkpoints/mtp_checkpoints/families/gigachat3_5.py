"""GigaChat-3.5: gated delta nets and, in some layers and the MTP layer, latent attention with gates
of heads; norms with gates of low rank before and after each part, and a mixture of experts.

Source: SGLang's gigachat35 and gigachat35_mtp.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mtp_checkpoints.families.base import Role, TensorMaker, TensorSpec
from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.engine_draft import SGLANG_USUAL
from mtp_checkpoints.families.examples import PANGU_LIKE, Config, Example, Reader
from mtp_checkpoints.families.facts import ModelFacts, refuse_set
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.gated_delta_decoder import at_most_one_mtp_layer
from mtp_checkpoints.families.listed_decoder import listed_decoder
from mtp_checkpoints.families.moe_decoder import check_expert_count, main_layers
from mtp_checkpoints.families.parts.feed_forward import GatedMlp, Moe
from mtp_checkpoints.families.parts.gated_delta import GatedDeltaNet
from mtp_checkpoints.families.parts.listed import Entry, Listed, matrix
from mtp_checkpoints.families.parts.mla import Mla
from mtp_checkpoints.families.releases import PLAIN_GROUPS, Releases
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec, MtpModules, MtpSpec
from mtp_checkpoints.families.text_part import TextPart

_CONTRACT = MtpContract(source="SGLang")
_GATES = ("self_attn.gate_proj", "self_attn.attn_gate")  # those of attention, in SGLang
_SGLANG = replace(SGLANG_USUAL, modules=(_GATES,))
_PLAIN, _ZERO, _GATED = "LlamaRMSNorm", "ZeroCenteredRMSNorm", "GatedNorm"
_BOTH = "ZeroCenteredGatedNorm"
_RANK = 16  # of the gates of norms
_FULL, _LINEAR = ("attention", "full_attention"), "linear_attention"
_NORMS = ("input_layernorm", "post_attention_layernorm")
_AFTER = ("post_self_attn_layernorm", "post_feedforward_layernorm")
_MODULES = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
_DEFAULTS = {"norm_type": _BOTH, "layernorm_type": "pre_post", "moe_layer_freq": 1}


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json."""
    known = fields.with_defaults(**_DEFAULTS)
    for key in ("attention_bias", "tie_word_embeddings", "use_shared_expert_sigmoid"):
        refuse_set(known, key)
    main, count = main_layers(known), at_most_one_mtp_layer(known, 0)
    check_expert_count(known, "n_routed_experts", main + count)
    latent, delta, moe, mlp = _latent(known), _delta(known), Moe.of(known), GatedMlp.of(known)
    dense = known.whole("first_k_dense_replace", 1, minimum=0)
    layers = [
        _layer(
            known,
            f"model.layers.{index}",
            delta if kind == _LINEAR else latent,
            mlp if index < dense or index % known.whole("moe_layer_freq") else moe,
        )
        for index, kind in enumerate(_kinds(known, main))
    ]
    described = listed_decoder(
        TextPart.whole(known),
        layers,
        [_mtp(known, main, latent, moe, mlp)] * count,
        _CONTRACT,
        sglang=_SGLANG,
    )
    zero_centred = known.word("norm_type") in (_ZERO, _BOTH)
    return replace(
        described,
        facts=replace(described.facts, norm_offset=1.0 if zero_centred else 0.0),
        more=tuple(_gates(known, described.norm)),
        engines=("sglang",),
    )


def _kinds(fields: Fields, layers: int) -> list[str]:
    """Return the kinds of attention: as listed, or all but some linear."""
    if fields.has("layer_types"):
        return [*fields.kinds("layer_types", (*_FULL, _LINEAR), layers)]
    full = fields.wholes("full_attention_layers")
    return [_FULL[0] if index in full else _LINEAR for index in range(layers)]


def _layer(
    fields: Fields, prefix: str, attention: Listed, feed_forward: GatedMlp | Moe
) -> LayerSpec:
    placed = fields.word("layernorm_type", choices=("pre", "pre_post"))
    norms = (*_NORMS, *(_AFTER if placed == "pre_post" else ()))
    gates = tuple(gate for name in norms for gate in _gates(fields, name))
    return LayerSpec(prefix, attention, feed_forward, norms=norms, more=gates)


def _mtp(fields: Fields, index: int, attention: Listed, moe: Moe, mlp: GatedMlp) -> MtpSpec:
    prefix = f"model.layers.{index}"
    feed_forward = moe if fields.flag("nextn_is_sparse", False) else mlp
    modules = MtpModules.without_copies(prefix, _MODULES)
    norms = [f"{prefix}.{name}" for name in _MODULES if name.endswith("norm")]
    return MtpSpec(
        _layer(fields, prefix, attention, feed_forward),
        modules,
        more=tuple(gate for name in norms for gate in _gates(fields, name)),
    )


def _gates(fields: Fields, module: str, size: int | None = None) -> Iterable[Entry]:
    """Yield the gates of a norm, of the stream's size unless it is given."""
    kinds = (_PLAIN, _ZERO, _GATED, _BOTH)
    if fields.word("norm_type", choices=kinds) in (_GATED, _BOTH):
        width = fields.whole("hidden_size") if size is None else size
        yield matrix(f"{module}.gate_up_projection", _RANK, width, Role.DELTA_GATES)
        yield matrix(f"{module}.gate_down_projection", width, _RANK, Role.DELTA_GATES)


def _entries(tensors: Iterable[TensorSpec]) -> list[Entry]:
    return [Entry(one.name.removeprefix("-."), one.shape, one.role) for one in tensors]


def _latent(fields: Fields) -> Listed:
    mla = Mla.of(fields)
    entries = _entries(mla.tensors("-", TensorMaker(ModelFacts.of(fields).dtype)))
    for name, size in (
        ("q_a_layernorm", mla.sizes.query_rank),
        ("kv_a_layernorm", mla.sizes.latent),
    ):
        entries += _gates(fields, name, size) if size else ()
    if fields.flag("gated_attention", True):
        inner = mla.sizes.heads * mla.sizes.value
        entries.append(matrix("gate_proj", inner, mla.hidden, Role.ATTENTION))
    return Listed("latent attention with gates", "self_attn", tuple(entries))


def _delta(fields: Fields) -> Listed:
    net = GatedDeltaNet.of(fields, is_interleaved=True)
    entries = _entries(net.tensors("-", TensorMaker(ModelFacts.of(fields).dtype)))
    return Listed("gated delta nets with scaled norms", "self_attn", tuple(entries))


_GIGACHAT3_5: Config = {
    **PANGU_LIKE,
    "architectures": ["GigaChat35ForCausalLM"],
    "model_type": "gigachat3_5",
    "layer_types": ["linear_attention", "attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "norm_type": "ZeroCenteredGatedNorm",
    "layernorm_type": "pre_post",
    "gated_attention": True,
}
EXAMPLES = {
    "gigachat3_5": Example(
        _GIGACHAT3_5,
        in_transformers=False,
        sglang=Reader("GigaChat35ForCausalLMNextN", module="gigachat35_mtp"),
        sglang_main=Reader("GigaChat35ForCausalLM", module="gigachat35"),
    ),
}
# GigaChat3.5-432B-A28B: its groups as a reader of its config.json lists them, and the defaults of
# vLLM's class, whose layers and heads are the release's.
RELEASES: Releases = {
    "gigachat3_5": {
        **PLAIN_GROUPS,
        "rms_norm_eps": (1e-6,),
        "rope_theta": (100000.0,),
        "norm_topk_prob": (True,),
        "routed_scaling_factor": (2.5,),
    }
}
