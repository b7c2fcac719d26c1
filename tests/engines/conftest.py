"""Fixtures of the engine tests. They need vLLM, so `make test-engines` runs them, in a virtual
environment of its own; `make test` leaves this folder out."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from engine_runs import FIXTURE, ROOT, Outputs, Prompts, read_prompts, run_vllm, vllm_job

from cases import quantize


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Our runtime's products here are so small that they lose time to a second thread, and far more
    on a busy machine. vLLM has processes of its own."""
    torch.set_num_threads(1)


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


@pytest.fixture(scope="session")
def sound_run(
    bf16: Path, prompts: Prompts, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], tuple[Outputs, str]]:
    """vLLM's outputs and log on the whole bundle with so many drafts (0: plain), each run once."""
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def run(drafts: int) -> tuple[Outputs, str]:
        return run_vllm(vllm_job(bf16, drafts, prompts), folder / str(drafts))

    return run
