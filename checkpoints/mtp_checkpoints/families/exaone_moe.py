"""K-EXAONE: grouped-query attention with norms of queries and keys, most layers to the last tokens
alone and the others without positions, a mixture of experts, and a dense MTP layer.

Source: transformers' exaone_moe and its conversion mapping; vLLM's exaone_moe and exaone_moe_mtp.
"""

from __future__ import annotations

from dataclasses import replace

from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.exaone_attention import exaone_attention
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.gated_delta_decoder import at_most_one_mtp_layer
from mtp_checkpoints.families.moe_decoder import DecoderNames, main_layers, moe_decoder
from mtp_checkpoints.families.parts.feed_forward import GatedMlp, MoeNames
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
        mtp_names=(),
        names=_NAMES,
    )
    layer = LayerSpec("mtp.layers.0", of_mtp, GatedMlp.of(known))
    return replace(
        main,
        mtp=(MtpSpec(layer, MtpModules.of_qwen(), prefix="mtp"),) * at_most_one_mtp_layer(known, 0),
        mtp_prefix="mtp",
        linear_projection=True,
        uncomputed="windows differ from layer to layer" if known.has("sliding_windows") else "",
    )
