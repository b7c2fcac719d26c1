"""Descriptions of options: the metadata of a dataclass field, from which its command is made."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from mtp_checkpoints.errors import UsageError
from mtp_checkpoints.sources.addresses import place_of
from mtp_checkpoints.sources.byte_source import Place

METADATA = "option"
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SHOWN_BOUND = 65535
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class Panel(StrEnum):
    """Panels of --help, in its order."""

    ALL_COMMANDS = ""
    INPUT_OUTPUT = "Input and output"
    DATA = "Data"
    TRAINING = "Training"
    PRECISION = "Precision"
    CONTENT = "Content of the bundle"
    MODEL_CARD = "Model card"
    CHECKS = "Checks"
    SERVER = "Server"
    DECODING = "Decoding"
    SPECULATION = "Speculation"
    DRAFTS = "Number and temperature of drafts"
    LIMITS = "Batch and cache"
    PROMPTS = "Prompts"
    PLACEMENT = "Machines and devices"
    PERFORMANCE = "Performance"
    REPORT = "Report"


class Names(StrEnum):
    """Kinds of names that can be typed; mtp_export/commands/names.py knows those of each."""

    COMMAND = "command"
    SHELL = "shell"
    SCHEME = "scheme"
    MTP_SCHEME = "scheme of the MTP module"
    GRAFT_SCHEME = "scheme of a grafted layer"
    GROUP_SIZE = "group size"
    TARGET = "target"
    ENGINE = "engine"
    DRAFT_ENGINE = "engine whose reading of a draft is known"
    DRAFTER = "method"
    TRAINED_DRAFT = "draft"
    LEVEL = "level"
    DEVICE = "device"
    TORCH_DEVICE = "torch device"
    DTYPE = "dtype"
    ACTIVATIONS = "kind of activations"
    JOIN_MODE = "mode"
    ADDRESS = "address"


class Access(StrEnum):
    """Use that a command makes of the path in an option."""

    READ = "read"
    WRITTEN = "written"


@dataclass(frozen=True)
class Option:
    """Description of an option, or of an argument; the field gives its name, type and default.

    flag is given where it is not the field's name. A bool that is True by default has one that
    turns it off. parser takes the text of a value and raises ValueError. values is the kind of
    names that it takes, some of them where takes_others; {names} in help stands for them, or for
    those of an enumeration. low and high bound a number. default is the text of the
    field's default and show_default what --help shows of it, where they are not the default itself.
    access is there for every path; takes_unfinished for that of a bundle that may be unfinished.
    short is a second, short name. An option that shows something and exits has no environment
    variable, as the others have. One that configures is a file that sets others.
    """

    help: str
    panel: Panel = Panel.ALL_COMMANDS
    flag: str | None = None
    metavar: str | None = None
    parser: Callable[[str], Any] | None = None
    values: Names | None = None
    takes_others: bool = False
    low: int | None = None
    high: int | None = None
    default: str | None = None
    show_default: bool | str = True
    show_envvar: bool = False
    is_argument: bool = False
    short: str | None = None
    shows_and_exits: bool = False
    configures: bool = False
    access: Access | None = None
    takes_unfinished: bool = False

    def allows(self, number: float) -> bool:
        """Return whether a number is within the bounds."""
        is_high_enough = self.low is None or self.low <= number
        return is_high_enough and (self.high is None or number <= self.high)

    @property
    def shown_metavar(self) -> str | None:
        """The metavar; of a number its bounds, where they are narrow enough to be read."""
        if self.low is None or self.high is None or self.high > _SHOWN_BOUND:
            return self.metavar
        return f"{self.low}-{self.high}"

    @property
    def bounds(self) -> str:
        """The bounds of a number, where there are any, in words."""
        if self.high is None:
            return f"{self.low} or more"
        return f"{self.high} or less" if self.low is None else f"{self.low} to {self.high}"


_ADDRESSES: Mapping[str, Any] = {"values": Names.ADDRESS, "takes_others": True}


def option(help: str, panel: Panel, flag: str | None = None, **more: Any) -> Mapping[str, Option]:
    """Return the metadata of a field that an option sets; more as in Option."""
    return {METADATA: Option(help, panel, flag, **more)}


def flag_of(field: Field[Any]) -> str:
    """Return the option, or argument, of a described field as it is written."""
    given: Option = field.metadata[METADATA]
    if given.is_argument:
        return str(given.metavar)
    return given.flag or f"--{field.name.replace('_', '-')}"


def check_bounds(options: Any) -> None:
    """Refuse numbers of a dataclass that are outside the bounds of their options (UsageError)."""
    for field in fields(options):
        value = getattr(options, field.name)
        if METADATA in field.metadata and isinstance(value, int | float):
            given: Option = field.metadata[METADATA]
            if not given.allows(value):
                raise out_of_range(flag_of(field), given, value)


def out_of_range(name: str, given: Option, found: object) -> UsageError:
    """Return the refusal of an option's value that is no number within its bounds."""
    return UsageError(f"{name} is out of range", expected=given.bounds, found=found)


def argument(
    help: str,
    metavar: str,
    parser: Callable[[str], Any],
    access: Access | None = None,
    **more: Any,
) -> Mapping[str, Option]:
    """Return the metadata of a field that an argument sets; access: of a path; more as in
    Option."""
    more |= _ADDRESSES if parser is parse_source else {}
    return {
        METADATA: Option(
            help, metavar=metavar, parser=parser, is_argument=True, access=access, **more
        )
    }


def path_option(
    help: str, panel: Panel, metavar: str, flag: str | None = None, *, access: Access
) -> Any:
    """Return the metadata of a field that an option sets to a path on this machine."""
    return option(help, panel, flag, metavar=metavar, parser=parse_path, access=access)


def source_option(help: str, flag: str = "--input-dir") -> Mapping[str, Option]:
    """Return the metadata of a field for a checkpoint: a folder, or a repository's address."""
    return option(
        help,
        Panel.INPUT_OUTPUT,
        flag,
        metavar="SRC",
        parser=parse_source,
        access=Access.READ,
        **_ADDRESSES,
    )


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 5GB (powers of 1000), 4GiB (powers of 1024) or 4096."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*([kmgt]i?|)b?", text.strip().lower())
    size = int(float(match[1]) * (_UNITS | _BINARY_UNITS)[match[2]]) if match else 0
    if size < 1:
        raise ValueError(f"{text!r} is no size: write for example 5GB, 4GiB or 4096")
    return size


def parse_path(text: str) -> Path:
    """Return a path; an empty one, as of an unset variable, is not the current folder, and an
    address is none."""
    if not text:
        raise ValueError("an empty path; write . for the current folder")
    place = place_of(text)
    if not isinstance(place, Path):
        raise ValueError(f"{text} is an address; this takes a path on this machine")
    return place


def parse_source(text: str) -> Place:
    """Return the path of a folder, or the address of a repository."""
    return place_of(text) if text else parse_path(text)


def parse_cluster(text: str) -> str:
    """Return the address of a Ray cluster: local, auto or ray://HOST:PORT."""
    if text not in ("local", "auto") and not re.fullmatch(r"ray://[^\s/]+", text):
        raise ValueError(f"{text!r} is no cluster: write local, auto or ray://HOST:PORT")
    return text
