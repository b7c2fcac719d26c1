"""Plan of a run by its options: the draft it needs, how its model is loaded, and the memory that it
takes, by headers alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from mtp_checkpoints.errors import InvalidInputError, ResourceError, UsageError
from mtp_checkpoints.families.base import Role
from mtp_checkpoints.free_memory import free_memory
from mtp_runtime.acceptance import ACCEPTANCE_RULES
from mtp_runtime.config import AUTO_DRAFTS, EngineConfig, LLMOptions, SpeculationConfig
from mtp_runtime.drafters import DRAFTERS
from mtp_runtime.loading.draft_folder import read_draft
from mtp_runtime.loading.read_speed import read_speed
from mtp_runtime.memory import (
    cache_tokens_beside,
    cache_tokens_free,
    fits_beside,
    resident_bytes,
    with_expert_cache,
)
from mtp_runtime.models.load import LoadOptions, open_model
from mtp_runtime.models.memory_plan import WORKING_BYTES, MemoryPlan, PageSizes
from mtp_runtime.parallel.group import LONE, Group
from mtp_runtime.static_graph.options import GraphOptions

# Of what threads read before it is packed, and of kernels, which are loaded as they are used.
READING_BYTES = 1 << 28


@dataclass(frozen=True)
class RunMemory:
    """Memory of a run before anything is loaded: its plan, with a cache of so many tokens and what
    it works with, and what each limit leaves, by its name; {} where the system does not tell, and
    on another device. refusal says why it does not fit, None where it does or nobody knows."""

    plan: MemoryPlan
    cache_tokens: int
    limits: Mapping[str, int]
    refusal: ResourceError | None = None
    working_bytes: int = WORKING_BYTES

    @property
    def needed_bytes(self) -> int:
        """Bytes of all together."""
        return (
            self.plan.weight_bytes + self.plan.token_bytes * self.cache_tokens + self.working_bytes
        )

    @classmethod
    def of(
        cls, plan: MemoryPlan, bundle: Path, config: EngineConfig, options: LLMOptions
    ) -> RunMemory:
        """Compare a plan with this machine, as a run with these options does."""
        is_cpu, given = options.device == "cpu", options.cache_tokens or 0
        limits, working_bytes = free_memory() if is_cpu else {}, WORKING_BYTES
        if options.max_memory_bytes is not None:  # a bound on what this process holds then
            limits |= {"--max-memory": options.max_memory_bytes}
            working_bytes = resident_bytes() if is_cpu else 0
        try:
            cached = _with_expert_cache(plan, config, options, working_bytes)
            if cached is not None:
                plan, given = cached
                working_bytes += READING_BYTES
            if is_cpu:
                plan.check(bundle, given)
            if cached is None:
                given = _planned_tokens(plan, config, options, working_bytes)
            return cls(plan, given, limits, working_bytes=working_bytes)
        except ResourceError as refusal:
            return cls(plan, given, limits, refusal, working_bytes)


def planned_memory(bundle: Path, options: LLMOptions, group: Group = LONE) -> RunMemory:
    """Plan the memory of an LLM, of a rank's part of one, by the headers of its files alone.

    The cache of a draft that is no model is not counted. Raises what LLM raises for options and
    files; what does not fit is RunMemory.refusal.
    """
    config = options.engine()
    folder = draft_folder_of(bundle, config, options.draft_model)
    graphs = GraphOptions.of(options.static_graph, options.device, group)
    loading = load_options_of(options, config.speculation, graphs)
    opened = open_model(bundle, loading, group, packs=loading.compiled)
    plan = opened.memory_plan(loading)
    if folder is not None and DRAFTERS[config.speculation.method].read is not None:
        tensors = read_draft(folder).tensors.values()
        plan = plan.with_dense(sum(prod(tensor.shape) for tensor in tensors))
    elif folder is not None:
        draft = open_model(folder, loading, group, packs=loading.compiled)
        plan = plan.beside(draft.memory_plan(loading))
    return RunMemory.of(plan, opened.folder, config, options)


def expert_read_speed(bundle: Path, options: LLMOptions) -> float | None:
    """Return the bytes per second at which routed experts of the main layers are read now; None
    where they are so small that it cannot be told. Raises as planned_memory, and IoError."""
    graphs = GraphOptions.of(options.static_graph, options.device, LONE)
    loading = load_options_of(options, options.speculation(), graphs)
    experts = [
        weight.tensors[0]
        for weight in open_model(bundle, loading, packs=loading.compiled).source.on_disk
        if weight.stored.weight.role is Role.ROUTED_EXPERT
        and weight.stored.weight.mtp_layer is None
    ]
    return read_speed(experts)


def within_limit(plan: MemoryPlan, options: LLMOptions) -> MemoryPlan:
    """Return the plan with a cache of routed experts, where not all of them fit into the limit of
    memory that options have (ResourceError where too few do)."""
    cached = _with_expert_cache(plan, options.engine(), options, resident_bytes())
    return plan if cached is None else cached[0]


def _with_expert_cache(
    plan: MemoryPlan, config: EngineConfig, options: LLMOptions, working_bytes: int
) -> tuple[MemoryPlan, int] | None:
    """Return the plan with as many routed experts in memory as a limit leaves room for, and tokens
    of cache; None where there is no limit, or all of them fit (ResourceError where too few do)."""
    limit, page_bytes = options.max_memory_bytes, plan.token_bytes * config.page_size
    if limit is None or plan.experts is None:
        return None
    if fits_beside(working_bytes + plan.weight_bytes, limit, page_bytes):
        return None
    sizes = PageSizes(config.page_size, config.cache_tokens, options.cache_tokens)
    used = working_bytes + READING_BYTES
    return with_expert_cache(plan, sizes, used_bytes=used, max_memory_bytes=limit)


def _planned_tokens(
    plan: MemoryPlan, config: EngineConfig, options: LLMOptions, working_bytes: int
) -> int:
    """Return the tokens of cache that a run takes (ResourceError where there is no room)."""
    page_size = config.page_size
    page_bytes, used = plan.token_bytes * page_size, plan.weight_bytes + working_bytes
    if options.max_memory_bytes is not None:
        return cache_tokens_beside(
            used, options.max_memory_bytes, page_bytes=page_bytes, page_size=page_size
        )
    if options.cache_tokens is not None or options.device != "cpu":
        return config.cache_tokens
    return cache_tokens_free(
        config.cache_tokens, page_bytes=page_bytes, page_size=page_size, unread_bytes=used
    )


def draft_folder_of(
    bundle: Path, engine: EngineConfig, draft_model: Path | str | None
) -> Path | None:
    """Return the folder of a second model or draft. Raises what the checks and _extra_draft raise,
    and InvalidInputError for a folder that is not there."""
    config = engine.speculation
    _check_choices(config, draft_model, prefix_cache=engine.prefix_cache)
    if draft_model is None:
        return _extra_draft(bundle, config.method)
    if not Path(draft_model).is_dir():
        raise InvalidInputError(
            "There is no draft_model here", where=draft_model, expected="a folder of a draft"
        )
    return Path(draft_model)


def _check_choices(
    config: SpeculationConfig, draft_model: Path | str | None, *, prefix_cache: bool
) -> None:
    """Raise UsageError for an unknown drafter or rule, for a draft model that the drafter does not
    take or lacks, and for a drafter that no prefix cache can be used with."""
    _check_choice("acceptance", config.acceptance, ACCEPTANCE_RULES)
    _check_choice("speculate_method", config.method, (AUTO_DRAFTS, *DRAFTERS))
    method = "mtp" if config.method == AUTO_DRAFTS else config.method
    kind = DRAFTERS[method]
    if prefix_cache and not kind.prefix_cache:
        takers = [name for name, other in DRAFTERS.items() if other.prefix_cache]
        raise UsageError(
            f"The speculate_method {method} works with no prefix cache",
            expected=" or ".join(takers),
            todo="Leave the prefix cache out, or choose another method",
        )
    if not kind.draws and config.shapes_distributions:
        raise UsageError(
            "Options draft_temperature and draft_stop_entropy are for drafts that are drawn",
            expected=" or ".join(name for name, other in DRAFTERS.items() if other.draws),
            found=f"speculate_method {method}",
        )
    if kind.read is None and kind.needs_draft_model != (draft_model is not None):
        takers = [n for n, other in DRAFTERS.items() if other.needs_draft_model or other.read]
        raise UsageError(
            f"The speculate_method {method} {'needs a' if draft_model is None else 'takes no'}"
            " draft_model",
            expected=f"a draft_model with {' or '.join(takers)}, and with no other",
        )


def load_options_of(
    options: LLMOptions, speculation: SpeculationConfig, graphs: GraphOptions
) -> LoadOptions:
    """Return how to load the model: with its MTP modules where the drafter needs them, and where
    auto may; that is then refused a model without any if drafts are asked for."""
    is_auto = speculation.method == AUTO_DRAFTS
    return LoadOptions(
        device=options.device,
        dtype=options.dtype,
        activations=options.activations,
        deterministic=options.deterministic,
        dequantize_at_load=options.dequantize_at_load,
        with_mtp=is_auto or DRAFTERS[speculation.method].needs_mtp,
        requires_mtp=is_auto and speculation.shapes_drafts,
        contract=options.contract,
        max_model_len=options.max_model_len,
        parallel_mode=options.parallel_mode,
        static_graph=graphs.wanted,
        packed_cache=None if options.packed_cache is None else Path(options.packed_cache),
    )


def _extra_draft(bundle: Path, method: str) -> Path | None:
    """Return the bundle's own draft for a method (UsageError where the method needs one)."""
    if method not in DRAFTERS or DRAFTERS[method].read is None:
        return None
    if not (bundle / method).is_dir():
        raise UsageError(
            f"The speculate_method {method} needs a draft, and the bundle has none",
            where=bundle,
            expected=f"draft_model, or a folder {method} in the bundle",
        )
    return bundle / method


def _check_choice(option: str, value: str, choices: Collection[str]) -> None:
    if value not in choices:
        raise UsageError(
            f"There is no {option} of this name", expected=", ".join(choices), found=value
        )
