"""Bundles whose shards are tasks of a cluster: equal to those of one run, whatever workers do. Ray
itself runs in test_ray.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from bundle.commands import check_nothing_looks_whole
from cases import MTP_LAYER, Outcome, export, quantize, read_shard, shard_of, tree, write_shard
from cluster.fake_ray import FakeRay

SMALL = ("--max-shard-size", "60kB", "--workers", "2")
INT8 = ("--base-quant", "weight_only_int8", "--mtp-quant", "weight_only_int8")
COPIED = (*SMALL, "--link", "copy")


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    """The stand-in, as the package that is imported."""
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)  # type: ignore[arg-type]
    return fake


def on_cluster(source: Path, output: Path, *options: str) -> Outcome:
    return export(source, output, *COPIED, "--cluster", "auto", *options)


@pytest.fixture(scope="module")
def whole(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The bundle of one process."""
    output = tmp_path_factory.mktemp("whole") / "output"
    assert export(pristine, output, *COPIED).code == 0
    return tree(output)


def test_the_bundle_of_one_process(
    ray: FakeRay,
    pristine: Path,
    output: Path,
    whole: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also when paths are given relative to a folder in which no worker is."""
    monkeypatch.chdir(output.parent)
    outcome = on_cluster(Path(os.path.relpath(pristine)), Path(output.name))
    assert outcome.code == 0, outcome.err
    assert tree(output) == whole
    assert (ray.addresses, ray.connected) == (["auto"], False)
    assert {task.settings["num_cpus"] for task in ray.tasks} == {2}
    names = [task.settings["name"] for task in ray.tasks]
    shards = {name for name in whole if name.endswith(".safetensors")}
    assert sorted(names) == sorted([*shards, "checks"])


@pytest.mark.parametrize("options", [("--link", "hardlink", "--checksums", "all"), ()])
def test_a_quantization_and_links(
    options: tuple[str, ...], ray: FakeRay, pristine: Path, tmp_path: Path
) -> None:
    program, scheme = (export, ()) if options else (quantize, INT8)
    for name, cluster in (("one", ()), ("many", ("--cluster", "ray://head:10001"))):
        outcome = program(pristine, tmp_path / name, *SMALL, *options, *scheme, *cluster)
        assert outcome.code == 0, outcome.err
    assert tree(tmp_path / "many") == tree(tmp_path / "one")


def test_workers_that_die(
    ray: FakeRay, pristine: Path, output: Path, whole: dict[str, bytes]
) -> None:
    """Their shards are made again, and no other."""
    ray.deaths = {1, 3, 4}
    assert on_cluster(pristine, output).code == 0
    assert ray.attempts == len(ray.tasks) + 3
    assert tree(output) == whole


def test_what_a_dead_worker_left_goes(
    ray: FakeRay, pristine: Path, output: Path, whole: dict[str, bytes]
) -> None:
    def with_rest(*arguments: Any) -> Any:
        left = output / "main/.0123456789ab.model-00001-of-00001.safetensors.tmp"
        left.parent.mkdir(parents=True, exist_ok=True)
        shard = next(name for name in whole if name.startswith("main/model-"))
        left.with_name(f".0123456789ab.{Path(shard).name}.tmp").write_bytes(b"half")
        return FakeRay.attempt(ray, *arguments)

    ray.attempt = with_rest  # type: ignore[method-assign]
    assert on_cluster(pristine, output).code == 0
    assert tree(output) == whole


def test_a_shard_that_kills_its_workers(
    ray: FakeRay, pristine: Path, output: Path, whole: dict[str, bytes]
) -> None:
    """The run ends, and goes on elsewhere with what was finished before."""
    ray.deaths = set(range(4, 1000))
    outcome = on_cluster(pristine, output)
    assert outcome.code == 6, outcome.err
    assert "could not make a shard" in outcome.err
    assert "The worker died unexpectedly. " in outcome.err
    assert "with details" not in outcome.err
    check_nothing_looks_whole(output, [])
    outcome = export(pristine, output, *COPIED, "--json")
    assert (outcome.code, '"resumed_shards": 3' in outcome.out) == (0, True), outcome.out
    assert tree(output) == whole


@pytest.mark.parametrize("weights", ["keep", "drop"])
def test_a_task_that_fails(weights: str, ray: FakeRay, source: Path, output: Path) -> None:
    """Its own paragraph and exit code; nothing is kept of a wrong source."""
    name = f"model.layers.{MTP_LAYER}.embed_tokens.weight"
    path = shard_of(source, name)
    header, data = read_shard(path)
    end = header[name]["data_offsets"][1]
    write_shard(path, header, data[: end - 1] + bytes([data[end - 1] ^ 1]) + data[end:])
    outcome = on_cluster(source, output, "--shared-weights", weights)
    assert outcome.code == 3, outcome.err
    assert "differs from the main model's" in outcome.err
    assert outcome.err.strip().count("\n") == 0 or "Traceback" not in outcome.err
    assert not output.exists()
    assert on_cluster(source, output, "--allow-untied").code == 0


def test_a_machine_that_sees_another_source(ray: FakeRay, source: Path, output: Path) -> None:
    put = ray.put

    def touched(value: Any) -> bytes:
        os.utime(next(iter(source.glob("*.safetensors"))))
        return put(value)

    ray.put = touched  # type: ignore[method-assign]
    outcome = on_cluster(source, output)
    assert (outcome.code, "sees another source" in outcome.err) == (3, True), outcome.err
    assert "versions" in outcome.err


@pytest.mark.parametrize(("cores", "wanted"), [((2, 64), 2), ((1, 1), 1), ((), 1)])
def test_a_task_fits_a_machine(
    cores: tuple[int, ...], wanted: int, ray: FakeRay, pristine: Path, output: Path
) -> None:
    ray.cores = cores
    assert on_cluster(pristine, output).code == 0
    assert {task.settings["num_cpus"] for task in ray.tasks} == {wanted}


def test_a_cluster_that_cannot_be_reached(ray: FakeRay, pristine: Path, output: Path) -> None:
    ray.refuses = ConnectionError("no address\nand more")
    outcome = on_cluster(pristine, output)
    assert outcome.code == 6, outcome.err
    assert "Found no address. Start it with ray start" in outcome.err


def test_without_ray(pristine: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    outcome = on_cluster(pristine, output)
    assert (outcome.code, "mtp-export[ray]" in outcome.err) == (4, True), outcome.err


def test_a_share_of_a_cluster(pristine: Path, output: Path) -> None:
    assert on_cluster(pristine, output, "--share", "1/2").code == 2
    for address in ("", "node:6379", "ray://", "Local", "ray://a/b"):
        outcome = export(pristine, output, "--cluster", address)
        assert (outcome.code, "is no cluster" in outcome.err) == (2, True), outcome.err
    assert not output.exists()
