"""Groups of a compressed-tensors config: how one describes the weights of a format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mtp_checkpoints.errors import InvalidInputError

if TYPE_CHECKING:
    import torch

COMPRESSED = "compressed-tensors"  # a quant_method
# Values of actorder by which GPTQ changes the order of its work and no tensor on disk.
_ORDERS_OF_WORK = ("weight", "static")


@dataclass(frozen=True)
class WeightsEntry:
    """The description of unpermuted weights in one group of a config.

    layout is the format by its name in compressed-tensors. input_scale: a number for the inputs is
    stored too, under which their scales are computed at run time.
    """

    layout: str
    kind: str
    bits: int
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None
    symmetric: bool = True
    input_scale: bool = False

    @classmethod
    def of(cls, group: Mapping[str, Any], layout: Any) -> WeightsEntry | None:
        """Read a group, whose weights are an object; None for permuted weights.

        layout is the format of all groups, for a group that names none.
        """
        weights = group["weights"]
        block, inputs = weights.get("block_structure"), group.get("input_activations")
        if (
            type(weights.get("symmetric")) is not bool
            or weights.get("dynamic")
            or (weights.get("actorder") or _ORDERS_OF_WORK[0]) not in _ORDERS_OF_WORK
        ):
            return None
        return cls(
            layout=group.get("format") or layout,
            kind=weights.get("type"),
            bits=weights.get("num_bits"),
            strategy=weights.get("strategy"),
            group_size=weights.get("group_size"),
            block=tuple(block) if isinstance(block, list) else None,
            symmetric=weights["symmetric"],
            input_scale=isinstance(inputs, dict) and inputs.get("dynamic") is not True,
        )

    def has_numbers(
        self, layout: str, *, kind: str, bits: int, strategy: str, symmetric: bool = True
    ) -> bool:
        """Return whether the weights are such numbers, whatever the size of a group or a block."""
        described = (self.layout, self.kind, self.bits, self.strategy, self.symmetric)
        return described == (layout, kind, bits, strategy, symmetric)


def group(
    layout: str, weights: Mapping[str, Any], activations: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return a group of a config, without its targets."""
    return {
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
        "format": layout,
    }


def numbers(bits: int, kind: str, strategy: str, *, dynamic: bool = False) -> dict[str, Any]:
    """Return the description of symmetric weights or activations; dynamic scales are computed."""
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "strategy": strategy,
        "dynamic": dynamic,
    }


def check_weight_shape(name: str, stored: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Refuse a tensor weight_shape that contradicts the weight's shape (InvalidInputError)."""
    if tuple(stored.tolist()) != shape:
        raise InvalidInputError(
            f"Tensor {name} contradicts config.json",
            expected=list(shape),
            found=stored.tolist(),
        )
