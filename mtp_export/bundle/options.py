"""Options of everything that makes a bundle, grouped by what they decide."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from mtp_checkpoints.layouts import target_of
from mtp_checkpoints.sources.byte_source import Place
from mtp_export.plan import Link


class Part(StrEnum):
    """Parts of the bundle to write."""

    BOTH = "both"
    MAIN = "main"
    MTP = "mtp"


class SharedWeights(StrEnum):
    """Presence of embedding and head in the MTP folder."""

    KEEP = "keep"
    DROP = "drop"


class Checksums(StrEnum):
    """Tensors of the main part that get a checksum: those that are written, or those of linked
    shards too, which have to be read for it. All tensors of the MTP part always get one."""

    WRITTEN = "written"
    ALL = "all"


@dataclass(frozen=True)
class ContentOptions:
    """Contents of a bundle: two runs with equal ones write equal bundles.

    max_shard_bytes bounds the shards that are newly laid out (the MTP part's).
    """

    part: Part = Part.BOTH
    shared_weights: SharedWeights = SharedWeights.KEEP
    max_shard_bytes: int = 5_000_000_000
    allow_untied: bool = False
    checksums: Checksums = Checksums.WRITTEN


MAX_WORKERS = 64
# One for each core that this process may use: workers do not wait for the disk.
DEFAULT_WORKERS = min(MAX_WORKERS, len(os.sched_getaffinity(0)))


MAX_SHARES = 512  # of a few hundred shards; the end has a file of each open


@dataclass(frozen=True)
class Share:
    """One of count equal parts of the work on a bundle, numbered from 1; origin says where the
    numbers come from, unless they were given."""

    number: int
    count: int
    origin: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def said(self) -> str:
        """Origin of the numbers in brackets; nothing where they were given."""
        return f" ({self.origin})" if self.origin else ""


@dataclass(frozen=True)
class RunOptions:
    """Means of a run and what it may do to the output folder.

    share is the part of the work that is done, if not all of it. workers are the tensors that are
    worked on at once. max_memory_bytes bounds resident memory. io_depth is the number of reads, and
    of writes, under way at once; None: that of the disk.
    """

    link: Link = Link.AUTO
    workers: int = DEFAULT_WORKERS
    max_memory_bytes: int = 4 << 30
    io_depth: int | None = None
    overwrite: bool = False
    resume: bool = True
    share: Share | None = None


@dataclass(frozen=True)
class BundleOptions:
    """A source, the bundle to make of it, and the name of a target as --target takes it."""

    input_dir: Place
    output_dir: Path
    target: str = "hf"
    content: ContentOptions = ContentOptions()
    run: RunOptions = RunOptions()

    def recorded(self) -> dict[str, Any]:
        """Return the options that decide the contents, as the manifest keeps them."""
        return {
            "part": str(self.content.part),
            "target": target_of(self.target).name,
            "shared_weights": str(self.content.shared_weights),
            "max_shard_bytes": self.content.max_shard_bytes,
            "allow_untied": self.content.allow_untied,
            "checksums": str(self.content.checksums),
        }
