"""Tensors that a config promises, and the role of each.

Names and shapes follow from the config alone, so that they can be compared with the files. How a
weight is stored is no matter of a model but of mtp_export.schemes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from mtp_checkpoints.dtypes import DType

FLOATS = (DType.F32, DType.BF16, DType.F16)  # of weights that are not quantized


class Role(StrEnum):
    """Purpose of a tensor; reports add up by it."""

    EMBEDDING = "embedding"
    HEAD = "head"
    OWN_EMBEDDING = "own embedding"  # of an MTP layer, no copy of the main model's
    OWN_HEAD = "own head"  # the same; neither is quantized
    NORM = "norm"
    ATTENTION = "attention"
    DENSE_MLP = "dense mlp"
    ROUTER = "router"
    SHARED_EXPERT = "shared expert"
    ROUTED_EXPERT = "routed expert"
    MTP_PROJECTION = "mtp projection"
    MTP_INPUT = (
        "mtp input"  # of embedding or hidden state alone, or plain in engines: not quantized
    )
    ATTENTION_GATES = "attention gates"  # one value per head; never quantized
    CONVOLUTION = "convolution"
    DELTA_GATES = "delta net gates"  # decay and write strength, by head; never quantized
    INDEXER = "indexer"  # projections of queries and keys
    INDEXER_HEADS = "indexer heads"  # weights of the heads, which are never quantized
    COMPRESSOR = "compressor"  # of keys and values of several tokens; never quantized
    HYPER_CONNECTION = "hyper-connections"  # of several streams; never quantized
    PER_LAYER_INPUT = "per-layer inputs"  # of embeddings that layers have beside the stream
    OTHER_PART = "other parts"  # of a vision tower, say: carried, and not described
    VOCABULARY = "vocabulary"  # the target's tokens that a draft's head has

    __hash__ = str.__hash__  # Enum's own is Python code, which each of 46,000 tensors would run


# Roles whose matrices engines read quantized; everything else stays as released.
LINEAR_ROLES = (
    Role.ATTENTION,
    Role.DENSE_MLP,
    Role.SHARED_EXPERT,
    Role.ROUTED_EXPERT,
    Role.INDEXER,
)


@dataclass(frozen=True, slots=True)
class RotaryRows:
    """Rows of a weight that rotary positions turn: `size` of every `period`, from `first` on."""

    period: int
    first: int
    size: int


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Rows of a weight that belong to heads, of several kinds: sizes are the numbers of a head's
    rows of each kind. by_head: each head's lie side by side, else all heads' of a kind."""

    heads: int
    sizes: tuple[int, ...]
    by_head: bool


class TensorSpec(NamedTuple):
    """One tensor of a model, unquantized.

    dtypes are safetensors dtypes, the usual one first. optional tensors may be absent (the MTP
    layer's own copies of embedding and head). rotary is None for a tensor without rotary rows.
    head_rows is None for one whose rows are of one kind, or not of heads.
    of_indexer: all that it changes is the choice of the tokens to attend to. row_chunks: its rows
    are stored in so many equal chunks, one per rank of those that trained it, each in blocks of its
    own where it is in blocks.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[DType, ...]
    role: Role
    mtp_layer: int | None = None
    optional: bool = False
    rotary: RotaryRows | None = None
    of_indexer: bool = False
    head_rows: HeadRows | None = None
    row_chunks: int = 1

    @property
    def module(self) -> str:
        """Name without its last component."""
        return self.name.rpartition(".")[0]

    @property
    def is_linear_weight(self) -> bool:
        """True for a matrix that may be quantized."""
        return self.role in LINEAR_ROLES and len(self.shape) == 2

    @property
    def is_linear_or_projection(self) -> bool:
        """True for a matrix that some engine builds quantized unless a list leaves it out: a
        linear's, or the projection of an MTP module."""
        return self.is_linear_weight or self.role is Role.MTP_PROJECTION


@dataclass(frozen=True, slots=True)
class TensorMaker:
    """Makes the tensors of modules in the main model, or in one MTP layer; dtype is that of weights
    that are not quantized."""

    dtype: DType
    mtp_layer: int | None = None

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """Dtypes of weights that are not quantized: engines cast what they load to the first."""
        return tuple(dict.fromkeys((self.dtype, *FLOATS)))

    def matrix(
        self,
        module: str,
        shape: tuple[int, int],
        role: Role,
        *,
        rotary: RotaryRows | None = None,
    ) -> TensorSpec:
        """Return a module's weight [out, in]."""
        return TensorSpec(
            weight_name(module),
            shape,
            dtypes=self.dtypes,
            role=role,
            mtp_layer=self.mtp_layer,
            rotary=rotary,
        )

    def norm(self, module: str, size: int) -> TensorSpec:
        """Return a norm's weight."""
        return self.kept(weight_name(module), (size,), Role.NORM)

    def kept(self, name: str, shape: tuple[int, ...], role: Role) -> TensorSpec:
        """Return a tensor that no engine quantizes."""
        return TensorSpec(name, shape, self.dtypes, role=role, mtp_layer=self.mtp_layer)


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """Tensor of the MTP layer that the main model has as well."""

    mtp_name: str
    main_name: str


SGLANG_DRAFT = "model.decoder"  # the MTP layer in SGLang's models/*_nextn.py


@dataclass(frozen=True)
class ModulePatterns:
    """Module names as engines' quantization configs refer to them.

    linears: per role a regular expression for its linears, matched behind `model.layers.<n>.`;
    fused names are included. heads: names and `re:` patterns by which engines look for the model's
    head and the MTP layer's copy. other_matrices: those of matrices that engines may build as
    linears, and that are not quantized; heads may be. fused: the last name components of linears
    that engines load as one matrix, with the names of that matrix. absorbed: the last components of
    linears that attention multiplies into other matrices, so that some loaders read them
    unquantized.
    """

    linears: Mapping[Role, str]
    heads: tuple[str, ...] = ()
    other_matrices: tuple[str, ...] = ()
    fused: Mapping[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)
    absorbed: tuple[str, ...] = ()


def weight_name(module: str) -> str:
    """Name of a module's weight tensor; a module's is a tensor's without the last component."""
    return f"{module}.weight"


def linears_by_role(kinds: Iterable[ModulePatterns]) -> dict[Role, str]:
    """Return per role the pattern of the linears of some kinds of parts together."""
    found: dict[Role, list[str]] = {}
    for kind in kinds:
        for role, pattern in kind.linears.items():
            if pattern not in found.setdefault(role, []):
                found[role].append(pattern)
    return {role: own[0] if len(own) == 1 else f"({'|'.join(own)})" for role, own in found.items()}
