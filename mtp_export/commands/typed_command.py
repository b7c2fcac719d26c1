"""Typer commands made from dataclasses: each field that an option describes becomes a parameter of
the command, whose function gets the finished instance."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, reduce
from pathlib import Path
from shlex import quote
from typing import Any, cast, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from mtp_checkpoints.errors import UsageError
from mtp_export.commands.config_file import read_config
from mtp_export.commands.retries import announced_retries
from mtp_export.commands.typed_option import UNUSUAL, Leaf
from mtp_export.commands.unfinished import refuse_unfinished
from mtp_export.options import METADATA, Access, Panel
from mtp_export.paths import refuse_overlaps

SETTINGS: dict[str, Any] = {
    "rich_markup_mode": "rich",
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


_OUTPUT, _COMPARED = "--output-dir", "--source"


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
            self._refuse_missing_values(args)
            self._configure(ctx, list(args))
            if self._reads(ctx, list(args)):
                return []
        return cast(list[str], super().parse_args(ctx, args))  # type: ignore[misc]

    def _refuse_missing_values(self, args: Sequence[str]) -> None:
        """Refuse an option behind which nothing stands in the place of its value, or another one
        where no text is meant (UsageError); --option=value takes that too."""
        known = {
            name: leaf
            for leaf in self.leaves.values()
            if not leaf.option.is_argument
            for name in filter(None, (leaf.flag, leaf.option.short))
        }
        options = args[: args.index("--")] if "--" in args else args
        for name, follows in zip(options, [*args[1:], None], strict=False):
            leaf = known.get(name)
            if leaf is None or leaf.is_switch:
                continue
            if follows is None or (follows in known and not leaf.is_text):
                raise leaf.without_value(follows)

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
            written = {
                leaf.flag: Path(str(given[leaf.name]))
                for leaf in others
                if leaf.option.access is Access.WRITTEN and given.get(leaf.name) is not None
            }
            refuse_overlaps({config.flag: path}, written)
            ctx.default_map = read_config(path, others)

    def _reads(self, ctx: Any, args: list[str]) -> bool:
        command = cast(TyperCommand, self)
        given, rest, _ = command.make_parser(ctx).parse_args(args=args)
        missing: Leaf | None = None
        if rest:
            self._refuse_arguments(ctx, rest, given)
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

    def _refuse_arguments(self, ctx: Any, found: Sequence[str], given: Mapping[str, Any]) -> None:
        """Refuse arguments that there is no place for; those of a group are commands."""


class QuickCommand(QuickReading, TyperCommand):
    """A command that reads usual values itself."""

    def _refuse_arguments(self, ctx: Any, found: Sequence[str], given: Mapping[str, Any]) -> None:
        """Refuse arguments that there is no place for (UsageError), with what was meant: paths of
        options that lack, the rest of a text without quotes, or what to compare with."""
        taken = [leaf for leaf in self.leaves.values() if leaf.option.is_argument]
        left = [
            leaf
            for leaf in self.leaves.values()
            if leaf.option.access is not None and given.get(leaf.name) is None
        ]
        lacking = [leaf for leaf in left if leaf.is_required or leaf.flag == _OUTPUT]
        if any(leaf.option.access is Access.WRITTEN for leaf in taken):
            lacking = []  # the output is an argument
        texts = [given.get(leaf.name) for leaf in taken if leaf.option.parser is str]
        meant = " ".join(f"{leaf.flag} {quote(w)}" for leaf, w in zip(lacking, found, strict=False))
        if not meant and texts and texts[-1] is not None:
            meant = quote(" ".join((texts[-1], *found)))
        elif not meant and any(leaf.flag == _COMPARED for leaf in left):
            meant = f"{_COMPARED} {quote(found[0])}"
        raise UsageError(
            f"{ctx.command_path} has no place for {', '.join(map(repr, found))}",
            expected=" ".join(leaf.flag for leaf in taken) or "options alone",
            todo=f"Did you mean {meant}?" if meant else f"See {ctx.command_path} --help",
        )


class QuickGroup(QuickReading, TyperGroup):
    """A group of commands that reads usual values itself."""


def typed_command(
    run: Callable[..., None], help: str | None = None, epilog: str | None = None
) -> TyperCommand:
    """Return the command of a function, which takes its options, a dataclass, and may take the
    context too; help: what it does, by default the docstring; epilog: what follows its help."""
    app, leaves = typer.Typer(add_completion=False, **SETTINGS), _leaves_of(run)
    settings = SETTINGS["context_settings"]
    app.command(cls=QuickCommand, help=help, epilog=epilog, context_settings=settings)(
        _callback(run, leaves)
    )
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
        refuse_unfinished(
            _value(options, leaf)
            for leaf in leaves
            if leaf.option.access is Access.READ and not leaf.option.takes_unfinished
        )
        is_quiet = any(_value(options, leaf) for leaf in leaves if leaf.field.name == "quiet")
        with announced_retries(quiet=is_quiet):
            run(options, context) if "context" in hints else run(options)

    itself = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    signature = inspect.Signature([itself, *(leaf.parameter() for leaf in leaves)])
    callback.__signature__ = signature  # type: ignore[attr-defined]
    callback.__name__, callback.__doc__ = run.__name__, run.__doc__
    return callback


def words_of(name: str, options: Any, without: Collection[str] = ()) -> tuple[str, ...]:
    """Return the words behind mtp-export that give a command its options: those that are not the
    defaults, with absolute paths. without: options that are left out, as arguments are."""
    words = [name]
    for leaf in leaves_of(type(options)):
        value = _value(options, leaf)
        if value == leaf.field.default or leaf.option.is_argument or leaf.flag in without:
            continue
        value = value.absolute() if isinstance(value, Path) else value
        if leaf.is_switch:
            words.append(leaf.flag)
            continue
        for each in value if isinstance(value, list) else (value,):
            words += [leaf.flag, str(each)]
    return tuple(words)


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
