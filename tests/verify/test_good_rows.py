"""Every good bundle of the precision table passes when it is run: gates against the source, nothing
that another layout would explain, drafts that depend on what they should."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from cases import export, quantize
from end_to_end.small_model import ROWS, TARGETS
from mtp_export.progress import ProgressCallback, silent
from mtp_export.verify import controls, differential
from mtp_export.verify.acceptance import diagnosed
from mtp_export.verify.base import Item, Level, Status
from mtp_export.verify.context import Context, VerifyOptions

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures/deepseek-v3-tiny"
TOKENS = 12
# Rows that differ in names alone are the same numbers.
SAME_NUMBERS = ("wint4 for SGLang", "fp8")
GROUPS = {"64": "32"}  # the fixture's matrices are narrow


@contextlib.contextmanager
def no_progress(title: str, total_bytes: int) -> Iterator[ProgressCallback]:
    yield silent


def written(row: str, folder: Path) -> Path:
    """The trained fixture in a row of the table, or for a target."""
    if row in TARGETS or row == "hf":
        outcome = export(FIXTURE, folder, "--link", "copy", "--target", row)
    else:
        base, mtp, *more = (GROUPS.get(word, word) for word in ROWS[row])
        outcome = quantize(FIXTURE, folder, "--base-quant", base, "--mtp-quant", mtp, *more)
    assert outcome.code == 0, outcome.err
    return folder


def run(bundle: Path) -> list[Item]:
    options = VerifyOptions(bundle, FIXTURE, Level.RUN, max_new_tokens=TOKENS)
    context = Context.open(options, no_progress)
    corpus = context.corpus
    return [*differential.run(context), *diagnosed(corpus), *controls.items_of(corpus)]


@pytest.mark.parametrize("row", ["hf", *(row for row in ROWS if row not in SAME_NUMBERS), "xllm"])
def test_good_bundle_runs_as_its_source(row: str, tmp_path: Path) -> None:
    items = run(written(row, tmp_path / "bundle"))
    assert [f"{i.name}: {i.cause}" for i in items if i.status is Status.FAIL] == []
    gates = {item.name for item in items if item.status is Status.PASS}
    assert {"KL of the target's law", "top-1 agreement"} <= gates
