"""Release gates: how far an export may move from its source when it runs, by scheme."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Gate:
    """kl_nats: mean divergence of the target's next-token law from the source's. top1: share of
    positions with the same best token. acceptance_points: what acceptance may lose at any draft
    position, in points of a hundred."""

    kl_nats: float
    top1: float
    acceptance_points: float


# By the scheme of main; the acceptance of the MTP module has the looser of its own and main's.
# Unchanged weights give the same numbers but for rounding; bf16 rounds each weight once.
RUN_GATES: dict[str, Gate] = {
    "keep": Gate(1e-6, 0.999, 0.5),
    "bf16": Gate(0.005, 0.97, 1.0),
    "a8w8_fp8": Gate(0.02, 0.95, 1.0),
    "weight_only_int8": Gate(0.005, 0.97, 1.0),
    "weight_only_int4": Gate(0.05, 0.92, 3.0),
    "a8w8_fp8_wint4": Gate(0.05, 0.92, 3.0),
}


def gate_of(manifest_options: Mapping[str, object]) -> tuple[str, Gate]:
    """The gate of a bundle by the options that its manifest records, and the schemes' names."""
    base, mtp = (str(manifest_options.get(f"{part}_quant", "keep")) for part in ("base", "mtp"))
    if manifest_options.get("target") == "xllm" and base == "keep":
        base = mtp = "bf16"
    one, other = RUN_GATES.get(base, RUN_GATES["keep"]), RUN_GATES.get(mtp, RUN_GATES["keep"])
    points = max(one.acceptance_points, other.acceptance_points)
    return f"{base} + {mtp}", Gate(one.kl_nats, one.top1, points)
