"""Decoders of layers that are told by their tensors alone."""

from __future__ import annotations

from collections.abc import Sequence

from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.engine_draft import SGLANG_USUAL, VLLM_USUAL, EngineDraft
from mtp_checkpoints.families.facts import ModelFacts
from mtp_checkpoints.families.parts.listed import Listed
from mtp_checkpoints.families.signs import COUNT_FIELDS
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec, MtpSpec
from mtp_checkpoints.families.text_part import TextPart

NORMS = ("input_layernorm", "post_attention_layernorm")


def listed_layer(
    prefix: str, attention: Listed, feed_forward: Listed, norms: tuple[str, ...] = NORMS
) -> LayerSpec:
    """Return a layer of two listed parts."""
    return LayerSpec(
        prefix, attention, feed_forward, attention.name, feed_forward.name, norms=norms
    )


def listed_decoder(
    part: TextPart,
    layers: Sequence[LayerSpec],
    mtp: Sequence[MtpSpec],
    contract: MtpContract,
    *,
    mtp_prefix: str = "",
    vllm: EngineDraft = VLLM_USUAL,
    sglang: EngineDraft = SGLANG_USUAL,
) -> ModelSpec:
    """Describe a decoder by its layers; contract: the usual one, mtp_prefix, vllm and sglang those
    of ModelSpec."""
    fields, embedding = part.fields, f"{part.prefix}.embed_tokens"
    own = {None, "", *(module.layer.prefix for module in mtp)}
    others = (str(one.layer) for one in (vllm, sglang) if one.layer not in own)
    return ModelSpec(
        ModelFacts.of(fields),
        tuple(layers),
        tuple(mtp),
        mtp_contract=contract.overridden_by(fields),
        usual_contract=contract,
        mtp_names=tuple(others),
        embedding=embedding,
        norm=f"{part.prefix}.norm",
        head=embedding if part.is_tied else "lm_head",
        count_field=f"{fields.prefix}{COUNT_FIELDS[0]}",
        mtp_prefix=mtp_prefix,
        vllm=vllm,
        sglang=sglang,
        carried=part.carried,
    )
