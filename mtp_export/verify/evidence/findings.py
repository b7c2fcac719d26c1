"""Findings of walks over shares of a part, kept in files until one verification joins them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

from mtp_checkpoints.sources.files import make_folder, write_json
from mtp_checkpoints.weights.weight_values import WeightOnDisk
from mtp_export.bundle.options import Share
from mtp_export.verify.evidence.mlp_notes import Note
from mtp_export.verify.evidence.weight_facts import AgainstSource, WeightFacts


@dataclass(frozen=True)
class Known:
    """Findings about tensors of a part: facts of weights by name, as JSON, and checksums of other
    tensors by name."""

    weights: Mapping[str, Any] = field(default_factory=dict)
    checksums: Mapping[str, str] = field(default_factory=dict)

    def __or__(self, other: Known) -> Known:
        return Known({**self.weights, **other.weights}, {**self.checksums, **other.checksums})

    def facts(self, weight: WeightOnDisk, source: WeightOnDisk | None) -> WeightFacts:
        """Return the facts of a weight that was read, beside its source's."""
        from mtp_kernels.weight_statistics import Difference, WeightStatistics

        found = dict(self.weights[weight.name])
        against = found.pop("against")
        if source is not None:
            against = dict(against)
            difference = against.pop("difference")
            found["against"] = AgainstSource(
                source, **against, difference=difference and Difference(**difference)
            )
        else:
            found["against"] = None
        found["statistics"] = WeightStatistics(**found["statistics"])
        found["note"] = found["note"] and Note(*map(tuple, found["note"]))
        return WeightFacts(weight, **found)


@dataclass(frozen=True)
class Findings:
    """Files of findings in a folder. identity is that of the bundle and source that were read, as
    they were then: those of others are not taken."""

    folder: Path
    identity: str

    def keep(self, part: str, share: Share, known: Known) -> None:
        """Write what a share found (IoError)."""
        make_folder(self.folder)
        name = f"{self._prefix(part)}{share.number}-of-{share.count}.json"
        write_json(self.folder / name, asdict(known))

    def of(self, part: str) -> Known:
        """Return what all shares found; a file that is damaged is as none."""
        return reduce(or_, self._files(part), Known())

    def _files(self, part: str) -> Iterator[Known]:
        for path in sorted(self.folder.glob(f"{self._prefix(part)}*.json")):
            try:
                yield Known(**json.loads(path.read_bytes()))
            except (OSError, TypeError, ValueError):
                continue

    def _prefix(self, part: str) -> str:
        return f"mtp-export-verify-{self.identity}-{part}-"


def known_facts(facts: WeightFacts) -> dict[str, Any] | None:
    """Return the facts of a weight as JSON; None where its source could not be read, which the one
    verification has to meet itself."""
    against = facts.against
    if against is not None and against.failure is not None:
        return None
    difference = None if against is None else against.difference
    return {
        "checksums": dict(facts.checksums),
        "digest": facts.digest,
        "statistics": asdict(facts.statistics),
        "note": facts.note,
        "against": against
        and {
            "equal": against.equal,
            "difference": difference and asdict(difference),
            "error": against.error,
        },
    }
