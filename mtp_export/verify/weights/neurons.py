"""Norms of neurons: gate, up and down of every gated MLP go together, as training makes them; and
experts answer to their own row of the router."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from mtp_checkpoints.families.base import Role
from mtp_export.progress import counted
from mtp_export.verify.check import Item, Problem, verdict
from mtp_export.verify.diagnosis.causes import decoding
from mtp_export.verify.evidence.mlp_notes import MlpWeights, Note, Router, mlps_of
from mtp_export.verify.evidence.unwritten import written_weights

if TYPE_CHECKING:
    from mtp_export.verify.context import Context
    from mtp_export.verify.diagnosis.expert_places import Answer
    from mtp_export.verify.diagnosis.neurons import Neurons

_NAME, _ROUTERS = "norms of neurons go together", "experts answer to their rows of the router"


class _Found(NamedTuple):
    """Norms of an MLP's neurons, and of an expert the answer to its router."""

    neurons: Neurons
    answer: Answer | None


def run(context: Context) -> Iterator[Item]:
    """The MLPs of all parts together, which those of a dense MTP layer are compared with."""
    found = list[tuple[MlpWeights, _Found]]()
    for layout in context.read_layouts:
        notes = {one.weight.name: one.note for one in context.walks.of(layout.name).facts}
        weights = written_weights(layout, context.unwritten_tensors)
        for mlp in mlps_of(layout.apart.stored.family, weights):
            if (one := _found(mlp, notes)) is not None:
                found.append((mlp, one))
    if found:
        yield from _items(found, context.named_tensors)


def _items(found: Iterable[tuple[MlpWeights, _Found]], named: Collection[str]) -> Iterator[Item]:
    """named: tensors whose damage is told, of which no more is said, and with which no router can
    be compared."""
    from mtp_export.verify.diagnosis.expert_places import wrong_orders
    from mtp_export.verify.diagnosis.neurons import are_trained, problems

    kinds: dict[tuple[object, ...], list[Neurons]] = defaultdict(list)
    routers = dict[str, Router]()
    answers: dict[str, list[Answer]] = defaultdict(list)
    told = set[str]()
    for mlp, one in found:
        kinds[mlp.kind].append(one.neurons)
        if mlp.router is not None and one.answer is not None:
            parts = (mlp.router.weight, *mlp.weights)
            told |= {mlp.router.weight.name} if any(part.name in named for part in parts) else set()
            routers[mlp.router.weight.name] = mlp.router
            answers[mlp.router.weight.name].append(one.answer)
    figure = counted(sum(map(len, kinds.values())), "gated MLP")
    siblings, others = (
        [alike for kind, alike in kinds.items() if isinstance(kind[0], Role) is across]
        for across in (False, True)
    )
    wrong = [Problem(*one) for one in problems(siblings, others) if one[0] not in named]
    yield verdict(_NAME, wrong, figure, bound="as far as in their like")
    if answers:
        sound = {name: router for name, router in routers.items() if name not in told}
        names = [name for name, router in sound.items() if are_trained(kinds[router.kind])]
        orders = zip(names, wrong_orders([answers[name] for name in names]), strict=True)
        wrong = [
            Problem(name, words.format(layer=_layer(routers[name])))
            for name, words in orders
            if words
        ]
        yield verdict(_ROUTERS, wrong, counted(len(answers), "router"))


def _layer(router: Router) -> str:
    return decoding.MTP_LAYER if router.layer is None else decoding.main_layer(router.layer)


def _found(mlp: MlpWeights, notes: Mapping[str, Note | None]) -> _Found | None:
    import torch

    from mtp_export.verify.diagnosis.expert_places import Answer
    from mtp_export.verify.diagnosis.neurons import Neurons

    gate, up, down = (notes.get(weight.name) for weight in mlp.weights)
    if gate is None or up is None or down is None:
        return None
    size = min(len(gate.rows), len(down.columns))
    means = [torch.tensor(one[:size]) for one in (gate.rows, up.rows, down.columns)]
    names = (mlp.weights[0].name, mlp.weights[1].name, mlp.weights[2].name)
    neurons = Neurons.of_means(names, torch.stack(means))
    if not neurons.logs.isfinite().all():
        return None
    if mlp.router is None:
        return _Found(neurons, None)
    width = mlp.weights[0].stored.weight.shape[1]
    along = torch.tensor([gate.answers, up.answers], dtype=torch.float64).sum(0)
    squares = width * (sum(gate.rows) / len(gate.rows) + sum(up.rows) / len(up.rows))
    return _Found(neurons, Answer(mlp.expert, along / max(squares, 1e-30)))
