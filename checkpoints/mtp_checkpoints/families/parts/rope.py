"""Rotary positions, as config.json gives them.

They are checked when a model is described, so that nothing is exported that nobody can run. A
scaling that makes sense but that the runtime does not compute is the runtime's to refuse.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtp_checkpoints.families.fields import MAX_POSITIONS, Fields

PLAIN, YARN, LLAMA3 = "default", "yarn", "llama3"
# A base of 1 or less gives no pair a lower frequency than the one before it.
_MIN_THETA, _MAX_THETA = 2.0, 1e15
_MAX_FACTOR = 1e6
_MIN_BAND = 1e-3  # between the frequencies of Llama 3.1's stretching


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN's stretching of rotary positions. original_positions is None where config.json leaves
    it to the reader."""

    factor: float
    original_positions: int | None
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float

    @classmethod
    def of(cls, fields: Fields) -> Yarn:
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
class Llama3:
    """Llama 3.1's stretching: pairs that rotate at most low_frequency times over the original
    positions are slowed down by a factor, those that rotate at least high_frequency times are not.

    Source: transformers' modeling_rope_utils.
    """

    factor: float
    low_frequency: float
    high_frequency: float
    original_positions: int

    @classmethod
    def of(cls, fields: Fields) -> Llama3:
        """Read a rope_scaling."""
        low = fields.number("low_freq_factor", maximum=_MAX_FACTOR)
        return cls(
            factor=fields.number("factor", minimum=1.0, maximum=_MAX_FACTOR),
            low_frequency=low,
            high_frequency=fields.number(
                "high_freq_factor", minimum=low + _MIN_BAND, maximum=_MAX_FACTOR
            ),
            original_positions=fields.whole(
                "original_max_position_embeddings", maximum=MAX_POSITIONS
            ),
        )


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions of `size` elements of a head. scaling is the name of their stretching; yarn
    has the numbers of YaRN's, llama3 those of Llama 3.1's, and each is None for any other. sections
    are the pairs that each of several positions turns, of which text has equal ones. turning: the
    pairs that turn at all, the first ones; None: all."""

    size: int
    theta: float
    scaling: str = PLAIN
    yarn: Yarn | None = None
    sections: tuple[int, ...] = ()
    llama3: Llama3 | None = None
    turning: int | None = None

    @classmethod
    def of(cls, fields: Fields, size: int) -> Rope:
        """Read rope_theta and rope_scaling, or rope_parameters that hold both."""
        parameters, scaling = fields.section("rope_parameters"), fields.section("rope_scaling")
        prefix = (scaling if scaling.values else parameters).prefix
        both = Fields({**parameters.values, **scaling.values}, prefix)
        kind = both.word("rope_type" if both.has("rope_type") else "type", PLAIN)
        base = both if both.has("rope_theta") else fields
        return cls(
            size,
            theta=base.number("rope_theta", 10000.0, minimum=_MIN_THETA, maximum=_MAX_THETA),
            scaling=kind,
            yarn=Yarn.of(both) if kind == YARN else None,
            sections=both.wholes("mrope_section"),
            llama3=Llama3.of(both) if kind == LLAMA3 else None,
        )
