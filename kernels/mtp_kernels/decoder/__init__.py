"""Decoder layers and the recursion of their MTP module, by exchangeable backends.

A backend runs whole layers: latent or grouped-query attention over a paged cache, dense or
mixture-of-experts MLP, norms and projections. The tests hold each to a definition in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, Protocol, cast, runtime_checkable

import torch

from mtp_kernels.batch_layout import BatchLayout
from mtp_kernels.gated_delta.state import DeltaState, StateLayout
from mtp_kernels.quantize.row_codes import RowCodes
from mtp_kernels.sizes import (
    ONE_EXPERT,
    DeltaSizes,
    GroupedSizes,
    LatentSizes,
    Routing,
    Shapes,
)

# Loaded on first use. A backend is a module with a class `Backend`, which takes a dtype of DTYPES
# and one of ACTIVATIONS.
BACKENDS = {"compiled_cpu": "mtp_kernels.decoder.compiled_cpu"}
# The backend that "auto" means on each torch device type.
AUTO = {"cpu": "compiled_cpu"}
DTYPES = (torch.float32, torch.bfloat16)
ACTIVATIONS = (torch.float32, torch.int8)

RowStep = Callable[[torch.Tensor], torch.Tensor]  # of every row [T, in] -> [T, out] by itself


Piece = torch.Tensor | RowCodes


@runtime_checkable
class StoredMatrix(Protocol):
    """A matrix [..., out, in] that is read piece by piece while it is packed."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def pieces(self) -> Iterator[Piece]:
        """Yield rows [n, in], all of them in order, matrix after matrix, and those of a matrix in
        one form: codes, bf16 or float32."""


# In memory, or to be read.
Matrix = torch.Tensor | StoredMatrix


def pieces_of(matrix: Matrix) -> Iterator[Piece]:
    """Yield rows [n, in] of a matrix [..., out, in] in order."""
    if isinstance(matrix, torch.Tensor):
        yield matrix.flatten(0, -2)
    else:
        yield from matrix.pieces()


