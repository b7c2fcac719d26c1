"""Weights out of checkpoint folders, one tensor at a time, with a ledger of what became of each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

import torch

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.dtypes import DType
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.families.base import TensorSpec
from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.formats import EncodedWeight, unquantized
from mtp_checkpoints.quantization.stored import StoredWeight
from mtp_checkpoints.tensors.tensor_reader import TensorReader
from mtp_checkpoints.weights.weight_values import WeightOnDisk
from mtp_checkpoints.weights.windows import Window, encoded_window, has_whole_units
from mtp_runtime.layers.embedding import Embedding, EmbeddingTable
from mtp_runtime.layers.grouped import GroupedExperts
from mtp_runtime.layers.linear import FilePart, Linear, UnreadWeight, Weight, Windowed, dense
from mtp_runtime.layers.moe import Experts, HeldExperts, Mlp
from mtp_runtime.layers.tensor_parallel import (
    ALONE,
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
)
from mtp_runtime.loading.copies import is_copy
from mtp_runtime.loading.ledger import Ledger
from mtp_runtime.loading.model_folders import ModelFolder
from mtp_runtime.loading.on_demand import (
    READERS,
    EmbeddingOnDemand,
    Modules,
    StoredExperts,
    WeightOnDemand,
)
from mtp_runtime.loading.progress import Advance
from mtp_runtime.parallel.group import Split

logger = logging.getLogger(__name__)


@dataclass
class WeightSource:
    """Tensors of the model by released name, whatever format they are stored in.

    The state of one loading: the names that were read so far, for the ledger. keep_dense: linears
    are dequantized when they are loaded. on_demand: routed experts, heads and embeddings are read
    when they are used. once: bytes are read past the page cache. contract is that of the MTP
    modules. values: tensors in place of stored weights, by their released names, as a training has
    them. parallel: the ranks that divide a model among them; each reads its own part.
    group_experts: routed experts are multiplied in one call. packs: linears stay in their files
    until compiled kernels pack them. advance takes the bytes that were just read.
    """

    owners: Mapping[str, ModelFolder]
    dtype: torch.dtype
    device: torch.device
    keep_dense: bool
    on_demand: bool
    contract: MtpContract
    loaded: set[str] = field(default_factory=set)
    tied: set[str] = field(default_factory=set)
    left_out: set[str] = field(default_factory=set)
    values: Mapping[str, torch.Tensor] = field(default_factory=dict)
    parallel: TensorParallel = ALONE
    group_experts: bool = False
    packs: bool = False
    once: bool = False
    advance: Advance = int

    @property
    def split(self) -> Split:
        """Division of the model over the ranks."""
        return self.parallel.group.split

    @property
    def has_mtp(self) -> bool:
        return any(self._spec(name).mtp_layer is not None for name in self._present)

    def size_bytes(self, *, with_mtp: bool) -> int:
        """Return the bytes of the stored tensors, with those of the MTP modules or without."""
        wanted = [n for n in self._present if with_mtp or self._spec(n).mtp_layer is None]
        return sum(tensor.size_bytes for n in wanted for tensor in self._on_disk(n).tensors)

    @property
    def on_disk(self) -> list[WeightOnDisk]:
        """Every weight that is stored."""
        return [self._on_disk(name) for name in self._present]

    def stored(self, name: str) -> StoredWeight:
        """Return the form that a weight is stored in."""
        return self.owners[name].stored.weights[name]

    def packed_form(self, name: str, columns: range | None = None) -> object:
        """Return what matrices have in common that kernels pack as this one is stored; None where
        it becomes dense. columns: those that are packed."""
        stored, size = self.stored(name), self._spec(name).shape[-1]
        columns = range(size) if columns is None else columns
        if stored.transposed or not has_whole_units(stored.format, columns, size):
            return None
        on_disk = self._on_disk(name)
        dtype, stored_format = on_disk.tensors[0].dtype, on_disk.stored.format
        if stored_format.has_row_codes:
            return stored_format
        return dtype if len(on_disk.tensors) == 1 and dtype is DType.BF16 else None

    def raw(self, name: str) -> torch.Tensor:
        """Return an unquantized tensor in its stored dtype, the values of a quantized one in
        float32, on the device.

        Raises InvalidInputError where there is none.
        """
        self._note(name)
        return self.values[name] if name in self.values else self._plain(name)

    def tensor(self, name: str) -> torch.Tensor:
        """Return an unquantized tensor in the dtype of the run."""
        return self.raw(name).to(self.dtype)

    def shape(self, module: str) -> tuple[int, ...]:
        """Return the shape [out, in] of a linear's weight."""
        return self._spec(f"{module}.weight").shape

    def weight(
        self, module: str, rows: range | None = None, columns: range | None = None
    ) -> Weight:
        """Return a linear's weight [out, in], or some rows and columns of it, in the format that it
        is stored in.

        Raises InvalidInputError for tensors that are missing or contradict each other.
        """
        name = f"{module}.weight"
        window = Window.of(self.shape(module), rows, columns)
        if self.packs and not self._is_in_memory(name):
            self._note(name)
            return self._unread(name, window)
        if window.shape == self.shape(module):
            return self.encoded(name)
        self._note(name)
        return self._cut(name, window)

    def encoded(self, name: str) -> EncodedWeight:
        """Return a tensor of the model in the format that it is stored in. Raises as weight."""
        self._note(name)
        return unquantized(self.values[name]) if name in self.values else self._encoded(name)

    def linear(
        self, module: str, rows: range | None = None, columns: range | None = None
    ) -> Linear:
        """Return a linear layer, or some rows and columns of one."""
        return Linear.build(self.weight(module, rows, columns), self.dtype, self.keep_dense)

    def embedding(self, name: str) -> Embedding:
        """Return token embeddings, of quantized ones their values where they are held."""
        if self.split.size > 1:
            module = name.removesuffix(".weight")
            vocab = self.shape(module)[0]
            local = self.weight(module, self.split.part(vocab)).dequantize(self.dtype)
            return VocabParallelEmbedding(local, vocab, self.parallel.group)
        if not self.on_demand:
            stored = self.raw(name)
            kept = stored if stored.dtype is torch.bfloat16 else stored.to(self.dtype)
            return EmbeddingTable(kept, self.dtype)
        self._note(name)
        return EmbeddingOnDemand(self._on_disk(name), self.dtype, self.device, self.readers)

    def head(self, module: str) -> Linear:
        """Return the linear layer of a head, the largest of a model."""
        name = f"{module}.weight"
        # Rows of a transposed matrix lie scattered over the file.
        if self.split.size > 1 or not self.on_demand or self.stored(name).transposed:
            return self.column_parallel(module)
        self._note(name)
        return Linear(WeightOnDemand(self._on_disk(name), self.device, self.readers))

    def column_parallel(self, module: str) -> Linear:
        """Return a linear layer that takes whole inputs; every rank has some of its outputs.

        Raises UnsupportedError for more ranks than outputs.
        """
        if self.split.size == 1:
            return self.linear(module)
        parts = self.split.nonempty_parts(self.shape(module)[0], "outputs")
        local, outputs = self.linear(module, parts[self.split.rank]), tuple(map(len, parts))
        return ColumnParallelLinear(
            local.weight, local.transposed, group=self.parallel.group, outputs=outputs
        )

    def row_parallel(self, module: str, inputs: Sequence[range]) -> Linear:
        """Return the last linear layer of half a decoder layer, which takes the local part of its
        input; inputs are every rank's columns of it (UnsupportedError as column_parallel)."""
        columns, rows, parallel = inputs[self.split.rank], None, self.parallel
        if self.split.size == 1:
            return self.linear(module, columns=columns)
        outputs = self.split.nonempty_parts(self.shape(module)[0], "outputs")
        if not parallel.reduces:
            columns = range(inputs[0].start, inputs[-1].stop)
            rows = outputs[self.split.rank]
        local = self.linear(module, rows, columns)
        return RowParallelLinear(
            local.weight,
            local.transposed,
            parallel=parallel,
            inputs=tuple(map(len, inputs)),
            outputs=tuple(map(len, outputs)),
        )

    def experts(
        self,
        names: Sequence[Modules],
        load: Callable[[Modules], Mlp],
        shared: tuple[Mlp, ...],
    ) -> Experts:
        """Return routed experts, which `load` loads, and shared ones behind them."""
        if not self.on_demand:
            held = HeldExperts((*map(load, names), *shared))
            grouped = GroupedExperts.of(held, len(names)) if self.group_experts else None
            return grouped or held
        in_mtp = self._spec(f"{names[0][-1]}.weight").mtp_layer is not None
        return StoredExperts(names, load, shared, self.readers, kept={} if in_mtp else None)

    def elsewhere(self, modules: Iterable[str]) -> None:
        """Note weights of linears that other ranks read (InvalidInputError for missing ones)."""
        for module in modules:
            self._note(f"{module}.weight")

    def is_tied(self, copy_name: str, main: str) -> bool:
        """Return True where a module's copy is absent, or equal to the main model's tensor but for
        rounding if it is stored in another precision."""
        if not self._has(copy_name):
            return True
        copy, original = map(self._on_disk, (copy_name, main))
        equal = is_copy(copy, original, self.readers, self.parallel.group)
        if equal:
            self.tied.add(copy_name)
        else:
            logger.warning("%s differs from %s: the MTP module uses its own", copy_name, main)
        return equal

    def leave_out(self, name: str) -> None:
        """Note a tensor that changes nothing in what the model computes."""
        self.left_out.add(name)

    def ledger(self) -> Ledger:
        """Return the account of all tensors (InvalidInputError for one that nothing explains)."""
        known = self.loaded | self.tied
        skipped = set(self._present) - known
        mtp_in_use = any(self._spec(name).mtp_layer is not None for name in known)
        unexplained = sorted(
            name
            for name in skipped - self.left_out
            if mtp_in_use or self._spec(name).mtp_layer is None
        )
        if unexplained:
            raise InvalidInputError(
                f"Tensor {unexplained[0]} was loaded by nothing ({len(unexplained)} like it)",
                expected="every tensor of the model in use",
            )
        return Ledger(*map(self._released_names, (self.owners, self.loaded, skipped, self.tied)))

    @cached_property
    def readers(self) -> ThreadPoolExecutor:
        """Threads that read what is used before all is loaded."""
        return ThreadPoolExecutor(READERS)

    @property
    def _present(self) -> list[str]:
        return [name for name in self.owners if self._has(name)]

    def _has(self, name: str) -> bool:
        part = self.owners.get(name)
        return part is not None and part.has(part.stored.weights[name])

    def _note(self, name: str) -> None:
        if not self._has(name):
            raise InvalidInputError(
                f"Tensor {name} is missing", todo="Get the checkpoint again, or correct config.json"
            )
        self.loaded.add(name)

    def _spec(self, name: str) -> TensorSpec:
        return self.stored(name).weight

    def _encoded(self, name: str) -> EncodedWeight:
        on_disk, device = self._on_disk(name), self._reading_device
        encoded = on_disk.stored.encoded([self._read(tensor, device) for tensor in on_disk.tensors])
        encoded = replace(encoded, origin=on_disk.tensors[0])
        return encoded if device == self.device else self._expanded(encoded)

    @property
    def _reading_device(self) -> torch.device:
        """Device to which weights are read: for NPUs the host, since most have no fp8."""
        return torch.device("cpu") if self.device.type == "npu" else self.device

    def _is_in_memory(self, name: str) -> bool:
        return name in self.values

    def _in_rows(self, name: str) -> bool:
        """Return True for a weight of which a file holds row after row."""
        stored = self.stored(name)
        return not stored.transposed and stored.format.word_rows <= 1

    def _unread(self, name: str, window: Window) -> UnreadWeight:
        def read(rows: range) -> Weight:
            first = window.rows.start
            return self._cut(
                name, Window(range(first + rows.start, first + rows.stop), window.columns)
            )

        form, whole = self.packed_form(name, window.columns), not self._in_rows(name)
        return UnreadWeight((FilePart(window.shape, read, whole=whole, form=form),))

    def _expanded(self, weight: Weight) -> EncodedWeight:
        return unquantized(dense(weight, self.dtype).to(self.device))

    def _cut(self, name: str, window: Window) -> Weight:
        if name in self.values:
            rows, columns = (slice(part.start, part.stop) for part in window)
            return unquantized(self.values[name][rows, columns])
        on_disk = self._on_disk(name)
        read = encoded_window(on_disk, window, self._read_window)
        encoded = replace(read.encoded, origin=on_disk.tensors[0])
        part = Windowed.of(replace(read, encoded=encoded))
        return part if self._reading_device == self.device else self._expanded(part)

    def _on_disk(self, name: str) -> WeightOnDisk:
        part = self.owners[name]
        weight = part.stored.weights[name]
        tensors = part.checkpoint.tensors
        return WeightOnDisk(weight, tuple(tensors[tensor.name] for tensor in weight.tensors))

    def _read(self, tensor: TensorInfo, device: torch.device) -> torch.Tensor:
        with TensorReader(tensor, once=self.once) as reader:
            values = reader.rows(0, tensor.shape[0] if tensor.shape else 1)
        self.advance(values.nbytes)
        return values.to(device)

    def _read_window(self, tensor: TensorInfo, rows: range, columns: range | None) -> torch.Tensor:
        with TensorReader(tensor, once=self.once) as reader:
            if columns is None:
                values = reader.rows(rows.start, rows.stop)
            else:
                values = reader.window(rows, columns)
        self.advance(values.nbytes)
        return values.to(self._reading_device)

    def _plain(self, name: str) -> torch.Tensor:
        on_disk = self._on_disk(name)
        if len(on_disk.tensors) > 1 or on_disk.tensors[0].dtype.is_packed:
            return self._encoded(name).dequantize(torch.float32)
        tensor = self._read(on_disk.tensors[0], self.device)
        return tensor.t() if on_disk.stored.transposed else tensor

    def _released_names(self, names: Iterable[str]) -> frozenset[str]:
        return frozenset(chain.from_iterable(map(self._released.__getitem__, names)))

    @cached_property
    def _released(self) -> dict[str, tuple[str, ...]]:
        return {name: self.stored(name).released_names for name in self.owners}
