"""Reader of mtp_export.json, the manifest that makes a folder a bundle; bundle/ writes it last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mtp_export.checkpoint.reader import read_json_object
from mtp_export.errors import InvalidInputError

MANIFEST_NAME = "mtp_export.json"
FORMAT = "mtp-export bundle"
FORMAT_VERSION = 1


def read_manifest(bundle: Path) -> dict[str, Any]:
    """Return the manifest of a bundle (InvalidInputError for none or another format, IoError)."""
    path = bundle / MANIFEST_NAME
    if not path.exists():
        raise InvalidInputError(
            "The bundle has no manifest",
            where=path,
            expected="the file that every finished export writes last",
            todo="Run the export again: it goes on where it stopped",
        )
    content = read_json_object(path)
    found = (content.get("format"), content.get("format_version"))
    if found != (FORMAT, FORMAT_VERSION):
        raise InvalidInputError(
            "The manifest is in a format that this version does not read",
            where=path,
            expected=f"{FORMAT}, version {FORMAT_VERSION}",
            found=f"{found[0]}, version {found[1]}",
            todo="Use the version of mtp-export that wrote it, or export again",
        )
    return content
