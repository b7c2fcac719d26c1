"""vLLM's own parser takes the command that the tool prints, and would serve both parts with it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from engine_runs import FIXTURE, process

from cases import quantize


def test_vllm_takes_the_printed_command(tmp_path: Path) -> None:
    output = tmp_path / "it's a bundle"
    outcome = quantize(
        FIXTURE, output, "--base-quant", "bf16", "--mtp-quant", "bf16", "--target", "vllm", "--json"
    )
    line = json.loads(outcome.out)["launch"]["vllm"]
    script = Path(__file__).with_name("vllm_arguments.py")
    status, log, result = process(script, {"words": shlex.split(line)}, tmp_path / "run")
    assert status == 0, log[-3000:]
    assert json.loads(result.read_text()) == {
        "model": str(output / "main"),
        "draft": str(output / "mtp"),
        "architecture": "DeepSeekMTPModel",
        "method": "mtp",
        "tokens": 1,
    }
