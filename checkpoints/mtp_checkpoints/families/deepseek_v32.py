"""DeepSeek-V3.2: DeepSeek-V3 whose attentions have indexers, which pick the tokens to attend to.

Source: config.json and the index of the released checkpoint; DeepSeek-V3.2-Exp's inference code;
transformers' deepseek_v32.
"""

from __future__ import annotations

from collections.abc import Callable

from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.engine_draft import EngineDraft
from mtp_checkpoints.families.examples import INDEXER, SMALL, Config, Example
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.moe_decoder import attention_of, moe_decoder
from mtp_checkpoints.families.parts.mla import Mla
from mtp_checkpoints.families.parts.sparse_mla import Indexer, SparseMla
from mtp_checkpoints.families.releases import DEEPSEEK, Releases
from mtp_checkpoints.families.spec import ModelSpec

# vLLM alone zeroes position 0.
_USUAL = MtpContract(source="SGLang and vLLM; position 0 as in SGLang")


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json."""
    return sparse_decoder(fields, lambda layer: True, usually_rotates_pairs=False)


def sparse_decoder(
    fields: Fields,
    has_indexer: Callable[[int], bool],
    *,
    usually_rotates_pairs: bool,
    sglang: EngineDraft | None = None,
) -> ModelSpec:
    """Describe a config.json, given which layers have indexers of their own; one without shares the
    choice of the last layer before it that has one."""
    mla = Mla.of(fields)
    indexer = Indexer.of(fields, usually_rotates_pairs=usually_rotates_pairs)

    def attention(layer: int) -> SparseMla:
        chooser = next(index for index in range(layer, -1, -1) if has_indexer(index))
        return SparseMla(mla, indexer, chosen_by=attention_of(chooser))

    return moe_decoder(
        fields,
        attention,
        usual_contract=_USUAL,
        sglang=sglang,
        refused=("attention_bias", "tie_word_embeddings"),
    )


_DEEPSEEK_V32: Config = (
    SMALL
    | INDEXER
    | {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "hidden_size": 64,
        "moe_intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "v_head_dim": 16,
    }
)


EXAMPLES = {
    "deepseek_v32": Example(
        _DEEPSEEK_V32,
    ),
}
RELEASES: Releases = {"deepseek_v32": DEEPSEEK}
