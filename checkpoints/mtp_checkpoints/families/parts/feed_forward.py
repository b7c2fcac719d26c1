"""Feed-forward parts: the gated MLP, and the mixture of such experts behind a router.

Source: DeepSeek-V3 technical report, section 2.1.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle, repeat
from typing import NamedTuple

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.families.base import FLOATS, Role, TensorMaker, TensorSpec, weight_name
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.named_tuples import rows_of
from mtp_kernels.sizes import Routing

BIASED = "noaux_tc"  # the method of a router with a bias that counts for picking alone


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
class GatedMlp:
    """down(activation(gate(x)) * up(x)), of `inner` values."""

    hidden: int
    inner: int
    activation: str

    @classmethod
    def of(cls, fields: Fields) -> GatedMlp:
        """Read the MLP of a dense layer."""
        return cls(
            fields.whole("hidden_size"), fields.whole("intermediate_size"), _activation(fields)
        )

    def tensors(self, prefix: str, make: TensorMaker) -> Iterator[TensorSpec]:
        """Yield the tensors of one layer's MLP."""
        return self.matrices([MlpModules.under(prefix)], Role.DENSE_MLP, make)

    def matrices(
        self, modules: Iterable[MlpModules], role: Role, make: TensorMaker
    ) -> Iterator[TensorSpec]:
        """Yield the matrices of some such MLPs."""
        inward, outward = (self.inner, self.hidden), (self.hidden, self.inner)
        names = [weight_name(module) for gate_up_down in modules for module in gate_up_down]
        return rows_of(  # as many as 46,000
            TensorSpec,
            name=names,
            shape=cycle((inward, inward, outward)),
            dtypes=repeat(make.dtypes),
            role=repeat(role),
            mtp_layer=repeat(make.mtp_layer),
        )


@dataclass(frozen=True, slots=True)
class Router:
    """Choice of experts by the scores of a matrix."""

    scoring: str
    method: str
    routing: Routing

    @classmethod
    def of(cls, fields: Fields, experts: int) -> Router:
        """Read the router of layers with so many experts."""
        known = fields.without_nulls()
        groups = known.whole("n_group", 0, minimum=0) or 1
        kept = known.whole("topk_group", 0, minimum=0) or 1
        routing = Routing(
            experts_per_token=fields.whole("num_experts_per_tok"),
            groups=groups,
            groups_per_token=min(kept, groups),
            normalises=fields.flag("norm_topk_prob", True),
            scale=fields.number("routed_scaling_factor", 1.0, maximum=1e6),
        )
        _check(routing, experts)
        return cls(
            fields.word("scoring_func", "sigmoid"), fields.word("topk_method", BIASED), routing
        )


def _check(routing: Routing, experts: int) -> None:
    """Refuse groups that the experts do not fill, and more experts than can be picked."""
    picked, groups, kept, *_ = routing
    size, chooses = experts // groups, groups > kept
    if experts % groups or (chooses and size < 2):
        raise InvalidInputError(
            "config.json's routed experts do not fall into n_group groups",
            expected=f"n_routed_experts as {groups} equal groups of 2 or more",
            found=experts,
        )
    pickable = size * kept
    if picked > pickable:
        raise InvalidInputError(
            "config.json's num_experts_per_tok is more than can be picked",
            expected=f"at most {pickable} of {experts} experts, by n_group and topk_group",
            found=picked,
        )


@dataclass(frozen=True, slots=True)
class Moe:
    """Routed experts, of which a router picks some for every row, and shared ones that every row
    goes through, stored side by side as one MLP."""

    expert: GatedMlp
    experts: int
    shared: int
    router: Router

    @classmethod
    def of(cls, fields: Fields) -> Moe:
        """Read a sparse layer."""
        experts, inner = fields.whole("n_routed_experts"), fields.whole("moe_intermediate_size")
        return cls(
            GatedMlp(fields.whole("hidden_size"), inner, _activation(fields)),
            experts,
            shared=fields.whole("n_shared_experts", 0, minimum=0),
            router=Router.of(fields, experts),
        )

    def modules(self, prefix: str) -> MoeModules:
        """Names of one layer's modules."""
        experts = (f"{prefix}.experts.{expert}" for expert in range(self.experts))
        return MoeModules(
            router=f"{prefix}.gate",
            router_bias=f"{prefix}.gate.e_score_correction_bias",
            experts=tuple(map(MlpModules.under, experts)),
            shared=MlpModules.under(f"{prefix}.shared_experts") if self.shared else None,
        )

    def tensors(self, prefix: str, make: TensorMaker) -> Iterator[TensorSpec]:
        """Yield the tensors of one layer: router, shared experts, routed ones."""
        names, expert = self.modules(prefix), self.expert
        router = make.kept(weight_name(names.router), (self.experts, expert.hidden), Role.ROUTER)
        yield router
        if self.router.method == BIASED:
            yield make.kept(names.router_bias, (self.experts,), Role.ROUTER)._replace(dtypes=FLOATS)
        if names.shared is not None:
            together = GatedMlp(expert.hidden, expert.inner * self.shared, expert.activation)
            yield from together.matrices([names.shared], Role.SHARED_EXPERT, make)
        yield from expert.matrices(names.experts, Role.ROUTED_EXPERT, make)


def _activation(fields: Fields) -> str:
    return fields.word("hidden_act", "silu")
