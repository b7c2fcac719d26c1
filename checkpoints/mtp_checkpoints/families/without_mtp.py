"""Models that are refused by name: without MTP tensors in their releases, or with DSpark there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.signs import other_draft

_MTP = "mtp."  # by which DSpark goes too
# Names by config.json's model_type, with what is known of the release.
WITHOUT_MTP: dict[str, str] = {
    "axk1": "A.X-K1: transformers' class knows DeepSeek-V3's layers and none behind the last",
    "deepseek_v41": "DeepSeek-V4.1: tensors named mtp are the stages of DSpark, which no engine"
    " runs as MTP",
    "kimi_k2": "Kimi-K2: num_nextn_predict_layers is 0, and no layer follows the last",
    "kimi_k3": "Kimi-K3: no published weights hold an MTP module, though engines have code for one",
    "kimi_linear": "Kimi-Linear: SGLang's config counts no MTP layer, and transformers' class knows"
    " none",
    "minimax_m2": "MiniMax-M2: config.json names MTP modules, and no shard holds any",
    "minimax_m3_vl": "MiniMax-M3: no published weights hold an MTP module, though engines have code"
    " for one",
    "mistral_large4": "Mistral-Large-4: tensors named mtp_dspark are DSpark's, which no engine runs"
    " as MTP",
    "solar_open": "Solar-Open: transformers' class knows GLM-4.5's layers and none behind the last",
    "youtu": "Youtu-LLM: transformers' class knows DeepSeek-V3's attention and no layer behind the"
    " last",
}


def refuse_without_mtp(config: Mapping[str, Any], names: Collection[str] = ()) -> None:
    """Raise UnsupportedError for a model whose release has no MTP tensors, and for a draft that is
    no MTP module by config.json or the names of tensors."""
    model_type = str(config.get("model_type"))
    draft = other_draft(config, [name for name in names if name.startswith(_MTP)])
    if draft is not None and draft.kind == "DSpark":
        raise UnsupportedError(
            "This checkpoint's draft is DSpark, which engines do not run as MTP",
            expected="MTP layers",
            found=draft.sign,
            todo="Serve it as it is, with the engine's own method for DSpark; the release before it"
            " may have MTP layers",
        )
    if model_type in WITHOUT_MTP:
        raise UnsupportedError(
            "There are no MTP tensors in this release",
            expected="a model that is released with its MTP module",
            found=WITHOUT_MTP[model_type],
            todo="There is nothing to split: serve the release as it is, with a draft model of"
            " another kind",
        )
