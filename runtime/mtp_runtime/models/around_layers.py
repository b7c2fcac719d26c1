"""Loads what a model has around its layers: embeddings, and the head."""

from __future__ import annotations

from mtp_checkpoints.families.base import Role, weight_name
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.tensors.untied_head import spare_head
from mtp_runtime.layers.embedding import Embedding, ScaledEmbedding
from mtp_runtime.layers.sandwich_layer import PerLayerEmbeddings
from mtp_runtime.models.execution import Execution, Head, Outputs
from mtp_runtime.models.layer_loader import LayerLoader


def load_embedding(loader: LayerLoader, spec: ModelSpec) -> Embedding:
    """Load the embeddings of the stream."""
    table, scale = loader.source.embedding(weight_name(spec.embedding)), spec.facts.embedding_scale
    return table if scale == 1.0 else ScaledEmbedding(table, scale)


def load_head(loader: LayerLoader, spec: ModelSpec, execution: Execution) -> Head:
    """Load the last norm and the projection to the vocabulary."""
    if (spare := spare_head(spec)) is not None:
        loader.source.leave_out(spare)
    outputs = Outputs(loader.source.head(spec.head), execution)
    return Head(loader.norm(spec.norm), outputs, cap=spec.facts.logit_cap)


def load_per_layer(loader: LayerLoader, spec: ModelSpec) -> PerLayerEmbeddings | None:
    """Load the embeddings that layers have beside the stream; None for a model without them."""
    own = [entry.module for entry in spec.more if entry.role is Role.PER_LAYER_INPUT]
    if not own:
        return None
    table, projection, norm = own
    normed = loader.norm(norm)
    return PerLayerEmbeddings(
        ScaledEmbedding(loader.source.embedding(weight_name(table)), len(normed.weight) ** 0.5),
        loader.source.linear(projection),
        normed,
    )
