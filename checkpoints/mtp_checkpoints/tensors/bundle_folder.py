"""Reader of a bundle as the one checkpoint that it was made from: main/ and mtp/ side by side."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from mtp_checkpoints.containers import is_checkpoint
from mtp_checkpoints.containers.base import COMPRESSION, CONFIG_NAME, QUANTIZATION
from mtp_checkpoints.errors import InvalidInputError, UnsupportedError
from mtp_checkpoints.families import DRAFTED_APART
from mtp_checkpoints.sources.addresses import byte_source
from mtp_checkpoints.sources.byte_source import Place
from mtp_checkpoints.sources.local_folder import LocalFolder
from mtp_checkpoints.tensors.manifest import MANIFEST_NAME, read_manifest
from mtp_checkpoints.tensors.reader import Checkpoint

MAIN, MTP = "main", "mtp"
RELEASED = "hf"
_SAME_FIELDS = ("model_type", "num_hidden_layers", QUANTIZATION, COMPRESSION)


@dataclass(frozen=True)
class BundleParts:
    """The folders of a bundle, opened; mtp is None where there is none."""

    main: Checkpoint
    mtp: Checkpoint | None


def is_bundle(folder: Path) -> bool:
    """Return whether a folder holds a main and an MTP part, and is no checkpoint itself."""
    parts = all((folder / part / CONFIG_NAME).is_file() for part in (MAIN, MTP))
    return parts and not (folder / CONFIG_NAME).exists()


def require_model(folder: Path) -> None:
    """Refuse a folder that is neither a checkpoint nor a bundle with a main part, before anything
    of it is read (InvalidInputError)."""
    if not (folder.exists() and is_checkpoint(byte_source(folder))):
        _require_main(folder)


def _require_main(folder: Path) -> None:
    if not (folder / MAIN / CONFIG_NAME).exists():
        if (folder / MTP / CONFIG_NAME).exists():
            raise InvalidInputError(
                f"This bundle has an {MTP} part alone, which no model can be read from",
                where=folder,
                expected=f"{MAIN} beside {MTP}",
                todo="Export the checkpoint with --part both, or point at the checkpoint",
            )
        raise InvalidInputError(
            "There is neither a bundle nor a checkpoint here",
            where=folder,
            expected=f"{CONFIG_NAME}, or {CONFIG_NAME} in {MAIN} and in {MTP}",
            todo="Point at the output folder of an export, or at a Hugging Face checkpoint",
        )


def open_parts(folder: Path) -> BundleParts:
    """Open the parts of a bundle in any layout; raises what Checkpoint.open does."""
    _require_main(folder)
    main = Checkpoint.open(folder / MAIN)
    return BundleParts(main, Checkpoint.open(folder / MTP) if (folder / MTP).is_dir() else None)


def bundle_target(folder: Path) -> str:
    """Return the target whose layout the MTP part has, by the manifest; the released layout's
    without one."""
    if not (folder / MANIFEST_NAME).is_file():
        return RELEASED
    return str(read_manifest(folder)["options"].get("target", RELEASED))


def open_checkpoint(place: Place) -> Checkpoint:
    """Open a checkpoint, or a local bundle in the released layout as one checkpoint.

    Raises what Checkpoint.open does, and UnsupportedError for a bundle in another layout.
    """
    if not isinstance(place, Path):
        return Checkpoint.open(place)
    folder = place
    if not is_bundle(folder):
        if (folder / MANIFEST_NAME).is_file():
            return _open_alone(folder)
        return Checkpoint.open(folder)
    for part in (MAIN, MTP):
        LocalFolder(folder).resolved(part)  # a part elsewhere is no part of what was given
    parts = open_parts(folder)
    main, mtp = parts.main, parts.mtp
    assert mtp is not None, "is_bundle checked it"
    for key in _SAME_FIELDS:
        if main.config.get(key) != mtp.config.get(key):
            raise UnsupportedError(
                "The two parts of the bundle cannot be read as one checkpoint",
                where=folder,
                expected=f"the same {key} in main/config.json and mtp/config.json",
                found=" and ".join(repr(one.config.get(key))[:100] for one in (main, mtp)),
                todo="Start from the original checkpoint, or from a bundle of --target hf",
            )
    for name in mtp.tensors:
        if name in main.tensors:
            raise InvalidInputError(
                f"Tensor {name} is in both parts of the bundle",
                where=folder,
                todo="Export the original checkpoint again",
            )
    digest = hashlib.sha256((main.config_sha256 + mtp.config_sha256).encode()).hexdigest()
    return Checkpoint(
        path=folder,
        config=main.config,
        config_sha256=digest,
        shards=main.shards + mtp.shards,
        files=main.files,
    )


def _open_alone(folder: Path) -> Checkpoint:
    """Open a bundle whose drafts are a checkpoint of their own beside the main part
    (InvalidInputError for another one without an MTP part)."""
    if (folder / MAIN / CONFIG_NAME).is_file():
        LocalFolder(folder).resolved(MAIN)
        main = Checkpoint.open(folder / MAIN)
        if main.config.get("model_type") in DRAFTED_APART:
            return replace(main, path=folder)
    raise InvalidInputError(
        "This is a bundle of one part only",
        where=folder,
        expected=f"{MAIN} and {MTP} in it, or a checkpoint",
        todo="Start from the original checkpoint, or from an export with --part both",
    )
