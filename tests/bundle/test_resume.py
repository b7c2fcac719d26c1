"""A run that is interrupted at any moment resumes when the same command runs again, and ends with
the same bytes as one that was never interrupted."""

from __future__ import annotations

import json
import os
import shlex
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import xxhash
from safetensors import safe_open

from bundle.commands import UNFINISHED
from cases import (
    export,
    looks_finished,
    nightly_but,
    read_json,
    run_in_a_fork,
    tree,
)
from forked import Forked, Pipe, program
from mtp_checkpoints.sources.direct_io import PAGE_BYTES
from mtp_checkpoints.tensors import writer
from mtp_export.bundle.journal import Journal

OPTIONS = UNFINISHED
FEWER = ("--max-shard-size", "300kB", "--link", "hardlink", "--workers", "2", "--quiet")
MANIFEST = "mtp_export.json"


@pytest.fixture(scope="module")
def whole(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The bundle of an uninterrupted run."""
    output = tmp_path_factory.mktemp("whole") / "output"
    assert export(pristine, output, *OPTIONS).code == 0
    return tree(output)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("first", nightly_but([1], range(1, 85, 7)))
def test_death_at_every_disk_call(
    first: int,
    pristine: Path,
    tmp_path: Path,
    whole: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Of these small tensors too, some are written directly and in several parts.
    monkeypatch.setattr(writer, "MIN_DIRECT_BYTES", 2 * PAGE_BYTES)
    monkeypatch.setattr(writer, "SMALL_BYTES", 0)
    monkeypatch.setattr(writer, "WRITE_BUFFER_BYTES", 2 * PAGE_BYTES)
    died = resumed = 0
    for call_number in range(first, 2000, 84):
        output = tmp_path / f"died-at-{call_number}"
        if run_in_a_fork(partial(export, pristine, output, *OPTIONS), call_number) == 0:
            break
        died += 1
        if not looks_finished(output):
            outcome = export(pristine, output, *OPTIONS)
            assert outcome.code == 0, (call_number, outcome.err)
            resumed += 1
        assert tree(output) == whole, call_number
    else:
        pytest.fail("the run never got through")
    assert died > 4
    assert resumed > 4


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    "before",
    nightly_but(
        ["empty folder", "unfinished run"], ("empty folder", "another bundle", "unfinished run")
    ),
)
@pytest.mark.parametrize("first", nightly_but([1], range(1, 49, 6)))
def test_death_with_links_and_something_there_before(
    first: int, before: str, pristine: Path, tmp_path: Path
) -> None:
    """Death at each disk call, with an output that existed: the rerun needs no other option,
    keeps the source whole, and leaves nothing of what was there."""
    assert export(pristine, tmp_path / "whole", *FEWER).code == 0
    whole, original = tree(tmp_path / "whole"), tree(pristine)
    options = (*FEWER, "--overwrite") if before == "another bundle" else FEWER
    if before == "unfinished run":
        options = (*FEWER, "--no-resume")
    for call_number in range(first, 2000, 48):
        output = tmp_path / f"died-at-{call_number}"
        output.mkdir()
        if before == "another bundle":
            assert export(pristine, output, *FEWER, "--target", "lightllm").code == 0
        if before == "unfinished run":
            begun = partial(export, pristine, output, *FEWER, "--target", "lightllm")
            assert run_in_a_fork(begun, 50) == 9
        if run_in_a_fork(partial(export, pristine, output, *options), call_number) == 0:
            break
        if not looks_finished(output) or tree(output) != whole:
            outcome = export(pristine, output, *options)
            assert outcome.code == 0, (call_number, outcome.err)
        assert tree(output) == whole, call_number
        assert not list(tmp_path.glob(".*"))
    assert call_number > 60
    assert tree(pristine) == original


def on_a_slow_disk(*arguments: object) -> None:
    """The program on a disk that takes its time, so that a signal always finds it at work."""
    real = os.fsync
    os.fsync = lambda fd: (time.sleep(0.05), real(fd))[1]
    program(*arguments)


def wait_for_writing(process: Forked, output: Path) -> None:
    while process.poll() is None and not list(output.glob("*/.*.tmp")):
        time.sleep(0.001)


def test_ctrl_c(pristine: Path, output: Path, whole: dict[str, bytes]) -> None:
    pipe, words = Pipe(), ["--input-dir", str(pristine), "--output-dir", str(output), *OPTIONS]
    process = Forked(on_a_slow_disk, *words, streams=(0, 1, pipe))
    wait_for_writing(process, output)
    process.send_signal(signal.SIGINT)
    said, again = pipe.read().splitlines()[-2:]
    assert process.wait() == 130
    assert said == "mtp-export: Interrupted. To go on:"
    assert again == f"  {shlex.join(['mtp-export', *words])}"
    assert not list(output.glob("*/.*.tmp"))
    assert not (output / MANIFEST).exists()
    assert export(pristine, output, *OPTIONS).code == 0
    assert tree(output) == whole


def test_finished_shards_are_not_written_again(source: Path, unfinished: Path) -> None:
    before = {path: path.stat().st_ino for path in unfinished.glob("*/model-*")}
    outcome = export(source, unfinished, *OPTIONS[:-1], "--json", "--workers", "3")
    assert outcome.code == 0, outcome.err
    assert '"resumed_shards": 3' in outcome.out
    assert {path: path.stat().st_ino for path in before} == before


def test_a_finished_shard_that_changed_size_is_written_again(
    source: Path, unfinished: Path, whole: dict[str, bytes]
) -> None:
    os.truncate(next(iter(sorted(unfinished.glob("*/model-*")))), 100)
    assert export(source, unfinished, *OPTIONS).code == 0
    assert tree(unfinished) == whole


def test_a_changed_source_is_refused(source: Path, unfinished: Path) -> None:
    shard = next(iter(sorted(source.glob("*.safetensors"))))
    stat = shard.stat()
    os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    before = tree(unfinished)
    outcome = export(source, unfinished, *OPTIONS)
    assert outcome.code == 8
    assert shard.name in outcome.err
    assert "The source changed" in outcome.err
    assert tree(unfinished) == before
    assert export(source, unfinished, *OPTIONS, "--no-resume").code == 0


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (("--target", "xllm"), "target"),
        (("--part", "main"), "part"),
        (("--shared-weights", "drop"), "shared_weights"),
    ],
)
def test_changed_options_are_refused(
    option: tuple[str, str], says: str, source: Path, unfinished: Path
) -> None:
    outcome = export(source, unfinished, *OPTIONS, *option)
    assert outcome.code == 8
    assert says in outcome.err
    assert option[1] in outcome.err


def test_a_source_that_changes_during_the_run_is_noticed(
    source: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = next(iter(sorted(source.glob("*.safetensors"))))
    real = os.posix_fallocate

    def touch(*arguments: int) -> None:
        os.utime(shard)
        real(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", touch)
    outcome = export(source, output, *OPTIONS)
    assert outcome.code == 3
    assert "changed while" in outcome.err
    assert not output.exists()


def test_two_runs_do_not_share_an_output(source: Path, unfinished: Path) -> None:
    with Journal(unfinished):
        outcome = export(source, unfinished, *OPTIONS)
    assert outcome.code == 8
    assert "Another run" in outcome.err
    assert export(source, unfinished, *OPTIONS).code == 0


def test_the_manifest_says_what_was_done(pristine: Path, output: Path) -> None:
    assert export(pristine, output, "--target", "xllm").code == 0
    manifest = read_json(output / MANIFEST)
    assert manifest["options"]["target"] == "xllm"
    for name, facts in manifest["source"]["shards"].items():
        assert (pristine / name).stat().st_size == facts["size_bytes"]
    operations = set()
    for part, content in manifest["parts"].items():
        for name, facts in content["shards"].items():
            path = output / part / name
            assert path.stat().st_size == facts["size_bytes"]
            if "link" in facts:
                assert (pristine / facts["source_shard"]).samefile(path)
                continue
            with safe_open(path, framework="np") as shard:
                assert sorted(shard.keys()) == sorted(facts["tensors"])
            raw = path.read_bytes()
            length = int.from_bytes(raw[:8], "little")
            header = json.loads(raw[8 : 8 + length])
            for tensor, entry in facts["tensors"].items():
                start_, end = header[tensor]["data_offsets"]
                data = raw[8 + length + start_ : 8 + length + end]
                assert xxhash.xxh3_128(data).hexdigest() == entry["xxh3_128"]
                operations.add(entry["operation"])
        for name, facts in content["files"].items():
            data = (output / part / name).read_bytes()
            assert xxhash.xxh3_128(data).hexdigest() == facts["xxh3_128"]
    assert operations == {"copy", "dequantize_fp8_block"}