@dataclass(frozen=True)
class LayerKind:
    """The computations that a decoder layer is made of, by name; a backend runs some of them.

    "mla" is latent attention, "gqa" attention of grouped queries, "gated_delta" a gated delta net
    in its place; "dense" a gated MLP,
    "sigmoid_moe" DeepSeek-V3's mixture of experts: sigmoid scores, a bias for picking, groups;
    "softmax_moe" one whose scores are a softmax over all experts. Other names stand for layers that
    no backend has.
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
class LatentWeights:
    """Weights of latent attention: matrices [out, in].

    down projects to [query or its low rank | latent | rope key]. query_norm and query_up are None
    without a query rank. w is d but in a layer without an input norm.
    """

    down: Matrix  # [query + c + r, w]
    query_norm: torch.Tensor | None  # [query_rank]
    query_up: Matrix | None  # [h, n+r, query_rank]
    latent_norm: torch.Tensor  # [c]
    key_up: Matrix  # [h, n, c], transposed a query's way into the latent space
    value_up: Matrix  # [h, v, c]
    output: Matrix  # [d, h*v]


@dataclass(frozen=True)
class GroupedWeights:
    """Weights of attention of grouped queries: matrices [out, in], g key heads of n entries.

    qkv projects to [queries | keys | values], to which bias is added; where attention is gated, a
    head's gate follows its query. w is d but in a layer without an input norm.
    """

    qkv: Matrix  # [h*n + 2*g*n, w]; gated: [2*h*n + 2*g*n, w]
    bias: torch.Tensor | None  # [rows of qkv]
    query_norm: torch.Tensor | None  # [n]
    key_norm: torch.Tensor | None  # [n]
    output: Matrix  # [d, h*n]


@dataclass(frozen=True)
class DeltaWeights:
    """Weights of a gated delta net: matrices [out, in], c channels [queries | keys | values].

    inputs project to channels and output gates z, gate_inputs to what betas are sigmoids of, and to
    decays. A value head's log decay is rate * softplus(decay + decay_bias). What a value head reads
    is normed by itself, times value_norm and silu(z).
    """

    inputs: Matrix  # [c + h*v, d]
    gate_inputs: Matrix  # [2*h, d]
    convolution: torch.Tensor  # [c, width]
    rate: torch.Tensor  # [h]
    decay_bias: torch.Tensor  # [h]
    value_norm: torch.Tensor  # [v]
    output: Matrix  # [d, h*v]


@dataclass(frozen=True)
class LayerWeights:
    """One layer's float32 tensors as a checkpoint has them: matrices [out, in].

    gate_up and expert_down hold e routed experts, then shared ones; router and router_bias are
    None in a dense layer, whose MLP is one shared expert. i is the inner size. The sigmoid of a
    row's product with shared_gate, if there is one, multiplies what shared experts make of it.
    input_norm is None in a layer whose attention is given rows [T, w] of their own, as that of an
    EAGLE-3 draft; only the first layer of a decoder may be one.
    """

    input_norm: torch.Tensor | None  # [d]
    attention: LatentWeights | GroupedWeights | DeltaWeights
    post_norm: torch.Tensor  # [d]
    router: torch.Tensor | None  # [e, d]
    router_bias: torch.Tensor | None  # [e], added to sigmoids for picking only
    gate_up: Matrix  # [e + shared, 2*i, d]
    expert_down: Matrix  # [e + shared, d, i]
    shared_gate: torch.Tensor | None = None  # [d]

    @property
    def tensors(self) -> dict[str, Any]:
        """Every tensor by its field's name, the attention's too; None where there is none."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        attention = own.pop("attention")
        return {field.name: getattr(attention, field.name) for field in fields(attention)} | own

    def shapes(self, absent: int = 0) -> Shapes:
        """Return the shape of every tensor by its field's name, None where there is none; of
        experts with those of some that are absent."""
        shapes: Shapes = {n: None if t is None else tuple(t.shape) for n, t in self.tensors.items()}
        for name in ("gate_up", "expert_down") if absent else ():
            number, *rest = shapes[name] or ()
            shapes[name] = (number + absent, *rest)
        return shapes


@dataclass(frozen=True)
class RoutedExperts:
    """Routed experts of a layer that stay in their files: so many, each with gate_up [1, 2*i, d]
    and down [1, d, i], which are read when they are packed. form: what experts have in common that
    take equally much memory."""

    number: int
    matrices: Callable[[int], tuple[Matrix, Matrix]]
    form: Callable[[int], Hashable]


@dataclass(frozen=True)
class OffloadedLayer:
    """A sparse layer whose routed experts are read when rows pick them; weights have the shared
    ones alone, if there are any."""

    weights: LayerWeights
    experts: RoutedExperts


@dataclass(frozen=True)
class LayerShard:
    """One process's part of a layer that several share.

    weights: of the own heads, and of the own routed experts, none in a dense layer; the attention's
    output [n, m] has rows or columns of the whole one. shared: gate_up [1, 2*i, d] and down [n, m]
    of each shared expert, or of a dense layer's MLP.
    """

    weights: LayerWeights
    shared: tuple[tuple[Matrix, Matrix], ...]


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
    that it was made with, and computes in float32; where activations are int8, each row is encoded
    for its products with matrices of int8 and int4, with a scale for every group of inputs.
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
) -> Backend:
    """Return a new backend for the parts of one model; "auto" goes by the device.

    dtype: in which float32 matrices are kept, but for routers'; all is computed in float32.
    activations: those that matrices of int8 and int4 are multiplied with. Raises ValueError for a
    name that is not in BACKENDS, a dtype that is not in DTYPES, activations that are not in
    ACTIVATIONS, and for "auto" on a device without a backend.
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
    return cast(Backend, import_module(BACKENDS[name]).Backend(dtype, activations))
