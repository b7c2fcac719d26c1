"""Estimate of a streamed check before it starts: bytes to read, memory and seconds, from headers,
the expected number of distinct experts, and a short probe of disk and arithmetic."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

import torch

from mtp_checkpoints.families import parts
from mtp_checkpoints.families.base import Role
from mtp_checkpoints.weights.weight_values import WeightOnDisk, weights_on_disk
from mtp_export.progress import format_bytes
from mtp_export.verify.context import Context
from mtp_runtime.cache import elements_per_token
from mtp_runtime.layers.attention import Attention
from mtp_runtime.layers.linear import Linear
from mtp_runtime.layers.moe import Mlp, Moe
from mtp_runtime.loading.on_demand import PANEL_ROWS
from mtp_runtime.loading.read_ahead import READERS
from mtp_runtime.streaming import StreamedModel
from mtp_runtime.teacher_forcing import BRANCH_ROWS, CHUNK_TOKENS, LOGIT_ELEMENTS, Texts

# Runs of the MTP module and of a head over all rows that look for causes, beside one run of the
# module and three of a head per depth; LONE_HEADS take one row per text.
MODULE_RUNS, HEAD_RUNS, LONE_HEADS = 12, 11, 4
LOGIT_BYTES = 32  # of a row and token while two distributions are compared in float64
PROBE_BYTES = 512 << 20
PROBE_ROWS = (4, 64)


@dataclass(frozen=True)
class Cost:
    """Bytes that a streamed check reads, its seconds, and the memory that it adds.

    read_bytes includes what is read again. weight_bytes: weights held at a time, as stored;
    dense_bytes: matrices in float32; both and activation_bytes of the stage that takes most.
    """

    read_bytes: int
    bytes_per_second: float
    seconds: float
    weight_bytes: int
    dense_bytes: int
    activation_bytes: int
    tokens: int

    def shown(self) -> str:
        memory = self.weight_bytes + self.dense_bytes + self.activation_bytes
        return (
            f"{format_bytes(self.read_bytes)} to read at {format_bytes(self.bytes_per_second)}/s,"
            f" about {_duration(self.seconds)} in all; memory {format_bytes(memory)}:"
            f" {format_bytes(self.weight_bytes)} of weights, {format_bytes(self.dense_bytes)} of"
            f" matrices in use and {format_bytes(self.activation_bytes)} for {self.tokens} tokens"
        )

    def as_json(self) -> dict[str, float | int]:
        return asdict(self)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


@dataclass
class Layer:
    """Sizes of a layer's weights as stored: routed experts, each alike, and everything else."""

    fixed_bytes: int = 0
    fixed_elements: int = 0
    largest: int = 0  # elements of a matrix of its attention
    routed_bytes: int = 0
    routed_elements: int = 0
    names: set[str] = field(default_factory=set)  # of routed experts

    @property
    def experts(self) -> int:
        return len(self.names)

    @property
    def expert_bytes(self) -> int:
        return self.routed_bytes // max(1, self.experts)

    @property
    def expert_elements(self) -> int:
        return self.routed_elements // max(1, self.experts)

    def add(self, weight: WeightOnDisk) -> None:
        """Count one weight."""
        spec = weight.stored.weight
        elements = math.prod(spec.shape)
        if spec.role is not Role.ROUTED_EXPERT:
            self.fixed_bytes += weight.size_bytes
            self.fixed_elements += elements
            if spec.role is Role.ATTENTION:
                self.largest = max(self.largest, elements)
            return
        self.names.add(spec.module.rpartition(".")[0])
        self.routed_bytes += weight.size_bytes
        self.routed_elements += elements


