"""Levels files and weights read every byte once, the source's beside the bundle's, and what they
find does not depend on how a weight is cut into pieces."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
import xxhash

from cases import run_program
from faults import planting
from faults.small_model import write_dense, write_fp8, write_row, write_target
from mtp_export.checkpoint.disk_queue import DiskQueue
from mtp_export.checkpoint.local_folder import OpenLocalFile
from mtp_export.checkpoint.reader import Checkpoint
from mtp_export.progress import silent
from mtp_export.schemes.formats import FORMATS, FormatOptions
from mtp_export.schemes.storage import Storage
from mtp_export.schemes.stored import stored_model
from mtp_export.schemes.weight_values import WeightOnDisk, weights_on_disk
from mtp_export.verify.evidence.part_walk import PartWalk, WalkPlan


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source and bundles of it: int8, and a draft of transposed weights."""
    folder = tmp_path_factory.mktemp("bundles")
    dense = write_dense(folder / "dense")
    source = write_fp8(dense, folder / "source")
    write_row(source, folder / "int8", "int8")
    write_target(dense, folder / "transposed", "paddlenlp")
    return folder


def weights_of(folder: Path) -> tuple[Checkpoint, list[WeightOnDisk]]:
    checkpoint = Checkpoint.open(folder)
    return checkpoint, weights_on_disk(stored_model(checkpoint.config), checkpoint.tensors)


def walk(
    plan: WalkPlan, block_bytes: int = 4 << 20, workers: int = 2
) -> PartWalk:
    with DiskQueue(4, block_bytes) as queue:
        return plan.run(workers, queue, silent)


def test_facts_are_those_of_the_whole_weight(bundles: Path) -> None:
    checkpoint, weights = weights_of(bundles / "int8/main")
    found = walk(WalkPlan([(weight, None) for weight in weights], []))
    assert [facts.weight for facts in found.facts] == weights
    for facts in found.facts:
        values = facts.weight.encoded(0, facts.weight.rows).dequantize()
        assert facts.statistics.elements == values.numel()
        assert facts.statistics.low == float(values.min())
        assert facts.statistics.high == float(values.max())
    for name, checksum in found.checksums.items():
        tensor = checkpoint.tensors[name]
        with tensor.path.open("rb") as file:  # type: ignore[attr-defined]
            file.seek(tensor.offset_bytes)
            data = file.read(tensor.size_bytes)
        assert checksum == xxhash.xxh3_128(data).hexdigest(), name


@pytest.mark.parametrize("level", ["files", "weights"])
def test_every_byte_is_read_once(
    bundles: Path, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checksums, statistics and the comparison share one walk, with the source and without."""
    read: Counter[Path] = Counter()
    original = OpenLocalFile.read_into

    def counted(self: OpenLocalFile, buffer: memoryview, start: int, end: int) -> slice:
        read[self._path] += end - start
        return original(self, buffer, start, end)

    monkeypatch.setattr(OpenLocalFile, "read_into", counted)
    for more in ([], ["--source", bundles / "source/main"] if level == "weights" else []):
        read.clear()
        outcome = run_program(
            "verify", bundles / "int8", "--level", level, "--stream", "--quiet", *more
        )
        assert outcome.code in (0, 7), outcome.err
        shards = list((bundles / "int8").glob("*/*.safetensors"))
        assert len(shards) > 1
        for shard in shards:
            tensors = sum(t.size_bytes for t in read_shard_tensors(shard))
            assert read[shard] == tensors, shard


def read_shard_tensors(shard: Path) -> list[object]:
    checkpoint = Checkpoint.open(shard.parent)
    return [t for t in checkpoint.tensors.values() if t.path == shard]
