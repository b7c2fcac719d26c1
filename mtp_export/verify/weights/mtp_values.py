"""Values of the MTP modules, beyond those of any weight: norms that multiply by w, and linears of
which no part was rounded to zero."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from mtp_checkpoints.families.base import Role, weight_name
from mtp_checkpoints.formats.base import BLOCK
from mtp_checkpoints.tensors.bundle_folder import MTP
from mtp_checkpoints.weights.weight_values import WeightOnDisk, weights_on_disk
from mtp_export.verify import gates
from mtp_export.verify.check import Item, Problem, judged, not_tested, verdict
from mtp_export.verify.diagnosis.causes import weights as causes
from mtp_export.verify.evidence.part_walk import in_threads

if TYPE_CHECKING:
    import torch

    from mtp_checkpoints.families.spec import ModelSpec
    from mtp_export.verify.context import Context

_SAMPLES = 3  # ranges of BLOCK rows that are read of a linear: at its start, middle and end
_BLOCK_ROWS = 32  # of a block of BLOCK columns: what shares a scale may be one row


def run(context: Context) -> Iterator[Item]:
    """The norms, projections and linears of the MTP part."""
    layout = next((layout for layout in context.layouts if layout.name == MTP), None)
    if layout is None:
        return
    lost = context.unwritten_tensors  # which `value_checks` names
    weights = [
        weight
        for weight in weights_on_disk(layout.stored, layout.checkpoint.tensors)
        if lost.isdisjoint(tensor.name for tensor in weight.tensors)
    ]
    norms = [w for w in weights if w.stored.weight.role is Role.NORM]
    yield _norms(norms)
    yield from _own_norms(context, layout.stored.family, norms)
    for weight in weights:
        if weight.stored.weight.role is Role.MTP_PROJECTION:
            yield _halves(weight)
    linears = [weight for weight in weights if weight.stored.weight.is_linear_weight]
    yield _zeros(linears, context.options.workers)


def _norms(norms: Sequence[WeightOnDisk]) -> Item:
    """No norm is centred at zero, as one that engines add 1 to is."""
    problems, most = [], 0.0
    for norm in norms:
        values = norm.encoded(0, norm.rows).dequantize().float()
        negative = float((values < 0).float().mean())
        most = max(most, negative)
        if negative > gates.NEGATIVE_NORM:
            words = causes.norm_centred_at_zero(norm.name, negative)
            problems.append(Problem(norm.name, words))
    return verdict(
        "mtp: norms multiply by w",
        problems,
        figure=f"{len(norms)} norms, at most {most:.0%} negative",
        bound=f"≤ {gates.NEGATIVE_NORM:.0%}",
    )


def _own_norms(
    context: Context, family: ModelSpec, norms: Sequence[WeightOnDisk]
) -> Iterator[Item]:
    """The norms of a module's inputs are neither the main model's last one nor each other."""
    modules = [layer.modules for layer in family.mtp]
    names = {name for one in modules for name in (one.embedding_norm, one.hidden_norm)}
    taken = [_values(norm) for norm in norms if norm.stored.weight.module in names]
    main, last = context.main, weight_name(family.norm)
    others: list[tuple[str, torch.Tensor]] = []
    problems = []
    if main is not None and last in main.tensors:
        others.append((last, main.tensor(last).float()))
    for name, values in taken:
        twin = next((other for other, theirs in others if _are_alike(values, theirs)), None)
        if twin is not None:
            problems.append(Problem(name, causes.taken_for_another(name, twin)))
        others.append((name, values))
    if taken:
        yield verdict("mtp: norms of its inputs", problems, f"{len(taken)} norms")


def _values(norm: WeightOnDisk) -> tuple[str, torch.Tensor]:
    return norm.name, norm.encoded(0, norm.rows).dequantize()


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True for equal norms, but for those that are constant: `value_checks` names them."""
    return one.equal(other) and bool(one.min() != one.max())


@dataclass(frozen=True)
class _Half:
    """One half of a projection's columns: the root mean square, and the share of zeros."""

    size: float
    zeros: float


