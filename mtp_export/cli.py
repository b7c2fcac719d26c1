"""Entry point of the program mtp-export, and its exit codes.

Commands are imported where they are run, so that Ctrl-C ends both alike: what this module itself
imports must be light.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mtp_export.commands.failures import failure_of
from mtp_export.commands.standard_streams import guarded_streams


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code; a failure is one paragraph on stderr."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    with guarded_streams():
        sys.exit(_exit_code(given))


def _exit_code(given: list[str]) -> int:
    try:
        from mtp_export.commands.program import run

        try:
            return run([argument for argument in given if argument != "--debug"])
        finally:
            sys.stdout.flush()
    except SystemExit:
        raise
    except BaseException as error:
        if "--debug" in given:
            import traceback

            traceback.print_exc()
        failure = failure_of(error)
        print(f"mtp-export: error: {failure.message}", file=sys.stderr)
        return failure.exit_code
