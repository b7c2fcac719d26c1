"""Puts a DeepSeek-V3 together out of named tensors; only this file of the runtime names them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

from mtp_export.checkpoint.reader import CONFIG_NAME, Checkpoint, read_json_object
from mtp_export.errors import UnsupportedError
from mtp_export.schemes.formats import unquantized
from mtp_runtime.config import ModelConfig, MtpContract
from mtp_runtime.layers.linear import Linear, Weight, stack
from mtp_runtime.layers.mla import Mla
from mtp_runtime.layers.moe import Mlp, Moe, Router
from mtp_runtime.layers.norm import RmsNorm
from mtp_runtime.layers.rope import Rope, softmax_scale
from mtp_runtime.loading.weight_source import Ledger, WeightSource, open_source
from mtp_runtime.models.compiled import CompiledExecution
from mtp_runtime.models.deepseek_v3 import (
    DecoderLayer,
    DeepseekV3,
    Execution,
    Head,
    Layers,
    MtpModule,
    TorchExecution,
    TorchLayers,
)
from mtp_runtime.teacher_forcing import Setting

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class LoadOptions:
    """How weights are held.

    dtype: what activations and dense weights are. dequantize_at_load: keep quantized weights as
    dense ones; False keeps them as stored and dequantizes in every call. with_mtp False leaves the
    MTP module out. contract None is what the MTP part's config.json records, or else the family's.
    deterministic: refuse options under which a row's bits depend on its batch.
    """

    device: str = "cpu"
    dtype: str = "float32"
    deterministic: bool = False
    dequantize_at_load: bool = True
    with_mtp: bool = True
    contract: MtpContract | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UnsupportedError(
                "The runtime does not compute in this dtype",
                expected=" or ".join(DTYPES),
                found=self.dtype,
            )
        if self.deterministic and not self.compiled:
            raise UnsupportedError(
                "Only the compiled kernels are deterministic",
                expected="device cpu, dtype float32, weights dequantized at load",
                found=f"{self.device}, {self.dtype}, dequantize_at_load {self.dequantize_at_load}",
            )

    @property
    def compiled(self) -> bool:
        """Whether the compiled kernels run the model; else torch does."""
        return self.device == "cpu" and self.dtype == "float32" and self.dequantize_at_load


@dataclass(frozen=True)
class Loaded:
    """A model ready to run, what became of its tensors, and the folder of its tokenizer."""

    model: DeepseekV3
    ledger: Ledger
    folder: Path


def load_model(path: Path, options: LoadOptions) -> Loaded:
    """Load a bundle or a checkpoint folder, streaming tensor by tensor.

    Raises InvalidInputError for tensors that contradict config.json, UnsupportedError for a model
    that the runtime does not compute.
    """
    device = _device(options.device)
    source, main = open_source(path, DTYPES[options.dtype], device, options.dequantize_at_load)
    contract = options.contract or recorded_contract(path, main)
    config = ModelConfig.from_config(main.config)
    model = _Builder(source, config, replace(options, contract=contract)).model()
    return Loaded(model, source.ledger(), main.folder)


@dataclass(frozen=True)
class StreamedModel:
    """A model that is read a layer at a time; what is handed out is kept by the caller alone."""

    builder: _Builder

    @property
    def setting(self) -> Setting:
        """What every layer is run with."""
        source = self.builder.source
        return Setting(self.builder.config, source.dtype, source.device)

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeddings [T, d] of tokens [T]."""
        table = self.builder.source.raw("model.embed_tokens.weight")
        return F.embedding(tokens.to(table.device), table).to(self.builder.source.dtype)

    def layer(self, index: int) -> Layers:
        """One layer by itself."""
        rope = Rope.build(self.builder.config.rope, self.builder.source.device)
        return TorchLayers((self.builder.main_layer(index),), rope)

    def rest(self) -> DeepseekV3:
        """Everything but the main layers: embedding, head and MTP module."""
        return self.builder.model(0)


def open_streamed(path: Path, device: str) -> StreamedModel:
    """A bundle or checkpoint to be streamed in fp32, weights kept as stored. Raises as load_model
    does."""
    options = LoadOptions(device, dequantize_at_load=False)
    source, main = open_source(path, DTYPES[options.dtype], _device(device), False)
    options = replace(options, contract=recorded_contract(path, main))
    return StreamedModel(_Builder(source, ModelConfig.from_config(main.config), options))


def recorded_contract(path: Path, main: Checkpoint) -> MtpContract:
    """What the MTP part's config.json says of how its module is fed, or the main part's alone."""
    part = path / "mtp" / CONFIG_NAME
    return MtpContract.from_config(read_json_object(part) if part.is_file() else main.config)


def _device(name: str) -> torch.device:
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise UnsupportedError("The runtime has no such device", expected="cpu, cuda", found=name)
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("There is no CUDA device here", found=name, todo="Use device cpu")
    return device


