"""Bundles that are made in shares, at once or one after the other, killed and run again: equal byte
by byte to those of one run, and nothing looks whole before they are finished."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from bundle.commands import COMMANDS, Command, Files, check_nothing_looks_whole
from cases import (
    MTP_LAYER,
    Outcome,
    edit_json,
    export,
    nightly_but,
    quantize,
    read_json,
    read_shard,
    run_in_a_fork,
    run_program,
    shard_of,
    tree,
    write_shard,
)
from disk import watched_disk
from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.errors import InvalidInputError
from mtp_export.bundle import shares
from mtp_export.bundle.bundle_plan import jobs_of
from mtp_export.bundle.journal import Journal
from mtp_export.bundle.options import Share
from mtp_export.bundle.run import ShardJob
from mtp_export.plan import OutputShard, copy_step

SHARES = ".mtp_export.shares"
OPTIONS = ("--max-shard-size", "60kB", "--workers", "2", "--link", "copy", "--quiet")
FIXTURE = Path(__file__).resolve().parents[2] / "fixtures/deepseek-v3-tiny"
Run = Callable[..., Outcome]

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)


def finish(output: Path, *options: str) -> Outcome:
    """The end of shares; the machine's own disk is not waited for."""
    with watched_disk(lambda *_: None):
        return run_program("finish", output, *options)


def share_of(command: Command, source: Path, output: Path, share: str) -> Outcome:
    with watched_disk(lambda *_: None):
        options = (*command.options, "--quiet", "--share", share)
        return command.program(source, output, *options)


def made(command: Command, source: Path, output: Path, shares: Sequence[str]) -> None:
    for share in shares:
        outcome = share_of(command, source, output, share)
        assert outcome.code == 0, outcome.err


@pytest.mark.parametrize("name", ["export", "export, linked", "quantize"])
def test_shares_make_the_bundle_of_one_run(
    name: str, many: Path, output: Path, wholes: dict[str, Files]
) -> None:
    command = COMMANDS[name]
    for share in ("2/3", "3/3", "1/3"):
        made(command, many, output, [share])
        check_nothing_looks_whole(output, [])
        assert not list(output.glob("m*/*.json"))
    outcome = finish(output, "--json")
    assert outcome.code == 0, outcome.err
    assert '"shares": 3' in outcome.out
    assert tree(output) == wholes[name]


ROWS = {
    "a8w8_fp8_wint4 + a8w8_fp8": ("a8w8_fp8_wint4", "a8w8_fp8"),
    "weight_only_int4 + weight_only_int8": ("weight_only_int4", "weight_only_int8"),
    "weight_only_int8": ("weight_only_int8", "weight_only_int8"),
    "bf16": ("bf16", "bf16"),
}


def check_quantized_in_shares(source: Path, folder: Path, row: str, *more: str) -> None:
    base, mtp = ROWS[row]
    options = ("--base-quant", base, "--mtp-quant", mtp, "--quiet", *more)
    assert quantize(source, folder / "whole", *options).code == 0
    for share in ("1/2", "2/2"):
        outcome = quantize(source, folder / "shared", *options, "--share", share)
        assert outcome.code == 0, outcome.err
    outcome = finish(folder / "shared")
    assert outcome.code == 0, outcome.err
    assert "by 2 shares" in " ".join(outcome.out.split())
    assert tree(folder / "shared") == tree(folder / "whole")


# int8 is that of COMMANDS.
@pytest.mark.parametrize("row", nightly_but(list(ROWS)[:2], ROWS))
def test_rows_of_the_precision_table(row: str, many: Path, tmp_path: Path) -> None:
    check_quantized_in_shares(many, tmp_path, row, "--group-size", "32")


@pytest.mark.nightly
@pytest.mark.parametrize("row", ROWS)
def test_rows_of_the_trained_model(row: str, tmp_path: Path) -> None:
    check_quantized_in_shares(FIXTURE, tmp_path, row, "--group-size", "64")


def test_shares_at_once(many: Path, output: Path, wholes: dict[str, Files]) -> None:
    """Three processes on one folder, each of which begins when it likes."""
    command, children = COMMANDS["quantize"], []
    for number in (1, 2, 3):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = share_of(command, many, output, f"{number}/3").code
            finally:
                os._exit(code)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    assert [os.waitstatus_to_exitcode(status) for status in statuses] == [0, 0, 0]
    assert finish(output).code == 0
    assert tree(output) == wholes["quantize"]


