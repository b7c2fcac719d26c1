"""Qwen3 with experts: grouped-query attention with norms of queries and keys, a mixture of experts
behind a softmax router, and, where config.json counts one, an MTP layer of the same kind.

Source: transformers' qwen3_moe; SGLang's qwen3_moe_mtp.
"""

from __future__ import annotations

from dataclasses import replace

from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.engine_draft import SGLANG_FIRST_LAYER
from mtp_checkpoints.families.examples import EXPERTS, PLAIN, Config, Example, Reader
from mtp_checkpoints.families.facts import refuse_set
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.mellum import softmax_decoder
from mtp_checkpoints.families.moe_decoder import main_layers
from mtp_checkpoints.families.parts.gqa import Gqa
from mtp_checkpoints.families.qwen3_next import refuse_dense_layers
from mtp_checkpoints.families.releases import Releases
from mtp_checkpoints.families.spec import ModelSpec

_CONTRACT = MtpContract(source="SGLang")
_DEFAULTS = {"use_qk_norm": True, "partial_rotary_factor": 1.0, "norm_topk_prob": False}


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json."""
    known = fields.with_defaults(**_DEFAULTS)
    for key in ("attention_bias", "use_sliding_window"):
        refuse_set(known, key)
    refuse_dense_layers(known)
    main = main_layers(known)
    attentions = [Gqa.of(known)] * (main + 1)
    described = softmax_decoder(known, attentions, [True] * main, _CONTRACT)
    return replace(described, engines=("sglang",), sglang=SGLANG_FIRST_LAYER)


_QWEN3_MOE: Config = PLAIN | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    **EXPERTS,
}
EXAMPLES = {
    "qwen3_moe": Example(
        _QWEN3_MOE,
        mtp_model={},
        sglang=Reader("Qwen3MoeForCausalLMMTP", {"attention_bias": False}, module="qwen3_moe_mtp"),
    ),
}
# 235B-A22B and 30B-A3B, then Coder-480B-A35B: config.json in NVIDIA's aiconfigurator.
RELEASES: Releases = {
    "qwen3_moe": {
        "rms_norm_eps": (1e-6,),
        "rope_theta": (1e6, 1e7),
        "rope_scaling": (None,),
        "norm_topk_prob": (True,),
    }
}
