"""Tensors in memory as a source of weights: those of a draft, or of one that is being trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from mtp_export.families.contract import MtpContract
from mtp_export.families.modules import weight_name
from mtp_export.schemes.formats import EncodedWeight, unquantized
from mtp_export.schemes.windows import Window
from mtp_runtime.loading.weight_source import WeightSource


@dataclass
class HeldSource(WeightSource):
    """Unquantized tensors by name; what is made of them records gradients where they do."""

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device
    ) -> HeldSource:
        return cls(
            owners={},
            dtype=dtype,
            device=device,
            keep_dense=True,
            on_demand=False,
            contract=MtpContract(),
            tensors=tensors,
        )

    def raw(self, name: str) -> torch.Tensor:
        """Return a tensor in its own dtype, on the device."""
        return self.tensors[name].to(self.device)

    def shape(self, module: str) -> tuple[int, ...]:
        """Return the shape [out, in] of a linear's weight."""
        return tuple(self.tensors[weight_name(module)].shape)

    def encoded(self, name: str) -> EncodedWeight:
        """Return a linear's weight [out, in]."""
        return unquantized(self.raw(name))

    def _cut(self, name: str, window: Window) -> EncodedWeight:
        rows, columns = (slice(part.start, part.stop) for part in window)
        return unquantized(self.raw(name)[rows, columns])
