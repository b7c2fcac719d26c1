"""Typer commands made from dataclasses: each field that an option describes becomes a parameter of
the command, whose function gets the finished instance."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, reduce
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, cast, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from mtp_checkpoints.errors import UsageError
from mtp_checkpoints.suggestions import did_you_mean
from mtp_export.commands.config_file import read_config
from mtp_export.commands.retries import announced_retries
from mtp_export.options import (
    METADATA,
    Access,
    Option,
    Panel,
    flag_of,
    known_addresses,
    out_of_range,
)
from mtp_export.paths import refuse_overlaps

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
SETTINGS: dict[str, Any] = {
    "rich_markup_mode": "rich",
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
_SAYS_LITTLE = (None, "N", "NAME", "CHOICE", "MODE")  # metavars that do not say what a value is


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
        kinds = get_args(self.hint) or (self.hint,)
        enums = (kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, Enum))
        by_type = [] if self.option.parser else [str(each.value) for kind in enums for each in kind]
        return self.option.names or by_type

    def completions(self, incomplete: str) -> list[str]:
        """Return the values that begin as a text does, for the completion of a shell."""
        known = self.choices or self.option.suggestions
        if incomplete and not known:
            known = known_addresses(self.option)
        return [value for value in known if value.startswith(incomplete)]

    @property
    def turns_off(self) -> bool:
        """True for a flag that makes the field False."""
        return self.hint is bool and self.field.default is True and self.option.parser is None

    def parameter(self) -> inspect.Parameter:
        """Return the parameter as Typer takes it."""
        given, hint, default = self.option, self.hint, self.field.default
        if given.parser is not None and not given.is_argument:  # whose type --help shows
            hint = Any
        elif given.names:
            hint = Literal[tuple(given.names)]
        settings: dict[str, Any] = {
            "help": given.help,
            "metavar": "" if hint is bool and given.parser is None else given.shown_metavar,
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
        expected = ", ".join(self.choices) or f"{self.option.help.rstrip('.')}".replace("\\[", "[")
        return UsageError(f"Missing {kind} '{self.flag}'", expected=expected)

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
        if self.option.names and value not in self.option.names:
            return UNUSUAL
        if self.option.parser is not None:
            try:
                return self.option.parser(value)
            except ValueError:
                return UNUSUAL
        if self.option.names:
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
                raise UsageError(
                    f"{value!r} is no {kind} for {name}",
                    expected=", ".join(self.choices),
                    todo=did_you_mean(value, self.choices),
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


def _number(text: Any) -> float:
    """Return the number of a text; a whole one is exact, however large (ValueError)."""
    with suppress(ValueError):
        return int(text)
    return float(text)


class QuickReading:
    """Part of a command that reads usual values itself: Typer imports pydantic to read any, which
    takes longer than most commands do with them. Everything else is left to Typer."""

    leaves: Mapping[str, Leaf] = {}

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line: what must be given has no brackets."""
        pieces = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        return [re.sub(r"[{}]", "", piece) for piece in pieces]

    def get_help_option(self, ctx: Any) -> Any:
        """Return the option of the help, a flag without a type."""
        option = super().get_help_option(ctx)  # type: ignore[misc]
        option.metavar = ""
        return option

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Set the context's parameters, and return what is left of the arguments."""
        if not ctx.resilient_parsing:
            self._configure(ctx, list(args))
            if self._reads(ctx, list(args)):
                return []
        return cast(list[str], super().parse_args(ctx, args))  # type: ignore[misc]

    def _configure(self, ctx: Any, args: list[str]) -> None:
        """Take the options that a file sets, where the command has an option for one: the command
        line and the environment go before it."""
        config = next((leaf for leaf in self.leaves.values() if leaf.option.configures), None)
        if config is None:
            return
        given, _, _ = cast(TyperCommand, self).make_parser(ctx).parse_args(args=args)
        place = given.get(config.name) or os.environ.get(config.envvar or "")
        if place:
            others = [leaf for leaf in self.leaves.values() if leaf is not config]
            path = Path(str(place))
            refuse_overlaps({config.flag: path}, {})
            ctx.default_map = read_config(path, others)

    def _reads(self, ctx: Any, args: list[str]) -> bool:
        command = cast(TyperCommand, self)
        given, rest, _ = command.make_parser(ctx).parse_args(args=args)
        missing: Leaf | None = None
        if rest:
            return False
        for parameter in sorted(command.get_params(ctx), key=lambda each: not each.is_eager):
            value, source = parameter.consume_value(ctx, given)
            leaf = self.leaves.get(parameter.name)
            if leaf is None:  # of all commands, such as --help, which ends the program
                if value and parameter.callback is not None:
                    parameter.callback(ctx, parameter, value)
                continue
            if source.name != "DEFAULT":
                given_value, value = value, leaf.usual(value)
                if value is UNUSUAL:
                    leaf.refuse(given_value, from_environment=source.name == "ENVIRONMENT")
                    return False
            if value is None and parameter.required:
                missing = missing or leaf
            ctx.set_parameter_source(parameter.name, source)
            ctx.params[parameter.name] = value
        if missing is not None:
            raise missing.missing()
        return True


