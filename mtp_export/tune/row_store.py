"""Rows on disk, in parts: made once, and read again by an interrupted run or by other processes."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_export import state_files
from mtp_export.tune.options import DataOptions
from mtp_export.tune.rows import GOALS, Line, Rows
from mtp_export.verify.evidence.prompts import encoded
from mtp_runtime.prompts import read_texts
from mtp_runtime.training.head_loss import Goals

PART_LINES = 64
TRAINING_DTYPE, MEASURING_DTYPE = torch.bfloat16, torch.float32
MOST_HELD_OUT = 64
_LEAST_TOKENS = 3


@dataclass(frozen=True)
class Data:
    """Lines to train on and lines to measure on."""

    training: tuple[Line, ...]
    held_out: tuple[Line, ...]

    @classmethod
    def read(cls, options: DataOptions, main: Checkpoint, seed: int) -> Data:
        """Read the files of prompts; without a second one a tenth of the lines is held out.

        Raises what read_texts raises, and InvalidInputError for too few lines.
        """
        lines = read_lines(options.prompts, main)
        if options.held_out is not None:
            return cls(lines, read_lines(options.held_out, main))
        if len(lines) < 2:
            raise InvalidInputError(
                "The data has too few prompts to train on some and measure on others",
                where=options.prompts,
                expected="at least 2 prompts, or a second file with --held-out",
                found=len(lines),
            )
        count = min(MOST_HELD_OUT, max(1, len(lines) // 10))
        chosen = set(random.Random(f"{seed}-held-out").sample(range(len(lines)), count))
        training = tuple(line for number, line in enumerate(lines) if number not in chosen)
        return cls(training, tuple(lines[number] for number in sorted(chosen)))

    @property
    def identity(self) -> str:
        """A name for the lines."""
        return identity_of(self)


def identity_of(lines: object) -> str:
    """Return a name for what a file of prompts holds."""
    return hashlib.sha256(repr(lines).encode()).hexdigest()[:16]


def read_lines(path: Path, main: Checkpoint) -> tuple[Line, ...]:
    """Read a file of prompts, with their answers where it has some.

    Raises what read_texts raises, and InvalidInputError where no prompt is long enough.
    """
    texts = read_texts(path)
    prompts = encoded(main, path, (prompt for prompt, _ in texts))
    given = encoded(main, path, (answer for _, answer in texts if answer is not None))
    answers = iter(given)
    lines = [
        Line(prompt, None if answer is None else next(answers))
        for prompt, (_, answer) in zip(prompts, texts, strict=True)
    ]
    kept = tuple(line for line in lines if len(line.prompt) >= 2)
    if not kept:
        raise InvalidInputError(
            "No prompt of the data is long enough", where=path, expected="2 tokens or more"
        )
    return kept


class RowWriter(Protocol):
    """The target, however it is computed."""

    def rows(self, lines: Sequence[Line], dtype: torch.dtype) -> Rows:
        """Return lines with their answers, and what the target computes of them; dtype is that of
        hidden states."""


def row_bytes(hidden: int) -> int:
    """Return the bytes of a training row on disk."""
    return 4 + hidden * TRAINING_DTYPE.itemsize + GOALS * 8


@dataclass(frozen=True)
class RowStore:
    """Parts of rows in a folder, which the writer makes where they are missing.

    part_lines: lines of a part, through which the target goes together.
    """

    folder: Path
    lines: Sequence[Line]
    dtype: torch.dtype
    part_lines: int = PART_LINES

    @property
    def paths(self) -> list[Path]:
        """Files of all parts, in order."""
        count = -(-len(self.lines) // self.part_lines)
        return [self.folder / f"part-{number:05d}.pt" for number in range(count)]

    def make(self, writer: Callable[[], RowWriter], advance: Callable[[int], object]) -> None:
        """Make the parts that are missing; advance is told the lines of every part."""
        for number, path in enumerate(self.paths):
            lines = self.lines[number * self.part_lines : (number + 1) * self.part_lines]
            if not path.is_file():
                state_files.save(path, writer().rows(lines, self.dtype).state())
            advance(len(lines))

    @cached_property
    def parts(self) -> list[Rows]:
        """All parts; tensors are mapped, not read."""
        return [Rows.of(state_files.load(path, mapped=True)) for path in self.paths]

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of every text."""
        return [length for part in self.parts for length in part.lengths]

    def chains(self, number: int, depth: int) -> int:
        """Return how many chains of a text have a draft at a depth from 0."""
        return max(0, self.lengths[number] - 1 - depth)

    @cached_property
    def _places(self) -> list[tuple[Rows, int, int]]:
        """Part, text within it, and first row of every text."""
        return [
            (part, number, start)
            for part in self.parts
            for number, start in enumerate(part.texts.starts)
        ]

    def batch(self, numbers: Sequence[int], device: torch.device) -> Batch:
        """Return texts side by side, filled up to the length of the longest."""
        longest = max(self.lengths[number] for number in numbers)
        texts = [self._text(number) for number in numbers]
        tokens, hidden, ids, log_probs = (
            torch.stack([_filled(parts[index], longest) for parts in texts]).to(device)
            for index in range(4)
        )
        lengths = torch.tensor([self.lengths[number] for number in numbers], device=device)
        goals = Goals.sharpened(ids.long(), log_probs)
        return Batch(tokens.long(), hidden=hidden.float(), goals=goals, lengths=lengths)

    def _text(self, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        part, own, start = self._places[number]
        rows = slice(start, start + self.lengths[number])
        tokens = torch.tensor(part.texts.texts[own].tokens)
        return tokens, part.hidden[rows], part.ids[rows], part.log_probs[rows]


def _filled(values: Tensor, length: int) -> Tensor:
    """Return values [s, ...] with zeros up to a length."""
    return torch.cat([values, values.new_zeros(length - len(values), *values.shape[1:])])


@dataclass(frozen=True)
class Batch:
    """Texts of a step, [b, s] each: tokens, what the draft is fed of the target [b, s, d], the
    target's distribution after every token, and the tokens of each text [b]."""

    tokens: Tensor
    hidden: Tensor
    goals: Goals
    lengths: Tensor

    def starts(self) -> Tensor:
        """Return the slots that chains start at, of all b * s side by side."""
        return self.room(0).nonzero()[:, 0]

    def room(self, depth: int) -> Tensor:
        """Return a mask [b * s]: a chain that starts there has a token for its draft at a depth
        from 0, and what the target would say instead."""
        slots = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return (slots + 1 + depth < self.lengths[:, None]).flatten()


def shuffled(lengths: Sequence[int], batch_tokens: int, seed: int) -> Iterator[list[int]]:
    """Yield batches without end: texts of similar length, each text once in an epoch."""
    usable = [number for number, length in enumerate(lengths) if length >= _LEAST_TOKENS]
    epoch = 0
    while True:
        draw = random.Random(f"{seed}-epoch-{epoch}")
        jitter = {number: lengths[number] * draw.uniform(0.9, 1.1) for number in usable}
        groups: list[list[int]] = [[]]
        for number in sorted(usable, key=lambda number: -jitter[number]):
            longest = max([lengths[number], *(lengths[other] for other in groups[-1])])
            if groups[-1] and longest * (len(groups[-1]) + 1) > batch_tokens:
                groups.append([])
            groups[-1].append(number)
        draw.shuffle(groups)
        yield from groups
        epoch += 1
