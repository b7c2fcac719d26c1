"""Gated MLPs of a part, and what the walk over it notes of matrices, of which the checks of norms
and of values that are cut off then read none again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from mtp_checkpoints.families.base import Role, weight_name
from mtp_checkpoints.families.parts.feed_forward import GatedMlp, MlpModules, Moe, MoeModules
from mtp_checkpoints.families.signs import in_layer
from mtp_checkpoints.weights.weight_values import WeightOnDisk

if TYPE_CHECKING:
    import torch

    from mtp_checkpoints.families.spec import ModelSpec
    from mtp_checkpoints.formats import EncodedWeight

_WHOLE = 1 << 20  # elements of a matrix that is looked into whole; of a larger one, some rows
_CORNER = 256  # of which these are whole blocks of scales
_MOST_EXPERTS = 16  # of a layer whose matrices are larger
_MOST_MATRICES = 3 * _MOST_EXPERTS  # of experts that are described as no MLPs
# Of the largest magnitude: what is as large but for rounding to codes, and what lies below that and
# above zero.
_AS_LARGE, _SMALLER, _NONE = 0.98, 0.9, 0.02


class Note(NamedTuple):
    """Mean squares of the rows [n] of a matrix that are looked into, and of the columns [k] of
    these, a norm being one row; their mean squares along each row of a router [e], none without
    one. ends: the share of their elements that are as large as the largest one, and of those
    between that and zero."""

    rows: tuple[float, ...]
    columns: tuple[float, ...]
    answers: tuple[float, ...]
    ends: tuple[float, float]


@dataclass(frozen=True)
class Router:
    """The weight of a router, the number of its main layer, None in an MTP layer, and the kind of
    the experts that it picks."""

    weight: WeightOnDisk
    layer: int | None
    kind: tuple[object, ...]

    @cached_property
    def rows(self) -> torch.Tensor:
        """Its rows [e, d] less their mean, which all experts are compared with."""
        rows = self.weight.encoded(0, self.weight.rows).dequantize().float()
        return rows - rows.mean(0)


class MlpWeights(NamedTuple):
    """The weights of a gated MLP, gate, up and down, and what others it is alike to have in common;
    of an expert its number and its router. norm: the module of the one norm before it, "" of a
    layer whose norms are others."""

    kind: tuple[object, ...]
    weights: tuple[WeightOnDisk, WeightOnDisk, WeightOnDisk]
    norm: str = ""
    expert: int = 0
    router: Router | None = None


@dataclass
class Notes:
    """Findings about a matrix, piece by piece; router: None where it is compared with none."""

    weight: WeightOnDisk
    router: Router | None
    _rows: list[torch.Tensor] = field(default_factory=list)
    _columns: list[torch.Tensor] = field(default_factory=list)
    _answers: list[torch.Tensor] = field(default_factory=list)
    _sizes: list[torch.Tensor] = field(default_factory=list)
    _is_damaged: bool = False

    def add(self, piece: EncodedWeight) -> None:
        """Look into the next rows."""
        *rest, columns = self.weight.stored.weight.shape
        rows = rest[0] if rest else 1
        wanted = rows if rows * columns <= _WHOLE else min(rows, _CORNER)
        left = wanted - sum(map(len, self._rows))
        if left <= 0 or self._is_damaged:
            return
        try:
            values = piece.dequantize().float()
            values = values[:left] if rest else values[None]
            if self.router is not None:
                along = values @ self.router.rows.t()
                self._answers.append(along.square().sum(0))
        except ValueError:  # value_checks says why
            self._is_damaged = True
            return
        squares = values.square()
        self._sizes.append(values.abs())
        self._rows.append(squares.mean(1))
        self._columns.append(squares.sum(0))

    @property
    def found(self) -> Note | None:
        """Return what was noted; None of a matrix that cannot be decoded."""
        if self._is_damaged:
            return None
        rows = [value for part in self._rows for value in part.tolist()]
        columns, answers = (
            [value / len(rows) for value in sum(parts[1:], parts[0]).tolist()] if parts else []
            for parts in (self._columns, self._answers)
        )
        return Note(tuple(rows), tuple(columns), tuple(answers), self._ends())

    def _ends(self) -> tuple[float, float]:
        import torch

        sizes = torch.cat(self._sizes) if self._sizes else torch.zeros(1)
        largest = sizes.max()
        is_norm = len(self.weight.stored.weight.shape) == 1
        ends = sizes >= (1.0 if is_norm else _AS_LARGE) * largest
        between = (sizes > _NONE * largest) & (sizes < _SMALLER * largest)
        return float(ends.float().mean()), float(between.float().mean())


def looked_into(
    weights: Iterable[WeightOnDisk], mlps: Iterable[MlpWeights]
) -> dict[str, Router | None]:
    """Return the names of the weights of which something is noted, and the router that each is
    compared with: of norms, and of all matrices but those of experts in layers whose MLPs
    are given, and of all but the first in others."""
    found, mlps = dict[str, Router | None](), [*mlps]
    layers = {in_layer(weight.name)[0] for mlp in mlps for weight in mlp.weights}
    experts = Counter[str]()
    for weight in weights:
        spec = weight.stored.weight
        is_matrix = len(spec.shape) == 2
        if is_matrix and spec.role is Role.ROUTED_EXPERT:
            layer = in_layer(weight.name)[0]
            experts[layer] += 1
            is_matrix = layer not in layers and experts[layer] <= _MOST_MATRICES
        if is_matrix or (len(spec.shape) == 1 and spec.role is Role.NORM):
            found[weight.name] = None
    for mlp in mlps:
        gate, up, down = (weight.name for weight in mlp.weights)
        found |= {gate: mlp.router, up: mlp.router, down: None}
    return found


def mlps_of(family: ModelSpec, weights: Iterable[WeightOnDisk]) -> Iterator[MlpWeights]:
    """Yield the MLPs that are stored matrix by matrix; of a layer of large experts, some."""
    stored = {weight.stored.weight.name: weight for weight in weights}
    for number, layer in enumerate(family.every_layer):
        part, prefix = layer.feed_forward, layer.feed_forward_prefix
        found: Iterator[MlpWeights] = iter(())
        if isinstance(part, GatedMlp):
            found = _mlp(MlpModules.under(prefix), Role.DENSE_MLP, stored)
        elif isinstance(part, Moe):
            main = number if number < len(family.layers) else None
            found = _experts(part, part.modules(prefix), stored, main)
        is_usual = len(layer.norms) == 2 and not layer.norms_after
        for mlp in found:
            yield mlp._replace(norm=layer.post_norm if is_usual else "")


def _mlp(
    modules: MlpModules, kind: object, stored: Mapping[str, WeightOnDisk]
) -> Iterator[MlpWeights]:
    gate, up, down = (stored.get(weight_name(module)) for module in modules)
    if gate is not None and up is not None and down is not None:
        yield MlpWeights((kind, *gate.stored.weight.shape), (gate, up, down))


def _experts(
    part: Moe, modules: MoeModules, stored: Mapping[str, WeightOnDisk], layer: int | None
) -> Iterator[MlpWeights]:
    """Yield the experts of a layer, which are alike to each other, and the shared one."""
    weight, own = stored.get(weight_name(modules.router)), None
    large = part.expert.hidden * part.expert.inner > _WHOLE
    step = max(1, len(modules.experts) // _MOST_EXPERTS) if large else 1
    for number in range(0, len(modules.experts), step):
        for mlp in _mlp(modules.experts[number], modules.router, stored):
            if own is None and weight is not None:
                own = Router(weight, layer, mlp.kind)
            yield mlp._replace(expert=number, router=own)
    if modules.shared is not None:
        yield from _mlp(modules.shared, Role.SHARED_EXPERT, stored)
