"""Verifications whose bytes are read in shares, or by a cluster: the report is that of one run,
faults included, and no byte is read twice."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cases import Outcome, quantize, read_json, run_program, tree
from cluster.fake_ray import FakeRay
from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.sources.disk_queue import DiskQueue
from mtp_checkpoints.tensors.tensor_stream import TensorStream
from mtp_export.cluster import verification

Said = tuple[int, Any]  # exit code and items of a verification


@pytest.fixture(scope="module")
def bundle(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized bundle; not to be changed."""
    output = tmp_path_factory.mktemp("quantized") / "bundle"
    schemes = ("--base-quant", "weight_only_int8", "--mtp-quant", "weight_only_int8", "--quiet")
    assert quantize(pristine, output, *schemes).code == 0
    return output


@pytest.fixture
def own_bundle(bundle: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(bundle, tmp_path / "own"))


@pytest.fixture(scope="module")
def alone(bundle: Path, pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Said:
    """Exit code and items of one run on the bundle."""
    return of_one_run(bundle, pristine, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def whole_findings(bundle: Path, pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Findings of a share that read all of it; not to be changed."""
    found = tmp_path_factory.mktemp("found") / "found"
    read_in_shares(bundle, pristine, found, ["1/1"])
    return found


def verify(bundle: Path, source: Path, *options: object) -> Outcome:
    level = ("--level", "weights", "--workers", "2", "--quiet")
    return run_program("verify", bundle, "--source", source, *level, *options)


def said(outcome: Outcome, report: Path) -> Said:
    """Return exit code and items of a verification."""
    checks = read_json(report)["checks"]
    return outcome.code, [(check["name"], check["items"]) for check in checks]


def read_in_shares(bundle: Path, source: Path, found: Path, shares: Sequence[str]) -> None:
    for share in shares:
        outcome = verify(bundle, source, "--workdir", found, "--share", share)
        assert outcome.code == 0, outcome.err


def of_one_run(bundle: Path, source: Path, folder: Path) -> Said:
    report = folder / "alone.json"
    return said(verify(bundle, source, "--report", report), report)


def joined(bundle: Path, source: Path, found: Path) -> Said:
    """Return what a run says that joins shares."""
    report = found.with_suffix(".json")
    return said(verify(bundle, source, "--workdir", found, "--report", report), report)


def damage(bundle: Path) -> None:
    shard = next(iter(sorted((bundle / "main").glob("*.safetensors"))))
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 0x40
    shard.write_bytes(raw)


def test_the_report_of_one_run(bundle: Path, alone: Said, pristine: Path, tmp_path: Path) -> None:
    read_in_shares(bundle, pristine, tmp_path / "found", ["3/3", "1/3", "2/3"])
    assert joined(bundle, pristine, tmp_path / "found") == alone
    assert alone[0] == 0


def test_the_report_of_one_run_on_a_fault(own_bundle: Path, pristine: Path, tmp_path: Path) -> None:
    damage(own_bundle)
    read_in_shares(own_bundle, pristine, tmp_path / "found", ["2/2", "1/2"])
    alone = of_one_run(own_bundle, pristine, tmp_path)
    assert joined(own_bundle, pristine, tmp_path / "found") == alone
    assert alone[0] == 7


@pytest.fixture
def read(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Tensors of the bundle, each time that they are read."""
    names: list[str] = []
    real = TensorStream.__init__

    def watched(stream: TensorStream, info: TensorInfo, queue: DiskQueue) -> None:
        if Path(str(info.path)).resolve().is_relative_to(bundle.resolve()):
            names.append(f"{info.path.parent.name} {info.name}")
        real(stream, info, queue)

    monkeypatch.setattr(TensorStream, "__init__", watched)
    return names


def test_what_shares_have_read_is_not_read_again(
    bundle: Path, pristine: Path, tmp_path: Path, read: list[str]
) -> None:
    verify(bundle, pristine)
    every = set(read)
    read.clear()
    read_in_shares(bundle, pristine, tmp_path / "found", ["1/2"])
    first = set(read)
    read.clear()
    assert verify(bundle, pristine, "--workdir", tmp_path / "found").code == 0
    assert set() < first < every
    assert not first & set(read)
    assert first | set(read) == every


def test_findings_of_another_state_are_not_taken(
    own_bundle: Path, pristine: Path, tmp_path: Path
) -> None:
    found = tmp_path / "found"
    read_in_shares(own_bundle, pristine, found, ["1/1"])
    damage(own_bundle)
    alone = of_one_run(own_bundle, pristine, tmp_path)
    assert joined(own_bundle, pristine, found) == alone
    assert alone[0] == 7


@pytest.mark.parametrize("content", [b"", b"[]", b'{"weights": 1, "x": 2}'])
def test_damaged_findings_are_as_none(
    content: bytes, whole_findings: Path, bundle: Path, alone: Said, pristine: Path, tmp_path: Path
) -> None:
    found = Path(shutil.copytree(whole_findings, tmp_path / "found"))
    assert list(found.iterdir())
    for path in found.iterdir():
        path.write_bytes(content)
    assert joined(bundle, pristine, found) == alone


def test_shares_of_level_files(bundle: Path, alone: Said, pristine: Path, tmp_path: Path) -> None:
    """Their checksums serve a level above too."""
    for share in ("1/2", "2/2"):
        options = ("--level", "files", "--workdir", tmp_path / "found", "--share", share, "--json")
        outcome = verify(bundle, pristine, *options)
        assert (outcome.code, f'"share": "{share}"' in outcome.out) == (0, True), outcome.err
    assert joined(bundle, pristine, tmp_path / "found") == alone


def test_shares_that_make_no_sense(bundle: Path, pristine: Path, tmp_path: Path) -> None:
    before = tree(tmp_path)
    for options, says in (
        (("--share", "1/2"), "--workdir"),
        (("--share", "1/2", "--workdir", tmp_path / "w", "--level", "run"), "--level weights"),
        (("--share", "3/2", "--workdir", tmp_path / "w"), "no share"),
    ):
        outcome = verify(bundle, pristine, *options)
        assert (outcome.code, says in outcome.err) == (2, True), outcome.err
    assert tree(tmp_path) == before
    assert not os.path.exists(tmp_path / "w")


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    """The stand-in, as the package that is imported, and tasks of a few tensors."""
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)  # type: ignore[arg-type]
    monkeypatch.setattr(verification, "TASK_BYTES", 200_000)
    return fake


def by_cluster(bundle: Path, source: Path, folder: Path, *options: object) -> Said:
    report = folder / "cluster.json"
    outcome = verify(bundle, source, "--cluster", "auto", "--report", report, *options)
    return said(outcome, report)


def test_the_report_of_one_run_by_a_cluster(
    ray: FakeRay,
    bundle: Path,
    alone: Said,
    pristine: Path,
    tmp_path: Path,
    read: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also when paths are given relative to a folder in which no worker is; workers read all."""
    verify(bundle, pristine)
    every = sorted(read)
    read.clear()
    monkeypatch.chdir(tmp_path)
    relative = [Path(os.path.relpath(path)) for path in (bundle, pristine)]
    assert by_cluster(*relative, tmp_path) == alone
    assert sorted(read) == every, "each tensor once, and none of them here"
    names = [task.settings["name"] for task in ray.tasks]
    assert len(names) == len(set(names)) > 4
    assert {name.partition(" ")[0] for name in names} == {"main", "mtp"}
    assert {task.settings["num_cpus"] for task in ray.tasks} == {2}


def test_a_fault_and_workers_that_die(
    ray: FakeRay, own_bundle: Path, pristine: Path, tmp_path: Path
) -> None:
    damage(own_bundle)
    ray.deaths = {1, 3, 4}
    found = by_cluster(own_bundle, pristine, tmp_path)
    assert found == of_one_run(own_bundle, pristine, tmp_path)
    assert found[0] == 7
    assert ray.attempts == len(ray.tasks) + 3


def test_checksums_alone_by_a_cluster(
    ray: FakeRay, bundle: Path, pristine: Path, tmp_path: Path
) -> None:
    level = ("--level", "files")
    code, checks = by_cluster(bundle, pristine, tmp_path, *level)
    report = tmp_path / "alone.json"
    assert (code, checks) == said(verify(bundle, pristine, *level, "--report", report), report)
    made = len(ray.tasks)
    assert made > 4
    assert by_cluster(bundle, pristine, tmp_path, *level, "--no-checksums")[0] == 0
    assert len(ray.tasks) == made, "there is nothing to read"


def test_a_machine_that_sees_another_bundle(ray: FakeRay, own_bundle: Path, pristine: Path) -> None:
    put = ray.put

    def touched(value: Any) -> bytes:
        os.utime(next(iter((own_bundle / "mtp").glob("*.safetensors"))))
        return put(value)

    ray.put = touched  # type: ignore[method-assign]
    outcome = verify(own_bundle, pristine, "--cluster", "auto")
    assert (outcome.code, "sees another bundle or source" in outcome.err) == (3, True), outcome.err
    assert outcome.err.count("\n") == 1


def test_a_share_that_kills_its_workers(ray: FakeRay, bundle: Path, pristine: Path) -> None:
    ray.deaths = set(range(1, 1000))
    outcome = verify(bundle, pristine, "--cluster", "auto")
    assert (outcome.code, "could not read a share" in outcome.err) == (6, True), outcome.err
    assert f"({ray.tasks[0].settings['name']})" in outcome.err


def test_a_share_or_a_cluster(bundle: Path, pristine: Path, tmp_path: Path) -> None:
    both = ("--cluster", "auto", "--share", "1/2", "--workdir", tmp_path / "found")
    outcome = verify(bundle, pristine, *both)
    assert (outcome.code, "divides the work itself" in outcome.err) == (2, True), outcome.err
    assert not list(tmp_path.iterdir())
