"""Scales that a calibration folded into a bundle's MTP layer, as its manifest records them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.tensors.bundle_folder import MTP
from mtp_checkpoints.tensors.manifest import MANIFEST_NAME, read_manifest
from mtp_export.bundle.options import Part
from mtp_export.schemes.calibrated import FOLDED


def folded_scales(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the exponents of tensors that a calibration divided, by their names in the source."""
    shards = manifest.get("parts", {}).get(MTP, {}).get("shards", {}).values()
    entries = [one for shard in shards for one in shard.get("tensors", {}).values()]
    found = [(one.get("sources"), one[FOLDED]) for one in entries if FOLDED in one]
    return {str(own[0]): letters for own, letters in found if isinstance(own, list) and own}


def refuse_folded(bundle: Path | None, part: Part) -> None:
    """Refuse to make an MTP part of one with folded scales: verification of the new one would not
    know them (UnsupportedError, and what read_manifest raises)."""
    if bundle is None or part is Part.MAIN or not (bundle / MANIFEST_NAME).is_file():
        return
    if scales := folded_scales(read_manifest(bundle)):
        raise UnsupportedError(
            "The MTP layer of this bundle has scales of AWQ folded in, and no bundle made of it"
            " records them",
            where=bundle,
            expected="the checkpoint that the bundle was made from",
            found=f"{len(scales)} tensors that were divided, such as {next(iter(scales))}",
            todo="Give that checkpoint as the input, with --calibrate and --method awq, or make"
            " --part main alone",
        )
