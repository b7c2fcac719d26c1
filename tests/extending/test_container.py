"""A new container is one file and one line in CONTAINERS: nothing else knows it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import WHOLE_TILES, export, make_checkpoint, quantize, read_json, run_program
from mtp_checkpoints.containers import CONTAINERS
from mtp_checkpoints.containers.base import CONFIG_NAME, FileLayout, Opened, ShardHeader, TensorInfo
from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.sources.byte_source import ByteFile, ByteSource
from mtp_checkpoints.sources.strict_json import parsed_json_object
from mtp_checkpoints.tensors.bundle_folder import open_checkpoint
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_checkpoints.tensors.tensor_reader import read_rows
from mtp_export.bundle.build import run_bundle
from mtp_export.bundle.export import plan_export
from mtp_export.bundle.options import BundleOptions
from mtp_export.inspection import inspect
from mtp_export.plan import PartPlan, number_shards
from mtp_runtime import LLM, SamplingParams

PAIR = ("--base-quant", "a8w8_fp8", "--mtp-quant", "a8w8_fp8")
MAGIC = b"TOY!"
ALIGNMENT = 64  # of every tensor, as in GGUF: with bytes of none between them
NAMES = {"F32": "f32", "BF16": "bf16", "F8_E4M3": "e4m3"}
DTYPES = {name: DType[dtype] for dtype, name in NAMES.items()}


@dataclass(frozen=True)
class Toy:
    """Files of magic bytes, a length, JSON, and aligned tensors; the first may hold the config."""

    name: str = "toy"
    title: str = "*.toy"
    index_name: None = None

    def probe(self, source: ByteSource) -> bool:
        return any(name.endswith(".toy") for name in source.names())

    def open(self, source: ByteSource) -> Opened:
        names = sorted(name for name in source.names() if name.endswith(".toy"))
        heads = [self._head(source.file(name)) for name in names]
        raw = json.dumps(heads[0][1]["config"]).encode()
        if raw == b"null":
            raw = source.read(CONFIG_NAME)
        config = parsed_json_object(source.path / CONFIG_NAME, raw)
        return Opened(
            config=config,
            config_sha256=hashlib.sha256(raw).hexdigest(),
            shards=tuple(shard for shard, _ in heads),
            files=source,
        )

    def _head(self, file: ByteFile) -> tuple[ShardHeader, dict[str, Any]]:
        with closing(file.open()) as opened:
            length = int.from_bytes(opened.read(4, 8), "little")
            raw = opened.read(8, 8 + length)
            head = json.loads(raw)
            tensors = [
                TensorInfo(name, DTYPES[dtype], tuple(shape), file, start, stop - start)
                for name, (dtype, shape, start, stop) in head["tensors"].items()
            ]
            header = ShardHeader(
                container=self.name,
                file=file,
                size_bytes=opened.size_bytes,
                version=opened.version,
                header_sha256=hashlib.sha256(raw).hexdigest(),
                tensors=tuple(tensors),
            )
            return header, head

    def shard_name(self, number: int, count: int) -> str:
        return f"{number}-of-{count}.toy"

    def layout(
        self, tensors: Sequence[OutputTensor], config: Mapping[str, Any] | None = None
    ) -> FileLayout:
        sizes = [-(-tensor.size_bytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
        begin = 0
        while True:  # offsets are from the start of the file, which their digits move
            starts = [begin]
            for size in sizes:
                starts.append(starts[-1] + size)
            places = {
                tensor.name: range(start, start + tensor.size_bytes)
                for tensor, (start, _) in zip(tensors, pairwise(starts), strict=True)
            }
            entries = {
                tensor.name: (
                    NAMES[tensor.dtype],
                    tensor.shape,
                    places[tensor.name].start,
                    places[tensor.name].stop,
                )
                for tensor in tensors
            }
            raw = json.dumps({"config": config, "tensors": entries}).encode()
            head = MAGIC + len(raw).to_bytes(4, "little") + raw
            if len(head) <= begin:
                return FileLayout(head, places, starts[-1])
            begin = -(-len(head) // ALIGNMENT) * ALIGNMENT

    def index(self, shards: Mapping[str, Sequence[OutputTensor]]) -> dict[str, Any]:
        raise AssertionError("these files have no index")


TOY = Toy()


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("released") / "released", WHOLE_TILES)


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The container in the registry."""
    monkeypatch.setitem(CONTAINERS, TOY.name, TOY)


