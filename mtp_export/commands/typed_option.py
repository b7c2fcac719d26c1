"""Options and arguments of commands as their fields describe them: names, values, completion, help
and refusals of each."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass
from enum import Enum
from types import NoneType
from typing import Annotated, Any, get_args

import typer

from mtp_checkpoints.errors import UsageError
from mtp_checkpoints.suggestions import did_you_mean, nearest
from mtp_export.commands.names import names_of
from mtp_export.options import Names, Option, flag_of, out_of_range

_NUMBERS = {
    int: re.compile(r"0|[1-9]\d{0,17}", re.ASCII),
    float: re.compile(r"\d+(\.\d+)?", re.ASCII),
}
_SWITCHES = {"1": True, "true": True, "yes": True, "on": True} | {
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}
UNUSUAL = object()
_SAYS_LITTLE = ("NAME", "CHOICE")  # metavars that do not say what a value is


@dataclass(frozen=True)
class Leaf:
    """A field that an option sets, and where it is: the names of the fields that lead to it."""

    path: tuple[str, ...]
    field: Field[Any]
    hint: Any
    option: Option

    @property
    def name(self) -> str:
        """Name of the command's parameter."""
        return "__".join(self.path)

    @property
    def flag(self) -> str:
        """The option, or argument, as it is written."""
        return flag_of(self.field)

    @property
    def envvar(self) -> str | None:
        """Environment variable that sets the option; None for arguments, and for options that show
        something and exit."""
        if self.option.is_argument or self.option.shows_and_exits:
            return None
        return "MTP_EXPORT_" + self.flag.removeprefix("--").replace("-", "_").upper()

    @property
    def choices(self) -> Sequence[str]:
        """All values that there are, where they have names."""
        if self.option.values is not None:
            return () if self.option.takes_others else names_of(self.option.values)
        kinds = get_args(self.hint) or (self.hint,)
        enums = (kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, Enum))
        return [] if self.option.parser else [str(each.value) for kind in enums for each in kind]

    @property
    def help(self) -> str:
        """The option's help, with the names that it takes."""
        if "{names}" not in self.option.help:
            return self.option.help
        from mtp_runtime.drafters import listed

        known = self.choices or names_of(self.option.values or Names.COMMAND)
        return self.option.help.replace("{names}", listed(known))

    def completions(self, incomplete: str) -> list[str]:
        """Return the values that begin as a text does, for the completion of a shell."""
        known, kind = self.choices, self.option.values
        if kind is not None and (incomplete or kind is not Names.ADDRESS):  # else paths are offered
            known = names_of(kind)
        return [value for value in known if value.startswith(incomplete)]

    @property
    def is_switch(self) -> bool:
        """True for an option without a value."""
        return self.hint is bool and self.option.parser is None

    @property
    def is_text(self) -> bool:
        """True for an option whose values are neither named nor parsed."""
        return self.option.parser is None and not self.choices

    @property
    def is_required(self) -> bool:
        return self.field.default is MISSING

    @property
    def turns_off(self) -> bool:
        """True for a flag that makes the field False."""
        return self.is_switch and self.field.default is True

    def parameter(self) -> inspect.Parameter:
        """Return the parameter as Typer takes it."""
        given, hint, default = self.option, self.hint, self.field.default
        if given.parser is not None and not given.is_argument:  # whose type --help shows
            hint = Any
        elif given.values is not None and not given.is_argument:
            hint = str
        settings: dict[str, Any] = {
            "help": self.help,
            "metavar": "" if self.is_switch else given.shown_metavar,
            "parser": None if given.parser is None else self.parsed,
            "rich_help_panel": given.panel or None,
            "show_default": given.show_default,
            "envvar": self.envvar,
            "show_envvar": given.show_envvar,
            "autocompletion": self.completions,
        }
        info = (
            typer.Argument(**settings)
            if given.is_argument
            else typer.Option(*filter(None, [self.flag, given.short]), **settings)
        )
        if default is MISSING:
            default = inspect.Parameter.empty
        elif self.turns_off:
            default = False
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default if given.default is None else given.default,
            annotation=Annotated[hint, info],
        )

    def missing(self) -> UsageError:
        """Return the refusal of a command without this option or argument."""
        kind = "argument" if self.option.is_argument else "option"
        return UsageError(f"Missing {kind} '{self.flag}'", expected=self._values)

    def without_value(self, follows: str | None) -> UsageError:
        """Return the refusal of this option where no value follows it, but another option or the
        end."""
        found = {} if follows is None else {"found": f"{follows} behind it"}
        return UsageError(f"Option {self.flag} has no value", expected=self._values, **found)

    @property
    def _values(self) -> str:
        """Words for a value: the names of all, or the help within a sentence."""
        words = self.help.rstrip(".").replace("\\[", "[")
        is_name = words[1:2].isupper()  # JSON
        return ", ".join(self.choices) or (words if is_name else words[:1].lower() + words[1:])

    def parsed(self, value: Any) -> Any:
        """Return the value of a text (typer.BadParameter); Typer gives defaults to parsers too."""
        if not isinstance(value, str) or self.option.parser is None:
            return value
        try:
            return self.option.parser(value)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    def usual(self, value: Any) -> Any:
        """Return a given value as Typer reads it; UNUSUAL for what is left to Typer, as every
        mistake is."""
        named = self.choices if self.option.values is not None else ()
        if named and value not in named:
            return UNUSUAL
        if self.option.parser is not None:
            try:
                return self.option.parser(value)
            except ValueError:
                return UNUSUAL
        if named:
            return value
        if isinstance(value, list | tuple):
            return list(value)
        kinds = set(get_args(self.hint) or (self.hint,)) - {NoneType}
        if str in kinds or (bool in kinds and isinstance(value, bool)):
            return value
        if bool in kinds:  # of an environment variable or a file
            return _SWITCHES.get(str(value).lower(), UNUSUAL)
        for kind in kinds:
            if issubclass(kind, Enum):
                return next((each for each in kind if value == each.value), UNUSUAL)
            if kind in _NUMBERS and _NUMBERS[kind].fullmatch(value):
                number = kind(value)
                return number if self.option.allows(number) else UNUSUAL
        return UNUSUAL

    def refuse(self, value: Any, *, from_environment: bool) -> None:
        """Refuse a text that Typer would not read either (UsageError), with what was meant."""
        name = f"{self.flag} ({self.envvar})" if from_environment else self.flag
        if self.choices and not isinstance(value, list | tuple):
            if value not in self.choices:
                metavar = self.option.metavar
                kind = "value" if metavar in _SAYS_LITTLE else str(metavar).lower()
                kind = self.option.values or kind
                raise UsageError(
                    f"{value!r} is no {kind} for {name}",
                    expected=", ".join(self.choices),
                    todo=did_you_mean(value, self.choices) or self._without_command(value),
                )
        elif self.option.parser is not None:
            try:
                self.option.parser(value)
            except ValueError as error:
                raise UsageError(f"Option {name}: {error}") from None
        elif self.option.low is not None or self.option.high is not None:
            with suppress(ValueError, TypeError):
                if self.option.allows(_number(value)):
                    return
            raise out_of_range(name, self.option, repr(value))
        elif self.hint is bool:
            raise UsageError(f"{name} is a switch", expected="1 or 0", found=repr(value))

    def _without_command(self, value: str) -> str | None:
        """Return what is known of an engine for which bundles are written, but no command."""
        engine = nearest(value, names_of(Names.TARGET))
        if self.option.values is not Names.ENGINE or engine is None:
            return None
        return f"A bundle of --target {engine} has no command here"


def _number(text: Any) -> float:
    """Return the number of a text; a whole one is exact, however large (ValueError)."""
    with suppress(ValueError):
        return int(text)
    return float(text)
