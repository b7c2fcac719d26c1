"""Values of MTP tensors of a model without a family here, by dtypes, shapes and names alone: what
needs no description of the model is checked, and the rest is said."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd, inf, prod
from typing import TYPE_CHECKING

import xxhash

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.families.base import FLOATS
from mtp_checkpoints.families.name_parts import linear_of
from mtp_checkpoints.families.signs import has_layers, is_joint_projection
from mtp_checkpoints.formats.base import BLOCK
from mtp_checkpoints.tensors.bundle_folder import MTP
from mtp_checkpoints.tensors.tensor_reader import TensorReader, read_rows
from mtp_checkpoints.weights.weight_values import PIECE_ELEMENTS
from mtp_export.progress import ProgressCallback, counted, format_bytes
from mtp_export.verify import gates
from mtp_export.verify.check import Item, Problem, not_tested, verdict
from mtp_export.verify.diagnosis.causes import parts_lost
from mtp_export.verify.diagnosis.causes import weights as causes
from mtp_export.verify.evidence.part_walk import in_threads
from mtp_export.verify.weights.extents import words_of

if TYPE_CHECKING:
    import torch

    from mtp_export.verify.context import Context

_BLOCK_ROWS = 32  # of a block of BLOCK columns: what shares a scale may be one row
_MOST_APART = 2.0  # medians of norms of one name, of which one is 1 too large
_MAIN_NORMS = 4  # that are read of the main model, of each kind
_DECODED = frozenset({*FLOATS, "F8_E4M3", "F8_E5M2"})


@dataclass(frozen=True)
class _Facts:
    """Values of one tensor. zeros: the largest share of zeros in a block, with its row and column;
    half_zeros: the share in each half of the columns. digest: of the bytes."""

    tensor: TensorInfo
    not_finite: int
    is_constant: bool
    zeros: tuple[float, int, int]
    half_zeros: tuple[float, float]
    digest: str

    @property
    def has_scales(self) -> bool:
        return self.tensor.dtype not in FLOATS

    @property
    def is_matrix(self) -> bool:
        return len(self.tensor.shape) > 1


def run(context: Context) -> Iterator[Item]:
    """The MTP tensors that no layout names, of which the values are floats."""
    if context.mtp is None or any(layout.name == MTP for layout in context.layouts):
        return
    tensors = list(context.mtp.tensors.values())
    decoded = [one for one in tensors if one.dtype in _DECODED and prod(one.shape) > 1]
    total = sum(tensor.size_bytes for tensor in decoded)
    with context.show_progress(f"{MTP}: tensors", total) as progress:
        facts = list(
            in_threads(
                partial(_facts, progress=progress),
                decoded,
                workers=context.options.workers,
                size_bytes=lambda tensor: tensor.size_bytes,
            )
        )
    yield from _values(facts, format_bytes(total))
    yield _norms_as_main(context, decoded)
    yield from _halves(facts)
    yield _twins(facts)
    codes = len(tensors) - len(decoded)
    yield not_tested("mtp: values by the model's family", causes.no_family(codes, len(tensors)))


def _facts(tensor: TensorInfo, progress: ProgressCallback) -> _Facts:
    """Read a tensor once, in pieces of whole blocks."""
    low, high, not_finite = float("inf"), float("-inf"), 0
    worst, halves, digest = (0.0, 0, 0), [0, 0], xxhash.xxh3_128()
    with TensorReader(tensor) as reader:
        for start, stop in _pieces(tensor):
            stored = reader.rows(start, stop)
            digest.update(_bytes_of(stored))
            values = stored.float().flatten(0, -2) if stored.dim() > 1 else stored.float()[None]
            not_finite += int((~values.isfinite()).sum())
            low, high = min(low, float(values.min())), max(high, float(values.max()))
            worst = max(worst, _worst_block(values, start * _rows_each(tensor)))
            if values.shape[1] > 1:
                for side, part in enumerate(values.chunk(2, dim=1)):
                    halves[side] += int((part == 0).sum())
            progress(stored.nbytes)
    half = max(1, prod(tensor.shape) // 2)
    shares = halves[0] / half, halves[1] / half
    return _Facts(tensor, not_finite, low == high, worst, shares, digest.hexdigest())


def _pieces(tensor: TensorInfo) -> Iterator[tuple[int, int]]:
    """Return the ranges of the first axis of whole blocks that cover a tensor, as one matrix."""
    count = tensor.shape[0]
    least = BLOCK // gcd(BLOCK, _rows_each(tensor))
    step = max(1, PIECE_ELEMENTS // max(1, prod(tensor.shape[1:]) * least)) * least
    return ((start, min(start + step, count)) for start in range(0, count, step))


def _rows_each(tensor: TensorInfo) -> int:
    """The rows that each element of the first axis has of a tensor as one matrix: an expert's."""
    return prod(tensor.shape[1:-1])


