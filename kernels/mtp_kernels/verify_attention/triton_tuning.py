"""Launch parameters of the Triton backend, by device capability, Triton version and dtype.

Chosen by what compiles without spills into shared memory (benchmarks/compile_report_*.py); no
device has measured them yet. triton_choice.py chooses among them, and for GPUs outside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Launch:
    """Launch parameters of one tile of `rows` rows."""

    rows: int  # query rows of a tile
    tokens: int  # cached tokens of a block
    warps: int
    stages: int  # blocks in flight; always 2 of an fp8 cache
    programs_per_sm: int
    min_share: int = 4  # fewest blocks worth a part: below it partial results outweigh the cache


Tables = dict[str, tuple[Launch, ...]]  # by kind of product

FP32 = (Launch(16, 16, 8, 2, 1),)
# capability -> oldest Triton version it holds for -> what is multiplied -> tiles by ascending rows.
# Compute capability 8.0 cannot convert e4m3. Where a tile of 64 rows spills it is left out, and
# longer groups take several tiles of 32: fp8 everywhere, Triton 3.9 on 9.0, and 10.0.
TABLES: dict[tuple[int, int], dict[str, Tables]] = {
    (8, 0): {
        "3.6": {
            "16 bit": (Launch(16, 32, 4, 3, 1), Launch(32, 64, 8, 2, 1)),
            "fp32": FP32,
        },
    },
    (9, 0): {
        "3.6": {
            "16 bit": (Launch(16, 32, 4, 3, 2), Launch(32, 64, 8, 3, 1), Launch(64, 32, 8, 3, 1)),
            "fp8": (Launch(16, 32, 8, 2, 1), Launch(32, 32, 8, 2, 1)),
            "fp32": FP32,
        },
        "3.9": {
            "16 bit": (Launch(16, 32, 4, 3, 2), Launch(32, 64, 8, 3, 1)),
            "fp8": (Launch(16, 32, 8, 2, 1), Launch(32, 32, 8, 2, 1)),
            "fp32": FP32,
        },
    },
    (10, 0): {
        "3.6": {
            "16 bit": (Launch(16, 32, 4, 3, 2), Launch(32, 64, 8, 2, 1)),
            "fp8": (Launch(16, 32, 8, 2, 1), Launch(32, 32, 8, 2, 1)),
            "fp32": FP32,
        },
    },
}


# Tiles of other GPUs with little shared memory, the last to be tried.
SMALLEST: dict[str, tuple[Launch, ...]] = {
    "16 bit": (Launch(16, 16, 4, 1, 1),),
    "fp8": (Launch(16, 16, 4, 1, 1),),
    "fp32": (Launch(16, 16, 4, 1, 1),),
}
# What a kind of product multiplies: queries and cache. float32 queries over fp8 spill, and are in
# no table.
KINDS = {
    "16 bit": (torch.bfloat16, torch.bfloat16),
    "fp8": (torch.bfloat16, torch.float8_e4m3fn),
    "fp32": (torch.float32, torch.float32),
    "fp32 over fp8": (torch.float32, torch.float8_e4m3fn),
}


def listed(capability: tuple[int, int] | None, version: str) -> Tables | None:
    """Return the tables for a capability and a Triton: those of the newest listed Triton that is
    not newer. None where there are none."""
    tables = {} if capability is None else TABLES.get(capability, {})
    known = [name for name in tables if ordered(name) <= ordered(version)]
    return tables[max(known, key=ordered)] if known else None


def nearest_first(capability: tuple[int, int] | None, version: str) -> Iterator[tuple[str, Tables]]:
    """Yield names and tables from the nearest capability on: of the same generation, then older
    ones before newer ones, whose instructions it may lack. GPUs that are not NVIDIA's are near to
    none, and begin with the smallest tile."""

    def distance(other: tuple[int, int]) -> tuple[bool, bool, int]:
        assert capability is not None
        apart = 10 * (other[0] - capability[0]) + other[1] - capability[1]
        return other[0] != capability[0], apart > 0, abs(apart)

    for other in sorted(TABLES, key=distance) if capability else ():
        tables = listed(other, version) or TABLES[other][min(TABLES[other], key=ordered)]
        yield f"compute capability {other[0]}.{other[1]}", tables
    yield "the smallest tile", SMALLEST


def product_kind(dtype: torch.dtype, kv_dtype: torch.dtype) -> str:
    """Return a table's row: queries and cache in 16 bits, 16-bit queries over fp8, or float32."""
    queries = "fp32" if dtype == torch.float32 else "16 bit"
    if kv_dtype != torch.float8_e4m3fn:
        return queries
    return "fp8" if queries == "16 bit" else "fp32 over fp8"


def ordered(version: str) -> tuple[int, int]:
    """Return major and minor of a version, so that 3.10 comes after 3.9."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
