"""Types of single tensors of GGUF files, by patterns of their names, as `llama-quantize
--tensor-type` takes them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Self

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.containers.gguf_writing import GgufFiles
from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.errors import UnsupportedError, UsageError
from mtp_checkpoints.formats import FORMATS, GGUF, UNQUANTIZED, WeightFormat
from mtp_checkpoints.formats.base import ReadOnlyFormat
from mtp_export.plan import COPY, Copy, PartPlan, Step, Transform
from mtp_export.schemes.carried import CarryToBlocks
from mtp_export.schemes.gguf_forms import Reform
from mtp_export.schemes.gguf_transforms import SplitLatentUp
from mtp_export.schemes.transforms import Convert

FLAG = "--tensor-type"
_TYPES: Mapping[str, WeightFormat] = {
    "bf16": UNQUANTIZED,
    **{
        name: known()
        for name, known in FORMATS.items()
        if GGUF in known.methods and not issubclass(known, ReadOnlyFormat)
    },
}


@dataclass(frozen=True)
class TensorTypes:
    """Patterns, each with the format of matrices in whose names it is found; the first counts."""

    patterns: tuple[tuple[str, WeightFormat], ...] = ()

    @classmethod
    def of(cls, words: Sequence[str]) -> Self:
        """Return the types that PATTERN=TYPE names; UsageError for words that are none."""
        return cls(tuple(map(_parsed, words)))

    def of_name(self, name: str) -> WeightFormat | None:
        """Return the format of a matrix of a file; None where no pattern is found in its name."""
        found = (own for pattern, own in self.patterns if re.search(pattern, name))
        return next(found, None)

    def check_target(self, target: str) -> None:
        """Refuse types of files that have none (UsageError)."""
        if self.patterns:
            raise UsageError(
                "Only files for llama.cpp have types by tensor",
                expected="--target llama.cpp",
                found=f"--target {target} {FLAG} {self.patterns[0][0][:80]}",
            )

    def check_found(self, parts: Iterable[PartPlan]) -> None:
        """Refuse a pattern that is found in no name of a matrix of the parts (UsageError)."""
        if not self.patterns:
            return
        every = dict.fromkeys(chain.from_iterable(map(_matrices_of, parts)))
        for pattern, _ in self.patterns:
            if not any(re.search(pattern, name) for name in every):
                raise UsageError(
                    f"{FLAG} {pattern[:80]}=TYPE names no matrix of these files",
                    expected="a part of a name, or a regular expression that is found in one, such"
                    f" as {next(iter(every), 'no matrix at all')}",
                    todo="The names are llama.cpp's; vectors and routers stay in F32",
                )

    def typed(self, step: Step, names: Sequence[str], source: TensorInfo) -> Step:
        """Return the step that writes the same matrices in the formats that they get.

        names are the file's of its outputs, source its first input. Raises UnsupportedError for
        rows that blocks do not divide, UsageError for parts that need one format.
        """
        wanted = [self.of_name(name) for name in names]
        if not any(wanted):
            return step
        refuse_codes(step)
        formats = [_kept(step, number) if own is None else own for number, own in enumerate(wanted)]
        outputs = tuple(map(_in_format, formats, step.outputs))
        operation = _operation(step, formats, source)
        return Step(operation, step.inputs, outputs)  # which no scheme asked for


OF_SCHEMES = TensorTypes()


def refuse_codes(step: Step) -> None:
    """Refuse a step that carries codes where numbers would change, or their places: each group of
    codes has a scale of its own (UnsupportedError)."""
    if isinstance(step.operation, CarryToBlocks):
        raise UnsupportedError(
            f"Tensor {step.inputs[0]} is in {step.operation.source.storage}, whose codes are"
            " carried as they are alone",
            expected="no other type for it, and no tensor that llama.cpp has in another form",
            found=f"{step.operation.format.storage} would hold its codes in the released form",
            todo="Start from the original checkpoint",
        )


def is_matrix(output: OutputTensor) -> bool:
    """Return whether a tensor of a file is a matrix, or some, that blocks can hold."""
    return len(output.shape) > 1 and output.dtype != DType.F32


def _matrices_of(part: PartPlan) -> Iterator[str]:
    """Yield the names of matrices in a part's files."""
    for shard in part.shards:
        assert isinstance(shard.container, GgufFiles), "check_target refuses others"
        place = shard.container.place
        yield from (place(output.name).name for output in shard.tensors if is_matrix(output))


def _operation(step: Step, formats: Sequence[WeightFormat], source: TensorInfo) -> Copy | Transform:
    """Return the operation of a step with other formats."""
    own = step.operation
    if isinstance(own, SplitLatentUp):
        return replace(own, formats=(formats[0], formats[1]))
    if len(set(formats)) > 1:
        raise UsageError(
            f"{FLAG} gives the parts of one tensor different types",
            expected=f"one type for {' and '.join(output.name for output in step.outputs)}",
            found=" and ".join(one.storage for one in formats),
        )
    if isinstance(own, Reform):
        return replace(own, format=formats[0])
    before = own.source if isinstance(own, Convert) else UNQUANTIZED
    if formats[0] == before == UNQUANTIZED and source.dtype == DType.BF16:
        return COPY
    rule = own.scale_rule if isinstance(own, Convert) else "minmax"
    return Convert(formats[0], rule, before)


def _kept(step: Step, number: int) -> WeightFormat:
    """Return the format that an output has."""
    own = step.operation
    if isinstance(own, SplitLatentUp):
        return own.formats[number]
    return own.format if isinstance(own, Convert | Reform) else UNQUANTIZED


def _in_format(own: WeightFormat, output: OutputTensor) -> OutputTensor:
    """Return an output in a format (UnsupportedError for rows that its blocks do not divide)."""
    if output.shape[-1] % own.k_divisor:
        raise UnsupportedError(
            f"Tensor {output.name} cannot become {own.storage}",
            expected=f"rows divisible by {own.k_divisor}",
            found=output.shape[-1],
            todo=f"Nothing was written. Choose another type with {FLAG}",
        )
    return own.tensors(output.name, output.shape)[0]


def _parsed(word: str) -> tuple[str, WeightFormat]:
    pattern, _, named = word.rpartition("=")
    known = _TYPES.get(named.lower())
    if not pattern or known is None:
        raise UsageError(
            f"{FLAG} is not PATTERN=TYPE",
            expected=f"a type of {', '.join(_TYPES)} behind the pattern of a name",
            found=word[:100],
        )
    try:
        re.compile(pattern)
    except re.error as error:
        raise UsageError(
            f"{FLAG} has no pattern of a name",
            expected="a part of a name, or a regular expression",
            found=f"{pattern[:80]}: {error}",
        ) from None
    return pattern.lower(), known
