"""Names of modules that feed-forward layers are made of.

A module name is a tensor name without its last component (`model.norm` for `model.norm.weight`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class MlpModules(NamedTuple):
    """Linears of a gated MLP."""

    gate: str
    up: str
    down: str

    @classmethod
    def under(cls, prefix: str) -> MlpModules:
        """Names as nearly every checkpoint has them."""
        return cls(f"{prefix}.gate_proj", f"{prefix}.up_proj", f"{prefix}.down_proj")


@dataclass(frozen=True, slots=True)
class MoeModules:
    """Modules of a mixture of experts; shared experts are stored as one MLP, side by side.

    router_bias is a tensor's full name: it belongs to the router, but is no weight of it.
    """

    router: str
    router_bias: str
    experts: tuple[MlpModules, ...]
    shared: MlpModules | None


def weight_name(module: str) -> str:
    """Name of a module's weight tensor."""
    return f"{module}.weight"