class QuickCommand(QuickReading, TyperCommand):
    """A command that reads usual values itself."""


class QuickGroup(QuickReading, TyperGroup):
    """A group of commands that reads usual values itself."""


def typed_command(run: Callable[..., None], epilog: str | None = None) -> TyperCommand:
    """Return the command of a function, which takes its options, a dataclass, and may take the
    context too; epilog: what follows its help."""
    app, leaves = typer.Typer(add_completion=False, **SETTINGS), _leaves_of(run)
    settings = SETTINGS["context_settings"]
    app.command(cls=QuickCommand, epilog=epilog, context_settings=settings)(_callback(run, leaves))
    return cast(QuickCommand, _with_leaves(typer.main.get_command(app), leaves))


def typed_group(run: Callable[..., None], group: type[QuickGroup]) -> QuickGroup:
    """Return the command of a function, as typed_command does, with the commands of a group."""
    app, leaves = typer.Typer(cls=group, **SETTINGS), _leaves_of(run)
    app.callback(invoke_without_command=True)(_callback(run, leaves))
    return cast(QuickGroup, _with_leaves(typer.main.get_command(app), leaves))


def _with_leaves(command: Any, leaves: Sequence[Leaf]) -> Any:
    """Return a command that knows its options; of one with several values, each is a line of its
    environment variable."""
    command.leaves = {leaf.name: leaf for leaf in leaves}
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            parameter.display_type_rich = _no_type
        elif parameter.multiple:
            parameter.split_envvar_value = str.splitlines
    return command


def _no_type(ctx: Any) -> str:
    """Return nothing where Typer would write the type of an argument, whose name says it."""
    return ""


def _callback(run: Callable[..., None], leaves: Sequence[Leaf]) -> Callable[..., None]:
    """Return the function of a command as Typer calls it: with its parameters one by one."""
    hints = get_type_hints(run)

    def callback(context: typer.Context, **values: Any) -> None:
        given = {}
        for leaf in leaves:
            source = context.get_parameter_source(leaf.name)
            if source is not None and source.name != "DEFAULT":
                given[leaf.path] = False if leaf.turns_off else values[leaf.name]
        options = _filled(hints["options"], given)
        refuse_overlaps(*(_paths_of(options, leaves, access) for access in Access))
        is_quiet = any(_value(options, leaf) for leaf in leaves if leaf.field.name == "quiet")
        with announced_retries(quiet=is_quiet):
            run(options, context) if "context" in hints else run(options)

    itself = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    signature = inspect.Signature([itself, *(leaf.parameter() for leaf in leaves)])
    callback.__signature__ = signature  # type: ignore[attr-defined]
    callback.__name__, callback.__doc__ = run.__name__, run.__doc__
    return callback


def _paths_of(options: Any, leaves: Sequence[Leaf], access: Access) -> dict[str, Any]:
    """Return the paths that a command reads, or those that it writes, by option."""
    return {leaf.flag: _value(options, leaf) for leaf in leaves if leaf.option.access is access}


def _value(options: Any, leaf: Leaf) -> Any:
    """Return what a command's options have in a field."""
    return reduce(getattr, leaf.path, options)


def _leaves_of(run: Callable[..., None]) -> list[Leaf]:
    """Return the described fields of a command's options in the order of --help."""
    leaves = leaves_of(get_type_hints(run)["options"])
    return sorted(leaves, key=lambda leaf: list(Panel).index(leaf.option.panel))


def leaves_of(kind: Any, *path: str) -> Iterator[Leaf]:
    """Yield the described fields of a dataclass, and of those that it holds."""
    hints = _hints_of(kind)
    for field in fields(kind):
        if METADATA in field.metadata:
            option = field.metadata[METADATA]
            yield Leaf((*path, field.name), field, hints[field.name], option)
        elif is_dataclass(hints[field.name]):
            yield from leaves_of(hints[field.name], *path, field.name)


def _filled(kind: Any, given: Mapping[tuple[str, ...], Any]) -> Any:
    """Return a dataclass of the fields that are given, by path."""
    own = {path[0]: value for path, value in given.items() if len(path) == 1}
    for field in fields(kind):
        hint = _hints_of(kind)[field.name]
        if is_dataclass(hint) and METADATA not in field.metadata:
            below = {path[1:]: value for path, value in given.items() if path[0] == field.name}
            own[field.name] = _filled(hint, below)
    return kind(**own)


_hints_of = cache(get_type_hints)
