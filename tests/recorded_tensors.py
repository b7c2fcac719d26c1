"""Tensors that other tools made, as files beside the tests record them, and rows of a weight that
has them in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def tensor_of(recorded: Mapping[str, Any]) -> torch.Tensor:
    """A tensor of its dtype, shape and bytes in hex."""
    dtype = getattr(torch, recorded["dtype"])
    data = bytearray.fromhex(recorded["hex"])
    return torch.frombuffer(data, dtype=dtype).reshape(recorded["shape"])


class Rows:
    """The tensors of a weight: its codes, its scales, and what else it has."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.whole_codes, *self.others = tensors
        self.scale = self.others[0]

    def codes(self, start: int, stop: int) -> torch.Tensor:
        return self.whole_codes[start:stop]
