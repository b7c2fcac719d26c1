"""Parts that are told by their tensors alone: enough to export, quantize and judge a model whose
layers the runtime does not compute."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from mtp_checkpoints.dtypes import DType
from mtp_checkpoints.families.base import (
    LINEAR_ROLES,
    ModulePatterns,
    Role,
    TensorMaker,
    TensorSpec,
)

_WEIGHT = ".weight"
_UNQUANTIZED = frozenset({Role.ROUTER, Role.CONVOLUTION, Role.DELTA_GATES, Role.INDEXER_HEADS})
# Linears that engines load as one matrix, with its names.
_JOINED: dict[tuple[str, ...], tuple[str, ...]] = {
    ("q_proj", "k_proj", "v_proj"): ("qkv_proj",),
    ("gate_proj", "up_proj"): ("gate_up_proj",),
    ("wq_du", "wk_dv", "wv_dv", "wr_du"): ("qkvr",),
    ("q_a_proj", "kv_a_proj_with_mqa"): (
        *("fused_qkv_a_proj", "fused_qkv_a_proj_with_mqa", "fused_qkv_a_g_proj_with_mqa"),
    ),
}
_ABSORBED = ("kv_b_proj",)  # attention multiplies it into other matrices
_ONE_EXPERT = re.compile(r"experts\[\.\]\d+.*")


class Entry(NamedTuple):
    """One tensor of a part: its name under the part's prefix, its shape, its role, its dtypes where
    they are not those of weights, and the row_chunks of a TensorSpec."""

    name: str
    shape: tuple[int, ...]
    role: Role
    dtypes: tuple[DType, ...] = ()
    row_chunks: int = 1

    @property
    def module(self) -> str:
        """Name without its last component."""
        return self.name.rpartition(".")[0]

    def tensor(self, prefix: str, make: TensorMaker) -> TensorSpec:
        """Return the tensor under a prefix, which ends with a dot or is empty."""
        made = make.kept(prefix + self.name, self.shape, self.role)
        made = made._replace(row_chunks=self.row_chunks)
        return made._replace(dtypes=self.dtypes) if self.dtypes else made


def matrix(module: str, rows: int, columns: int, role: Role) -> Entry:
    """Return a module's weight [rows, columns]."""
    return Entry(module + _WEIGHT, (rows, columns), role)


def norm(module: str, size: int) -> Entry:
    """Return a norm's weight."""
    return Entry(module + _WEIGHT, (size,), Role.NORM)


def gated_mlp(prefix: str, hidden: int, inner: int, role: Role) -> tuple[Entry, ...]:
    """Return the three matrices of a gated MLP; the prefix ends with a dot, or is empty."""
    return (
        matrix(f"{prefix}gate_proj", inner, hidden, role),
        matrix(f"{prefix}up_proj", inner, hidden, role),
        matrix(f"{prefix}down_proj", hidden, inner, role),
    )


def grouped(
    hidden: int, heads: int, kv_heads: int, head: int, value: int | None = None
) -> tuple[Entry, ...]:
    """Return the projections of grouped-query attention; value: the size of a value's head, where
    it is not that of a query's."""
    role, size = Role.ATTENTION, head if value is None else value
    return (
        matrix("q_proj", heads * head, hidden, role),
        matrix("k_proj", kv_heads * head, hidden, role),
        matrix("v_proj", kv_heads * size, hidden, role),
        matrix("o_proj", hidden, heads * size, role),
    )


def with_bias(entry: Entry) -> tuple[Entry, Entry]:
    """Return a weight and the bias of its rows."""
    return entry, Entry(f"{entry.module}.bias", entry.shape[:1], entry.role)


@dataclass(frozen=True)
class Listed:
    """Part of a layer, by the name of its modules there, and its tensors.

    title says what it computes, for who asks why it is not run. name is "" for modules that lie in
    the layer itself. entries are those of a layer, in the order of its checkpoint.
    """

    title: str
    name: str
    entries: tuple[Entry, ...]

    @property
    def rope(self) -> None:
        """Nothing is known of its positions."""
        return None

    @property
    def patterns(self) -> ModulePatterns:
        """Module names of its linears, as engines' quantization configs refer to them."""
        matrices = [e for e in self.entries if len(e.shape) == 2 and e.name.endswith(_WEIGHT)]
        plain = (self._pattern(e.module) for e in matrices if e.role in _UNQUANTIZED)
        linears: dict[Role, list[str]] = {}
        for role in LINEAR_ROLES:
            own = [entry.module for entry in matrices if entry.role is role]
            if own:
                linears[role] = list(dict.fromkeys(map(self._pattern, _with_fused(own))))
        return ModulePatterns(
            linears={role: f"({'|'.join(own)})$" for role, own in linears.items()},
            other_matrices=tuple(f"re:.*{pattern}$" for pattern in dict.fromkeys(plain)),
            fused={parts: whole for parts, whole in _JOINED.items() if self._has(parts[0])},
            absorbed=_ABSORBED if self._has(*_ABSORBED) else (),
        )

    def _pattern(self, module: str) -> str:
        """Return the pattern of a module's name in a layer, the same for all experts."""
        name = f"{self.name}.{module}".lstrip(".")
        return _ONE_EXPERT.sub("experts.*", name.replace(".", "[.]"))

    def _has(self, linear: str) -> bool:
        return any(entry.module.rpartition(".")[2] == linear for entry in self.entries)

    def tensors(self, prefix: str, make: TensorMaker) -> Iterator[TensorSpec]:
        """Yield the tensors of one layer."""
        return (entry.tensor(f"{prefix}.", make) for entry in self.entries)


def _with_fused(modules: Sequence[str]) -> Iterator[str]:
    """Yield names of linears, and those of the matrices that engines load several of them as."""
    yield from modules
    for module in modules:
        parent, _, last = module.rpartition(".")
        for parts, names in _JOINED.items():
            if last == parts[0]:
                yield from (f"{parent}.{name}".lstrip(".") for name in names)


@dataclass(frozen=True)
class Nothing:
    """Half of a layer that has the other one alone."""

    patterns: ClassVar[ModulePatterns] = ModulePatterns(linears={})

    @property
    def rope(self) -> None:
        """There are no positions."""
        return None

    def tensors(self, prefix: str, make: TensorMaker) -> Iterator[TensorSpec]:
        """Yield no tensor."""
        return iter(())


NOTHING = Nothing()
