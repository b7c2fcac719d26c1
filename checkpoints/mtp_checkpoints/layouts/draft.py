"""Draft folders as they were made for a target, read back from their own config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtp_checkpoints.layouts.base import Target
from mtp_checkpoints.quantization.stored import StoredModel, stored_mtp


def stored_draft(config: Mapping[str, Any], target: Target, main_layers: int = 1) -> StoredModel:
    """Return what a draft folder made for a target holds, by its own config.json.

    main_layers is the main model's num_hidden_layers, which single-layer drafts do not record; only
    the released names in the answer depend on it. Raises as stored_model.
    """
    released = target.released_config(config, main_layers)
    return stored_mtp(released, target.mtp_name, transposes=target.transposes)
