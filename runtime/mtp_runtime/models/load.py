"""Loads models from bundles and checkpoint folders, by their descriptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mtp_checkpoints.errors import UnsupportedError, UsageError
from mtp_checkpoints.families import family_of
from mtp_checkpoints.families.base import weight_name
from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.single_experts import with_single_experts
from mtp_checkpoints.families.spec import Input, ModelSpec, MtpSpec
from mtp_checkpoints.formats import unquantized
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_kernels.cpu.memory import Arena
from mtp_kernels.cpu.torch_threads import torch_threads_for
from mtp_kernels.decoder import make_backend
from mtp_runtime.config import ModelConfig, check_count, check_flag
from mtp_runtime.layers.decoder_layer import DecoderLayer
from mtp_runtime.layers.embedding import Embedding
from mtp_runtime.layers.linear import Linear, dense
from mtp_runtime.layers.tensor_parallel import ALONE, GATHER, MODES, REDUCE, TensorParallel
from mtp_runtime.loading.devices import device_of, kind_of_device
from mtp_runtime.loading.kept_weights import KeptWeights, arena_of
from mtp_runtime.loading.ledger import Ledger
from mtp_runtime.loading.model_folders import no_module_to_draft_with, open_folders
from mtp_runtime.loading.progress import show_loading
from mtp_runtime.loading.same_files import require_same_files
from mtp_runtime.loading.weight_source import WeightSource
from mtp_runtime.models.around_layers import load_embedding, load_head, load_per_layer
from mtp_runtime.models.compiled import CompiledExecution, refuse_matrix_units, refuse_torch_layers
from mtp_runtime.models.execution import Execution, Head, Outputs, TorchExecution
from mtp_runtime.models.layer_loader import LayerLoader
from mtp_runtime.models.layer_types import config_for, load_layer
from mtp_runtime.models.memory_plan import MemoryPlan, planned
from mtp_runtime.models.model import Model, MtpModule
from mtp_runtime.models.offloaded import OffloadedExecution
from mtp_runtime.models.sharded import ShardedExecution
from mtp_runtime.parallel.group import LONE, Group

if TYPE_CHECKING:
    from mtp_kernels.decoder.compiled_cpu.expert_cache import ExpertCache

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ACTIVATIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True)
class LoadOptions:
    """Options of loading.

    dtype: of activations and dense weights; where compiled kernels run, of dense weights alone.
    activations: dtype of those that compiled kernels multiply stored weights with: bfloat16 those
    of bf16, int8, int4 and fp8, int8 those of int8 and int4.
    dequantize_at_load: have weights ready for compiled kernels, which multiply them as they are
    stored where they can, or dense where torch runs the layer; False leaves the stored ones to
    torch; None: True on a CPU alone.
    on_demand: routed experts, heads and embeddings are read when they are used.
    with_mtp False leaves the MTP modules out; requires_mtp: one that is not there is an error.
    contract None: as the MTP part's config.json records it, or else the family's.
    deterministic: refuse options and layers under which a row's bits may depend on its batch; in
    either dtype, as compiled kernels compute in float32 with dense weights of that dtype.
    max_model_len: tokens of the longest context; None: as many as the model's usual layers take.
    parallel_mode: way in which several ranks join their parts, of MODES; None: gather in float32,
    else reduce.
    mtp_folder: checkpoint with the MTP modules, where they are not beside the main part.
    static_graph: torch runs all layers, and no step waits for the host.
    expert_bytes: memory for routed experts of main layers, of which the others stay in their files
    until rows pick them; None: all of them are loaded.
    packed_cache: folder in which weights are kept as compiled kernels pack them.
    """

    device: str = "cpu"
    dtype: str = "float32"
    activations: str = "float32"
    deterministic: bool = False
    dequantize_at_load: bool | None = None
    on_demand: bool = False
    with_mtp: bool = True
    requires_mtp: bool = False
    contract: MtpContract | None = None
    max_model_len: int | None = None
    parallel_mode: str | None = None
    static_graph: bool = False
    mtp_folder: Path | None = None
    expert_bytes: int | None = None
    packed_cache: Path | None = None

    def __post_init__(self) -> None:
        for words, given, names in (
            ("The runtime does not compute in this dtype", self.dtype, DTYPES),
            ("There are no activations of this kind", self.activations, ACTIVATIONS),
        ):
            if given not in names:
                raise UnsupportedError(words, expected=" or ".join(names), found=given)
        if self.parallel_mode not in (None, *MODES):
            raise UsageError(
                "There is no parallel mode of this name",
                expected=" or ".join(MODES),
                found=self.parallel_mode,
            )
        check_flag("deterministic", self.deterministic)
        if self.deterministic and self.activations == "bfloat16":
            refuse_matrix_units()
        if self.dequantize_at_load is not None:
            check_flag("dequantize_at_load", self.dequantize_at_load)
        if self.max_model_len is not None:
            check_count("max_model_len", self.max_model_len, 0, 1 << 40)
        if kind_of_device(self.device) == "npu":
            self._check_npu()
        if self.packed_cache is not None and self.expert_bytes is not None:
            raise UsageError(
                "Packed weights are kept of models that are whole in memory",
                expected="one of --packed-cache, and --max-memory with less than all experts take",
            )
        needs_kernels = {
            "Only the compiled kernels encode activations": self.activations != "float32",
            "Only the compiled kernels are deterministic": self.deterministic,
            "Only the compiled kernels pack weights": self.packed_cache is not None,
        }
        for words, needed in needs_kernels.items():
            if needed and not self.compiled:
                raise UnsupportedError(
                    words,
                    expected="device cpu, weights dequantized at load, no static graph",
                    found=f"{self.device}, dequantize_at_load {self.keeps_dense}, "
                    f"static_graph {self.static_graph}",
                )

    def _check_npu(self) -> None:
        """Refuse what an NPU does not compute: attention in 32 bits, products with stored codes."""
        if self.dtype != "bfloat16":
            raise UnsupportedError(
                "Attention on an NPU computes in 16 bits",
                expected="dtype bfloat16",
                found=self.dtype,
                todo="Add --dtype bfloat16, or use device cpu",
            )
        if self.on_demand:
            raise UnsupportedError(
                "Weights that are read when they are used are expanded where they are multiplied",
                expected="device cpu or cuda",
                found=self.device,
            )

    @property
    def compiled(self) -> bool:
        """True where the compiled kernels run the model, False where torch does."""
        return self.device == "cpu" and self.keeps_dense and not self.static_graph

    @property
    def groups_experts(self) -> bool:
        """True where the routed experts of a layer are multiplied in one call."""
        return self.static_graph or kind_of_device(self.device) == "cuda"

    @property
    def keeps_dense(self) -> bool:
        """True where quantized weights are dequantized when they are loaded."""
        return self.device == "cpu" if self.dequantize_at_load is None else self.dequantize_at_load

    def parallel(self, group: Group) -> TensorParallel:
        """Return how the ranks of a group join their parts."""
        usual = GATHER if self.dtype == "float32" else REDUCE
        return TensorParallel(group, self.parallel_mode or usual)

    def execution(self, group: Group = LONE, arena: Arena | None = None) -> Execution:
        """Return a new backend for the parts of a model. arena: memory of what it packs."""
        if not self.compiled:
            return TorchExecution()
        dtype, activations = DTYPES[self.dtype], ACTIVATIONS[self.activations]
        backend = make_backend(dtype=dtype, activations=activations, arena=arena)
        if group.is_one:
            return CompiledExecution(backend)
        return ShardedExecution(backend, parallel=self.parallel(group))

    @property
    def computed_dtype(self) -> torch.dtype:
        """Dtype of activations, and of the weights that are loaded for an execution."""
        return torch.float32 if self.compiled else DTYPES[self.dtype]


@dataclass(frozen=True)
class Loaded:
    """A model ready to run, the ledger of its tensors, and the folder of its tokenizer.

    parallel: the ranks that divide it, and how they join their parts. announced_mtp_layers: those
    that its config.json counts, loaded or not. expert_cache: that of routed experts which do not
    all fit into memory.
    """

    model: Model
    ledger: Ledger
    folder: Path
    parallel: TensorParallel = ALONE
    announced_mtp_layers: int = 0
    expert_cache: ExpertCache | None = None


@dataclass(frozen=True)
class OpenedModel:
    """A bundle or checkpoint whose files were compared with config.json, and what loads its parts:
    no tensor is read before a method is called, each of which loads what it returns.

    contract is None where the MTP modules are not wanted. folder is that of the main part.
    """

    source: WeightSource
    spec: ModelSpec
    config: ModelConfig
    contract: MtpContract | None
    folder: Path

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """The folders that were opened."""
        parts = self.source.owners.values()
        return tuple({str(part.checkpoint.path): part.checkpoint for part in parts}.values())

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensors that are stored for the model."""
        return self.source.size_bytes(with_mtp=self.contract is not None)

    def memory_plan(self, options: LoadOptions) -> MemoryPlan:
        """Plan its memory by headers alone."""
        dense = DTYPES[options.dtype] if options.keeps_dense else None
        with_mtp = self.contract is not None and self.source.has_mtp
        positions = self.config.max_positions
        plan = planned(self.source, self.spec, dense, with_mtp=with_mtp, max_positions=positions)
        if options.expert_bytes is None or plan.experts is None:
            return plan
        return plan.with_slots(options.expert_bytes // plan.experts.slot_bytes)

    def kept_weights(self, options: LoadOptions, group: Group) -> KeptWeights:
        """Return where weights are kept as they are packed with options for a rank (IoError)."""
        assert options.packed_cache is not None, "asked for"
        parts = options.dtype, options.activations, options.with_mtp, options.mtp_folder
        ranks = options.max_model_len, group.split, options.parallel(group).mode
        how = f"{parts} {ranks}"
        return KeptWeights.of(options.packed_cache, self.folder, self.checkpoints, how)

    def described_by(self, config: Mapping[str, Any]) -> OpenedModel:
        """Return the same tensors as another config.json describes them, by which their names and
        shapes are the same. Raises what family_of and the runtime raise for it."""
        spec = family_of(config, self.source.owners)
        return replace(self, spec=spec, config=config_for(spec, self.config.max_positions))

    @cached_property
    def loader(self) -> LayerLoader:
        """Loader of the model's layers."""
        return LayerLoader(self.source, self.spec.facts, self.config.max_positions)

    def model(
        self, execution: Execution, layers: int | None = None, of_main: Execution | None = None
    ) -> Model:
        """Load the model, with its first `layers` main layers where that is given, and with its
        MTP modules where there is a contract for them. of_main: another execution of main layers.
        """
        spec, contract, loader = self.spec, self.contract, self.loader
        embedding, head = load_embedding(loader, spec), load_head(loader, spec, execution)
        count = self.config.layers if layers is None else layers
        main = (of_main or execution).layers(map(self.layer, range(count)))
        model = Model(self.config, embedding, main, head, per_layer=load_per_layer(loader, spec))
        if contract is None or not self.source.has_mtp:
            return model
        modules = (self.mtp_module(model, mtp, contract) for mtp in spec.mtp)
        return replace(model, mtp_modules=tuple(modules))

    def layer(self, index: int) -> DecoderLayer:
        """Load one main layer."""
        return load_layer(self.loader, self.spec.layers[index])

    def mtp_module(self, main: Model, mtp: MtpSpec, contract: MtpContract) -> MtpModule:
        """Load one MTP layer; embedding and head are the main model's own where they are equal."""
        own, of_main = mtp.modules.embedding, weight_name(self.spec.embedding)
        embedding = main.embedding
        if own is not None and not self.source.is_tied(weight_name(own), of_main):
            embedding = self.source.embedding(weight_name(own))
        head = replace(main.head, outputs=self._mtp_outputs(main, mtp))
        return self.mtp_layer(mtp, embedding, head=head, contract=contract)

    def mtp_layer(
        self, mtp: MtpSpec, embedding: Embedding, *, head: Head, contract: MtpContract
    ) -> MtpModule:
        """Load what an MTP layer has beside an embedding and a head, of which the norm is its
        own."""
        names, loader = mtp.modules, self.loader
        assert names.head_norm is not None, "as the runtime's models have it"
        return MtpModule(
            embedding=embedding,
            embedding_norm=loader.norm(names.embedding_norm),
            hidden_norm=loader.norm(names.hidden_norm),
            projection=self._projection(mtp),
            layer=load_layer(loader, mtp.layer),
            head=replace(head, norm=loader.norm(names.head_norm)),
            contract=contract,
            usual_contract=self.spec.usual_contract,
        )

    def _projection(self, mtp: MtpSpec) -> Linear:
        """Load an MTP layer's projection of [embedding | hidden state], in this order."""
        source, module = self.source, mtp.modules.projection
        assert module is not None, "as the runtime's models have it"
        if mtp.inputs == (Input.EMBEDDING, Input.HIDDEN):
            return source.linear(module)
        matrix = dense(source.weight(module), source.dtype)
        swapped = torch.cat(matrix.chunk(2, dim=1)[::-1], dim=1)
        return Linear.build(unquantized(swapped), source.dtype, source.keep_dense)

    def _mtp_outputs(self, main: Model, mtp: MtpSpec) -> Outputs:
        if mtp.own_head is not None:
            return Outputs(self.source.head(mtp.own_head), main.execution)
        own = mtp.modules.head
        if own is None or self.source.is_tied(weight_name(own), weight_name(self.spec.head)):
            return main.head.outputs
        return Outputs(self.source.head(own), main.execution)


def load_model(
    path: Path, options: LoadOptions, group: Group = LONE, *, cache_tokens: int = 0
) -> Loaded:
    """Load a bundle or a checkpoint folder, tensor by tensor; every rank calls this, and loads its
    own part. cache_tokens: those that are cached beside it.

    Raises ResourceError for what does not fit into memory, InvalidInputError for tensors that
    contradict config.json, or files in which ranks differ, UnsupportedError for a model that the
    runtime does not compute, or not deterministically where that is asked for.
    """
    opened = open_model(path, options, group, packs=options.compiled)
    require_same_files(opened.checkpoints, group)
    plan = opened.memory_plan(options) if opened.source.device.type == "cpu" else None
    if plan is not None:
        plan.check(opened.folder, cache_tokens)
    kept = None if options.packed_cache is None else opened.kept_weights(options, group)
    # What is read on demand is no part of loading.
    read_bytes = 0 if options.on_demand else opened.size_bytes // group.split.size
    if kept is not None and kept.size_bytes:
        read_bytes = kept.size_bytes
    with (
        show_loading(path, read_bytes) as advance,
        torch_threads_for(opened.config.hidden),
        arena_of(kept, advance) as arena,
    ):
        opened.source.advance = advance
        execution, offloaded = options.execution(group, arena), None
        if options.expert_bytes is not None:
            offloaded = OffloadedExecution.of(
                execution, opened.spec, options.expert_bytes, opened.source.readers
            )
        model = opened.model(execution, of_main=offloaded)
        model.make()  # on every rank, and of files that are there
        cache = None if offloaded is None else offloaded.opened_cache()
        opened.source.advance = int if cache is None else cache.note_read
    if options.deterministic:
        refuse_torch_layers(model, opened.folder)
    return Loaded(
        replace(model, draft_cost=None if plan is None else plan.step_cost),
        opened.source.ledger(),
        opened.folder,
        parallel=options.parallel(group),
        announced_mtp_layers=len(opened.spec.mtp),
        expert_cache=cache,
    )


def open_model(
    path: Path, options: LoadOptions, group: Group = LONE, *, packs: bool = False
) -> OpenedModel:
    """Open a bundle or a checkpoint folder. Raises as load_model does.

    packs: its linears stay in their files until compiled kernels pack them.
    """
    device = device_of(group.device(options.device))
    folders = open_folders(path, options.mtp_folder, with_mtp=options.with_mtp)
    source = WeightSource(
        owners={name: part for part in folders for name in part.stored.weights},
        dtype=options.computed_dtype,
        device=device,
        keep_dense=options.keeps_dense,
        on_demand=options.on_demand,
        contract=folders[-1].stored.family.mtp_contract,
        parallel=options.parallel(group),
        group_experts=options.groups_experts and group.is_one,
        packs=packs,
        once=options.on_demand or options.expert_bytes is not None,
    )
    if options.requires_mtp and not source.has_mtp:
        raise no_module_to_draft_with(path)
    main = folders[0].checkpoint
    spec = with_single_experts(family_of(main.config, source.owners))
    contract = (options.contract or source.contract) if options.with_mtp else None
    config = config_for(spec, options.max_model_len)
    return OpenedModel(source, spec, config, contract, main.folder)
