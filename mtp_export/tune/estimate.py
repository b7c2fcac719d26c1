"""Memory, time and disk that a tuning run takes, from the sizes that config.json tells."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch

from mtp_export.families.base import Role, TensorSpec
from mtp_export.tune.options import TrainOptions, TuneOptions
from mtp_export.tune.row_store import Data, row_bytes
from mtp_export.tune.writing import SourceBundle
from mtp_runtime.training.weights import FROZEN_ROLES

_FLOAT32 = 4
# Of a parameter: itself, its gradient, and the two averages of AdamW.
STATE_BYTES = 4 * _FLOAT32
_PASSES = 3  # forward, and the gradients of inputs and of weights
_EFFICIENCY = 0.3  # of the rate of large products
_MATRIX = 1024


@dataclass(frozen=True)
class Estimate:
    """Bytes and seconds of a run; activations are not counted.

    parameters: of the draft, without embedding and head; trained: those of the training.
    state_bytes: the latter with gradients and optimizer, in main memory with --offload.
    weights_bytes: what a step computes with, and its gradients.
    """

    parameters: int
    trained: int
    rows: int
    state_bytes: int
    weights_bytes: int
    rows_bytes: int
    disk_bytes: int
    seconds: float

    def as_json(self) -> dict[str, int | float]:
        return {**vars(self), "seconds": round(self.seconds, 1)}


def estimate(options: TuneOptions, source: SourceBundle, data: Data) -> Estimate:
    """Return what a run will take; the time is that of a product of matrices here, scaled."""
    specs = [
        spec
        for spec in source.stored.family.tensors.values()
        if spec.mtp_layer is not None and spec.role not in FROZEN_ROLES
    ]
    train, own = options.train, options.data
    parameters, trained = parameter_count(specs), trained_count(specs, train.lora_rank)
    rows = sum(
        min(own.text_tokens, len(line.prompt) + len(line.answer or range(own.new_tokens)))
        for line in data.training
    )
    rows_bytes = rows * row_bytes(source.stored.family.hidden)
    kept_bytes = 0 if train.lora_rank is None else _stored_bytes(source)
    return Estimate(
        parameters=parameters,
        trained=trained,
        rows=rows,
        state_bytes=trained * STATE_BYTES,
        weights_bytes=weights_bytes(parameters, train, _head_elements(source)) + kept_bytes,
        rows_bytes=rows_bytes,
        # While a saved state is written the one before it is still there; none has gradients.
        disk_bytes=rows_bytes + 6 * _FLOAT32 * trained + _FLOAT32 * parameters,
        seconds=_seconds(train, options.device, source=source, specs=specs),
    )


def weights_bytes(parameters: int, train: TrainOptions, head: int) -> int:
    """Return the bytes of all weights and their gradients, and of embedding and head."""
    element = getattr(torch, train.dtype).itemsize
    return 2 * parameters * int(element) + 2 * head * _FLOAT32


def parameter_count(specs: Iterable[TensorSpec]) -> int:
    """Return the parameters of weights."""
    return sum(prod(spec.shape) for spec in specs)


def trained_count(specs: Iterable[TensorSpec], rank: int | None) -> int:
    """Return the parameters that are trained of weights."""
    return sum(
        prod(spec.shape)
        if rank is None or len(spec.shape) != 2 or spec.role is Role.ROUTER
        else min(rank, *spec.shape) * sum(spec.shape)
        for spec in specs
    )


def _stored_bytes(source: SourceBundle) -> int:
    """Return the bytes of the draft as it is stored, without embedding and head."""
    role_of = {name: one.weight.role for name, one in source.stored.weight_of.items()}
    tensors = source.mtp.tensors.values()
    return sum(t.size_bytes for t in tensors if role_of[t.name] not in FROZEN_ROLES)


def _head_elements(source: SourceBundle) -> int:
    heads = (s for s in source.stored.family.tensors.values() if s.role is Role.HEAD)
    return prod(next(heads).shape)


def _seconds(
    train: TrainOptions, device: str, source: SourceBundle, specs: Iterable[TensorSpec]
) -> float:
    """Return the seconds of all steps: every row goes through what one token uses of the draft, and
    through the head, once for every depth."""
    family = source.stored.family
    router = family.router
    experts = router.experts_per_token or 1
    used = 0.0
    for spec in specs:
        share = experts / family.experts if spec.role is Role.ROUTED_EXPERT else 1.0
        used += share * prod(spec.shape)
    operations = 2 * _PASSES * used + 2 * 2 * _head_elements(source)
    rows = train.batch_tokens * train.steps * train.k
    return rows * operations / (_operations_per_second(device, train.dtype) * _EFFICIENCY)


def _operations_per_second(device: str, dtype: str) -> float:
    """Measure products of large matrices, for a fraction of a second."""
    matrix = torch.ones(_MATRIX, _MATRIX, device=device, dtype=getattr(torch, dtype))
    matrix @ matrix
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < 0.2:
        (matrix @ matrix)[0, 0].item()
        count += 1
    return float(2 * _MATRIX**3 * count / (time.perf_counter() - start))