@dataclass(frozen=True)
class _Builder:
    source: WeightSource
    config: ModelConfig
    options: LoadOptions

    def model(self, count: int | None = None) -> DeepseekV3:
        """The model, or with its first `count` layers alone."""
        source, config = self.source, self.config
        rope = Rope.build(config.rope, source.device)
        execution: Execution = TorchExecution(rope)
        if self.options.compiled:
            execution = CompiledExecution(config, rope)
        embedding = source.tensor("model.embed_tokens.weight")
        head = Head(self._norm("model.norm"), source.linear("lm_head"), execution)
        layers = execution.layers(
            map(self.main_layer, range(config.layers if count is None else count))
        )
        mtp = None
        if self.options.with_mtp and source.has_mtp:
            mtp = self._mtp(embedding, head, execution)
        return DeepseekV3(config, embedding, layers, head, mtp)

    def _mtp(self, embedding: torch.Tensor, head: Head, execution: Execution) -> MtpModule:
        source, index = self.source, self.config.layers
        if self.config.mtp_layers != 1:
            raise UnsupportedError(
                "The runtime drafts with one MTP layer",
                expected="num_nextn_predict_layers 1",
                found=self.config.mtp_layers,
                todo="Load without the MTP module, or use another drafter",
            )
        prefix = f"model.layers.{index}"
        names = (f"{prefix}.shared_head.head.weight", "lm_head.weight")
        linear = head.linear
        loaded = linear.matrix(source.dtype)
        if source.tied_or_own(*names, loaded) is not loaded:
            linear = source.linear(f"{prefix}.shared_head.head")
        own = f"{prefix}.embed_tokens.weight"
        return MtpModule(
            source.tied_or_own(own, "model.embed_tokens.weight", embedding),
            self._norm(f"{prefix}.enorm"),
            self._norm(f"{prefix}.hnorm"),
            source.linear(f"{prefix}.eh_proj"),
            self._layer(index, True),
            Head(self._norm(f"{prefix}.shared_head.norm"), linear, execution),
            self.options.contract or MtpContract(),
            execution,
        )

    def main_layer(self, index: int) -> DecoderLayer:
        config = self.config
        return self._layer(
            index, index >= config.dense_layers and index % config.moe_layer_freq == 0
        )

    def _layer(self, index: int, sparse: bool) -> DecoderLayer:
        prefix = f"model.layers.{index}"
        return DecoderLayer(
            self._norm(f"{prefix}.input_layernorm"),
            self._attention(f"{prefix}.self_attn"),
            self._norm(f"{prefix}.post_attention_layernorm"),
            self._moe(f"{prefix}.mlp") if sparse else self._mlp(f"{prefix}.mlp"),
        )

    def _attention(self, prefix: str) -> Mla:
        source, config = self.source, self.config
        query = "q_a_proj" if config.query_rank else "q_proj"
        down = [source.weight(f"{prefix}.{n}") for n in (query, "kv_a_proj_with_mqa")]
        halves = source.dense_matrix(f"{prefix}.kv_b_proj")
        halves = halves.view(config.heads, config.nope + config.value, config.latent)
        return Mla(
            self._linear(*down),
            self._norm(f"{prefix}.q_a_layernorm") if config.query_rank else None,
            source.linear(f"{prefix}.q_b_proj") if config.query_rank else None,
            self._norm(f"{prefix}.kv_a_layernorm"),
            halves[:, : config.nope].contiguous(),
            halves[:, config.nope :].transpose(1, 2).contiguous(),
            source.linear(f"{prefix}.o_proj"),
            config.rope.size,
            softmax_scale(config.rope, config.nope + config.rope.size),
        )

    def _mlp(self, prefix: str) -> Mlp:
        return Mlp(self._gate_up(prefix), self.source.linear(f"{prefix}.down_proj"))

    def _gate_up(self, prefix: str) -> Linear:
        return self._linear(
            *(self.source.weight(f"{prefix}.{name}_proj") for name in ("gate", "up"))
        )

    def _linear(self, *parts: Weight) -> Linear:
        return Linear.build(stack(parts), self.source.dtype, self.source.keep_dense)

    def _moe(self, prefix: str) -> Moe:
        source, config = self.source, self.config
        experts = [f"{prefix}.experts.{expert}" for expert in range(config.experts)]
        router = Router(
            source.raw(f"{prefix}.gate.weight").float().t().contiguous(),
            source.raw(f"{prefix}.gate.e_score_correction_bias").float(),
            config.expert_groups,
            config.groups_per_token,
            config.experts_per_token,
            config.normalise_weights,
            torch.tensor([config.routed_scale], device=source.device),
        )
        gate_up = [self._gate_up(expert) for expert in experts]
        down = [source.linear(f"{expert}.down_proj") for expert in experts]
        for shared_gate_up, shared_down in self._shared_experts(f"{prefix}.shared_experts"):
            gate_up.append(shared_gate_up)
            down.append(shared_down)
        return Moe(
            router,
            tuple(gate_up),
            tuple(down),
            torch.arange(config.experts, len(down), device=source.device),
            torch.ones(len(down) - config.experts, device=source.device),
        )

    def _shared_experts(self, prefix: str) -> Iterator[tuple[Linear, Linear]]:
        """The shared experts one by one: several are stored as one, side by side."""
        source, count = self.source, self.config.shared_experts
        if count == 1:
            yield self._gate_up(prefix), source.linear(f"{prefix}.down_proj")
        if count <= 1:
            return
        gate, up = (source.dense_matrix(f"{prefix}.{n}_proj").chunk(count) for n in ("gate", "up"))
        downs = source.dense_matrix(f"{prefix}.down_proj").chunk(count, dim=1)
        for parts in zip(gate, up, downs, strict=True):
            yield self._linear(*map(unquantized, parts[:2])), self._linear(unquantized(parts[2]))

    def _norm(self, module: str) -> RmsNorm:
        return RmsNorm.build(self.source.tensor(f"{module}.weight"), self.config.norm_eps)
