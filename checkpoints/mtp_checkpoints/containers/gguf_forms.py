"""Forms that tensors have in GGUF files otherwise than in released checkpoints: rows or columns of
heads in another order, or other elements.

llama.cpp repeats the keys of a gated delta net in turns, so that the value heads of a file are in
turns too: the first of every key head, then the second of every one.
Source: `conversion/qwen.py` of llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from mtp_kernels.sizes import DeltaSizes

if TYPE_CHECKING:
    import numpy as np

    Indices = np.ndarray[Any, np.dtype[np.intp]]


class Elements(StrEnum):
    """Elements of a file by the released ones, computed in float32."""

    SAME = "same"
    PLUS_ONE = "x + 1"  # of norms that are stored as what differs from 1
    RATE = "-exp(x)"  # of logarithms of decay rates


@dataclass(frozen=True)
class InTurns:
    """Rows (or columns) behind the first ones: size of each value head, of which per_key share one
    of the key heads."""

    key_heads: int
    per_key: int
    size: int
    first: int = 0

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.first + self.key_heads * self.per_key * self.size

    def released(self) -> Indices:
        """Return the released row of every row of a file."""
        import numpy as np

        heads = np.arange(self.key_heads * self.per_key * self.size, dtype=np.intp)
        turned = heads.reshape(self.key_heads, self.per_key, self.size).swapaxes(0, 1).reshape(-1)
        return np.concatenate((np.arange(self.first, dtype=np.intp), self.first + turned))

    def of_file(self) -> Indices:
        """Return the row of a file of every released row."""
        import numpy as np

        return np.argsort(self.released())


@dataclass(frozen=True)
class Form:
    """Form of a tensor in files; squeezed: sizes of 1 between others are left out."""

    rows: InTurns | None = None
    columns: InTurns | None = None
    elements: Elements = Elements.SAME
    squeezed: bool = False

    @property
    def is_wide(self) -> bool:
        """True where the elements of a file are in float32 always."""
        return self.elements is not Elements.SAME or self.squeezed

    def shape(self, released: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in a file."""
        return (released[0], *released[2:]) if self.squeezed else released


OFFSET_NORM = Form(elements=Elements.PLUS_ONE)


def forms_in_turns(sizes: DeltaSizes) -> dict[str, Form]:
    """Return the forms of a gated delta net with flat projections, by its modules' names, or
    those of tensors."""
    per_key, delta = sizes.value_heads // sizes.key_heads, "linear_attn"
    heads = InTurns(sizes.key_heads, per_key, 1)
    values = InTurns(sizes.key_heads, per_key, sizes.value)
    behind = InTurns(sizes.key_heads, per_key, sizes.value, 2 * sizes.key_heads * sizes.key)
    return {
        f"{delta}.A_log": Form(rows=heads, elements=Elements.RATE),
        f"{delta}.dt_bias": Form(rows=heads),
        f"{delta}.in_proj_a": Form(rows=heads),
        f"{delta}.in_proj_b": Form(rows=heads),
        f"{delta}.in_proj_z": Form(rows=values),
        f"{delta}.in_proj_qkv": Form(rows=behind),
        f"{delta}.conv1d": Form(rows=behind, squeezed=True),
        f"{delta}.out_proj": Form(columns=values),
    }
