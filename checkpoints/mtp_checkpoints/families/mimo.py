"""MiMo-7B: Qwen2's dense layers, and an MTP module whose projection takes the hidden state first.

Source: config.json of the release; vLLM's and SGLang's mimo_mtp.
"""

from __future__ import annotations

from mtp_checkpoints.families.contract import Hidden, MtpContract
from mtp_checkpoints.families.engine_draft import EngineDraft
from mtp_checkpoints.families.examples import PLAIN, Config, Example, Reader
from mtp_checkpoints.families.facts import ModelFacts, refuse_set
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.moe_decoder import main_layers, mtp_count
from mtp_checkpoints.families.parts.feed_forward import GatedMlp
from mtp_checkpoints.families.parts.gqa import Gqa
from mtp_checkpoints.families.releases import Releases
from mtp_checkpoints.families.spec import Input, LayerSpec, ModelSpec, MtpModules, MtpSpec

_MTP = "model.mtp_layers"
_MODULES = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
# SGLang takes the hidden state after the norm.
_CONTRACT = MtpContract(Hidden.BEFORE_NORM, zero_first_embedding=True, source="vLLM")
_DEFAULTS = {"attention_bias": True, "partial_rotary_factor": 1.0}


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json."""
    refuse_set(fields, "tie_word_embeddings")
    known = fields.with_defaults(**_DEFAULTS)
    main, count = main_layers(known), mtp_count(known)
    attention, mlp = Gqa.of(known), GatedMlp.of(known)
    return ModelSpec(
        ModelFacts.of(known),
        tuple(LayerSpec(f"model.layers.{index}", attention, mlp) for index in range(main)),
        tuple(
            MtpSpec(
                LayerSpec(f"{_MTP}.{index}", attention, mlp),
                MtpModules.without_copies(f"{_MTP}.{index}", _MODULES),
                inputs=(Input.HIDDEN, Input.EMBEDDING),
            )
            for index in range(count)
        ),
        mtp_contract=_CONTRACT.overridden_by(known),
        usual_contract=_CONTRACT,
        mtp_names=tuple(f"model.layers.{main + index}" for index in range(count)),  # vLLM's
        mtp_prefix=_MTP,
        vllm=EngineDraft(f"model.layers.{main}"),
        sglang=EngineDraft(""),
    )


_MIMO: Config = PLAIN | {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "mimo",
    "attention_bias": True,
    "hidden_act": "silu",
    "rope_theta": 640000.0,
    "num_nextn_predict_layers": 1,
}
EXAMPLES = {
    "mimo": Example(
        _MIMO,  # vLLM derives the width of a head from the others.
        vllm=Reader("MiMoMTP", {"head_dim": 8}),
        sglang=Reader("MiMoMTP", module="mimo_mtp"),
    ),
}
# MiMo-7B-Base: config.json in NVIDIA's aiconfigurator.
RELEASES: Releases = {"mimo": {"rms_norm_eps": (1e-5,), "rope_theta": (640000.0,)}}
