"""Plan the loading of a released model by several ranks, or of the bundle that quantize makes of
it, from headers alone.

    python -m benchmarks.load_plan SCRATCH [--family NAME] [--scheme int4] [--ranks 8,16]
        [--mode reduce] [--gpu-memory 141e9]

Every rank's part is built as it would be on a GPU, of tensors without content. What each would
read is added up: every byte of a divided tensor is read by one rank, but for scales of blocks or
rows that several ranks share; small tensors are read by all. So is what each then holds, and the
cache that --gpu-memory leaves room for beside it, as --max-memory does.
"""

from __future__ import annotations

import argparse
import gc
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from benchmarks.make_bundle import SCHEMES, make_bundle
from benchmarks.make_checkpoint import make_released
from benchmarks.released import RELEASED
from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.dtypes import torch_dtype
from mtp_checkpoints.formats.base import EncodedWeight
from mtp_checkpoints.tensors.tensor_reader import read_rows
from mtp_checkpoints.weights.weight_values import WeightOnDisk
from mtp_checkpoints.weights.windows import Window
from mtp_runtime.layers.linear import Weight
from mtp_runtime.layers.tensor_parallel import MODES, REDUCE, TensorParallel
from mtp_runtime.loading.copies import own_pieces
from mtp_runtime.loading.weight_source import WeightSource
from mtp_runtime.memory import bytes_per_page, cache_tokens_beside
from mtp_runtime.models.load import LoadOptions, open_model
from mtp_runtime.parallel.group import Group, Split

Read = tuple[range, range]  # rows and columns; a vector has one column
PAGE_SIZE = 64


class PlannedWeight(EncodedWeight):
    """A weight whose tensors are without content, so that its codes cannot be expanded."""

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(self.shape, dtype=dtype or torch.float32, device=self.codes.device)


@dataclass
class PlannedSource(WeightSource):
    """Notes what is read, and returns tensors without content.

    constants: tensors that no element of their weight decides, by name. They are compared with it,
    and so read.
    """

    reads: dict[str, list[Read]] = field(default_factory=lambda: defaultdict(list))
    constants: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, source: WeightSource, parallel: TensorParallel) -> PlannedSource:
        given = {one.name: getattr(source, one.name) for one in fields(source)}
        fresh = {name: set[str]() for name in ("loaded", "tied", "left_out")}
        return cls(**given | fresh | {"device": torch.device("meta"), "parallel": parallel})

    @property
    def weights(self) -> tuple[WeightOnDisk, ...]:
        """Every weight that is stored."""
        return tuple(map(self._on_disk, self._present))

    def weight(
        self, module: str, rows: range | None = None, columns: range | None = None
    ) -> Weight:
        weight = super().weight(module, rows, columns)
        return PlannedWeight(**vars(weight)) if isinstance(weight, EncodedWeight) else weight

    def is_tied(self, own: str, main: str) -> bool:
        """Note that the ranks compare a copy with the main model's; it is read once together."""
        if self._has(own):
            self.tied.add(own)
            tensors = self._on_disk(own).tensors
            for constant in tensors[2:]:
                self._read(constant, self.device)
            for start, stop in own_pieces(self._on_disk(own), self.split):
                for tensor in tensors[:2]:  # codes and scales of rows
                    self._read_window(tensor, *Window.of(tensor.shape, range(start, stop)))
        return True

    def _on_disk(self, name: str) -> WeightOnDisk:
        weight = super()._on_disk(name)
        self.constants.update(tensor.name for tensor in weight.tensors[2:])
        return weight

    def _read(self, tensor: TensorInfo, device: torch.device) -> torch.Tensor:
        rows = range(tensor.shape[0] if tensor.shape else 1)
        columns = range(tensor.shape[1]) if len(tensor.shape) == 2 else None
        return self._read_window(tensor, rows, columns)

    def _read_window(self, tensor: TensorInfo, rows: range, columns: range | None) -> torch.Tensor:
        self.reads[tensor.name].append((rows, range(1) if columns is None else columns))
        if tensor.name in self.constants:
            return read_rows(tensor, rows.start, rows.stop)
        sizes = [len(part) for part in (rows, columns) if part is not None]
        shape = sizes if tensor.shape else []
        return torch.empty(shape, dtype=torch_dtype(tensor.dtype), device=self.device)


@dataclass(frozen=True)
class Held:
    """Bytes that a rank holds on its GPU: those of its part, and of each token in its cache.

    tokens: those that there is room for in the memory that was given.
    """

    weight_bytes: int
    token_bytes: int
    tokens: int


