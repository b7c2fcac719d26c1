"""Commands of the program, each imported when it runs, and the exit codes."""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from collections.abc import Sequence

import typer

from mtp_checkpoints.errors import Interrupted, UsageError
from mtp_checkpoints.suggestions import did_you_mean
from mtp_export.commands.compiling import announced_compiling
from mtp_export.commands.completion import (
    COMPLETION_OPTIONS,
    COMPLETION_VARIABLE,
    install_or_show,
)
from mtp_export.commands.failures import failure_json, failure_of, print_failure, without_promise
from mtp_export.commands.garbage import gc_paused
from mtp_export.commands.help_page import print_help
from mtp_export.commands.names import ALIASES, COMMANDS, names_of
from mtp_export.commands.output import logged_remarks
from mtp_export.commands.registry import after_interrupt, command_named, goes_on, program
from mtp_export.commands.standard_streams import guarded_streams
from mtp_export.options import Names

# Commands that torchrun may start: those that rank 0 runs while the other ranks follow it, and one
# that every rank runs.
FOLLOWED, RUN_BY_ALL = ("generate", "verify", "serve"), ("tune",)


def exit_code(arguments: Sequence[str]) -> int:
    """Run a command and return the program's exit code; a failure is one paragraph on stderr.

    With --json it is an object on stdout too, where the command printed none.
    """
    given = [argument for argument in arguments if argument != "--debug"]
    with guarded_streams() as out:
        try:
            try:
                with logged_remarks(), announced_compiling():
                    return _run(given)
            finally:
                sys.stdout.flush()
        except SystemExit:
            raise
        except BaseException as error:
            if "--debug" in arguments:
                traceback.print_exc()
            failure = failure_of(error, after_interrupt(given))
            if not goes_on(given):
                failure = without_promise(failure)
            said = "" if failure.exit_code == Interrupted.exit_code else "error: "
            print_failure(failure, said)
            if "--json" in given and not out.was_written:
                print(failure_json(failure), end="")
                sys.stdout.flush()
            return failure.exit_code


def _run(arguments: Sequence[str]) -> int:
    """Run a command and return its own exit code; of several processes the first one runs it, and
    the others follow, unless all run it.

    Raises UsageError for arguments that cannot be parsed, and what the command raises.
    """
    if "WORLD_SIZE" not in os.environ:  # no launcher: most commands need no torch
        return _run_alone(arguments)
    from mtp_runtime.parallel.join import joined
    from mtp_runtime.parallel.launcher import launched_process

    if launched_process(os.environ).is_alone:
        return _run_alone(arguments)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # what it warns of ends in one message
    command = next(iter(arguments), "")
    if command in RUN_BY_ALL:
        return _run_alone(arguments)
    if command not in FOLLOWED:
        raise UsageError(
            "This command runs in one process",
            expected=f"torchrun with {', '.join((*FOLLOWED, *RUN_BY_ALL))}",
            found=command or "no command",
            todo="Start it by itself; --share and --cluster divide what it does",
        )
    with joined() as group:
        if not group.is_first:
            group.follow()
            return 0
        with group.leading():
            return _run_alone(arguments, group)


def _run_alone(arguments: Sequence[str], group: object = None) -> int:
    """Run a command in this process; group: those that follow."""
    given = _as_command(arguments)
    if given and given[0].partition("=")[0] in COMPLETION_OPTIONS:
        install_or_show(given, program())
    if given in (["-h"], ["--help"]):  # the page needs no command, and each takes long to import
        print_help()
        return 0
    try:
        if given and given[0] in COMMANDS:
            words = f"mtp-export {given[0]}"
            with gc_paused():
                command = command_named(given[0])
            code = command.main(given[1:], standalone_mode=False, prog_name=words, obj=group)
        else:
            with gc_paused():
                whole = program()
            code = whole.main(given, standalone_mode=False, prog_name="mtp-export")
    except typer.TyperException as error:
        raise usage_error_of(error) from None
    except typer.Abort as error:  # which Typer makes of an EOFError
        raise error.__cause__ or KeyboardInterrupt from None
    if code == Interrupted.exit_code:  # Typer returns it for Ctrl-C
        raise KeyboardInterrupt
    return code if isinstance(code, int) else 0


def _as_command(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with help in its one form, and a command by its own name (UsageError for
    a command that there is not)."""
    first, *others = arguments or [""]
    if first == "help":
        return _as_command([*others[:1], "--help"])
    if not first and COMPLETION_VARIABLE not in os.environ:
        return ["--help"]
    name = ALIASES.get(first, first)
    if name and not name.startswith("-") and name not in COMMANDS:
        raise UsageError(f"{name!r} is no command", todo=_meant_by(name, others))
    return [name, *others] if name else []


def _meant_by(name: str, others: Sequence[str]) -> str:
    """Return what to do about a word that is no command: of a checkpoint's folder or address, and
    the argument behind it, an export."""
    if suggested := did_you_mean(name, names_of(Names.COMMAND)):
        return suggested
    if "://" in name or os.path.isdir(name):
        return f"Did you mean {shlex.join(['mtp-export', 'export', name, *(others or ['OUT'])])}?"
    return "See mtp-export help"


def usage_error_of(error: typer.TyperException) -> UsageError:
    """Return what Typer refuses as an error of this program: without words of its reader's, and
    with the option that was meant."""
    message = " ".join(error.format_message().split()).replace("Value error, ", "")
    context, wrong = getattr(error, "ctx", None), getattr(error, "option_name", None)
    if wrong is None or context is None:
        return UsageError(message)
    known = [name for parameter in context.command.params for name in parameter.opts]
    return UsageError(
        f"{context.command_path} has no option {wrong}",
        todo=did_you_mean(wrong, known) or f"See {context.command_path} --help",
    )