def _halves(weight: WeightOnDisk) -> Item:
    """Neither half of a projection's columns, of embedding and hidden state, is zeroed or taken for
    the other."""
    name = f"mtp: halves of {weight.stored.weight.name.rpartition('.')[0].rpartition('.')[2]}"
    try:
        first, second = _measured_halves(weight)
    except ValueError as error:
        return not_tested(name, f"it cannot be decoded: {error}", subject=weight.name)
    smaller, larger = sorted((first.size, second.size))
    ratio = f" ({larger / smaller:.1f} times)" if smaller else ""
    zeroed = causes.half_zeroed(
        weight.name,
        "first" if first.zeros > second.zeros else "second",
        has_scales=_has_scales(weight),
        all_zero=max(first.zeros, second.zeros) == 1,
    )
    alike = first == second and first.size > 0  # sums over every element of each
    return judged(
        name,
        max(first.zeros, second.zeros) <= gates.ZERO_SHARE and not alike,
        causes.halves_alike(weight.name) if alike else zeroed,
        figure=f"{first.size:.3g} and {second.size:.3g}{ratio};"
        f" {first.zeros:.0%} and {second.zeros:.0%} zeros",
        bound=f"≤ {gates.ZERO_SHARE:.0%} zeros",
        subject=weight.name,
        data={"size": [first.size, second.size], "zeros": [first.zeros, second.zeros]},
    )


def _has_scales(weight: WeightOnDisk) -> bool:
    return len(weight.tensors) > 1


def _measured_halves(weight: WeightOnDisk) -> tuple[_Half, _Half]:
    import torch

    squares, zeros, elements = torch.zeros(2, dtype=torch.float64), torch.zeros(2), 0
    for start, stop in weight.pieces():
        values = weight.encoded(start, stop).dequantize().double()
        halves = torch.stack(values.chunk(2, dim=1))
        squares += halves.square().sum(dim=(1, 2))
        zeros += (halves == 0).sum(dim=(1, 2))
        elements += halves[0].numel()
    sizes, shares = (squares / elements).sqrt().tolist(), (zeros / elements).tolist()
    return _Half(sizes[0], shares[0]), _Half(sizes[1], shares[1])


def _zeros(linears: Sequence[WeightOnDisk], workers: int) -> Item:
    """No block of a linear is nearly all zeros, by three ranges of rows of each."""
    found = in_threads(
        _zero_block, linears, workers=workers, size_bytes=lambda weight: weight.size_bytes
    )
    problems, most = [], 0.0
    for weight, (share, row, column) in zip(linears, found, strict=True):
        most = max(most, share)
        if share > gates.ZERO_SHARE:
            scales = _has_scales(weight)
            words = causes.block_zeroed(weight.name, share, row, column, has_scales=scales)
            problems.append(Problem(weight.name, words))
    return verdict(
        "mtp: no block rounded to zero",
        problems,
        figure=f"{len(linears):,} linears, at most {most:.0%} of a block",
        bound=f"≤ {gates.ZERO_SHARE:.0%}",
    )


def _zero_block(weight: WeightOnDisk) -> tuple[float, int, int]:
    """The largest share of zeros among blocks [_BLOCK_ROWS, BLOCK], with its first row and column;
    values that cannot be decoded have none."""
    worst = (0.0, 0, 0)
    last = max(0, (weight.rows - 1) // BLOCK)
    starts = {last * number // max(1, _SAMPLES - 1) * BLOCK for number in range(_SAMPLES)}
    for start in sorted(starts):
        try:
            values = weight.encoded(start, min(start + BLOCK, weight.rows)).dequantize()
        except ValueError:  # value_checks says why
            return worst
        for row, column in product(
            range(0, values.shape[0], _BLOCK_ROWS), range(0, values.shape[1], BLOCK)
        ):
            block = values[row : row + _BLOCK_ROWS, column : column + BLOCK]
            worst = max(worst, (float((block == 0).float().mean()), start + row, column))
    return worst
