"""Codes that a calibration chose: along the texts of the run, the outputs of no linear lose more
than with the nearest codes under the same scales."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import log10
from typing import Self

import torch
from torch import Tensor

from mtp_checkpoints.families.spec import LayerSpec, ModelSpec
from mtp_checkpoints.tensors.bundle_folder import MAIN, MTP
from mtp_checkpoints.tensors.tensor_reader import read_rows
from mtp_checkpoints.weights.weight_values import WeightOnDisk, weights_on_disk
from mtp_export.verify.check import Item, Problem, not_tested, verdict
from mtp_export.verify.context import Context
from mtp_export.verify.diagnosis.causes import weights as causes
from mtp_export.verify.gates import MOST_LOST_BY_CALIBRATION_DB
from mtp_runtime.layer_inputs import (
    ExpertWeights,
    Observation,
    beside_experts,
    experts_of,
    input_names,
    seen,
)
from mtp_runtime.layers.moe import gated
from mtp_runtime.models.execution import TorchExecution
from mtp_runtime.models.load import LoadOptions, open_model
from mtp_runtime.streaming import attend_through, open_streamed
from mtp_runtime.teacher_forcing import PagedTexts

_ROWS = 2048  # of an input, at most
Weights = Mapping[str, WeightOnDisk]


def run(context: Context) -> Iterator[Item]:
    """The gain of every calibrated weight; nothing for a bundle without a recorded calibration."""
    record = context.recorded("calibrate")
    if record is None:
        return
    parts = record.get("parts", [MTP])
    for part in (MAIN, MTP):
        if part in parts:
            yield _judged(context, part)


def _judged(context: Context, part: str) -> Item:
    name, gained = f"{part}: outputs of calibrated weights", dict[str, float]()
    if context.source_weights is None:
        return not_tested(name, "without --source there are no weights to compare with")
    with torch.inference_mode():
        for layers in _main_layers(context) if part == MAIN else [_mtp_layers(context)]:
            gained |= layers.gained(context.source_weights.weights)
    problems = [
        Problem(name, causes.calibrated_for_others(name, -gain))
        for name, gain in sorted(gained.items(), key=lambda one: one[1])
        if gain < -MOST_LOST_BY_CALIBRATION_DB
    ]
    figure = f"{len(gained):,}: min {min(gained.values()):+.1f} dB" if gained else "0"
    bound = f"≥ {-MOST_LOST_BY_CALIBRATION_DB} dB beside the nearest codes"
    return verdict(name, problems, figure=figure, bound=bound)


@dataclass(frozen=True)
class _Layers:
    """Weights of layers by their released names, and rows [n, K] of what goes into them.

    input_of: names of rows by weights. inner: experts by their down, which takes what gate and up
    make.
    """

    weights: Weights
    rows: Mapping[str, Tensor]
    input_of: Mapping[str, str]
    inner: Mapping[str, ExpertWeights]

    @classmethod
    def of(
        cls,
        weights: Weights,
        rows: Mapping[str, Tensor],
        named: Mapping[str, str],
        layers: Iterable[LayerSpec],
    ) -> Self:
        """Return the weights of layers; named are the rows of those beside experts, by their first
        tensors."""
        input_of = {name: named[w.name] for name, w in weights.items() if w.name in named}
        inner = dict[str, ExpertWeights]()
        for prefix, experts in map(experts_of, layers):
            input_of |= {name: prefix for own in experts for name in (own.gate, own.up)}
            inner |= {own.down: own for own in experts}
        return cls(
            {name: w for name, w in weights.items() if name in {*input_of, *inner}},
            {name: x[:: -(-len(x) // _ROWS)].float() for name, x in rows.items()},
            input_of,
            inner,
        )

    def gained(self, source: Weights) -> dict[str, float]:
        """Return by how many dB the outputs of each weight are nearer to those of the source's than
        with the nearest codes, by the name of its own."""
        found = dict[str, float]()
        for name, weight in self.weights.items():
            if name in self.inner:
                gate, up, _, limit = self.inner[name]
                both = _values(source[gate], source[up]).t()
                x = gated(self.rows[self.input_of[gate]] @ both, limit)
            else:
                x = self.rows[self.input_of[name]]
            wanted = _values(source[name])
            tensors = [read_rows(tensor, 0, tensor.shape[0]) for tensor in weight.tensors]
            grid = weight.stored.format.grid(tensors)
            own, nearest = (
                float((x @ (values - wanted).t()).square().sum(dtype=torch.float64))
                for values in (_values(weight), grid.values(grid.rounded(wanted)))
            )
            found[weight.name] = 10 * log10(nearest / own) if own and nearest else 0.0
        return found


def _mtp_layers(context: Context) -> _Layers:
    """Run the MTP modules of a bundle, as they are stored, along the texts of its corpus."""
    options = LoadOptions(mtp_folder=context.mtp_folder, dequantize_at_load=False)
    modules = open_model(context.folder, options).model(TorchExecution(), layers=0).mtp_modules
    weights, family = _stored(context, MTP)
    named = input_names(part for module in modules for part in beside_experts(module.layer))
    layers = [mtp.layer for mtp in family.mtp]
    observation = Observation(modules, [experts_of(layer)[0] for layer in layers], named)
    rows = observation.rows(context.corpus.texts, context.corpus.hidden)
    return _Layers.of(weights, rows, named, layers)


def _main_layers(context: Context) -> Iterator[_Layers]:
    """Run the main model of a bundle along the texts of its corpus, a layer at a time."""
    streamed, texts = open_streamed(context.folder, "cpu", context.mtp_folder), context.corpus.texts
    (weights, family), paged = _stored(context, MAIN), PagedTexts.of(texts)
    x, chunks = streamed.embedded(texts.tokens), paged.chunks(streamed.device)
    for layer, spec in zip(streamed.layers(0), family.layers, strict=True):
        kept, named = defaultdict[str, list[Tensor]](list), input_names(beside_experts(layer))

        def see(name: str, rows: Tensor, kept: dict[str, list[Tensor]] = kept) -> None:
            kept[name].append(rows)

        attention = seen(layer.attention, named, see)
        attend_through(replace(layer, attention=attention), x, paged, chunks)
        see(spec.feed_forward_prefix, layer.fed(x))
        x += replace(layer, feed_forward=seen(layer.feed_forward, named, see)).added(x)
        rows = {name: torch.cat(parts) for name, parts in kept.items()}
        own = {n: w for n, w in weights.items() if n.startswith(f"{spec.prefix}.")}
        yield _Layers.of(own, rows, named, [spec])


def _stored(context: Context, part: str) -> tuple[Weights, ModelSpec]:
    """Return the weights of a part whose codes a calibration may choose, and its model."""
    layout = next(one for one in context.layouts if one.name == part)
    stored = weights_on_disk(layout.stored, layout.checkpoint.tensors)
    weights = {w.stored.weight.name: w for w in stored if w.stored.format.has_grid}
    return weights, layout.stored.family


def _values(*weights: WeightOnDisk) -> Tensor:
    """Return weights [N, K] below each other, fp32."""
    return torch.cat([weight.encoded(0, weight.rows).dequantize() for weight in weights])
