"""Norms of neurons: gate, up and down of every gated MLP go together, as training makes them; and
experts answer to their own row of the router."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from mtp_checkpoints.families.base import Role, weight_name
from mtp_checkpoints.families.parts.feed_forward import GatedMlp, MlpModules, Moe, MoeModules
from mtp_checkpoints.weights.weight_values import WeightOnDisk
from mtp_export.progress import counted
from mtp_export.verify.check import Item, Problem, verdict
from mtp_export.verify.diagnosis.causes import decoding
from mtp_export.verify.evidence.part_walk import in_threads
from mtp_export.verify.evidence.unwritten import written_weights

if TYPE_CHECKING:
    import torch

    from mtp_checkpoints.families.spec import ModelSpec
    from mtp_export.verify.context import Context
    from mtp_export.verify.diagnosis.expert_places import Answer
    from mtp_export.verify.diagnosis.neurons import Neurons

_NAME, _ROUTERS = "norms of neurons go together", "experts answer to their rows of the router"
_WHOLE = 1 << 20  # elements of a matrix that is read whole; of a larger one, a corner
_CORNER = 256  # rows and columns of that: whole blocks of scales
_MOST_EXPERTS = 16  # of a layer whose matrices are larger


@dataclass(frozen=True)
class _Router:
    """The weight of a router, its layer in words, and the kind of the experts that it picks."""

    weight: WeightOnDisk
    layer: str
    kind: tuple[object, ...]

    @cached_property
    def rows(self) -> torch.Tensor:
        """Its rows [e, d], which all experts are compared with."""
        return self.weight.encoded(0, self.weight.rows).dequantize().float()


class _Mlp(NamedTuple):
    """The weights of a gated MLP, and what others it is alike to have in common; of an expert its
    number and its router."""

    kind: tuple[object, ...]
    weights: tuple[WeightOnDisk, WeightOnDisk, WeightOnDisk]
    expert: int = 0
    router: _Router | None = None


class _Found(NamedTuple):
    """Norms of an MLP's neurons, and of an expert the answer to its router."""

    neurons: Neurons
    answer: Answer | None


def run(context: Context) -> Iterator[Item]:
    """The MLPs of all parts together, which those of a dense MTP layer are compared with."""
    mlps = [
        mlp
        for layout in context.read_layouts
        for mlp in _mlps(layout.stored.family, written_weights(layout, context.unwritten_tensors))
    ]
    if mlps:
        yield from _items(mlps, context.options.workers)


def _items(mlps: Sequence[_Mlp], workers: int) -> Iterator[Item]:
    from mtp_export.verify.diagnosis.expert_places import wrong_orders
    from mtp_export.verify.diagnosis.neurons import are_trained, problems

    found = in_threads(
        _found, mlps, workers=workers, size_bytes=lambda mlp: mlp.weights[0].size_bytes
    )
    kinds: dict[tuple[object, ...], list[Neurons]] = defaultdict(list)
    routers = dict[str, _Router]()
    answers: dict[str, list[Answer]] = defaultdict(list)
    for mlp, one in zip(mlps, found, strict=True):
        if one is not None:
            kinds[mlp.kind].append(one.neurons)
            if mlp.router is not None and one.answer is not None:
                routers[mlp.router.weight.name] = mlp.router
                answers[mlp.router.weight.name].append(one.answer)
    figure = counted(sum(map(len, kinds.values())), "gated MLP")
    siblings, others = (
        [alike for kind, alike in kinds.items() if isinstance(kind[0], Role) is across]
        for across in (False, True)
    )
    wrong = [Problem(name, words) for name, words in problems(siblings, others)]
    yield verdict(_NAME, wrong, figure, bound="as far as in their like")
    if answers:
        names = [name for name, router in routers.items() if are_trained(kinds[router.kind])]
        orders = zip(names, wrong_orders([answers[name] for name in names]), strict=True)
        wrong = [
            Problem(name, words.format(layer=routers[name].layer))
            for name, words in orders
            if words
        ]
        yield verdict(_ROUTERS, wrong, counted(len(answers), "router"))


def _mlps(family: ModelSpec, weights: Iterable[WeightOnDisk]) -> Iterator[_Mlp]:
    """Yield the MLPs that are stored matrix by matrix; of a layer of large experts, some."""
    stored = {weight.stored.weight.name: weight for weight in weights}
    for number, layer in enumerate(family.every_layer):
        part, prefix = layer.feed_forward, layer.feed_forward_prefix
        if isinstance(part, GatedMlp):
            yield from _mlp(MlpModules.under(prefix), Role.DENSE_MLP, stored)
        elif isinstance(part, Moe):
            is_main = number < len(family.layers)
            words = decoding.main_layer(number) if is_main else decoding.MTP_LAYER
            yield from _experts(part, part.modules(prefix), stored, words)


def _mlp(modules: MlpModules, kind: object, stored: Mapping[str, WeightOnDisk]) -> Iterator[_Mlp]:
    gate, up, down = (stored.get(weight_name(module)) for module in modules)
    if gate is not None and up is not None and down is not None:
        yield _Mlp((kind, *gate.stored.weight.shape), (gate, up, down))


def _experts(
    part: Moe, modules: MoeModules, stored: Mapping[str, WeightOnDisk], layer: str
) -> Iterator[_Mlp]:
    """Yield the experts of a layer, which are alike to each other, and the shared one."""
    weight, own = stored.get(weight_name(modules.router)), None
    large = part.expert.hidden * part.expert.inner > _WHOLE
    step = max(1, len(modules.experts) // _MOST_EXPERTS) if large else 1
    for number in range(0, len(modules.experts), step):
        for mlp in _mlp(modules.experts[number], layer, stored):
            if own is None and weight is not None:
                own = _Router(weight, layer, mlp.kind)
            yield mlp._replace(expert=number, router=own)
    if modules.shared is not None:
        yield from _mlp(modules.shared, Role.SHARED_EXPERT, stored)


def _found(mlp: _Mlp) -> _Found | None:
    import torch

    from mtp_export.verify.diagnosis.expert_places import Answer
    from mtp_export.verify.diagnosis.neurons import Neurons

    gate, up, down = mlp.weights
    try:
        inner = [_corner(one) for one in (gate, up)]
        outer = _corner(down)
    except ValueError:  # value_checks says why
        return None
    size = min(len(inner[0]), outer.shape[1])
    parts = [inner[0][:size], inner[1][:size], outer[:, :size]]
    neurons = Neurons.of((gate.name, up.name, down.name), parts)
    if not neurons.logs.isfinite().all():
        return None
    if mlp.router is None:
        return _Found(neurons, None)
    return _Found(neurons, Answer.of(mlp.expert, torch.cat(inner), mlp.router.rows))


def _corner(weight: WeightOnDisk) -> torch.Tensor:
    """Read a matrix; of a large one, its first rows."""
    rows, columns = weight.stored.weight.shape
    stop = rows if rows * columns <= _WHOLE else min(rows, _CORNER)
    return weight.encoded(0, stop).dequantize().float()
