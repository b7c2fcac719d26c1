"""Sentences about a checkpoint name files that it has, and no folder of a bundle."""

from __future__ import annotations

import json
import re
from pathlib import Path

from cases import edit_json, run_program
from verify.foreign_sources import GLM, ignore, quantized


def test_no_folder_of_a_bundle_is_named(tmp_path: Path) -> None:
    """Of a list for one engine alone, yarn's scale that was dropped, and no tokenizer."""
    folder = tmp_path / "model"
    ignore(quantized(GLM, "compressed-tensors, fp8", "quantized"), r"re:.*layers\.3\..*").save(
        folder
    )
    yarn = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "mscale": 0.7}
    edit_json(folder / "config.json", lambda own: own.update(rope_scaling=yarn))
    for path in folder.glob("tokenizer*"):
        path.unlink()
    outcome = run_program("verify", folder, "--level", "files", "--json", "--quiet")
    items = [item for check in json.loads(outcome.out)["checks"] for item in check["items"]]
    told = [f"{item['subject']} {item['cause']}" for item in items]
    for words in ("the quantization of the main model", "yarn's mscale", "no tokenizer:"):
        assert any(words in one for one in told), words
    assert [one for one in told if re.search(r"(?<![\w/])(main|mtp)/", one)] == []
