"""Grouped-query attention whose keys and values may be those of another layer of its kind, with
norms of queries, keys and values, and scores that are not scaled.

Source: transformers' gemma4 and gemma4_assistant.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mtp_checkpoints.families.base import TensorMaker, TensorSpec
from mtp_checkpoints.families.parts.gqa import Gqa


@dataclass(frozen=True, slots=True)
class SharedGqa(Gqa):
    """Grouped-query attention of a token to `window` tokens, itself and those before it; None: to
    all.

    keeps: the kind of layers that find its keys and values by this name, "" where none does. reads:
    the kind whose keys and values it takes in place of its own, "" where it projects them.
    own_values: values have a projection; else they are what keys are before their norm.
    """

    window: int | None
    keeps: str = ""
    reads: str = ""
    own_values: bool = True

    @property
    def slot(self) -> int:
        """Numbers that are cached of a token."""
        return 0 if self.reads else self.sizes.slot

    def linears(self, prefix: str) -> tuple[str, ...]:
        """Names of the projections of its input: queries, then keys and values of its own."""
        names = self.modules(prefix)
        if self.reads:
            return (names.query,)
        own = (names.value,) if self.own_values else ()
        return (names.query, names.key, *own)

    def tensors(self, prefix: str, make: TensorMaker) -> Iterator[TensorSpec]:
        """Yield projections and norms of one layer."""
        names = self.modules(prefix)
        kept = {*self.linears(prefix), names.output, names.query_norm}
        if not self.reads:
            kept.add(names.key_norm)
        every = super(SharedGqa, self).tensors(prefix, make)  # slots leave no plain super()
        return (spec for spec in every if spec.module in kept)
