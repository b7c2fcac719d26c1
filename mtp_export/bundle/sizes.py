"""Size of a bundle's tensors beside their source's, and the roles that made it larger."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.quantization.stored import StoredModel
from mtp_checkpoints.sources.byte_source import Place
from mtp_export.plan import PartPlan
from mtp_export.schemes.transforms import Convert

# A machine that many serve such models on. Weights may take nine tenths of its memory, engines'
# usual bound; the rest is for the cache and what a step computes.
USABLE_BYTES = 8 * 80_000_000_000 * 9 // 10


@dataclass(frozen=True)
class Growth:
    """Weights of one role that are larger than the source's by a number of bytes, and the formats
    of both, as the manifest names them."""

    role: str
    source_storage: str
    storage: str
    grown_bytes: int


@dataclass(frozen=True)
class Sizes:
    """Bytes of a plan's source tensors and of its own, linked ones too, and the number of weights
    that they hold; growth where the whole is larger, the largest first."""

    before_bytes: int
    after_bytes: int
    weights: int
    growth: tuple[Growth, ...]

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.after_bytes / max(1, self.weights)

    @property
    def fits(self) -> bool:
        """True where 8 GPUs of 80 GB hold the weights and have a tenth of their memory left."""
        return self.after_bytes <= USABLE_BYTES

    def as_json(self) -> dict[str, Any]:
        """Return the same facts for machines."""
        return {
            "bytes_before": self.before_bytes,
            "bytes_after": self.after_bytes,
            "weights": self.weights,
            "bits_per_weight": round(self.bits_per_weight, 3),
            "fits_8x80gb": self.fits,
            "grown": [vars(each) for each in self.growth],
        }


def sizes_of(
    parts: Sequence[PartPlan], sources: Mapping[str, TensorInfo], stored: StoredModel
) -> Sizes:
    """Return the sizes of the tensors of parts, and of those that they are made of."""
    kind_of, after, weights = _kinds_of(stored), 0, 0
    before: dict[tuple[Place, int], int] = {}  # a head that is its embedding is at the same place
    by_role: dict[tuple[str, str, str], int] = defaultdict(int)
    for step in (step for part in parts for shard in part.shards for step in shard.steps):
        first = step.inputs[0]
        role, count = kind_of.get(first) or ("draft", prod(sources[first].shape))  # of no family
        weights += count
        operation = step.operation
        inputs = operation.own(step.inputs) if isinstance(operation, Convert) else step.inputs
        read = {
            (one.path, one.offset_bytes): one.size_bytes for one in map(sources.__getitem__, inputs)
        }
        before |= read
        after += step.size_bytes
        if isinstance(operation, Convert):
            formats = operation.source.storage, operation.format.storage
            by_role[role, *formats] += step.size_bytes - sum(read.values())
    before_bytes = sum(before.values())
    grown = sorted(by_role.items(), key=lambda entry: -entry[1]) if after > before_bytes else []
    growth = tuple(Growth(*key, grown_bytes=count) for key, count in grown if count > 0)
    return Sizes(before_bytes, after, weights, growth)


def _kinds_of(stored: StoredModel) -> Mapping[str, tuple[str, int]]:
    """Return every tensor's role and the number of its weights, by its name: none of a scale."""
    found: dict[str, tuple[str, int]] = {}
    for kind in stored.kinds:
        count = prod(kind.specs[0].shape)
        for place, names in enumerate(kind.names):
            found |= dict.fromkeys(names, (str(kind.specs[0].role), 0 if place else count))
    return found
