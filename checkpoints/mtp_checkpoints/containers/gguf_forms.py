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
class ByKind:
    """Rows of several kinds, sizes of which each head has side by side: in files all heads' of one
    kind are, then those of the next."""

    heads: int
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.heads * sum(self.sizes)

    def released(self) -> Indices:
        """Return the released row of every row of a file."""
        import numpy as np

        by_head = np.arange(self.count, dtype=np.intp).reshape(self.heads, -1)
        kinds = np.split(by_head, np.cumsum(self.sizes)[:-1], axis=1)
        return np.concatenate([kind.reshape(-1) for kind in kinds])

    def of_file(self) -> Indices:
        """Return the row of a file of every released row."""
        import numpy as np

        return np.argsort(self.released())


@dataclass(frozen=True)
class Form:
    """Form of a tensor in files; squeezed: sizes of 1 between others are left out. parts: modules
    of which files have its rows one after the other, with how many each has."""

    rows: InTurns | ByKind | None = None
    columns: InTurns | None = None
    elements: Elements = Elements.SAME
    squeezed: bool = False
    parts: tuple[tuple[str, int], ...] = ()

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


def forms_by_kind(sizes: DeltaSizes) -> dict[str, Form]:
    """Return the forms of a gated delta net whose projection has the rows of each key head side by
    side; the graph has its gates in another tensor."""
    keys, values = sizes.key, sizes.value_heads // sizes.key_heads * sizes.value
    delta = "linear_attn"
    return {
        f"{delta}.A_log": Form(elements=Elements.RATE),
        f"{delta}.conv1d": Form(squeezed=True),
        f"{delta}.in_proj_qkvz": Form(
            rows=ByKind(sizes.key_heads, (keys, keys, values, values)),
            parts=(
                (f"{delta}.in_proj_qkv", sizes.channels),
                (f"{delta}.in_proj_z", sizes.output),
            ),
        ),
    }
