"""Hidden states of texts on disk, in parts of whole texts: one part is in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from mtp_export import state_files
from mtp_runtime.layers.decoder_layer import DecoderLayer
from mtp_runtime.streaming import attend_through
from mtp_runtime.teacher_forcing import Chunk, PagedTexts, Text, Texts

PART_TOKENS = 1 << 14  # of texts that go through a layer together, at most; a text stays whole


@dataclass(frozen=True)
class Part:
    """Texts that go through a layer together."""

    texts: Texts

    def attended(self, layer: DecoderLayer, x: Tensor) -> Tensor:
        """Return rows x [T, d], which are taken in place, behind the attention of a layer."""
        attend_through(layer, x, self._paged, self._chunks)
        return x

    @cached_property
    def _paged(self) -> PagedTexts:
        return PagedTexts.of(self.texts)

    @cached_property
    def _chunks(self) -> list[Chunk]:
        return self._paged.chunks(torch.device("cpu"))


def parts_of(texts: Texts) -> list[Part]:
    """Return texts in parts of at most PART_TOKENS, in order."""
    parts, room = list[list[Text]](), 0
    for text in texts.texts:
        if not parts or room < len(text.tokens):
            parts.append([])
            room = PART_TOKENS
        parts[-1].append(text)
        room -= len(text.tokens)
    return [Part(Texts(tuple(part))) for part in parts]


def held_tokens(tokens: int) -> int:
    """Return how many of so many tokens are in a part, at most."""
    return min(tokens, PART_TOKENS)


@dataclass(frozen=True)
class HiddenStates:
    """Rows [T, d] of all texts, in files of a folder, one per part; each pass over them reads them
    again."""

    folder: Path
    parts: int

    def __getitem__(self, number: int) -> Tensor:
        rows: Tensor = state_files.load(self._path(number))["rows"]
        return rows

    def __iter__(self) -> Iterator[Tensor]:
        return (self[number] for number in range(self.parts))

    @property
    def are_whole(self) -> bool:
        """True where no part is missing."""
        return all(self._path(number).is_file() for number in range(self.parts))

    def make(self, part: Callable[[int], Tensor]) -> None:
        """Make the parts that are missing, by their numbers."""
        for number in range(self.parts):
            if not self._path(number).is_file():
                state_files.save(self._path(number), {"rows": part(number)})

    def _path(self, number: int) -> Path:
        return self.folder / f"part-{number:05d}.pt"


@dataclass(frozen=True)
class FedRows:
    """Rows [T, d] that the feed-forward of a layer takes of hidden states, part by part, in a
    dtype."""

    layer: DecoderLayer
    states: HiddenStates
    dtype: torch.dtype

    def __iter__(self) -> Iterator[Tensor]:
        return (self.layer.fed(x).to(self.dtype) for x in self.states)
