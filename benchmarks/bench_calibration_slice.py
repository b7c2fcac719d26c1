"""Gain of 4-bit linears of real widths by calibration: RTN, sweep, GPTQ and AWQ.

    python -m benchmarks.bench_calibration_slice [--rows 256] [--out FOLDER]

A slice of an expert of GLM-4.7-Flash's widths, 2048 and 1536: some rows of gate and up, and of
down. Its weights are random, normal, and so are its inputs: once with columns that are alike and
independent, once as activations are, of a covariance that falls off with the square root and with
one column in 128 ten times as large. 4,096 rows calibrate, as many others are measured on. There is
no released weight in it, and so no acceptance: it says where there is something to gain. Writes
calibration_slice.json and .md to FOLDER (benchmarks/results).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.calibrated import (
    Grids,
    Inputs,
    Joined,
    Rounding,
    int4_grids,
    nvfp4_grids,
)
from benchmarks.common.drafts_on_texts import ROOT
from benchmarks.common.measure import machine
from benchmarks.released import RELEASED
from mtp_runtime.layers.moe import gated

CONFIG = RELEASED["glm4_moe_lite"].config
HIDDEN, INNER = CONFIG["hidden_size"], CONFIG["moe_intermediate_size"]
ROWS, GROUP_SIZE, LARGE = 4096, 128, 10
GRIDS: dict[str, dict[str, Grids]] = {
    "int4": {
        "amax": int4_grids(GROUP_SIZE, "minmax"),
        "sweep": int4_grids(GROUP_SIZE, "mse"),
    },
    "nvfp4": {"amax": nvfp4_grids("minmax"), "sweep": nvfp4_grids("mse")},
}


def inputs_of(kind: str, random: torch.Generator) -> Tensor:
    """Return rows [2 * ROWS, HIDDEN] that go into experts: alike, or correlated."""
    x = torch.randn(2 * ROWS, HIDDEN, generator=random)
    if kind == "alike":
        return x
    falling = torch.arange(1, HIDDEN + 1).float().rsqrt()
    mixed = (x * falling) @ torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=random))[0]
    mixed *= mixed.square().mean().rsqrt()
    mixed[:, ::GROUP_SIZE] *= LARGE
    return mixed


def joined(weights: Mapping[str, Tensor], whole: Tensor, x: Tensor) -> list[Joined]:
    """Return the linears of the slice with what goes into them; whole [2 * INNER, HIDDEN] are gate
    and up."""
    inner = gated(x @ whole.t())
    return [
        Joined(("gate", "up"), Inputs.of(x), scaled=True),
        Joined(("down",), Inputs.of(inner), scaled=True),
    ]


def measured(kind: str, rows: int) -> dict[str, Any]:
    """Return the figures of all ways to round, for inputs of a kind."""
    random = torch.Generator().manual_seed(40)
    x = inputs_of(kind, random)
    whole = torch.randn(2 * INNER, HIDDEN, generator=random) * HIDDEN**-0.5
    down = torch.randn(rows, INNER, generator=random) * INNER**-0.5
    weights = {"gate": whole[:rows], "up": whole[INNER : INNER + rows], "down": down}
    rounding = Rounding(weights, joined(weights, whole, x[:ROWS]))
    others = joined(weights, whole, x[ROWS:])
    result = dict[str, Any]()
    for (bits, kinds), method in product(GRIDS.items(), ("rtn", "gptq", "awq")):
        for scales, grids in kinds.items():
            kept = rounding.rounded(grids, method)
            result[f"{bits}, {method}, {scales}"] = rounding.facts(kept, others)
    return result


def table(kinds: Mapping[str, Any]) -> str:
    """Return the table of docs/benchmarks.md."""
    names = [f"{level}, {kind}" for kind in kinds for level in ("weights", "outputs")]
    lines = [f"| slice of an expert | {' | '.join(names)} |", "|---|" + "--:|" * len(names)]
    for name in next(iter(kinds.values())):
        cells = [
            f"{rows[name][f'{level}_sqnr_db']:.1f}"
            for rows in kinds.values()
            for level in ("weights", "outputs")
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure all rows, and record them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=256, help="of each matrix")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    given = parser.parse_args()
    with torch.inference_mode():
        kinds = {kind: measured(kind, given.rows) for kind in ("alike", "correlated")}
    facts = {"machine": machine(), "rows": given.rows, "group_size": GROUP_SIZE, "kinds": kinds}
    (given.out / "calibration_slice.json").write_text(json.dumps(facts, indent=1) + "\n")
    (given.out / "calibration_slice.md").write_text(table(kinds))


if __name__ == "__main__":
    main()
