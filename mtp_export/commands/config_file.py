"""Options of a command from a YAML file: its keys are the options' names without the dashes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from mtp_checkpoints.errors import IoError, UnsupportedError, UsageError
from mtp_checkpoints.suggestions import did_you_mean

MAX_BYTES = 1 << 20


class ConfiguredOption(Protocol):
    """An option that a file may set: the command's parameter, and its name as it is written."""

    @property
    def name(self) -> str: ...

    @property
    def flag(self) -> str: ...


def read_config(path: Path, options: Iterable[ConfiguredOption]) -> dict[str, Any]:
    """Return the texts that a file gives to options, by the names of their parameters.

    Every value is read as the text that it is in the file, as a command line's is: 1:5 is no number
    of YAML's. Raises UsageError for a file that is no YAML mapping, for keys that are no options
    and for values that are none, IoError for a file that cannot be read, UnsupportedError without
    the library.
    """
    known = {option.flag.removeprefix("--").lower(): option.name for option in options}
    found: dict[str, Any] = {}
    for key, value in _mapping(path).items():
        name = str(key).replace("_", "-").lower()
        if name not in known:
            raise UsageError(
                f"{key!r} is no option",
                where=path,
                expected="the name of an option, without its dashes",
                todo=did_you_mean(name, known) or "See mtp-export serve --help",
            )
        if known[name] in found:
            raise UsageError(f"{key!r} is given twice", where=path)
        if value in ("", []) or isinstance(value, Mapping) or not _is_flat(value):
            raise UsageError(f"{key!r} has no value that an option takes", where=path)
        found[known[name]] = value
    return found


def _is_flat(value: Any) -> bool:
    """Return whether a command line could hold a value: texts without null bytes."""
    each = [value] if isinstance(value, str) else value
    return all(isinstance(text, str) and "\0" not in text for text in each)


def _mapping(path: Path) -> Mapping[Any, Any]:
    try:
        import yaml
    except ImportError:
        raise UnsupportedError(
            "The library that reads YAML is not installed",
            expected="pyyaml",
            todo="Install it with pip install 'mtp-export[serve]'",
        ) from None
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        text = content.decode("utf-8")
        parsed = yaml.load(text, Loader=yaml.BaseLoader) if len(content) <= MAX_BYTES else None
    except OSError as error:
        raise IoError("The config file cannot be read", where=path, found=error.strerror) from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        found = " ".join(str(error).split())[:200]
        raise UsageError("The config file is no YAML", where=path, found=found) from None
    if not isinstance(parsed, Mapping):
        expected = f"a line per option, such as port: 9000, and at most {MAX_BYTES} bytes"
        raise UsageError("The config file has no options", where=path, expected=expected)
    return parsed
