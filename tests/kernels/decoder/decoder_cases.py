"""Cases of decoder passes, with poison wherever a backend must not look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import reference
import torch

from mtp_kernels import decoder
from mtp_kernels.batch_layout import BatchLayout
from mtp_kernels.decoder import (
    DecoderConfig,
    GroupedWeights,
    LatentWeights,
    LayerWeights,
)
from mtp_kernels.sizes import GroupedSizes, LatentSizes, Routing

BACKENDS = ("reference", *decoder.BACKENDS)  # the definition of correct, and the product's
JUNK_PAGE = 2**31 - 1
TOLERANCE = 1e-5  # largest relative error of all rows; of a single row's, four times that
LATENT = LatentSizes(heads=3, nope=16, rope=8, value=12, latent=32, query_rank=24)
GROUPED = GroupedSizes(heads=6, kv_heads=2, head=16, rope=8, has_bias=True, has_norms=True)


@dataclass(frozen=True)
class Case:
    """One ragged batch over a few layers; each kv_len includes the request's new rows."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    # d dense, m mixture of experts, g one with a gate of shared experts, t dense and given rows of
    # twice the width
    layers: str = "dm"
    shared: int = 1
    experts: int = 8
    inner: int = 40
    attention_scaling: float = 1.0
    page: int = 16
    config: DecoderConfig = field(
        default_factory=lambda: DecoderConfig(
            hidden=48,
            attention=LATENT,
            routing=Routing(2, 4, 2, normalises=True, scale=2.5),
            norm_eps=1e-6,
            softmax_scale=0.3,
        )
    )
    seed: int = 0


@dataclass(frozen=True)
class Inputs:
    """Arguments of a pass; a pass overwrites x and kv_cache."""

    x: torch.Tensor
    layout: BatchLayout
    kv_cache: torch.Tensor
    attention_input: torch.Tensor | None = None


def changed(case: Case, **sizes: float) -> Case:
    """The case with other numbers in its config, or in its attention's sizes."""
    config = case.config
    parts = {"attention": config.attention, "routing": config.routing}
    for name, part in parts.items():
        own = {field: sizes.pop(field) for field in part._fields if field in sizes}
        config = replace(config, **{name: part._replace(**own)})  # type: ignore[arg-type]
    return replace(case, config=replace(config, **sizes))  # type: ignore[arg-type]


def grouped(case: Case, **sizes: float) -> Case:
    """The case with attention of grouped queries."""
    return changed(replace(case, config=replace(case.config, attention=GROUPED)), **sizes)


def make_layer(case: Case, kind: str, generator: torch.Generator) -> LayerWeights:
    """Random weights; matrices keep the size of what they multiply."""
    hidden = case.config.hidden

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.3 * torch.randn(size, generator=generator)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    routed = kind in "mg"
    experts = case.experts + case.shared if routed else 1
    biased = routed and not case.config.has_softmax
    return LayerWeights(
        input_norm=None if kind == "t" else norm(hidden),
        attention=make_attention(case.config, generator, hidden * (1 + (kind == "t"))),
        post_norm=norm(hidden),
        router=matrix(case.experts, hidden) if routed else None,
        router_bias=0.2 * torch.randn(case.experts, generator=generator) if biased else None,
        gate_up=torch.cat([matrix(experts, case.inner, hidden) for _ in range(2)], dim=1),
        expert_down=matrix(experts, hidden, case.inner),
        shared_gate=matrix(hidden) if kind == "g" else None,
    )


def make_attention(
    config: DecoderConfig, generator: torch.Generator, attention_input: int
) -> LatentWeights | GroupedWeights:
    """Random weights of a kind of attention over rows of a width: norms near 1, biases small."""
    made: dict[str, torch.Tensor | None] = {}
    for name, shape in config.attention.weights(config.hidden, attention_input).items():
        if shape is None:
            made[name] = None
            continue
        values = torch.randn(shape, generator=generator)
        if len(shape) > 1:
            made[name] = values * shape[-1] ** -0.5
        else:
            made[name] = 0.2 * values if name == "bias" else 1 + 0.3 * values
    kind = LatentWeights if isinstance(config.attention, LatentSizes) else GroupedWeights
    return kind(**made)  # type: ignore[arg-type]


