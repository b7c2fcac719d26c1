"""Tensors of the main part that no description of the model has, such as those of a vision tower:
an export carries them, and they are the source's bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.formats import GGUF
from mtp_checkpoints.tensors.bundle_folder import MAIN
from mtp_checkpoints.tensors.tensor_reader import TensorReader
from mtp_checkpoints.weights.weight_values import PIECE_ELEMENTS
from mtp_export.progress import counted, format_bytes
from mtp_export.verify.check import Item, Problem, not_tested, verdict
from mtp_export.verify.diagnosis.causes import weights as causes

if TYPE_CHECKING:
    from mtp_export.verify.context import Context


def run(context: Context) -> Iterator[Item]:
    """The carried tensors of the main part compared with --source."""
    source = context.source
    layout = next((one for one in context.read_layouts if one.name == MAIN), None)
    if source is None or layout is None or MAIN in context.parts_of_others:
        return
    carries = layout.stored.family.carries
    own, theirs = (
        {name: tensor for name, tensor in checkpoint.tensors.items() if carries(name)}
        for checkpoint in (layout.checkpoint, source)
    )
    if not own and not theirs:
        return
    if not own and layout.checkpoint.shards[0].container == GGUF:
        yield not_tested("main: tensors of other parts", causes.TOWER_APART)
        return
    problems = [Problem(name, causes.carried_lost(name)) for name in theirs if name not in own]
    for name, tensor in own.items():
        if name not in theirs:
            problems.append(Problem(name, causes.not_in_source(name)))
        elif not _are_equal(tensor, theirs[name]):
            problems.append(Problem(name, causes.carried_changed(name)))
    size = format_bytes(sum(tensor.size_bytes for tensor in own.values()))
    figure = f"{counted(len(own), 'tensor')}, {size}"
    yield verdict("main: tensors of other parts", problems, figure, "bit for bit")


def _are_equal(one: TensorInfo, other: TensorInfo) -> bool:
    """Return whether two tensors are of one dtype and shape, and hold the same bytes."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    rows, *columns = one.shape or (1,)
    step = max(1, PIECE_ELEMENTS // max(1, prod(columns)))
    with TensorReader(one) as ours, TensorReader(other) as originals:
        return all(
            _bytes_of(ours, start, min(start + step, rows))
            == _bytes_of(originals, start, min(start + step, rows))
            for start in range(0, rows, step)
        )


def _bytes_of(reader: TensorReader, start: int, stop: int) -> bytes:
    import torch

    raw = reader.rows(start, stop).contiguous().reshape(-1).view(torch.uint8)
    return bytes(raw.numpy().data)
