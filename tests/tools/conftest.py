"""Fixtures of the tests of tools. They need the tools' environments, so `make test-tools` runs
them; `make test` leaves this folder out."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tool_runs import FAMILIES, RECORDED, ROOT, ran

from benchmarks.common.decoding import hardware
from cases import export, read_json
from quantized_by_others import read_all, unquantized, write_shards

FIXTURES = {"glm4_moe": "glm4-moe-tiny", "deepseek_v3": "deepseek-v3-tiny"}
ROWS, ROW_TOKENS = 16, 96


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--figures", type=Path, help="JSON file for what the runs measure")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """The runtime's products here are so small that they lose time to a second thread."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The trained miniature of a family in bf16, what the tools read: transformers refuses the fp8
    blocks of the DeepSeek-V3."""
    folder = tmp_path_factory.mktemp("originals")

    @cache
    def source(family: str) -> Path:
        fixture, output = ROOT / "fixtures" / FIXTURES[family], folder / family
        config = read_json(fixture / "config.json")
        if config.pop("quantization_config", None) is None:
            return fixture
        output.mkdir()
        (output / "config.json").write_text(json.dumps(config))
        for path in (*fixture.glob("tokenizer*"), *fixture.glob("generation_config.json")):
            (output / path.name).write_bytes(path.read_bytes())
        tensors = unquantized(read_all(fixture))
        bias = "e_score_correction_bias"
        kept = {n: t if n.endswith(bias) else t.to(torch.bfloat16) for n, t in tensors.items()}
        write_shards(output, kept, 2)
        return output

    return source


@pytest.fixture(scope="session")
def acceptance(
    original: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Any]]:
    """The share of first drafts that the original of a family has accepted."""
    folder = tmp_path_factory.mktemp("acceptance")

    @cache
    def measured(family: str) -> dict[str, Any]:
        outcome = export(original(family), folder / family, "--quiet")
        assert outcome.code == 0, outcome.err
        facts = ran(folder / family)
        assert facts["code"] == 0, facts
        share: dict[str, Any] = facts["acceptance"]
        return share

    return measured


@pytest.fixture(scope="session")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of token ids that tools calibrate on: text like what the miniatures were trained on."""
    tokenizer = ROOT / "fixtures/glm4-moe-tiny/tokenizer.json"
    assert textwrap.__file__ is not None
    ids = Tokenizer.from_file(str(tokenizer)).encode(Path(textwrap.__file__).read_text()).ids
    rows = [ids[start : start + ROW_TOKENS] for start in range(0, ROWS * ROW_TOKENS, ROW_TOKENS)]
    assert all(len(row) == ROW_TOKENS for row in rows)
    path = tmp_path_factory.mktemp("calibration") / "rows.json"
    path.write_text(json.dumps(rows))
    return path


@pytest.fixture(scope="session")
def recorded() -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(RECORDED.read_text())
    return facts


@pytest.fixture(scope="session")
def figures(
    request: pytest.FixtureRequest, acceptance: Callable[[str], dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Facts of the runs by name; written whether or not a test passes."""
    measured: dict[str, Any] = {}
    yield measured
    path = request.config.getoption("--figures")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        originals = {family: acceptance(family) for family in FAMILIES}
        facts = {"hardware": hardware(), "originals": originals, "runs": measured}
        path.write_text(json.dumps(facts, indent=2) + "\n")
