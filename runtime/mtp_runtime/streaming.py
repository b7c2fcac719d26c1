"""Models that do not fit into memory, read one layer at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from mtp_export.families.modules import weight_name
from mtp_runtime.config import ModelConfig
from mtp_runtime.layers.attention import Attention
from mtp_runtime.models.load import LoadOptions, OpenedModel, open_model
from mtp_runtime.models.model import Layers, Model, TorchExecution, TorchLayers


@dataclass(frozen=True)
class StreamedModel:
    """A model that is read a layer at a time; the caller alone keeps what is handed out."""

    opened: OpenedModel

    @property
    def config(self) -> ModelConfig:
        return self.opened.builder.config

    @property
    def device(self) -> torch.device:
        return self.opened.builder.source.device

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [T, d] of tokens [T]."""
        builder = self.opened.builder
        table = builder.source.raw(weight_name(builder.family.modules.embedding))
        return F.embedding(tokens.to(table.device), table).to(builder.source.dtype)

    def attention(self, index: int) -> Attention:
        """Load the attention of one main layer by itself."""
        return self.opened.builder.attention(index)

    def layer(self, index: int) -> Layers:
        """Load one main layer by itself."""
        return TorchLayers((self.opened.builder.layer(index),))

    def rest(self) -> Model:
        """Load everything but the main layers: embedding, head and MTP modules."""
        return self.opened.builder.model(TorchExecution(), self.opened.contract, layers=0)


def open_streamed(path: Path, device: str) -> StreamedModel:
    """Open a bundle or checkpoint to be streamed in float32, weights kept as stored.

    Raises as load_model does.
    """
    return StreamedModel(open_model(path, LoadOptions(device, dequantize_at_load=False)))
