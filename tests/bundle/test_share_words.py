"""Shares of a bundle call by call: their results, each refusal to its end, and what each leaves of
what is its own and of what is another's."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cases import make_checkpoint, tree
from mtp_checkpoints.errors import InvalidInputError, IoError, MtpExportError, OutputExistsError
from mtp_checkpoints.sources.files import temporary_path
from mtp_export.bundle import build
from mtp_export.bundle import shares as module
from mtp_export.bundle.build import BundleResult
from mtp_export.bundle.bundle_plan import BundlePlan, jobs_of
from mtp_export.bundle.journal import JOURNAL_NAME, Journal
from mtp_export.bundle.options import BundleOptions, Checksums, ContentOptions, RunOptions, Share
from mtp_export.bundle.quantize import QuantizeOptions
from mtp_export.bundle.request import Request
from mtp_export.bundle.shares import (
    finish_shares,
    run_share,
    share_count,
    shared_request,
)
from mtp_export.plan import Link

SHARES, MANIFEST = ".mtp_export.shares", "mtp_export.json"
PIECE = "0a-0-9.partial"  # of a download


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of eight shards or so."""
    folder = tmp_path_factory.mktemp("small") / "source"
    return make_checkpoint(folder, max_shard_bytes=300_000)


def request_of(source: Path, output: Path, number: int, count: int, **changes: Any) -> Request:
    run = RunOptions(link=Link.COPY, workers=1, share=Share(number, count), **changes)
    content = ContentOptions(max_shard_bytes=200_000)
    return Request("export", BundleOptions(source, output, content=content, run=run))


def share(source: Path, output: Path, number: int, count: int, **changes: Any) -> BundleResult:
    request = request_of(source, output, number, count, **changes)
    return run_share(request, request.plan(), lambda count: None)


def shares(source: Path, output: Path, numbers: Iterable[int], count: int) -> None:
    for number in numbers:
        share(source, output, number, count)


def finish_plan(output: Path) -> BundlePlan:
    return shared_request(output).plan()


def refusal(call: Callable[[], object], kind: type[MtpExportError]) -> MtpExportError:
    with pytest.raises(kind) as caught:
        call()
    return caught.value


def put(path: Path, content: bytes = b"years of work") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_the_results_of_shares_and_of_their_end(
    small: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=iter([100.0, 103.5, 200.0, 201.25, 300.0, 302.0]).__next__)
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(build, "time", clock)
    told = list[int]()
    for number, seconds in ((1, 3.5), (2, 1.25)):
        request = request_of(small, output, number, 2)
        plan = request.plan()
        jobs = jobs_of(plan.jobs, Share(number, 2))
        result = run_share(request, plan, told.append)
        assert result == BundleResult(plan, seconds, resumed_shards=0, facts={})
        assert plan.options.run.share == Share(number, 2) and plan.share_jobs == jobs
        assert sum(told) == sum(job.read_bytes for job in jobs) > 0
        told.clear()
    plan = finish_plan(output)
    result_of_all = finish_shares(plan)
    assert (result_of_all.plan, result_of_all.seconds) == (plan, 2.0)
    assert (result_of_all.resumed_shards, result_of_all.shares) == (0, 2)
    assert result_of_all.facts == {}


def test_the_end_has_the_facts_of_every_share(small: Path, output: Path) -> None:
    names = list[str]()
    for number in (1, 2):
        bundle = request_of(small, output, number, 2).bundle
        request = Request("quantize", QuantizeOptions(bundle, "weight_only_int8", "bf16"))
        options = replace(request.options, allow_untested_pair=True)
        request = replace(request, options=options)
        plan = request.plan()
        run_share(request, plan, lambda count: None)
        names += [
            step.outputs[0].name
            for job in jobs_of(plan.jobs, Share(number, 2))
            for step in job.shard.steps
            if step.scheme == "weight_only_int8"
        ]
    found = finish_shares(finish_plan(output)).facts
    assert found.keys() >= set(names) and len(names) > 10


