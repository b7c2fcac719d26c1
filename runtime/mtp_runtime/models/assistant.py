"""Assistant of a Gemma-4 target: layers over the embedding of the last token and the hidden state
before it, which attend to the target's keys and values.

Source: transformers' gemma4_assistant and its SinglePositionMultiTokenCandidateGenerator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mtp_checkpoints.families.gemma4_assistant import AssistantSpec
from mtp_kernels.batch_layout import BatchLayout
from mtp_runtime.cache import Cache, LayerCache, LayerCaches, PageAllocator
from mtp_runtime.layers.attention import ForwardPass
from mtp_runtime.layers.embedding import Embedding
from mtp_runtime.layers.linear import Linear, dense
from mtp_runtime.loading.draft_folder import DraftTensor
from mtp_runtime.loading.held_source import HeldSource
from mtp_runtime.models.around_layers import load_head
from mtp_runtime.models.execution import Head, Layers, TorchExecution
from mtp_runtime.models.layer_loader import LayerLoader
from mtp_runtime.models.layer_types import layer_type, load_layer
from mtp_runtime.models.model import Model

Kept = Mapping[str, LayerCache]


@dataclass(frozen=True)
class ClusteredHead(Head):
    """Head of a vocabulary in clusters, whose tokens are the rows of ordering [clusters, size]: the
    `picked` clusters with the best centroids have logits, all other tokens no probability."""

    centroids: Linear
    ordering: torch.Tensor
    picked: int

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [T, vocab] of rows that passed the norm."""
        clusters = self.centroids(normed).topk(self.picked, dim=-1).indices
        tokens = self.ordering[clusters].flatten(1)  # [T, picked * size]
        rows = dense(self.linear.weight, normed.dtype)[tokens]
        own = torch.einsum("td,tvd->tv", normed, rows).float()
        none = own.new_full((len(normed), self.ordering.numel()), -torch.inf)
        return none.scatter_(1, tokens, own)

    def best(self, normed: torch.Tensor) -> torch.Tensor:
        """Return the best token [T] of rows that passed the norm."""
        return self.logits(normed).argmax(dim=-1)


@dataclass(frozen=True)
class Assistant:
    """The draft: it drafts from one row over and over, fed its own output in place of the target's
    hidden state, and keeps nothing of any token."""

    embedding: Embedding
    entering: Linear  # [2 * target's d] -> [d]
    layers: Layers
    head: Head
    leaving: Linear  # [d] -> [target's d]

    def new_cache(self, pages: PageAllocator) -> Cache:
        """Make a cache of nothing."""
        return LayerCaches(((),) * len(self.layers))

    def __call__(
        self, tokens: torch.Tensor, hidden: torch.Tensor, kept: Kept, layout: BatchLayout
    ) -> torch.Tensor:
        """Run the layers over tokens [b] and the target's hidden states before them [b, d'].

        kept: the target's caches by kind; layout: rows of the hidden states, whose tokens and those
        before are attended to from the position after them. Returns [b, d] before the norm.
        """
        x = self.entering(torch.cat([self.embedding(tokens), hidden], dim=-1))
        forward = ForwardPass(layout, kept=dict(kept), turned_at=layout.positions + 1)
        return self.layers(x, LayerCaches(((),) * len(self.layers)), forward)

    def recycled(self, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """Return what stands for the target's hidden state in the next draft [b, d']."""
        return self.leaving(normed)


def load_assistant(
    spec: AssistantSpec, tensors: Mapping[str, DraftTensor], target: Model
) -> Assistant:
    """Make an assistant of tensors by name; torch runs it, whatever runs the target.

    Raises UnsupportedError for an activation that is not computed.
    """
    source = HeldSource.of(tensors, target.dtype, target.device)
    loader = LayerLoader(source, spec.facts, spec.facts.max_positions)
    for part in spec.parts:
        layer_type(part)
    execution = TorchExecution()
    head = load_head(loader, spec, execution)
    if spec.clusters:
        ordering = source.raw(spec.ordering).view(spec.clusters, -1)
        head = ClusteredHead(
            head.norm,
            head.outputs,
            centroids=source.linear(spec.centroids),
            ordering=ordering,
            picked=spec.picked,
        )
    return Assistant(
        embedding=target.embedding,
        entering=source.linear(spec.entering),
        layers=execution.layers(load_layer(loader, layer) for layer in spec.layers),
        head=head,
        leaving=source.linear(spec.leaving),
    )
