"""Fixtures of the engine tests. They need vLLM, so `make test-engines` runs them, in a virtual
environment of its own; `make test` leaves this folder out."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_runs import FIXTURE, ROOT, Prompts, read_prompts

from cases import quantize


@pytest.fixture(scope="session")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained fixture, exported and dequantized: what vLLM runs on a CPU."""
    output = tmp_path_factory.mktemp("engines") / "bf16"
    outcome = quantize(FIXTURE, output, "--base-quant", "bf16", "--mtp-quant", "bf16", "--quiet")
    assert outcome.code == 0, outcome.err
    return output


@pytest.fixture(scope="session")
def prompts() -> Prompts:
    return read_prompts(ROOT / "fixtures/prompts.jsonl", FIXTURE / "tokenizer.json", 16)