def make_backend(name: str, dtype: torch.dtype = torch.float32) -> decoder.Backend:
    """A new backend of BACKENDS."""
    if name == "reference":
        return reference.Backend(dtype)
    return decoder.make_backend(name, dtype=dtype)


def make_decoder(case: Case, backend: str | decoder.Backend) -> decoder.Decoder:
    """The case's layers on a backend, or on a new one of that name."""
    generator = torch.Generator().manual_seed(case.seed)
    return decoder_of(case, backend, *(make_layer(case, kind, generator) for kind in case.layers))


def decoder_of(
    case: Case, backend: str | decoder.Backend, *layers: LayerWeights
) -> decoder.Decoder:
    """Layers on a backend, or on a new one of that name."""
    made = make_backend(backend) if isinstance(backend, str) else backend
    packed = [made.pack(layer) for layer in layers]
    pairs = torch.arange(case.config.attention.rope // 2)
    return made.decoder(
        case.config,
        packed,
        decoder.Rope(1.0 / 100 ** (pairs / len(pairs)), case.attention_scaling),
    )


def build(case: Case) -> Inputs:
    """Permuted pages, a cache that is NaN except where a request has earlier tokens, and page ids
    past the cache wherever a table has no page."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    config, page = case.config, case.page
    counts = [-(-kv_len // page) for kv_len in case.kv_lens]
    total = sum(counts) + 3
    order = torch.randperm(total, generator=generator).to(torch.int32)
    width = config.attention.slot
    cache = torch.full((len(case.layers), total * page, width), torch.nan)
    page_table = torch.full((len(counts), max(counts, default=0) + 2), JUNK_PAGE, dtype=torch.int32)
    positions: list[int] = []
    slots: list[int] = []
    for request, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        first = sum(counts[:request])
        pages = order[first : first + counts[request]]
        page_table[request, : counts[request]] = pages
        own = [int(pages[t // page]) * page + t % page for t in range(kv_len)]
        earlier = own[: kv_len - q_len]
        cache[:, earlier] = torch.randn(len(cache), len(earlier), width, generator=generator)
        positions += range(kv_len - q_len, kv_len)
        slots += own[kv_len - q_len :]
    x = torch.randn(sum(case.q_lens), config.hidden, generator=generator)
    attention_input = torch.randn(len(x), 2 * config.hidden, generator=generator)
    return Inputs(
        x=x,
        layout=BatchLayout(
            positions=torch.tensor(positions, dtype=torch.int64),
            slots=torch.tensor(slots, dtype=torch.int64),
            page_table=page_table,
            kv_lens=torch.tensor(case.kv_lens, dtype=torch.int32),
            cu_q=torch.tensor([0, *accumulate(case.q_lens)], dtype=torch.int32),
        ),
        kv_cache=cache.view(len(cache), total, page, width),
        attention_input=attention_input if case.layers.startswith("t") else None,
    )


def run(made: decoder.Decoder, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The output rows, and the cache after the pass; the inputs stay as they are."""
    x, cache = inputs.x.clone(), inputs.kv_cache.clone()
    made(x, inputs.layout, cache, inputs.attention_input)
    return x, cache


def requests_of(inputs: Inputs, wanted: Sequence[int]) -> tuple[Inputs, torch.Tensor]:
    """Some requests alone, in this order, over the same cache; and their rows."""
    layout, starts = inputs.layout, inputs.layout.cu_q.tolist()
    spans = [(starts[request], starts[request + 1]) for request in wanted]
    rows = torch.tensor([row for span in spans for row in range(*span)], dtype=torch.int64)
    picked = torch.tensor(list(wanted), dtype=torch.int64)
    lengths = [end - start for start, end in spans]
    return Inputs(
        x=inputs.x[rows],
        layout=BatchLayout(
            positions=layout.positions[rows],
            slots=layout.slots[rows],
            page_table=layout.page_table[picked],
            kv_lens=layout.kv_lens[picked],
            cu_q=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        ),
        kv_cache=inputs.kv_cache,
        attention_input=None if inputs.attention_input is None else inputs.attention_input[rows],
    ), rows


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare rows [T, width] over the whole output and one by one; none may be NaN."""
    assert found.isfinite().all() and expected.isfinite().all()
    error = (found.double() - expected.double()).norm(dim=-1)
    norm = expected.double().norm(dim=-1)
    assert error.norm() <= TOLERANCE * norm.norm()
    assert (error <= 4 * TOLERANCE * norm).all()
