"""The comparison with vLLM on docs/engines.md, as it stands there: vLLM writes what the golden file
of `mtp-export verify` says and accepts as many drafts, and far fewer where they are wrong."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from comparison import LARGEST_NOISE, LARGEST_OF_A_ROUTERS_TIE, POINTS
from engine_runs import ROOT, TOKENS, Prompts, process

from cases import run_program
from faults.run_faults import concatenation_reversed
from pages import python_of

K = 3
TIE = 0.01  # nats of a margin that two engines in float32 may decide differently
DIFFERS = re.compile(r"prompt (\d+) differs at token (\d+): margin (\d+\.\d+)")


@dataclass(frozen=True)
class Printed:
    """Output of the page's comparison: margins where the text of a prompt first differs, in
    nats, shares of accepted drafts by position, and the golden file's own."""

    margins: list[float]
    accepted: list[float]
    golden: list[dict[str, float]]


@pytest.fixture(scope="session")
def golden(bf16: Path, prompts: Prompts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden file of the bundle that vLLM runs, after a whole verification."""
    folder = tmp_path_factory.mktemp("golden")
    asked = folder / "prompts.jsonl"
    asked.write_text("".join(json.dumps({"prompt_token_ids": ids}) + "\n" for ids in prompts))
    run = ("--prompts", asked, "--max-new-tokens", TOKENS, "--k", K)
    outcome = run_program("verify", bf16, *run, "--golden", folder / "golden.jsonl", "--quiet")
    assert outcome.code == 0, outcome.err
    return folder / "golden.jsonl"


def compared(
    bundle: Path,
    golden: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str = "bfloat16",
) -> Printed:
    """Run the page's lines on a bundle, in another dtype than theirs where one is given."""
    text = python_of(ROOT / "docs/engines.md", "from vllm")
    for shown, given in (("golden.jsonl", golden), ("OUT/main", bundle / "main"),
                         ("OUT/mtp", bundle / "mtp"), ("bfloat16", dtype)):  # fmt: skip
        assert f'"{shown}"' in text
        text = text.replace(f'"{shown}"', repr(str(given)))
    folder.mkdir()
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    script = folder / "compare.py"
    script.write_text(text)
    status, log, _ = process(script, {}, folder)
    assert status == 0, log[-3000:]
    (line,) = re.findall(r"^accepted (\[.*\]) golden (\[.*\])$", log, re.M)
    margins = [float(margin) for _, _, margin in DIFFERS.findall(log)]
    accepted, expected = (json.loads(part.replace("'", '"')) for part in line)
    return Printed(margins, accepted, expected)


def test_vllm_agrees_with_the_golden_file(
    bf16: Path,
    golden: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    figures: dict[str, Any],
) -> None:
    """In float32, as the file is, the same text to the end, and as many drafts accepted."""
    printed = compared(bf16, golden, tmp_path / "run", monkeypatch, dtype="float32")
    figures["golden, float32"] = vars(printed)
    assert len(printed.margins) <= 1
    assert max(printed.margins, default=0.0) <= TIE
    for found, share in zip(printed.accepted, printed.golden, strict=True):
        assert abs(found - share["value"]) <= POINTS


def test_texts_part_in_bfloat16_where_rounding_decides(
    bf16: Path,
    golden: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    figures: dict[str, Any],
) -> None:
    """At ties alone. From there on there are two texts, hence more than the interval."""
    printed = compared(bf16, golden, tmp_path / "run", monkeypatch)
    figures["golden, bfloat16"] = vars(printed)
    assert sum(margin > LARGEST_NOISE for margin in printed.margins) <= 1
    assert max(printed.margins, default=0.0) <= LARGEST_OF_A_ROUTERS_TIE
    for found, share in zip(printed.accepted, printed.golden, strict=True):
        assert share["low"] - 2 * POINTS <= found <= share["high"] + 2 * POINTS


def test_vllm_departs_from_it_with_wrong_drafts(
    bf16: Path,
    golden: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    figures: dict[str, Any],
) -> None:
    """The halves of eh_proj exchanged: the same text, and next to no draft accepted."""
    bundle = Path(shutil.copytree(bf16, tmp_path / "bundle"))
    concatenation_reversed(bundle)
    printed = compared(bundle, golden, tmp_path / "run", monkeypatch, dtype="float32")
    figures["golden, concatenation reversed"] = vars(printed)
    assert len(printed.margins) <= 1
    assert printed.accepted[0] < 0.1 < printed.golden[0]["low"]
