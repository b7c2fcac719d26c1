"""Options of everything that makes a bundle, grouped by what they decide."""

from __future__ import annotations

import heapq
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from mtp_checkpoints.errors import UsageError
from mtp_checkpoints.layouts import target_of
from mtp_checkpoints.sources.byte_source import Place
from mtp_export.options import Panel, option, parse_size
from mtp_export.plan import Link


class Part(StrEnum):
    """Parts of the bundle to write: both, one of them, or both as one model in the main folder."""

    BOTH = "both"
    MAIN = "main"
    MTP = "mtp"
    ONE = "one"


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

    max_shard_bytes bounds the shards that are newly laid out (the MTP part's). pre_tokenizer is
    llama.cpp's name of the tokenizer's, for its files.
    """

    part: Part = Part.BOTH
    shared_weights: SharedWeights = field(
        default=SharedWeights.KEEP,
        metadata=option(
            "Embedding and head in the MTP part: {names}.", Panel.CONTENT, metavar="CHOICE"
        ),
    )
    allow_untied: bool = field(
        default=False,
        metadata=option(
            "Accept an MTP embedding or head that differs from that of the main model.",
            Panel.CONTENT,
        ),
    )
    max_shard_bytes: int = field(
        default=5_000_000_000,
        metadata=option(
            "Maximum size of an MTP shard.",
            Panel.CONTENT,
            "--max-shard-size",
            metavar="SIZE",
            parser=parse_size,
            default="5GB",
        ),
    )
    checksums: Checksums = field(
        default=Checksums.WRITTEN,
        metadata=option(
            "Tensors with a checksum: written, or all, which also reads linked shards of"
            " the main part.",
            Panel.CONTENT,
            metavar="CHOICE",
        ),
    )
    pre_tokenizer: str | None = field(
        default=None,
        metadata=option(
            "Pre-tokenizer in files for llama.cpp, by its name there; none: no vocabulary.",
            Panel.CONTENT,
            metavar="NAME",
            show_default="told by the tokenizer",
        ),
    )


MAX_WORKERS = 64
# One for each core that this process may use: workers do not wait for the disk.
DEFAULT_WORKERS = min(MAX_WORKERS, len(os.sched_getaffinity(0)))


_SLURM_NAMES = ("ID", "MIN", "MAX", "STEP", "COUNT")
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


def divided(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Return the pieces of each of count equal shares of work, as numbers of their sizes, in order:
    the largest first, each piece goes to the share with the least so far."""
    loads = [(0, share) for share in range(count)]
    shares: list[list[int]] = [[] for _ in range(count)]
    for piece in sorted(range(len(sizes)), key=lambda piece: -sizes[piece]):
        load, share = loads[0]
        heapq.heapreplace(loads, (load + max(1, sizes[piece]), share))
        shares[share].append(piece)
    return [sorted(share) for share in shares]


def parse_share(text: str) -> Share:
    """Return the share that I/N names, or slurm: that of a task of a Slurm array (ValueError)."""
    if text.strip().lower() == "slurm":
        return _slurm_share(os.environ)
    match = re.fullmatch(r"\s*(\d{1,4})/(\d{1,4})\s*", text)
    number, count = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= number <= count:
        raise ValueError(f"{text!r} is no share: write 1/8 to 8/8, or slurm in a job array")
    return _share(number, count)


def refuse_cluster_of_share(cluster: str | None) -> None:
    """Refuse a cluster for a share of the work (UsageError)."""
    if cluster is not None:
        raise UsageError(
            "A cluster divides the work itself",
            expected="--share or --cluster",
            found="both",
            todo="Leave --share out",
        )


def _share(number: int, count: int, origin: str = "") -> Share:
    if count > MAX_SHARES:
        raise ValueError(f"{count} shares are too many: at most {MAX_SHARES}")
    return Share(number, count, origin)


def _slurm_share(variables: Mapping[str, str]) -> Share:
    """Return the share of a Slurm array's task: its place among the array's task numbers."""
    names = {name: variables.get(f"SLURM_ARRAY_TASK_{name}", "") for name in _SLURM_NAMES}
    names["STEP"] = names["STEP"] or "1"
    if not all(value.isdigit() for value in names.values()):
        missing = ", ".join(f"SLURM_ARRAY_TASK_{n}" for n, v in names.items() if not v.isdigit())
        raise ValueError(f"slurm needs a task of a job array, which sets {missing}")
    task, first, last, step, count = (int(names[name]) for name in _SLURM_NAMES)
    if step < 1 or (last - first) % step or (last - first) // step + 1 != count:
        raise ValueError(
            f"the array has {count} of the tasks {first}-{last}:{step}, so a task's share is not"
            " known: number them without gaps, or write --share I/N"
        )
    if not first <= task <= last or (task - first) % step:
        raise ValueError(
            f"task {task} is none of the array's tasks {first}-{last}:{step}: submit it as one of"
            " them, or write --share I/N"
        )
    job = variables.get("SLURM_ARRAY_JOB_ID", "unknown")
    return _share((task - first) // step + 1, count, f"task {task} of Slurm array {job}")


OVERWRITE = option("Replace a bundle that is already there.", Panel.INPUT_OUTPUT)


@dataclass(frozen=True)
class RunOptions:
    """Means of a run and what it may do to the output folder.

    share is the part of the work that is done, if not all of it. workers are the tensors that are
    worked on at once. max_memory_bytes bounds resident memory. io_depth is the number of reads, and
    of writes, under way at once; None: that of the disk. command are the words behind mtp-export
    that begin the run, but for its output folder and share; none where no command began it.
    """

    link: Link = field(
        default=Link.AUTO,
        metadata=option(
            "Way in which unchanged shards enter the bundle: {names}.",
            Panel.INPUT_OUTPUT,
            metavar="WAY",
        ),
    )
    workers: int = field(
        default=DEFAULT_WORKERS,
        metadata=option(
            "Tensors worked on at once.",
            Panel.PERFORMANCE,
            metavar="N",
            low=1,
            high=MAX_WORKERS,
            show_default="the number of cores",
        ),
    )
    io_depth: int | None = field(
        default=None,
        metadata=option(
            "Reads, and writes, of 2 MiB under way at once.",
            Panel.PERFORMANCE,
            metavar="N",
            low=1,
            high=64,
            show_default="16 for each disk",
        ),
    )
    max_memory_bytes: int = field(
        default=4 << 30,
        metadata=option(
            "Maximum resident memory.",
            Panel.PERFORMANCE,
            "--max-memory",
            metavar="SIZE",
            parser=parse_size,
            default="4GiB",
        ),
    )
    overwrite: bool = field(default=False, metadata=OVERWRITE)
    resume: bool = field(
        default=True,
        metadata=option(
            "Start over instead of finishing an interrupted run.", Panel.INPUT_OUTPUT, "--no-resume"
        ),
    )
    share: Share | None = None
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class BundleOptions:
    """A source, the bundle to make of it, and the name of a target as --target takes it."""

    input_dir: Place
    output_dir: Path
    target: str = "hf"
    content: ContentOptions = ContentOptions()
    run: RunOptions = RunOptions()

    @property
    def inputs(self) -> tuple[Place, ...]:
        """Checkpoints that are read."""
        return (self.input_dir,)

    def recorded(self) -> dict[str, Any]:
        """Return the options that decide the contents, as the manifest keeps them."""
        pre_tokenizer, layout = self.content.pre_tokenizer, target_of(self.target).name
        return {
            "part": str(self.content.part),
            "target": layout,
            **({} if self.target == layout else {"engine": self.target}),
            "shared_weights": str(self.content.shared_weights),
            "max_shard_bytes": self.content.max_shard_bytes,
            "allow_untied": self.content.allow_untied,
            "checksums": str(self.content.checksums),
            **({} if pre_tokenizer is None else {"pre_tokenizer": pre_tokenizer}),
        }


@dataclass(frozen=True)
class PlannerOptions:
    """Options of a planner: those of every bundle, and in its subclasses its own."""

    bundle: BundleOptions

    @property
    def inputs(self) -> tuple[Place, ...]:
        """Checkpoints that are read."""
        return self.bundle.inputs
