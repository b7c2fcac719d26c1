"""K-EXAONE: grouped-query attention with norms of queries and keys, most layers to the last tokens
alone and the others without positions, a mixture of experts, and a dense MTP layer.

Source: transformers' exaone_moe and its conversion mapping; vLLM's exaone_moe_mtp.
"""

from __future__ import annotations

from dataclasses import replace

from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.gated_delta_decoder import at_most_one_mtp_layer
from mtp_checkpoints.families.moe_decoder import DecoderNames, moe_decoder
from mtp_checkpoints.families.parts.feed_forward import GatedMlp, MoeNames
from mtp_checkpoints.families.parts.gqa import Gqa
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec, MtpModules, MtpSpec

_CONTRACT = MtpContract(source="vLLM and SGLang")
_NAMES = DecoderNames(MoeNames(bias="e_score_correction_bias"))
_FIELDS = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
_DEFAULTS = {"use_qk_norm": True, "partial_rotary_factor": 1.0, "n_shared_experts": 1}


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json."""
    known = fields.named(**_FIELDS).with_defaults(**_DEFAULTS)
    attention, count = Gqa.of(known), at_most_one_mtp_layer(known, 0)
    main = moe_decoder(
        known.with_values(num_nextn_predict_layers=0),
        lambda layer: attention,
        usual_contract=_CONTRACT,
        mtp_names=(),
        names=_NAMES,
    )
    layer = LayerSpec("mtp.layers.0", attention, GatedMlp.of(known))
    return replace(
        main,
        mtp=(MtpSpec(layer, MtpModules.of_qwen(), prefix="mtp"),) * count,
        mtp_prefix="mtp",
        linear_projection=True,
        uncomputed="some layers attend to the last tokens alone, the others have no positions",
    )
