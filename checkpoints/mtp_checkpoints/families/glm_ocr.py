"""GLM-OCR: GLM-4's dense layers, with norms before and after their parts, beside a vision tower
that is carried as it is, and an MTP layer of the same kind behind the last.

Source: transformers' glm_ocr; vLLM's glm_ocr_mtp, SGLang's glm_ocr_nextn, which recycle before the
norm and zero position 0.
"""

from __future__ import annotations

from dataclasses import replace

from mtp_checkpoints.families.base import Role
from mtp_checkpoints.families.contract import Hidden, MtpContract
from mtp_checkpoints.families.engine_draft import SGLANG_NEXTN, EngineDraft
from mtp_checkpoints.families.examples import PLAIN, VISION, Config, Example, Reader
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.listed_decoder import NORMS, listed_decoder
from mtp_checkpoints.families.moe_decoder import main_layers, mtp_count
from mtp_checkpoints.families.parts.gqa import Gqa
from mtp_checkpoints.families.parts.listed import Listed, matrix
from mtp_checkpoints.families.releases import Releases
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec, MtpModules, MtpSpec
from mtp_checkpoints.families.text_part import TextPart

_CONTRACT = MtpContract(
    recycled_hidden=Hidden.BEFORE_NORM, zero_first_embedding=True, source="vLLM"
)
_NORMS = (*NORMS, "post_self_attn_layernorm", "post_mlp_layernorm")


def spec(fields: Fields) -> ModelSpec:
    """Describe a config.json."""
    part = TextPart.of(fields)
    known = part.fields.with_defaults(partial_rotary_factor=1.0)
    main, attention, mlp = main_layers(known), Gqa.of(known), _mlp(known)
    layers = [
        LayerSpec(f"{part.prefix}.layers.{at}", attention, mlp, norms=_NORMS)
        for at in range(main + mtp_count(known))
    ]
    mtp = [MtpSpec(layer, MtpModules.under(layer.prefix)) for layer in layers[main:]]
    vllm = EngineDraft(f"model.layers.{main}")  # which knows no vision model
    described = listed_decoder(part, layers[:main], mtp, _CONTRACT, vllm=vllm, sglang=SGLANG_NEXTN)
    return replace(
        described, uncomputed="norms follow attention and MLP, whose first matrices are one"
    )


def _mlp(fields: Fields) -> Listed:
    hidden, inner, role = (
        fields.whole("hidden_size"),
        fields.whole("intermediate_size"),
        Role.DENSE_MLP,
    )
    joined = matrix("gate_up_proj", 2 * inner, hidden, role)
    entries = (joined, matrix("down_proj", hidden, inner, role))
    return Listed("gated MLP of joined matrices", "mlp", entries)


_GLM_OCR: Config = {
    "architectures": ["GlmOcrForConditionalGeneration"],
    "model_type": "glm_ocr",
    "tie_word_embeddings": False,
    "text_config": PLAIN
    | {"model_type": "glm_ocr_text", "num_nextn_predict_layers": 1, "head_dim": 8},
    "vision_config": VISION,
}
EXAMPLES = {
    "glm_ocr": Example(
        _GLM_OCR,
        vllm=Reader("GlmOcrMTP"),
        sglang=Reader(
            "GlmOcrForConditionalGenerationNextN",
            {"attention_bias": False},
            module="glm_ocr_nextn",
        ),
    ),
}
# GLM-OCR: its config.json in reports of those who quantize it.
RELEASES: Releases = {
    "glm_ocr": {
        "rms_norm_eps": (1e-5,),
        "rope_theta": (10000.0,),
        "partial_rotary_factor": (1.0,),
    }
}
