"""Interface of the runtime, as vLLM has it: LLM(bundle).generate(prompts, SamplingParams())."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from shlex import quote
from threading import Lock
from typing import TYPE_CHECKING, Any, cast

import torch

from mtp_checkpoints.errors import UsageError
from mtp_runtime.chat import Chat, Message
from mtp_runtime.config import (
    AUTO_DRAFTS,
    NO_DRAFTS,
    EngineConfig,
    LLMOptions,
    check_count,
)
from mtp_runtime.drafters import DRAFTERS
from mtp_runtime.drafters.base import TargetDraft
from mtp_runtime.engine import Engine
from mtp_runtime.loading.ledger import Ledger
from mtp_runtime.loading.model_folders import no_module_to_draft_with
from mtp_runtime.loading.same_files import require_same_draft
from mtp_runtime.logprobs import TokenLogprobs
from mtp_runtime.memory import (
    bound_device,
    bytes_per_page,
    cache_tokens_free,
    cache_tokens_within,
)
from mtp_runtime.models.load import Loaded, LoadOptions, load_model
from mtp_runtime.models.model import Model
from mtp_runtime.parallel.group import LONE, Group
from mtp_runtime.prompts import are_ids, require_unicode
from mtp_runtime.request import Request, RequestMetrics, TokenEvent
from mtp_runtime.run_plan import draft_folder_of, load_options_of, planned_memory
from mtp_runtime.sampling import SamplingParams
from mtp_runtime.static_graph.options import GraphOptions
from mtp_runtime.static_graph.steps import pool_bytes
from mtp_runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mtp_kernels.decoder.compiled_cpu.expert_cache import ExpertCache

# Tokens of a prompt that are computed together where routed experts are read from disk and there is
# memory for them: nearly all of a layer's experts are read, once for all of these.
PREFILL_CHUNK = 1024
logger = logging.getLogger(__name__)
Prompt = str | Sequence[int]


@dataclass(frozen=True)
class RequestOutput:
    """Output for one prompt. finish_reason: "stop" (end token or stop text), "length", or "abort"
    where Engine.abort ended it. seed is the one that its random choices came from. logprobs and
    prompt_logprobs, from the prompt's second token on, are there where SamplingParams wants them.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    seed: int
    metrics: RequestMetrics
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class LLM:
    """A loaded model with an engine; generate may be called any number of times, by any number of
    threads at once: their requests share one batch.

    bundle: an export's output folder, or a checkpoint folder. loaded: the bundle's model where it
    is loaded already, with the options it was loaded with. group: the ranks that divide the model,
    each of which makes an LLM with the same options; rank 0 then generates, and the others follow.
    options: the fields of LLMOptions, TypeError for any other.
    Raises what load_model raises, and UsageError for options that make no sense.
    """

    def __init__(
        self,
        bundle: Path | str,
        *,
        loaded: Loaded | None = None,
        group: Group = LONE,
        **options: Any,
    ) -> None:
        given = LLMOptions(**options)
        config = given.engine()
        folder = draft_folder_of(Path(bundle), config, given.draft_model)
        graphs = GraphOptions.of(given.static_graph, given.device, group)
        loading = load_options_of(given, config.speculation, graphs)
        if loaded is None:
            given, main = _with_expert_cache(given, Path(bundle), loading, group)
            loaded = _load_within(given, Path(bundle), main, group)
            config = given.engine()
        self._loaded = loaded
        draft = None if folder is None else self._draft(folder, config, loading)
        self.engine = self._engine(config, given, draft, graphs)
        self.next_request_id, self._numbering = 0, Lock()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The bundle's tokenizer, which may be missing."""
        return Tokenizer.find(self._loaded.folder)

    @cached_property
    def chat(self) -> Chat:
        """The bundle's chat template, which may be missing."""
        return Chat(self._loaded.folder)

    @property
    def expert_cache(self) -> ExpertCache | None:
        """Cache of the routed experts, where they do not all fit into max_memory_bytes."""
        return self._loaded.expert_cache

    @property
    def ledger(self) -> Ledger:
        """Account of the bundle's tensors."""
        return self._loaded.ledger

    def _draft(
        self, folder: Path, config: EngineConfig, options: LoadOptions
    ) -> Model | TargetDraft:
        """Load a second model, or a draft of its own."""
        read, group = DRAFTERS[config.speculation.method].read, self._loaded.parallel.group
        if read is None:
            return load_model(folder, options, group).model
        require_same_draft(folder, group)
        return read(folder, self._loaded)

    def _engine(
        self,
        config: EngineConfig,
        options: LLMOptions,
        draft: Model | TargetDraft | None,
        graph_options: GraphOptions,
    ) -> Engine:
        """Build the engine, with what its options leave to the model."""
        model, speculation = self._loaded.model, config.speculation
        group = self._loaded.parallel.group
        if speculation.method == AUTO_DRAFTS:
            if speculation.shapes_drafts and not model.mtp_modules:
                raise no_module_to_draft_with(self._loaded.folder)  # of a model loaded before
            method = "mtp" if model.mtp_modules else NO_DRAFTS
            config = replace(config, speculation=replace(speculation, method=method))
            if method == NO_DRAFTS and self._loaded.announced_mtp_layers and group.is_first:
                logger.warning(
                    "Decoding without drafts: config.json announces an MTP layer, and there is"
                    " none. See mtp-export verify %s",
                    quote(str(self._loaded.folder)),
                )
        if isinstance(draft, TargetDraft):
            model = model.tapped(draft.taps)
            build, second = draft.build, None
        else:
            build, second = DRAFTERS[config.speculation.method].build, draft
        graphs = graph_options.graphs(model, config.page_size)
        weights = draft.weights if isinstance(draft, TargetDraft) else draft
        cached = (model,) if weights is None else (model, weights)
        if options.max_memory_bytes is not None:
            tokens = cache_tokens_within(
                options.max_memory_bytes,
                model.device,
                cached,
                page_size=config.page_size,
                kept_bytes=pool_bytes(graphs, model, config),
            )
            config = replace(config, cache_tokens=group.smallest(tokens))
        elif options.cache_tokens is None and model.device.type == "cpu":
            page_bytes, page_size = bytes_per_page(cached, config.page_size), config.page_size
            tokens = cache_tokens_free(
                config.cache_tokens, page_bytes=page_bytes, page_size=page_size
            )
            config = replace(config, cache_tokens=group.smallest(tokens))
        return Engine(model, config, build, second, graphs, group)

    def follow(self) -> None:
        """Step as rank 0's LLM does, until its program ends; the other ranks call this."""
        self.engine.follow(self._request)

    def warm_up(self) -> None:
        """Decode a few tokens, so that no later request waits for kernels to be compiled."""
        positions = 4 + self.engine.config.speculation.draft_tokens
        tokens = min(positions, self.engine.model.config.max_positions) - 2
        if tokens > 0:
            self.generate([(0, 0)], SamplingParams(max_tokens=tokens, ignore_eos=True))
        self.engine.totals = RequestMetrics()
        if self.expert_cache is not None:
            self.expert_cache.restart_counts()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_token: Callable[[TokenEvent], object] | None = None,
    ) -> list[RequestOutput]:
        """Decode prompts and return one output per prompt, in order.

        A prompt is a text, or a sequence of token ids; params is one for all or one each. on_token
        is called with every token as it is generated.
        """
        if not isinstance(prompts, Sequence) or isinstance(prompts, str):
            prompts = [prompts]
        elif prompts and are_ids(prompts):
            prompts = [cast(Sequence[int], prompts)]
        each = self._params_of(len(prompts), params)
        requests = self.requests(cast(Sequence[Prompt], prompts), each)
        with closing(self.engine.run(requests)) as events:
            for event in events:
                if on_token is not None:
                    on_token(event)
        return [_output(request) for request in requests]

    def chat_prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the tokens of a chat by the bundle's template, for generate.

        Raises UsageError where there is no template or no tokenizer, and for messages that the
        template refuses; InvalidInputError for a template that fails.
        """
        self.tokenizer.require()
        return self.text_prompt(self.chat.prompt(messages), add_special_tokens=False)

    def text_prompt(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the tokens of a text, for generate.

        Raises UsageError where there is no tokenizer, and for a text that is far too long for the
        model; InvalidInputError for one that is no Unicode.
        """
        require_unicode(text, "A prompt")
        self.tokenizer.require()
        self.tokenizer.require_fit(text, self.engine.model.config.max_positions)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def requests(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> list[Request]:
        """Make a request of every prompt, for Engine.run, or Engine.add and step."""
        numbers = self._new_ids(len(prompts))
        return [
            self._request(number, prompt, sampling)
            for number, prompt, sampling in zip(numbers, prompts, params, strict=True)
        ]

    def _params_of(
        self, count: int, params: SamplingParams | Sequence[SamplingParams] | None
    ) -> Sequence[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * count
        if len(params) != count:
            raise UsageError(
                "Give one SamplingParams per prompt", expected=count, found=len(params)
            )
        return params

    def _new_ids(self, count: int) -> range:
        with self._numbering:
            first = self.next_request_id
            self.next_request_id += count
        return range(first, first + count)

    def _request(
        self, number: int, prompt: Prompt, params: SamplingParams, seed: int | None = None
    ) -> Request:
        if not isinstance(prompt, str) and not are_ids(prompt):
            raise UsageError("This is no prompt", expected="a text, or token ids", found=prompt)
        if params.stop_texts:
            self.tokenizer.require()
        ids = self.text_prompt(prompt) if isinstance(prompt, str) else tuple(prompt)
        decode = self.tokenizer.decode if self.tokenizer.found else None
        eos = self.engine.model.config.eos_token_ids
        return Request(number, ids, params, eos_token_ids=eos, decode=decode, seed=seed)


def llm_of(group: Group, bundle: Path, options: LLMOptions) -> LLM:
    """Make the LLM of a rank, for Group.everywhere; on others than rank 0 it follows from there."""
    llm = LLM(bundle, group=group, **vars(options))
    if not group.is_first:
        llm.follow()
    return llm


def _output(request: Request) -> RequestOutput:
    assert request.finish_reason is not None and request.seed is not None
    return RequestOutput(
        prompt_token_ids=request.prompt,
        token_ids=tuple(request.output),
        text=request.text,
        finish_reason=request.finish_reason,
        seed=request.seed,
        metrics=request.metrics,
        logprobs=tuple(request.logprobs),
        prompt_logprobs=tuple(request.prompt_logprobs),
    )


def _with_expert_cache(
    given: LLMOptions, bundle: Path, options: LoadOptions, group: Group
) -> tuple[LLMOptions, LoadOptions]:
    """Return the options with the limit of memory divided between cached tokens and routed experts,
    where not all of these fit into it (ResourceError where too few do)."""
    if given.max_memory_bytes is None or not options.compiled or not group.is_one:
        return given, options
    check_count("max_memory_bytes", given.max_memory_bytes, 1, 1 << 60)
    memory = planned_memory(bundle, given)
    if memory.refusal is not None:
        raise memory.refusal
    experts = memory.plan.experts
    if experts is None or memory.plan.slots is None:
        return given, options
    left = given.max_memory_bytes - memory.needed_bytes
    divided = replace(
        given,
        max_memory_bytes=None,
        cache_tokens=memory.cache_tokens,
        prefill_chunk=max(
            given.prefill_chunk, min(PREFILL_CHUNK, left // max(1, experts.token_bytes))
        ),
    )
    return divided, replace(options, expert_bytes=memory.plan.slot_bytes)


def _load_within(given: LLMOptions, bundle: Path, options: LoadOptions, group: Group) -> Loaded:
    """Load a model; on this rank's GPU no more than the limit is allocated from here on."""
    limit_bytes = given.max_memory_bytes
    if limit_bytes is None:
        return load_model(bundle, options, group, cache_tokens=given.cache_tokens or 0)
    check_count("max_memory_bytes", limit_bytes, 1, 1 << 60)
    bound_device(torch.device(group.device(options.device)), limit_bytes)
    return load_model(bundle, options, group)  # what is left is the cache's