@pytest.mark.parametrize("first", nightly_but([3], range(3, 73, 7)))
def test_a_killed_share_runs_again(
    first: int, many: Path, tmp_path: Path, wholes: dict[str, Files]
) -> None:
    """One of three, at every so many disk calls, between two that get through; one that dies at its
    very end has made all of it."""
    command, before, missing = COMMANDS["export"], tmp_path / "before", 0
    made(command, many, before, ["1/3"])
    for call_number in range(first, 2000, 70):
        output = shutil.copytree(before, tmp_path / f"died-at-{call_number}")
        options = (*command.options, "--quiet", "--share", "2/3")
        died = run_in_a_fork(partial(export, many, output, *options), call_number)
        check_nothing_looks_whole(output, [])
        made(command, many, output, ["3/3"])
        if died == 0:
            break
        outcome = finish(output)
        if outcome.code:
            missing += 1
            assert (outcome.code, "2/3" in outcome.err) == (3, True), outcome.err
            made(command, many, output, ["2/3"])
            outcome = finish(output)
        assert outcome.code == 0, outcome.err
        assert tree(output) == wholes["export"], call_number
    assert call_number > 100 and missing


@pytest.mark.parametrize("first", nightly_but([5], range(1, 21, 4)))
def test_the_end_is_killed(
    first: int, many: Path, tmp_path: Path, wholes: dict[str, Files]
) -> None:
    """At every so many disk calls: it is run again, and ends alike."""
    died, before = 0, tmp_path / "before"
    made(COMMANDS["export"], many, before, ["1/2", "2/2"])
    for call_number in range(first, 2000, 20):
        output = shutil.copytree(before, tmp_path / f"died-at-{call_number}")
        if run_in_a_fork(partial(run_program, "finish", output, "--quiet"), call_number) == 0:
            break
        died += 1
        visible = {name: file for name, file in tree(output).items() if name[0] != "."}
        assert visible == wholes["export"] or "mtp_export.json" not in visible
        unfinished = (output / SHARES).exists()
        outcome = finish(output)
        assert outcome.code == (0 if unfinished else 3), outcome.err
        assert tree(output) == wholes["export"]
    assert died > 3


def test_missing_shares_are_named(many: Path, output: Path, wholes: dict[str, Files]) -> None:
    """A sixth of twelve."""
    command = COMMANDS["export"]
    there = [f"{number}/12" for number in range(1, 13) if number not in (4, 11)]
    made(command, many, output, there)
    before = tree(output)
    outcome = finish(output)
    assert outcome.code == 3, outcome.err
    assert "2 of 12 shares are missing" in outcome.err
    assert "4/12 (not begun), 11/12 (not begun)" in outcome.err
    assert [name for name in tree(output) if "12-of-12" not in name] == [
        name for name in before if "12-of-12" not in name
    ]
    made(command, many, output, ["4/12", "11/12"])
    lost = next(iter(sorted(output.glob("main/*.safetensors"))))
    content = lost.read_bytes()
    lost.unlink()
    outcome = finish(output)
    assert (outcome.code, "1 of 12 shares is missing" in outcome.err) == (3, True), outcome.err
    lost.write_bytes(content)
    assert finish(output).code == 0
    assert tree(output) == wholes["export"]


def test_more_shares_than_shards(source: Path, output: Path) -> None:
    options = ("--link", "copy", "--quiet")
    assert export(source, output.with_name("whole"), *options).code == 0
    for number in range(1, 31):
        with watched_disk(lambda *_: None):
            assert export(source, output, *options, "--share", f"{number}/30").code == 0
    assert finish(output).code == 0
    assert tree(output) == tree(output.with_name("whole"))


def test_a_share_that_is_done_writes_nothing_again(many: Path, output: Path) -> None:
    command = COMMANDS["export"]
    made(command, many, output, ["2/2"])
    before = {path: path.stat().st_ino for path in output.glob("*/model-*")}
    outcome = export(many, output, *command.options, "--share", "2/2", "--json", "--no-resume")
    again = export(many, output, *command.options, "--share", "2/2", "--json")
    assert (outcome.code, again.code) == (0, 0)
    assert '"resumed_shards": 0' in outcome.out
    assert f'"resumed_shards": {len(before)}' in again.out
    anew = {path: path.stat().st_ino for path in output.glob("*/model-*")}
    assert before.keys() == anew.keys()
    assert before != anew


def refused(outcome: Outcome, code: int, *words: str) -> None:
    assert outcome.code == code, outcome.err
    for word in words:
        assert word in outcome.err
    assert outcome.err.count("\n") == 1


