"""Feed-forward parts without gates: an MLP of squared rectifiers, and a mixture of such experts.

Source: transformers' nemotron_h.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mtp_checkpoints.families.base import Role
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.parts.feed_forward import Router
from mtp_checkpoints.families.parts.listed import Entry, Listed, matrix


class UngatedModules(NamedTuple):
    """Linears of an MLP without a gate."""

    up: str
    down: str

    @classmethod
    def under(cls, prefix: str) -> UngatedModules:
        """Names under the MLP's prefix."""
        return cls(f"{prefix}.up_proj", f"{prefix}.down_proj")


class UngatedMoeModules(NamedTuple):
    """Modules of a mixture of experts without gates; router_bias is a tensor's full name. latent
    has the projections around the routed experts, None where there are none."""

    router: str
    router_bias: str
    experts: tuple[UngatedModules, ...]
    shared: UngatedModules
    latent: tuple[str, str] | None


@dataclass(frozen=True)
class UngatedMlp(Listed):
    """down(relu(up(x))^2)."""

    @classmethod
    def of(cls, fields: Fields, name: str) -> UngatedMlp:
        """Read the MLP of a dense layer; name: of the part in its layer."""
        hidden, inner = fields.whole("hidden_size"), fields.whole("intermediate_size")
        entries = _up_down("", hidden, inner, Role.DENSE_MLP)
        return cls("an MLP of squared rectifiers", name, entries)


@dataclass(frozen=True)
class UngatedMoe(Listed):
    """Routed experts of squared rectifiers, of which a router picks some for every row, and a
    shared one that every row goes through. has_latent: routed ones take a projection of the row,
    and another one takes the sum of what they give."""

    experts: int
    router: Router
    has_latent: bool

    @classmethod
    def of(cls, fields: Fields, name: str) -> UngatedMoe:
        """Read a sparse layer; name: of the part in its layer."""
        hidden, experts = fields.whole("hidden_size"), fields.whole("n_routed_experts")
        router = Router.of(fields, experts)
        inner = fields.whole("moe_intermediate_size")
        latent = fields.without_nulls().whole("moe_latent_size", hidden)
        shared = fields.whole("moe_shared_expert_intermediate_size")
        entries = [
            matrix("gate", experts, hidden, Role.ROUTER),
            Entry("gate.e_score_correction_bias", (experts,), Role.ROUTER),
            *_up_down("shared_experts.", hidden, shared, Role.SHARED_EXPERT),
        ]
        if fields.has("moe_latent_size"):
            entries.append(matrix("fc1_latent_proj", latent, hidden, Role.SHARED_EXPERT))
            entries.append(matrix("fc2_latent_proj", hidden, latent, Role.SHARED_EXPERT))
        for expert in range(experts):
            entries += _up_down(f"experts.{expert}.", latent, inner, Role.ROUTED_EXPERT)
        return cls(
            "experts without gates",
            name,
            tuple(entries),
            experts,
            router,
            has_latent=fields.has("moe_latent_size"),
        )

    def modules(self, prefix: str) -> UngatedMoeModules:
        """Names of one layer's modules."""
        latent = (f"{prefix}.fc1_latent_proj", f"{prefix}.fc2_latent_proj")
        numbers = range(self.experts)
        return UngatedMoeModules(
            router=f"{prefix}.gate",
            router_bias=f"{prefix}.gate.e_score_correction_bias",
            experts=tuple(UngatedModules.under(f"{prefix}.experts.{one}") for one in numbers),
            shared=UngatedModules.under(f"{prefix}.shared_experts"),
            latent=latent if self.has_latent else None,
        )


def _up_down(prefix: str, hidden: int, inner: int, role: Role) -> tuple[Entry, Entry]:
    return (
        matrix(f"{prefix}up_proj", inner, hidden, role),
        matrix(f"{prefix}down_proj", hidden, inner, role),
    )
