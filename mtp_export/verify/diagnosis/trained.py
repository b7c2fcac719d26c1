"""Tensors of a main model of few layers, trained for some steps on plain code: those of all layers
together, of half a layer, and each alone.

Training left a good model where some steps of a part of it gain little on other code. A tensor that
was changed since gains a share of what the change cost, whatever the change was. What any part
gains by getting used to the code, others gain as well where they are trained beside it: of halves
that are trained together, one of a good model is hardly missed when its steps are taken back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mtp_export.verify.diagnosis.causes import decoding as causes
from mtp_export.verify.diagnosis.layer_variants import LayerVariant, changed_tensors, rerouted
from mtp_export.verify.diagnosis.trainable import Spot, Trainable
from mtp_export.verify.diagnosis.trainable_module import TrainableModule
from mtp_export.verify.evidence.likelihood import Likelihood
from mtp_export.verify.evidence.plain_text import CODE, PlainTexts
from mtp_runtime.models.execution import Head

STEPS, TOGETHER_STEPS, SMALL_STEPS, STEP_TEXTS = 12, 36, 24, 8
SCREEN_TEXTS = 16
_TEMPERATURES = 0.75, 1.0, 1.33  # of changes, to the one that fits a model as it is
_SMALL = 8  # times smaller than the largest tensor of a half
# Of the first step, as a share of a tensor's root mean square; that of a tensor of zeros is one.
_RATE, _LEAST_SIZE = 0.02, 1e-3
_MEMORIES = 0.8, 0.95  # of the means of gradients, and of those of their squares
_DAMPING = 0.1  # of the mean square of all elements, beside each one's

Tried = tuple[LayerVariant, Likelihood]
Half = tuple[int, str]
Values = Sequence[tuple[Spot, Tensor]]
Parts = dict[LayerVariant, list[Spot]]


@dataclass(frozen=True)
class Trials:
    """A model, texts of one length to train its tensors on, and others that judge them, with the
    rows [b * s, d] of both before each layer and behind the last."""

    model: Trainable
    code: PlainTexts
    read: list[Tensor]
    judging: PlainTexts
    judged: list[Tensor]

    @classmethod
    def of(cls, model: Trainable, code: PlainTexts, judging: PlainTexts) -> Trials:
        """Take the texts through a model."""
        read, judged = (model.states(texts.table) for texts in (code, judging))
        return cls(model, code, read, judging, judged)

    def of_module(self, module: TrainableModule) -> Trials:
        """The trials of the model's module."""
        last = (self.code, self.read[-1]), (self.judging, self.judged[-1])
        return Trials.fed(module, self.model.head, *last)

    @classmethod
    @torch.no_grad()
    def fed(cls, module: TrainableModule, main: Head, *last: tuple[PlainTexts, Tensor]) -> Trials:
        """Take the last rows of texts before the main model's head, to train on and to judge by,
        through its module; the texts lose their first tokens."""
        texts, rows = [], []
        for some, states in last:
            fed = module.fed(main, states, len(some.kinds))
            texts.append(some.without_first())
            rows.append([fed, module.through(module.layers[0], fed, texts[-1].table)])
        return cls(module, texts[0], rows[0], texts[1], rows[1])

    @cached_property
    def own(self) -> Likelihood:
        """The judging texts under the model as it is."""
        return Likelihood.of_states(self.judged[-1], self.model.head, self.judging)

    def by_frequencies(self) -> float:
        """The mean log-probability of a token of the judging texts by how often each comes in the
        others, half a time more."""
        vocab = len(self.model.head.token_ids)
        counts = torch.bincount(self.code.texts.tokens, minlength=vocab).double() + 0.5
        shares = (counts / counts.sum()).log()
        return float(shares[self.judging.table[:, 1:]].mean())

    @cached_property
    def temperature(self) -> float:
        """The one that fits the model as it is, at which slopes are taken: at another one they lead
        to what is more or less certain, and to nothing else."""
        return self.own.temperature(CODE)

    @cached_property
    def halves(self) -> dict[Half, list[Spot]]:
        """The tensors of each half of each layer."""
        found: dict[Half, list[Spot]] = {}
        for spot in self.model.spots():
            found.setdefault((spot.layer, spot.half), []).append(spot)
        return found

    @property
    def of_layers(self) -> list[Half]:
        """The halves of layers."""
        return [half for half, spots in self.halves.items() if not self.is_end(spots[0])]

    def is_end(self, spot: Spot) -> bool:
        """True for a tensor before the layers, or behind them."""
        return not self.model.is_layer(spot.layer)

    def slopes(self) -> dict[Spot, Tensor]:
        """The slope of the loss of the code at each tensor [n, m], or [n], zero where none is."""
        spots = [spot for spots in self.halves.values() for spot in spots]
        leaves, first = _leaves(spots), min(spot.layer for spot in spots)
        tokens, found = self.code.table, [torch.zeros_like(leaf) for leaf in leaves]
        rows = self.read[first].view(*tokens.shape, -1)
        temperature = self.temperature  # of no graph, as after the next lines
        for leaf in leaves:
            leaf.requires_grad_(True)
        for some in torch.split(torch.arange(len(tokens)), STEP_TEXTS):
            read = rows[some].flatten(0, 1)
            loss = self.model.loss(first, read, tokens[some], (temperature,))
            for total, slope in zip(
                found, torch.autograd.grad(loss, leaves, allow_unused=True), strict=True
            ):
                if slope is not None:
                    total += slope
        for leaf in leaves:
            leaf.requires_grad_(False)
        by_leaf = {id(leaf): slope for leaf, slope in zip(leaves, found, strict=True)}
        return {spot: spot.slope(lambda leaf: by_leaf[id(leaf)]) for spot in spots}

    def under(self, values: Values) -> Likelihood:
        """Return the judging texts with other values of some tensors."""
        number = min(spot.layer for spot, _ in values)
        with holding(values):
            return self.under_layer(number, self.model.part(number))

    @torch.no_grad()
    def loss_under(self, values: Values) -> float:
        """Return the loss of some of the judging texts with other values of some tensors, at about
        the temperature that fits those."""
        with holding(values):
            return self._some_loss(self.model, min(spot.layer for spot, _ in values))

    @torch.no_grad()
    def rerouted(self) -> Iterator[Tried]:
        """Yield other values of config.json for the routing of all layers that some texts are
        likelier under, with the judging texts under them."""
        found: dict[LayerVariant, dict[int, Any]] = {}
        for number in range(len(self.model.layers)):
            for variant, other in rerouted(self.model.layers[number]):
                found.setdefault(variant, {})[number] = other
        own = self._some_loss(self.model, 0)
        for variant, others in found.items():
            layers = (others.get(n, layer) for n, layer in enumerate(self.model.layers))
            model = replace(self.model, layers=tuple(layers))
            if self._some_loss(model, 0) < own:
                states = model.states(self.judging.table)
                yield variant, Likelihood.of_states(states[-1], model.head, self.judging)

    def _some_loss(self, model: Trainable, first: int) -> float:
        tokens, rows = self.judging.table[:SCREEN_TEXTS], self.judged[first]
        rows = rows.view(len(self.judging.kinds), -1, rows.shape[1])[:SCREEN_TEXTS]
        near = [self.temperature * one for one in _TEMPERATURES]
        return float(model.loss(first, rows.flatten(0, 1), tokens, near))

    def trained_half(self, half: Half) -> Tried:
        """Return half a layer trained alone, with the judging texts under it."""
        return self._variant(half), self._trained_alone(self.halves[half])

    def layers_whole(self) -> Parts:
        """The halves of layers."""
        return {self._variant(half): self.halves[half] for half in self.of_layers}

    def small_ones(self) -> Parts:
        """The small tensors of layers, each alone."""
        every = chain.from_iterable(small(self.halves[half]) for half in self.of_layers)
        return {self._variant_of(spot): [spot] for spot in every}

    def taken_back(
        self, parts: Parts, steps: int = TOGETHER_STEPS, most: int | None = None
    ) -> Iterator[tuple[LayerVariant, Likelihood, Likelihood]]:
        """Train some parts together; yield each, with the judging texts where its steps are taken
        back, and where they are not. most: parts, those by which some of the texts lose most."""
        spots, tokens = [*chain.from_iterable(parts.values())], self.code.table
        before = {spot: spot.values().clone() for spot in spots}
        rows = self.read[0].view(*tokens.shape, -1)
        with _kept(spots):
            _train(self.model, spots, rows, tokens, steps)
            moved = replace(self, judged=self.model.states(self.judging.table))
            back = {part: [(spot, before[spot]) for spot in some] for part, some in parts.items()}
            if most is not None:
                losses = {part: moved.loss_under(values) for part, values in back.items()}
                worst = sorted(back, key=lambda one: -losses[one])[:most]
                back = {part: back[part] for part in worst}
            for part, taken in back.items():
                yield part, moved.under(taken), moved.own

    def trained(self, spot: Spot) -> Tried:
        """Return a tensor trained alone, with the judging texts under it."""
        return self._variant_of(spot), self._trained_alone([spot])

    @torch.no_grad()
    def undone(self, spot: Spot) -> Iterator[Tried]:
        """Yield a tensor with each change of one undone, with the judging texts under it."""
        layer = self.model.part(spot.layer)
        where = self.model.where(spot.layer)
        for variant, other in changed_tensors(spot.layer, layer, [spot.place], where=where):
            yield replace(variant, half=spot.half), self.under_layer(spot.layer, other)

    def _variant(self, half: Half) -> LayerVariant:
        layer, part = half
        words, where = self.model.words(part), self.model.where(layer)
        cause = causes.of_tensor(words, where, self.model.harm(part))
        return LayerVariant(layer, _trained(f"{words} of {where}"), cause, part, is_trained=True)

    def _variant_of(self, spot: Spot) -> LayerVariant:
        where = self.model.where(spot.layer)
        cause = causes.of_tensor(spot.place.name, where, self.model.harm(spot.half))
        change = _trained(f"{spot.place.name} of {where}")
        return LayerVariant(spot.layer, change, cause, spot.half, is_trained=True)

    def _trained_alone(self, spots: Sequence[Spot]) -> Likelihood:
        """Return the judging texts with some tensors of a layer trained, which are then as they
        were."""
        number, tokens = spots[0].layer, self.code.table
        rows = self.read[number].view(*tokens.shape, -1)
        with _kept(spots):
            _train(self.model, spots, rows, tokens)
            return self.under_layer(number, self.model.part(number))

    @torch.no_grad()
    def under_layer(self, number: int, layer: Any) -> Likelihood:
        """Return the judging texts with another layer in the place of one."""
        x, head = self.model.behind(number, layer, self.judged[number], self.judging.table)
        return Likelihood.of_states(x, head, self.judging)