def _bytes_of(stored: torch.Tensor) -> bytes:
    import torch

    data: bytes = stored.contiguous().view(torch.uint8).numpy().tobytes()
    return data


def _worst_block(values: torch.Tensor, start: int) -> tuple[float, int, int]:
    """The largest share of zeros among blocks [_BLOCK_ROWS, BLOCK] of rows that begin at `start`,
    with its first row and column."""
    from torch.nn.functional import avg_pool2d

    zeros = (values == 0).float()[None]
    shares = avg_pool2d(zeros, (_BLOCK_ROWS, BLOCK), ceil_mode=True)[0]
    row, column = divmod(int(shares.argmax()), shares.shape[1])
    return float(shares[row, column]), start + row * _BLOCK_ROWS, column * BLOCK


def _zeros(tensor: TensorInfo) -> torch.Tensor:
    """Return which elements are zero, as one matrix."""
    import torch

    pieces = [read_rows(tensor, *rows).float() == 0 for rows in _pieces(tensor)]
    return torch.cat(pieces).flatten(0, -2)


def _values(facts: Sequence[_Facts], size: str) -> Iterator[Item]:
    """Values are finite, and no matrix is constant or has a block of zeros."""
    count = f"{counted(len(facts), 'tensor')}, {size}"
    unsound = [one for one in facts if one.not_finite]
    sound = [one for one in facts if one.is_matrix and not one.not_finite]
    constant = [one for one in sound if one.is_constant]
    zeroed = [one for one in sound if not one.is_constant and one.zeros[0] > gates.ZERO_SHARE]
    words = [causes.unsound(one.tensor.name, counted(one.not_finite, "value")) for one in unsound]
    yield verdict("mtp: finite values", _problems(unsound, words), count)
    words = [causes.never_written(one.tensor.name, "one value") for one in constant]
    yield verdict("mtp: no constant tensor", _problems(constant, words), count)
    words = [
        words_of(one.tensor.name, _zeros(one.tensor), *one.zeros[1:], has_scales=one.has_scales)
        for one in zeroed
    ]
    bound = f"≤ {gates.ZERO_SHARE:.0%}"
    yield verdict("mtp: no block rounded to zero", _problems(zeroed, words), count, bound)


def _problems(facts: Sequence[_Facts], words: Sequence[str]) -> list[Problem]:
    return [Problem(one.tensor.name, text) for one, text in zip(facts, words, strict=True)]


def _norms_as_main(context: Context, tensors: Sequence[TensorInfo]) -> Item:
    """Each norm that the main model's layers have too lies where theirs do: around 1 where engines
    multiply by w, around 0 where they multiply by 1 + w."""
    name, found, compared = "mtp: norms as the main model's", dict[str, bool](), 0
    of_main = () if context.main is None else context.main.tensors.values()
    main = _norms_by_kind(one for one in of_main if _multiplies_stream(one.name))
    for kind, norms in _norms_by_kind(tensors).items():
        theirs = main.get(kind, ())[:_MAIN_NORMS]
        usual = [_is_centred(one) for one in theirs]
        if not usual or any(usual) != all(usual):
            continue
        compared += len(norms)
        for norm in norms:
            if is_filled(norm):  # which `cut_off` tells
                continue
            most = max(map(_median, theirs)) + _MOST_APART
            if _lies_around_one(norm, most) if usual[0] else _is_centred(norm):
                found[norm.name] = not usual[0]
    if len({*found.values()}) == 1:  # what was done to one was done to those like it
        centred = next(iter(found.values()))
        shifted = (one.name for one in tensors if _is_as_shifted(one, centred=centred))
        found |= dict.fromkeys(shifted, centred)
    problems = [
        Problem(norm, causes.norm_unlike_main(norm, centred=centred))
        for norm, centred in found.items()
    ]
    if not compared:
        return not_tested(name, "none has the name of a main layer's")
    return verdict(name, problems, f"{compared} norms")


