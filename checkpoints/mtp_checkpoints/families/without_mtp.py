"""Models that users take for ones with MTP modules, and whose releases have no tensor of any."""

from __future__ import annotations

from mtp_checkpoints.errors import UnsupportedError

# Names by config.json's model_type, with what is known of the release.
WITHOUT_MTP: dict[str, str] = {
    "kimi_k2": "Kimi-K2: num_nextn_predict_layers is 0, and no layer follows the last",
    "minimax_m2": "MiniMax-M2: config.json names MTP modules, and no shard holds any",
}


def refuse_without_mtp(model_type: str) -> None:
    """Raise UnsupportedError for a model whose release has no MTP tensors."""
    if model_type in WITHOUT_MTP:
        raise UnsupportedError(
            "There are no MTP tensors in this release",
            expected="a model that is released with its MTP module",
            found=WITHOUT_MTP[model_type],
            todo="There is nothing to split: serve the release as it is, with a draft model of"
            " another kind",
        )
