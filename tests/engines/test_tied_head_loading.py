"""A head that a tied model stores beside its embedding, in the engines' own loading."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_runs import process, sglang_wheel
from vllm_tied import EMBEDDING, HEAD

from verify.foreign_sources import FIXTURES

QWEN = str(FIXTURES / "qwen3-5-tiny")


def test_vllm_skips_it(tmp_path: Path) -> None:
    job: dict[str, object] = {m or "main": {"main": QWEN, "method": m} for m in ("", "mtp")}
    status, log, result = process(Path(__file__).with_name("vllm_tied.py"), job, tmp_path)
    assert status == 0, log[-3000:]
    found = json.loads(result.read_text())
    assert found == dict.fromkeys(job, dict.fromkeys(("head first", "head last"), EMBEDDING))


@pytest.mark.parametrize("kind", ["Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"])
def test_sglang_loads_what_it_reads_last(kind: str, tmp_path: Path) -> None:
    job: dict[str, object] = {"wheel": str(sglang_wheel()), "main": QWEN, "class": kind}
    status, log, result = process(Path(__file__).with_name("sglang_tied.py"), job, tmp_path)
    assert status == 0, log[-3000:]
    assert json.loads(result.read_text()) == {"head first": EMBEDDING, "head last": HEAD}
