"""Numbers of whole matrices beside nvfp4's scales: engines take one for all linears that they join,
so parts with others decode as multiples of themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.formats.nvfp4 import NvFp4Format
from mtp_checkpoints.tensors.tensor_reader import read_rows
from mtp_checkpoints.weights.weight_values import WeightOnDisk
from mtp_export.progress import counted
from mtp_export.verify.check import Item, Problem, verdict
from mtp_export.verify.diagnosis.causes import weights as causes
from mtp_export.verify.evidence.part_walk import in_threads
from mtp_export.verify.evidence.unwritten import stored_weights

if TYPE_CHECKING:
    from mtp_checkpoints.families.spec import ModelSpec
    from mtp_export.verify.context import Context

_NEAR = 30.0  # times apart that numbers of one part may be
_OF_MATRIX, _OF_INPUTS = 2, 3  # among the tensors of the format


class _Number(NamedTuple):
    """A number of a weight in a format, and the weights that must have the same, in words."""

    tensor: TensorInfo
    made: NvFp4Format
    joined: str
    of_inputs: bool


def run(context: Context) -> Iterator[Item]:
    """The numbers of each part that has any."""
    for layout in context.read_layouts:
        numbers = [
            number
            for weight in stored_weights(layout, context.unwritten_tensors)
            if isinstance(weight.stored.format, NvFp4Format)
            for number in _numbers_of(weight, layout.stored.family)
        ]
        if numbers:
            yield _item(f"{layout.name}: numbers of whole matrices", numbers, context)


def _numbers_of(weight: WeightOnDisk, family: ModelSpec) -> Iterator[_Number]:
    module, made = weight.stored.weight.module, weight.stored.format
    assert isinstance(made, NvFp4Format)
    parent, _, last = module.rpartition(".")
    parts = next((parts for parts in family.patterns.fused if last in parts), (last,))
    joined = f"{parent}.{' and '.join(parts)}"
    yield _Number(weight.tensors[_OF_MATRIX], made, joined, of_inputs=False)
    if made.has_input_scale:
        yield _Number(weight.tensors[_OF_INPUTS], made, joined, of_inputs=True)


def _item(name: str, numbers: Sequence[_Number], context: Context) -> Item:
    values = in_threads(_value, numbers, workers=context.options.workers, size_bytes=lambda one: 4)
    problems: list[Problem] = []
    found: dict[tuple[str, bool], dict[float, str]] = defaultdict(dict)
    pairs = zip(numbers, values, strict=True)  # check values names what is no scale
    read = [(number, value) for number, value in pairs if value is not None]
    of_matrices = [_as_made(*pair) for pair in read if not pair[0].of_inputs]
    for number, value in read:
        right = value if number.of_inputs else _as_made(number, value)
        if right != value and 1 / _NEAR < right / median(of_matrices) < _NEAR:
            cause = causes.reciprocal_number(number.tensor.name, value)
            problems.append(Problem(number.tensor.name, cause))
        found[number.joined, number.of_inputs].setdefault(value, number.tensor.name)
    for (joined, of_inputs), names in found.items():
        if len(names) > 1:
            words = causes.joined_inputs_apart if of_inputs else causes.joined_numbers_apart
            subject = [*names.values()][-1]
            problems.append(Problem(subject, words(joined, max(names) / min(names))))
    return verdict(name, problems, counted(len(numbers), "number"))


def _as_made(number: _Number, value: float) -> float:
    """Return a number of a matrix, or its reciprocal where its layout has that."""
    return 1 / value if number.made.is_reciprocal(value) else value


def _value(number: _Number) -> float | None:
    """Return a number; None for one that is not finite and above 0."""
    tensor = number.tensor
    value = float(read_rows(tensor, 0, tensor.shape[0] if tensor.shape else 1))
    return value if 0 < value < float("inf") else None
