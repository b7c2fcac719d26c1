"""A run of shards call by call: what it records, and how it ends when something fails."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from cases import read_shard
from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.errors import InvalidInputError, OutputExistsError
from mtp_checkpoints.formats.fp8_block import Fp8Block
from mtp_checkpoints.formats.nvfp4 import NvFp4Packed
from mtp_checkpoints.sources.disk_queue import DiskQueue
from mtp_checkpoints.sources.files import name_when_whole
from mtp_checkpoints.tensors.tensor_reader import TensorReader
from mtp_checkpoints.tensors.tensor_stream import TensorStream
from mtp_export.bundle import run as module
from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.downloads import Inputs
from mtp_export.bundle.export import plan_export
from mtp_export.bundle.journal import ShardFacts
from mtp_export.bundle.options import BundleOptions, Checksums, ContentOptions, RunOptions
from mtp_export.bundle.run import RunResources, ShardJob, is_made, run
from mtp_export.plan import Link, OutputShard, Resources, Step, copy_step
from mtp_export.schemes import read_twice
from mtp_export.schemes.transforms import Convert
from mtp_kernels.cpu import torch_threads
from mtp_kernels.cpu.torch_threads import one_torch_thread

GATE_AND_UP = tuple(f"model.layers.1.mlp.experts.0.{part}_proj.weight" for part in ("gate", "up"))


@pytest.fixture
def queue() -> Iterator[DiskQueue]:
    with DiskQueue(2) as queue:
        yield queue


@pytest.fixture
def plan_of(pristine: Path, output: Path) -> Callable[..., BundlePlan]:
    def plan(link: Link = Link.COPY, checksums: Checksums = Checksums.WRITTEN) -> BundlePlan:
        content = ContentOptions(max_shard_bytes=200_000, checksums=checksums)
        options = BundleOptions(pristine, output, content=content, run=RunOptions(link=link))
        found = plan_export(options)
        for part in found.parts:
            (output / part.name).mkdir(parents=True, exist_ok=True)
        return found

    return plan


def resources_of(plan: BundlePlan, queue: DiskQueue, **changes: Any) -> RunResources:
    plain = RunResources(
        inputs=Inputs(plan.checkpoint.tensors),
        tied={},
        workers=2,
        queue=queue,
        transform=Resources(plan.budget_bytes, "cpu"),
        progress=lambda count: None,
    )
    return replace(plain, **changes)


def checksums_of(path: Path) -> dict[str, str]:
    header, data = read_shard(path)
    header.pop("__metadata__", None)
    spans = {name: entry["data_offsets"] for name, entry in header.items()}
    return {
        name: xxhash.xxh3_128(data[start:end]).hexdigest() for name, (start, end) in spans.items()
    }


@pytest.mark.parametrize("workers", [1, 3])
def test_what_is_recorded_of_written_shards(
    workers: int, plan_of: Callable[..., BundlePlan], queue: DiskQueue
) -> None:
    plan, recorded, told = plan_of(), dict[str, ShardFacts](), list[int]()
    resources = resources_of(plan, queue, workers=workers, progress=told.append)
    run(plan.jobs, recorded.__setitem__, resources)
    assert len(recorded) > 3
    for job in plan.jobs:
        path = job.folder / job.shard.file_name
        assert recorded[job.key] == ShardFacts(path.stat().st_size, None, checksums_of(path), {})
    assert recorded.keys() == {job.key for job in plan.jobs}
    assert sum(told) == sum(job.read_bytes for job in plan.jobs)


@pytest.mark.parametrize("checksums", Checksums)
def test_what_is_recorded_of_linked_shards(
    checksums: Checksums, plan_of: Callable[..., BundlePlan], queue: DiskQueue
) -> None:
    plan, recorded, told = plan_of(Link.HARDLINK, checksums), dict[str, ShardFacts](), list[int]()
    run(plan.jobs, recorded.__setitem__, resources_of(plan, queue, progress=told.append))
    linked = [job for job in plan.jobs if job.shard.linked_from is not None]
    assert linked
    for job in linked:
        path = job.folder / job.shard.file_name
        found = checksums_of(path) if job.shard.checked else None
        assert recorded[job.key] == ShardFacts(path.stat().st_size, "hardlink", found, {})
        source = job.shard.linked_from
        assert source is not None and path.samefile(str(source.path))
    assert any(job.shard.checked for job in linked) or checksums is Checksums.WRITTEN
    assert sum(told) == plan.written_bytes + plan.checked_bytes


def left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def test_a_failure_ends_all_and_leaves_whole_shards_alone(
    plan_of: Callable[..., BundlePlan], output: Path
) -> None:
    """Here of the third record; no file is open afterwards, and no thread at work."""
    plan, recorded = plan_of(), list[str]()
    stopping = threading.Event()

    def record(key: str, facts: ShardFacts) -> None:
        if len(recorded) == 2:
            raise OutputExistsError("Taken over")
        recorded.append(key)

    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    with DiskQueue(2) as queue, pytest.raises(OutputExistsError, match="Taken over"):
        inputs = Inputs(plan.checkpoint.tensors, stopping=stopping)
        run(plan.jobs, record, resources_of(plan, queue, inputs=inputs))
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (files, threads)
    assert stopping.is_set()
    left = left_in(output)
    assert {Path(key).name for key in recorded} <= left
    assert not [name for name in left if name_when_whole(name)]
    assert len(left) <= 4  # with what the other worker had under way


def test_a_check_that_fails_ends_all(
    plan_of: Callable[..., BundlePlan], queue: DiskQueue, output: Path
) -> None:
    plan, went = plan_of(), threading.Event()

    def check(proceed: Callable[[], None]) -> None:
        went.set()
        raise InvalidInputError("Copies differ")

    def record(key: str, facts: ShardFacts) -> None:
        assert went.wait(20)

    with pytest.raises(InvalidInputError, match="Copies differ"):
        run(plan.jobs, record, resources_of(plan, queue), [check])
    assert not [name for name in left_in(output) if name_when_whole(name)]


def test_a_check_hears_that_the_run_ends(
    plan_of: Callable[..., BundlePlan], queue: DiskQueue
) -> None:
    """It is the failure that is raised, not that the check was stopped."""
    plan, begun = plan_of(), threading.Event()

    def check(proceed: Callable[[], None]) -> None:
        begun.set()
        while True:
            proceed()
            threading.Event().wait(0.01)

    def record(key: str, facts: ShardFacts) -> None:
        assert begun.wait(20)
        raise OutputExistsError("Taken over")

    with pytest.raises(OutputExistsError, match="Taken over"):
        run(plan.jobs, record, resources_of(plan, queue), [check])


def test_checks_run_beside_the_workers(
    plan_of: Callable[..., BundlePlan], queue: DiskQueue
) -> None:
    """Neither waits for the other's end, even with one worker."""
    plan, made, checked = plan_of(), threading.Event(), list[int]()

    def check(number: int) -> Callable[[Callable[[], None]], None]:
        def wait(proceed: Callable[[], None]) -> None:
            assert made.wait(20)
            proceed()
            checked.append(number)

        return wait

    resources = resources_of(plan, queue, workers=1)
    run(plan.jobs, lambda *_: made.set(), resources, [check(1), check(2)])
    assert sorted(checked) == [1, 2]
    assert not resources.inputs.stopping.is_set()