def test_what_does_not_go_together(source: Path, output: Path) -> None:
    """Nothing is changed by any of it."""
    assert export(source, output, *OPTIONS, "--share", "1/2").code == 0
    before = tree(output)
    share = partial(export, source, output, *OPTIONS)
    refused(share(), 8, "shares of an unfinished bundle", f"finish {output}")
    refused(share("--share", "1/3"), 8, "another division", "of 2 shares", "1/3")
    other = ("--share", "2/2", "--target", "xllm")
    refused(share(*other), 8, "shares of something else", "target hf (in share 1/2)")
    refused(share("--share", "2/2", "--overwrite"), 2, "do not replace")
    with Journal(output / SHARES / "1-of-2"):
        refused(share("--share", "1/2"), 8, "Another run is writing", f"process {os.getpid()}")
    assert tree(output) == before
    assert share("--share", "2/2").code == 0
    with Journal(output / SHARES / "1-of-2"):
        refused(finish(output), 8, "Another run is writing", "1-of-2")
    (output / "mtp_export.json").write_bytes(b"{}")  # as of an end that was killed
    refused(share("--share", "2/2", "--no-resume"), 8, "already holds a finished bundle")
    assert finish(output).code == 0
    refused(share("--share", "2/2"), 8, "already holds a finished bundle", "Remove it, or choose")
    refused(finish(output), 3, "no shares to finish")
    refused(finish(output / "nowhere"), 3, "no shares to finish")


def test_an_unfinished_run_is_not_divided(source: Path, unfinished: Path) -> None:
    outcome = export(source, unfinished, *OPTIONS, "--share", "1/2")
    refused(outcome, 8, "not divided into shares")


def test_a_source_that_changed_since_another_share(source: Path, output: Path) -> None:
    assert export(source, output, *OPTIONS, "--share", "1/2").code == 0
    os.utime(next(iter(source.glob("*.safetensors"))))
    outcome = export(source, output, *OPTIONS, "--share", "2/2")
    refused(outcome, 8, "shares of something else", "versions")
    alone = output.with_name("alone")
    assert export(source, alone, *OPTIONS, "--share", "1/1").code == 0
    os.utime(next(iter(source.glob("*.safetensors"))))
    refused(finish(alone), 8, "The source changed")


@pytest.mark.parametrize("weights", ["keep", "drop"])
def test_copies_that_differ_are_found_by_one_share(
    weights: str, source: Path, output: Path
) -> None:
    """By that which copies them, or else by the first; what it made goes, the other's stays."""
    name = f"model.layers.{MTP_LAYER}.embed_tokens.weight"
    path = shard_of(source, name)
    header, data = read_shard(path)
    end = header[name]["data_offsets"][1]
    write_shard(path, header, data[: end - 1] + bytes([data[end - 1] ^ 1]) + data[end:])
    run = partial(export, source, output, *OPTIONS, "--shared-weights", weights, "--share")
    outcomes = {share: run(share) for share in ("1/2", "2/2")}
    ((failed, outcome),) = [item for item in outcomes.items() if item[1].code]
    refused(outcome, 3, "differs from the main model's")
    assert weights == "keep" or failed == "1/2"
    assert [path.name for path in (output / SHARES).glob("*-of-*")] == [
        share.replace("/", "-of-") for share in outcomes if share != failed
    ]
    refused(finish(output), 3, f"{failed} (not begun)")
    assert list(output.glob("*/model-*"))
    alone = output.with_name("alone")
    refused(export(source, alone, *OPTIONS, "--shared-weights", weights, "--share", "1/1"), 3)
    assert not alone.exists()


def test_a_stranger_s_file_stays_where_the_last_share_goes(
    source: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*arguments: object) -> None:
        (output / "mtp").mkdir(parents=True)
        (output / "mtp/notes").touch()
        raise InvalidInputError("The source is wrong")

    monkeypatch.setattr(shares, "make_shards", wrong)
    refused(export(source, output, *OPTIONS, "--share", "1/1"), 3, "The source is wrong")
    assert tree(output) == {"mtp/notes": b""}
    assert [path.name for path in output.iterdir()] == ["mtp"]


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "JSONDecodeError"),
        (b"[]", "TypeError"),
        (b"{}", "KeyError: 'planner'"),
        (b'{"planner": "x"}', "KeyError: 'x'"),
        (b"\xff", "UnicodeDecodeError"),
    ],
)
def test_a_damaged_request(content: bytes, kind: str, source: Path, output: Path) -> None:
    assert export(source, output, *OPTIONS, "--share", "1/1").code == 0
    (output / SHARES / "request.json").write_bytes(content)
    refused(finish(output), 3, "asked for cannot be read", "request.json", f"Found {kind}")
    assert export(source, output, *OPTIONS, "--share", "1/1").code == 0
    assert finish(output).code == 0


