"""Options of drafting, for all commands that decode."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mtp_checkpoints.errors import UsageError
from mtp_export.commands.options import parse_path

DRAFTING, DRAFTS = "Speculation", "Number and temperature of drafts"


def _schedule(text: str) -> tuple[tuple[int, int], ...]:
    """Return --k-schedule as (batch size, drafts)."""
    pairs = []
    for entry in text.split(","):
        size, _, drafts = entry.partition(":")
        if not (size.strip().isdecimal() and drafts.strip().isdecimal()):
            raise UsageError(
                "Option --k-schedule cannot be read",
                expected="B:K,... such as 1:5,16:2,64:0",
                found=text,
            )
        pairs.append((int(size), int(drafts)))
    return tuple(pairs)


def _temperatures(text: str) -> tuple[float, ...]:
    """Return --draft-temperature as numbers."""
    try:
        return tuple(float(entry) for entry in text.split(","))
    except ValueError:
        raise UsageError(
            "Option --draft-temperature cannot be read",
            expected="numbers such as 0.6,0.8",
            found=text,
        ) from None


Method = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        rich_help_panel=DRAFTING,
        help="none, mtp, eagle, eagle3, parallel_heads, inference_with_reference or draft_model;"
        " auto is mtp where the bundle has a module, else none.",
    ),
]
DraftTokens = Annotated[
    int | None,
    typer.Option(
        metavar="K",
        rich_help_panel=DRAFTING,
        help="Draft tokens per step, 1 to 5; with --adaptive at most so many.",
        show_default="1; with --adaptive 5",
    ),
]
Adaptive = Annotated[
    bool,
    typer.Option(
        "--adaptive",
        rich_help_panel=DRAFTS,
        help="Choose draft tokens per step by measured acceptance and times.",
    ),
]
Schedule = Annotated[
    Any,
    typer.Option(
        parser=_schedule,
        metavar="B:K",
        rich_help_panel=DRAFTS,
        help="Draft tokens per step from each batch size on: 1:5,16:2,64:0.",
        show_default=False,
    ),
]
DraftTemperature = Annotated[
    Any,
    typer.Option(
        parser=_temperatures,
        metavar="X",
        rich_help_panel=DRAFTS,
        help="Temperatures of the draft tokens of a request that samples: 0.5,0.8.",
        show_default=False,
    ),
]
StopEntropy = Annotated[
    float,
    typer.Option(
        metavar="NATS",
        rich_help_panel=DRAFTS,
        help="Entropy above which no further token is drafted.",
        show_default="none",
    ),
]
NgramSize = Annotated[
    int,
    typer.Option(metavar="N", rich_help_panel=DRAFTING, help="Maximum length of an n-gram."),
]
DraftModel = Annotated[
    Path | None,
    typer.Option(
        parser=parse_path,
        metavar="DIR",
        rich_help_panel=DRAFTING,
        help="Second checkpoint, or draft, for methods draft_model, eagle3 and parallel_heads.",
    ),
]