def test_what_ends_a_job_may_keep_it_from_being_finished(
    plan_of: Callable[..., BundlePlan], queue: DiskQueue, output: Path
) -> None:
    """As a checksum of the downloads that it was made from."""
    plan, recorded = plan_of(), list[str]()
    wrong = plan.jobs[2].key

    @contextmanager
    def refusing(key: str) -> Iterator[None]:
        if key == wrong:
            raise InvalidInputError("Another checksum")
        yield

    def finishing(key: str) -> AbstractContextManager[None]:
        return refusing(key) if key == wrong else nullcontext()

    inputs = Inputs(plan.checkpoint.tensors, finishing)
    with pytest.raises(InvalidInputError, match="Another checksum"):
        run(
            plan.jobs, lambda key, _: recorded.append(key), resources_of(plan, queue, inputs=inputs)
        )
    assert wrong not in recorded
    assert not (output / wrong).exists()
    assert not [name for name in left_in(output) if name_when_whole(name)]


def test_copies_are_compared_as_they_are_copied(
    plan_of: Callable[..., BundlePlan], queue: DiskQueue
) -> None:
    plan = plan_of()
    tensors = plan.checkpoint.tensors
    first = "model.embed_tokens.weight"
    run(plan.jobs, lambda *_: None, resources_of(plan, queue, tied={first: tensors[first]}))
    tied = {first: tensors["lm_head.weight"]}
    with pytest.raises(InvalidInputError, match=f"{first} differs from the main model's"):
        run(plan.jobs, lambda *_: None, resources_of(plan, queue, tied=tied))


