"""DeepSeek-V3 and R1: MLA, mixture of experts, and MTP layers stored behind the last main layer.

Source: README_WEIGHTS.md and the index of the released checkpoints (91,991 tensors).
"""

from __future__ import annotations

from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.engine_draft import EngineDraft
from mtp_checkpoints.families.examples import SMALL, Example, Reader
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.moe_decoder import moe_decoder
from mtp_checkpoints.families.parts.mla import Mla
from mtp_checkpoints.families.releases import DEEPSEEK, Releases
from mtp_checkpoints.families.spec import ModelSpec

# It shifts the positions of MTP rows by one throughout, which relative ones do not see.
_USUAL = MtpContract(source="transformers, generate(use_mtp=True)")


def spec(
    fields: Fields,
    usual_contract: MtpContract = _USUAL,
    sglang: EngineDraft | None = None,
) -> ModelSpec:
    """Describe a config.json; sglang as for moe_decoder."""
    attention = Mla.of(fields)
    return moe_decoder(
        fields,
        lambda layer: attention,
        usual_contract=usual_contract,
        sglang=sglang,
        refused=("attention_bias", "tie_word_embeddings"),
    )


EXAMPLES = {
    "deepseek_v3": Example(
        SMALL,
        sglang=Reader("DeepseekV3ForCausalLMNextN", module="deepseek_nextn"),
    ),
}
RELEASES: Releases = {"deepseek_v3": DEEPSEEK}