@dataclass(frozen=True)
class Sizes:
    """Layers of the main model in order, the MTP module without its ends, and the ends: embedding
    and head as they are stored, and copies of them that are compared with the main model's."""

    layers: tuple[Layer, ...]
    module: Layer
    head: WeightOnDisk
    row_bytes: int  # of the embedding
    compared_bytes: int

    @classmethod
    def of(cls, context: Context) -> Sizes:
        """Add up the weights of both parts."""
        layers: dict[str, Layer] = {}
        module, ends, compared = Layer(), dict[Role, WeightOnDisk](), 0
        for weight in (
            weight
            for layout in context.layouts
            for weight in weights_on_disk(layout.stored, layout.checkpoint.tensors)
        ):
            spec = weight.stored.weight
            if spec.role in (Role.EMBEDDING, Role.HEAD):
                if spec.mtp_layer is None:
                    ends[spec.role] = weight
                else:
                    compared += 2 * weight.size_bytes
            elif spec.mtp_layer is not None:
                module.add(weight)
            elif "layers" in spec.name.split(".")[:2]:
                key = ".".join(spec.name.split(".")[:3])
                layers.setdefault(key, Layer()).add(weight)
        embedding = ends[Role.EMBEDDING]
        return cls(
            layers=tuple(layers.values()),
            module=module,
            head=ends[Role.HEAD],
            row_bytes=embedding.size_bytes // embedding.rows,
            compared_bytes=compared,
        )


@dataclass(frozen=True)
class Rates:
    """Speed of this machine: bytes read per second; seconds to expand an element of a weight, and
    to multiply it by one row."""

    bytes_per_second: float
    expand: float
    multiply: float


@dataclass(frozen=True)
class Routing:
    """Experts per token, of a router that favours none."""

    experts_per_token: int | None

    def pairs(self, layer: Layer, rows: int) -> int:
        """Return the (row, expert) pairs of a number of rows."""
        k = layer.experts if self.experts_per_token is None else self.experts_per_token
        return rows * min(k, layer.experts)

    def distinct(self, layer: Layer, rows: int) -> float:
        """Return the expected number of experts that any of the rows picks."""
        if not layer.experts:
            return 0.0
        share = self.pairs(layer, 1) / layer.experts
        return layer.experts * (1 - (1 - share) ** rows)


def cost_of(context: Context, streamed: StreamedModel, texts: Texts) -> Cost:
    """Return the cost of the check over texts; probes disk and arithmetic for about a second."""
    sizes = Sizes.of(context)
    config = streamed.config
    routers = (part.router for part in config.parts if isinstance(part, parts.Moe))
    k = next((router.routing.experts_per_token for router in routers), None)
    rates, attention = probed(streamed, sizes)
    estimate = _Estimate(
        sizes=sizes,
        routing=Routing(k),
        rates=rates,
        texts=texts,
        depths=max(context.options.ks),
    )
    return estimate.cost(config.hidden, attention)


