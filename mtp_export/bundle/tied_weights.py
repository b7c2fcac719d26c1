"""Comparison of the MTP layer's copy of a tensor with the main model's: byte by byte as they are
read, or of what both dequantize to where they are stored in different precisions."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.formats import WeightFormat
from mtp_checkpoints.quantization.stored import StoredModel
from mtp_checkpoints.sources.direct_io import equal_bytes
from mtp_checkpoints.sources.disk_queue import DiskQueue
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_checkpoints.tensors.tensor_stream import TensorStream
from mtp_checkpoints.weights.weight_values import (
    Rounding,
    WeightOnDisk,
    weights_on_disk,
)
from mtp_export.bundle.split import shared_pairs


@dataclass(frozen=True)
class TiedCopies:
    """Own copies of embedding and head that the MTP layers have, each with the main model's.

    alike: tensors of one precision, which are compared byte by byte; unlike: weights of different
    precisions, of which what they dequantize to is compared.
    """

    stored: StoredModel
    alike: Mapping[str, str]
    unlike: Mapping[str, str]

    @classmethod
    def of(cls, checkpoint: Checkpoint, stored: StoredModel) -> TiedCopies:
        """Return the copies that a checkpoint holds, but for those that nothing can compare."""
        pairs = [(p.mtp_name, p.main_name) for p in shared_pairs(checkpoint, stored.family)]

        def form(name: str) -> tuple[WeightFormat, str]:
            one = stored.tables[name]
            return one.format, checkpoint.tensors[one.tensors[0].name].dtype

        alike = {own: main for own, main in pairs if form(own) == form(main)}
        unlike = {
            own: main
            for own, main in pairs
            if own not in alike and all(stored.tables[one].format.is_decoded for one in (own, main))
        }
        return cls(stored, alike, unlike)

    @classmethod
    def nothing(cls, stored: StoredModel) -> TiedCopies:
        """Return no copies: there is nothing to compare."""
        return cls(stored, {}, {})

    @property
    def unlike_tensors(self) -> tuple[str, ...]:
        """Names of the tensors that the unlike weights consist of."""
        weights = [self.stored.weights[name] for pair in self.unlike.items() for name in pair]
        return tuple(tensor.name for weight in weights for tensor in weight.tensors)

    def compare(
        self,
        tensors: Mapping[str, TensorInfo],
        alike: Collection[str],
        queue: DiskQueue,
        proceed: Callable[[], None],
    ) -> None:
        """Compare the unlike ones and some of the others (InvalidInputError)."""
        for own in alike:
            main = tensors[self.alike[own]]
            with TensorStream(tensors[own], queue) as ours, TensorStream(main, queue) as theirs:
                compare_tied(ours, theirs, lambda _: proceed())
        if self.unlike:
            on_disk = weights_on_disk(self.stored, tensors)
            by_name = {one.stored.weight.name: one for one in on_disk}
            for own, main_name in self.unlike.items():
                compare_dequantized(by_name[own], by_name[main_name], use=proceed)


def first_difference(
    one: TensorStream, other: TensorStream, use: Callable[[memoryview], None]
) -> int | None:
    """Return the offset of the first byte in which two tensors of one size differ; None if none.

    use is given every block of the first tensor before the difference.
    """
    done = 0
    for piece, twin in zip(one.blocks(), other.blocks(), strict=True):
        if not equal_bytes(piece, twin):
            return done + len(os.path.commonprefix([bytes(piece), bytes(twin)]))
        use(piece)
        done += len(piece)
    return None


def compare_tied(own: TensorStream, main: TensorStream, use: Callable[[memoryview], None]) -> None:
    """Give use every block of an MTP tensor (InvalidInputError where the main model's differs)."""
    offset = first_difference(own, main, use)
    if offset is not None:
        raise _untied(own.info, main.info, "equal bytes", f"a difference at byte {offset}")


def compare_dequantized(
    own: WeightOnDisk, main: WeightOnDisk, use: Callable[[], None] = lambda: None
) -> None:
    """Compare a copy in another precision with the main model's (InvalidInputError where it is no
    rounding of it); use is called after every piece."""
    rounding = Rounding()
    for start, stop in own.pieces():
        rounding.add(own.encoded(start, stop), main.encoded(start, stop))
        use()
    if not rounding.is_all:
        raise _untied(own.tensors[0], main.tensors[0], rounding.expected, rounding.shown)


def _untied(own: TensorInfo, main: TensorInfo, expected: str, found: str) -> InvalidInputError:
    return InvalidInputError(
        f"The MTP layer's {own.name} differs from the main model's {main.name}",
        where=own.path,
        expected=f"{expected}: engines use the main model's for both",
        found=found,
        todo="Check that the MTP layer belongs to this model; --allow-untied exports it"
        " nevertheless, with the layer's own copies",
    )