@dataclass(frozen=True)
class Plan:
    """Every weight of a checkpoint, and what each rank reads and then holds of it."""

    weights: tuple[WeightOnDisk, ...]
    reads: tuple[dict[str, list[Read]], ...]
    held: tuple[Held, ...]

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by its name on disk."""
        return {tensor.name: tensor for weight in self.weights for tensor in weight.tensors}

    def rank_bytes(self, rank: int, names: Iterable[str] | None = None) -> int:
        """Bytes that a rank reads, of all tensors or of some."""
        reads = self.reads[rank]
        names = reads if names is None else names
        return sum(bytes_of(self.tensors[name], reads.get(name, ())) for name in names)

    @property
    def replicated(self) -> list[str]:
        """Names of the tensors that every rank reads whole."""
        return [
            name
            for name, one in self.tensors.items()
            if all(bytes_of(one, reads.get(name, ())) == one.size_bytes for reads in self.reads)
        ]

    def times_read(self, name: str) -> tuple[int, int]:
        """Return how often the least and the most read element of a tensor is read, by all ranks
        together."""
        return coverage(
            shape_of(self.tensors[name]),
            [read for reads in self.reads for read in reads.get(name, ())],
        )


def shape_of(tensor: TensorInfo) -> tuple[int, int]:
    """Rows and columns; a vector has one column."""
    rows, columns, *_ = (*tensor.shape, 1, 1)
    return rows, columns


def bytes_of(tensor: TensorInfo, reads: Iterable[Read]) -> int:
    rows, columns = shape_of(tensor)
    each = tensor.size_bytes // (rows * columns)
    return sum(len(r) * len(c) * each for r, c in reads)


def coverage(shape: tuple[int, int], reads: Iterable[Read]) -> tuple[int, int]:
    """Return the least and the largest number of reads over the elements of a matrix."""
    reads = list(reads)
    cuts = [
        sorted({0, size} | {edge for read in reads for edge in (read[axis].start, read[axis].stop)})
        for axis, size in enumerate(shape)
    ]
    counts = [
        sum(row in r and column in c for r, c in reads)
        for row in cuts[0][:-1]
        for column in cuts[1][:-1]
    ]
    return min(counts), max(counts)


def planned(folder: Path, ranks: int, mode: str, gpu_bytes: int) -> Plan:
    """Plan the loading of a checkpoint or bundle in bfloat16 on GPUs of a size, rank by rank."""
    # What a GPU's part would be, but for the device, which need not be here.
    options = LoadOptions(dtype="bfloat16", dequantize_at_load=False, parallel_mode=mode)
    opened = open_model(folder, options)
    reads, held = [], []
    for rank in range(ranks):
        group = Group(Split(rank, ranks))
        source = PlannedSource.of(opened.source, options.parallel(group))
        model = replace(opened, source=source).model(options.execution(group))
        source.ledger()
        weights = held_bytes([model])
        page_bytes = bytes_per_page((model,), PAGE_SIZE)
        tokens = cache_tokens_beside(weights, gpu_bytes, page_bytes=page_bytes, page_size=PAGE_SIZE)
        reads.append(dict(source.reads))
        held.append(Held(weights, page_bytes // PAGE_SIZE, tokens))
    return Plan(source.weights, tuple(reads), tuple(held))


def held_bytes(roots: list[Any]) -> int:
    """Bytes of all tensors and arrays that some objects hold, however they do, each storage
    once."""
    storages: dict[StorageWeakRef | int, int] = {}
    seen, left = set[int](), list(roots)
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, type | ModuleType):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            storage = one.untyped_storage()
            storages[StorageWeakRef(storage)] = storage.nbytes()
        elif isinstance(one, np.ndarray):
            while isinstance(one.base, np.ndarray):
                one = one.base
            storages[one.ctypes.data] = one.nbytes
        elif isinstance(one, FunctionType):  # its module is no part of what is held
            left += one.__closure__ or ()
        else:
            left += gc.get_referents(one)
    return sum(storages.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--family", choices=RELEASED, default="deepseek_v3")
    parser.add_argument("--scheme", choices=SCHEMES, help="of a bundle; by default as released")
    parser.add_argument("--ranks", default="8,16")
    parser.add_argument("--mode", choices=MODES, default=REDUCE)
    parser.add_argument("--gpu-memory", type=float, default=141e9, help="bytes of each GPU")
    arguments = parser.parse_args()
    folder = arguments.scratch / arguments.family
    if not folder.exists():
        make_released(folder, arguments.family)
    if arguments.scheme:
        released, folder = folder, folder.with_name(f"{folder.name}-{arguments.scheme}")
        if not folder.exists():
            make_bundle(released, folder, arguments.scheme)
    for ranks in map(int, arguments.ranks.split(",")):
        plan = planned(folder, ranks, arguments.mode, int(arguments.gpu_memory))
        print(f"{ranks} ranks: {in_words(plan)}")


def in_words(plan: Plan) -> str:
    """What the ranks of a plan read and hold."""
    total = sum(tensor.size_bytes for tensor in plan.tensors.values())
    replicated = sum(plan.tensors[name].size_bytes for name in plan.replicated)
    each = [plan.rank_bytes(rank) for rank in range(len(plan.reads))]
    weights = [one.weight_bytes for one in plan.held]
    return (
        f"{min(each) / 1e9:.2f} to {max(each) / 1e9:.2f} GB each of {total / 1e9:.2f};"
        f" {replicated / 1e9:.2f} read by all; {sum(each) / 1e9:.2f} together;"
        f" {min(weights) / 1e9:.2f} to {max(weights) / 1e9:.2f} GB held as weights,"
        f" {plan.held[0].token_bytes} bytes per cached token,"
        f" room for {min(one.tokens for one in plan.held)} tokens"
    )


if __name__ == "__main__":
    main()