def test_a_share_that_was_made_is_not_made_again(small: Path, output: Path) -> None:
    made = len(share(small, output, 2, 3).plan.share_jobs)
    before = {path: path.stat().st_ino for path in output.glob("m*/model-*")}
    assert len(before) == made > 1
    assert share(small, output, 2, 3).resumed_shards == made
    assert {path: path.stat().st_ino for path in output.glob("m*/model-*")} == before
    next(iter(before)).unlink()
    assert share(small, output, 2, 3).resumed_shards == made
    assert {*output.glob("m*/model-*")} == {*before}


def test_a_share_clears_what_its_own_earlier_run_left(small: Path, output: Path) -> None:
    """Files of its own shards that are not finished and its downloads, but nothing of others'."""
    own = jobs_of(request_of(small, output, 1, 2).plan().jobs, Share(1, 2))
    others = jobs_of(request_of(small, output, 1, 2).plan().jobs, Share(2, 2))
    left = [put(temporary_path(output / job.key)) for job in (own[0], others[0])]
    download = put(output / SHARES / "1-of-2" / ".mtp_export.downloads" / PIECE)
    share(small, output, 1, 2)
    assert [path.exists() for path in (*left, download)] == [False, True, False]
    left[0] = put(temporary_path(output / own[0].key))
    download = put(download)
    share(small, output, 1, 2)
    assert [path.exists() for path in (*left, download)] == [False, True, True]
    share(small, output, 1, 2, resume=False)
    assert [path.exists() for path in (*left, download)] == [False, True, False]


def test_the_end_clears_what_every_share_left(small: Path, output: Path) -> None:
    shares(small, output, (1, 2), 2)
    whole = sorted(path.name for path in output.glob("main/*.safetensors"))
    left = put(temporary_path(output / "main" / whole[0]))
    finish_shares(finish_plan(output))
    assert not left.exists() and not list(output.glob(".*"))
    assert sorted(path.name for path in output.glob("main/*.safetensors")) == whole


def test_strangers_files_are_refused_before_anything_changes(small: Path, output: Path) -> None:
    """By a first share, which leaves nothing then, by another, and by the end."""
    request = request_of(small, output, 1, 2)
    plan = request.plan()
    stranger = put(output / "main/thesis.txt")
    run = lambda: run_share(request, plan, lambda count: None)  # noqa: E731
    for _ in range(2):
        error = refusal(run, OutputExistsError)
        assert error.what == "The output folder holds files that are not part of a bundle"
        assert (error.where, error.found) == (output, "main/thesis.txt")
        assert {**tree(output)} == {"main/thesis.txt": b"years of work"}
        assert [path.name for path in output.iterdir()] == ["main"]
    shutil.rmtree(output)
    shares(small, output, (1, 2), 2)
    plan, before = finish_plan(output), tree(put(stranger).parents[1])
    error = refusal(lambda: finish_shares(plan), OutputExistsError)
    assert (error.where, error.found) == (output, "main/thesis.txt")
    assert tree(output) == before
    stranger.unlink()
    finish_shares(plan)


def test_what_came_after_the_plan_is_seen(small: Path, output: Path) -> None:
    """The output is looked at again when the share has its lock."""
    request = request_of(small, output, 1, 2)
    plan = request.plan()
    put(output / JOURNAL_NAME)
    error = refusal(lambda: run_share(request, plan, lambda count: None), OutputExistsError)
    words = "The output folder holds an unfinished run that was not divided into shares"
    assert (error.what, error.where) == (words, output)
    assert tree(output) == {JOURNAL_NAME: b"years of work"}


