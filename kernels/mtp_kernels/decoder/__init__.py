"""Decoder layers and the recursion of their MTP module, by exchangeable backends.

A backend runs whole layers: latent or grouped-query attention over a paged cache, or a gated delta
net over states, dense or mixture-of-experts MLP, norms and projections. The tests hold each to a
definition in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

import torch

from mtp_kernels.batch_layout import BatchLayout, StateLayout
from mtp_kernels.cpu.memory import Arena
from mtp_kernels.decoder.layer_weights import (
    DeltaWeights,
    GroupedWeights,
    LatentWeights,
    LayerShard,
    LayerWeights,
    Matrix,
    OffloadedLayer,
    Piece,
    RoutedExperts,
    StoredMatrix,
    pieces_of,
)
from mtp_kernels.gated_delta.state import DeltaState
from mtp_kernels.sizes import (
    ONE_EXPERT,
    DeltaSizes,
    GroupedSizes,
    LatentSizes,
    Routing,
    Shapes,
)

__all__ = [
    "ACTIVATIONS", "AUTO", "BACKENDS", "DTYPES", "Backend", "Decoder", "DecoderConfig",
    "DeltaConfig", "DeltaDecoder", "DeltaWeights", "GroupedWeights", "LatentWeights", "LayerKind",
    "LayerShard", "LayerWeights", "Matrix", "ModuleInputs", "OffloadedLayer", "PackedLayer",
    "Pairs", "Piece", "Projection", "Recursion", "RecursionParts", "Rope", "RoutedExperts",
    "RowStep", "StoredMatrix", "make_backend", "pieces_of",
]  # fmt: skip

# Loaded on first use. A backend is a module with a class `Backend`, which takes a dtype of DTYPES,
# one of ACTIVATIONS, and an arena or None.
BACKENDS = {"compiled_cpu": "mtp_kernels.decoder.compiled_cpu"}
# The backend that "auto" means on each torch device type.
AUTO = {"cpu": "compiled_cpu"}
DTYPES = (torch.float32, torch.bfloat16)
ACTIVATIONS = (torch.float32, torch.bfloat16, torch.int8)

RowStep = Callable[[torch.Tensor], torch.Tensor]  # of every row [T, in] -> [T, out] by itself


@dataclass(frozen=True)
class LayerKind:
    """The computations that a decoder layer is made of, by name; a backend runs some of them.

    "mla" is latent attention, "gqa" attention of grouped queries, "gated_delta" a gated delta net
    in its place; "dense" a gated MLP, "sigmoid_moe" DeepSeek-V3's mixture of experts: sigmoid
    scores, a bias for picking, groups; "softmax_moe" one whose scores are a softmax over all
    experts. Other names stand for layers that no backend has.
    """

    attention: str
    feed_forward: str


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and constants that all layers of a decoder share; softmax_scale multiplies attention
    scores. routing is that of its sparse layers, of no meaning where all are dense; their scores
    are sigmoids, or a softmax over all experts where has_softmax is True."""

    hidden: int
    attention: LatentSizes | GroupedSizes
    norm_eps: float
    softmax_scale: float
    routing: Routing = ONE_EXPERT
    has_softmax: bool = False


@dataclass(frozen=True)
class DeltaConfig:
    """Sizes and constants that all layers of a delta decoder share, as those of DecoderConfig."""

    hidden: int
    attention: DeltaSizes
    norm_eps: float
    routing: Routing = ONE_EXPERT
    has_softmax: bool = False


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotation of pairs by position. inv_freq [r/2] float32: radians per position of each pair;
    attention_scaling is the length of every rotation."""

    inv_freq: torch.Tensor
    attention_scaling: float


@dataclass(frozen=True)
class Pairs:
    """Rows and experts of a sparse layer, in order of experts: the row of each pair [p], its place
    among all picks [p], and where each of some consecutive experts' pairs begin and end [e+1]."""

    rows: torch.Tensor
    places: torch.Tensor
    ends: torch.Tensor


class PackedLayer(Protocol):
    """One layer as a backend keeps it, and the shapes of the weights it was made of."""

    @property
    def shapes(self) -> Shapes: ...


