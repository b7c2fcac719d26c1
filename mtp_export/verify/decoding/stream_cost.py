"""Estimate of a streamed check before it starts: bytes to read, memory and seconds, from headers,
the expected number of distinct experts, and a short probe of disk and arithmetic."""

from __future__ import annotations

import math
import re
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
from mtp_export.verify.diagnosis.alternatives import sampling_step
from mtp_runtime.cache import elements_per_token
from mtp_runtime.layer_inputs import linears_of
from mtp_runtime.layers.attention import Attention
from mtp_runtime.layers.decoder_layer import Nothing
from mtp_runtime.layers.linear import Linear
from mtp_runtime.layers.moe import Moe
from mtp_runtime.loading.on_demand import PANEL_ROWS, READERS
from mtp_runtime.streaming import StreamedModel
from mtp_runtime.teacher_forcing import BRANCH_ROWS, CHUNK_TOKENS, LOGIT_ELEMENTS, Texts

# Runs of the MTP module and of a head over all rows that look for causes, beside one run of the
# module and three of a head per depth; LONE_HEADS take one row per text. SAMPLED_RUNS are those of
# variants of both that a sample of the texts excludes.
MODULE_RUNS, HEAD_RUNS, LONE_HEADS, SAMPLED_RUNS = 12, 11, 4, 132
# Rows of a sample, in float32, that variants of experts and of what they add hold at a time.
VARIANT_COPIES = 32
LOGIT_BYTES = 32  # of a row and token while two distributions are compared in float64
PROBE_BYTES = 512 << 20
PROBE_ROWS = (4, 64)


_LAYER = re.compile(r".*?\blayers\.\d+", re.ASCII)  # what names of a layer's tensors begin with


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
        minutes = f"{self.seconds / 60:.0f} min"
        return (
            f"{format_bytes(self.read_bytes)} to read at {format_bytes(self.bytes_per_second)}/s,"
            f" about {f'{self.seconds:.0f} s' if self.seconds < 120 else minutes} in all; memory"
            f" {format_bytes(memory)}: {format_bytes(self.weight_bytes)} of weights,"
            f" {format_bytes(self.dense_bytes)} of matrices in use and"
            f" {format_bytes(self.activation_bytes)} for {self.tokens} tokens"
        )

    def as_json(self) -> dict[str, float | int]:
        return asdict(self)


@dataclass(frozen=True)
class Rates:
    """Speed of this machine: bytes read per second; seconds to expand an element of a weight, and
    to multiply it by one row. read_bytes: those that it took to find out."""

    bytes_per_second: float
    expand: float
    multiply: float
    read_bytes: int = 0


