"""Halves of a decoder layer, as everything that walks a model knows them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from mtp_checkpoints.families.base import ModulePatterns, TensorMaker, TensorSpec
from mtp_checkpoints.families.parts.rope import Rope


class FeedForward(Protocol):
    """The part of a decoder layer that takes every row by itself; a frozen dataclass. patterns:
    module names of its linears, as engines' quantization configs refer to them."""

    @property
    def patterns(self) -> ModulePatterns: ...

    def tensors(self, prefix: str, make: TensorMaker) -> Iterator[TensorSpec]:
        """Yield the tensors of one layer, under the names of its modules' prefix."""


class Attention(FeedForward, Protocol):
    """The part of a decoder layer that mixes the rows of a request; a frozen dataclass."""

    @property
    def rope(self) -> Rope | None:
        """Rotary positions; None for an attention without them."""
