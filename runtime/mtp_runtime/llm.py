"""Interface of the runtime, as vLLM has it: LLM(bundle).generate(prompts, SamplingParams())."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Unpack, cast

from mtp_export.errors import UsageError
from mtp_export.families.contract import MtpContract
from mtp_runtime.acceptance import ACCEPTANCE_RULES
from mtp_runtime.config import (
    EngineConfig,
    SpeculationConfig,
    SpeculationOptions,
    speculation_config,
)
from mtp_runtime.drafters import DRAFTERS
from mtp_runtime.engine import Engine
from mtp_runtime.models.load import Loaded, LoadOptions, load_model
from mtp_runtime.prompts import require_unicode
from mtp_runtime.request import Request, RequestMetrics, TokenEvent
from mtp_runtime.sampling import SamplingParams
from mtp_runtime.tokenizer import Tokenizer

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class RequestOutput:
    """Output for one prompt. finish_reason: "stop" (end token or stop text), "length", or "abort"
    where Engine.abort ended it."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    metrics: RequestMetrics


class LLM:
    """A loaded model with an engine; generate may be called any number of times, by any number of
    threads at once: their requests share one batch.

    bundle: an export's output folder, or a checkpoint folder. draft_model: folder of a second
    model, or of a draft that is none, for methods that need one; without it such a draft is looked
    for in the bundle's folder of the method's name. speculation: see SpeculationOptions;
    the numbers of drafts that adaptive chooses depend on times, so that sampled tokens do too.
    deterministic (float32 only, layers that compiled kernels run): tokens do not
    depend on batch or drafter. loaded: the bundle's model where it is loaded already, with the
    options it was loaded with.
    Raises what load_model raises, and UsageError for options that make no sense.
    """

    def __init__(
        self,
        bundle: Path | str,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        deterministic: bool = False,
        draft_model: Path | str | None = None,
        contract: MtpContract | None = None,
        max_batch_size: int = 128,
        cache_tokens: int = 32768,
        page_size: int = 64,
        prefill_chunk: int = 256,
        dequantize_at_load: bool = True,
        loaded: Loaded | None = None,
        **speculation: Unpack[SpeculationOptions],
    ) -> None:
        drafting = speculation_config(speculation)
        _check_choices(drafting, draft_model)
        draft = Path(draft_model) if draft_model else _own_draft(Path(bundle), drafting.method)
        config = EngineConfig(
            max_batch_size=max_batch_size,
            page_size=page_size,
            cache_tokens=cache_tokens,
            prefill_chunk=prefill_chunk,
            speculation=drafting,
        )
        options = LoadOptions(
            device=device,
            dtype=dtype,
            deterministic=deterministic,
            dequantize_at_load=dequantize_at_load,
            with_mtp=DRAFTERS[drafting.method].needs_mtp,
            contract=contract,
        )
        self._start(config, options, loaded or Path(bundle), draft)

    def _start(
        self,
        config: EngineConfig,
        options: LoadOptions,
        target: Loaded | Path,
        draft: Path | None,
    ) -> None:
        """Load what is not loaded yet, and build the engine."""
        loaded = load_model(target, options) if isinstance(target, Path) else target
        kind = DRAFTERS[config.speculation.method]
        model, build, draft_model = loaded.model, kind.build, None
        if draft is not None and kind.read is not None:
            own = kind.read(draft, loaded)
            model, build = model.tapped(own.taps), own.build
        elif draft is not None:
            draft_model = load_model(draft, options).model
        self.ledger = loaded.ledger
        self.tokenizer = Tokenizer.find(loaded.folder)
        self.engine = Engine(model, config, build, draft_model)
        self.next_request_id = 0
        self._numbering = Lock()

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
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            prompts = [prompts]
        each = self._params_of(len(prompts), params)
        requests = [
            self._request(number, cast(Prompt, prompt), own)
            for number, prompt, own in zip(self._new_ids(len(prompts)), prompts, each, strict=True)
        ]
        with closing(self.engine.run(requests)) as events:
            for event in events:
                if on_token is not None:
                    on_token(event)
        return [_output(request) for request in requests]

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

    def _request(self, number: int, prompt: Prompt, params: SamplingParams) -> Request:
        if not isinstance(prompt, str) and not (
            isinstance(prompt, Sequence) and all(type(token) is int for token in prompt)
        ):
            raise UsageError("This is no prompt", expected="a text, or token ids", found=prompt)
        if isinstance(prompt, str):
            require_unicode(prompt, "A prompt")
        if isinstance(prompt, str) or params.stop_texts:
            self.tokenizer.require()
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else tuple(prompt)
        decode = self.tokenizer.decode if self.tokenizer.found else None
        eos = self.engine.model.config.eos_token_ids
        return Request(number, prompt=ids, params=params, eos_token_ids=eos, decode=decode)


def _output(request: Request) -> RequestOutput:
    assert request.finish_reason is not None
    return RequestOutput(
        prompt_token_ids=request.prompt,
        token_ids=tuple(request.output),
        text=request.text,
        finish_reason=request.finish_reason,
        metrics=request.metrics,
    )


def _check_choices(config: SpeculationConfig, draft_model: Path | str | None) -> None:
    """Raise UsageError for an unknown drafter or rule, and for a draft model that the drafter does
    not take or lacks."""
    method = config.method
    _check_choice("acceptance", config.acceptance, ACCEPTANCE_RULES)
    _check_choice("speculate_method", method, DRAFTERS)
    kind = DRAFTERS[method]
    if kind.read is None and kind.needs_draft_model != (draft_model is not None):
        takers = [n for n, other in DRAFTERS.items() if other.needs_draft_model or other.read]
        raise UsageError(
            f"The speculate_method {method} {'needs a' if draft_model is None else 'takes no'}"
            " draft_model",
            expected=f"a draft_model with {' or '.join(takers)}, and with no other",
        )


def _own_draft(bundle: Path, method: str) -> Path | None:
    """Return the bundle's own draft for a method (UsageError where the method needs one)."""
    if DRAFTERS[method].read is None:
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
