"""The command: what it refuses, foretells, prints, draws and reports."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from cases import edit_json, export, read_json, run_program, shard_of
from mtp_checkpoints.errors import IoError
from mtp_export.plan import Link
from mtp_export.tune import estimate
from mtp_export.tune.options import TuneOptions
from mtp_export.tune.run import TuneResult
from runtime.checkpoints import SMALL_CONFIGS, write_checkpoint
from tune.running import STEPS, TRAIN, K
from tune.test_tune import EMBEDDING, offset_of

Tuned = tuple[TuneResult, Path]


def arguments_of(options: TuneOptions, output: Path) -> list[object]:
    """The options of the finished run, for the command."""
    given = {
        "bundle": options.bundle,
        "data": options.data.prompts,
        "held-out": options.data.held_out,
        "output-dir": output,
        "max-new-tokens": options.data.new_tokens,
        "k": K,
        "lr": TRAIN.rate,
        "batch-tokens": TRAIN.batch_tokens,
    }
    return [part for name, value in given.items() for part in (f"--{name}", value)]


def test_it_prints_draws_and_reports(options: TuneOptions, work: Path, tmp_path: Path) -> None:
    """Losses while it trains; acceptance by draft before and after, with intervals."""
    plot, report = tmp_path / "losses.svg", tmp_path / "report.json"
    outcome = run_program(
        *("tune", *arguments_of(options, tmp_path / "bundle"), "--workdir", work, "--steps", 3),
        *("--plot", plot, "--report", report),
    )
    assert outcome.code == 0, outcome.err
    assert re.search(r"tune: 100%, 3 steps.*loss \d\.\d{3}", outcome.err), outcome.err
    interval = r"[ │]+\d\.\d{3} \[-?\d\.\d{3}, \d\.\d{3}\]"
    for depth in range(1, K + 1):
        assert re.search(rf"draft {depth} accepted, k={K}{interval}{interval}", outcome.out)
    drawn = ElementTree.fromstring(plot.read_text())
    assert "cross entropy" in "".join(drawn.itertext())
    facts = read_json(report)
    recorded = read_json(tmp_path / "bundle/mtp_export.json")["options"]["tune"]["mtp"]
    assert {side: facts[side] for side in ("before", "after")} == {
        side: recorded[side] for side in ("before", "after")
    }
    assert [entry["step"] for entry in facts["losses"]] == [1, 2, 3]


def test_a_run_stopped_while_it_writes_is_named_with_its_command(
    options: TuneOptions, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*given: object) -> None:
        raise IoError("The disk is full", where=tmp_path)

    output = tmp_path / "a b"
    words = ("tune", *arguments_of(options, output), "--workdir", work, "--steps", 3)
    with monkeypatch.context() as patched:
        patched.setattr("mtp_export.bundle.build.write_rest", stop)
        assert run_program(*words).code == IoError.exit_code
    refused = run_program("inspect", output)
    assert refused.code == 3
    again = shlex.split(refused.err.split("To finish it: ")[1])
    assert run_program(*again[1:]).code == 0
    assert run_program("inspect", output).code == 0


def test_what_a_dry_run_foretells_is_what_a_run_takes(
    options: TuneOptions, tuned: Tuned, tmp_path: Path
) -> None:
    """Rows and parameters exactly; bytes but for headers, measured on the finished run."""
    result, output = tuned
    outcome = run_program(
        *("tune", *arguments_of(options, tmp_path / "bundle"), "--steps", STEPS),
        *("--dry-run", "--json"),
    )
    facts = json.loads(outcome.out)
    assert facts["rows"] == result.rows
    assert options.workdir is not None
    (state,) = (path for path in options.workdir.glob("training-*.pt"))
    assert state.stat().st_size == pytest.approx(12 * facts["trained"], rel=0.1)
    rows = sum(path.stat().st_size for path in options.workdir.glob("rows-*/training/*"))
    assert rows == pytest.approx(facts["rows_bytes"], rel=0.1)
    (trained,) = options.workdir.glob("trained-*/*.safetensors")
    taken = rows + 2 * state.stat().st_size + trained.stat().st_size
    assert taken == pytest.approx(facts["disk_bytes"], rel=0.1)
    mtp = sum(path.stat().st_size for path in (output / "mtp").glob("*.safetensors"))
    assert facts["output_bytes"] == pytest.approx(mtp, rel=0.01)
    assert facts["seconds"] > 0


def test_the_work_folder_is_beside_the_output(
    options: TuneOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    for output, work in ((".", "inner-work"), ("..", f"{tmp_path.name}-work"), ("a", "a-work")):
        own = replace(options, workdir=None, output_dir=Path(output))
        assert own.work == (tmp_path / "inner" / output).resolve().parent / work


def test_a_bundle_without_room_is_refused_before_the_training(
    options: TuneOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtp_export.tune.run.output_bytes", lambda *_: 1 << 60)
    outcome = run_program("tune", *arguments_of(options, tmp_path / "bundle"))
    assert outcome.code == 5 and "not enough disk space" in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_shards_that_cannot_be_linked_count(
    options: TuneOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on another disk."""
    arguments = ("tune", *arguments_of(options, tmp_path / "bundle"), "--dry-run", "--json")
    linked = json.loads(run_program(*arguments).out)["output_bytes"]
    guess = estimate.guess_links
    monkeypatch.setattr(
        estimate, "guess_links", lambda wanted, shards, folder: guess(Link.COPY, shards, folder)
    )
    copied = json.loads(run_program(*arguments).out)["output_bytes"]
    main = sum(path.stat().st_size for path in (options.bundle / "main").glob("*.safetensors"))
    assert copied == linked + main


