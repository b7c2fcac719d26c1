"""Bundles of remote checkpoints, compared with those of the same checkpoints in folders."""

from __future__ import annotations

import json
from pathlib import Path

from cases import tree

MANIFEST = "mtp_export.json"


def assert_equal(output: Path, local: dict[str, bytes]) -> None:
    """Compare a bundle with one from a folder; only the manifest's source may differ."""
    found = tree(output)
    assert found.keys() == local.keys()
    manifests = [json.loads(files.pop(MANIFEST)) for files in (found, dict(local))]
    assert found == {name: data for name, data in local.items() if name != MANIFEST}
    for key in ("parts", "options"):
        assert manifests[0][key] == manifests[1][key]
