"""Tensors by name as a source of weights: those of a draft's folder, or of one that is being
trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from mtp_checkpoints.families.base import weight_name
from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.formats import EncodedWeight, unquantized
from mtp_checkpoints.weights.windows import Window
from mtp_runtime.layers.tensor_parallel import ALONE, TensorParallel
from mtp_runtime.loading.draft_folder import DraftTensor, part_of, values_of
from mtp_runtime.loading.weight_source import WeightSource


@dataclass
class HeldSource(WeightSource):
    """Unquantized tensors by name, all of them there; what is made of those in memory records
    gradients where they do."""

    tensors: Mapping[str, DraftTensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, DraftTensor],
        dtype: torch.dtype,
        device: torch.device,
        parallel: TensorParallel = ALONE,
        *,
        packs: bool = False,
    ) -> HeldSource:
        return cls(
            owners={},
            dtype=dtype,
            device=device,
            keep_dense=True,
            on_demand=False,
            contract=MtpContract(),
            tensors=tensors,
            parallel=parallel,
            packs=packs,
        )

    def raw(self, name: str) -> torch.Tensor:
        """Return a tensor in its own dtype, on the device."""
        return values_of(self.tensors[name]).to(self.device)

    def shape(self, module: str) -> tuple[int, ...]:
        """Return the shape [out, in] of a linear's weight."""
        return tuple(self.tensors[weight_name(module)].shape)

    def encoded(self, name: str) -> EncodedWeight:
        """Return a linear's weight [out, in]."""
        return unquantized(self.raw(name))

    def _cut(self, name: str, window: Window) -> EncodedWeight:
        return unquantized(part_of(self.tensors[name], *window).to(self.device))

    def _is_in_memory(self, name: str) -> bool:
        return isinstance(self.tensors[name], torch.Tensor)

    def _in_rows(self, name: str) -> bool:
        return True

    def packed_form(self, name: str, columns: range | None = None) -> object:
        """Have all matrices become dense."""
        return None

    def _note(self, name: str) -> None:
        """Keep no account: a draft's reader compares all tensors with what is promised."""
