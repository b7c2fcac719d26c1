"""Names of a decoder's modules, as a family gives them; the runtime's builders read them here.

A module name is a tensor name without its last component (`model.norm` for `model.norm.weight`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from mtp_checkpoints.families.base import ModelFamily


@dataclass(frozen=True, slots=True)
class ModelModules:
    """Modules of a main model outside its layers."""

    embedding: str
    norm: str
    head: str


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


@dataclass(frozen=True, slots=True)
class LayerModules:
    """Modules of one decoder layer, main or MTP. attention is the prefix of its modules, whose
    names depend on the kind of attention."""

    input_norm: str
    attention: str
    post_norm: str
    feed_forward: MlpModules | MoeModules


@dataclass(frozen=True, slots=True)
class MtpModules:
    """Modules that an MTP layer has around its decoder layer; embedding and head may be absent
    from a checkpoint, and are the main model's then."""

    embedding: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    head_norm: str
    head: str


class DecoderFamily(ModelFamily, Protocol):
    """A family whose models the runtime can build: all that the runtime needs of it. MTP layers are
    counted on from the main ones. The names inside an attention are its builder's to ask for."""

    @property
    def modules(self) -> ModelModules:
        """Modules outside the layers."""

    def layer_modules(self, layer: int) -> LayerModules:
        """Modules of one layer, by its index; a dense layer has MlpModules, a sparse one
        MoeModules."""

    def mtp_modules(self, layer: int) -> MtpModules:
        """Modules around the decoder layer of one MTP layer, by its index."""


def weight_name(module: str) -> str:
    """Name of a module's weight tensor."""
    return f"{module}.weight"
