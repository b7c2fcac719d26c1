"""Options that several commands share, each described once, with the panel of --help it is in."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from mtp_checkpoints.errors import UsageError
from mtp_checkpoints.layouts import target_names
from mtp_checkpoints.sources.addresses import place_of
from mtp_checkpoints.sources.byte_source import Place
from mtp_export.bundle.options import (
    MAX_SHARES,
    MAX_WORKERS,
    BundleOptions,
    Checksums,
    ContentOptions,
    Part,
    RunOptions,
    Share,
    SharedWeights,
)
from mtp_export.commands.output import Reporting
from mtp_export.plan import Link

INPUT_OUTPUT = "Input and output"
CONTENT = "Content of the bundle"
PRECISION = "Precision"
DECODING = "Decoding"
PERFORMANCE = "Performance"
REPORT = "Report"

DEFAULT_WORKERS = min(4, os.cpu_count() or 1)
# Typer gives defaults to the parser too.
DEFAULT_MAX_MEMORY: int = "4GiB"  # type: ignore[assignment]
DEFAULT_MAX_SHARD_SIZE: int = "5GB"  # type: ignore[assignment]
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SLURM_NAMES = ("ID", "MIN", "MAX", "STEP", "COUNT")
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 5GB (powers of 1000), 4GiB (powers of 1024) or 4096."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*([kmgt]i?|)b?", text.strip().lower())
    size = int(float(match[1]) * (_UNITS | _BINARY_UNITS)[match[2]]) if match else 0
    if size < 1:
        raise typer.BadParameter(f"{text!r} is no size: write for example 5GB, 4GiB or 4096")
    return size


def parse_path(text: str | Path) -> Path:
    """Return a path; an empty one, as of an unset variable, is not the current folder, and an
    address is none."""
    if not text:
        raise typer.BadParameter("an empty path; write . for the current folder")
    place = place_of(str(text))
    if not isinstance(place, Path):
        raise typer.BadParameter(f"{text} is an address; this takes a path on this machine")
    return place


def parse_source(text: str | Path) -> Place:
    """Return the path of a folder, or the address of a repository."""
    return place_of(text) if isinstance(text, str) and text else parse_path(text)


def parse_share(text: str | Share) -> Share:
    """Return the share that I/N names, or slurm: that of a task of a Slurm job array."""
    if isinstance(text, Share):
        return text
    if text.strip().lower() == "slurm":
        return _slurm_share(os.environ)
    match = re.fullmatch(r"\s*(\d{1,4})/(\d{1,4})\s*", text)
    number, count = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= number <= count:
        raise typer.BadParameter(f"{text!r} is no share: write 1/8 to 8/8, or slurm in a job array")
    return _share(number, count)


def _share(number: int, count: int, origin: str = "") -> Share:
    if count > MAX_SHARES:
        raise typer.BadParameter(f"{count} shares are too many: at most {MAX_SHARES}")
    return Share(number, count, origin)


def _slurm_share(variables: Mapping[str, str]) -> Share:
    """Return the share of a Slurm array's task: its place among the array's task numbers."""
    names = {name: variables.get(f"SLURM_ARRAY_TASK_{name}", "") for name in _SLURM_NAMES}
    names["STEP"] = names["STEP"] or "1"
    if not all(value.isdigit() for value in names.values()):
        missing = ", ".join(f"SLURM_ARRAY_TASK_{n}" for n, v in names.items() if not v.isdigit())
        raise typer.BadParameter(f"slurm needs a task of a job array, which sets {missing}")
    task, first, last, step, count = (int(names[name]) for name in _SLURM_NAMES)
    if step < 1 or (last - first) % step or (last - first) // step + 1 != count:
        raise typer.BadParameter(
            f"the array has {count} of the tasks {first}-{last}:{step}, so a task's share is not"
            " known: number them without gaps, or write --share I/N"
        )
    job = variables.get("SLURM_ARRAY_JOB_ID", "unknown")
    return _share((task - first) // step + 1, count, f"task {task} of Slurm array {job}")


def parse_cluster(text: str) -> str:
    """Return the address of a Ray cluster: local, auto or ray://HOST:PORT."""
    if text not in ("local", "auto") and not re.fullmatch(r"ray://[^\s/]+", text):
        raise typer.BadParameter(f"{text!r} is no cluster: write local, auto or ray://HOST:PORT")
    return text


def source_option(help: str, name: str = "--input-dir") -> Any:
    """Return an option for a checkpoint: a folder, or the address of a repository."""
    return typer.Option(
        name, parser=parse_source, metavar="SRC", rich_help_panel=INPUT_OUTPUT, help=help
    )


