"""A new engine that reads integers is one target and one line in TARGETS: nothing else knows it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cases import WHOLE_TILES, export, make_checkpoint, quantize, read_json, run_program
from mtp_checkpoints.layouts import TARGETS
from mtp_checkpoints.layouts.base import Config, Deployment, DraftReading, Engine, Target
from mtp_checkpoints.quantization.method import VLLM
from mtp_checkpoints.quantization.methods import METHODS
from mtp_export.inspection import inspect
from mtp_runtime.models.load import LoadOptions, load_model


def _config(config: Mapping[str, Any]) -> Config:
    return {**config, "toy_draft": True}


def _released(config: Mapping[str, Any], main_layers: int) -> Config:
    return {key: value for key, value in config.items() if key != "toy_draft"}


def _launch(bundle: Deployment) -> str:
    return f"toy serve {bundle.main} --draft {bundle.mtp}"


TOY = Target(
    name="toy",
    engines=(
        Engine(
            "toy",
            frozenset(METHODS) - {"w4afp8"},
            VLLM,
            launch=_launch,
            title="Toy",
            draft_reading=DraftReading(by_main_config=True, reason="Toy builds it by main"),
        ),
    ),
    mtp_name=lambda name, layer: name,
    mtp_config=_config,
    released_config=_released,
    model_types=frozenset({"deepseek_v3"}),
    mtp_methods=frozenset(METHODS) - {"w4afp8"},
)
PAIR = ("--base-quant", "weight_only_int4", "--mtp-quant", "weight_only_int8")


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine in the registry."""
    monkeypatch.setitem(TARGETS, TOY.name, TOY)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("source") / "source", WHOLE_TILES)


def test_a_new_engine_that_reads_integers(source: Path, output: Path) -> None:
    """Exported, quantized, launched, inspected, loaded, verified and decoded by its name alone."""
    exported = output.parent / "exported"
    assert export(source, exported, "--target", TOY.name).code == 0
    assert read_json(exported / "mtp/config.json")["toy_draft"] is True
    outcome = quantize(exported, output, *PAIR, "--group-size", "32", "--target", TOY.name)
    assert outcome.code == 0, outcome.err
    assert f"toy serve {output}/main --draft {output}/mtp" in outcome.out + outcome.err
    options = read_json(output / "mtp_export.json")["options"]
    assert (options["target"], options["reader"]) == (TOY.name, VLLM.name)
    assert read_json(output / "mtp/config.json")["toy_draft"] is True
    assert not inspect(output / "main").problems and not inspect(output / "mtp").problems
    ledger = load_model(output, LoadOptions()).ledger
    assert ledger.loaded | ledger.tied == ledger.expected
    verified = run_program("verify", output, "--source", source, "--level", "weights", "--json")
    assert verified.code == 0, verified.out + verified.err
    assert "mtp: precision as Toy reads it" in verified.out
    prompts = output.parent / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [5, 6, 7]}\n')
    options = ("--speculate-method", "mtp", "--max-new-tokens", "4", "--prompts", prompts)
    generated = run_program("generate", output, *options, "--json")
    assert generated.code == 0, generated.out + generated.err
    launched = run_program("launch", output, "--engine", TOY.name)
    assert launched.out == f"toy serve {output}/main --draft {output}/mtp\n"


# Runs commands in a process that has the engine before any of them is imported.
WITH_TOY = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
from extending.test_target import TARGETS, TOY
TARGETS[TOY.name] = TOY
from cases import run_program
outcomes = [run_program(*words) for words in json.loads(sys.argv[2])]
print(json.dumps([outcome.out + outcome.err for outcome in outcomes]))
"""


def test_help_tables_and_refusals_name_a_new_engine(source: Path, tmp_path: Path) -> None:
    """Of a program that has the engine from its start, as its file and its line have it."""
    folders = ("--input-dir", source, "--output-dir", tmp_path / "pair")
    parts = ("--main", source, "--mtp", tmp_path / "mtp", "--output-dir", tmp_path / "graft")
    engine, target, listed, refused, grafted = run_with_toy(
        ("launch", "--help"),
        ("quantize", "--help"),
        ("quantize", "--list", "--json"),
        ("quantize", *folders, "--base-quant", "a8w8_fp8", "--mtp-quant", "bf16"),
        ("graft", *parts, "--target", "lightllm"),
    )
    for page, option in ((engine, "--engine"), (target, "--target")):
        shown = page.splitlines()
        (words,) = (line for line in shown if line.startswith("│") and f"{option} " in line)
        assert re.search(r"\btoy\b", words), words
    rows = json.loads(listed)["pairs"]
    last = {row["base"]: row["engines"][-1] for row in rows}
    assert last.pop("bf16") == "all"
    assert set(last.values()) == {"Toy"}
    assert "a8w8_fp8 goes with --mtp-quant a8w8_fp8" in refused
    assert "vllm, sglang or toy" in grafted


def run_with_toy(*commands: tuple[object, ...]) -> list[str]:
    """Return what each command writes."""
    tests = Path(__file__).parents[1]
    paths = json.dumps([str(tests), str(tests.parent)])
    words = json.dumps([list(map(str, command)) for command in commands])
    ended = subprocess.run(
        [sys.executable, "-c", WITH_TOY, paths, words],
        env=os.environ | {"COLUMNS": "400"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    written: list[str] = json.loads(ended.stdout)
    return written


def test_what_the_engine_does_not_read_is_refused(source: Path, output: Path) -> None:
    """Other engines do: those that declare the storage are named."""
    options = ("--base-quant", "a8w8_fp8_wint4", "--mtp-quant", "a8w8_fp8", "--format", "w4afp8")
    outcome = quantize(source, output, *options, "--target", TOY.name)
    assert outcome.code == 4
    assert "Target toy does not read a bundle with w4afp8" in outcome.err
    assert "--target hf or sglang." in outcome.err
    assert not output.exists()


def test_another_model_is_refused(
    tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtp_checkpoints.families import FAMILIES, deepseek_v3

    monkeypatch.setitem(FAMILIES, "toy_model", deepseek_v3.spec)
    other = make_checkpoint(tmp_path / "other", WHOLE_TILES | {"model_type": "toy_model"})
    outcome = quantize(other, output, *PAIR, "--group-size", "32", "--target", TOY.name)
    assert outcome.code == 4
    assert "toy" in outcome.err and "model_type deepseek_v3" in outcome.err
    assert "'toy_model'" in outcome.err
    assert not output.exists()


def test_an_engine_with_integers_says_how_it_reads_them() -> None:
    with pytest.raises(AssertionError, match="has no dialect"):
        Engine("mute", frozenset(METHODS))
