"""Launch parameters of the Triton backend, by device capability, Triton version and dtype.

Chosen by what compiles without spills into shared memory (benchmarks/compile_report_*.py); no
device has measured them yet. Capabilities and versions that are not listed are refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Launch:
    """Launch parameters of one tile of `rows` rows."""

    rows: int  # query rows of a tile
    tokens: int  # cached tokens of a block
    warps: int
    stages: int  # blocks in flight
    programs_per_sm: int
    min_share: int = 4  # fewest blocks worth a part: below it partial results outweigh the cache


FP32 = (Launch(16, 16, 8, 2, 1),)
# capability -> oldest Triton version it holds for -> what is multiplied -> tiles by ascending rows.
# Compute capability 8.0 cannot convert e4m3. Where a tile of 64 rows spills it is left out, and
# longer groups take several tiles of 32: fp8 everywhere, Triton 3.9 on 9.0, and 10.0.
TABLES: dict[tuple[int, int], dict[str, dict[str, tuple[Launch, ...]]]] = {
    (8, 0): {
        "3.6": {
            "16 bit": (Launch(16, 32, 4, 3, 1), Launch(32, 64, 8, 2, 1)),
            "fp32": FP32,
        },
    },
    (9, 0): {
        "3.6": {
            "16 bit": (Launch(16, 32, 4, 3, 2), Launch(32, 64, 8, 3, 1), Launch(64, 32, 8, 3, 1)),
            "fp8": (Launch(16, 32, 8, 3, 1), Launch(32, 32, 8, 3, 1)),
            "fp32": FP32,
        },
        "3.9": {
            "16 bit": (Launch(16, 32, 4, 3, 2), Launch(32, 64, 8, 3, 1)),
            "fp8": (Launch(16, 32, 8, 3, 1), Launch(32, 32, 8, 3, 1)),
            "fp32": FP32,
        },
    },
    (10, 0): {
        "3.6": {
            "16 bit": (Launch(16, 32, 4, 3, 2), Launch(32, 64, 8, 2, 1)),
            "fp8": (Launch(16, 32, 8, 3, 1), Launch(32, 32, 8, 3, 1)),
            "fp32": FP32,
        },
    },
}


def launch_for(
    capability: tuple[int, int],
    triton_version: str,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    rows: int,
) -> Launch:
    """Return the smallest tile for `rows`, or the largest; ValueError where none is tuned."""
    tables = tables_for(capability, triton_version)
    kind = product_kind(dtype, kv_dtype)
    if kind not in tables:
        raise ValueError(
            f"backend triton_cuda: expected {' or '.join(tables)} on capability {capability}, "
            f"found {kind}"
        )
    tiles = tables[kind]
    return next((launch for launch in tiles if launch.rows >= rows), tiles[-1])


def tables_for(capability: tuple[int, int], triton_version: str) -> dict[str, tuple[Launch, ...]]:
    """Return the tables of the newest listed Triton that is not newer than the installed one."""
    if capability not in TABLES:
        raise ValueError(
            f"backend triton_cuda: expected compute capability {' or '.join(map(str, TABLES))}, "
            f"found {capability}; add a table to triton_tuning.py"
        )
    versions = [known for known in TABLES[capability] if ordered(known) <= ordered(triton_version)]
    if not versions:
        raise ValueError(
            f"backend triton_cuda: expected Triton {min(TABLES[capability])} or later, "
            f"found {triton_version}"
        )
    return TABLES[capability][max(versions, key=ordered)]


def product_kind(dtype: torch.dtype, kv_dtype: torch.dtype) -> str:
    """Return a table's row: queries and cache in 16 bits, 16-bit queries over fp8, or float32."""
    queries = "fp32" if dtype == torch.float32 else "16 bit"
    if kv_dtype != torch.float8_e4m3fn:
        return queries
    return (
        "fp8" if queries == "16 bit" else "fp32 over fp8"
    )  # the latter spills, and is in no table


def ordered(version: str) -> tuple[int, int]:
    """Return major and minor of a version, so that 3.10 comes after 3.9."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
