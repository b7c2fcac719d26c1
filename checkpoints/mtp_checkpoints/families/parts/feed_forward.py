"""Feed-forward parts: the gated MLP, and the mixture of such experts behind a router.

Source: DeepSeek-V3 technical report, section 2.1.2; transformers' qwen3_next and qwen3_5_moe.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle, repeat
from typing import ClassVar, NamedTuple

from mtp_checkpoints.dtypes import DType
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.families.base import (
    FLOATS,
    ModulePatterns,
    Role,
    TensorMaker,
    TensorSpec,
    weight_name,
)
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.named_tuples import rows_of
from mtp_kernels.sizes import Routing

BIASED = "noaux_tc"  # the method of a router with a bias that counts for picking alone
GREEDY = "greedy"  # the method of a router whose scores alone count
_BLOCK = 128  # rows and columns of the blocks of fp8 that releases have
SILU = "silu"  # the activation of gates that nearly every model has
SOFTMAX = "softmax"  # over the scores of all experts
DENSE = "mlp.(gate_proj|up_proj|gate_up_proj|down_proj)$"  # the pattern of a dense layer's linears
_USUAL = ModulePatterns(linears={})  # the names that nearly every model has


class MlpModules(NamedTuple):
    """Linears of a gated MLP."""

    gate: str
    up: str
    down: str

    @classmethod
    def under(cls, prefix: str) -> MlpModules:
        """Names as nearly every checkpoint has them."""
        return cls(f"{prefix}.gate_proj", f"{prefix}.up_proj", f"{prefix}.down_proj")


class FusedExperts(NamedTuple):
    """Tensors that hold the matrices of all experts of a layer: [E, gate | up, in] in one tensor or
    in two, and [E, out, inner]. Usually the names of transformers' modules, under the prefix of a
    mixture."""

    gate_up: tuple[str, ...] = ("experts.gate_up_proj",)
    down: str = "experts.down_proj"

    def under(self, prefix: str) -> FusedExperts:
        """Return the full names."""
        return FusedExperts(
            tuple(f"{prefix}.{name}" for name in self.gate_up), f"{prefix}.{self.down}"
        )

    @property
    def every(self) -> tuple[str, ...]:
        """Names of all tensors."""
        return (*self.gate_up, self.down)


class MoeNames(NamedTuple):
    """Names of the modules beside the routed experts, under the prefix of a mixture; bias is the
    name of a tensor, module that of the mixture in its layer, "" where they lie in the layer
    itself. fused are the routed experts' own where they are stored fused, which takes_fused, names
    of engines, need; experts what numbers of single ones follow."""

    router: str = "gate"
    bias: str = "gate.e_score_correction_bias"
    shared: str = "shared_experts"
    module: str = "mlp"
    fused: FusedExperts = FusedExperts()
    takes_fused: tuple[str, ...] = ()
    experts: str = "experts"


_NAMES = MoeNames()
_OF_QWEN = MoeNames(shared="shared_expert")


@cache
def _patterns(names: MoeNames, *, gated: bool) -> ModulePatterns:
    """Return the patterns of modules of other names than nearly every model has."""
    others = [] if names.router == _NAMES.router else [names.router]
    under = f"{names.module}.".lstrip(".")
    if gated:
        others.append("shared_expert_gate")
    linears = {}
    if (names.experts, under) != (_NAMES.experts, "mlp."):
        linears[Role.ROUTED_EXPERT] = f"{under}{names.experts}.*"
    if names.shared != _NAMES.shared:
        linears[Role.SHARED_EXPERT] = f"{under}{names.shared}[.].*"
    if names.shared.endswith("mlp"):  # the usual pattern of dense layers would match it too
        linears[Role.DENSE_MLP] = f"(?<!{names.shared.removesuffix('mlp')}){DENSE}"
    return ModulePatterns(
        linears=linears,
        other_matrices=tuple(f"re:.*{under}{name}$" for name in others),
    )


@dataclass(frozen=True, slots=True)
class MoeModules:
    """Modules of a mixture of experts; shared experts are stored as one MLP, side by side.

    router_bias is a tensor's full name: it belongs to the router, but is no weight of it; None for
    a router without one. experts are those that are stored one by one, fused the tensors of all,
    None where they are apart. shared_gate is None where shared experts are simply added.
    """

    router: str
    router_bias: str | None
    experts: tuple[MlpModules, ...]
    shared: MlpModules | None
    shared_gate: str | None = None
    fused: FusedExperts | None = None


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(activation(gate(x)) * up(x)), of `inner` values; limit: what the activation has at most,
    and up(x) on either side of 0, None where nothing bounds them."""

    hidden: int
    inner: int
    activation: str
    limit: float | None = None

    patterns: ClassVar[ModulePatterns] = _USUAL

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


