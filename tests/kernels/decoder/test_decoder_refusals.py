"""Wrong weights and wrong passes: every backend refuses them in the same words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from decoder_cases import (
    BACKENDS,
    Case,
    build,
    changed,
    grouped,
    make_backend,
    make_decoder,
    make_layer,
)

from mtp_kernels.decoder import LayerWeights, Rope

CASE = Case((2, 1), (20, 5), layers="m")
pytestmark = pytest.mark.parametrize("backend", BACKENDS)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("x", torch.zeros(3, 47), r"x: expected shape \[T, 48\], found \[3, 47\]"),
        ("x", torch.zeros(48, 3).T, "x: expected contiguous, found strides"),
        ("x", torch.zeros(3, 48, device="meta"), "x: expected on cpu, found on meta"),
        ("x", torch.zeros(4, 48), r"positions: expected shape \[4\], found \[3\]"),
        ("kv_cache", torch.zeros(1, 9, 16, 39), r"shape \[layers, pages, page, 40\], found"),
        ("kv_cache", torch.zeros(9, 16, 40), r"shape \[layers, pages, page, 40\], found"),
        ("positions", torch.tensor([18, 19, -1]), "positions: expected 0 to .*, found -1 to 19"),
        ("slots", torch.tensor([0, 1, 96]), "slots: expected 0 to 95, found 0 to 96"),
        ("slots", torch.tensor([0, -1, 2]), "slots: expected 0 to 95, found -1 to 2"),
        ("slots", torch.tensor([0, 1]), r"slots: expected shape \[3\], found \[2\]"),
        ("kv_lens", torch.tensor([65, 1], dtype=torch.int32), "kv_lens: expected 0 to 64 tokens"),
        ("kv_lens", torch.tensor([33, 1], dtype=torch.int32), r"found 2147483647 at \[0, 2\]"),
        ("cu_q", torch.tensor([0, 2, 4], dtype=torch.int32), "cu_q: expected 0 rising to 3, found"),
        ("cu_q", torch.tensor([0, 3], dtype=torch.int32), r"cu_q: expected shape \[3\], found"),
    ],
)
def test_a_pass_that_does_not_fit(backend: str, name: str, value: Any, message: str) -> None:
    made = make_decoder(CASE, backend)
    inputs = build(CASE)
    if name in ("x", "kv_cache"):
        inputs = replace(inputs, **{name: value})
    else:
        inputs = replace(inputs, layout=replace(inputs.layout, **{name: value}))
    with pytest.raises(ValueError, match=message):
        made(inputs.x, inputs.layout, inputs.kv_cache)


@pytest.mark.parametrize("name", ["x", "kv_cache", "slots", "positions", "page_table", "kv_lens"])
def test_wrong_dtypes_name_the_tensor(backend: str, name: str) -> None:
    made, inputs = make_decoder(CASE, backend), build(CASE)
    if name in ("x", "kv_cache"):
        inputs = replace(inputs, **{name: getattr(inputs, name).double()})
    else:
        wrong = getattr(inputs.layout, name).to(torch.int16)
        inputs = replace(inputs, layout=replace(inputs.layout, **{name: wrong}))
    with pytest.raises(TypeError, match=f"^{name}: expected dtype .*, found torch"):
        made(inputs.x, inputs.layout, inputs.kv_cache)


@pytest.mark.parametrize(
    ("layers", "attention_input", "message"),
    [
        ("t", None, r"attention_input: expected shape \[3, 96\], found none"),
        ("t", torch.zeros(2, 96), r"attention_input: expected shape \[3, 96\], found \[2, 96\]"),
        ("t", torch.zeros(3, 48), r"attention_input: expected shape \[3, 96\], found \[3, 48\]"),
        ("t", torch.zeros(96, 3).T, "attention_input: expected contiguous, found strides"),
        (
            "m",
            torch.zeros(3, 48),
            "attention_input: expected none, the layer has an input norm, found",
        ),
    ],
)
def test_rows_that_attention_is_given(
    backend: str, layers: str, attention_input: torch.Tensor | None, message: str
) -> None:
    case = replace(CASE, layers=layers)
    inputs = build(case)
    with pytest.raises(ValueError, match=message):
        make_decoder(case, backend)(inputs.x, inputs.layout, inputs.kv_cache, attention_input)


def test_rows_are_given_to_the_first_layer_alone(backend: str) -> None:
    with pytest.raises(ValueError, match=r"layer 1, input_norm: expected shape \[48\], found none"):
        make_decoder(replace(CASE, layers="dt"), backend)


def test_a_cache_of_too_few_layers(backend: str) -> None:
    case = replace(CASE, layers="dm")
    inputs = build(CASE)
    with pytest.raises(ValueError, match="kv_cache: expected at least 2 layers, found 1"):
        make_decoder(case, backend)(inputs.x, inputs.layout, inputs.kv_cache)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden": 32}, r"layer 0, input_norm: expected shape \[32\], found \[48\]"),
        ({"latent": 16}, r"layer 0, down: expected shape \[48, 48\], found \[64, 48\]"),
        ({"query_rank": 0}, r"layer 0, down: expected shape"),
        ({"value": 8}, r"layer 0, value_up: expected shape \[3, 8, 32\], found \[3, 12, 32\]"),
        ({"rope": 7}, "rope: expected an even size, found 7"),
        ({"rope": 10}, r"inv_freq: expected shape \[5\], found \[4\]"),
        ({"heads": 0}, "heads: expected at least 1, found 0"),
        ({"groups": 3}, "expected 8 experts in equal groups .*, found 2 of 3"),
        ({"groups_per_token": 5}, "expected 8 experts in equal groups .*, found 5 of 4"),
        ({"groups": 8}, "expected groups of at least 2 experts, found 1 each"),
        ({"experts_per_token": 5}, "expected 1 to 4 experts per token, found 5"),
    ],
)
def test_weights_that_do_not_fit_the_config(
    backend: str, sizes: dict[str, int], message: str
) -> None:
    made = make_backend(backend)
    layer = made.pack(make_layer(CASE, "m", torch.Generator().manual_seed(0)))
    config = changed(CASE, **sizes).config
    with pytest.raises(ValueError, match=message):
        made.decoder(config, [layer], Rope(torch.ones(4), 1.0))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"head": 12}, r"layer 0, qkv: expected shape \[120, 48\], found \[160, 48\]"),
        ({"has_bias": False}, r"layer 0, bias: expected shape none, found \[160\]"),
        ({"kv_heads": 4}, "heads: expected a multiple of 4, found 6"),
        ({"kv_heads": 0}, "kv_heads: expected at least 1, found 0"),
        ({"rope": 18}, "rope: expected at most a head's 16, found 18"),
    ],
)
def test_grouped_weights_that_do_not_fit_the_config(
    backend: str, sizes: dict[str, int], message: str
) -> None:
    made, case = make_backend(backend), grouped(CASE)
    layer = made.pack(make_layer(case, "m", torch.Generator().manual_seed(0)))
    with pytest.raises(ValueError, match=message):
        made.decoder(
            changed(case, **sizes).config,
            [layer],
            Rope(torch.ones(4), 1.0),
        )


def test_weights_of_another_attention(backend: str) -> None:
    made = make_backend(backend)
    layer = made.pack(make_layer(grouped(CASE), "m", torch.Generator().manual_seed(0)))
    with pytest.raises(ValueError, match=r"layer 0, down: expected shape .*, found none"):
        made.decoder(CASE.config, [layer], Rope(torch.ones(4), 1.0))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("router_bias", None, r"layer 0, router_bias: expected shape \[8\], found none"),
        ("query_norm", None, r"layer 0, query_norm: expected shape \[24\], found none"),
        ("gate_up", torch.zeros(9, 82, 48), r"layer 0, expert_down: expected shape \[9, 48, 41\]"),
        ("gate_up", torch.zeros(9, 81, 48), "layer 0, gate_up: expected shape|expected 80 rows"),
        ("router", None, r"layer 0, router_bias: expected shape none, found \[8\]"),
    ],
)
def test_weights_that_do_not_fit_each_other(
    backend: str, name: str, value: Any, message: str
) -> None:
    made = make_backend(backend)
    weights = make_layer(CASE, "m", torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=message):
        layer = made.pack(with_tensor(weights, name, value))
        made.decoder(CASE.config, [layer], Rope(torch.ones(4), 1.0))


def with_tensor(weights: LayerWeights, name: str, value: Any) -> LayerWeights:
    """The weights with another tensor, be it of their attention."""
    if hasattr(weights, name):
        return replace(weights, **{name: value})
    return replace(weights, attention=replace(weights.attention, **{name: value}))


def test_weights_are_float32(backend: str) -> None:
    weights = make_layer(CASE, "m", torch.Generator().manual_seed(0))
    made = make_backend(backend)
    with pytest.raises(
        TypeError, match="gate_up: expected a tensor of float32, found torch.bfloat16"
    ):
        made.pack(replace(weights, gate_up=weights.gate_up.bfloat16()))
    with pytest.raises(TypeError, match="down: expected a tensor of float32, found list"):
        made.pack(with_tensor(weights, "down", weights.tensors["down"].tolist()))


def test_no_layers(backend: str) -> None:
    with pytest.raises(ValueError, match="layers: expected at least one, found none"):
        make_decoder(replace(CASE, layers=""), backend)