def test_a_source_that_changes_under_a_share(
    small: Path, tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the share is kept, and nothing of others is lost."""
    source = Path(shutil.copytree(small, tmp_path / "source"))
    shares(source, output, (2,), 2)
    kept = tree(output)
    real = module.make_shards

    def make(plan: Any, work: Any, *more: Any) -> None:
        assert work.checks
        put(work.room / ".mtp_export.downloads" / PIECE)
        real(plan, work, *more)
        os.utime(plan.checkpoint.shards[0].path, (5, 5))

    monkeypatch.setattr(module, "make_shards", make)
    error = refusal(lambda: share(source, output, 1, 2), InvalidInputError)
    assert error.what == "The source changed while it was exported"
    assert str(error.todo).startswith("Wait until nothing writes it any more")
    assert tree(output) == kept
    assert not (output / SHARES / "1-of-2").exists()


def test_a_share_alone_leaves_nothing_of_a_wrong_source(
    small: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(plan: Any, work: Any, *more: Any) -> None:
        assert not work.checks  # which are the first share's
        put(work.room / ".mtp_export.downloads" / PIECE)
        raise InvalidInputError("The source is wrong")

    monkeypatch.setattr(module, "make_shards", make)
    refusal(lambda: share(small, output, 2, 3), InvalidInputError)
    assert not output.exists()


@pytest.mark.parametrize(("missing", "more"), [(12, ""), (13, " and 1 more"), (15, " and 3 more")])
def test_a_dozen_missing_shares_are_named(
    missing: int, more: str, small: Path, output: Path
) -> None:
    count = missing + 1
    shares(small, output, (1,), count)
    plan = finish_plan(output)
    error = refusal(lambda: finish_shares(plan), InvalidInputError)
    assert error.what == f"{missing} of {count} shares are missing"
    assert error.where == output
    named = ", ".join(f"{number}/{count} (not begun)" for number in range(2, 14))
    assert error.found == f"{named}{more}"
    assert error.todo == (
        "Run their commands again, with the same --share; then finish. What they finished is kept"
    )


def test_a_share_that_is_being_made_is_named_with_its_owner(small: Path, output: Path) -> None:
    """All its shards may be there: it ends with comparisons."""
    shares(small, output, (1, 2), 2)
    journal = output / SHARES / "2-of-2" / JOURNAL_NAME
    *kept, _ = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(kept))
    plan, made = finish_plan(output), len(jobs_of(finish_plan(output).jobs, Share(2, 2)))
    error = refusal(lambda: finish_shares(plan), InvalidInputError)
    assert error.what == "1 of 2 shares is missing"
    assert error.found == f"2/2 ({made} of {made} shards made)"
    with Journal(journal.parent):
        found = str(refusal(lambda: finish_shares(plan), InvalidInputError).found)
    start, end = f"2/2 ({made} of {made} shards made, by process {os.getpid()} on ", ")"
    assert found.startswith(start) and found.endswith(end)


def test_a_share_that_is_begun_anew_while_others_are_counted(
    small: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journals count as they are once nobody can write them."""
    shares(small, output, (1, 2), 2)
    plan = finish_plan(output)

    def anew(folder: Path) -> Journal:
        journal = folder / JOURNAL_NAME
        journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:2]))
        return Journal(folder)

    monkeypatch.setattr(module, "Journal", anew)
    error = refusal(lambda: finish_shares(plan), InvalidInputError)
    assert error.what == "2 of 2 shares are missing"
    assert not (output / MANIFEST).exists()


def test_only_folders_with_a_journal_are_shares(small: Path, output: Path) -> None:
    share(small, output, 1, 2)
    shutil.copytree(output / SHARES / "1-of-2", output / SHARES / "1-of-two")
    (output / SHARES / "1-of-3").mkdir()
    assert share_count(output) == 2
    share(small, output, 2, 2)
    assert finish_shares(finish_plan(output)).shares == 2


def test_no_shares_to_finish(small: Path, output: Path) -> None:
    error = refusal(lambda: share_count(output), InvalidInputError)
    assert error.what == "There are no shares to finish"
    assert (error.where, error.expected) == (output, "the output folder of runs with --share")
    assert error.todo == "Check the folder: a finished bundle has no shares any more"
    shares(small, output, (1, 2), 2)
    finish_shares(finish_plan(output))
    left = temporary_path(output / SHARES)  # as an end that was killed late leaves them
    put(left / "1-of-2" / JOURNAL_NAME)
    refusal(lambda: share_count(output), InvalidInputError)
    assert not left.exists()
    (output / MANIFEST).unlink()
    put(left / "1-of-2" / JOURNAL_NAME)
    refusal(lambda: share_count(output), InvalidInputError)
    assert left.exists()