def test_nothing_to_do(plan_of: Callable[..., BundlePlan], queue: DiskQueue) -> None:
    run([], pytest.fail, resources_of(plan_of(), queue))


@dataclass(frozen=True)
class Doubled:
    """A transform that writes its input twice, or too little."""

    uses_torch: bool = False
    short: bool = False
    name: str = "doubled"

    def run(self, inputs: Any, outputs: Any, sink: Any, resources: Resources) -> Mapping[str, Any]:
        assert resources.budget_bytes == 12_345
        pieces = [bytes(piece) for piece in inputs[0].blocks()]
        for number in range(len(outputs) - self.short):
            for piece in pieces:
                sink(number, memoryview(piece))
        return {"error": 0.5}


def transformed(plan: BundlePlan, transform: Doubled) -> ShardJob:
    name = "model.norm.weight"
    tensor = plan.checkpoint.tensors[name]
    outputs = tuple(OutputTensor(f"twin {n}", tensor.dtype, tensor.shape) for n in (1, 2))
    steps = (Step(transform, (name,), outputs, "mine"), copy_step(tensor))
    return ShardJob("main/x", plan.jobs[0].folder, OutputShard(steps, file_name="x.safetensors"))


def joined_job(plan: BundlePlan, own: str, others: Sequence[str]) -> ShardJob:
    """A shard of weights in nvfp4 that share the number of the matrix, another tensor between."""
    convert = Convert(NvFp4Packed(), "minmax", Fp8Block(), joined=1)
    steps = []
    for name in (own, *others):
        other = GATE_AND_UP[name == GATE_AND_UP[0]]
        inputs = (name, f"{name}_scale_inv", other, f"{other}_scale_inv")
        outputs = convert.format.tensors(name, plan.checkpoint.tensors[name].shape)
        steps.append(Step(convert, inputs, outputs))
    steps.insert(1, copy_step(plan.checkpoint.tensors["model.norm.weight"]))
    file_name = f"{len(steps)}.safetensors"
    return ShardJob(own, plan.jobs[0].folder, OutputShard(tuple(steps), file_name=file_name))


