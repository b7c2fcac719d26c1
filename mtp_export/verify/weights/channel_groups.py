"""Groups of GPTQ's input channels: g_idx fills every group where engines read it, and permutes
nothing where they do not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import TYPE_CHECKING

from mtp_checkpoints.containers.base import CONFIG_NAME, TensorInfo
from mtp_checkpoints.formats import WHOLE_ROW, GptqWords
from mtp_checkpoints.tensors.tensor_reader import read_rows
from mtp_export.progress import counted
from mtp_export.verify.check import Item, Problem, verdict
from mtp_export.verify.diagnosis.causes import weights as causes
from mtp_export.verify.evidence.part_walk import in_threads
from mtp_export.verify.evidence.unwritten import stored_weights

if TYPE_CHECKING:
    from mtp_export.verify.context import Context

_Grouped = tuple[TensorInfo, GptqWords]  # a g_idx, and the format of its weight


class _Fault(Enum):
    ONE_GROUP = "every channel in group 0"
    OTHER_SIZES = "a group with more or fewer channels than it has"
    PASSED_OVER = "a permutation that no engine reads"


def run(context: Context) -> Iterator[Item]:
    """The groups of each part that has such words."""
    for layout in context.read_layouts:
        grouped = [
            (weight.tensors[-1], weight.stored.format)
            for weight in stored_weights(layout, context.unwritten_tensors)
            if isinstance(weight.stored.format, GptqWords)
        ]
        if grouped:
            yield _item(f"{layout.name}: groups of input channels", grouped, context)


def _item(name: str, grouped: Sequence[_Grouped], context: Context) -> Item:
    """The faults of a part's weights, those that are alike as one problem."""
    found = in_threads(
        _fault, grouped, workers=context.options.workers, size_bytes=lambda one: one[0].size_bytes
    )
    wrong: dict[_Fault, list[str]] = defaultdict(list)
    for (tensor, _), fault in zip(grouped, found, strict=True):
        if fault is not None:
            wrong[fault].append(tensor.name)
    problems = [_problem(fault, names) for fault, names in wrong.items()]
    return verdict(name, problems, counted(len(grouped), "weight"))


def _problem(fault: _Fault, names: Sequence[str]) -> Problem:
    which = f"{names[0]}, like {len(names) - 1:,} more," if len(names) > 1 else names[0]
    if fault is _Fault.PASSED_OVER:  # which no graft mends
        return Problem(CONFIG_NAME, causes.permutation_passed_over(which))
    alike = fault is _Fault.ONE_GROUP
    words = causes.channels_in_one_group if alike else causes.groups_of_other_sizes
    return Problem(names[0], words(which))


def _fault(one: _Grouped) -> _Fault | None:
    """Return the fault of a weight's groups, if any. Numbers of groups that it does not have are
    none of them: they end its reading."""
    tensor, form = one
    channels = tensor.shape[0]
    size = channels if form.group_size == WHOLE_ROW else form.group_size
    groups = channels // size
    group_of = read_rows(tensor, 0, channels).long()
    if int(group_of.min()) < 0 or int(group_of.max()) >= groups:
        return None
    fills_all = bool((group_of.bincount(minlength=groups) == size).all())
    if not form.permuted:
        in_order = bool((group_of.diff() >= 0).all())
        return _Fault.PASSED_OVER if fills_all and not in_order else None
    if fills_all:
        return None
    return _Fault.OTHER_SIZES if group_of.any() else _Fault.ONE_GROUP
