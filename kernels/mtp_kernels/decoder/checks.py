"""Checks of what decoder backends are given: weights once, the tensors of every pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mtp_kernels.batch_layout import BatchLayout, StateLayout
from mtp_kernels.decoder import (
    DecoderConfig,
    DeltaConfig,
    LayerWeights,
    PackedLayer,
    RecursionParts,
    StoredMatrix,
)
from mtp_kernels.gated_delta.state import DeltaState, check_layout, check_state
from mtp_kernels.sizes import LANES, GroupedSizes, Shapes
from mtp_kernels.tensor_checks import check_cached_lengths, check_shape, check_tensor

FLOAT = (torch.float32,)
INDEX = (torch.int64,)
COUNT = (torch.int32,)


MAY_BE_ZERO = ("rope", "query_rank", "has_bias", "has_norms", "is_gated")


def check_config(config: DecoderConfig, inv_freq: torch.Tensor) -> None:
    """Check that the config's sizes can be computed with, and the rope frequencies."""
    check_sizes(config)
    attention = config.attention
    if attention.rope % 2:
        raise ValueError(f"rope: expected an even size, found {attention.rope}")
    if isinstance(attention, GroupedSizes):
        check_groups(attention)
    check_shape("inv_freq", inv_freq, (attention.rope // 2,), FLOAT)


def check_sizes(config: DecoderConfig | DeltaConfig) -> None:
    """Check that what the config counts is there."""
    sizes = {"hidden": config.hidden} | config.attention._asdict()
    for name, size in sizes.items():
        if size < 1 and name not in MAY_BE_ZERO:
            raise ValueError(f"{name}: expected at least 1, found {size}")


def check_delta_config(config: DeltaConfig) -> None:
    """Check that the config's sizes can be computed with, and that value heads share key heads."""
    check_sizes(config)
    sizes = config.attention
    if sizes.value_heads % sizes.key_heads:
        raise ValueError(
            f"value_heads: expected a multiple of {sizes.key_heads}, found {sizes.value_heads}"
        )
    if not sizes.has_whole_vectors:
        raise ValueError(f"key: expected a multiple of {LANES}, found {sizes.key}")


def check_groups(sizes: GroupedSizes) -> None:
    """Check that keys are shared by equal groups of heads, and that a head has what is rotated."""
    if sizes.heads % sizes.kv_heads:
        raise ValueError(f"heads: expected a multiple of {sizes.kv_heads}, found {sizes.heads}")
    if sizes.rope > sizes.head:
        raise ValueError(f"rope: expected at most a head's {sizes.head}, found {sizes.rope}")


def check_weights(weights: LayerWeights) -> None:
    """Check that a layer's tensors in memory are float32 on the CPU, in any strides."""
    for name, tensor in weights.tensors.items():
        if tensor is None or isinstance(tensor, StoredMatrix):
            continue
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in FLOAT:
            found = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise TypeError(f"{name}: expected a tensor of float32, found {found}")
        if tensor.device.type != "cpu":
            raise ValueError(f"{name}: expected on cpu, found on {tensor.device}")


def check_layers(config: DecoderConfig | DeltaConfig, layers: Sequence[PackedLayer]) -> None:
    """Check that there are layers, and that their weights have the shapes of the config."""
    if not layers:
        raise ValueError("layers: expected at least one, found none")
    for number, layer in enumerate(layers):
        expected = expected_shapes(config, layer.shapes, first=number == 0)
        for name, shape in expected.items():
            found = layer.shapes.get(name)
            if found != shape:
                wanted, given = (list(s) if s is not None else "none" for s in (shape, found))
                raise ValueError(f"layer {number}, {name}: expected shape {wanted}, found {given}")
        if layer.shapes["router"] is not None:
            check_routing(config, layer.shapes["router"][0], number)


def attention_input_width(shapes: Shapes) -> int:
    """Return the width of the rows that a layer's attention is given, 0 where it takes the norm of
    the stream."""
    matrix = shapes.get("down") or shapes.get("qkv") or ()
    return matrix[1] if shapes["input_norm"] is None and len(matrix) == 2 else 0


def expected_shapes(config: DecoderConfig | DeltaConfig, found: Shapes, *, first: bool) -> Shapes:
    """Return the shapes that a layer's weights must have; experts and their width are its own, and
    of the first layer the width of rows that it is given."""
    hidden, router, gate_up = config.hidden, found["router"], found["gate_up"] or ()
    given = attention_input_width(found) if first else 0
    routed = router[0] if router else 0
    experts = max(gate_up[0] if len(gate_up) == 3 else 1, routed) if routed else 1
    inner = max(gate_up[1] // 2, 1) if len(gate_up) == 3 else 1
    return {
        "input_norm": None if given else (hidden,),
        **config.attention.weights(hidden, given or hidden),
        "post_norm": (hidden,),
        "router": (routed, hidden) if routed else None,
        "router_bias": (routed,) if routed and not config.has_softmax else None,
        "gate_up": (experts, 2 * inner, hidden),
        "expert_down": (experts, hidden, inner),
        "shared_gate": (hidden,) if routed and found["shared_gate"] is not None else None,
    }


def check_routing(config: DecoderConfig | DeltaConfig, routed: int, number: int) -> None:
    """Check that a row can pick its experts out of the best groups."""
    picked, groups, kept, *_ = config.routing
    if groups < 1 or routed % groups or not 1 <= kept <= groups:
        raise ValueError(
            f"layer {number}: expected {routed} experts in equal groups of which some are kept, "
            f"found {kept} of {groups}"
        )
    size = routed // groups
    if groups > kept and size < 2:
        raise ValueError(f"layer {number}: expected groups of at least 2 experts, found 1 each")
    if not 1 <= picked <= kept * size:
        raise ValueError(
            f"layer {number}: expected 1 to {kept * size} experts per token, found {picked}"
        )


def check_pass(
    config: DecoderConfig,
    layers: Sequence[PackedLayer],
    x: torch.Tensor,
    layout: BatchLayout,
    kv_cache: torch.Tensor,
    attention_input: torch.Tensor | None,
) -> None:
    """Check the tensors of one pass on the CPU, contents of the layout included."""
    check_stream(config, x, kv_cache)
    rows, device = len(x), x.device
    check_attention_input(attention_input_width(layers[0].shapes), attention_input, rows)
    if len(kv_cache) < len(layers):
        raise ValueError(f"kv_cache: expected at least {len(layers)} layers, found {len(kv_cache)}")
    check_tensor("positions", layout.positions, shape=(rows,), dtypes=INDEX, device=device)
    check_tensor("slots", layout.slots, shape=(rows,), dtypes=INDEX, device=device)
    check_tensor(
        "page_table", layout.page_table, shape=("b", "max_pages"), dtypes=COUNT, device=device
    )
    batch = len(layout.page_table)
    check_tensor("kv_lens", layout.kv_lens, shape=(batch,), dtypes=COUNT, device=device)
    check_tensor("cu_q", layout.cu_q, shape=(batch + 1,), dtypes=COUNT, device=device)
    check_range("positions", layout.positions.tolist(), 2**31)
    check_range("slots", layout.slots.tolist(), kv_cache.shape[1] * kv_cache.shape[2])
    check_cached_lengths(
        rows, kv_cache, page_table=layout.page_table, kv_lens=layout.kv_lens, cu_q=layout.cu_q
    )


def check_delta_pass(
    config: DeltaConfig, layers: int, x: torch.Tensor, layout: StateLayout, state: DeltaState
) -> None:
    """Check the tensors of one pass of a delta decoder, contents of the layout included."""
    device = torch.device("cpu")
    check_tensor("x", x, shape=("T", config.hidden), dtypes=FLOAT, device=device)
    number = min(len(state.states), len(state.inputs), len(state.gates))
    if number < layers:
        raise ValueError(f"state: expected at least {layers} layers, found {number}")
    first = DeltaState(state.states[0], state.inputs[0], state.gates[0])
    check_state(first, x, config.attention)
    check_layout(layout, first, len(x))


def check_stream(config: DecoderConfig, x: torch.Tensor, kv_cache: torch.Tensor) -> None:
    """Check rows and cache of a pass or a recursion."""
    device = torch.device("cpu")
    check_tensor("x", x, shape=("T", config.hidden), dtypes=FLOAT, device=device)
    shape = ("layers", "pages", "page", config.attention.slot)
    check_tensor("kv_cache", kv_cache, shape=shape, dtypes=FLOAT, device=device)


def check_attention_input(width: int, attention_input: torch.Tensor | None, rows: int) -> None:
    """Check the rows that the attention of a first layer is given, and that there are none where
    it takes the norm of the stream."""
    given, cpu = attention_input, torch.device("cpu")
    if (given is not None) != bool(width):
        expected = f"shape [{rows}, {width}]" if width else "none, the layer has an input norm"
        found = "none" if given is None else list(given.shape)
        raise ValueError(f"attention_input: expected {expected}, found {found}")
    if given is not None:
        check_tensor("attention_input", given, shape=(rows, width), dtypes=FLOAT, device=cpu)


def check_range(name: str, values: list[int], end: int) -> None:
    """Check that values lie in [0, end)."""
    if values and (min(values) < 0 or max(values) >= end):
        raise ValueError(f"{name}: expected 0 to {end - 1}, found {min(values)} to {max(values)}")


def check_parts(config: DecoderConfig, layer: PackedLayer, parts: RecursionParts) -> None:
    """Check that a module's layer takes what the module joins, and that it embeds the tokens that
    it drafts."""
    width = attention_input_width(layer.shapes)
    expected = 0 if parts.inputs.projection is not None else 2 * config.hidden
    if width != expected:
        raise ValueError(
            f"recursion: expected a layer that is given rows of {expected or 'no'} entries, "
            f"found {width or 'none'}"
        )
    tokens = parts.tokens
    check_tensor("tokens", tokens, shape=("n",), dtypes=INDEX, device=torch.device("cpu"))
    check_shape(
        "embedding", parts.embedding, ("vocab", config.hidden), (torch.float32, torch.bfloat16)
    )
    check_range("tokens", tokens.tolist(), len(parts.embedding))


def check_recursion(
    config: DecoderConfig,
    x: torch.Tensor,
    spans: tuple[Sequence[int], Sequence[int]],
    page_table: torch.Tensor,
    kv_cache: torch.Tensor,
) -> None:
    """Check the arguments of a recursion; spans are its starts and counts."""
    starts, counts = spans
    check_stream(config, x, kv_cache)
    rows = len(x)
    if not rows == len(starts) == len(counts) or not rows:
        raise ValueError(
            f"recursion: expected a start and a count for each of {rows} rows, at least 1, "
            f"found {len(starts)} and {len(counts)}"
        )
    if min(counts) < 1 or list(counts) != sorted(counts, reverse=True):
        raise ValueError(f"counts: expected at least 1 each, not rising, found {list(counts)}")
    check_range("starts", list(starts), 2**31)
    check_tensor("page_table", page_table, shape=(rows, "max_pages"), dtypes=COUNT, device=x.device)
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    drafted = torch.tensor(ends, dtype=torch.int32)
    cu_q = torch.arange(rows + 1, dtype=torch.int32)
    check_cached_lengths(rows, kv_cache, page_table=page_table, kv_lens=drafted, cu_q=cu_q)
