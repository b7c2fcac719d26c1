"""EXAONE-4.5: dense layers whose norms follow their parts, beside a vision tower that is carried as
it is, and an MTP module of such a layer.

Source: transformers' exaone4_5; vLLM's exaone4_5_mtp.
"""

from __future__ import annotations

from dataclasses import replace

from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.engine_draft import VLLM_LINEAR
from mtp_checkpoints.families.examples import PLAIN, VISION, Config, Example
from mtp_checkpoints.families.exaone_attention import exaone_attention
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.gated_delta_decoder import at_most_one_mtp_layer
from mtp_checkpoints.families.listed_decoder import listed_decoder
from mtp_checkpoints.families.moe_decoder import main_layers
from mtp_checkpoints.families.parts.feed_forward import GatedMlp
from mtp_checkpoints.families.parts.gqa import Gqa
from mtp_checkpoints.families.releases import Releases
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec, MtpModules, MtpSpec
from mtp_checkpoints.families.text_part import TextPart

_CONTRACT = MtpContract(source="vLLM")
_DEFAULTS = {"use_qk_norm": True, "partial_rotary_factor": 1.0, "sliding_window": 4096}
_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json."""
    part = TextPart.of(fields)
    known = part.fields.with_defaults(**_DEFAULTS)
    attentions, _ = exaone_attention(known, main_layers(known))
    mlp = GatedMlp.of(known)

    def layer(prefix: str, attention: Gqa) -> LayerSpec:
        return LayerSpec(prefix, attention, mlp, norms=_NORMS, norms_after=True)

    # vLLM makes the module's layer as the first one, in its kind and positions too.
    module = MtpSpec(layer("mtp.layers.0", attentions[0]), MtpModules.of_qwen(), prefix="mtp")
    described = listed_decoder(
        part,
        [layer(f"{part.prefix}.layers.{index}", own) for index, own in enumerate(attentions)],
        [module] * at_most_one_mtp_layer(known, 0),
        _CONTRACT,
        mtp_prefix="mtp",
        vllm=VLLM_LINEAR,
    )
    return replace(described, engines=("vllm",))


_EXAONE4_5: Config = {
    "architectures": ["Exaone4_5_ForConditionalGeneration"],
    "model_type": "exaone4_5",
    "tie_word_embeddings": False,
    "text_config": PLAIN
    | {
        "model_type": "exaone4",
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 32,
        "num_nextn_predict_layers": 1,
    },
    "vision_config": VISION,
}
EXAMPLES = {
    "exaone4_5": Example(
        _EXAONE4_5,
        mtp_model={"mtp_layer_types": ["sliding_attention"]},
    ),
}
# EXAONE-4.5-33B: the text part of its config.json in a test of ollama.
RELEASES: Releases = {
    "exaone4_5": {
        "rms_norm_eps": (1e-5,),
        "rope_theta": (1e6,),
        "sliding_window": (4096,),
    }
}
