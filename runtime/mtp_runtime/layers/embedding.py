"""Token embeddings: a table in memory, or anything else that finds the rows of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F


class Embedding(Protocol):
    """Embeddings of tokens, in the dtype and on the device of a model's activations."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [T, d] of tokens [T]."""


@dataclass(frozen=True, eq=False)
class EmbeddingTable:
    """Embeddings of the whole vocabulary in memory [vocab, d], as they are stored; dtype is that of
    the rows that are looked up."""

    weight: torch.Tensor
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [T, d] of tokens [T]."""
        return F.embedding(tokens, self.weight).to(self.dtype)


@dataclass(frozen=True, eq=False)
class ScaledEmbedding:
    """Embeddings times a factor, which is rounded to their dtype."""

    unscaled: Embedding
    scale: float

    @property
    def dtype(self) -> torch.dtype:
        return self.unscaled.dtype

    @property
    def device(self) -> torch.device:
        return self.unscaled.device

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [T, d] of tokens [T]."""
        return self.unscaled(tokens) * torch.tensor(self.scale, dtype=self.dtype)
