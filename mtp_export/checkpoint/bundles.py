"""A bundle read as the one checkpoint that it was made from: main/ and mtp/ side by side."""

from __future__ import annotations

import hashlib
from pathlib import Path

from mtp_export.checkpoint.reader import CONFIG_NAME, Checkpoint
from mtp_export.errors import InvalidInputError, UnsupportedError

_SAME_FIELDS = ("model_type", "num_hidden_layers", "quantization_config")


def is_bundle(folder: Path) -> bool:
    """Whether a folder holds a main and an MTP part, and no checkpoint itself."""
    parts = all((folder / part / CONFIG_NAME).is_file() for part in ("main", "mtp"))
    return parts and not (folder / CONFIG_NAME).exists()


def open_checkpoint(folder: Path) -> Checkpoint:
    """A checkpoint folder, or a bundle in the released layout as one checkpoint.

    Raises what Checkpoint.open raises, UnsupportedError for a bundle in another layout.
    """
    if not is_bundle(folder):
        return Checkpoint.open(folder)
    main, mtp = Checkpoint.open(folder / "main"), Checkpoint.open(folder / "mtp")
    for key in _SAME_FIELDS:
        if main.config.get(key) != mtp.config.get(key):
            raise UnsupportedError(
                "The two parts of the bundle cannot be read as one checkpoint",
                where=folder,
                expected=f"the same {key} in main/config.json and mtp/config.json",
                found=f"{main.config.get(key)!r} and {mtp.config.get(key)!r}",
                todo="Start from the original checkpoint, or from a bundle of --target hf",
            )
    for name in mtp.tensors:
        if name in main.tensors:
            raise InvalidInputError(f"Tensor {name} is in both parts of the bundle", where=folder)
    digest = hashlib.sha256((main.config_sha256 + mtp.config_sha256).encode()).hexdigest()
    return Checkpoint(folder, main.config, digest, main.shards + mtp.shards, main.folder)
