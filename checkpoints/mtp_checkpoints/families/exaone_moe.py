"""K-EXAONE: grouped-query attention with norms of queries and keys, most layers to the last tokens
alone and the others without positions, a mixture of experts, and a dense MTP layer.

Source: transformers' exaone_moe and its conversion mapping; vLLM's exaone_moe and exaone_moe_mtp.
"""

from __future__ import annotations

from dataclasses import replace

from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.engine_draft import SGLANG_FIRST_LAYER, VLLM_LINEAR
from mtp_checkpoints.families.examples import EXPERTS, PLAIN, Config, Example, Reader
from mtp_checkpoints.families.exaone_attention import exaone_attention
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.gated_delta_decoder import at_most_one_mtp_layer
from mtp_checkpoints.families.moe_decoder import DecoderNames, main_layers, moe_decoder
from mtp_checkpoints.families.parts.feed_forward import GatedMlp, MoeNames
from mtp_checkpoints.families.releases import BIASED, PLAIN_GROUPS, Releases
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec, MtpModules, MtpSpec

_CONTRACT = MtpContract(source="transformers, generate(use_mtp=True), vLLM and SGLang")
_NAMES = DecoderNames(MoeNames(bias="e_score_correction_bias"))
_FIELDS = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
_DEFAULTS = {
    "use_qk_norm": True,
    "partial_rotary_factor": 1.0,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
}


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json."""
    known = fields.named(**_FIELDS).with_defaults(**_DEFAULTS)
    attentions, of_mtp = exaone_attention(known, main_layers(known))
    main = moe_decoder(
        known.with_values(num_nextn_predict_layers=0),
        attentions.__getitem__,
        usual_contract=_CONTRACT,
        sglang=SGLANG_FIRST_LAYER,
        names=_NAMES,
    )
    layer = LayerSpec("mtp.layers.0", of_mtp, GatedMlp.of(known))
    return replace(
        main,
        mtp=(MtpSpec(layer, MtpModules.of_qwen(), prefix="mtp"),) * at_most_one_mtp_layer(known, 0),
        mtp_names=(),
        mtp_prefix="mtp",
        vllm=VLLM_LINEAR,
        uncomputed="windows differ from layer to layer" if known.has("sliding_windows") else "",
    )


_EXAONE_MOE: Config = PLAIN | {
    "architectures": ["ExaoneMoeForCausalLM"],
    "model_type": "exaone_moe",
    "first_k_dense_replace": 1,
    "num_experts": 8,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 32,
    "num_nextn_predict_layers": 1,
    **EXPERTS,
}
EXAMPLES = {
    "exaone_moe": Example(
        _EXAONE_MOE,
        mtp_model={"mtp_layer_types": ["sliding_attention"], "mtp_mlp_layer_types": ["dense"]},
        vllm=Reader("ExaoneMoeMTP"),
        sglang=Reader(
            "ExaoneMoEForCausalLMMTP",
            {"pad_token_id": 0, "is_moe_layer": [False, False]},
            module="exaone_moe_mtp",
        ),
    ),
}
# K-EXAONE-236B-A23B: transformers' exaone_moe, and its config.json in a test of TensorRT-LLM.
RELEASES: Releases = {
    "exaone_moe": {
        **BIASED,
        **PLAIN_GROUPS,
        "rms_norm_eps": (1e-5,),
        "rope_theta": (1e6,),
        "rope_scaling": (None,),
        "routed_scaling_factor": (2.5,),
    }
}
