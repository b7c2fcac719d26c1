"""Values of the MTP modules, beyond those of any weight: norms that multiply by w, and linears of
which no block was rounded to zero."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from mtp_checkpoints.families.base import Role, weight_name
from mtp_checkpoints.families.signs import in_layer
from mtp_checkpoints.formats.base import BLOCK
from mtp_checkpoints.tensors.bundle_folder import MAIN, MTP
from mtp_checkpoints.weights.weight_values import WeightOnDisk
from mtp_export.progress import counted
from mtp_export.verify import gates
from mtp_export.verify.check import Item, Problem, not_tested, verdict
from mtp_export.verify.diagnosis.causes import weights as causes
from mtp_export.verify.evidence.part_walk import in_threads
from mtp_export.verify.evidence.unwritten import written_weights
from mtp_export.verify.weights.extents import extent_of, extent_words, is_zero, zero_extent

if TYPE_CHECKING:
    import torch

    from mtp_checkpoints.families.spec import ModelSpec
    from mtp_export.verify.context import Context

_BIAS = ".bias"  # of a norm, as an indexer's, which may have either sign
_SAMPLES = 3  # ranges of BLOCK rows that are read of a linear: at its start, middle and end
_VALUE_ROWS, _VALUE_COLUMNS = 8, 64  # of a block of one value
_FEW_SCALES = 8  # too few to compare one with the others
_BLOCK_ROWS = 16  # of a block of columns: what shares a scale may be one row


def run(context: Context) -> Iterator[Item]:
    """The norms, projections and linears of the MTP part."""
    layout = next((layout for layout in context.layouts if layout.name == MTP), None)
    if layout is None:
        return
    weights = written_weights(layout, context.unwritten_tensors)
    named = context.named_tensors  # by `value_checks` and `mtp_halves`
    norms = [w for w in weights if w.stored.weight.role is Role.NORM]
    of_main = dict(_norms_of_main(context, layout.stored.family))
    if not layout.stored.family.facts.norm_offset:
        own = [one for one in norms if not one.name.endswith(_BIAS) and one.name not in named]
        yield _norms(own, of_main)
        yield from _norms_around_zero(of_main)
    yield from _own_norms(context, layout.stored.family, norms, of_main)
    linears = [weight for weight in weights if weight.stored.weight.is_linear_weight]
    projections = [one for one in weights if one.stored.weight.role is Role.MTP_PROJECTION]
    whole = [one for one in projections if one.name not in named]
    yield from _blocks([*linears, *whole], context.options.workers)
    yield from _scales(linears)


def _norms(norms: Sequence[WeightOnDisk], of_main: Mapping[str, torch.Tensor]) -> Item:
    """No norm is centred at zero, as one that engines add 1 to is; where one is, nor has another
    some negative weights, and nor are many where none of any of the main model's is."""
    negative = {
        norm.name: float((norm.encoded(0, norm.rows).dequantize() < 0).float().mean())
        for norm in norms
    }
    most = max(negative.values(), default=0.0)
    theirs = [
        float((one < 0).float().mean()) for name, one in of_main.items() if not name.endswith(_BIAS)
    ]
    all_positive = len(of_main) > 1 and max(theirs) <= gates.SOME_NEGATIVE
    least = gates.MANY_NEGATIVE if all_positive else gates.NEGATIVE_NORM
    bound = least if most <= least else gates.SOME_NEGATIVE
    return verdict(
        "mtp: norms multiply by w",
        [
            Problem(name, causes.norm_centred_at_zero(name, share))
            for name, share in negative.items()
            if share > bound
        ],
        figure=f"{len(norms)} norms, at most {most:.0%} negative",
        bound=f"≤ {least:.0%}",
    )


def _norms_around_zero(of_main: Mapping[str, torch.Tensor]) -> Iterator[Item]:
    """Nor are most norms of the main model: one alone may have been trained so."""
    norms = {name: one for name, one in of_main.items() if not name.endswith(_BIAS)}
    shares = {name: float((one < 0).float().mean()) for name, one in norms.items()}
    centred = {name: share for name, share in shares.items() if share > gates.SOME_NEGATIVE}
    if len(norms) > 1:
        are_most = 2 * len(centred) > len(norms) and max(shares.values()) > gates.NEGATIVE_NORM
        problems = [
            Problem(name, causes.norm_centred_at_zero(name, share))
            for name, share in centred.items()
        ]
        figure = f"{len(norms)} norms, {len(centred)} with negative weights"
        yield verdict("main: norms multiply by w", problems if are_most else [], figure)