def _multiplies_stream(name: str) -> bool:
    """Return whether a tensor is of a decoder layer, and of no gated delta net, whose norm is one
    of its own kind: it multiplies by w in a model whose others multiply by 1 + w."""
    return has_layers([name]) and ".linear_attn." not in name


def _norms_by_kind(tensors: Iterable[TensorInfo]) -> dict[str, list[TensorInfo]]:
    """Norms by the ends of their names, which the main model's and the module's share."""
    found: dict[str, list[TensorInfo]] = defaultdict(list)
    for one in tensors:
        module, _, last = one.name.rpartition(".")
        if "norm" in module and last == "weight" and len(one.shape) == 1 and one.dtype in FLOATS:
            found[module.rpartition(".")[2]].append(one)
    return found


def _is_as_shifted(tensor: TensorInfo, *, centred: bool) -> bool:
    """Return whether a tensor is a norm that lies where another of its module was moved to: some of
    it is negative, or none is and it lies around one."""
    if not any(_norms_by_kind([tensor]).values()):
        return False
    negative = _negative(tensor)
    return negative > gates.SOME_NEGATIVE if centred else not negative and _lies_around_one(tensor)


def _is_centred(norm: TensorInfo) -> bool:
    """Return whether a norm lies around zero."""
    return _negative(norm) > gates.NEGATIVE_NORM


def _negative(norm: TensorInfo) -> float:
    """Return the share of a norm that is negative."""
    return float((read_rows(norm, 0, norm.shape[0]) < 0).float().mean())


def _lies_around_one(norm: TensorInfo, most: float = inf) -> bool:
    """Return whether a norm is none of 1 + w: not centred, as trained ones may not be, and nearer
    to one than to zero besides. most: the median of one that was not multiplied."""
    return gates.MEDIAN_NORM < _median(norm) < most and not _is_centred(norm)


def is_filled(norm: TensorInfo) -> bool:
    """Return whether one value is a large part of a norm."""
    import torch

    counts = torch.unique(read_rows(norm, 0, norm.shape[0]).float(), return_counts=True)[1]
    return int(counts.max()) >= gates.MOST_FILLED_RUN * norm.shape[0] > 1


def _median(norm: TensorInfo) -> float:
    return float(read_rows(norm, 0, norm.shape[0]).float().median())


def _halves(facts: Sequence[_Facts]) -> Iterator[Item]:
    """Neither half of a projection's columns, of embedding and hidden state, is zeroed."""
    for one in facts:
        rows, columns = (*one.tensor.shape, 0)[:2]
        if not is_joint_projection(one.tensor.name) or columns != 2 * rows:
            continue
        first, second = one.half_zeros
        words = parts_lost.half_zeroed(
            parts_lost.half(one.tensor.name, int(first <= second), rows),
            "shared" if one.has_scales else "none",
            all_zero=max(first, second) == 1,
        )
        zeroed = max(first, second) > gates.ZERO_SHARE
        yield verdict(
            f"mtp: halves of {linear_of(one.tensor.name)}",
            [Problem(one.tensor.name, words)] if zeroed else [],
            f"{first:.0%} and {second:.0%} zeros",
            f"≤ {gates.ZERO_SHARE:.0%} zeros",
        )


def _twins(facts: Sequence[_Facts]) -> Item:
    """No two matrices of the module, as of its experts, hold the same bytes."""
    first: dict[tuple[str, tuple[int, ...]], str] = {}
    problems = []
    for one in facts:
        if one.is_matrix and not one.is_constant:
            name = one.tensor.name
            twin = first.setdefault((one.digest, tuple(one.tensor.shape)), name)
            if twin != name:
                problems.append(Problem(name, causes.taken_for_another(name, twin)))
    return verdict("mtp: no matrix is stored twice", problems, f"{len(first):,} matrices")