@dataclass(frozen=True)
class ModuleInputs:
    """Join of a token's embedding and a hidden state, as a drafting module's layer takes them: both
    normed, side by side.

    projection: of both to the layer's stream. None: the layer's attention is given both, and the
    stream is the hidden state, or its norm where normed_residual is True.
    """

    embedding_norm: RowStep
    hidden_norm: RowStep
    projection: RowStep | None
    normed_residual: bool = False

    def joined(
        self, embedded: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the stream [T, d], and what attention is given [T, 2d], if anything."""
        normed = self.hidden_norm(hidden)
        both = torch.cat([self.embedding_norm(embedded), normed], dim=-1)
        if self.projection is not None:
            return self.projection(both), None
        return normed if self.normed_residual else hidden, both


@dataclass(frozen=True)
class RecursionParts:
    """A module that drafts: its layer, and what surrounds it, made by the same backend.

    inputs join a token's embedding and a hidden state: with a projection in an MTP module, without
    in an EAGLE-3 draft. The head norms the layer's output and projects it to tokens, given by their
    ascending ids. recycles_normed: the next step takes the hidden state after the head's norm, not
    before.
    """

    decoder: Decoder
    embedding: torch.Tensor  # [vocab, d] float32 or bf16
    inputs: ModuleInputs
    head_norm: RowStep
    head: Projection  # [T, d] -> [T, n]
    tokens: torch.Tensor  # [n] int64
    recycles_normed: bool


class Projection(Protocol):
    """Product with one matrix, of every row by itself."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs [T, out] of rows [T, in]."""

    def best(self, x: torch.Tensor) -> torch.Tensor:
        """Return the number of each row's largest output [T] int64, the lowest of equal ones."""


class Decoder(Protocol):
    """Some consecutive layers of a model."""

    config: DecoderConfig

    def __len__(self) -> int: ...

    def __call__(
        self,
        x: torch.Tensor,
        layout: BatchLayout,
        kv_cache: torch.Tensor,
        attention_input: torch.Tensor | None = None,
    ) -> None:
        """Replace x [T, d] by the output of the last layer.

        kv_cache [at least the number of layers, pages, page, slot of the attention's sizes]: the
        rows' entries are written to their slots; each row attends to its request's tokens up to
        itself, and slots that no row may see are not read. attention_input [T, w] is what the
        attention of a first layer without an input norm takes, None where there is one. Raises
        TypeError or ValueError for tensors that are not contiguous float32 on the decoder's device
        or do not fit each other.
        """

    def part(self, first: int, stop: int) -> Decoder:
        """Return layers [first, stop), at least one, as a decoder of their own."""


class DeltaDecoder(Protocol):
    """Some consecutive layers of a model with gated delta nets."""

    config: DeltaConfig

    def __len__(self) -> int: ...

    def __call__(self, x: torch.Tensor, layout: StateLayout, state: DeltaState) -> None:
        """Replace x [T, d] by the output of the last layer, and advance the requests' states.

        state: tensors of all layers [layers, ...], each as in a DeltaState of one. Raises TypeError
        or ValueError for tensors that are not contiguous float32 on the decoder's device or do not
        fit each other.
        """

    def part(self, first: int, stop: int) -> DeltaDecoder:
        """Return layers [first, stop), at least one, as a decoder of their own."""


class Recursion(Protocol):
    """Greedy drafts of a module, each made from the one before it."""

    def __call__(
        self,
        x: torch.Tensor,
        starts: Sequence[int],
        counts: Sequence[int],
        page_table: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> list[list[int]]:
        """Return counts[i] >= 1 tokens for each row of x [b, d], which is overwritten.

        Row i is the module's output at position starts[i]; counts do not rise. kv_cache
        [1, pages, page, slot] gets the rows of positions starts[i] + 1 to
        starts[i] + counts[i] - 1, which page_table [b, max_pages] int32 covers. Of equally good
        tokens the lowest is drafted.
        Raises TypeError or ValueError as `Decoder` does.
        """


class Backend(Protocol):
    """A decoder backend: one object packs the parts of one model, which may then be dropped.

    It keeps stored matrices as codes or bf16 where they are, others, but for routers', in the dtype
    that it was made with, and computes in float32. Where activations are bf16, each row is rounded
    for its products with matrices of bf16, int8, int4 and fp8; where they are int8, it is encoded
    for those with int8 and int4, with a scale for every group of inputs.
    """

    def runs(self, kind: LayerKind) -> bool:
        """Return True for layers that this backend computes."""

    def pack(self, weights: LayerWeights) -> PackedLayer:
        """Pack one layer into the backend's form, so that no second copy of a model is held.

        Matrices that are stored are read once. Raises TypeError for tensors that are not float32.
        """

    def decoder(self, config: DecoderConfig, layers: Sequence[PackedLayer], rope: Rope) -> Decoder:
        """Join layers that this backend packed.

        Raises TypeError or ValueError for layers that do not fit the config, and where there is no
        layer.
        """

    def delta_decoder(self, config: DeltaConfig, layers: Sequence[PackedLayer]) -> DeltaDecoder:
        """Join layers with gated delta nets. Raises as `decoder` does."""

    def norm(self, weight: torch.Tensor, eps: float) -> RowStep:
        """Return the RMS norm with a weight [d] float32."""

    def projection(self, matrix: Matrix) -> Projection:
        """Return x -> x @ matrix.T for a matrix [out, in]."""

    def recursion(self, parts: RecursionParts) -> Recursion:
        """Return what drafts by recursion with the parts of a module.

        Raises TypeError or ValueError for parts that do not fit each other.
        """


def make_backend(
    name: str = "auto",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    activations: torch.dtype = torch.float32,
    arena: Arena | None = None,
) -> Backend:
    """Return a new backend for the parts of one model; "auto" goes by the device.

    dtype: in which float32 matrices are kept, but for routers'; all is computed in float32.
    activations: those that stored matrices are multiplied with. arena: memory of what is
    packed, which may hold it already; None: new memory. Raises ValueError for a name that is not in
    BACKENDS, a dtype that is not in DTYPES, activations that are not in ACTIVATIONS, and for "auto"
    on a device without a backend.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {DTYPES}, found {dtype}")
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations: expected one of {ACTIVATIONS}, found {activations}")
    kind = torch.device(device).type
    if name == "auto":
        if kind not in AUTO:
            raise ValueError(f"backend auto: expected a device of {sorted(AUTO)}, found {device}")
        name = AUTO[kind]
    if name not in BACKENDS:
        raise ValueError(f"backend: expected auto or one of {sorted(BACKENDS)}, found {name!r}")
    return cast(Backend, import_module(BACKENDS[name]).Backend(dtype, activations, arena))
