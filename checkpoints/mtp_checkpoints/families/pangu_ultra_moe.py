"""openPangu-Ultra-MoE: the layers of DeepSeek-V3 under its names, with norms after attention and
MLP as well as before them.

Source: vLLM's openpangu and openpangu_mtp. They read DeepSeek-V3's names in config.json, not those
of the first release, such as attention_q_lora_dim.
"""

from __future__ import annotations

from dataclasses import replace

from mtp_checkpoints.families import deepseek_v3
from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.parts.feed_forward import BIASED, GREEDY
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec

_CONTRACT = MtpContract(zero_first_embedding=True, source="vLLM")
_AROUND = ("pre_mlp_layernorm", "post_mlp_layernorm")


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json."""
    is_biased = fields.flag("router_enable_expert_bias", False)
    known = fields.with_values(topk_method=BIASED if is_biased else GREEDY)
    described = deepseek_v3.spec(known, _CONTRACT)
    if not fields.flag("sandwich_norm", False):
        return replace(described, engines=("vllm",))
    return replace(
        described,
        layers=tuple(map(_between_norms, described.layers)),
        mtp=tuple(replace(one, layer=_between_norms(one.layer)) for one in described.mtp),
        uncomputed="norms surround attention and MLP",
        engines=("vllm",),
    )


def _between_norms(layer: LayerSpec) -> LayerSpec:
    return replace(layer, norms=(*layer.norms, *_AROUND))
