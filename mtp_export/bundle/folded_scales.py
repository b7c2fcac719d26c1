"""Scales that a calibration folded into a bundle's layers, as its manifest records them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.tensors.bundle_folder import MAIN, MTP
from mtp_checkpoints.tensors.manifest import MANIFEST_NAME, read_manifest
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_export.bundle.options import Part
from mtp_export.schemes.calibrated import FOLDED


def folded_scales(
    manifest: Mapping[str, Any], parts: Sequence[str] = (MAIN, MTP)
) -> dict[str, str]:
    """Return the exponents of tensors of parts that a calibration divided, by their names in the
    source."""
    own_parts = [manifest.get("parts", {}).get(part, {}) for part in parts]
    shards = [shard for part in own_parts for shard in part.get("shards", {}).values()]
    entries = [one for shard in shards for one in shard.get("tensors", {}).values()]
    found = [(one.get("sources"), one[FOLDED]) for one in entries if FOLDED in one]
    return {str(own[0]): letters for own, letters in found if isinstance(own, list) and own}


def refuse_folded(source: Checkpoint, part: Part) -> None:
    """Refuse to make parts of those of a bundle that have folded scales: verification of the new
    ones would not know them (UnsupportedError, and what read_manifest raises)."""
    bundles = {MAIN: source.main_bundle, MTP: source.mtp_bundle}
    alone = {Part.MAIN: [MAIN], Part.MTP: [MTP]}
    for name in alone.get(part, bundles):
        bundle = bundles[name]
        if bundle is not None and (bundle / MANIFEST_NAME).is_file():
            refuse_scales(bundle, read_manifest(bundle), [name])


def refuse_scales(
    bundle: Path, manifest: Mapping[str, Any], parts: Sequence[str] = (MAIN, MTP)
) -> None:
    """Refuse to make a bundle of parts of another that have folded scales (UnsupportedError)."""
    if scales := folded_scales(manifest, parts):
        raise UnsupportedError(
            "Layers of this bundle have scales of AWQ folded in, and no bundle made of it records"
            " them",
            where=bundle,
            expected="the checkpoint that the bundle was made from, or a bundle without scales",
            found=f"{len(scales)} tensors that were divided, such as {next(iter(scales))}",
            todo="Give that checkpoint as the input, with --calibrate and --method awq, or make"
            " the bundle with --method gptq",
        )