def _own_norms(
    context: Context,
    family: ModelSpec,
    norms: Sequence[WeightOnDisk],
    of_main: Mapping[str, torch.Tensor],
) -> Iterator[Item]:
    """No norm of a module is another of it, or one of the main model, but for the norm before the
    head, which a module may share with the main model: that is said where no source tells. Those
    that a main layer has by the same name are `main_layer_copies`'s to tell."""
    last = weight_name(family.norm)
    may_be_last = {module.modules.head_norm for module in family.mtp}
    seen: dict[int | None, dict[str, torch.Tensor]] = defaultdict(dict)
    problems, shared = [], list[str]()
    for norm in norms:
        spec, values = norm.stored.weight, norm.encoded(0, norm.rows).dequantize().float()
        kind, others = in_layer(spec.name)[1], dict(seen[spec.mtp_layer])
        others |= {name: one for name, one in of_main.items() if in_layer(name)[1] != kind}
        twin = next((name for name, theirs in others.items() if _are_alike(values, theirs)), None)
        if twin == last and spec.module in may_be_last:
            shared.append(norm.name)
        elif twin is not None:
            problems.append(Problem(norm.name, causes.taken_for_another(norm.name, twin)))
        seen[spec.mtp_layer][norm.name] = values
    if norms:
        yield verdict("mtp: no norm is another", problems, f"{len(norms)} norms")
    if shared and not context.is_bundle and context.source is None:
        words = causes.last_norm_shared(", ".join(shared), last)
        yield not_tested("mtp: a norm of its own before the head", words, subject=shared[0])


def _norms_of_main(context: Context, family: ModelSpec) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the norms of the main model by name: where its bytes are elsewhere, the last alone."""
    layout = next((layout for layout in context.read_layouts if layout.name == MAIN), None)
    if layout is not None:
        for weight in written_weights(layout, context.unwritten_tensors):
            if weight.stored.weight.role is Role.NORM:
                yield weight.name, weight.encoded(0, weight.rows).dequantize().float()
    elif context.main is not None and (last := weight_name(family.norm)) in context.main.tensors:
        yield last, context.main.tensor(last).float()


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True for equal norms, but for those that are constant: `value_checks` names them."""
    return one.equal(other) and bool(one.min() != one.max())


def _blocks(linears: Sequence[WeightOnDisk], workers: int) -> Iterator[Item]:
    """No block of a linear is nearly all zeros, or of one code, by three ranges of rows of each."""
    found = in_threads(
        _worst_blocks, linears, workers=workers, size_bytes=lambda weight: weight.size_bytes
    )
    pairs = list(zip(linears, found, strict=True))
    zeroed = [(weight, worst.zeros) for weight, worst in pairs]
    yield _block_item("mtp: no block rounded to zero", zeroed, _zeroed_words)
    if pairs:
        of_one = [(weight, worst.repeated) for weight, worst in pairs]
        yield _block_item("mtp: no block of one code", of_one, _repeated_words)


@dataclass(frozen=True, order=True)
class _Block:
    """A share of the elements of a block, its first row and column, and their number."""

    share: float = 0.0
    row: int = 0
    column: int = 0
    elements: int = 0


@dataclass
class _Worst:
    """The blocks of a linear with most zeros, and with most values that are as the one before and
    no zero."""

    zeros: _Block = _Block()
    repeated: _Block = _Block()


def _block_item(
    name: str,
    found: Sequence[tuple[WeightOnDisk, _Block]],
    words: Callable[[WeightOnDisk, _Block], str],
) -> Item:
    return verdict(
        name,
        [
            Problem(weight.name, said)
            for weight, block in found
            if block.share > gates.ZERO_SHARE and (said := words(weight, block))
        ],
        figure=f"{len(found):,} linears, at most"
        f" {max((block.share for _, block in found), default=0.0):.0%} of a block",
        bound=f"≤ {gates.ZERO_SHARE:.0%}",
    )


