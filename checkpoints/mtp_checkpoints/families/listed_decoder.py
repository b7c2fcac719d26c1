"""Decoders of layers that are told by their tensors alone."""

from __future__ import annotations

from collections.abc import Sequence

from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.facts import ModelFacts
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.parts.listed import Listed
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec, MtpSpec

NORMS = ("input_layernorm", "post_attention_layernorm")


def listed_layer(
    prefix: str, attention: Listed, feed_forward: Listed, norms: tuple[str, ...] = NORMS
) -> LayerSpec:
    """Return a layer of two listed parts."""
    return LayerSpec(
        prefix, attention, feed_forward, attention.name, feed_forward.name, norms=norms
    )


def listed_decoder(
    fields: Fields, layers: Sequence[LayerSpec], mtp: Sequence[MtpSpec], contract: MtpContract
) -> ModelSpec:
    """Describe a config.json by its layers; contract: the usual one."""
    return ModelSpec(
        ModelFacts.of(fields),
        tuple(layers),
        tuple(mtp),
        mtp_contract=contract.overridden_by(fields),
        usual_contract=contract,
        mtp_names=(),
    )
