"""The table of families in docs/models.md is what its script makes of the registry."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from mtp_checkpoints.families import DRAFTED_APART, FAMILIES, SEPARATE_DRAFTS
from mtp_checkpoints.families.without_mtp import WITHOUT_MTP

ROOT = Path(__file__).resolve().parents[3]


# In a process of its own: folders of tests that this one has imported have names of the script's.
SCRIPT = """
import json, sys
from models_table import page_of
print(json.dumps([*map(page_of, json.load(sys.stdin))]))
"""


def pages_of(*texts: str) -> list[str]:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT / "scripts",
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        check=True,
    )
    pages: list[str] = json.loads(ended.stdout)
    return pages


def test_the_table_is_what_its_script_writes() -> None:
    text = (ROOT / "docs/models.md").read_text()
    spoilt = text.replace("| `hy_v3` | 1 |", "| `hy_v3` | 2 |")
    assert spoilt != text
    assert pages_of(text, spoilt) == [text, text], "run python scripts/models_table.py"
    for model_type in (*FAMILIES, *DRAFTED_APART, *SEPARATE_DRAFTS, *WITHOUT_MTP):
        assert f"| `{model_type}` |" in text, model_type
