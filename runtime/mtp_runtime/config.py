"""Configuration of a model and of a run: frozen, complete at construction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from mtp_checkpoints.errors import UnsupportedError, UsageError
from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.layer_halves import Attention, FeedForward
from mtp_checkpoints.families.parts import Rope
from mtp_checkpoints.families.spec import ModelSpec

MAX_DRAFT_TOKENS = 5


@dataclass(frozen=True)
class ModelConfig:
    """Facts of a model that do not depend on the kind of its layers.

    layers counts main layers, max_positions tokens; rope is None for a model without rotary
    positions. parts are those of its layers, equal ones once. state_elements: those that they keep
    of a sequence, however long it is. positions_bound says what bounds the positions.
    """

    vocab: int
    hidden: int
    layers: int
    norm_eps: float
    max_positions: int
    eos_token_ids: tuple[int, ...]
    rope: Rope | None
    parts: tuple[Attention | FeedForward, ...] = ()
    state_elements: int = 0
    positions_bound: str = field(default="max_position_embeddings of config.json", kw_only=True)

    @classmethod
    def of(cls, spec: ModelSpec) -> ModelConfig:
        """Take the facts of a model's description."""
        facts = spec.facts
        return cls(
            vocab=facts.vocab,
            hidden=facts.hidden,
            layers=len(spec.layers),
            norm_eps=facts.norm_eps,
            max_positions=facts.max_positions,
            eos_token_ids=facts.eos_token_ids,
            rope=next(
                (layer.attention.rope for layer in spec.layers if layer.attention.rope), None
            ),
            parts=spec.parts,
        )

    def check_positions(self, positions: int) -> None:
        """Refuse a text of more positions than the model has (UsageError)."""
        if positions > self.max_positions:
            raise UsageError(
                "Prompt and max_tokens exceed the model's positions",
                expected=f"at most {self.max_positions} together, {self.positions_bound}",
                found=positions,
            )

    def bounded(self, tokens: int, bound: str) -> ModelConfig:
        """Return the config for contexts of at most some tokens, by what bounds them."""
        if tokens >= self.max_positions:
            return self
        return replace(self, max_positions=tokens, positions_bound=bound)

    def for_contexts(self, tokens: int) -> ModelConfig:
        """Return the config for contexts of at most some tokens.

        Raises UsageError for more than the model has positions.
        """
        if not 1 <= tokens <= self.max_positions:
            raise UsageError(
                "A context cannot have so many tokens",
                expected=f"max_model_len of 1 to {self.max_positions}, {self.positions_bound}",
                found=tokens,
            )
        return replace(self, max_positions=tokens, positions_bound="max_model_len")


def refuse_other_values(found: Mapping[str, object], computed: Mapping[str, object]) -> None:
    """Raise UnsupportedError where a field of config.json has another value than is computed."""
    for key, value in computed.items():
        if found[key] != value:
            raise UnsupportedError(
                f"config.json sets {key} to something that the runtime does not compute",
                expected=value,
                found=found[key],
            )


NO_DRAFTS = "none"  # the method of plain decoding
AUTO_DRAFTS = "auto"  # mtp for a model that was loaded with its module, else none