LinkOption = Annotated[
    Link,
    typer.Option(
        "--link",
        metavar="WAY",
        rich_help_panel=INPUT_OUTPUT,
        help="Way in which unchanged shards enter the bundle: auto, reflink, hardlink or copy.",
    ),
]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite", rich_help_panel=INPUT_OUTPUT, help="Replace a bundle that is already there."
    ),
]
NoResume = Annotated[
    bool,
    typer.Option(
        "--no-resume",
        rich_help_panel=INPUT_OUTPUT,
        help="Start over instead of finishing an interrupted run.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", rich_help_panel=INPUT_OUTPUT, help="Show the plan and write nothing."
    ),
]
PartOption = Annotated[
    Part,
    typer.Option(
        "--part", metavar="PART", rich_help_panel=CONTENT, help="Part to write: both, main or mtp."
    ),
]
TargetOption = Annotated[
    str,
    typer.Option(
        "--target",
        metavar="NAME",
        rich_help_panel=CONTENT,
        help=f"Loader of the MTP part: {', '.join(target_names())}.",
    ),
]
SharedWeightsOption = Annotated[
    SharedWeights,
    typer.Option(
        "--shared-weights",
        metavar="CHOICE",
        rich_help_panel=CONTENT,
        help="Embedding and head in the MTP part: keep or drop.",
    ),
]
AllowUntied = Annotated[
    bool,
    typer.Option(
        "--allow-untied",
        rich_help_panel=CONTENT,
        help="Accept an MTP embedding or head that differs from the main model's.",
    ),
]
MaxShardSize = Annotated[
    int,
    typer.Option(
        parser=parse_size,
        metavar="SIZE",
        rich_help_panel=CONTENT,
        help="Maximum size of an MTP shard.",
    ),
]
ChecksumsOption = Annotated[
    Checksums,
    typer.Option(
        "--checksums",
        metavar="CHOICE",
        rich_help_panel=CONTENT,
        help="Tensors with a checksum: written, or all, which also reads the main part's linked"
        " shards.",
    ),
]
ShareOption = Annotated[
    Share | None,
    typer.Option(
        "--share",
        parser=parse_share,
        metavar="I/N",
        rich_help_panel=PERFORMANCE,
        help="Make share I of N, then end with mtp-export finish; slurm: by the task of an array.",
    ),
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        parser=parse_cluster,
        metavar="ADDRESS",
        rich_help_panel=PERFORMANCE,
        help="Make the shards on a Ray cluster: local, auto or ray://HOST:PORT.",
    ),
]
Workers = Annotated[
    int,
    typer.Option(
        min=1,
        max=MAX_WORKERS,
        metavar="N",
        rich_help_panel=PERFORMANCE,
        help="Tensors worked on at once.",
    ),
]
IoDepth = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=64,
        metavar="N",
        rich_help_panel=PERFORMANCE,
        help="Reads, and writes, under way at once; by default 16 for each disk.",
    ),
]
MaxMemory = Annotated[
    int,
    typer.Option(
        parser=parse_size,
        metavar="SIZE",
        rich_help_panel=PERFORMANCE,
        help="Maximum resident memory.",
    ),
]
Report = Annotated[
    Path | None,
    typer.Option(
        parser=parse_path,
        metavar="FILE.json",
        rich_help_panel=REPORT,
        help="Write the result to a file as JSON.",
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", rich_help_panel=REPORT, help="Print the result as JSON.")
]
Quiet = Annotated[
    bool, typer.Option("--quiet", rich_help_panel=REPORT, help="Show no progress and no table.")
]
Debug = Annotated[
    bool, typer.Option("--debug", rich_help_panel=REPORT, help="Show the traceback of an error.")
]


def bundle_options(context: typer.Context, input_dir: Place, output_dir: Path) -> BundleOptions:
    """Return the options that every command has that makes a bundle.

    Typer fills a command's parameters one by one; taking them from its context puts them together
    in one place for all such commands.
    """
    given = context.params
    if given["share"] is not None and given["overwrite"]:
        raise UsageError(
            "Shares do not replace a bundle",
            expected="--share or --overwrite",
            found="both",
            todo="Write the shares into a new folder, or remove the finished bundle first",
        )
    if given["share"] is not None:
        refuse_cluster_of_share(given["cluster"])
    content = ContentOptions(
        part=given.get("part", Part.BOTH),  # a graft always has both
        shared_weights=given["shared_weights"],
        max_shard_bytes=given["max_shard_size"],
        allow_untied=given["allow_untied"],
        checksums=given["checksums"],
    )
    run = RunOptions(
        link=given["link"],
        workers=given["workers"],
        max_memory_bytes=given["max_memory"],
        io_depth=given["io_depth"],
        overwrite=given["overwrite"],
        resume=not given["no_resume"],
        share=given["share"],
    )
    return BundleOptions(input_dir, output_dir, target=given["target"], content=content, run=run)


def refuse_cluster_of_share(cluster: str | None) -> None:
    """Refuse a cluster for a share of the work (UsageError)."""
    if cluster is not None:
        raise UsageError(
            "A cluster divides the work itself",
            expected="--share or --cluster",
            found="both",
            todo="Leave --share out",
        )


def reporting_options(context: typer.Context) -> Reporting:
    """Return the options --json and --quiet of a command that has both."""
    return Reporting(as_json=context.params["as_json"], quiet=context.params["quiet"])
