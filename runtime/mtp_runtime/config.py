"""Configuration of a model and of a run: frozen, complete at construction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mtp_export.errors import InvalidInputError, UnsupportedError, UsageError

MAX_DRAFT_TOKENS = 5


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions: rotated size r, base, and YaRN's stretching where factor is above 1."""

    size: int
    theta: float
    factor: float = 1.0
    original_positions: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    @classmethod
    def from_config(cls, config: Mapping[str, Any], size: int) -> RopeConfig:
        """Read rope_theta and rope_scaling, or rope_parameters that hold both; size is r.

        Raises UnsupportedError for a scaling other than YaRN's.
        """
        parameters = dict(config.get("rope_parameters") or {})
        parameters |= config.get("rope_scaling") or {}
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        theta = float(parameters.get("rope_theta", config.get("rope_theta", 10000.0)))
        if kind == "default":
            return cls(size, theta)
        if kind != "yarn":
            raise UnsupportedError(
                "config.json asks for a rotary scaling that the runtime does not have",
                expected="default or yarn",
                found=kind,
            )
        return cls(
            size,
            theta,
            factor=float(required(parameters, "factor")),
            original_positions=int(required(parameters, "original_max_position_embeddings")),
            beta_fast=float(parameters.get("beta_fast") or 32.0),
            beta_slow=float(parameters.get("beta_slow") or 1.0),
            mscale=float(parameters.get("mscale") or 1.0),
            mscale_all_dim=float(parameters.get("mscale_all_dim") or 0.0),
        )


@dataclass(frozen=True)
class ModelConfig:
    """Facts of a model that do not depend on the kind of its layers.

    layers counts main layers, max_positions tokens; rope is None for a model without rotary
    positions. positions_bound says what bounds the positions. A model's own config adds what its
    builder needs.
    """

    vocab: int
    hidden: int
    layers: int
    norm_eps: float
    max_positions: int
    eos_token_ids: tuple[int, ...]
    rope: RopeConfig | None
    positions_bound: str = field(default="max_position_embeddings of config.json", kw_only=True)

    def check_positions(self, positions: int) -> None:
        """Refuse a text of more positions than the model has (UsageError)."""
        if positions > self.max_positions:
            raise UsageError(
                "Prompt and max_tokens exceed the model's positions",
                expected=f"at most {self.max_positions} together, {self.positions_bound}",
                found=positions,
            )

    @staticmethod
    def run_facts(config: Mapping[str, Any]) -> dict[str, Any]:
        """Read the fields that no shape depends on, and that every config.json names alike."""
        eos = config.get("eos_token_id")
        return {
            "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
            "max_positions": config.get("max_position_embeddings", 1 << 30),
            "eos_token_ids": tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        }


def required(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key of config.json (InvalidInputError where there is none)."""
    if key not in config:
        raise InvalidInputError(f"config.json has no {key}")
    return config[key]


def refuse_other_values(config: Mapping[str, Any], computed: Mapping[str, object]) -> None:
    """Raise UnsupportedError where config.json sets a key to another value than is computed; a key
    that is absent is taken to be as computed."""
    for key, value in computed.items():
        if config.get(key, value) != value:
            raise UnsupportedError(
                f"config.json sets {key} to something that the runtime does not compute",
                expected=value,
                found=config[key],
            )


NO_DRAFTS = "none"  # the method of plain decoding


@dataclass(frozen=True)
class SpeculationConfig:
    """Drafting and acceptance; names and limits as in PaddleNLP.

    method: a key of DRAFTERS. max_draft_tokens (k): 1 to 5. max_ngram_size: the longest suffix
    that inference_with_reference looks up. acceptance: a key of ACCEPTANCE_RULES; topp_window and
    relaxed are lossy. verify_window and max_candidate_len belong to topp_window, relaxed_top_n and
    relaxed_margin to relaxed. sample_drafts: draft from the draft model's distribution instead of
    its best token when a request samples.
    """

    method: str = NO_DRAFTS
    max_draft_tokens: int = 1
    max_ngram_size: int = 3
    acceptance: str = "exact"
    verify_window: int = 2
    max_candidate_len: int = 5
    relaxed_top_n: int = 2
    relaxed_margin: float = 0.2
    sample_drafts: bool = True

    def __post_init__(self) -> None:
        for option, value, high in (
            ("speculate_max_draft_token_num", self.max_draft_tokens, MAX_DRAFT_TOKENS),
            ("speculate_max_ngram_size", self.max_ngram_size, 64),
            ("speculate_verify_window", self.verify_window, MAX_DRAFT_TOKENS),
            ("speculate_max_candidate_len", self.max_candidate_len, 1 << 20),
            ("relaxed_top_n", self.relaxed_top_n, 1 << 20),
        ):
            check_range(option, value, 1, high)

    @property
    def draft_tokens(self) -> int:
        """Maximum number of drafts that one step verifies per request."""
        return 0 if self.method == NO_DRAFTS else self.max_draft_tokens


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of the engine; cache_tokens bounds the paged cache of all requests together.

    poison_freed fills slots with NaN when they are freed: a test's way to see that nothing reads
    them.
    """

    max_batch_size: int = 128
    page_size: int = 64
    cache_tokens: int = 32768
    prefill_chunk: int = 256
    max_step_tokens: int = 2048
    poison_freed: bool = False
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)

    def __post_init__(self) -> None:
        check_range("max_batch_size", self.max_batch_size, 1, 128)
        check_range("page_size", self.page_size, 1, 1 << 16)
        check_range("prefill_chunk", self.prefill_chunk, 1, 1 << 20)
        check_range("max_step_tokens", self.max_step_tokens, 1, 1 << 24)
        check_range("cache_tokens", self.cache_tokens, self.page_size, 1 << 40)


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raise UsageError when an option is outside its range."""
    if not low <= value <= high:
        raise UsageError(f"Option {name} is out of range", expected=f"{low} to {high}", found=value)
