"""Tasks of a cluster call by call: how Ray is asked for them, and every refusal to its end."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cases import MTP_LAYER, read_shard, shard_of, write_shard
from cluster.fake_ray import FakeRay, WorkerCrashedError
from mtp_checkpoints.errors import InvalidInputError, IoError, UnsupportedError
from mtp_checkpoints.sources.files import temporary_path
from mtp_export.bundle.build import Work
from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.journal import Journal, ShardFacts
from mtp_export.bundle.options import BundleOptions, ContentOptions, RunOptions, SharedWeights
from mtp_export.bundle.request import Request
from mtp_export.cluster.shards import Assignment, RayCluster, make_shard
from mtp_export.plan import Link

VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}


class SeenRay(FakeRay):
    """The stand-in, and with what settings it was connected."""

    settings: dict[str, Any]
    machines: list[dict[str, Any]]

    def init(self, address: str, **settings: Any) -> None:
        super().init(address)
        self.settings = settings

    def nodes(self) -> list[dict[str, Any]]:
        return getattr(self, "machines", super().nodes())


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> SeenRay:
    fake = SeenRay()
    monkeypatch.setitem(sys.modules, "ray", fake)  # type: ignore[arg-type]
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "to be restored")
        del os.environ[name]
    return fake


def request_of(source: Path, output: Path, workers: int = 3, untied: bool = False) -> Request:
    run = RunOptions(link=Link.COPY, workers=workers)
    content = ContentOptions(max_shard_bytes=200_000, allow_untied=untied)
    return Request("export", BundleOptions(source, output, content=content, run=run))


def made(request: Request, address: str = "auto", checks: bool = True) -> tuple[list[str], int]:
    """Keys of the shards that a cluster made, in order, and the bytes that it told of."""
    plan, keys, told = request.plan(), list[str](), list[int]()
    work = Work(plan.jobs, plan.options.output_dir, plan.tied, checks=checks)

    def record(key: str, facts: ShardFacts) -> None:
        assert (plan.options.output_dir / key).stat().st_size == facts.size_bytes
        keys.append(key)

    with Journal(plan.options.output_dir):  # by which workers know that a run is here
        RayCluster(address, request)(plan, work, record, told.append)
    assert len(told) == len(keys)
    return keys, sum(told)


@pytest.mark.parametrize("address", ["local", "auto", "ray://head:10001"])
def test_how_ray_is_connected(address: str, ray: SeenRay, pristine: Path, output: Path) -> None:
    """Without a word of its own, and without telling anybody; what the user has set stays."""
    request = request_of(pristine, output)
    keys, told = made(request, address)
    plan = request.plan()
    assert sorted(keys) == sorted(job.key for job in plan.jobs)
    assert told == sum(job.read_bytes for job in plan.jobs)
    local = address == "local"
    assert (ray.addresses, ray.connected) == ([address], False)
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    assert ray.settings == quiet | ({"include_dashboard": False} if local else {})
    found = {name: os.environ.get(name) for name in VARIABLES}
    assert found == VARIABLES | ({} if local else {"RAY_AUTH_MODE": None})
    for name in VARIABLES:
        os.environ[name] = "mine"
    made(request, address)
    assert {os.environ[name] for name in VARIABLES} == {"mine"}


@pytest.mark.parametrize(
    ("machines", "cores"),
    [
        ([(True, {"CPU": 2.0}), (False, {"CPU": 64.0}), (True, {})], 2),
        ([(True, {"CPU": 64.0}), (True, {"CPU": 1.0})], 3),
        ([(True, {})], 1),
        ([], 1),
    ],
)
def test_how_tasks_are_asked_for(
    machines: list[tuple[bool, dict[str, float]]],
    cores: int,
    ray: SeenRay,
    pristine: Path,
    output: Path,
) -> None:
    """Spread over the machines, and again after a few deaths; one compares copies."""
    ray.machines = [{"Alive": alive, "Resources": found} for alive, found in machines]
    request = request_of(pristine, output)
    keys = [job.key for job in request.plan().jobs]
    made(request)
    settings = [task.settings for task in ray.tasks]
    same = {"num_cpus": cores, "max_retries": 8, "scheduling_strategy": "SPREAD"}
    assert sorted(settings, key=lambda one: str(one["name"])) == [
        same | {"name": key} for key in sorted([*keys, "checks"])
    ]


@pytest.mark.parametrize(("untied", "checks"), [(True, True), (False, False)])
def test_nothing_is_compared_where_nothing_is_to_be(
    untied: bool, checks: bool, ray: SeenRay, pristine: Path, output: Path
) -> None:
    request = request_of(pristine, output, untied=untied)
    keys, _ = made(request, checks=checks)
    assert sorted(task.settings["name"] for task in ray.tasks) == sorted(keys)


def test_what_attempts_left_goes_with_the_last(ray: SeenRay, pristine: Path, output: Path) -> None:
    request = request_of(pristine, output)
    key = request.plan().jobs[0].key
    left = temporary_path(output / key)
    left.parent.mkdir(parents=True)
    left.touch()
    (output / ".mtp_export.journal").touch()
    keys, _ = made(request)
    assert key in keys and not left.exists()
    assert all((output / key).exists() for key in keys)


def test_a_shard_that_nobody_can_make(ray: SeenRay, pristine: Path, output: Path) -> None:
    request = request_of(pristine, output)
    ray.deaths = set(range(1, 100))
    with pytest.raises(IoError) as caught:
        made(request)
    error = caught.value
    assert error.what == "The cluster could not make a shard"
    assert error.where in {"checks", *(job.key for job in request.plan().jobs)}
    assert error.found == "The worker died unexpectedly"
    assert error.todo == (
        "Check the memory of its machines (--max-memory is that of one shard), then run the same"
        " command again: it goes on where it stopped"
    )
    assert isinstance(error.__cause__, WorkerCrashedError)
    assert not ray.connected


@pytest.mark.parametrize("kind", [ConnectionError, RuntimeError, ValueError])
def test_a_cluster_that_is_not_there(
    kind: type[Exception], ray: SeenRay, pristine: Path, output: Path
) -> None:
    ray.refuses = kind("no address\nand more")
    with pytest.raises(IoError) as caught:
        made(request_of(pristine, output), "ray://head:10001")
    error = caught.value
    assert (error.what, error.where) == ("The Ray cluster cannot be reached", "ray://head:10001")
    assert error.found == "no address"
    assert error.todo == "Start it with ray start, or use --cluster local"


def test_ray_that_is_not_installed(
    pristine: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UnsupportedError) as caught:
        made(request_of(pristine, output), "auto")
    error = caught.value
    assert error.what == "--cluster needs Ray, which is not installed"
    assert error.found == "--cluster auto"
    assert str(error.todo).startswith("Install it on all machines with pip install 'mtp-export")


def assigned(request: Request, compares: bool = True) -> Assignment:
    identity = json.loads(json.dumps(request.plan().identity))
    return Assignment(request, identity, compares)


def test_one_shard_of_an_assignment(pristine: Path, output: Path) -> None:
    """It makes that alone, in a room that goes with it."""
    request = request_of(pristine, output)
    plan: BundlePlan = request.plan()
    job = plan.jobs[1]
    given = assigned(request)
    facts = make_shard(given, job.key)
    path = output / job.key
    assert (facts.size_bytes, facts.link) == (path.stat().st_size, None)
    assert facts.xxh3_128 is not None
    assert facts.xxh3_128.keys() == {tensor.name for tensor in job.shard.tensors}
    assert [found for found in output.rglob("*") if found.is_file()] == [path]
    assert make_shard(given, "checks") == ShardFacts(0)
    assert not list(output.glob(".*"))


@pytest.mark.parametrize(
    ("compares", "key"), [(True, "checks"), (False, "checks"), (True, None), (False, None)]
)
def test_copies_are_compared_where_that_is_assigned(
    compares: bool, key: str | None, output: Path, another: Callable[[bool], Request]
) -> None:
    """By the task of their shard, or where no shard has them by one of its own."""
    request = another(key is None)
    plan = request.plan()
    wanted = key or next(
        job.key
        for job in plan.jobs
        if any(step.inputs[0] in plan.tied.alike for step in job.shard.steps)
    )
    if compares:
        with pytest.raises(InvalidInputError, match="differs from the main model's"):
            make_shard(assigned(request, compares), wanted)
    else:
        make_shard(assigned(request, compares), wanted)


@pytest.fixture
def another(source: Path, output: Path) -> Callable[[bool], Request]:
    """A request of a source whose copies differ, which are copied or left out."""
    name = f"model.layers.{MTP_LAYER}.embed_tokens.weight"
    path = shard_of(source, name)
    header, data = read_shard(path)
    end = header[name]["data_offsets"][1]
    write_shard(path, header, data[: end - 1] + bytes([data[end - 1] ^ 1]) + data[end:])

    def request(copied: bool) -> Request:
        made = request_of(source, output)
        weights = SharedWeights.KEEP if copied else SharedWeights.DROP
        content = replace(made.bundle.content, shared_weights=weights)
        return replace(made, options=replace(made.bundle, content=content))

    return request


def test_a_machine_that_sees_something_else(pristine: Path, output: Path) -> None:
    request = request_of(pristine, output)
    given = assigned(request)
    identity = {**given.identity, "tool_version": "0.0.1"}
    with pytest.raises(InvalidInputError) as caught:
        make_shard(replace(given, identity=identity), request.plan().jobs[0].key)
    error = caught.value
    assert error.what == (
        f"The machine {socket.gethostname()} sees another source or makes other links"
    )
    assert (error.where, error.expected) == (pristine, "tool_version 0.0.1, as the coordinator")
    assert error.found == f"tool_version {given.identity['tool_version']}"
    assert str(error.todo).startswith("Give all machines the same files at the same paths")
    assert not output.exists()
