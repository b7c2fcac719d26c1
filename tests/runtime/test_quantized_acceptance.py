"""Loss of acceptance by quantization, as benchmarks/bench_quantize_acceptance measures it: here
on a few prompts' own texts, and decoding a little."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.bench_quantize_acceptance import (
    ROWS,
    Counts,
    difference,
    fixture_prompts,
    free_running,
    on_texts,
    quantized,
)
from cases import nightly_but
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.models.model import Model
from mtp_runtime.teacher_forcing import Text, Texts

PROMPTS = fixture_prompts(16)
TEXTS = Texts(tuple(Text(prompt[:96], 1) for prompt in PROMPTS))


@pytest.fixture(scope="module")
def source(trained_model: Model) -> list[Counts]:
    return on_texts(trained_model, TEXTS, 2)


# The row of int4 has the MTP module in int8.
@pytest.mark.parametrize(
    "name", nightly_but(["weight_only_int4"], ["weight_only_int8", "weight_only_int4"])
)
def test_acceptance_stays(name: str, trained: Path, source: list[Counts], tmp_path: Path) -> None:
    row = ROWS[name]
    assert row.most_points_lost is not None
    model = load_model(quantized(row, trained, tmp_path / "bundle"), LoadOptions()).model
    found = on_texts(model, TEXTS, 2)
    assert sum(found[0].proposed) == sum(len(text.tokens) - 2 for text in TEXTS.texts)
    lost = difference(found[0], source[0])
    assert lost is not None
    assert lost.value > -row.most_points_lost / 100
    decoded = free_running(model, PROMPTS[:4], 16, 2)
    assert sum(decoded[0].accepted) > 0.5 * sum(decoded[0].proposed)


def test_a_difference_of_equals_is_none(source: list[Counts]) -> None:
    same = difference(source[0], source[0])
    assert same is not None and same.value == 0 and same.low == same.high == 0
    worse = Counts(tuple(0.9 * a for a in source[0].accepted), source[0].proposed)
    lost = difference(worse, source[0])
    assert lost is not None and lost.high is not None and lost.high < 0