def _zeroed_words(weight: WeightOnDisk, block: _Block) -> str:
    """Name the rows and columns; "" where they are fewer than the zeros, which lie about as small
    weights do beside larger ones that share their scale."""
    found = zero_extent(weight, block.row, block.column)
    is_run = len(found.rows) * len(found.columns) >= gates.ZERO_SHARE * block.elements
    return extent_words(weight, found) if is_run else ""


def _repeated_words(weight: WeightOnDisk, block: _Block) -> str:
    import torch

    masks = []
    for rows in weight.pieces():
        repeated = _repeated(weight.encoded(*rows).dequantize())
        before, behind = (torch.nn.functional.pad(repeated, one) for one in ((0, 1), (1, 0)))
        masks.append(before | behind)
    found = extent_of(torch.cat(masks), block.row, block.column, _VALUE_ROWS)
    return causes.block_of_one_code(weight.name, found.place, found.share)


def _worst_blocks(weight: WeightOnDisk) -> _Worst:
    """The worst blocks of _BLOCK_ROWS rows of a linear; values that cannot be decoded have
    none."""
    worst = _Worst()
    last = max(0, (weight.rows - 1) // BLOCK)
    starts = {last * number // max(1, _SAMPLES - 1) * BLOCK for number in range(_SAMPLES)}
    for start in sorted(starts):
        encoded = weight.encoded(start, min(start + BLOCK, weight.rows))
        try:
            values = encoded.dequantize()
        except ValueError:  # value_checks says why
            return worst
        half = max(1, values.shape[1] // 2)  # which is a block of its own
        columns = min(BLOCK, max(1, half // 2))  # of which one lies in a block that is not aligned
        zeros, repeated = is_zero(values), _repeated(values)
        worst.zeros = max(worst.zeros, _worst_of(zeros, start, _BLOCK_ROWS, columns))
        found = _worst_of(repeated, start, _VALUE_ROWS, min(_VALUE_COLUMNS, half))
        worst.repeated = max(worst.repeated, found)
    return worst


def _repeated(values: torch.Tensor) -> torch.Tensor:
    """Return which values [n, k] are as the one before and no zero [n, k - 1]."""
    return (values[:, 1:] == values[:, :-1]) & ~is_zero(values[:, 1:])


def _worst_of(is_so: torch.Tensor, start: int, rows: int, columns: int) -> _Block:
    """Return the block with the largest share of a mask [n, columns of all blocks], whose rows
    begin at `start`."""
    blocks = (
        (row, column, is_so[row : row + rows, column : column + columns])
        for row, column in product(
            range(0, is_so.shape[0], rows), range(0, is_so.shape[1], columns)
        )
    )
    return max(
        _Block(float(block.float().mean()), start + row, column, block.numel())
        for row, column, block in blocks
    )


def scale_ratio(weight: WeightOnDisk) -> float | None:
    """Return the largest scale of a weight over the upper quartile of all; None of few scales, and
    of those that are not finite, which `value_checks` says."""
    import torch

    if not weight.has_scales:
        return None
    scale = weight.scale.to(torch.float64).abs().flatten()
    if len(scale) < _FEW_SCALES or not scale.isfinite().all():
        return None
    upper = float(scale.kthvalue(len(scale) * 3 // 4).values)
    return float(scale.max()) / upper if upper else 1.0


def _scales(linears: Sequence[WeightOnDisk]) -> Iterator[Item]:
    """No scale of a linear is far above the others of it."""
    problems, most, count = [], 1.0, 0
    for weight in linears:
        if (ratio := scale_ratio(weight)) is None:
            continue
        count += 1
        most = max(most, ratio)
        if ratio > gates.SCALE_RATIO:
            problems.append(
                Problem(weight.name, causes.scale_out_of_proportion(weight.name, ratio))
            )
    if count:
        yield verdict(
            "mtp: scales of one size",
            problems,
            figure=f"{counted(count, 'linear')}, at most {most:.3g} times the upper quartile",
            bound=f"≤ {gates.SCALE_RATIO:.0f} times",
        )
