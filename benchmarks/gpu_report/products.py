"""Products with stored weights on a device, beside torch's with the dense matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from benchmarks.common.attention_shapes import LARGEST_L2_BYTES
from benchmarks.gpu_report.device import Device
from benchmarks.gpu_report.stages import Row
from mtp_kernels import quantize
from mtp_kernels.stored_linear import StoredWeight, grouped_linear, linear, stack

MOST_COPIES = 8
FORMS: dict[str, Callable[[torch.Tensor], StoredWeight]] = {
    "fp8 blocks": lambda weights: quantize.quantize_fp8_block(weights)[0],
    "int8": lambda weights: quantize.quantize_int8_channel(weights)[0],
    "int4 in 128": lambda weights: quantize.quantize_int4_group(weights)[0],
}


@dataclass(frozen=True)
class Products:
    """Matrices, rows that meet them, and the experts of a grouped product with `picks` a row."""

    shapes: Sequence[tuple[int, int]]
    rows: Sequence[int]
    experts: int
    picks: int


def product_rows(device: Device, dtype: torch.dtype, products: Products) -> Iterator[Row]:
    """Yield a row per form, matrix and number of rows: single weights, then grouped experts."""
    for shape in products.shapes:
        weights = torch.randn(shape, device=device.device) * 0.02
        dense = _copies(weights.to(dtype))
        stored = {name: _copies(form(weights)) for name, form in FORMS.items()}
        for count in products.rows:
            x = torch.randn(count, shape[1], dtype=dtype, device=device.device)
            seconds = device.seconds([partial(torch.mm, x, one.t()) for one in dense])
            yield _row("dense", shape, count, seconds, _bytes(dense[0]))
            for name, weights_of_form in stored.items():
                seconds = device.seconds([partial(linear, x, one) for one in weights_of_form])
                yield _row(name, shape, count, seconds, _bytes(weights_of_form[0]))
        yield from _grouped(device, dtype, products, shape)
        device.forget()


def _grouped(
    device: Device, dtype: torch.dtype, products: Products, shape: tuple[int, int]
) -> Iterator[Row]:
    """Yield products of rows that pick their experts at random."""
    for name, form in FORMS.items():
        one = [
            form(torch.randn(shape, device=device.device) * 0.02) for _ in range(products.experts)
        ]
        weight = stack(one)
        del one
        for count in products.rows:
            x = torch.randn(count, shape[1], dtype=dtype, device=device.device)
            scores = torch.rand(count, products.experts, device=device.device)
            picked = scores.topk(products.picks)[1].flatten()
            order = picked.argsort(stable=True)
            numbers = torch.arange(products.experts, device=device.device)
            ends = torch.searchsorted(picked[order], numbers, right=True, out_int32=True)
            rows = order // products.picks
            seconds = device.seconds(
                [
                    lambda x=x, rows=rows, ends=ends, weight=weight: grouped_linear(
                        x, rows, ends, weight
                    )
                ]
            )
            read = _bytes(weight) * len(picked.unique()) // products.experts
            yield _row(name, shape, count, seconds, read) | {"experts": products.experts}


Some = TypeVar("Some", bound=StoredWeight)


def _copies(weight: Some) -> list[Some]:
    """Return a weight as often as it takes that none is found in the second-level cache."""
    count = max(1, min(MOST_COPIES, -(-LARGEST_L2_BYTES * 2 // _bytes(weight))))
    return [weight, *(deepcopy(weight) for _ in range(count - 1))]


def _bytes(weight: StoredWeight) -> int:
    tensors = [weight] if isinstance(weight, torch.Tensor) else vars(weight).values()
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _row(form: str, shape: tuple[int, int], count: int, seconds: float, size_bytes: int) -> Row:
    return {
        "form": form,
        "shape": list(shape),
        "rows": count,
        "us": seconds * 1e6,
        "weight_gb_per_second": size_bytes / seconds / 1e9,
    }