@dataclass
class Layer:
    """Sizes of a layer's weights as stored: routed experts, each alike, and everything else.

    per_token: experts that a router which favours none picks for a token, None for all.
    """

    per_token: int | None
    fixed_bytes: int = 0
    fixed_elements: int = 0
    largest: int = 0  # elements of a matrix of its attention
    routed_bytes: int = 0
    routed_elements: int = 0
    experts: set[str] = field(default_factory=set)  # names of the routed ones

    def add(self, weight: WeightOnDisk) -> None:
        """Count one weight."""
        spec = weight.stored.weight
        elements = math.prod(spec.shape)
        if spec.role is Role.ROUTED_EXPERT:
            self.experts.add(spec.module.rpartition(".")[0])
            self.routed_bytes += weight.size_bytes
            self.routed_elements += elements
        else:
            self.fixed_bytes += weight.size_bytes
            self.fixed_elements += elements
            if spec.role is Role.ATTENTION:
                self.largest = max(self.largest, elements)

    @property
    def expert_bytes(self) -> int:
        return self.routed_bytes // max(1, len(self.experts))

    @property
    def picked(self) -> int:
        """Experts of one token."""
        return min(self.per_token or len(self.experts), len(self.experts))

    def distinct(self, rows: int) -> float:
        """Return the expected number of experts that any of the rows picks."""
        count = len(self.experts)
        return count * (1 - (1 - self.picked / count) ** rows) if count else 0.0

    def read_bytes(self, rows: int) -> int:
        """Return the bytes that a run over rows reads."""
        return self.fixed_bytes + round(self.distinct(rows) * self.expert_bytes)

    def fixed_seconds(self, rates: Rates, rows: int, chunk: int) -> float:
        """Return the seconds of arithmetic outside of routed experts, in chunks of rows."""
        each = -(-rows // chunk) * rates.expand + rows * rates.multiply
        return self.fixed_elements * each

    def computing_seconds(self, rates: Rates, rows: int, chunk: int) -> float:
        """Return the seconds of all arithmetic, experts expanded once per chunk."""
        starts = range(0, rows, chunk)
        expanded = sum(self.distinct(min(chunk, rows - start)) for start in starts)
        each = expanded * rates.expand + rows * self.picked * rates.multiply
        elements = self.routed_elements // max(1, len(self.experts))
        return self.fixed_seconds(rates, rows, chunk) + elements * each

    def seconds(self, rates: Rates, rows: int) -> float:
        """Return the seconds of reading while computing; a layer's experts are known after its
        attention alone."""
        reading = self.read_bytes(rows) / rates.bytes_per_second
        fixed = self.fixed_seconds(rates, rows, rows)
        return max(reading + fixed, self.computing_seconds(rates, rows, rows))


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
    def of(cls, context: Context, streamed: StreamedModel) -> Sizes:
        """Add up the weights of both parts."""
        kinds = parts.Moe | parts.UngatedMoe
        routers = (part.router for part in streamed.config.parts if isinstance(part, kinds))
        per_token = next((router.routing.experts_per_token for router in routers), None)
        layers: dict[str, Layer] = {}
        module, ends, compared = Layer(per_token), dict[Role, WeightOnDisk](), 0
        for layout in context.layouts:
            for weight in weights_on_disk(layout.stored, layout.checkpoint.tensors):
                spec = weight.stored.weight
                if spec.role in (Role.EMBEDDING, Role.HEAD):
                    if spec.mtp_layer is None:
                        ends[spec.role] = weight
                    else:
                        compared += 2 * weight.size_bytes
                elif spec.mtp_layer is not None:
                    module.add(weight)
                elif found := _LAYER.match(spec.name):
                    layers.setdefault(found[0], Layer(per_token)).add(weight)
        embedding = ends[Role.EMBEDDING]
        row_bytes = embedding.size_bytes // embedding.rows
        return cls(
            tuple(layers.values()), module, ends.get(Role.HEAD, embedding), row_bytes, compared
        )


def cost_of(context: Context, streamed: StreamedModel, texts: Texts) -> Cost:
    """Return the cost of the check over texts; probes disk and arithmetic for about a second."""
    sizes, rows, depths = Sizes.of(context, streamed), len(texts.tokens), max(context.options.ks)
    rates, attention = probed(streamed, sizes)
    sampled = -(-SAMPLED_RUNS // sampling_step(texts))
    runs = 3 * depths + HEAD_RUNS + sampled  # of a head, which takes a bounded number of rows
    at_once = max(1, LOGIT_ELEMENTS // sizes.head.rows)
    head_reads = runs * -(-rows // at_once) + LONE_HEADS * -(-len(texts.texts) // at_once)
    every = (*sizes.layers, sizes.module)
    seconds = sum(layer.seconds(rates, rows) for layer in every)
    module_runs = 1 + MODULE_RUNS + sampled
    seconds += module_runs * sizes.module.computing_seconds(rates, rows, CHUNK_TOKENS)
    seconds += (depths - 1) * sizes.module.computing_seconds(rates, rows, BRANCH_ROWS)
    seconds += (sizes.compared_bytes + sizes.head.size_bytes) / rates.bytes_per_second
    each = head_reads * rates.expand + runs * rows * rates.multiply
    seconds += each * math.prod(sizes.head.stored.weight.shape)
    read_bytes = sum(layer.read_bytes(rows) for layer in every) + sizes.compared_bytes
    read_bytes += rates.read_bytes + 2 * len(set(texts.tokens.tolist())) * sizes.row_bytes
    held = VARIANT_COPIES * streamed.config.hidden * -(-rows // sampling_step(texts))
    weights, dense, activations = max(_memory(sizes, rows, streamed, attention, held), key=sum)
    return Cost(
        read_bytes=read_bytes + head_reads * sizes.head.size_bytes,
        bytes_per_second=rates.bytes_per_second,
        seconds=seconds,
        weight_bytes=weights,
        dense_bytes=dense,
        activation_bytes=activations,
        tokens=rows,
    )


def _memory(
    sizes: Sizes, rows: int, streamed: StreamedModel, attention: Attention, held: int
) -> Iterable[tuple[int, int, int]]:
    """Yield weights, dense matrices and activations of the main layers, and of the module; held:
    elements that variants of it hold."""
    module, head = sizes.module, sizes.head
    stream = rows * (3 * streamed.config.hidden + elements_per_token(attention.new_cache))
    inside = min(rows, CHUNK_TOKENS) * attention.row_elements
    fixed = [layer.fixed_bytes for layer in sizes.layers]
    pairs = [a + b for a, b in zip(fixed, [*fixed[1:], 0], strict=True)]
    flying = max(min(READERS + 2, len(at.experts)) * at.expert_bytes for at in sizes.layers)
    absorbed = 4 * max(layer.largest for layer in sizes.layers)
    yield max(pairs) + flying, absorbed, 4 * (stream + inside)
    panels = (READERS + 2) * (min(PANEL_ROWS, head.rows) * head.size_bytes // head.rows)
    logits = LOGIT_BYTES * min(LOGIT_ELEMENTS, rows * head.rows)
    yield (
        module.read_bytes(rows) + panels,
        4 * module.largest,
        4 * (stream + held) + max(logits, 4 * inside),
    )


def probed(streamed: StreamedModel, sizes: Sizes) -> tuple[Rates, Attention]:
    """Read a part of the last layer with attention and multiply with a matrix of it; return the
    rates, and the layer's attention."""
    layers = streamed.opened.spec.layers
    index = max(at for at, one in enumerate(layers) if one.attention != parts.NOTHING)
    size, start = sizes.layers[index], time.perf_counter()
    layer, read_bytes = streamed.layer(index), size.fixed_bytes
    mlp = layer.feed_forward
    if isinstance(mlp, Moe):
        count = max(1, min(mlp.routed_experts, PROBE_BYTES // size.expert_bytes))
        read_bytes += count * size.expert_bytes
        (mlp,) = deque(mlp.experts.each(range(count)), maxlen=1)
    rate = read_bytes / max(1e-6, time.perf_counter() - start)
    linear = next(linears_of(layer.attention if isinstance(mlp, Nothing) else mlp))
    few, many = (_seconds_of(linear, rows) for rows in PROBE_ROWS)
    elements = math.prod(linear.weight.shape)
    multiply = max(0.0, many - few) / (elements * (PROBE_ROWS[1] - PROBE_ROWS[0]))
    expand = max(0.0, few / elements - PROBE_ROWS[0] * multiply)
    return Rates(rate, expand=expand, multiply=multiply, read_bytes=read_bytes), layer.attention


def _seconds_of(linear: Linear, rows: int) -> float:
    """Return the least seconds of a product of some; the first one may compile."""
    x = torch.ones(rows, linear.weight.shape[1])
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        linear(x)
        seconds.append(time.perf_counter() - start)
    return min(seconds)
