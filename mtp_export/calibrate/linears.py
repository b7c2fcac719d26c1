"""Linears of a plan that calibration rounds: which of them together, and what goes into them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.base import FLOATS
from mtp_checkpoints.families.folds import Fold, folds_of
from mtp_checkpoints.families.parts import UngatedMoe
from mtp_checkpoints.families.spec import LayerSpec
from mtp_checkpoints.formats import FORMATS
from mtp_checkpoints.formats.nvfp4 import NvFp4Format
from mtp_checkpoints.tensors.bundle_folder import MAIN, MTP
from mtp_checkpoints.tensors.tensor_reader import read_rows
from mtp_checkpoints.weights.weight_values import WeightOnDisk
from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.plan import Copy, Step
from mtp_export.schemes.transforms import Convert, converting
from mtp_kernels.quantize import checked_values
from mtp_runtime.layer_inputs import Observation, beside_experts, experts_of, input_names
from mtp_runtime.models.model import MtpModule

_SCHEME_OF = {MAIN: "--base-quant", MTP: "--mtp-quant"}


@dataclass(frozen=True)
class Unit:
    """Weights, by their released names, that one file of the work folder holds.

    input: name of what goes into them. down: the weight of an expert that takes silu(gate) * up of
    the other two, bounded by a limit; None beside an expert.
    """

    name: str
    input: str
    weights: tuple[str, ...]
    down: str | None = None
    limit: float | None = None

    @property
    def every(self) -> tuple[str, ...]:
        """All of its weights."""
        return self.weights if self.down is None else (*self.weights, self.down)


@dataclass(frozen=True)
class Linears:
    """The conversions of a part of a plan whose codes can be chosen: those into a format with a
    grid."""

    plan: BundlePlan
    part: str = MTP

    @cached_property
    def layers(self) -> Sequence[LayerSpec]:
        """Decoder layers of the part, in order."""
        family = self.plan.family
        return family.layers if self.part == MAIN else [mtp.layer for mtp in family.mtp]

    @cached_property
    def converted(self) -> dict[str, Step]:
        """Steps that convert a weight, by its released name."""
        weight_of = self.plan.stored.weight_of
        return {
            weight_of[step.inputs[0]].weight.name: step
            for step in self._steps
            if isinstance(step.operation, Convert)
        }

    @cached_property
    def name_of(self) -> dict[str, str]:
        """Released names of weights whose codes can be chosen, by the first tensor of each."""
        return {step.inputs[0]: name for name, step in self.steps.items()}

    @cached_property
    def steps(self) -> dict[str, Step]:
        """Those whose codes can be chosen."""
        return {n: step for n, step in self.converted.items() if self.convert(n).format.has_grid}

    @cached_property
    def numbered(self) -> frozenset[str]:
        """Those whose format has a number for what goes into them."""
        formats = {name: self.convert(name).format for name in self.steps}
        return frozenset(
            name
            for name, made in formats.items()
            if isinstance(made, NvFp4Format) and made.has_input_scale
        )

    def convert(self, name: str) -> Convert:
        """Return the conversion of a weight."""
        operation = self.converted[name].operation
        assert isinstance(operation, Convert)
        return operation

    def require(self) -> None:
        """Refuse a plan without any, and experts without gates (UnsupportedError)."""
        if not self.steps:
            known = sorted(name for name, kind in FORMATS.items() if kind.has_grid)
            option = _SCHEME_OF[self.part]
            raise UnsupportedError(
                f"The {self.part} part has no weight whose codes a calibration chooses",
                expected=f"linears in {' or '.join(known)}",
                found=f"{option} {self.plan.recorded[option[2:].replace('-', '_')]}",
                todo=f"Use {option} weight_only_nvfp4, or weight_only_int4 with"
                " --allow-untested-pair",
            )
        for layer in self.layers:
            if isinstance(layer.feed_forward, UngatedMoe):
                raise UnsupportedError(
                    "Experts without gates are not calibrated",
                    where=layer.prefix,
                    expected="experts of gate, up and down projections",
                    found=layer.feed_forward.title,
                    todo="Leave --calibrate out",
                )

    @cached_property
    def folds(self) -> dict[str, Fold]:
        """The fold of the norm before the experts of each layer that has some, of which a dense MLP
        is one, by the name of their input.

        Raises UnsupportedError where no layer has experts, for one without that norm, or with a
        weight that takes no scales.
        """
        of_layers = zip(self.layers, self.experts, strict=True)
        mixed = [layer for layer, units in of_layers if units]
        # Without any, all are to be refused by name.
        folds = {layer.feed_forward_prefix: folds_of(layer)[0] for layer in mixed or self.layers}
        weight_of = self.plan.stored.weight_of
        pairs = ((weight_of.get(step.inputs[0]), step) for step in self._steps)
        written = {own.weight.name: step for own, step in pairs if own is not None}
        for fold in folds.values():
            for name in fold.tensors:
                step = written[name]
                dtype = step.outputs[0].dtype
                if name in self.steps or (isinstance(step.operation, Copy) and dtype in FLOATS):
                    continue
                raise UnsupportedError(
                    f"The scales of AWQ cannot be folded into {name}, which is neither rounded by"
                    " the calibration nor a copy of floats",
                    expected=f"{', '.join(FLOATS)}, or a format with a grid",
                    found=f"{step.operation.name}, {dtype}",
                    todo=f"Use --method gptq, or a {_SCHEME_OF[self.part]} that rounds it too, such"
                    " as weight_only_nvfp4",
                )
        return folds

    @cached_property
    def experts(self) -> list[list[Unit]]:
        """Experts of each layer, shared ones last; a dense MLP is one."""
        return [list(self._experts(layer)) for layer in self.layers]

    @property
    def of_experts(self) -> list[Unit]:
        """Experts of all layers."""
        return [unit for units in self.experts for unit in units]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights of all units, whether they are converted or not."""
        tensors = self.plan.family.tensors
        names = {*self.steps, *(name for unit in self.of_experts for name in unit.every)}
        return {name: tensors[name].shape for name in sorted(names)}

    @property
    def _steps(self) -> Iterator[Step]:
        parts = (part for part in self.plan.parts if part.name == self.part)
        return (step for part in parts for shard in part.shards for step in shard.steps)

    def _experts(self, layer: LayerSpec) -> Iterator[Unit]:
        prefix, experts = experts_of(layer)
        for expert in experts:
            if not self.steps.keys().isdisjoint(expert[:3]):
                name = expert.down.rsplit(".", 2)[0]
                yield Unit(name, prefix, (expert.gate, expert.up), expert.down, expert.limit)

    def others(self, parts: Iterable[object]) -> list[Unit]:
        """Return the linears of parts of layers beside experts, those of one input together."""
        of_input = defaultdict[str, list[str]](list)
        for tensor, name in input_names(parts).items():
            if tensor in self.name_of:
                of_input[name].append(self.name_of[tensor])
        return [Unit(name, name, tuple(weights)) for name, weights in of_input.items()]

    def of_modules(self, modules: Sequence[MtpModule]) -> list[Unit]:
        """Return the linears of MTP modules beside experts."""
        return self.others(part for module in modules for part in beside_experts(module.layer))

    def observation(self, modules: Sequence[MtpModule]) -> Observation:
        """Return what has to be observed of MTP modules."""
        experts = [units[0].input if units else "" for units in self.experts]
        tensors = {
            self.steps[n].inputs[0] for unit in self.of_modules(modules) for n in unit.weights
        }
        return Observation(modules, experts, tensors)

    def values(self, name: str) -> Tensor:
        """Return a weight [N, K] as the source has it, fp32 (InvalidInputError for a damaged
        one)."""
        stored, tensors = self.plan.stored.weights[name], self.plan.checkpoint.tensors
        own = tuple(tensors[tensor.name] for tensor in stored.tensors if tensor.name in tensors)
        rows = stored.weight.shape[0]
        with converting(own[0], (0, rows)):
            values = WeightOnDisk(stored, own).encoded(0, rows).dequantize(torch.float32)
            return checked_values(values)

    def inputs_amax(self, largest: Mapping[str, float]) -> dict[str, float]:
        """Return the largest magnitude of what goes into weights whose format has a number for it,
        of what goes into each; one for the down projections of all experts of a layer, shared
        ones too, of which gate and up have the same inputs."""
        found = {name: largest[name] for name in largest.keys() & self.numbered}
        for units in self.experts:
            downs = [unit.down for unit in units if unit.down is not None and unit.down in found]
            found |= dict.fromkeys(downs, max((found[name] for name in downs), default=0.0))
        return found

    def floats(self, name: str) -> Tensor:
        """Return a tensor as the source has it, in its dtype: one of floats."""
        own = self.plan.checkpoint.tensors[self.plan.stored.weights[name].tensors[0].name]
        return read_rows(own, 0, own.shape[0])

    def joined(self, name: str) -> list[str]:
        """Return the weights that share a number of the whole matrix with one, itself included."""
        weight_of = self.plan.stored.weight_of
        return list(dict.fromkeys(weight_of[t].weight.name for t in self.steps[name].inputs))
