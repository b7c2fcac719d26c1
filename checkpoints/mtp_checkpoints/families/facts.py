"""Numbers and choices of config.json that no tensor's shape depends on: what computing needs.

They are checked when a family is made, so that nothing is exported that nobody can run. A choice
that makes sense but that the runtime does not compute is the runtime's to refuse.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.families.fields import MAX_POSITIONS, Fields
from mtp_kernels.sizes import Routing

YARN = "yarn"
_UNBOUNDED_POSITIONS = 1 << 30
# A base of 1 or less gives no pair a lower frequency than the one before it.
_MIN_THETA, _MAX_THETA = 2.0, 1e15
_MAX_FACTOR = 1e6


@dataclass(frozen=True, slots=True)
class YarnFacts:
    """YaRN's stretching of rotary positions. original_positions is None where config.json leaves
    it to the reader."""

    factor: float
    original_positions: int | None
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float

    @classmethod
    def of(cls, fields: Fields) -> YarnFacts:
        """Read a rope_scaling; 0 stands for a default, as in transformers."""
        positions = "original_max_position_embeddings"
        return cls(
            factor=fields.number("factor", minimum=1.0, maximum=_MAX_FACTOR),
            original_positions=fields.whole(positions, maximum=MAX_POSITIONS)
            if fields.has(positions)
            else None,
            beta_fast=fields.number("beta_fast", 0.0, maximum=_MAX_FACTOR) or 32.0,
            beta_slow=fields.number("beta_slow", 0.0, maximum=_MAX_FACTOR) or 1.0,
            mscale=fields.number("mscale", 0.0, maximum=_MAX_FACTOR) or 1.0,
            mscale_all_dim=fields.number("mscale_all_dim", 0.0, maximum=_MAX_FACTOR),
        )


@dataclass(frozen=True, slots=True)
class RopeFacts:
    """Rotary positions. scaling is its name, "default" where there is none; yarn has the numbers
    of YaRN's, and is None for any other."""

    theta: float
    scaling: str
    yarn: YarnFacts | None

    @classmethod
    def of(cls, fields: Fields) -> RopeFacts:
        """Read rope_theta and rope_scaling, or rope_parameters that hold both."""
        parameters, scaling = fields.section("rope_parameters"), fields.section("rope_scaling")
        prefix = (scaling if scaling.values else parameters).prefix
        both = Fields({**parameters.values, **scaling.values}, prefix)
        kind = both.word("rope_type" if both.has("rope_type") else "type", "default")
        base = both if both.has("rope_theta") else fields
        return cls(
            theta=base.number("rope_theta", 10000.0, minimum=_MIN_THETA, maximum=_MAX_THETA),
            scaling=kind,
            yarn=YarnFacts.of(both) if kind == YARN else None,
        )


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Numbers and choices that every decoder computes with."""

    norm_eps: float
    max_positions: int
    eos_token_ids: tuple[int, ...]
    hidden_act: str
    rope: RopeFacts

    @classmethod
    def of(cls, fields: Fields) -> RunFacts:
        """Read the fields that every config.json names alike."""
        fields.token_ids("bos_token_id")  # of no use here, but verify compares it
        return cls(
            norm_eps=fields.number("rms_norm_eps", 1e-6, maximum=1.0),
            max_positions=fields.whole(
                "max_position_embeddings", _UNBOUNDED_POSITIONS, maximum=MAX_POSITIONS
            ),
            eos_token_ids=fields.token_ids("eos_token_id"),
            hidden_act=fields.word("hidden_act", "silu"),
            rope=RopeFacts.of(fields),
        )


@dataclass(frozen=True, slots=True)
class RouterFacts:
    """Choice of experts."""

    scoring: str
    method: str
    routing: Routing

    @classmethod
    def of(cls, fields: Fields, experts: int) -> RouterFacts:
        """Read the router of layers with so many experts."""
        known = fields.without_nulls()
        groups = known.whole("n_group", 0, minimum=0) or 1
        kept = known.whole("topk_group", 0, minimum=0) or 1
        router = cls(
            scoring=fields.word("scoring_func", "sigmoid"),
            method=fields.word("topk_method", "noaux_tc"),
            routing=Routing(
                experts_per_token=fields.whole("num_experts_per_tok"),
                groups=groups,
                groups_per_token=min(kept, groups),
                normalises=fields.flag("norm_topk_prob", True),
                scale=fields.number("routed_scaling_factor", 1.0, maximum=1e6),
            ),
        )
        router._check(experts)
        return router

    def _check(self, experts: int) -> None:
        """Refuse groups that the experts do not fill, and more experts than can be picked."""
        picked, groups, kept, *_ = self.routing
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