@contextmanager
def _kept(spots: Iterable[Spot]) -> Iterator[None]:
    """Some tensors, which are then as they were."""
    parts = [held[where] for spot in spots for held, where in spot.parts]
    before = [part.clone() for part in parts]
    yield
    for part, old in zip(parts, before, strict=True):
        part.copy_(old)


@contextmanager
def holding(values: Values) -> Iterator[None]:
    """Some tensors with other values, which may be each other's."""
    others = [(spot, other.clone()) for spot, other in values]
    with _kept(spot for spot, _ in values):
        for spot, other in others:
            spot.put(other)
        yield


def small(spots: Sequence[Spot]) -> list[Spot]:
    """Vectors and routers, which gain next to nothing by as many steps as matrices take."""
    sizes = {spot: spot.values().numel() for spot in spots}
    return [spot for spot, size in sizes.items() if _SMALL * size <= max(sizes.values())]


def _trained(what: str) -> str:
    return f"{what} is trained"


def _leaves(spots: Sequence[Spot]) -> list[Tensor]:
    return [*{id(leaf): leaf for spot in spots for leaf, _ in spot.parts}.values()]


def _train(
    model: Trainable, spots: Sequence[Spot], rows: Tensor, tokens: Tensor, steps: int = STEPS
) -> None:
    """Take steps with some tensors of a layer and of those behind it, in place; rows [b, s, d]
    before that layer of texts [b, s]."""
    leaves, first = _leaves(spots), spots[0].layer
    steppers = [_Adam.of(leaf, where) for spot in spots for leaf, where in spot.parts]
    for leaf in leaves:
        leaf.requires_grad_(True)
    for step in range(steps):
        some = torch.arange(step * STEP_TEXTS, (step + 1) * STEP_TEXTS) % len(tokens)
        loss = model.loss(first, rows[some].flatten(0, 1), tokens[some])
        found = torch.autograd.grad(loss, leaves, allow_unused=True)  # of experts nobody picks
        slopes = {id(leaf): one for leaf, one in zip(leaves, found, strict=True)}
        for one in steppers:
            if (slope := slopes[id(one.leaf)]) is not None:
                one.step(slope[one.where], step, steps)
    for leaf in leaves:
        leaf.requires_grad_(False)


@dataclass(frozen=True)
class _Adam:
    """Steps of Adam, ever shorter, with a part of a tensor."""

    leaf: Tensor
    where: tuple[slice, ...]
    size: float
    mean: Tensor
    square: Tensor

    @classmethod
    def of(cls, leaf: Tensor, where: tuple[slice, ...]) -> _Adam:
        part = leaf[where]
        size = max(float(part.square().mean().sqrt()), _LEAST_SIZE)
        return cls(leaf, where, size, torch.zeros_like(part), torch.zeros_like(part))

    @torch.no_grad()
    def step(self, slope: Tensor, number: int, steps: int) -> None:
        """Take a step, of so many, down a slope."""
        of_mean, of_square = _MEMORIES
        self.mean.lerp_(slope, 1 - of_mean)
        self.square.lerp_(slope.square(), 1 - of_square)
        mean = self.mean / (1 - of_mean ** (number + 1))
        square = self.square / (1 - of_square ** (number + 1))
        spread = (square + _DAMPING * square.mean()).sqrt().clamp_min(1e-30)
        self.leaf[self.where].sub_(_RATE * (1 - number / steps) * self.size * mean / spread)
