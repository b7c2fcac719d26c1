"""Runs the model and the engine on token ids, without the LLM around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mtp_runtime.cache import CachedSequence, PageAllocator, lay_out_whole
from mtp_runtime.config import EngineConfig, SpeculationConfig
from mtp_runtime.drafters import DRAFTERS
from mtp_runtime.drafters.base import Drafter, DrafterParts
from mtp_runtime.engine import Engine
from mtp_runtime.memory import state_pages
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.models.model import Model
from mtp_runtime.request import Request
from mtp_runtime.sampling import SamplingParams
from mtp_runtime.static_graph.steps import Graphs

Prompt = tuple[int, ...]


def load(path: Path, *, compiled: bool = True) -> Model:
    """The model on compiled kernels, or on torch, which keeps quantized weights as they are."""
    return load_model(path, LoadOptions(dequantize_at_load=compiled)).model


def prompts_of(lengths: Sequence[int], vocab: int, seed: int = 0) -> list[Prompt]:
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randint(2, vocab, (length,), generator=generator).tolist())
        for length in lengths
    ]


@dataclass
class Walk:
    """Feeds one sequence through the model, a few tokens at a time."""

    model: Model
    page_size: int = 16
    sequence: CachedSequence = field(default_factory=CachedSequence)

    def __post_init__(self) -> None:
        self.pages = PageAllocator(
            24, self.page_size, states=int(self.model.config.state_elements > 0)
        )
        self.cache = self.model.new_cache(self.pages)
        self.pages.poison_freed(self.cache)

    @torch.inference_mode()
    def feed(self, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits, hidden states before and after the norm, of the new tokens."""
        start = self.sequence.length
        self.pages.append(self.sequence, len(tokens))
        span = (start, self.sequence.length)
        layout = lay_out_whole(self.pages, [self.sequence], [span], self.model.device)
        states = self.model(torch.tensor(tokens), self.cache, layout)
        return self.model.head.logits(states.after), states.before, states.after


@dataclass(frozen=True)
class Run:
    """Outputs of the engine for some prompts."""

    outputs: list[list[int]]
    requests: list[Request]
    engine: Engine

    def counts(self, name: str, position: int) -> int:
        """Drafted or accepted blocks at a position, over all requests."""
        lists = [getattr(request.metrics, name) for request in self.requests]
        return sum(counts[position] for counts in lists if position < len(counts))


def run(
    model: Model,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    method: str = "none",
    k: int = 1,
    draft_model: Model | None = None,
    build: Callable[[DrafterParts], Drafter] | None = None,
    acceptance: str = "exact",
    eos: tuple[int, ...] = (),
    lengths: Mapping[str, Any] | None = None,
    graphs: Graphs | None = None,
    **settings: int,
) -> Run:
    """Decode prompts to their end; `build` stands in for DRAFTERS[method].build, lengths are
    options of SpeculationConfig that choose the number of drafts."""
    speculation = SpeculationConfig(
        method=method if build is None else "given",
        max_draft_tokens=k,
        acceptance=acceptance,
        **(lengths or {}),
    )
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    # Just enough for all of them: more would take longer to poison than to decode.
    sizes = {"page_size": 16} | settings
    page = sizes["page_size"]
    pages = [
        -(-(len(p) + own.max_tokens + k + 1) // page) + state_pages(model, page)
        for p, own in zip(prompts, each, strict=True)
    ]
    sizes = {"cache_tokens": page * sum(pages)} | sizes
    config = EngineConfig(**sizes, poison_freed=True, speculation=speculation)
    engine = Engine(model, config, build or DRAFTERS[method].build, draft_model, graphs)
    requests = [
        Request(number, prompt, own, eos)
        for number, (prompt, own) in enumerate(zip(prompts, each, strict=True))
    ]
    for _ in engine.run(requests):
        pass
    assert engine.pages.free_pages == engine.pages.pages, "pages leaked"
    return Run([request.output for request in requests], requests, engine)
