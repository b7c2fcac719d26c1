"""Plans and their runs: what they need, what they report, and what they leave of a wrong source."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bundle.test_downloads import remote
from cases import MTP_LAYER, read_shard, shard_of, tree, write_shard
from mtp_checkpoints.errors import InvalidInputError, IoError, ResourceError
from mtp_export.bundle import build
from mtp_export.bundle.build import Work, check_unchanged, make_shards, run_bundle
from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.export import plan_export
from mtp_export.bundle.options import BundleOptions, ContentOptions, Part, RunOptions
from mtp_export.bundle.preflight import needed_disk_bytes
from mtp_export.bundle.quantize import QuantizeOptions, plan_quantize
from mtp_export.bundle.run import Record
from mtp_export.plan import Link
from mtp_export.progress import ProgressCallback


def test_the_end_of_a_run(pristine: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=iter([100.0, 103.5]).__next__)
    monkeypatch.setattr(build, "time", clock)
    plan, counted = plan_export(BundleOptions(pristine, output)), list[int]()
    result = run_bundle(plan, counted.append)
    assert (result.plan, result.seconds, result.resumed_shards) == (plan, 3.5, 0)
    assert result.facts == {}
    assert sum(counted) == plan.written_bytes + plan.checked_bytes


def options_of(source: Path, output: Path, **changes: Any) -> BundleOptions:
    return BundleOptions(source, output, run=RunOptions(link=Link.COPY, workers=1, **changes))


def test_a_plan_needs_memory_and_disk(
    pristine: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_export(options_of(pristine, output))
    plan_export(options_of(pristine, output, max_memory_bytes=plan.memory_bytes))
    with pytest.raises(ResourceError, match="not enough memory"):
        plan_export(options_of(pristine, output, max_memory_bytes=plan.memory_bytes - 1))
    usage: Any = SimpleNamespace(free=plan.disk_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ResourceError, match="not enough disk"):
        plan_export(options_of(pristine, output))
    usage.free = needed_disk_bytes(plan.disk_bytes)
    plan_export(options_of(pristine, output))


def test_what_was_finished_is_counted_and_told(pristine: Path, output: Path) -> None:
    """Of a run that ended between its last shard and its manifest."""
    plan, counted = plan_export(options_of(pristine, output)), list[int]()

    def make(plan: BundlePlan, work: Work, record: Record, progress: ProgressCallback) -> None:
        make_shards(plan, replace(work, jobs=work.jobs[:2]), record, progress)
        raise IoError("The disk fails")

    with pytest.raises(IoError):
        run_bundle(plan, counted.append, make)
    assert counted[0] == 0 and sum(counted) == sum(job.read_bytes for job in plan.jobs[:2])
    counted.clear()
    result = run_bundle(plan, counted.append)
    assert result.resumed_shards == 2
    assert counted[0] == sum(job.read_bytes for job in plan.jobs[:2])
    assert sum(counted) == plan.written_bytes


def test_a_wrong_source_leaves_nothing(pristine: Path, output: Path) -> None:
    plan = plan_export(options_of(pristine, output))

    def make(plan: BundlePlan, work: Work, record: Record, progress: ProgressCallback) -> None:
        assert (work.room, work.checks, work.tied) == (output, True, plan.tied)
        make_shards(plan, replace(work, jobs=work.jobs[:2]), record, progress)
        piece = output / ".mtp_export.downloads/0a-0-9.partial"
        piece.parent.mkdir()
        piece.touch()
        raise InvalidInputError("The source is wrong")

    with pytest.raises(InvalidInputError):
        run_bundle(plan, lambda count: None, make)
    assert not output.exists()


def test_a_good_bundle_is_not_removed_for_a_wrong_source(source: Path, output: Path) -> None:
    """Copies are compared before it goes, and then not again."""
    run_bundle(plan_export(options_of(source, output)), lambda count: None)
    before = tree(output)
    plan = plan_export(options_of(source, output, overwrite=True))

    def make(plan: BundlePlan, work: Work, record: Record, progress: ProgressCallback) -> None:
        assert (dict(work.tied.alike), dict(work.tied.unlike)) == ({}, {})
        make_shards(plan, work, record, progress)

    run_bundle(plan, lambda count: None, make)
    assert tree(output) == before
    name = f"model.layers.{MTP_LAYER}.embed_tokens.weight"
    path = shard_of(source, name)
    header, data = read_shard(path)
    end = header[name]["data_offsets"][1]
    write_shard(path, header, data[: end - 1] + bytes([data[end - 1] ^ 1]) + data[end:])
    plan = plan_export(options_of(source, output, overwrite=True))
    with pytest.raises(InvalidInputError, match="differs from the main model's"):
        run_bundle(plan, lambda count: None, make)
    assert tree(output) == before


def test_a_source_that_changed_is_named(source: Path, output: Path) -> None:
    checkpoint = plan_export(options_of(source, output)).checkpoint
    check_unchanged(checkpoint)
    last = checkpoint.shards[-1]
    os.utime(str(last.path), (5, 5))
    with pytest.raises(InvalidInputError) as caught:
        check_unchanged(checkpoint)
    error = caught.value
    assert (error.what, error.where) == ("The source changed while it was exported", last.path)
    words = "Wait until nothing writes it any more, then run the same command again"
    assert error.todo == words


def test_memory_of_what_computes(pristine: Path, output: Path) -> None:
    """Torch counts where a conversion uses it, and on another device than the CPU."""
    bundle = options_of(pristine, output)
    compiled = plan_quantize(QuantizeOptions(bundle, "weight_only_int8", "weight_only_int8"))
    elsewhere = replace(compiled, device="cuda")
    assert elsewhere.memory_bytes - compiled.memory_bytes == 200_000_000
    transposed = plan_export(replace(bundle, target="lightllm"))
    copied = plan_export(bundle)
    added = transposed.memory_bytes - copied.memory_bytes
    uses_torch = any(
        getattr(step.operation, "uses_torch", False) for step in transposed.written_steps
    )
    computes = any(step.operation.name != "copy" for step in transposed.written_steps)
    assert added == 166_000_000 * computes + 200_000_000 * uses_torch


def test_parts_that_are_asked_for(pristine: Path, output: Path) -> None:
    for part, names in ((Part.BOTH, ["main", "mtp"]), (Part.MAIN, ["main"]), (Part.MTP, ["mtp"])):
        options = replace(options_of(pristine, output), content=ContentOptions(part=part))
        plan = plan_export(options)
        assert [one.name for one in plan.parts] == names
        assert bool(plan.tied.alike) is (part is not Part.MAIN)
        untied = replace(options, content=replace(options.content, allow_untied=True))
        assert not plan_export(untied).tied.alike


def test_what_a_remote_source_needs(pristine: Path, output: Path) -> None:
    """Downloads on disk, those of a next job included, and a client's memory."""
    local = plan_export(options_of(pristine, output))
    plan = replace(local, checkpoint=remote(pristine))
    downloads = plan.downloads
    assert (local.downloads, local.disk_bytes) == (None, local.written_bytes)
    assert downloads is not None and set(downloads.jobs) == {job.key for job in plan.jobs}
    least = downloads.disk_bytes(2, plan.checkpoint.readers)
    assert plan.disk_bytes == plan.written_bytes + least > plan.written_bytes
    assert plan.memory_bytes == local.memory_bytes + 80_000_000