@pytest.mark.parametrize("budget_bytes", [1 << 30, 0])
def test_joined_weights_of_a_shard_are_read_once(
    budget_bytes: int,
    plan_of: Callable[..., BundlePlan],
    queue: DiskQueue,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where they fit into memory; anyhow they are as in shards of their own."""
    plan, recorded, opened = plan_of(), dict[str, ShardFacts](), list[str]()

    def counted(kind: type[Any]) -> Callable[..., Any]:
        return lambda info, *given: (opened.append(info.name), kind(info, *given))[1]

    monkeypatch.setattr(module, "TensorStream", counted(TensorStream))
    monkeypatch.setattr(read_twice, "TensorReader", counted(TensorReader))
    (gate, up), room = GATE_AND_UP, Resources(budget_bytes, "cpu")
    resources = resources_of(plan, queue, transform=room)
    run([joined_job(plan, up, [gate])], recorded.__setitem__, resources)
    every = [*GATE_AND_UP, *(f"{name}_scale_inv" for name in GATE_AND_UP)]
    again = every if budget_bytes == 0 else []
    assert sorted(opened) == sorted([*every, "model.norm.weight", *again])
    together = recorded.pop(up)
    for name in GATE_AND_UP:
        run([joined_job(plan, name, [])], recorded.__setitem__, resources)
        alone = recorded.pop(name)
        assert alone.facts.items() <= together.facts.items()
        assert (alone.xxh3_128 or {}).items() <= (together.xxh3_128 or {}).items()


@pytest.mark.parametrize(
    ("uses_torch", "device", "alone"),
    [(False, "cpu", False), (True, "cpu", True), (False, "cuda", True)],
)
def test_transforms_have_what_they_need_and_their_facts_are_recorded(
    uses_torch: bool,
    device: str,
    alone: bool,
    plan_of: Callable[..., BundlePlan],
    queue: DiskQueue,
    output: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels of the device; torch's threads are the workers' until the run ends."""
    loaded, threads = list[str](), list[str]()

    @contextmanager
    def one_torch_thread() -> Iterator[None]:
        threads.append("begin")
        yield
        threads.append("end")

    monkeypatch.setattr(module, "load_kernels", loaded.append)
    monkeypatch.setattr(torch_threads, "one_torch_thread", one_torch_thread)
    plan, recorded = plan_of(), dict[str, ShardFacts]()
    resources = resources_of(plan, queue, transform=Resources(12_345, device))
    run([transformed(plan, Doubled(uses_torch))], recorded.__setitem__, resources)
    assert (loaded, threads) == ([device], ["begin", "end"] if alone else [])
    path = output / "main/x.safetensors"
    digests = checksums_of(path)
    assert digests["twin 1"] == digests["twin 2"] == digests["model.norm.weight"]
    facts = ShardFacts(path.stat().st_size, None, digests, {"twin 1": {"error": 0.5}})
    assert recorded == {"main/x": facts}
    assert list(recorded["main/x"].xxh3_128 or ()) == ["twin 1", "twin 2", "model.norm.weight"]
    run(plan.jobs[:1], lambda *_: None, resources)  # nothing but copies
    assert loaded == [device]


def test_a_transform_that_writes_too_little_is_a_fault_of_ours(
    plan_of: Callable[..., BundlePlan], queue: DiskQueue, output: Path
) -> None:
    plan = plan_of()
    resources = resources_of(plan, queue, transform=Resources(12_345, "cpu"))
    with pytest.raises(AssertionError, match="twin 2: 0 bytes written"):
        run([transformed(plan, Doubled(short=True))], pytest.fail, resources)
    assert left_in(output) == set()


def test_torch_has_one_thread_for_a_while() -> None:
    before = torch.get_num_threads()
    with one_torch_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


DIGESTS = {"a": "0" * 32, "b": "1" * 32}
STEPS = tuple(copy_step(OutputTensor(name, DType.U8, (4,))) for name in DIGESTS)
WRITTEN = ShardFacts(10, None, DIGESTS, {"a": {"error": 0.5}})


@pytest.mark.parametrize(
    ("facts", "made"),
    [
        (WRITTEN, True),
        (replace(WRITTEN, facts={}), True),
        (replace(WRITTEN, size_bytes=11), False),
        (replace(WRITTEN, link="hardlink"), False),
        (replace(WRITTEN, xxh3_128=None), False),
        (replace(WRITTEN, xxh3_128={"a": "0" * 32}), False),
        (replace(WRITTEN, xxh3_128=DIGESTS | {"c": "2" * 32}), False),
        (replace(WRITTEN, facts={"c": {}}), False),
        (None, False),
    ],
)
def test_a_shard_that_was_written_is_made_if_it_is_as_recorded(
    facts: ShardFacts | None, made: bool, tmp_path: Path
) -> None:
    job = ShardJob("main/x", tmp_path, OutputShard(STEPS, file_name="x"))
    finished = {"main/y": WRITTEN} | ({} if facts is None else {"main/x": facts})
    assert not is_made(job, finished)
    (tmp_path / "x").write_bytes(bytes(10))
    assert is_made(job, finished) is made
    (tmp_path / "x").unlink()
    (tmp_path / "x").mkdir()
    assert not is_made(job, finished)


@pytest.mark.parametrize("checked", [False, True])
def test_a_shard_that_was_linked_is_made_if_it_is_as_recorded(
    checked: bool, pristine: Path, tmp_path: Path, plan_of: Callable[..., BundlePlan]
) -> None:
    source = plan_of().checkpoint.shards[0]
    shard = OutputShard(STEPS, source, Link.HARDLINK, checked=checked, file_name="x")
    job = ShardJob("main/x", tmp_path, shard)
    (tmp_path / "x").write_bytes(bytes(10))
    assert job.read_bytes == (8 if checked else 0)
    for link in ("hardlink", "reflink", None):
        for digests in (DIGESTS, None, {}):
            facts = ShardFacts(10, link, digests)
            right = link == "hardlink" and bool(digests) is checked
            assert is_made(job, {"main/x": facts}) is right
