"""Options of a verification."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtp_checkpoints.errors import UsageError
from mtp_checkpoints.layouts import names_that_read_drafts
from mtp_checkpoints.sources.byte_source import Place
from mtp_checkpoints.suggestions import did_you_mean
from mtp_export.bundle.options import MAX_WORKERS
from mtp_export.options import (
    Access,
    Names,
    Panel,
    argument,
    option,
    parse_size,
    parse_source,
    path_option,
)
from mtp_export.verify.check import Level

MAX_DRAFTS = 5
LEVELS = {level.name.lower(): level for level in Level} | {"all": max(Level)}
_DEFAULT_WORKERS = min(4, os.cpu_count() or 1)


def parse_level(text: str) -> Level:
    """Return a depth by its name."""
    if text not in LEVELS:
        raise ValueError(f"{text!r} is not one of {', '.join(map(repr, LEVELS))}")
    return LEVELS[text]


def parse_ks(text: str) -> tuple[int, ...]:
    """Return the numbers of drafts in a list such as 1,2,3 (UsageError)."""
    numbers = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= MAX_DRAFTS for part in numbers):
        raise UsageError(
            "--k is no list of numbers of drafts",
            expected=f"numbers from 1 to {MAX_DRAFTS}, as in 1,2,3",
            found=text,
        )
    return tuple(sorted({int(part) for part in numbers}))


def parse_engine(text: str) -> str:
    """Return the name of an engine whose reading of a draft is known (UsageError)."""
    names = names_that_read_drafts()
    if text not in names:
        raise UsageError(
            "--engine is no engine whose reading of a draft is known",
            expected=" or ".join(names),
            found=text,
            todo=did_you_mean(text, names) or "Leave it out to judge for all of them",
        )
    return text


@dataclass(frozen=True)
class VerifyOptions:
    """The bundle or checkpoint to verify, and how deep. mtp: the place of the MTP layer that goes
    with a checkpoint's main model. engine: the one that will serve it; how others read the draft
    is not tested then. Without it that is the engine that a bundle's manifest names.

    max_new_tokens: per prompt. ks: numbers of draft tokens per step. activations: of a second run
    whose acceptance is shown beside the usual one. checksums False: no tensor's
    bytes are read for level files. strict_config: a value of config.json that no release of the
    family has fails. stream: run the model layer by layer, for one that does not fit
    into memory. workdir: where a streamed pass keeps its state to resume from, and shares of a
    verification what they found.
    """

    bundle: Place = field(
        default=Path("."),
        metadata=argument(
            "Bundle, checkpoint or hf://org/name\\[@revision]; by default the current folder.",
            "BUNDLE",
            parse_source,
            Access.READ,
            takes_unfinished=True,
        ),
    )
    source: Path | None = field(
        default=None,
        metadata=path_option(
            "Checkpoint or bundle that this bundle was made from, to compare with.",
            Panel.CHECKS,
            "DIR",
            access=Access.READ,
        ),
    )
    level: Level = field(
        default=Level.RUN,
        metadata=option(
            "Depth: {names}; each includes those before it.",
            Panel.CHECKS,
            metavar="LEVEL",
            parser=parse_level,
            values=Names.LEVEL,
            default="all",
        ),
    )
    prompts: Path | None = field(
        default=None,
        metadata=path_option(
            'JSON lines: {"prompt": TEXT} or {"prompt_token_ids": [...]}; completion likewise.',
            Panel.DECODING,
            "FILE.jsonl",
            access=Access.READ,
        ),
    )
    max_new_tokens: int = field(
        default=128,
        metadata=option("Maximum new tokens per prompt.", Panel.DECODING, metavar="N", low=2),
    )
    ks: tuple[int, ...] = field(
        default=(1, 2, 3),
        metadata=option(
            "Numbers of draft tokens per step, 1 to 5.",
            Panel.DECODING,
            "--k",
            metavar="K,K,...",
            parser=parse_ks,
            default="1,2,3",
        ),
    )
    device: str = field(
        default="cpu",
        metadata=option(
            "{names}.",
            Panel.PERFORMANCE,
            metavar="NAME",
            values=Names.TORCH_DEVICE,
            takes_others=True,
        ),
    )
    activations: str = field(
        default="float32",
        metadata=option(
            "Measure acceptance with activations of this dtype too: {names}.",
            Panel.DECODING,
            metavar="DTYPE",
            values=Names.ACTIVATIONS,
        ),
    )
    checksums: bool = field(
        default=True,
        metadata=option(
            "Read headers instead of every byte for level files.", Panel.CHECKS, "--no-checksums"
        ),
    )
    stream: bool = field(
        default=False,
        metadata=option("Run the model layer by layer, in little memory.", Panel.PERFORMANCE),
    )
    max_memory: int | None = field(
        default=None,
        metadata=option(
            "Resident memory for level run: routed experts that do not fit are read from disk.",
            Panel.PERFORMANCE,
            metavar="SIZE",
            parser=parse_size,
        ),
    )
    workdir: Path | None = field(
        default=None,
        metadata=path_option(
            "Folder in which a streamed run, or a share, keeps what a later run goes on from.",
            Panel.PERFORMANCE,
            "DIR",
            access=Access.WRITTEN,
        ),
    )
    workers: int = field(
        default=_DEFAULT_WORKERS,
        metadata=option(
            "Tensors worked on at once.",
            Panel.PERFORMANCE,
            metavar="N",
            low=1,
            high=MAX_WORKERS,
            show_default="4, at most the number of cores",
        ),
    )
    mtp: Place | None = field(
        default=None,
        metadata=option(
            "Checkpoint or folder with the MTP layer of a checkpoint that is elsewhere.",
            Panel.CHECKS,
            metavar="SRC",
            parser=parse_source,
            values=Names.ADDRESS,
            takes_others=True,
            access=Access.READ,
        ),
    )
    engine: str | None = field(
        default=None,
        metadata=option(
            "Judge how this engine alone reads the draft: {names}.",
            Panel.CHECKS,
            metavar="NAME",
            parser=parse_engine,
            values=Names.DRAFT_ENGINE,
            show_default="of a bundle that of its --target; else all of them must",
        ),
    )
    strict_config: bool = field(
        default=False,
        metadata=option(
            "Fail on values of config.json that no release of the family has.", Panel.CHECKS
        ),
    )

    def engine_for(self, recorded: Mapping[str, Any]) -> str | None:
        """Return the engine that a draft is judged for alone, given the options that a manifest
        records: this one, else the one that it was made for; None for all that read its layout."""
        made_for = recorded.get("engine")
        return self.engine or (made_for if made_for in names_that_read_drafts() else None)
