"""Intern-S2 Mobius: the attentions and the MTP module of Qwen3.5 with a mixture of experts, a
shared expert in every layer, and banks of routed experts that several layers share.

Source: vLLM's interns2_mobius; SGLang's interns2_mobius.
"""

from __future__ import annotations

from dataclasses import replace

from mtp_checkpoints.families.base import Role
from mtp_checkpoints.families.examples import QWEN3_5_MOE, Config, Example, Reader
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.gated_delta_decoder import gated_delta_decoder
from mtp_checkpoints.families.intern_s2_preview import SGLANG_FIELDS, TOWERS
from mtp_checkpoints.families.moe_decoder import check_expert_count
from mtp_checkpoints.families.parts.feed_forward import Moe
from mtp_checkpoints.families.parts.listed import Entry, Listed, gated_mlp, matrix
from mtp_checkpoints.families.releases import Releases
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.families.text_part import TextPart

_OF_MODULE = ("num_experts", "num_experts_per_tok")
_SCALES = ("attn_layer_scale", "ffn_layer_scale")


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json with a text_config."""
    part = TextPart.of(fields, carried=TOWERS)
    text, hidden = part.fields, part.fields.whole("hidden_size")
    banks = text.whole("num_blocks", 4)
    check_expert_count(text, "num_experts", banks)
    own = text.with_values(**{key: text.whole(f"mtp_{key}") for key in _OF_MODULE})
    check_expert_count(own, "num_experts", 1)
    described = gated_delta_decoder(
        part,
        _shared(text, hidden),
        usual_mtp_layers=0,
        is_interleaved=False,
        mtp_feed_forward=Moe.gated(own, normalises=True),
    )
    scales = [Entry(name, (1, 1, hidden), Role.NORM) for name in _SCALES]
    more = tuple(scales) if text.flag("layer_scale", False) else ()
    return replace(
        described,
        layers=tuple(replace(layer, more=more) for layer in described.layers),
        more=tuple(
            entry
            for bank in range(banks)
            for entry in _bank(text, f"{part.prefix}.meta_mlp.{bank}", hidden)
        ),
    )


def _shared(fields: Fields, hidden: int) -> Listed:
    inner = fields.whole("shared_expert_intermediate_size")
    gate = matrix("shared_expert_gate", 1, hidden, Role.ROUTER)
    own = gated_mlp("shared_expert.", hidden, inner, Role.SHARED_EXPERT)
    return Listed("experts that layers share", "mlp", (gate, *own))


def _bank(fields: Fields, prefix: str, hidden: int) -> tuple[Entry, ...]:
    """Return a bank of experts, which are stored fused."""
    moe = Moe.gated(fields, normalises=True)
    count, inner, role = moe.experts, moe.expert.inner, Role.ROUTED_EXPERT
    return (
        matrix(f"{prefix}.gate", count, hidden, Role.ROUTER),
        Entry(f"{prefix}.experts.gate_up_proj", (count, 2 * inner, hidden), role),
        Entry(f"{prefix}.experts.down_proj", (count, hidden, inner), role),
    )


_INTERNS2_MOBIUS: Config = QWEN3_5_MOE | {
    "architectures": ["InternS2MobiusForConditionalGeneration"],
    "model_type": "interns2_mobius",
    "text_config": QWEN3_5_MOE["text_config"]
    | {"num_blocks": 2, "layer_scale": True, "mtp_num_experts": 4, "mtp_num_experts_per_tok": 2},
}
# Fields of whole configs, of which a checkpoint of ours has one tensor of the tower.
_VISION: Config = (
    {"hidden_size": 32, "num_heads": 2, "depth": 1, "intermediate_size": 32, "patch_size": 14}
    | {"num_position_embeddings": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    | {"deepstack_visual_indexes": [], "out_hidden_size": 64, "in_channels": 3}
    | {"hidden_act": "gelu_pytorch_tanh"}
)


EXAMPLES = {
    "interns2_mobius": Example(
        _INTERNS2_MOBIUS,
        in_transformers=False,
        # Without it vLLM's has vectors of the MTP layer's own, which it does not ask for.
        vllm=Reader("InternS2MobiusMTP", {"layer_scale": False}, needs_gpu=True),
        sglang=Reader(
            "Qwen3_5ForCausalLMMTP",
            SGLANG_FIELDS | {"num_experts": 4, "num_experts_per_tok": 2},
            module="qwen3_5_mtp",
        ),
        vllm_main=Reader(
            "InternS2MobiusForConditionalGeneration", needs_gpu=True, left=(".time_series.",)
        ),
        whole={"image_token_id": 3, "vision_config": _VISION},
    ),
}
RELEASES: Releases = {"interns2_mobius": None}  # no release read
