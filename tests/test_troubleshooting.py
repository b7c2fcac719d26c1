"""docs/troubleshooting.md: a row per exit code, each with a message that the program writes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cases import Outcome, export, run_program
from mtp_checkpoints import errors
from mtp_export.commands.standard_streams import ENDED_BY_SIGPIPE
from pages import ROOT, code_in, rows_of

PAGE = ROOT / "docs/troubleshooting.md"
ROWS = {row[0]: row for row in rows_of(PAGE.read_text()) if row[0].isdecimal()}


def internal_error(monkeypatch: pytest.MonkeyPatch) -> Outcome:
    def fail(source: Path) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr("mtp_export.commands.inspect.inspect_checkpoint", fail)
    return run_program("inspect", "bundle")


def offline(monkeypatch: pytest.MonkeyPatch) -> Outcome:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return run_program("inspect", "hf://deepseek-ai/DeepSeek-V3")


def damaged(monkeypatch: pytest.MonkeyPatch) -> Outcome:
    shutil.copytree("bundle", "bad")
    for shard in Path("bad/mtp").glob("*.safetensors"):
        shard.unlink()
    return run_program("verify", "bad", "--level", "files", "--quiet")


def interrupted(monkeypatch: pytest.MonkeyPatch) -> Outcome:
    def end(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("mtp_export.commands.program._run", end)
    return run_program("quantize", "--input-dir", "bundle")


RUNS: dict[int, Callable[[pytest.MonkeyPatch], Outcome]] = {
    1: internal_error,
    2: lambda _: run_program("launch", "bundle", "--run"),
    3: lambda _: run_program("inspect", "empty"),
    4: lambda _: run_program("launch", "bundle", "--engine", "lightllm"),
    5: lambda _: export(Path("source"), Path("other"), "--max-memory", "1MB"),
    6: offline,
    7: damaged,
    8: lambda _: export(Path("source"), Path("bundle"), "--part", "mtp"),
    130: interrupted,
}


def test_there_is_a_row_per_exit_code() -> None:
    kinds = [errors.MtpExportError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    codes = {kind.exit_code for kind in kinds}
    assert RUNS.keys() == codes
    assert ROWS.keys() == {str(code) for code in (*codes, ENDED_BY_SIGPIPE)}
    assert all(code_in(row[3]) for code, row in ROWS.items() if code != "130")  # what to run


@pytest.mark.parametrize("code", RUNS)
def test_the_program_writes_the_message(
    code: int, pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("source").symlink_to(pristine)
    Path("empty").mkdir()
    assert export(Path("source"), Path("bundle"), "--quiet").code == 0
    outcome = RUNS[code](monkeypatch)
    assert outcome.code == code
    (message,) = code_in(ROWS[str(code)][2])
    pieces = ".*".join(re.escape(piece) for piece in message.split("…"))
    assert re.search(pieces, " ".join(outcome.err.split())), outcome.err
