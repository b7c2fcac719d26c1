"""Bounds that a bundle is compared with; the report shows them beside its figures.

What quantization may cost depends on the form of the weights alone, so a new scheme on known
storages needs no line here, and a new storage needs one in GATES.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.formats.storage import Storage
from mtp_checkpoints.layouts import TARGETS
from mtp_export.schemes import SCHEMES
from mtp_export.schemes.scheme import BF16, GRAFTED, KEEP


@dataclass(frozen=True)
class RunGate:
    """The most that an export may differ from its source when both run on the same texts.

    kl_nats: mean divergence of the target's next-token distribution from the source's. top1: share
    of positions with the same best token. acceptance_points: loss of acceptance at any draft
    position, in percentage points.
    """

    kl_nats: float
    top1: float
    acceptance_points: float

    def or_looser(self, other: RunGate) -> RunGate:
        """The looser bound of both, field by field."""
        return RunGate(
            kl_nats=max(self.kl_nats, other.kl_nats),
            top1=min(self.top1, other.top1),
            acceptance_points=max(self.acceptance_points, other.acceptance_points),
        )


@dataclass(frozen=True)
class StorageGate:
    """Bounds of weights in one form.

    sqnr_db: the least signal-to-quantization-noise ratio of a weight matrix, in dB, whatever form
    the source has. run: what a model with weights in this form may lose.
    """

    sqnr_db: float
    run: RunGate


# fp8, int8 and int4 carry their own rounding noise alone: on Gaussian weights 31, 42 and 19 dB.
# Damage (a scale of another block, codes in another order) leaves less than 10. Heavy tails cost a
# few dB, so each bound leaves room. bf16 rounds each weight once. Over seeds of prompts good int4
# bundles of the fixture reach a top-1 agreement of at least 0.939, with everything packed 0.915
# (docs/gates.md).
_INT4 = RunGate(kl_nats=0.05, top1=0.90, acceptance_points=3.0)
GATES: dict[Storage, StorageGate] = {
    Storage.BF16: StorageGate(45.0, RunGate(kl_nats=0.005, top1=0.97, acceptance_points=1.0)),
    Storage.FP8_BLOCK: StorageGate(24.0, RunGate(kl_nats=0.02, top1=0.95, acceptance_points=1.0)),
    Storage.FP8_CHANNEL: StorageGate(24.0, RunGate(kl_nats=0.02, top1=0.95, acceptance_points=1.0)),
    Storage.INT8_CHANNEL: StorageGate(
        28.0, RunGate(kl_nats=0.005, top1=0.97, acceptance_points=1.0)
    ),
    Storage.INT4_GROUP: StorageGate(12.0, _INT4),
    Storage.W4AFP8: StorageGate(12.0, _INT4),
    Storage.AWQ_INT4: StorageGate(12.0, _INT4),
    Storage.GPTQ_INT4: StorageGate(12.0, _INT4),
    Storage.NVFP4: StorageGate(12.0, _INT4),
    Storage.FP8_TENSOR: StorageGate(24.0, RunGate(kl_nats=0.02, top1=0.95, acceptance_points=1.0)),
}
# Weights as the source stores them give the same numbers but for rounding.
UNCHANGED = RunGate(kl_nats=1e-6, top1=0.999, acceptance_points=0.5)

# A matrix's root mean square: absolute, and as a ratio to the median of its kind over all layers.
# Trained layers differ by up to 33 in the trained fixture; a scale that is inverted or left out
# makes a factor of 1e3 or more.
RMS_RANGE = (1e-6, 1e2)
RMS_RATIO = 200.0
# The largest share of a weight's codes that may lie in the outer halves of their range. Weights
# gather around zero; codes whose offset was dropped lie at both ends.
OUTER_CODES = 0.6
# The largest share of fp8 blocks whose largest code may be the largest there is, where scales are
# powers of two: rounding a scale up before quantizing leaves room in most blocks.
FULL_BLOCKS = 0.5


def gate_of(manifest_options: Mapping[str, object]) -> tuple[str, RunGate]:
    """The names of a bundle's schemes and its gate, by the options that its manifest records.

    Divergence and agreement are those of main's scheme; acceptance has the looser bound of both
    parts. Raises InvalidInputError for a scheme that is not in SCHEMES.
    """
    base, mtp = (str(manifest_options.get(f"{part}_quant") or KEEP) for part in ("base", "mtp"))
    target = TARGETS.get(str(manifest_options.get("target")))
    if target is not None and target.dequantizes and base == KEEP:
        base = mtp = BF16
    main = _grafted_gate(manifest_options) if base == GRAFTED else _scheme_gate(base)
    draft = _scheme_gate(mtp)
    points = max(main.acceptance_points, draft.acceptance_points)
    return f"{base} + {mtp}", RunGate(main.kl_nats, main.top1, points)


def _grafted_gate(manifest_options: Mapping[str, object]) -> RunGate:
    """The loosest gate of the forms that a main model quantized by others is stored in."""
    gate, known = UNCHANGED, {str(storage): one for storage, one in GATES.items()}
    recorded = manifest_options.get("main_storages")
    for storage in recorded if isinstance(recorded, list) else []:
        if storage in known:
            gate = gate.or_looser(known[storage].run)
    return gate


def _scheme_gate(name: str) -> RunGate:
    """The loosest gate of the forms that a scheme stores weights in."""
    if name == KEEP:
        return UNCHANGED
    scheme = SCHEMES.get(name)
    if scheme is None:
        raise InvalidInputError(
            f"The manifest names the precision scheme {name}, which has no gate",
            expected=f"one of {', '.join(SCHEMES)}, or {KEEP}",
            found=name,
            todo="Verify with the version that made the bundle",
        )
    gate = UNCHANGED
    for storages in (scheme.storages, *scheme.variants.values()):
        for storage in storages.values():
            gate = gate.or_looser(GATES[storage].run)
    return gate
