"""Entry point of the program mtp-export.

It imports next to nothing itself, so that Ctrl-C ends the program alike while the commands are
imported and while one runs.
"""

from __future__ import annotations

import sys


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit with its code."""
    try:
        from mtp_export.commands.garbage import gc_paused, unfreeze_for_the_end

        with gc_paused():
            from mtp_export.commands.program import exit_code
        code = exit_code(sys.argv[1:] if arguments is None else arguments)
        unfreeze_for_the_end()
    except KeyboardInterrupt:
        from mtp_checkpoints.errors import Interrupted

        error = Interrupted()
        print(f"mtp-export: {error}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)


if __name__ == "__main__":
    main()
