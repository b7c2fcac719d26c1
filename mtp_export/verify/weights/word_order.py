"""Order of the columns in AWQ's words: codes that were packed in another one go with the scales of
other columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

from mtp_checkpoints.formats import AwqInt4
from mtp_checkpoints.weights.weight_values import WeightOnDisk
from mtp_export.verify import gates
from mtp_export.verify.check import Item, judged, not_tested
from mtp_export.verify.diagnosis.causes import weights as causes
from mtp_export.verify.evidence.unwritten import stored_weights

if TYPE_CHECKING:
    import torch

    from mtp_export.verify.context import Context

_LEAST = 1e-9  # of scales and spreads, for their logarithms
_SAMPLES = 8  # weights that are read of a part, from its first to its last


def run(context: Context) -> Iterator[Item]:
    """The order of each part that has such words."""
    for layout in context.read_layouts:
        weights = stored_weights(layout, context.unwritten_tensors)
        words = [weight for weight in weights if isinstance(weight.stored.format, AwqInt4)]
        if words:
            sampled = words[:: max(1, -(-len(words) // _SAMPLES))]
            yield _in_order(f"{layout.name}: codes in the order of their scales", sampled)


def _in_order(name: str, weights: Sequence[WeightOnDisk]) -> Item:
    """Codes agree with the scales in the order that they are read in, and not in plain order.

    A group's scale comes from its largest weight: where that is large for its row, the others have
    small codes. So scales and the spread of codes move against each other, in the right order.
    """
    found = [_agreement(weight) for weight in weights]
    if None in found:
        return not_tested(name, "one group per row has no other to be compared with")
    own, plain = (median(pair[place] for pair in found if pair) for place in range(2))
    return judged(
        name,
        own - plain < gates.ORDER_MARGIN,
        causes.words_in_plain_order(weights[0].name),
        subject=weights[0].name,
        figure=f"correlation {own:.2f}, and {plain:.2f} in plain order",
        bound=f"less than {gates.ORDER_MARGIN} above plain order",
    )


def _agreement(weight: WeightOnDisk) -> tuple[float, float] | None:
    """Return the correlation of the logarithms of scales and of the spread of codes, over the
    groups of each row: as the codes are read, and in plain order. None for a single group."""
    encoded = weight.encoded(0, weight.rows)
    assert encoded.scale is not None, "words have scales"
    groups = encoded.scale.shape[1]
    if groups == 1 or encoded.codes.shape[1] % groups:
        return None
    spread = encoded.codes.double().reshape(weight.rows, groups, -1).std(dim=2)  # [N, G]
    scale = _centred(encoded.scale.double().clamp(min=_LEAST).log())
    orders = (spread, AwqInt4.in_plain_order(spread))
    own, plain = (_cosine(_centred(one.clamp(min=_LEAST).log()), scale) for one in orders)
    return own, plain


def _centred(values: torch.Tensor) -> torch.Tensor:
    """Return values [N, G] without what rows and groups have in common."""
    return values - values.mean(1, keepdim=True) - values.mean(0) + values.mean()


def _cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    product = one.norm() * other.norm()
    return float((one * other).sum() / product) if product else 0.0
