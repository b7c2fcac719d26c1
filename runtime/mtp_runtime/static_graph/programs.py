"""Layers as functions of tensors: one program for all layers of a form, whose weights are inputs
like the cache and the rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch

from mtp_kernels.batch_layout import BatchLayout
from mtp_runtime.cache import Cache, CacheSpec, LayerCache, LayerCaches, PageAllocator
from mtp_runtime.layers.attention import ExpandedAttention, ForwardPass
from mtp_runtime.layers.decoder_layer import DecoderLayer
from mtp_runtime.models.execution import Layers
from mtp_runtime.models.model import Model
from mtp_runtime.static_graph.steps import Bucket, Buffers, layers_of, refuse_dynamic_layers

Part = TypeVar("Part")

MAX_ROWS, MAX_ENTRIES = 128 * 6, 128 * 2  # of a step: the largest batch with the most drafts
_EXAMPLE = Bucket(requests=3, q_len=2)

# Takes the tensors of `arguments_of`, writes into the cache, and returns the stream [T, d] alone.
Program = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class ProgramLayer:
    """A layer, its weights in the order of tensors_of, and the program of its form."""

    layer: DecoderLayer
    weights: tuple[torch.Tensor, ...]
    program: Program


@dataclass(frozen=True)
class ProgramLayers(Layers):
    """Layers run by programs."""

    layers: tuple[ProgramLayer, ...]

    @classmethod
    def of(cls, model: Model, programs: Mapping[str, Program]) -> ProgramLayers:
        """Take a model's layers, and the program of each form among them."""
        layers = layers_of(model)
        return cls(
            tuple(
                ProgramLayer(layer, tuple(tensors_of(layer)), programs[form_of(layer)])
                for layer in layers
            )
        )

    def __len__(self) -> int:
        return len(self.layers)

    def new_cache(self, spec: CacheSpec) -> LayerCaches:
        return LayerCaches(tuple(compiled.layer.new_cache(spec) for compiled in self.layers))

    def __call__(
        self,
        x: torch.Tensor,
        cache: Cache,
        forward: ForwardPass,
        attention_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert isinstance(cache, LayerCaches), "the cache that new_cache made"
        assert attention_input is None, "the target's layers have input norms"
        for compiled, layer_cache in zip(self.layers, cache.layers, strict=True):
            (x,) = compiled.program(
                [*compiled.weights, *_others(compiled.layer, layer_cache, x, forward)]
            )
        return x

    def part(self, first: int, stop: int) -> ProgramLayers:
        return ProgramLayers(self.layers[first:stop])


def form_of(layer: DecoderLayer) -> str:
    """Return a digest of what a layer computes: classes, numbers and forms of tensors."""
    return hashlib.sha256(outline(layer).encode()).hexdigest()[:16]


def export_layers(model: Model, page_size: int) -> dict[str, torch.export.ExportedProgram]:
    """Export a layer of every form, for any number of requests and rows from 2 on.

    Nothing of it may depend on what a tensor holds: torch refuses that by name. Raises as
    refuse_dynamic_layers.
    """
    refuse_dynamic_layers(model)
    pages = PageAllocator(4, page_size, with_spare=True)
    spec = pages.spec(model.dtype, model.device)
    buffers = Buffers(_EXAMPLE, 4, spare_slot=pages.spare_slot, device=model.device)
    inputs = buffers.inputs(_EXAMPLE)
    forms = {form_of(layer): layer for layer in layers_of(model)}
    with torch.no_grad():
        x, forward = model.embedding(inputs.tokens), ForwardPass(inputs.layout)
        return {
            form: _exported(layer, layer.new_cache(spec), x, forward)
            for form, layer in forms.items()
        }


def _exported(
    layer: DecoderLayer, cache: LayerCache, x: torch.Tensor, forward: ForwardPass
) -> torch.export.ExportedProgram:
    weights = tensors_of(layer)
    return torch.export.export(
        _Function(layer),
        ([*weights, *_others(layer, cache, x, forward)],),
        dynamic_shapes=([*(None for _ in weights), *_sizes(len(cache))],),
        strict=False,
    )


def _others(
    layer: DecoderLayer, cache: LayerCache, x: torch.Tensor, forward: ForwardPass
) -> list[torch.Tensor]:
    """Return what a layer's program takes beside weights: cache, rows, and their layout."""
    assert isinstance(layer.attention, ExpandedAttention), "what is static rotates by one Rope"
    layout, cos_sin = forward.layout, forward.cos_sin(layer.attention.rope)
    return [*cache, x, cos_sin, layout.slots, layout.page_table, layout.kv_lens, layout.cu_q]


def _sizes(caches: int) -> list[dict[int, Any]]:
    """Return which sizes of the tensors beside weights vary."""

    def size(name: str, most: int) -> Any:
        return torch.export.Dim(name, min=2, max=most)

    rows, pages, columns = size("rows", MAX_ROWS), size("pages", 1 << 30), size("columns", 1 << 24)
    entries, ends = size("entries", MAX_ENTRIES), size("ends", MAX_ENTRIES + 1)
    layout = [{0: entries, 1: columns}, {0: entries}, {0: ends}]
    return [*({0: pages} for _ in range(caches)), *({0: rows} for _ in range(3)), *layout]


class _Function(torch.nn.Module):
    """A layer as a function of its tensors."""

    def __init__(self, layer: DecoderLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return the stream [T, d] behind the layer."""
        weights = len(tensors_of(self.layer))
        layer = with_tensors(self.layer, tensors[:weights])
        *cache, x, cos_sin, slots, page_table, kv_lens, cu_q = tensors[weights:]
        # Positions count by their rotations alone.
        layout = BatchLayout(slots, slots, page_table, kv_lens=kv_lens, cu_q=cu_q)
        assert isinstance(layer.attention, ExpandedAttention)
        forward = ForwardPass(layout, rotations={layer.attention.rope: cos_sin})
        return layer(x, tuple(cache), forward)


@dataclass(frozen=True)
class Outline:
    """Stands for a tensor of a shape, strides and a dtype."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Outline:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def tensors_of(part: Any) -> list[torch.Tensor]:
    """Return every tensor of a part once: those in fields of dataclasses and in tuples."""
    tensors = list[torch.Tensor]()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    _changed(part, note, {})
    return tensors


def with_tensors(part: Part, tensors: Sequence[torch.Tensor]) -> Part:
    """Return a part with other tensors, in the order of tensors_of; what it shares stays shared."""
    following = iter(tensors)
    made: Part = _changed(part, lambda tensor: next(following), {})
    return made


def outline(part: Any) -> str:
    """Return what a part computes as text: its classes, numbers, and the forms of its tensors."""
    return repr(_changed(part, Outline.of, {}))


def _changed(part: Any, change: Callable[[torch.Tensor], Any], made: dict[int, Any]) -> Any:
    """Return a part with every tensor changed once; made: by identity, what became of parts."""
    if id(part) not in made:
        made[id(part)] = _rebuilt(part, change, made)
    return made[id(part)]


def _rebuilt(part: Any, change: Callable[[torch.Tensor], Any], made: dict[int, Any]) -> Any:
    if isinstance(part, torch.Tensor):
        return change(part)
    if isinstance(part, tuple):
        items = [_changed(item, change, made) for item in part]
        return type(part)(*items) if hasattr(part, "_fields") else tuple(items)
    if is_dataclass(part) and not isinstance(part, type):
        names = [field.name for field in fields(part) if field.init]
        return replace(part, **{n: _changed(getattr(part, n), change, made) for n in names})
    return part
