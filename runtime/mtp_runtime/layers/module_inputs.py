"""Inputs of modules that draft: the embedding of a token and a hidden state, joined."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtp_kernels.decoder import RowStep


@dataclass(frozen=True)
class ModuleInputs:
    """Join of a token's embedding and a hidden state, as a drafting module's layer takes them: both
    normed, side by side.

    projection: of both to the layer's stream. None: the layer's attention is given both, and the
    stream is the hidden state, or its norm where normed_residual is True.
    """

    embedding_norm: RowStep
    hidden_norm: RowStep
    projection: RowStep | None
    normed_residual: bool = False

    def joined(
        self, embedded: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the stream [T, d], and what attention is given [T, 2d], if anything."""
        normed = self.hidden_norm(hidden)
        both = torch.cat([self.embedding_norm(embedded), normed], dim=-1)
        if self.projection is not None:
            return self.projection(both), None
        return normed if self.normed_residual else hidden, both
