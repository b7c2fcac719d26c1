"""Queue of a disk: how much is under way at once, what memory it lends, and its depth."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.dtypes import DType
from mtp_checkpoints.sources import disk_queue
from mtp_checkpoints.sources.direct_io import SLACK_BYTES
from mtp_checkpoints.sources.disk_queue import SMALL_BYTES, DiskQueue, disk_depth
from mtp_checkpoints.tensors.tensor_stream import TensorStream

BLOCK = 1 << 17
WAIT_SECONDS = 10


class SlowFile:
    """A file whose reads wait until they are let go; it notes how many do."""

    size_bytes, version = 1 << 30, 1

    def __init__(self) -> None:
        self.waiting = self.begun = 0
        self.closed = False
        self.go = threading.Semaphore(0)
        self.changed = threading.Condition()

    def read(self, start: int, end: int) -> bytes:
        raise NotImplementedError

    def read_into(self, buffer: memoryview, start: int, end: int) -> slice:
        assert not self.closed
        with self.changed:
            self.begun, self.waiting = self.begun + 1, self.waiting + 1
            self.changed.notify_all()
        assert self.go.acquire(timeout=WAIT_SECONDS)
        with self.changed:
            self.waiting -= 1
        return slice(0, end - start)

    def read_cached(self, buffer: memoryview, start: int, end: int) -> None:
        return None

    def close(self) -> None:
        assert not self.waiting, "a read is still under way"
        self.closed = True

    def wait_for(self, begun: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.begun >= begun, WAIT_SECONDS)


@dataclass(frozen=True)
class SlowSource:
    """The file of a tensor."""

    opened: SlowFile
    path: Path = Path("/slow")
    sha256: None = None

    def open(self, once: range | None = None) -> SlowFile:
        return self.opened


def tensor(file: SlowFile, blocks: int) -> TensorInfo:
    return TensorInfo("x", DType.U8, (blocks * BLOCK,), SlowSource(file), 0, blocks * BLOCK)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the memory that was made to be lent."""
    sizes: list[int] = []
    real = disk_queue.page_memory

    def page_memory(size_bytes: int) -> memoryview:
        sizes.append(size_bytes)
        return real(size_bytes)

    monkeypatch.setattr(disk_queue, "page_memory", page_memory)
    return sizes


def blocks_of(streams: list[TensorStream]) -> Iterator[object]:
    return zip(*(stream.blocks() for stream in streams), strict=True)


@pytest.mark.parametrize("depth", [1, 3, 8])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_memory_is_bounded_by_the_depth(depth: int, count: int, made: list[int]) -> None:
    """However fast the disk and slow the worker, and however many tensors are open."""
    file = SlowFile()
    file.go.release(10_000)
    with DiskQueue(depth, BLOCK) as queue, ExitStack() as opened:
        streams = [
            opened.enter_context(TensorStream(tensor(file, 40), queue)) for _ in range(count)
        ]
        assert sum(1 for _ in blocks_of(streams)) == 40
    assert file.begun == 40 * count
    assert len(made) <= depth + 2 * count
    assert set(made) == {BLOCK + SLACK_BYTES}


def test_reads_are_under_way_as_deep_as_the_queue_is() -> None:
    file = SlowFile()
    with DiskQueue(4, BLOCK) as queue, TensorStream(tensor(file, 40), queue) as stream:
        file.wait_for(4)
        assert file.waiting == 4
        file.go.release(100)
        assert sum(1 for _ in stream.blocks()) == 40


def test_several_streams_share_the_reads() -> None:
    """Blocks of one that are read and not used keep no other from reading one block at least."""
    first, second, third = SlowFile(), SlowFile(), SlowFile()
    for file in (first, second, third):
        file.go.release(100)
    with DiskQueue(4, BLOCK) as queue, ExitStack() as opened:
        early = opened.enter_context(TensorStream(tensor(first, 40), queue))
        first.wait_for(4)
        late = [opened.enter_context(TensorStream(tensor(f, 40), queue)) for f in (second, third)]
        for stream, file in zip(late, (second, third), strict=True):
            file.wait_for(1)
            assert len(next(stream.blocks())) == BLOCK
            file.wait_for(2)
        blocks = early.blocks()
        for _ in range(3):
            next(blocks)
        assert first.begun == 4, "the share of three streams is one block"
        next(blocks)
        first.wait_for(5)


def test_a_stream_that_ends_early_waits_for_its_reads() -> None:
    file = SlowFile()
    with DiskQueue(2, BLOCK) as queue:
        stream = TensorStream(tensor(file, 10), queue)
        file.wait_for(2)
        threading.Timer(0.05, lambda: file.go.release(100)).start()
        stream.__exit__()
        assert file.closed and file.begun == 2
        with TensorStream(tensor(SlowFile(), 1), queue) as another:
            assert another is not None, "what was under way counts no more"
            file.go.release(1)


def test_a_stream_that_has_ended_leaves_its_share_to_others() -> None:
    """One that ends early, and one whose bytes are all read."""
    for blocks_used in (1, 40):
        first, second = SlowFile(), SlowFile()
        first.go.release(100)
        with DiskQueue(4, BLOCK) as queue:
            stream = TensorStream(tensor(first, 40), queue)
            blocks = stream.blocks()
            for _ in range(blocks_used):
                next(blocks)
            if blocks_used == 1:
                stream.__exit__()
            with TensorStream(tensor(second, 40), queue):
                second.wait_for(4)
                second.go.release(100)
            if blocks_used > 1:
                stream.__exit__()


