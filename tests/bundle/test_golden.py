"""Bundles of the trained fixture are, byte for byte, the recorded ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bundle.golden import CASES, RECORD, digest

# What each adds: a layout, a target's names and precision, a scheme's numbers. Targets differ in
# their MTP parts alone.
EVERY_PUSH = (
    *("export hf", "export xllm, mtp alone", "export paddlenlp"),
    *("export lightllm, mtp alone", "keep + bf16, sglang", "int4, mse"),
    *("a8w8_fp8_wint4 + a8w8_fp8, hf", "a8w8_fp8_wint4 + a8w8_fp8, sglang"),
)
RECORDED = json.loads(RECORD.read_text())


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in EVERY_PUSH else pytest.mark.nightly) for name in CASES],
)
def test_bundle_is_as_recorded(name: str, tmp_path: Path) -> None:
    assert digest(name, tmp_path / "bundle") == RECORDED[name]


def test_every_case_is_recorded() -> None:
    assert RECORDED.keys() == CASES.keys()
    assert set(EVERY_PUSH) <= CASES.keys()
