"""Codes of the MTP layer that a calibration chose: along the texts of the run, the outputs of no
linear lose more than with the nearest codes under the same scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import log10

import torch
from torch import Tensor

from mtp_checkpoints.tensors.bundle_folder import MTP
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
)
from mtp_runtime.layers.moe import gated
from mtp_runtime.models.execution import TorchExecution
from mtp_runtime.models.load import LoadOptions, open_model

_ITEM = f"{MTP}: outputs of calibrated weights"
_ROWS = 2048  # of an input, at most
Weights = Mapping[str, WeightOnDisk]


def run(context: Context) -> Iterator[Item]:
    """The gain of every calibrated weight; nothing for a bundle without a recorded calibration."""
    if context.recorded("calibrate") is None:
        return
    if context.source_weights is None:
        yield not_tested(_ITEM, "without --source there are no weights to compare with")
        return
    with torch.inference_mode():
        gained = _Layers.of(context).gained(context.source_weights.weights)
    problems = [
        Problem(name, causes.calibrated_for_others(name, -gain))
        for name, gain in sorted(gained.items(), key=lambda one: one[1])
        if gain < -MOST_LOST_BY_CALIBRATION_DB
    ]
    figure = f"{len(gained):,}: min {min(gained.values()):+.1f} dB" if gained else "0"
    bound = f"≥ {-MOST_LOST_BY_CALIBRATION_DB} dB beside the nearest codes"
    yield verdict(_ITEM, problems, figure=figure, bound=bound)


@dataclass(frozen=True)
class _Layers:
    """Weights of MTP layers by their released names, and rows [n, K] of what goes into them.

    input_of: names of rows by weights. inner: experts by their down, which takes what gate and up
    make.
    """

    weights: Weights
    rows: Mapping[str, Tensor]
    input_of: Mapping[str, str]
    inner: Mapping[str, ExpertWeights]

    @classmethod
    def of(cls, context: Context) -> _Layers:
        """Run the MTP modules of a bundle, as they are stored, along the texts of its corpus."""
        options = LoadOptions(mtp_folder=context.mtp_folder, dequantize_at_load=False)
        modules = open_model(context.folder, options).model(TorchExecution(), layers=0).mtp_modules
        layout = next(one for one in context.layouts if one.name == MTP)
        stored = weights_on_disk(layout.stored, layout.checkpoint.tensors)
        weights = {w.stored.weight.name: w for w in stored if w.stored.format.has_grid}
        named = input_names(part for module in modules for part in beside_experts(module.layer))
        input_of = {name: named[w.name] for name, w in weights.items() if w.name in named}
        layers = [experts_of(mtp.layer) for mtp in layout.stored.family.mtp]
        for prefix, experts in layers:
            input_of |= {name: prefix for own in experts for name in (own.gate, own.up)}
        observation = Observation(modules, [prefix for prefix, _ in layers], named)
        rows = observation.rows(context.corpus.texts, context.corpus.hidden)
        inner = {own.down: own for _, experts in layers for own in experts}
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


def _values(*weights: WeightOnDisk) -> Tensor:
    """Return weights [N, K] below each other, fp32."""
    return torch.cat([weight.encoded(0, weight.rows).dequantize() for weight in weights])