def test_streams_that_end_early_give_their_memory_back(made: list[int]) -> None:
    with DiskQueue(2, BLOCK) as queue:
        for _ in range(6):
            file = SlowFile()
            file.go.release(100)
            with TensorStream(tensor(file, 10), queue) as stream:
                next(stream.blocks())
                file.wait_for(3)
    assert len(made) <= 3


def test_threads_of_a_queue_say_what_they_do_and_end_with_it() -> None:
    before, file, go = set(threading.enumerate()), SlowFile(), threading.Event()

    def write() -> None:
        assert go.wait(WAIT_SECONDS)

    def names() -> set[str]:
        own = set(threading.enumerate()) - before
        return {thread.name.rpartition("_")[0] for thread in own}

    with DiskQueue(2, BLOCK) as queue, TensorStream(tensor(file, 1), queue):
        written = queue.write(write)
        file.wait_for(1)
        assert names() == {"disk-read", "disk-write"}
        file.go.release()
        go.set()
        written.result()
    assert not names()


def test_memory_that_is_lent_again_is_a_block_s() -> None:
    block = BLOCK + SLACK_BYTES
    with DiskQueue(1, BLOCK) as queue:
        sizes = (SMALL_BYTES - 1, SMALL_BYTES, block, block + 1)
        lent = [len(queue.lend(size)) for size in sizes]
        assert lent == [SMALL_BYTES - 1, block, block, block + 1]
        memory = queue.lend(block)
        queue.take_back(memory)
        assert queue.lend(SMALL_BYTES) is memory


def test_the_memory_of_a_run() -> None:
    """Of workers that each have a block of either of two tensors, the next of both, and one to be
    written; and of what is read ahead and written behind."""
    whole = disk_queue.BLOCK_BYTES + SLACK_BYTES
    with DiskQueue(16) as queue:
        assert len(queue.lend(queue.block_bytes)) == whole
    assert DiskQueue.memory_bytes(0, 0) == 0
    assert DiskQueue.memory_bytes(16, 0) == 32 * whole
    assert DiskQueue.memory_bytes(16, 3) == 47 * whole


def test_writes_wait_where_too_many_are_under_way() -> None:
    done, go = list[int](), threading.Semaphore(0)

    def write(number: int) -> None:
        assert go.acquire(timeout=WAIT_SECONDS)
        done.append(number)

    with DiskQueue(2, BLOCK) as queue:
        for number in range(2):
            queue.write(lambda number=number: write(number))
        third = threading.Thread(target=lambda: queue.write(lambda: write(2)))
        third.start()
        third.join(0.05)
        assert third.is_alive() and not done
        go.release(3)
        third.join(WAIT_SECONDS)
    assert sorted(done) == [0, 1, 2]


def test_small_and_huge_memory_is_not_kept(made: list[int]) -> None:
    with DiskQueue(1, BLOCK) as queue:
        for size in (100, BLOCK, 10 * BLOCK):
            for _ in range(2):
                memory = queue.lend(size)
                assert len(memory) >= size
                queue.take_back(memory)
    assert made == [100, 100, BLOCK + SLACK_BYTES, 10 * BLOCK, 10 * BLOCK]


def test_the_depth_of_a_device(tmp_path: Path) -> None:
    number = tmp_path.stat().st_dev
    own = tmp_path / f"{os.major(number)}:{os.minor(number)}"
    assert disk_depth(tmp_path, tmp_path / "none") == 32, "no block device"
    own.mkdir()
    assert disk_depth(tmp_path, tmp_path) == 16
    for name in ("sda", "sdb"):
        (own / "slaves" / name).mkdir(parents=True)
    assert disk_depth(tmp_path, tmp_path) == 32
    for name in ("a", "b", "c", "d"):
        (own / "slaves/sda/slaves" / name).mkdir(parents=True)
    assert disk_depth(tmp_path, tmp_path) == 64, "an array of arrays, and the most"


def test_devices_are_those_of_this_machine() -> None:
    known = [path for path in Path("/sys/dev/block").glob("*") if not list(path.glob("slaves/*"))]
    if not known:
        pytest.skip("no block device")

    number = SimpleNamespace(st_dev=os.makedev(*map(int, known[0].name.split(":"))))
    inside: Any = SimpleNamespace(stat=lambda: number)
    assert disk_depth(inside) == 16


class FileInMemory(SlowFile):
    """A file whose bytes need not be waited for."""

    def read_cached(self, buffer: memoryview, start: int, end: int) -> slice:
        return slice(0, end - start)


def test_small_reads_of_what_is_in_memory_take_no_other_thread() -> None:
    for size, reads in ((SMALL_BYTES - 1, 0), (SMALL_BYTES, 1)):
        file = FileInMemory()
        file.go.release()
        info = TensorInfo("x", DType.U8, (size,), SlowSource(file), 0, size)
        with DiskQueue(4, BLOCK) as queue, TensorStream(info, queue) as stream:
            assert sum(map(len, stream.blocks())) == size
        assert file.begun == reads