@pytest.fixture
def source(released: Path, tmp_path: Path) -> Path:
    """The same as one file, its config inside."""
    folder = tmp_path / "toy-source"
    folder.mkdir()
    checkpoint = Checkpoint.open(released)
    stored = checkpoint.tensors.values()
    layout = TOY.layout([OutputTensor(t.name, t.dtype, t.shape) for t in stored], checkpoint.config)
    with (folder / "model.toy").open("wb") as file:
        file.truncate(layout.size_bytes)
        file.write(layout.head)
        for info in stored:
            file.seek(layout.places[info.name].start)
            file.write(bytes_of(checkpoint.tensor(info.name)))
    for path in released.glob("*token*"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def contents(place: Path) -> Iterator[tuple[str, str, tuple[int, ...], bytes]]:
    """All tensors of a checkpoint or a bundle, in the order of their names."""
    for name, info in sorted(open_checkpoint(place).tensors.items()):
        rows = read_rows(info, 0, info.shape[0] if info.shape else 1)
        yield name, info.dtype, info.shape, bytes_of(rows)


def test_a_container_from_outside_is_read(source: Path, released: Path, tmp_path: Path) -> None:
    """Inspected, exported, quantized, verified and generated from as the same in safetensors is."""
    assert not inspect(source).problems
    assert inspect(source).amounts == inspect(released).amounts
    exported, quantized = tmp_path / "exported", tmp_path / "quantized"
    assert export(source, exported, "--quiet").code == 0
    assert [*contents(exported)] == [*contents(released)] == [*contents(source)]
    for folder, output in ((released, tmp_path / "expected"), (exported, quantized)):
        outcome = quantize(folder, output, *PAIR, "--quiet")
        assert outcome.code == 0, outcome.err
    assert [*contents(quantized)] == [*contents(tmp_path / "expected")]
    verified = run_program("verify", quantized, "--source", source, "--level", "weights")
    assert verified.code == 0, verified.out + verified.err
    assert generated(source) == generated(exported) == generated(released)


def generated(folder: Path) -> list[tuple[int, ...]]:
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    outputs = LLM(folder, speculate_method="mtp").generate([[5, 6, 7]], params)
    return [tuple(output.token_ids) for output in outputs]


def test_a_bundle_in_a_container_from_outside(released: Path, tmp_path: Path) -> None:
    """Streamed into aligned files by a run, whose gaps are zeros; then read and decoded from."""
    output = tmp_path / "bundle"
    plan = plan_export(BundleOptions(released, output))
    run_bundle(replace(plan, parts=tuple(map(in_toy, plan.parts))), lambda count: None)
    expected = {name: rest for name, *rest in contents(released)}
    for part in ("main", "mtp"):
        (shard,) = Checkpoint.open(output / part).shards
        assert shard.container == TOY.name
        raw = Path(str(shard.path)).read_bytes()
        position = 8 + int.from_bytes(raw[4:8], "little")
        for tensor in sorted(shard.tensors, key=lambda tensor: tensor.offset_bytes):
            assert tensor.offset_bytes % ALIGNMENT == 0
            assert not any(raw[position : tensor.offset_bytes])
            position = tensor.offset_bytes + tensor.size_bytes
        assert not any(raw[position:])
        for name, *rest in contents(output / part):
            assert rest == expected[name]
    manifest = read_json(output / "mtp_export.json")
    assert {*manifest["parts"]["main"]["shards"]} == {"1-of-1.toy"}
    assert generated(output) == generated(released)


def in_toy(part: PartPlan) -> PartPlan:
    """The part in one toy file, nothing of it linked."""
    steps = tuple(step for shard in part.shards for step in shard.steps)
    whole = replace(part.shards[0], steps=steps, linked_from=None)
    return replace(part, shards=number_shards([whole], TOY))
