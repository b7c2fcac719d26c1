"""The bounds that a bundle is held against; a report shows them beside its figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mtp_export.schemes.storage import Storage

# The least signal-to-quantization-noise ratio of a weight matrix (dB) by the form it was brought
# into, whatever it came from. fp8, int8 and int4 carry their own rounding noise alone: on Gaussian
# weights 31, 42 and 19 dB. Damage (a scale of another block, codes in another order) leaves less
# than 10. Heavy tails cost a few dB, so each bound leaves room.
SQNR_DB: dict[Storage, float] = {
    Storage.BF16: 45.0,
    Storage.FP8_BLOCK: 24.0,
    Storage.INT8_CHANNEL: 28.0,
    Storage.INT4_GROUP: 12.0,
    Storage.W4AFP8: 12.0,
}
# A matrix's root mean square: absolute, and as a ratio to the median of its kind over all layers.
# Trained layers differ by up to 33 in the trained fixture; a scale that is inverted or left out
# makes a factor of 1e3 or more.
RMS_RANGE = (1e-6, 1e2)
RMS_RATIO = 200.0
# The most of a weight's codes that may lie in the outer halves of their range. Weights gather
# around zero; codes whose offset was dropped lie at both ends.
OUTER_CODES = 0.6
# The most fp8 blocks whose largest code may be the largest there is, where scales are powers of
# two: rounding a scale up before quantizing leaves room in most blocks.
FULL_BLOCKS = 0.5


@dataclass(frozen=True)
class Gate:
    """How far an export may move from its source when it runs.

    kl_nats: mean divergence of the target's next-token law from the source's. top1: share of
    positions with the same best token. acceptance_points: what acceptance may lose at any draft
    position, in points of a hundred."""

    kl_nats: float
    top1: float
    acceptance_points: float


# By the scheme of main; the acceptance of the MTP module has the looser of its own and main's.
# Unchanged weights give the same numbers but for rounding; bf16 rounds each weight once. Over
# seeds of prompts good int4 bundles of the fixture come to a top-1 agreement of 0.939 at least,
# with everything packed to 0.915 (docs/gates.md).
RUN_GATES: dict[str, Gate] = {
    "keep": Gate(1e-6, 0.999, 0.5),
    "bf16": Gate(0.005, 0.97, 1.0),
    "a8w8_fp8": Gate(0.02, 0.95, 1.0),
    "weight_only_int8": Gate(0.005, 0.97, 1.0),
    "weight_only_int4": Gate(0.05, 0.90, 3.0),
    "a8w8_fp8_wint4": Gate(0.05, 0.90, 3.0),
}


def gate_of(manifest_options: Mapping[str, object]) -> tuple[str, Gate]:
    """The gate of a bundle by the options that its manifest records, and the schemes' names."""
    base, mtp = (str(manifest_options.get(f"{part}_quant", "keep")) for part in ("base", "mtp"))
    if manifest_options.get("target") == "xllm" and base == "keep":
        base = mtp = "bf16"
    one, other = RUN_GATES.get(base, RUN_GATES["keep"]), RUN_GATES.get(mtp, RUN_GATES["keep"])
    points = max(one.acceptance_points, other.acceptance_points)
    return f"{base} + {mtp}", Gate(one.kl_nats, one.top1, points)
