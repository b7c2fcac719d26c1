"""Quark's lists as SGLang's classes of drafts take them: each looks for the MTP layer in them in a
way of its own.

Source: SGLang 0.5.23, `models/deepseek_nextn.py`, `glm4_moe.py`, `glm4_moe_nextn.py` and
`glm4_moe_lite_nextn.py`, which tests/engines/test_quark_in_sglang.py executes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mtp_checkpoints.families.base import SGLANG_DRAFT
from mtp_checkpoints.quantization.method import names_in
from mtp_checkpoints.quantization.methods.quark import EXCLUDE, NAMED, entry_for
from mtp_checkpoints.quantization.native import Config

_RENAMED = "model.layers.61"  # of DeepSeek's class, whatever number the layer has
_AROUND = "model"  # what GLM-5's class and both build beside the draft's layer
_BESIDE = ("shared_head.norm", "eh_proj", "enorm", "hnorm")
_WHOLE = rf"re:{re.escape(SGLANG_DRAFT)}(\.|$)"


@dataclass(frozen=True)
class QuarkDraft:
    """A class of drafts: the name that it has for one of a checkpoint's, given the layer's too.
    projection: the name that it asks for its projection by; "" for a linear of torch, which it asks
    nothing of. leaves_out_whole: it builds the draft without the config where that leaves out the
    layer itself."""

    rename: Callable[[str, str], str]
    projection: str
    leaves_out_whole: bool = False


def _as_written(name: str, layer: str) -> str:
    return name


def _of_deepseek(name: str, layer: str) -> str:
    return name.replace(_RENAMED, SGLANG_DRAFT, 1)


def _of_glm_dsa(name: str, layer: str) -> str:
    place = _AROUND if any(part in name for part in _BESIDE) else SGLANG_DRAFT
    return name.replace(layer, place, 1) if name.startswith(f"{layer}.") else name


_DEEPSEEK = QuarkDraft(_of_deepseek, f"{_AROUND}.eh_proj", leaves_out_whole=True)
_GLM4 = QuarkDraft(_as_written, "")
_CLASSES = {
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "DeepseekV32ForCausalLM": _DEEPSEEK,
    "GlmMoeDsaForCausalLM": QuarkDraft(_of_glm_dsa, _DEEPSEEK.projection),
    "Glm4MoeForCausalLM": _GLM4,
    "Glm4MoeLiteForCausalLM": _GLM4,
}


def quark_draft(config: Mapping[str, Any]) -> QuarkDraft | None:
    """Return the class of drafts that SGLang takes for a config.json; None for one that is not
    known here."""
    architectures = config.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    return _CLASSES.get(first) if isinstance(first, str) else None


def quark_of_sglang(config: Mapping[str, Any], quantization: Config) -> Config:
    """Return Quark's config of a model with a known class of drafts by the names that it has."""
    known = quark_draft(config)
    assert known is not None, "asked of other models"
    layer = f"model.layers.{config.get('num_hidden_layers')}"
    written = names_in(quantization, EXCLUDE)
    listed = [*written, *(known.rename(name, layer) for name in written)]
    if known.leaves_out_whole and entry_for(known.rename(layer, layer), listed):
        listed += [_WHOLE, known.projection]
    named = quantization.get(NAMED) or {}
    renamed = {known.rename(pattern, layer): form for pattern, form in named.items()}
    return {**quantization, EXCLUDE: [*dict.fromkeys(listed)], NAMED: renamed}
