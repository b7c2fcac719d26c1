"""Sizes that a report goes through, and its stages on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.common.attention_shapes import Shape
from benchmarks.gpu_report.attention import attention_rows
from benchmarks.gpu_report.conversions import conversion_rows
from benchmarks.gpu_report.decoding import Decoding, decoding_rows
from benchmarks.gpu_report.device import Device
from benchmarks.gpu_report.limits import copy_rate, limit_rows
from benchmarks.gpu_report.peers import available
from benchmarks.gpu_report.products import Products, product_rows
from benchmarks.gpu_report.stages import Report, Row, Stage
from benchmarks.gpu_report.tuning import Target, Tuner, candidates, tables_of
from mtp_kernels.gpu import tuned
from mtp_kernels.verify_attention.triton_choice import KERNEL, tiles_for
from mtp_kernels.verify_attention.triton_tuning import Launch


@dataclass(frozen=True)
class Matrix:
    """Sizes of every stage."""

    dtype: torch.dtype
    copied_bytes: int
    side: int
    launches: Sequence[Launch]
    targets: Sequence[Target]
    attention: Sequence[Shape]
    weights: Sequence[tuple[int, int]]
    products: Products
    decoding: Decoding


def whole_matrix(bundle: Path) -> Matrix:
    """Return the sizes of a report on a real device."""
    return Matrix(
        dtype=torch.bfloat16,
        copied_bytes=1 << 30,
        side=8192,
        launches=candidates(),
        targets=(
            Target(Shape(32, 8192, 1, 16), 16),
            Target(Shape(32, 8192, 2, 16), 32),
            Target(Shape(32, 8192, 4, 16), 64),
            Target(Shape(32, 8192, 2, 128), 64, last=True),
        ),
        attention=attention_shapes(),
        weights=[(2048, 7168), (7168, 2048), (18432, 7168)],
        products=Products([(4096, 7168), (7168, 2048)], (1, 16, 4, 64, 512), 64, 8),
        decoding=Decoding(bundle, ("bfloat16", "float32"), (1, 16), (1, 2, 3), 32),
    )


def attention_shapes() -> list[Shape]:
    """Return shapes, the most telling first: batches and queries at 8,192 tokens of 16 heads, then
    contexts, then 128 heads, then what is between."""
    batches, tokens, queries = (1, 8, 32, 128), (1024, 4096, 8192, 32768, 65536), (1, 2, 3, 4, 6)
    main = [Shape(b, 8192, n, 16) for n in (1, 4, 2) for b in (32, 1, 128, 8)]
    context = [Shape(b, t, n, 16) for b in (32, 1) for t in tokens for n in (1, 4)]
    heads = [Shape(b, 8192, n, 128) for n in (1, 4, 2) for b in (32, 1, 128, 8)]
    ragged = [Shape(b, 8192, n, h, True) for h in (16, 128) for b in (32, 128) for n in (1, 4)]
    rest = [Shape(b, t, n, h) for h in (16, 128) for t in tokens for b in batches for n in queries]
    return list(dict.fromkeys([*main, *context, *heads, *ragged, *rest]))


def stages_of(
    device: Device,
    matrix: Matrix,
    report: Report,
    folder: Path,
    processes: Callable[[], AbstractContextManager[Executor]],
) -> list[Stage]:
    """Return the stages; each is made when it begins, from what those before it found. processes
    compile."""

    def tuning() -> Iterator[Row]:
        with processes() as executor:
            yield from Tuner(device, matrix.targets, matrix.dtype, executor, matrix.launches).rows()

    def rate() -> float | None:
        return copy_rate(report.rows("limits"))

    def keep(rows: list[Row]) -> None:
        tables = tables_of(rows, matrix.targets, matrix.dtype)
        if tables:
            stored = tuned.write(device.gpu, KERNEL, tables)
            (folder / stored.name).write_text(stored.read_text())
            tiles_for.cache_clear()

    return [
        Stage(
            "limits", 1, lambda: limit_rows(device, matrix.copied_bytes, matrix.side, matrix.dtype)
        ),
        Stage("tune", 7, tuning, keep),
        Stage(
            "attention",
            11,
            lambda: attention_rows(device, matrix.attention, matrix.dtype, rate(), available()),
        ),
        Stage("products", 4, lambda: product_rows(device, matrix.dtype, matrix.products)),
        Stage("quantize", 2, lambda: conversion_rows(device, matrix.weights, rate())),
        Stage("decode", 8, lambda: decoding_rows(device.device, matrix.decoding)),
    ]