def test_a_request_that_is_gone_or_damaged(small: Path, output: Path) -> None:
    share(small, output, 1, 2)
    path = output / SHARES / "request.json"
    recorded = json.loads(path.read_bytes())
    assert recorded == request_of(small, output, 1, 2).recorded()
    bundle = shared_request(output).bundle
    assert (bundle.output_dir, bundle.input_dir) == (output, small)
    assert bundle.run.share is not None and bundle.run.share.count == 2
    path.write_bytes(b'{"planner": 3}')
    error = refusal(lambda: shared_request(output), InvalidInputError)
    assert error.what == "What the shares were asked for cannot be read"
    assert (error.where, error.found) == (path, "KeyError: 3")
    assert error.todo == (
        "Run any one of them again, with the same --share: it writes the file anew"
    )
    recorded["options"]["input_dir"] += "\0"
    path.write_text(json.dumps(recorded))
    error = refusal(lambda: shared_request(output), InvalidInputError)
    assert error.found == "ValueError: a null byte, which no path has"
    path.unlink()
    gone = refusal(lambda: shared_request(output), IoError)
    assert (gone.where, gone.found) == (path, "No such file or directory")


def test_shares_that_do_not_go_together(small: Path, output: Path) -> None:
    share(small, output, 2, 3)
    error = refusal(lambda: share(small, output, 1, 4), OutputExistsError)
    assert error.what == "The output folder holds shares of another division"
    assert (error.where, error.found) == (output, "--share 1/4")
    assert error.expected == "one of 3 shares, as share 2/3 is"
    assert error.todo == "Divide the work as the others did, or choose another --output-dir"
    request = request_of(small, output, 1, 4)
    given = replace(request.bundle.run, share=Share(1, 4, origin="task 1 of an array"))
    request = replace(request, options=replace(request.bundle, run=given))
    run = lambda: run_share(request, request.plan(), lambda count: None)  # noqa: E731
    assert refusal(run, OutputExistsError).found == "--share 1/4 (task 1 of an array)"
    for number, what in (
        (1, "The output folder holds shares of something else"),
        (2, "The output folder holds an unfinished run of something else"),  # its own
    ):
        request = request_of(small, output, number, 3)
        content = replace(request.bundle.content, checksums=Checksums.ALL)
        request = replace(request, options=replace(request.bundle, content=content))
        error = refusal(run, OutputExistsError)
        assert error.what == what
        said = "share 2/3" if number == 1 else "the unfinished run"
        assert error.expected == f"options checksums written (in {said})"
        assert error.found == "options checksums all (now)"
        assert error.where == (output if number == 1 else output / SHARES / "2-of-3")
        assert number == 2 or str(error.todo).startswith("Give every share the same options")


def failing(code: int) -> Callable[..., None]:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def test_an_end_that_the_disk_refuses(
    small: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command ends it when the disk is well again."""
    shares(small, output, (1, 2), 2)
    for place, call in ((os, "rename"), (shutil, "rmtree")):
        plan = finish_plan(output)
        with monkeypatch.context() as patch:
            patch.setattr(place, call, failing(errno.EROFS))
            error = refusal(lambda plan=plan: finish_shares(plan), IoError)
        assert (error.where, error.found) == (output, "Read-only file system")
        assert (output / MANIFEST).exists()
    refusal(lambda: share_count(output), InvalidInputError)
    assert {path.name for path in output.iterdir()} == {"main", "mtp", MANIFEST}


def test_the_end_is_brought_to_disk(
    small: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shares are gone for good before the first of their files is removed."""
    calls = list[str]()
    shares(small, output, (1, 2), 2)
    plan, rename, rmtree = finish_plan(output), os.rename, shutil.rmtree

    def renaming(*paths: Any) -> None:
        calls.append(f"rename {Path(paths[0]).name}")
        rename(*paths)

    def removing(path: Path, **options: Any) -> None:
        calls.append("remove")
        rmtree(path, **options)

    monkeypatch.setattr(os, "rename", renaming)
    monkeypatch.setattr(shutil, "rmtree", removing)
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(os.readlink(f"/proc/self/fd/{fd}")))
    finish_shares(plan)
    place = calls.index(f"rename {SHARES}")
    assert calls[place + 1 :] == [str(output.resolve()), "remove"]
