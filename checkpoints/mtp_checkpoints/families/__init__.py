"""Model families by config.json's model_type, or by its architecture where several have one
model_type. A new one is one file and one line here, for export and runtime alike."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Collection, Mapping
from typing import Any

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families import (
    bailing_hybrid,
    bailing_linear,
    bailing_moe,
    bailing_moe_v3_vl,
    deepseek_v3,
    deepseek_v4,
    deepseek_v32,
    dots3_note,
    ernie4_5_moe,
    exaone4_5,
    exaone_moe,
    gemma4,
    gemma4_assistant,
    gigachat3_5,
    glm4_moe,
    glm4_moe_lite,
    glm5_next,
    glm_moe_dsa,
    glm_ocr,
    hy_v3,
    hy_v4,
    inkling,
    intern_s2_preview,
    interns2_mobius,
    longcat_flash,
    longcat_flash_ngram,
    mellum,
    mimo,
    mimo_v2,
    mimo_v2_omni,
    minicpmv4_6,
    nemo_speechlm,
    nemotron_h,
    nemotron_h_omni,
    nemotron_h_puzzle,
    pangu_ultra_moe,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    qwen4_exp,
    step3p5,
    step3p7,
)
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.signs import without_null_counts
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.families.without_mtp import refuse_without_mtp

FAMILIES: dict[str, Callable[[Fields], ModelSpec]] = {
    "deepseek_v3": deepseek_v3.spec,
    "glm4_moe": glm4_moe.spec,
    "glm4_moe_lite": glm4_moe_lite.spec,
    "deepseek_v32": deepseek_v32.spec,
    "glm_moe_dsa": glm_moe_dsa.spec,
    "deepseek_v4": deepseek_v4.spec,
    "dots3_note": dots3_note.spec,
    "mimo": mimo.spec,
    "hy_v3": hy_v3.spec,
    "hy_v4": hy_v4.spec,
    "step3p5": step3p5.spec,
    "step3p7": step3p7.spec,
    "mimo_v2_flash": mimo_v2.flash_spec,
    "mimo_v2": mimo_v2.spec,
    "nemotron_h": nemotron_h.spec,
    "ernie4_5_moe": ernie4_5_moe.spec,
    "exaone_moe": exaone_moe.spec,
    "exaone4_5": exaone4_5.spec,
    "longcat_flash": longcat_flash.spec,
    "glm_ocr": glm_ocr.spec,
    "mellum": mellum.spec,
    "glm5_next": glm5_next.spec,
    "bailing_hybrid": bailing_hybrid.spec,
    "BailingMoeV2_5ForCausalLM": bailing_linear.spec,
    "bailing_moe": bailing_moe.spec,
    "bailing_moe_v2": bailing_moe.spec,
    "pangu_ultra_moe": pangu_ultra_moe.spec,
    "qwen3_moe": qwen3_moe.spec,
    "inkling_mm_model": inkling.spec,
    "inkling_model": inkling.spec,
    "intern_s2_preview": intern_s2_preview.spec,
    "interns2_mobius": interns2_mobius.spec,
    "nemotron_h_puzzle": nemotron_h_puzzle.spec,
    "nemotron_h_omni": nemotron_h_omni.spec,
    "gigachat3_5": gigachat3_5.spec,
    "MiMoV2OmniForCausalLM": mimo_v2_omni.spec,
    "bailing_moe_v3_vl": bailing_moe_v3_vl.spec,
    "minicpmv4_6": minicpmv4_6.spec,
    "longcat_flash_ngram": longcat_flash_ngram.spec,
    "nemo_speechlm": nemo_speechlm.spec,
    "qwen3_next": qwen3_next.spec,
    "qwen3_5": qwen3_5.spec,
    "qwen3_5_moe": qwen3_5_moe.spec,
    "qwen4_exp": qwen4_exp.spec,
    "qwen4_exp_text": qwen4_exp.text_spec,
    "qwen3_5_text": qwen3_5.text_spec,
    "qwen3_5_moe_text": qwen3_5_moe.text_spec,
}
# Models whose drafts are checkpoints of their own.
DRAFTED_APART: dict[str, Callable[[Fields], ModelSpec]] = {
    "gemma4": gemma4.spec,
    "gemma4_text": gemma4.text_spec,
    "gemma4_unified": gemma4.spec,
    "gemma4_unified_text": gemma4.text_spec,
}
# Those checkpoints, which engines call MTP too.
SEPARATE_DRAFTS: dict[str, Callable[[Fields], ModelSpec]] = {
    "gemma4_assistant": gemma4_assistant.spec,
    "gemma4_unified_assistant": gemma4_assistant.spec,
}
EVERY = ChainMap(FAMILIES, DRAFTED_APART, SEPARATE_DRAFTS)


def name_of(config: Mapping[str, Any]) -> str | None:
    """Return the name of a config.json's family: its architecture's, or else its model_type; None
    where it is of no family."""
    architectures = config.get("architectures")
    known = [*(architectures if isinstance(architectures, list) else ()), config.get("model_type")]
    return next((name for name in known if isinstance(name, str) and name in EVERY), None)


def family_of(config: Mapping[str, Any], names: Collection[str] = ()) -> ModelSpec:
    """Describe the model of a config.json, whatever it says of quantization.

    names: those of the tensors that are stored, which tell what no config does. Raises
    UnsupportedError for a model_type without a family, and what the family raises.
    """
    refuse_without_mtp(config, names)
    name = name_of(config)
    if name is not None:
        return EVERY[name](Fields(without_null_counts(config))).as_stored(names)
    raise UnsupportedError(
        "This model type is not supported",
        expected=f"model_type {' or '.join(sorted(FAMILIES))} in config.json",
        found=repr(config.get("model_type"))[:100],
        todo="Other models need a family of their own; CONTRIBUTING.md says how to add one",
    )
