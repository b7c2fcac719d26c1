"""Decoders of gated delta nets with attention of gated heads in between, and an MTP module of names
of its own, as Qwen3-Next and Qwen3.5 lay them out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.engine_draft import SGLANG_OWN_NAMES, VLLM_LINEAR
from mtp_checkpoints.families.facts import ModelFacts, refuse_set
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.layer_halves import FeedForward
from mtp_checkpoints.families.moe_decoder import main_layers
from mtp_checkpoints.families.parts.gated_delta import GatedDeltaNet
from mtp_checkpoints.families.parts.gqa import Gqa
from mtp_checkpoints.families.signs import COUNT_FIELDS
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec, MtpModules, MtpSpec
from mtp_checkpoints.families.text_part import TextPart

_USUAL = MtpContract(source="vLLM, SGLang and transformers' MtpModel")
# What configs leave out, as in transformers.
_DEFAULTS = {"head_dim": 256, "partial_rotary_factor": 0.25, "use_qk_norm": True}
_LINEAR, _FULL = "linear_attention", "full_attention"
_MTP = "mtp"
_NORM_OFFSET = 1.0  # of every norm but that of a gated delta net's output


def gated_delta_decoder(
    part: TextPart,
    feed_forward: FeedForward,
    *,
    usual_mtp_layers: int,
    is_interleaved: bool,
    mtp_feed_forward: FeedForward | None = None,
) -> ModelSpec:
    """Describe a decoder whose layers have one kind of feed-forward, that of the MTP layer stored
    otherwise where it is given.

    usual_mtp_layers: those of a config.json that does not count them. is_interleaved is that of
    GatedDeltaNet. Raises InvalidInputError for a missing or unusable field, UnsupportedError for a
    variant that no release has.
    """
    fields = Fields({**_DEFAULTS, **part.fields.values}, part.fields.prefix)
    _refuse_variants(fields)
    attention, delta_net = (
        gated_attention(fields),
        GatedDeltaNet.of(fields, is_interleaved=is_interleaved),
    )
    layers = [
        LayerSpec(f"{part.prefix}.layers.{index}", attention, feed_forward)
        if attends
        else LayerSpec(f"{part.prefix}.layers.{index}", delta_net, feed_forward, "linear_attn")
        for index, attends in enumerate(_attending(fields, main_layers(fields)))
    ]
    of_mtp = LayerSpec(f"{_MTP}.layers.0", attention, mtp_feed_forward or feed_forward)
    embedding = f"{part.prefix}.embed_tokens"
    return ModelSpec(
        replace(ModelFacts.of(fields), norm_offset=_NORM_OFFSET),
        tuple(layers),
        (MtpSpec(of_mtp, MtpModules.of_qwen(), prefix=_MTP),)
        * at_most_one_mtp_layer(fields, usual_mtp_layers),
        mtp_contract=_USUAL.overridden_by(fields),
        usual_contract=_USUAL,
        mtp_names=(),
        embedding=embedding,
        norm=f"{part.prefix}.norm",
        head=embedding if part.is_tied else "lm_head",
        count_field=f"{part.fields.prefix}{COUNT_FIELDS[1]}",
        mtp_prefix=_MTP,
        vllm=replace(VLLM_LINEAR, projection_in_nvfp4=False),
        sglang=SGLANG_OWN_NAMES,
        may_fuse=mtp_feed_forward is not None,
        carried=part.carried,
    )


def gated_attention(fields: Fields) -> Gqa:
    """Read attention with norms of queries and keys, and gates of its heads."""
    attention = Gqa.of(fields)
    return replace(attention, sizes=attention.sizes._replace(is_gated=True))


def _refuse_variants(fields: Fields) -> None:
    """Raise UnsupportedError for what no release has."""
    for key in ("attention_bias", "mtp_use_dedicated_embeddings"):
        refuse_set(fields, key)
    if not fields.without_nulls().flag("attn_output_gate", True):
        raise UnsupportedError(
            f"config.json sets {fields.prefix}attn_output_gate to false, which no release does",
            expected="true",
            found="false",
        )


def at_most_one_mtp_layer(fields: Fields, usual: int) -> int:
    """Return the number of MTP layers, at most one."""
    key = next((name for name in COUNT_FIELDS if fields.has(name)), None)
    count = usual if key is None else fields.whole(key, minimum=0)
    if count > 1:
        raise UnsupportedError(
            f"config.json sets {fields.prefix}{key} to more MTP layers than any release has",
            expected="1",
            found=count,
        )
    return count


def _attending(fields: Fields, layers: int) -> Sequence[bool]:
    """Return which layers have attention: as listed, or by a period."""
    key = "layer_types"
    if not fields.has(key):
        period = fields.without_nulls().whole("full_attention_interval", 4)
        return [(index + 1) % period == 0 for index in range(layers)]
    return [kind == _FULL for kind in fields.kinds(key, (_LINEAR, _FULL), layers)]
