"""Launch parameters of the Triton backend, by device capability, Triton version and dtype.

Chosen by what compiles without spills into shared memory (benchmarks/compile_report_*.py); no
device has measured them yet. Capabilities and versions that are not listed are refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Launch:
    """How one tile of `rows` rows is computed."""

    rows: int  # query rows of a tile
    tokens: int  # cached tokens of a block
    warps: int
    stages: int  # blocks in flight
    programs_per_sm: int
    min_share: int = 4  # fewest blocks worth a part: below it partial results outweigh the cache


# capability -> oldest Triton version it holds for -> cache dtype -> tiles, by ascending rows.
TABLES: dict[tuple[int, int], dict[str, dict[str, tuple[Launch, ...]]]] = {
    (9, 0): {
        "3.6": {
            "16 bit": (Launch(16, 32, 4, 3, 2), Launch(32, 64, 8, 3, 1), Launch(64, 32, 8, 3, 1)),
            "fp8": (Launch(16, 32, 4, 3, 2), Launch(32, 64, 8, 3, 1), Launch(64, 64, 8, 2, 1)),
            "fp32": (Launch(16, 16, 4, 2, 1),),
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
    """The smallest tile that holds `rows`, else the largest; ValueError on an unlisted device."""
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
    tables = TABLES[capability][max(versions, key=ordered)]
    tiles = tables[cache_kind(dtype, kv_dtype)]
    return next((launch for launch in tiles if launch.rows >= rows), tiles[-1])


def cache_kind(dtype: torch.dtype, kv_dtype: torch.dtype) -> str:
    """The row of a table: what the products and the cache are made of."""
    if dtype == torch.float32:
        return "fp32"
    return "fp8" if kv_dtype == torch.float8_e4m3fn else "16 bit"


def ordered(version: str) -> tuple[int, int]:
    """Major and minor of a version, so that 3.10 comes after 3.9."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
