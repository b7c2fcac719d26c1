"""Matrices inside layers that the ranks divide among them: which part each reads, and the layer
that is made of it."""

from __future__ import annotations

from collections.abc import Sequence

from mtp_checkpoints.errors import UnsupportedError
from mtp_runtime.layers.linear import Linear
from mtp_runtime.layers.split import GatheredLinear, JoinedLinear
from mtp_runtime.loading.weight_source import WeightSource
from mtp_runtime.parallel.group import Split


def parts_of(split: Split, total: int, what: str) -> list[range]:
    """Divide what each rank must have some of; return every rank's part.

    Raises UnsupportedError for more ranks than there are parts.
    """
    if total < split.size:
        raise UnsupportedError(
            f"There are more processes than {what} to divide among them",
            expected=f"at most {total} processes",
            found=split.size,
        )
    return split.parts(total)


def outputs_of(source: WeightSource, module: str) -> list[range]:
    """Divide the outputs of a linear; return every rank's part (UnsupportedError as parts_of)."""
    return parts_of(source.split, source.shape(module)[0], "outputs")


def joined_output(source: WeightSource, module: str, inputs: Sequence[range]) -> Linear:
    """Load the last matrix of a half layer; inputs are every rank's columns of it."""
    joining = source.joining
    own = inputs[source.split.rank]
    if joining.group.is_one:
        return source.linear(module, columns=own)
    outputs = outputs_of(source, module)
    if joining.reduces:
        part = source.linear(module, columns=own)
    else:
        whole = range(inputs[0].start, inputs[-1].stop)
        part = source.linear(module, outputs[source.split.rank], whole)
    sizes = tuple(map(len, inputs)), tuple(map(len, outputs))
    return JoinedLinear(
        part.weight, part.transposed, joining=joining, inputs=sizes[0], outputs=sizes[1]
    )


def gathered_output(source: WeightSource, module: str) -> Linear:
    """Load a linear layer that takes whole inputs; every rank has some outputs."""
    group = source.joining.group
    if group.is_one:
        return source.linear(module)
    outputs = outputs_of(source, module)
    part = source.linear(module, outputs[group.rank])
    sizes = tuple(map(len, outputs))
    return GatheredLinear(part.weight, part.transposed, group=group, outputs=sizes)