def refusal(*arguments: object) -> tuple[int, str]:
    outcome = run_program("tune", *arguments)
    assert outcome.out == ""
    assert len(outcome.err.strip().splitlines()) == 1
    return outcome.code, outcome.err


def test_mtp_layers_in_nvfp4_are_not_trained(
    row_bundle: Callable[[str, str], Path], prompts: Path, tmp_path: Path
) -> None:
    """Each step would change a number that several linears share."""
    places = ("--data", prompts, "--output-dir", tmp_path / "output")
    code, words = refusal("--bundle", row_bundle("nvfp4", "fp8"), *places)
    assert code == 4 and "MTP layers in nvfp4_packed are not trained" in words
    assert not (tmp_path / "output").exists()


def test_bad_input_is_one_paragraph(bundle: Path, prompts: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    base: dict[str, Any] = {"--bundle": bundle, "--data": prompts, "--output-dir": output}

    def changed(**others: object) -> list[object]:
        given = base | {f"--{name.replace('_', '-')}": own for name, own in others.items()}
        return [part for pair in given.items() for part in pair]

    empty, one, foreign = (tmp_path / f"{name}.jsonl" for name in ("empty", "one", "foreign"))
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    two = Path(shutil.copytree(bundle, tmp_path / "two"))
    edit_json(two / "mtp/config.json", lambda config: config.update(rope_theta=7.0))
    empty.write_text("\n")
    one.write_text('{"prompt": "def read("}\n')
    foreign.write_text('{"prompt_token_ids": [5, 99999]}\n')
    untied = Path(shutil.copytree(bundle, tmp_path / "untied"))
    shard = shard_of(untied / "mtp", EMBEDDING)
    with shard.open("r+b") as file:
        file.seek(offset_of(shard, EMBEDDING))
        file.write(b"\0\1")
    windowed = tmp_path / "windowed"
    assert (
        export(
            write_checkpoint(tmp_path / "source", SMALL_CONFIGS["exaone_moe"]), windowed, "--quiet"
        ).code
        == 0
    )
    cases: list[tuple[dict[str, object], int, str]] = [
        ({"bundle": windowed}, 4, "with a sliding window are not trained"),
        ({"data": tmp_path / "none.jsonl"}, 6, "none.jsonl"),
        ({"data": empty}, 3, "holds no prompt"),
        ({"data": one}, 3, "too few prompts"),
        ({"data": foreign}, 3, "99999"),
        ({"draft": "medusa"}, 2, "medusa"),
        ({"draft": "parallel_heads", "lora_rank": 4}, 2, "low rank"),
        ({"bundle": nothing}, 3, "no bundle"),
        ({"bundle": two}, 3, "the same rope_theta in main/config.json and mtp/config.json"),
        ({"bundle": untied}, 3, "differs from the main model's"),
        ({"k": 6}, 2, "6"),
        ({"output_dir": bundle / "inside"}, 2, "must lie apart"),
    ]
    for others, code, words in cases:
        found = refusal(*changed(**others))
        assert found[0] == code, found
        assert words in found[1]
    assert not output.exists()


def test_a_dry_run_tells_memory_time_and_disk(bundle: Path, prompts: Path, tmp_path: Path) -> None:
    arguments = ("--bundle", bundle, "--data", prompts, "--output-dir", tmp_path / "output")
    facts = [
        json.loads(run_program("tune", *arguments, *more, "--dry-run", "--json").out)
        for more in ((), ("--lora-rank", 4))
    ]
    whole, low = facts
    assert whole["trained"] == whole["parameters"] == low["parameters"]
    assert low["trained"] < whole["trained"] / 4
    assert low["state_bytes"] == 16 * low["trained"]
    assert list(tmp_path.iterdir()) == []
