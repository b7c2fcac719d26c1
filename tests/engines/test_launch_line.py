"""vLLM's own parser and SGLang's own arguments take the commands that the tool prints, and would
serve both parts with them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from engine_runs import FIXTURE, process, sglang_wheel

from cases import quantize


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "it's a bundle"


def printed(
    engine: str, output: Path, base: str = "bf16", mtp: str = "bf16", *more: str
) -> list[str]:
    """The words of an engine's command."""
    options = ("--base-quant", base, "--mtp-quant", mtp, *more, "--target", engine, "--json")
    line: str = json.loads(quantize(FIXTURE, output, *options).out)["launch"][engine]
    return shlex.split(line)


def understood(script: str, job: dict[str, object], folder: Path) -> dict[str, Any]:
    """Return the options that an engine parses from the words."""
    status, log, result = process(Path(__file__).with_name(script), job, folder)
    assert status == 0, log[-3000:]
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def test_vllm_takes_the_printed_command(output: Path, tmp_path: Path) -> None:
    words = printed("vllm", output)
    assert understood("vllm_arguments.py", {"words": words}, tmp_path / "run") == {
        "model": str(output / "main"),
        "draft": str(output / "mtp"),
        "architecture": "DeepSeekMTPModel",
        "method": "mtp",
        "tokens": 1,
    }


@pytest.mark.parametrize(
    ("pair", "fusion"),
    [
        (("bf16", "bf16"), {}),
        (
            ("weight_only_int4", "weight_only_int8", "--group-size", "32"),
            {"disable_shared_experts_fusion": True},
        ),
    ],
    ids=["bf16", "int4"],
)
def test_sglang_takes_the_printed_arguments(
    pair: tuple[str, ...], fusion: dict[str, bool], output: Path, tmp_path: Path
) -> None:
    program, dash_m, module, *words = printed("sglang", output, *pair)
    assert (program, dash_m, module) == ("python", "-m", "sglang.launch_server")
    job: dict[str, object] = {"wheel": str(sglang_wheel()), "words": words}
    assert understood("sglang_arguments.py", job, tmp_path / "run") == fusion | {
        "model_path": str(output / "main"),
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": str(output / "mtp"),
        "speculative_num_steps": 1,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 2,
    }
