"""Norms that an MTP layer and a main layer hold in each other's place. The linears that read a norm
tell: where training enlarges a channel of the norm, it enlarges their columns too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from mtp_checkpoints.families.base import weight_name
from mtp_checkpoints.formats.base import BLOCK
from mtp_export.progress import counted
from mtp_export.verify import gates
from mtp_export.verify.check import Item, Problem, not_tested, verdict
from mtp_export.verify.diagnosis.causes import weights as causes
from mtp_export.verify.evidence.weight_facts import WeightFacts

if TYPE_CHECKING:
    import torch

    from mtp_checkpoints.families.spec import ModelSpec

_NAME = "mtp: no norm is exchanged with a main layer's"
# The norms of a layer, each with the part whose linears read it.
_PLACES = (
    attrgetter("input_norm", "attention_prefix"),
    attrgetter("post_norm", "feed_forward_prefix"),
)
_SAMPLES = 4  # linears that read a norm, of which the first rows are read
_FEW_LAYERS = 3  # main layers; fewer do not tell what all share
_SMALLEST = 1e-6  # of a norm's weights and of columns, whose logarithms are compared


@dataclass(frozen=True)
class _Reading:
    """A norm and the columns of the linears that read it: logarithms [d] of both."""

    norm: str
    gains: torch.Tensor
    columns: torch.Tensor


def norms_exchanged(
    family: ModelSpec, main: Sequence[WeightFacts], mtp: Sequence[WeightFacts]
) -> Item:
    """No norm of an MTP layer is exchanged with a main layer's of its name.

    It is where the linears of both layers fit the other's norm better than their own. Not tested
    where the main layers' norms do not fit what reads them, as those that took up the scales of
    activations (SmoothQuant, AWQ) do not. family: that which describes the MTP layers.
    """
    read, problems, most = _Reader(family, (*main, *mtp)), list[Problem](), list[float]()
    for place in _PLACES:
        others = [one for one in map(read, map(place, family.layers)) if one is not None]
        for own in map(read, (place(module.layer) for module in family.mtp)):
            if own is None or len(others) < _FEW_LAYERS:
                continue
            fits = _fits([own, *others])
            usual = fits.diagonal()
            if usual[1:].median() < gates.NORM_FIT:
                continue
            ours, theirs = (fits[1:, 0] - usual[0]), (fits[0, 1:] - usual[1:])
            gains = (ours + theirs).where((ours > 0) & (theirs > 0), 0)
            most.append(float(gains.max()))
            if most[-1] > gates.EXCHANGED_NORM:
                twin = others[int(gains.argmax())].norm
                problems.append(Problem(own.norm, causes.norm_exchanged(own.norm, twin)))
    if not most:
        return not_tested(_NAME, "the main layers' norms do not fit the linears that read them")
    figure = f"{counted(len(most), 'norm')}, fit better by {max(most):.2f}"
    return verdict(_NAME, problems, figure, f"≤ {gates.EXCHANGED_NORM}")


class _Reader:
    """Reads norms and columns of sound weights, by the names of a norm and of a part."""

    def __init__(self, family: ModelSpec, facts: Iterable[WeightFacts]) -> None:
        self._offset, hidden = family.facts.norm_offset, family.facts.hidden
        self._norms: dict[str, WeightFacts] = {}
        self._linears: dict[str, list[WeightFacts]] = defaultdict(list)
        layers = (*family.layers, *(module.layer for module in family.mtp))
        parts = {place(layer)[1] for layer in layers for place in _PLACES}
        for fact in facts:
            spec = fact.weight.stored.weight
            if not fact.statistics.is_sound or fact.statistics.is_constant:
                continue
            if not spec.is_linear_weight:
                self._norms[spec.name] = fact
                continue
            part = spec.module
            while part and part not in parts:
                part = part.rpartition(".")[0]
            if spec.shape[1] == hidden != spec.shape[0]:
                self._linears[part].append(fact)

    def __call__(self, names: tuple[str, str]) -> _Reading | None:
        """Return a reading, None where a weight of it is missing or cannot be decoded."""
        import torch

        norm, linears = self._norms.get(weight_name(names[0])), self._linears[names[1]][:_SAMPLES]
        if norm is None or not linears:
            return None
        try:
            gains = _rows(norm) + self._offset
            columns = torch.cat([_rows(one) for one in linears]).square().mean(dim=0).sqrt()
        except ValueError:  # value_checks says why
            return None
        logs = [x.abs().clamp_min(_SMALLEST).log() for x in (gains, columns)]
        return _Reading(norm.weight.name, *logs)


def _rows(fact: WeightFacts) -> torch.Tensor:
    rows = fact.weight.rows
    if fact.weight.stored.weight.is_linear_weight:
        rows = min(BLOCK, rows)
    return fact.weight.encoded(0, rows).dequantize().float()


def _fits(readings: Sequence[_Reading]) -> torch.Tensor:
    """Return the correlation [norms, columns] of each norm with each layer's columns, both less
    what is the same in all layers."""
    import torch

    stacked = [torch.stack([getattr(r, name) for r in readings]) for name in ("gains", "columns")]
    centred = [x - x.mean(dim=0) for x in stacked]
    centred = [x - x.mean(dim=1, keepdim=True) for x in centred]
    gains, columns = (torch.nn.functional.normalize(x, dim=1) for x in centred)
    return gains @ columns.T
