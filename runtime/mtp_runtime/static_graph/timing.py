"""Time of a decode step, by several ways to compute it, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch

from mtp_runtime.cache import CachedSequence, PageAllocator, lay_out
from mtp_runtime.config import EngineConfig
from mtp_runtime.models.model import Model
from mtp_runtime.static_graph.steps import Graphs, steps_by

CONTEXT_TOKENS = 256
_PASSES = 15


@dataclass(frozen=True)
class Way:
    """A model and the graphs that repeat its steps, None for steps that are computed anew."""

    model: Model
    graphs: Graphs | None = None


@torch.inference_mode()
def step_seconds(ways: Mapping[str, Way], *, requests: int, page_size: int) -> dict[str, float]:
    """Return the median seconds of a step of one token per request, by way.

    Tokens are random, so that each pass picks experts of its own; the cache holds CONTEXT_TOKENS.
    """
    generator = torch.Generator().manual_seed(0)
    vocab = min(way.model.config.vocab for way in ways.values())
    tokens = torch.randint(2, vocab, (_PASSES + 2, requests), generator=generator)
    steps = {name: _step(way, requests, page_size) for name, way in ways.items()}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for row in tokens:
        for name, step in steps.items():
            start = time.perf_counter()
            step(row)
            taken[name].append(time.perf_counter() - start)
    return {name: median(seconds[2:]) for name, seconds in taken.items()}


def _step(way: Way, requests: int, page_size: int) -> Callable[[torch.Tensor], object]:
    """Return a step over a cache of zeros; its argument is the token of each request."""
    each = -(-(CONTEXT_TOKENS + 1) // page_size)
    pages = PageAllocator(each * requests, page_size, with_spare=True)
    cache = way.model.new_cache(pages)
    for tensor in cache.tensors:
        tensor.zero_()
    sequences = [CachedSequence() for _ in range(requests)]
    for sequence in sequences:
        pages.append(sequence, CONTEXT_TOKENS + 1)
    spans = [(CONTEXT_TOKENS, CONTEXT_TOKENS + 1)] * requests
    layout = lay_out(pages, sequences, spans, way.model.device)
    config = EngineConfig(max_batch_size=requests, page_size=page_size)
    steps = steps_by(way.graphs, way.model, cache, pages, config)
    return lambda tokens: steps(tokens, layout=layout)
