"""Norms of neurons: gate, up and down of every gated MLP go together, as training makes them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mtp_checkpoints.families.base import Role, weight_name
from mtp_checkpoints.families.parts.feed_forward import GatedMlp, MlpModules, Moe
from mtp_checkpoints.weights.weight_values import WeightOnDisk, weights_on_disk
from mtp_export.progress import counted
from mtp_export.verify.check import Item, Problem, verdict
from mtp_export.verify.evidence.part_walk import in_threads

if TYPE_CHECKING:
    import torch

    from mtp_checkpoints.families.spec import LayerSpec
    from mtp_export.verify.context import Context
    from mtp_export.verify.diagnosis.neurons import Neurons

_NAME = "norms of neurons go together"
_WHOLE = 1 << 20  # elements of a matrix that is read whole; of a larger one, a corner
_CORNER = 256  # rows and columns of that: whole blocks of scales
_MOST_EXPERTS = 16  # of a layer of the main model whose matrices are larger


class _Mlp(NamedTuple):
    """The weights of a gated MLP, and what others it is alike to have in common."""

    kind: tuple[object, ...]
    weights: tuple[WeightOnDisk, WeightOnDisk, WeightOnDisk]


def run(context: Context) -> Iterator[Item]:
    """The MLPs of all parts together, which those of a dense MTP layer are compared with."""
    mlps = [
        mlp
        for layout in context.read_layouts
        for mlp in _mlps(
            layout.stored.family.every_layer,
            weights_on_disk(layout.stored, layout.checkpoint.tensors),
            context.unwritten_tensors,
        )
    ]
    if mlps:
        yield _item(mlps, context.options.workers)


def _item(mlps: Sequence[_Mlp], workers: int) -> Item:
    from mtp_export.verify.diagnosis.neurons import problems

    found = in_threads(
        _neurons, mlps, workers=workers, size_bytes=lambda mlp: mlp.weights[0].size_bytes
    )
    kinds: dict[tuple[object, ...], list[Neurons]] = defaultdict(list)
    for mlp, neurons in zip(mlps, found, strict=True):
        if neurons is not None:
            kinds[mlp.kind].append(neurons)
    figure = counted(sum(map(len, kinds.values())), "gated MLP")
    wrong = [Problem(name, words) for name, words in problems([*kinds.values()])]
    return verdict(_NAME, wrong, figure, bound="as far as in their like")


def _mlps(
    layers: Iterable[LayerSpec], weights: Iterable[WeightOnDisk], unwritten: Iterable[str]
) -> Iterator[_Mlp]:
    """Yield the MLPs that are stored matrix by matrix; of a main layer of large experts, some."""
    lost = frozenset(unwritten)
    stored = {
        weight.stored.weight.name: weight
        for weight in weights
        if lost.isdisjoint(tensor.name for tensor in weight.tensors)
    }
    for number, layer in enumerate(layers):
        for modules, at in _modules(layer, number):
            own = tuple(stored.get(weight_name(module)) for module in modules)
            gate, up, down = own
            if gate is not None and up is not None and down is not None:
                yield _Mlp((at, *gate.stored.weight.shape), (gate, up, down))


def _modules(layer: LayerSpec, number: int) -> Iterator[tuple[MlpModules, object]]:
    """Yield modules of MLPs, and which others of their shape they are alike to: experts of a layer
    to each other."""
    part, prefix = layer.feed_forward, layer.feed_forward_prefix
    if isinstance(part, GatedMlp):
        yield MlpModules.under(prefix), Role.DENSE_MLP
    elif isinstance(part, Moe):
        modules = part.modules(prefix)
        large = part.expert.hidden * part.expert.inner > _WHOLE
        step = max(1, len(modules.experts) // _MOST_EXPERTS) if large else 1
        yield from ((one, number) for one in modules.experts[::step])
        if modules.shared is not None:
            yield modules.shared, Role.SHARED_EXPERT


def _neurons(mlp: _Mlp) -> Neurons | None:
    from mtp_export.verify.diagnosis.neurons import Neurons

    gate, up, down = mlp.weights
    try:
        inner = [_corner(one) for one in (gate, up)]
        outer = _corner(down)
    except ValueError:  # value_checks says why
        return None
    size = min(len(inner[0]), outer.shape[1])
    parts = [inner[0][:size], inner[1][:size], outer[:, :size]]
    found = Neurons.of((gate.name, up.name, down.name), parts)
    return found if bool(found.logs.isfinite().all()) else None


def _corner(weight: WeightOnDisk) -> torch.Tensor:
    """Read a matrix; of a large one, its first rows."""
    rows, columns = weight.stored.weight.shape
    stop = rows if rows * columns <= _WHOLE else min(rows, _CORNER)
    return weight.encoded(0, stop).dequantize().float()