def gated_mlps(part: object, prefix: str) -> list[tuple[MlpModules, float | None]]:
    """Return the MLPs gated by silu of a feed-forward under a prefix, each with its limit: experts,
    shared ones last, or the dense MLP that it is; none of another part."""
    if isinstance(part, GatedMlp) and part.activation == SILU:
        return [(MlpModules.under(prefix), part.limit)]
    if not isinstance(part, Moe):
        return []
    names = part.modules(prefix)
    shared = [] if names.shared is None else [(names.shared, part.shared_limit)]
    return [*((expert, part.expert.limit) for expert in names.experts), *shared]


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

    @classmethod
    def softmax(cls, fields: Fields, experts: int, *, normalises: bool) -> Router:
        """Read the router of Qwen's layers with so many experts."""
        picked = fields.whole("num_experts_per_tok")
        routing = Routing(picked, 1, 1, normalises=normalises, scale=1.0)
        _check(routing, experts)
        return cls(SOFTMAX, GREEDY, routing)


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
    goes through, stored side by side as one MLP.

    shared_inner: inner values of all shared experts together; None: each has those of a routed one.
    shared_gate: the sigmoid of a gate multiplies what the shared expert adds. is_fused: the routed
    experts are stored as tensors of three dimensions, else one by one. names are those that
    checkpoints have for the modules. shared_limit: the limit of the shared experts. fused_scales:
    fused experts are in fp8 blocks, with scales that are fused as they are.
    """

    expert: GatedMlp
    experts: int
    shared: int
    router: Router
    shared_inner: int | None = None
    shared_gate: bool = False
    is_fused: bool = False
    names: MoeNames = _NAMES
    shared_limit: float | None = None
    fused_scales: bool = False

    @classmethod
    def of(cls, fields: Fields, names: MoeNames = _NAMES) -> Moe:
        """Read a sparse layer."""
        experts, inner = fields.whole("n_routed_experts"), fields.whole("moe_intermediate_size")
        return cls(
            GatedMlp(fields.whole("hidden_size"), inner, _activation(fields)),
            experts,
            shared=fields.whole("n_shared_experts", 0, minimum=0),
            router=Router.of(fields, experts),
            names=names,
        )

    @classmethod
    def gated(cls, fields: Fields, *, normalises: bool) -> Moe:
        """Read a sparse layer as Qwen's configs describe it, with one shared expert of a gate.

        normalises: the weights of the picked experts are made to sum to 1.
        """
        experts, inner = fields.whole("num_experts"), fields.whole("moe_intermediate_size")
        return cls(
            GatedMlp(fields.whole("hidden_size"), inner, _activation(fields)),
            experts,
            shared=1,
            router=Router.softmax(fields, experts, normalises=normalises),
            shared_inner=fields.whole("shared_expert_intermediate_size"),
            shared_gate=True,
            names=_OF_QWEN,
        )

    @property
    def patterns(self) -> ModulePatterns:
        """Module names of its linears, as engines' quantization configs refer to them."""
        return _patterns(self.names, gated=self.shared_gate)

    @property
    def shared_mlp(self) -> GatedMlp | None:
        """The shared experts side by side; None where there are none."""
        inner = self.expert.inner * self.shared if self.shared_inner is None else self.shared_inner
        return replace(self.expert, inner=inner, limit=self.shared_limit) if self.shared else None

    def modules(self, prefix: str) -> MoeModules:
        """Names of one layer's modules."""
        numbers = range(0 if self.is_fused else self.experts)
        experts = f"{prefix}.{self.names.experts}"
        router, bias, shared = (f"{prefix}.{name}" for name in self.names[:3])
        biased = self.router.method == BIASED
        return MoeModules(
            router=router,
            router_bias=bias if biased else None,
            experts=tuple(MlpModules.under(f"{experts}.{number}") for number in numbers),
            shared=MlpModules.under(shared) if self.shared else None,
            shared_gate=f"{prefix}.shared_expert_gate" if self.shared_gate else None,
            fused=self.names.fused.under(prefix) if self.is_fused else None,
        )

    @property
    def one_by_one(self) -> Moe:
        """The mixture with its experts stored one by one."""
        return replace(self, is_fused=False, fused_scales=False)

    def as_stored(self, prefix: str, names: Collection[str], apart: Collection[str]) -> Moe:
        """Return the mixture with its experts as tensors of these names have them, as it is where
        none is there; apart: what names of experts that are stored one by one begin with."""
        every = self.names.fused.under(prefix).every
        fused = any(name in names for name in every)
        scales = any(fused_scale(name) in names for name in every)
        return (
            replace(self, is_fused=fused, fused_scales=scales)
            if fused or f"{prefix}.{self.names.experts}" in apart
            else self
        )

    def apart(self, prefix: str) -> dict[str, tuple[str, ...]]:
        """Return per fused tensor of one layer the weights of single experts that it holds, in the
        order of their rows; nothing where experts are stored one by one."""
        if not self.is_fused:  # names of as many as 46,000 are not made for nothing
            return {}
        fused = self.names.fused.under(prefix)
        experts = self.one_by_one.modules(prefix).experts
        halves = [(0, 1)] if len(fused.gate_up) == 1 else [(0,), (1,)]
        parts = zip(fused.every, [*halves, (2,)], strict=True)
        return {
            name: tuple(weight_name(one[number]) for one in experts for number in own)
            for name, own in parts
        }

    def tensors(self, prefix: str, make: TensorMaker) -> Iterator[TensorSpec]:
        """Yield the tensors of one layer: router, shared experts, routed ones."""
        names, expert = self.modules(prefix), self.expert
        router = make.kept(weight_name(names.router), (self.experts, expert.hidden), Role.ROUTER)
        yield router
        if names.router_bias is not None:
            yield make.kept(names.router_bias, (self.experts,), Role.ROUTER)._replace(dtypes=FLOATS)
        if names.shared_gate is not None:
            yield make.kept(weight_name(names.shared_gate), (1, expert.hidden), Role.ROUTER)
        if names.shared is not None and (together := self.shared_mlp) is not None:
            yield from together.matrices([names.shared], Role.SHARED_EXPERT, make)
        if names.fused is not None:
            count, inner, hidden = self.experts, expert.inner, expert.hidden
            rows = 2 * inner // len(names.fused.gate_up)
            for name in names.fused.gate_up:
                yield from self._fused(name, (count, rows, hidden), make)
            yield from self._fused(names.fused.down, (count, hidden, inner), make)
        yield from expert.matrices(names.experts, Role.ROUTED_EXPERT, make)

    def _fused(
        self, name: str, shape: tuple[int, int, int], make: TensorMaker
    ) -> Iterator[TensorSpec]:
        """Yield a tensor of all experts; in fp8 its codes and their scales."""
        values = make.kept(name, shape, Role.ROUTED_EXPERT)
        if not self.fused_scales:
            yield values
            return
        yield values._replace(dtypes=(DType.F8_E4M3,))
        blocks = (shape[0], *(-(-size // _BLOCK) for size in shape[1:]))
        scales = make.kept(fused_scale(name), blocks, Role.ROUTED_EXPERT)
        yield scales._replace(dtypes=(DType.F32,))


def fused_scale(name: str) -> str:
    """Return the name of the scales of fused experts in fp8 blocks, by that of their codes."""
    return f"{name}_scale_inv"


def _activation(fields: Fields) -> str:
    return fields.word("hidden_act", "silu")
