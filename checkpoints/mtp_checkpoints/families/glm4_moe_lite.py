"""GLM-4.7-Flash: DeepSeek-V3's tensors under DeepSeek-V3's names, in other sizes.

The norms of the latents take config.json's rms_norm_eps, as every other norm does. vLLM and SGLang
do so; transformers gives these two 1e-6 whatever config.json says.

Source: config.json and the index of the released checkpoint (9,703 tensors); vLLM's and SGLang's
glm4_moe_lite.
"""

from __future__ import annotations

from mtp_checkpoints.families import deepseek_v3
from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.engine_draft import SGLANG_NEXTN
from mtp_checkpoints.families.examples import GLM4_MOE_LITE, Example, Reader
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.releases import GLM, Releases
from mtp_checkpoints.families.spec import ModelSpec

# vLLM alone recycles before the norm and zeroes position 0.
_USUAL = MtpContract(source="transformers, generate(use_mtp=True), and SGLang")


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json."""
    return deepseek_v3.spec(fields, _USUAL, SGLANG_NEXTN)


EXAMPLES = {
    "glm4_moe_lite": Example(
        GLM4_MOE_LITE,
        sglang=Reader("Glm4MoeLiteForCausalLMNextN", module="glm4_moe_lite_nextn"),
    ),
}
RELEASES: Releases = {"glm4_moe_lite": {**GLM, "routed_scaling_factor": (1.8,)}}
