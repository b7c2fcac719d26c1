"""Models that do not fit into memory, read one layer at a time."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.base import weight_name
from mtp_checkpoints.families.parts.shared_gqa import SharedGqa
from mtp_runtime.config import ModelConfig
from mtp_runtime.layers.decoder_layer import DecoderLayer
from mtp_runtime.loading.on_demand import read_ahead
from mtp_runtime.models.execution import TorchExecution
from mtp_runtime.models.load import LoadOptions, OpenedModel, open_model
from mtp_runtime.models.model import Model
from mtp_runtime.teacher_forcing import Chunk, PagedTexts


@dataclass(frozen=True)
class StreamedModel:
    """A model that is read a layer at a time; the caller alone keeps what is handed out.

    Routed experts, heads and embeddings are read when they are used.
    """

    opened: OpenedModel

    @property
    def config(self) -> ModelConfig:
        return self.opened.config

    @property
    def device(self) -> torch.device:
        return self.opened.source.device

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [T, d] of tokens [T]."""
        opened = self.opened
        return opened.source.embedding(weight_name(opened.spec.embedding))(tokens)

    def layer(self, index: int) -> DecoderLayer:
        """Load one main layer by itself, but for its routed experts."""
        return self.opened.layer(index)

    def layers(self, first: int) -> Generator[DecoderLayer]:
        """Yield the main layers from `first` on, the next of which is read meanwhile."""
        with ThreadPoolExecutor(1) as pool:
            yield from read_ahead(pool, self.layer, range(first, self.config.layers), ahead=1)

    def rest(self) -> Model:
        """Load everything but the main layers: embedding, head and MTP modules."""
        return self.opened.model(TorchExecution(), layers=0)


def open_streamed(path: Path, device: str, mtp: Path | None = None) -> StreamedModel:
    """Open a bundle or checkpoint to be streamed in float32, weights kept as stored. mtp: the
    checkpoint whose MTP modules are taken, where they are not beside the main part.

    Raises as load_model does, and UnsupportedError for layers that need others of the model.
    """
    options = LoadOptions(device, dequantize_at_load=False, on_demand=True, mtp_folder=mtp)
    opened = open_model(path, options)
    if any(isinstance(layer.attention, SharedGqa) for layer in opened.spec.layers):
        raise UnsupportedError(
            "This model's layers are not read one by one",
            where=path,
            expected="layers that take the stream alone",
            found="keys and values of other layers, or embeddings of their own beside it",
        )
    return StreamedModel(opened)


def pass_through(
    layer: DecoderLayer, x: torch.Tensor, texts: PagedTexts, chunks: Sequence[Chunk]
) -> None:
    """Take every row of x [T, d] through a layer, in place: all rows together go through the
    feed-forward, so that each expert is read once."""
    attend_through(layer, x, texts, chunks)
    x += layer.added(x)


def attend_through(
    layer: DecoderLayer, x: torch.Tensor, texts: PagedTexts, chunks: Sequence[Chunk]
) -> None:
    """Take every row of x [T, d] through a layer's attention, in place: chunk by chunk, over a
    cache that is dropped afterwards."""
    cache = layer.new_cache(texts.pages.spec(x.dtype, x.device))
    for chunk in chunks:
        x[chunk.rows] = layer.attend(x[chunk.rows], cache, chunk.forward)
