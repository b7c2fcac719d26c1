"""Norms before gated MLPs go with the columns of gate and up that read them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mtp_checkpoints.families.base import weight_name
from mtp_export.progress import counted
from mtp_export.verify.check import Item, Problem, verdict
from mtp_export.verify.evidence.mlp_notes import mlps_of
from mtp_export.verify.evidence.unwritten import written_weights

if TYPE_CHECKING:
    from mtp_export.verify.context import Context
    from mtp_export.verify.diagnosis.norm_places import NormPlace
    from mtp_export.verify.evidence.parts import PartLayout

_LEAST = 1e-30  # of a square, whose logarithm is taken


def run(context: Context) -> Iterator[Item]:
    """The layers of all parts together, which those of an MTP layer are compared with."""
    from mtp_export.verify.diagnosis.norm_places import LEAST_LAYERS, misplaced

    sizes: dict[int, list[NormPlace]] = defaultdict(list)
    for layout in context.read_layouts:
        for place in _places(context, layout):
            sizes[len(place.values)].append(place)
    alike = [places for places in sizes.values() if len(places) >= LEAST_LAYERS]
    if alike:
        wrong = [Problem(*found) for places in alike for found in misplaced(places)]
        figure = counted(sum(map(len, alike)), "norm")
        yield verdict("norms go with the columns that read them", wrong, figure)


def _places(context: Context, layout: PartLayout) -> Iterator[NormPlace]:
    """Yield the norms of a part, each with the columns of all MLPs of its layer that were noted."""
    import torch

    from mtp_export.verify.diagnosis.norm_places import NormPlace

    family = layout.apart.stored.family
    stored = {
        one.stored.weight.name: one for one in written_weights(layout, context.unwritten_tensors)
    }
    notes = {one.weight.name: one.note for one in context.walks.of(layout.name).facts}
    squares: dict[str, list[torch.Tensor]] = defaultdict(list)
    for mlp in mlps_of(family, stored.values()):
        for weight in mlp.weights[:2]:
            if (note := notes.get(weight.name)) is not None:
                squares[mlp.norm].append(torch.tensor(note.columns, dtype=torch.float64))
    for name, columns in squares.items():
        norm = stored.get(weight_name(name))
        if norm is None:
            continue
        values = norm.encoded(0, norm.rows).dequantize().double() + family.facts.norm_offset
        of_columns = torch.stack(columns).sum(0)
        if (
            values.isfinite().all()
            and of_columns.isfinite().all()
            and len(values) == len(columns[0])
        ):
            logs = [one.clamp_min(_LEAST).log() / 2 for one in (values.square(), of_columns)]
            yield NormPlace(norm.name, logs[0], logs[1])