@dataclass(frozen=True)
class SpeculationConfig:
    """Drafting and acceptance; names and limits as in PaddleNLP.

    method: a key of DRAFTERS. max_draft_tokens (k): 1 to 5. max_ngram_size: the longest suffix
    that inference_with_reference looks up. acceptance: a key of ACCEPTANCE_RULES; topp_window and
    relaxed are lossy. verify_window and max_candidate_len belong to topp_window, relaxed_top_n and
    relaxed_margin to relaxed.

    k_schedule: numbers of drafts by batch size, as (from, drafts), the first from 1; adaptive: up
    to max_draft_tokens, by what acceptance and costs are measured. draft_temperature: that of each
    draft of a request that samples, the last one for all further; 0 takes the best token, () the
    request's own. draft_stop_entropy: nats of the distribution that a draft would be drawn from,
    above which none is drawn. draft_logprobs: drafts of a chain or of parallel heads come with
    their log-probabilities; they are then made step by step.
    """

    method: str = NO_DRAFTS
    max_draft_tokens: int = 1
    max_ngram_size: int = 3
    acceptance: str = "exact"
    verify_window: int = 2
    max_candidate_len: int = 5
    relaxed_top_n: int = 2
    relaxed_margin: float = 0.2
    k_schedule: tuple[tuple[int, int], ...] = ()
    adaptive: bool = False
    draft_temperature: tuple[float, ...] = ()
    draft_stop_entropy: float = math.inf
    draft_logprobs: bool = False

    def __post_init__(self) -> None:
        check_flag("adaptive", self.adaptive)
        check_flag("draft_logprobs", self.draft_logprobs)
        for option, value, high in (
            ("speculate_max_draft_token_num", self.max_draft_tokens, MAX_DRAFT_TOKENS),
            ("speculate_max_ngram_size", self.max_ngram_size, 64),
            ("speculate_verify_window", self.verify_window, MAX_DRAFT_TOKENS),
            ("speculate_max_candidate_len", self.max_candidate_len, 1 << 20),
            ("relaxed_top_n", self.relaxed_top_n, 1 << 20),
        ):
            check_count(option, value, 1, high)
        for temperature in self.draft_temperature:
            check_range("draft_temperature", temperature, 0.0, 100.0)
        check_range("draft_stop_entropy", self.draft_stop_entropy, 0.0, math.inf)
        self._check_lengths()

    def _check_lengths(self) -> None:
        """Refuse a schedule that leaves a batch size open, and options that contradict."""
        if self.method == NO_DRAFTS and (self.adaptive or self.k_schedule):
            raise UsageError(
                "Options adaptive and k_schedule choose how many drafts there are",
                expected="a speculate_method that drafts",
                found=NO_DRAFTS,
            )
        if self.adaptive and self.k_schedule:
            raise UsageError("Give one of the options adaptive and k_schedule")
        sizes = [first for first, _ in self.k_schedule]
        for first, drafts in self.k_schedule:
            check_count("k_schedule (batch size)", first, 1, 1 << 20)
            check_count("k_schedule (drafts)", drafts, 0, MAX_DRAFT_TOKENS)
        if self.k_schedule and (sizes[0] != 1 or sorted(set(sizes)) != sizes):
            raise UsageError(
                "Option k_schedule does not give every batch size one number of drafts",
                expected="batch sizes that rise from 1",
                found=sizes,
            )

    @property
    def shapes_distributions(self) -> bool:
        """True where drafts come from other distributions than their requests', or end by them."""
        return bool(self.draft_temperature) or math.isfinite(self.draft_stop_entropy)

    @property
    def shapes_drafts(self) -> bool:
        """True for options that mean nothing without drafts."""
        return self.adaptive or bool(self.k_schedule) or self.shapes_distributions

    @property
    def draft_tokens(self) -> int:
        """Maximum number of drafts that one step verifies per request."""
        if self.method == NO_DRAFTS:
            return 0
        if self.k_schedule:
            return max(drafts for _, drafts in self.k_schedule)
        return self.max_draft_tokens


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of the engine; cache_tokens bounds the paged cache of all requests together.

    A step computes at most max_step_tokens tokens, of a prompt at most prefill_chunk. prefix_cache
    keeps the entries of prompts and outputs for requests that begin alike.

    poison_freed fills slots with NaN when they are freed: a test's way to see that nothing reads
    them.
    """

    max_batch_size: int = 128
    page_size: int = 64
    cache_tokens: int = 32768
    prefill_chunk: int = 256
    max_step_tokens: int = 2048
    prefix_cache: bool = False
    poison_freed: bool = False
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)

    def __post_init__(self) -> None:
        check_count("max_batch_size", self.max_batch_size, 1, 128)
        check_count("page_size", self.page_size, 1, 1 << 16)
        check_count("prefill_chunk", self.prefill_chunk, 1, 1 << 20)
        check_count("max_step_tokens", self.max_step_tokens, 1, 1 << 24)
        check_count("cache_tokens", self.cache_tokens, self.page_size, 1 << 40)
        check_flag("prefix_cache", self.prefix_cache)


@dataclass(frozen=True, kw_only=True)
class LLMOptions:
    """Options of LLM; those of drafts have PaddleNLP's names where that has them.

    draft_model: folder of a second model, or of a draft that is none, for methods that need one;
    without it such a draft is looked for in the bundle's folder of the method's name.
    deterministic (layers that compiled kernels run): tokens do not depend on batch or drafter, with
    either dtype, which is that of the weights there. activations: what those kernels multiply
    weights of int8 and int4 with, float32 or int8.
    max_model_len: tokens of prompt and output together; above index_topk, torch computes
    DeepSeek-V3.2's and GLM-5's sparse attention. cache_tokens None: EngineConfig's, or as many as
    main memory has room for. max_memory_bytes: bound on resident memory, or on
    a GPU's with what CUDA graphs keep, which cache_tokens follows from in place of being given;
    on a CPU routed experts that do not fit into it are read from disk when they are used.
    static_graph: True captures the target's steps of decoding as CUDA graphs; the path of a package
    that `mtp-export compile` made of this model runs them on a CPU.
    packed_cache: folder in which a CPU's weights are kept as they are packed; the next start maps
    them, in place of reading and packing.
    parallel_mode: how ranks join their parts: gather, with the bits of one process, or reduce.

    The others are those of EngineConfig and SpeculationConfig. speculate_method "auto" is mtp where
    the bundle has a module, else none; speculate_max_draft_token_num None is 1, MAX_DRAFT_TOKENS if
    adaptive. The numbers of drafts that adaptive chooses depend on times, so that sampled tokens do
    too.
    """

    device: str = "cpu"
    dtype: str = "float32"
    activations: str = "float32"
    deterministic: bool = False
    draft_model: Path | str | None = None
    contract: MtpContract | None = None
    max_batch_size: int = EngineConfig.max_batch_size
    cache_tokens: int | None = None
    page_size: int = EngineConfig.page_size
    prefill_chunk: int = EngineConfig.prefill_chunk
    max_step_tokens: int = EngineConfig.max_step_tokens
    prefix_cache: bool = EngineConfig.prefix_cache
    max_memory_bytes: int | None = None
    packed_cache: Path | str | None = None
    dequantize_at_load: bool | None = None
    max_model_len: int | None = None
    static_graph: Path | str | bool = False
    parallel_mode: str | None = None
    speculate_method: str = SpeculationConfig.method
    speculate_max_draft_token_num: int | None = None
    speculate_max_ngram_size: int = SpeculationConfig.max_ngram_size
    speculate_verify_window: int = SpeculationConfig.verify_window
    speculate_max_candidate_len: int = SpeculationConfig.max_candidate_len
    acceptance: str = SpeculationConfig.acceptance
    relaxed_top_n: int = SpeculationConfig.relaxed_top_n
    relaxed_margin: float = SpeculationConfig.relaxed_margin
    k_schedule: Sequence[tuple[int, int]] | None = None
    adaptive: bool = SpeculationConfig.adaptive
    draft_temperature: Sequence[float] | None = None
    draft_stop_entropy: float = SpeculationConfig.draft_stop_entropy

    def engine(self) -> EngineConfig:
        """Return the configuration of the engine (UsageError as speculation, and for sizes out of
        range)."""
        return EngineConfig(
            max_batch_size=self.max_batch_size,
            page_size=self.page_size,
            cache_tokens=EngineConfig.cache_tokens
            if self.cache_tokens is None
            else self.cache_tokens,
            prefill_chunk=self.prefill_chunk,
            max_step_tokens=self.max_step_tokens,
            prefix_cache=self.prefix_cache,
            speculation=self.speculation(),
        )

    def speculation(self) -> SpeculationConfig:
        """Return the configuration of drafts (UsageError where an option is of another form or out
        of range, or two of them say how many drafts there are)."""
        schedule, most = _schedule(self.k_schedule), self.speculate_max_draft_token_num
        if most is None:
            most = MAX_DRAFT_TOKENS if self.adaptive else 1
        elif schedule:
            raise UsageError("Give one of the options speculate_max_draft_token_num and k_schedule")
        return SpeculationConfig(
            method=self.speculate_method,
            max_draft_tokens=most,
            max_ngram_size=self.speculate_max_ngram_size,
            acceptance=self.acceptance,
            verify_window=self.speculate_verify_window,
            max_candidate_len=self.speculate_max_candidate_len,
            relaxed_top_n=self.relaxed_top_n,
            relaxed_margin=self.relaxed_margin,
            k_schedule=schedule,
            adaptive=self.adaptive,
            draft_temperature=_entries(
                "draft_temperature", self.draft_temperature, "one temperature per draft"
            ),
            draft_stop_entropy=self.draft_stop_entropy,
        )


def _schedule(given: Any) -> tuple[tuple[int, int], ...]:
    option, expected = "k_schedule", "pairs of a batch size and a number of drafts"
    pairs = [_entries(option, pair, expected) for pair in _entries(option, given, expected)]
    if any(len(pair) != 2 for pair in pairs):
        raise UsageError(f"Option {option} cannot be read", expected=expected, found=given)
    return tuple((first, drafts) for first, drafts in pairs)


def _entries(option: str, given: Any, expected: str) -> tuple[Any, ...]:
    """Return the entries of an option that is a sequence, none if it was not given (UsageError for
    anything else)."""
    if given is None:
        return ()
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise UsageError(f"Option {option} cannot be read", expected=expected, found=given)
    return tuple(given)


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raise UsageError where an option is no number, or outside its range."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise UsageError(f"Option {name} is no number", expected=f"{low} to {high}", found=value)
    if not low <= value <= high:
        raise UsageError(f"Option {name} is out of range", expected=f"{low} to {high}", found=value)


def check_count(name: str, value: int, low: int, high: int) -> None:
    """Raise UsageError where an option is no whole number, or outside its range."""
    check_range(name, value, low, high)
    if not isinstance(value, Integral):
        raise UsageError(f"Option {name} is no whole number", found=value)


def check_flag(name: str, value: bool) -> None:
    """Raise UsageError where an option is neither True nor False."""
    if not isinstance(value, bool):
        raise UsageError(f"Option {name} is neither true nor false", found=repr(value)[:100])