def probed(streamed: StreamedModel, sizes: Sizes) -> tuple[Rates, Attention]:
    """Read a part of the last layer and multiply with a matrix of it; return the rates, and the
    layer's attention."""
    index = len(sizes.layers) - 1
    size, start = sizes.layers[index], time.perf_counter()
    layer, read_bytes = streamed.layer(index), size.fixed_bytes
    mlp = layer.feed_forward
    if isinstance(mlp, Moe):
        count = max(1, min(mlp.routed_experts, PROBE_BYTES // size.expert_bytes))
        read_bytes += count * size.expert_bytes
        (mlp,) = deque(mlp.experts.each(range(count)), maxlen=1)
    rate = read_bytes / max(1e-6, time.perf_counter() - start)
    assert isinstance(mlp, Mlp), "layers are dense or sparse"
    few, many = (_seconds_of(mlp.gate_up, rows) for rows in PROBE_ROWS)
    elements = math.prod(mlp.gate_up.weight.shape)
    multiply = max(0.0, many - few) / (elements * (PROBE_ROWS[1] - PROBE_ROWS[0]))
    expand = max(0.0, few / elements - PROBE_ROWS[0] * multiply)
    return Rates(rate, expand=expand, multiply=multiply), layer.attention


def _seconds_of(linear: Linear, rows: int) -> float:
    """Return the least seconds of a product of some; the first one may compile."""
    x = torch.ones(rows, linear.weight.shape[1])
    found = []
    for _ in range(4):
        start = time.perf_counter()
        linear(x)
        found.append(time.perf_counter() - start)
    return min(found)


@dataclass(frozen=True)
class _Estimate:
    """The parts of an estimate, for texts of `rows` tokens in all."""

    sizes: Sizes
    routing: Routing
    rates: Rates
    texts: Texts
    depths: int

    @property
    def rows(self) -> int:
        return len(self.texts.tokens)

    @property
    def head_reads(self) -> int:
        """Times that the head is read: every run takes a bounded number of rows at once."""
        each = max(1, LOGIT_ELEMENTS // self.sizes.head.rows)
        full = 3 * self.depths + HEAD_RUNS
        lone = LONE_HEADS * -(-len(self.texts.texts) // each)
        return full * -(-self.rows // each) + lone

    def cost(self, hidden: int, attention: Attention) -> Cost:
        sizes, head = self.sizes, self.sizes.head
        module = self._read_bytes(sizes.module)
        once = sum(map(self._read_bytes, sizes.layers)) + module + sizes.compared_bytes
        once += 2 * len(set(self.texts.tokens.tolist())) * sizes.row_bytes
        weights, dense, activations = max(self._memory(hidden, attention), key=sum)
        return Cost(
            read_bytes=once + self.head_reads * head.size_bytes,
            bytes_per_second=self.rates.bytes_per_second,
            seconds=self._seconds(),
            weight_bytes=weights,
            dense_bytes=dense,
            activation_bytes=activations,
            tokens=self.rows,
        )

    def _read_bytes(self, layer: Layer) -> int:
        distinct = self.routing.distinct(layer, self.rows)
        return layer.fixed_bytes + round(distinct * layer.expert_bytes)

    def _memory(self, hidden: int, attention: Attention) -> Iterable[tuple[int, int, int]]:
        """Yield weights, dense matrices and activations of the main layers, and of the module."""
        sizes, module = self.sizes, self.sizes.module
        at_once = min(self.rows, CHUNK_TOKENS)
        stream = self.rows * (3 * hidden + elements_per_token(attention.new_cache))
        inside = at_once * attention.row_elements
        fixed = [layer.fixed_bytes for layer in sizes.layers]
        pairs = [a + b for a, b in zip(fixed, [*fixed[1:], 0], strict=True)]
        flying = max(min(READERS + 2, one.experts) * one.expert_bytes for one in sizes.layers)
        absorbed = 4 * max(layer.largest for layer in sizes.layers)
        yield max(pairs) + flying, absorbed, 4 * (stream + inside)
        panel = min(PANEL_ROWS, sizes.head.rows) * sizes.head.size_bytes // sizes.head.rows
        logits = LOGIT_BYTES * min(LOGIT_ELEMENTS, self.rows * sizes.head.rows)
        yield (
            self._read_bytes(module) + (READERS + 2) * panel,
            4 * module.largest,
            4 * stream + max(logits, 4 * inside),
        )

    def _seconds(self) -> float:
        rate, head = self.rates.bytes_per_second, self.sizes.head
        layers = sum(map(self._layer_seconds, self.sizes.layers))
        module = self._layer_seconds(self.sizes.module)
        runs = (1 + MODULE_RUNS) * self._computing(self.sizes.module, CHUNK_TOKENS)
        runs += (self.depths - 1) * self._computing(self.sizes.module, BRANCH_ROWS)
        heads = self.head_reads * self.rates.expand
        heads += (3 * self.depths + HEAD_RUNS) * self.rows * self.rates.multiply
        elements = math.prod(head.stored.weight.shape)
        ends = (self.sizes.compared_bytes + head.size_bytes) / rate
        return layers + module + runs + heads * elements + ends

    def _layer_seconds(self, layer: Layer) -> float:
        """Reading while computing; a layer's experts are known after its attention alone."""
        computing = self._computing(layer, self.rows)
        reading = self._read_bytes(layer) / self.rates.bytes_per_second
        return max(reading + self._fixed(layer, self.rows), computing)

    def _computing(self, layer: Layer, chunk: int) -> float:
        """Seconds of arithmetic of all rows, experts expanded once per chunk."""
        expanded = sum(
            self.routing.distinct(layer, min(chunk, self.rows - start))
            for start in range(0, self.rows, chunk)
        )
        pairs = self.routing.pairs(layer, self.rows)
        each = expanded * self.rates.expand + pairs * self.rates.multiply
        return self._fixed(layer, chunk) + layer.expert_elements * each

    def _fixed(self, layer: Layer, chunk: int) -> float:
        chunks = -(-self.rows // chunk)
        each = chunks * self.rates.expand + self.rows * self.rates.multiply
        return layer.fixed_elements * each
