"""Zero points of GPTQ's and AutoRound's words, which a field of quantization_config labels: qzeros
hold them less one or as they are, and a wrong label puts every weight off by its scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from mtp_checkpoints.containers.base import CONFIG_NAME
from mtp_checkpoints.formats import InputWords
from mtp_checkpoints.quantization.methods import METHODS
from mtp_checkpoints.tensors.bundle_folder import MAIN, MTP
from mtp_checkpoints.weights.weight_values import WeightOnDisk
from mtp_export.progress import counted
from mtp_export.verify import gates
from mtp_export.verify.check import Item, failed, not_tested, passed
from mtp_export.verify.diagnosis.causes import weights as causes
from mtp_export.verify.evidence.unwritten import stored_weights

if TYPE_CHECKING:
    from mtp_export.verify.context import Context
    from mtp_export.verify.evidence.parts import PartLayout

_SAMPLES = 12  # weights that are read of a part, from its first to its last
_OTHER = {MAIN: MTP, MTP: MAIN}
_BOUND = "0 too high"


def run(context: Context) -> Iterator[Item]:
    """The zero points of each part that has any, compared with their label."""
    found = {}
    for layout in context.read_layouts:
        if (labelled := _Labelled.of(layout, context.unwritten_tensors)) is not None:
            found[layout.name] = labelled
    for part, own in found.items():
        name, other = f"{part}: zero points as labelled", found.get(_OTHER[part])
        figure = f"{own.excess} too high, in {counted(own.count, 'weight')}"
        if own.excess is None:
            why = "8 bits with zero points that differ: one more or less is below their rounding"
            yield not_tested(name, why)
        elif own.excess == 0:
            yield passed(name, figure=figure, bound=_BOUND)
        else:
            right = other is not None and other.excess == 0
            # The graft of a tensor mends what no label does.
            subject = own.first if right else CONFIG_NAME
            cause = own.cause(one_label=not right)
            yield failed(name, cause, subject=subject, figure=figure, bound=_BOUND)


@dataclass(frozen=True)
class _Labelled:
    """The sampled weights of a part whose zero points have a label.

    first names one of them, excess is what their zero points are too high by as they are read, None
    where nothing tells. less_one: they are read as the label says, as stored less one.
    """

    first: str
    count: int
    excess: int | None
    less_one: bool
    method: str

    @classmethod
    def of(cls, layout: PartLayout, lost: frozenset[str]) -> _Labelled | None:
        """Read some weights of a part; None for one in other formats."""
        on_disk = stored_weights(layout, lost)
        words = [
            (one, one.stored.format) for one in on_disk if isinstance(one.stored.format, InputWords)
        ]
        if not words:
            return None
        weights = words[:: max(1, -(-len(words) // _SAMPLES))]
        quantization: Any = layout.stored.quantization
        return cls(
            first=weights[0][0].name,
            count=len(weights),
            excess=_excess(weights),
            less_one=weights[0][1].zeros_less_one,
            method=quantization["quant_method"],
        )

    def cause(self, *, one_label: bool) -> str:
        """The cause of an excess, and what mends it. one_label: the other label suits both parts,
        as far as they were read."""
        labels = METHODS[self.method].zero_labels
        assert labels is not None, f"{self.method} has no label"
        field, label = labels.field, labels.value(less_one=self.less_one)
        other = labels.value(less_one=not self.less_one)
        mend = causes.label_to_set(field, other) if one_label else causes.no_label_for_both(field)
        words = causes.zero_points_mislabelled(self.first, f"{field} {label}", self.less_one)
        return f"{words}: {mend}"


def _excess(weights: Sequence[tuple[WeightOnDisk, InputWords]]) -> int | None:
    """Return what zero points are too high by.

    Those of symmetric weights are the middle of the range; other weights lie around theirs, which 4
    bits show.
    """
    import torch

    bits, numbers, means = weights[0][1].bits, set[int](), list[float]()
    for weight, form in weights:
        numbers |= {*torch.unique(form.zero_points(weight.others[1])).tolist()}
        means.append(float(weight.encoded(0, weight.rows).codes.double().mean()))
    if len(numbers) == 1 and abs(off := numbers.pop() - (1 << (bits - 1))) <= 1:
        return off
    if bits > 4:
        return None
    off = -round(median(means))
    return off if abs(median(means) + off) <= gates.ZERO_POINT_SLACK else 0