@pytest.mark.parametrize(
    "change", [{"target": "nope"}, {"input_dir": "/"}], ids=["target", "around the output"]
)
def test_a_request_that_no_command_makes_is_damage(
    change: dict[str, str], source: Path, output: Path
) -> None:
    """Though the same options of a command are wrong usage."""
    assert export(source, output, *OPTIONS, "--share", "1/1").code == 0
    edit_json(output / SHARES / "request.json", lambda request: request["options"].update(change))
    refused(
        finish(output), 3, "asked for is no bundle", "request.json", "Run any one of them again"
    )
    assert export(source, output, *OPTIONS, "--share", "1/1").code == 0
    assert finish(output).code == 0


def test_a_dry_run_says_what_a_share_makes(many: Path, output: Path) -> None:
    whole = export(many, output, "--share", "2/3", "--dry-run")
    assert (whole.code, "Share 2 of 3 makes" in whole.out) == (0, True), whole.err
    assert not output.exists()


SLURM = {"JOB_ID": "77", "TASK_ID": "14", "TASK_MIN": "10", "TASK_MAX": "18", "TASK_STEP": "4"}
SLURM = {f"SLURM_ARRAY_{name}": value for name, value in SLURM.items()}
COUNT = "SLURM_ARRAY_TASK_COUNT"


def test_a_task_of_a_slurm_array(
    source: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (SLURM | {COUNT: "3"}).items():
        monkeypatch.setenv(name, value)
    outcome = export(source, output, *OPTIONS[:-1], "--share", "slurm")
    assert outcome.code == 0, outcome.err
    assert "Share 2 of 3 (task 14 of Slurm array 77)" in outcome.out
    assert (output / SHARES / "2-of-3").is_dir()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({COUNT: "2"}, "without gaps"),
        ({COUNT: "3", "SLURM_ARRAY_TASK_STEP": "3"}, "without gaps"),
        ({COUNT: "3", "SLURM_ARRAY_TASK_ID": "15"}, "none of the array's tasks 10-18:4"),
        ({COUNT: "3", "SLURM_ARRAY_TASK_ID": "6"}, "task 6 is none"),
        ({COUNT: "3", "SLURM_ARRAY_TASK_ID": "22"}, "task 22 is none"),
        ({}, COUNT),
        ({COUNT: "3", "SLURM_ARRAY_TASK_ID": ""}, "SLURM_ARRAY_TASK_ID"),
    ],
)
def test_no_task_of_a_slurm_array(
    changes: dict[str, str], says: str, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(COUNT, raising=False)
    for name, value in (SLURM | changes).items():
        monkeypatch.setenv(name, value)
    refused(export(output, output, "--share", "slurm"), 2, says)


@pytest.mark.parametrize("text", ["0/2", "3/2", "1/0", "-1/2", "1", "a/b", "1/2/3", ""])
def test_no_share(text: str, output: Path) -> None:
    refused(export(output, output, "--share", text), 2, "no share")
    refused(export(output, output, "--share", "1/513"), 2, "at most 512")


def test_shares_are_of_one_size() -> None:
    sizes = [5, 5, 1, 1, 1, 4, 3, 2, 2, 0, 0, 0]
    steps = [copy_step(OutputTensor(f"t{n}", DType.U8, (size,))) for n, size in enumerate(sizes)]
    jobs = [ShardJob(f"main/{n}", Path(), OutputShard((step,))) for n, step in enumerate(steps)]
    equal = [jobs_of(jobs, Share(number, 3)) for number in (1, 2, 3)]
    assert sorted(job.key for share in equal for job in share) == sorted(job.key for job in jobs)
    assert [sum(job.read_bytes for job in share) for share in equal] == [8, 8, 8]
    assert [len(jobs_of(jobs, Share(number, 20))) <= 1 for number in range(1, 21)] == [True] * 20
    assert jobs_of(jobs, None) == jobs


def test_the_manifest_of_shares_lists_every_file(many: Path, output: Path) -> None:
    made(COMMANDS["export"], many, output, ["1/2", "2/2"])
    assert finish(output).code == 0
    parts = read_json(output / "mtp_export.json")["parts"]
    listed = {f"{p}/{n}" for p, c in parts.items() for n in (*c["shards"], *c["files"])}
    assert listed | {"mtp_export.json"} == tree(output).keys()
