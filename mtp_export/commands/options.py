"""The command line's options, each described once; commands share them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import typer

from mtp_export.bundle.split import Checksums, Part, SharedWeights
from mtp_export.checkpoint.plan import Link
from mtp_export.targets import target_names

DEFAULT_WORKERS = min(4, os.cpu_count() or 1)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(text: str) -> int:
    """Bytes from a size such as 5GB (powers of 1000), 4GiB (powers of 1024) or 4096."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*([kmgt]i?|)b?", text.strip().lower())
    size = int(float(match[1]) * (_UNITS | _BINARY_UNITS)[match[2]]) if match else 0
    if size < 1:
        raise typer.BadParameter(f"{text!r} is no size: write for example 5GB, 4GiB or 4096")
    return size


InputDir = Annotated[
    Path | None, typer.Option(help="The checkpoint: a Hugging Face folder of safetensors.")
]
OutputDir = Annotated[
    Path | None, typer.Option(help="The bundle: becomes OUT/main, OUT/mtp, mtp_export.json.")
]
PartOption = Annotated[Part, typer.Option("--part", help="Which parts to write.")]
TargetOption = Annotated[
    str,
    typer.Option("--target", help=f"Who loads the MTP part: {', '.join(target_names())}."),
]
SharedWeightsOption = Annotated[
    SharedWeights, typer.Option("--shared-weights", help="Embedding and head in the MTP part.")
]
AllowUntied = Annotated[
    bool,
    typer.Option("--allow-untied", help="Accept an MTP embedding or head unlike the main's."),
]
LinkOption = Annotated[
    Link, typer.Option("--link", help="How shards that stay whole get into the bundle.")
]
ChecksumsOption = Annotated[
    Checksums,
    typer.Option(
        "--checksums", help="all: of the main part's linked shards too, which reads them."
    ),
]
Workers = Annotated[int, typer.Option(min=1, max=64, help="Threads that read, compute and write.")]
MaxMemory = Annotated[
    int, typer.Option(parser=parse_size, metavar="SIZE", help="Bound on resident memory.")
]
MaxShardSize = Annotated[
    int, typer.Option(parser=parse_size, metavar="SIZE", help="Bound on an MTP shard.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan, write nothing.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace a bundle that is already there.")
]
NoResume = Annotated[
    bool, typer.Option("--no-resume", help="Start over instead of finishing a killed run.")
]
Report = Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write the result as JSON.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress and no table.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
Version = Annotated[bool, typer.Option("--version", help="Show the version.")]
