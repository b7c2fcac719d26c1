"""Ray's own test cluster: workers and machines that die or join while a bundle is made, and
verifications on it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cases import export, make_checkpoint, read_json, run_program, tree
from mtp_export.cluster import verification

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("default")]
OPTIONS = ("--max-shard-size", "60kB", "--workers", "1", "--link", "copy", "--quiet")
MACHINE = {"num_cpus": 1, "object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("many") / "source", max_shard_bytes=40_000)


@pytest.fixture(scope="module")
def whole(many: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    output = tmp_path_factory.mktemp("whole") / "output"
    assert export(many, output, *OPTIONS).code == 0
    return tree(output)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head that takes no tasks, and one machine."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    head = {**MACHINE, "num_cpus": 0, "include_dashboard": False}
    made = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    monkeypatch.setenv("RAY_ADDRESS", made.address)
    try:
        yield made
    finally:
        made.shutdown()


def wait_for_shards(output: Path, number: int) -> None:
    end = time.monotonic() + 40
    while len(list(output.glob("*/model-*"))) < number:
        assert time.monotonic() < end, "no shards are made"
        time.sleep(0.05)


def own_workers() -> list[int]:
    """Return the processes at a shard, after which ray names them, that descend from this one."""
    parents: dict[int, int] = {}
    workers: list[int] = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "stat").read_text().rpartition(")")[2].split()
            parents[int(path.name)] = int(words[1])
            if (path / "cmdline").read_bytes().startswith((b"ray::main/", b"ray::mtp/")):
                workers.append(int(path.name))
    return [worker for worker in workers if os.getpid() in _ancestors(worker, parents)]


def _ancestors(process: int, parents: dict[int, int]) -> Iterator[int]:
    while process in parents:
        process = parents[process]
        yield process


def test_a_local_cluster(many: Path, output: Path, whole: dict[str, bytes]) -> None:
    outcome = export(many, output, *OPTIONS, "--cluster", "local")
    assert outcome.code == 0, outcome.err
    assert tree(output) == whole


def start(source: Path, output: Path) -> subprocess.Popen[str]:
    """Begin an export on the cluster, in a process of its own."""
    places = ("--input-dir", str(source), "--output-dir", str(output))
    command = [sys.executable, "-m", "mtp_export", *places, *OPTIONS, "--cluster", "auto"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def check_whole(process: subprocess.Popen[str], output: Path, whole: dict[str, bytes]) -> None:
    _, said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    assert tree(output) == whole


def test_a_machine_dies_and_another_joins(
    cluster: Any, many: Path, output: Path, whole: dict[str, bytes]
) -> None:
    first = cluster.add_node(**MACHINE)
    process = start(many, output)
    wait_for_shards(output, 2)
    cluster.remove_node(first, allow_graceful=False)
    assert process.poll() is None, "it was at work"
    cluster.add_node(**MACHINE)
    check_whole(process, output, whole)


def test_a_worker_is_killed(
    cluster: Any, many: Path, output: Path, whole: dict[str, bytes]
) -> None:
    cluster.add_node(**MACHINE)
    process = start(many, output)
    wait_for_shards(output, 3)
    # Between two shards a worker has no name.
    while not (workers := own_workers()) and process.poll() is None:
        time.sleep(0.001)
    for worker in workers:
        os.kill(worker, 9)
    assert workers and process.poll() is None, "it was at work"
    check_whole(process, output, whole)


def test_a_verification(
    many: Path,
    output: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shares are read by tasks; the report is that of one process."""
    monkeypatch.setattr(verification, "TASK_BYTES", 200_000)
    assert export(many, output, *OPTIONS).code == 0
    reports = []
    for cluster in ((), ("--cluster", "local")):
        report = tmp_path / f"report-{len(reports)}.json"
        options = ("--level", "weights", "--workers", "1", "--quiet", "--report", report)
        outcome = run_program("verify", output, "--source", many, *options, *cluster)
        assert outcome.code == 0, outcome.err
        reports.append([(check["name"], check["items"]) for check in read_json(report)["checks"]])
    assert reports[0] == reports[1]
