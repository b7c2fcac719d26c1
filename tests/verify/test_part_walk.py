"""Levels files and weights read every byte once, the source's beside the bundle's, and what they
find does not depend on how a weight is cut into pieces."""

from __future__ import annotations

import math
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import xxhash

from cases import run_program
from faults import planting
from faults.small_model import CONFIG, write_dense, write_fp8, write_row
from mtp_checkpoints.quantization.stored import stored_model
from mtp_checkpoints.sources.disk_queue import BLOCK_BYTES, DiskQueue
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_checkpoints.weights.weight_values import WeightOnDisk, weights_on_disk
from mtp_export.progress import silent
from mtp_export.verify.evidence.part_walk import PartWalk, WalkPlan
from mtp_export.verify.weights import comparison


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model in bf16, the same in fp8, and a bundle of that in int8."""
    folder = tmp_path_factory.mktemp("bundles")
    source = write_fp8(write_dense(folder / "dense"), folder / "source")
    write_row(source, folder / "int8", "int8")
    return folder


def weights_of(folder: Path) -> tuple[Checkpoint, list[WeightOnDisk]]:
    checkpoint = Checkpoint.open(folder)
    return checkpoint, weights_on_disk(stored_model(checkpoint.config), checkpoint.tensors)


def walk(plan: WalkPlan, block_bytes: int) -> PartWalk:
    with DiskQueue(4, block_bytes) as queue:
        return plan.run(2, queue, silent)


@pytest.mark.parametrize("folder", ["int8/main", "source/main", "dense"])
def test_facts_are_those_of_the_whole_weight(bundles: Path, folder: str) -> None:
    checkpoint, weights = weights_of(bundles / folder)
    found = walk(WalkPlan([(weight, None) for weight in weights], []), 4 << 20)
    assert [facts.weight for facts in found.facts] == weights
    for facts in found.facts:
        values = facts.weight.encoded(0, facts.weight.rows).dequantize()
        assert facts.statistics.elements == values.numel()
        assert facts.statistics.low == float(values.min())
        assert facts.statistics.high == float(values.max())
    tensors = {tensor.name for weight in weights for tensor in weight.tensors}
    assert found.checksums.keys() == tensors
    hashed = walk(WalkPlan([], [checkpoint.tensors[name] for name in tensors]), 64 << 10)
    assert (
        hashed.checksums
        == found.checksums
        == {name: checksum_of(checkpoint, name) for name in tensors}
    )


def test_a_weight_of_many_pieces(tmp_path: Path) -> None:
    """Larger than the piece that is read at once, in each form, and compared with its source."""
    config = CONFIG | {"vocab_size": 12_000, "hidden_size": 512}
    dense = write_dense(tmp_path / "dense", config=config)
    checkpoint, weights = weights_of(dense)
    weight = next(one for one in weights if one.name == "model.embed_tokens.weight")
    assert weight.size_bytes > 2 * BLOCK_BYTES
    facts = walk(WalkPlan([(weight, weight)], [], {weight.name: None}), BLOCK_BYTES).facts[0]
    values = weight.encoded(0, weight.rows).dequantize()
    assert facts.checksums == {weight.name: checksum_of(checkpoint, weight.name)}
    assert facts.statistics.elements == values.numel()
    assert math.isclose(facts.statistics.square_sum, float(values.double().square().sum()))
    squares, note = values[:256].square(), facts.note
    assert note is not None and note.rows == pytest.approx(squares.mean(1).tolist())
    assert note.columns == pytest.approx(squares.mean(0).tolist()) and note.answers == ()
    copy = shutil.copytree(dense, tmp_path / "copy")
    other = next(one for one in weights_of(copy)[1] if one.name == weight.name)
    for damaged in (False, True):
        if damaged:
            place = other.tensors[0].offset_bytes + other.size_bytes - 1
            planting.flip_a_byte(Path(str(other.tensors[0].path)), place)
        against = walk(WalkPlan([(other, weight)], []), BLOCK_BYTES).facts[0].against
        assert against is not None and against.equal is not damaged


def test_every_byte_is_read_once(bundles: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checksums, statistics and the comparison share one walk, with the source and without. Beside
    it are samples: of main for its identity, of an MTP part for blocks of zeros and beside main
    layers. Weights that lie below others of their role are read again, of which there are none
    here."""
    monkeypatch.setattr(comparison, "_BELOW_DB", math.inf)
    read: Counter[str] = Counter()
    many, few = os.preadv, os.pread

    def counted(descriptor: int, buffers: Any, *where: int) -> int:
        count = many(descriptor, buffers, *where)
        is_try = len(where) > 1 and count < sum(map(len, buffers))  # of a cache that has not all
        read[os.readlink(f"/proc/self/fd/{descriptor}")] += 0 if is_try else count
        return count

    def counted_few(descriptor: int, length: int, start: int) -> bytes:
        data = few(descriptor, length, start)
        if start > 8:  # a header's bytes, and their number before them, are no tensor's
            read[os.readlink(f"/proc/self/fd/{descriptor}")] += len(data)
        return data

    monkeypatch.setattr(os, "preadv", counted)
    monkeypatch.setattr(os, "pread", counted_few)
    for words in (["files"], ["weights"], ["weights", "--source", bundles / "source"]):
        read.clear()
        outcome = run_program("verify", bundles / "int8", "--stream", "--quiet", "--level", *words)
        assert outcome.code == 0, outcome.err
        sources = [bundles / "source"] if len(words) == 3 else []
        for folder in [bundles / "int8", *sources]:
            for part in ("main", "mtp"):
                tensors = Checkpoint.open(folder / part).tensors.values()
                wanted = sum(tensor.size_bytes for tensor in tensors)
                shards = (folder / part).glob("*.safetensors")
                found = sum(read[str(shard)] for shard in shards)
                times = 0 if folder in sources else {"main": 1, "mtp": 2}[part]
                samples = times * wanted  # all of matrices this small
                assert wanted <= found <= wanted + samples


def checksum_of(checkpoint: Checkpoint, name: str) -> str:
    tensor = checkpoint.tensors[name]
    with Path(str(tensor.path)).open("rb") as file:
        file.seek(tensor.offset_bytes)
        return xxhash.xxh3_128(file.read(tensor.size_bytes)).hexdigest()
