"""The table of families in docs/models.md is what its script makes of the registry."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from mtp_checkpoints.families import FAMILIES
from mtp_checkpoints.families.without_mtp import WITHOUT_MTP

ROOT = Path(__file__).resolve().parents[3]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("models_table", ROOT / "scripts/models_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_what_its_script_writes() -> None:
    page, text = script(), (ROOT / "docs/models.md").read_text()
    assert page.page_of(text) == text, "run python scripts/models_table.py"
    for model_type in (*FAMILIES, *WITHOUT_MTP):
        assert f"| `{model_type}` |" in text, model_type
    spoilt = text.replace("| `hy_v3` | 1 |", "| `hy_v3` | 2 |")
    assert spoilt != text and page.page_of(spoilt) == text
