"""GLM-4.5, 4.6 and 4.7: grouped-query attention with biases, in the larger models norms of queries
and keys, and otherwise DeepSeek-V3's layers and MTP module.

Source: config.json of the released checkpoints; vLLM's glm4_moe_mtp; transformers' glm4_moe.
"""

from __future__ import annotations

from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.engine_draft import SGLANG_NEXTN
from mtp_checkpoints.families.examples import GLM4_MOE, Example, Reader
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.moe_decoder import moe_decoder
from mtp_checkpoints.families.parts.gqa import Gqa
from mtp_checkpoints.families.releases import GLM, Releases
from mtp_checkpoints.families.spec import ModelSpec

# vLLM alone recycles before the norm and zeroes position 0.
_USUAL = MtpContract(source="transformers, generate(use_mtp=True), and SGLang")


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json."""
    attention = Gqa.of(fields)
    return moe_decoder(fields, lambda layer: attention, usual_contract=_USUAL, sglang=SGLANG_NEXTN)


EXAMPLES = {
    "glm4_moe": Example(
        GLM4_MOE,
        mtp_model={},
        sglang=Reader("Glm4MoeForCausalLMNextN", module="glm4_moe_nextn"),
    ),
}
# Air has 1.0.
RELEASES: Releases = {
    "glm4_moe": {
        **GLM,
        "routed_scaling_factor": (2.5, 1.0),
        "partial_rotary_factor": (0.5,),
    }
}
