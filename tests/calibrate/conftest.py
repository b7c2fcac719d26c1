"""Fixtures of calibrations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from calibrate.texts import PROMPT, TEXTS


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts with answers."""
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    lines = [
        {"prompt_token_ids": text[:PROMPT], "completion_token_ids": text[PROMPT:]} for text in TEXTS
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
