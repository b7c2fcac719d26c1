"""Peak memory of the program, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def peak_bytes(
    source: Path | str, output: Path, *options: str, setup: str = "", **variables: str
) -> int:
    """Peak resident memory of an export, or of what code makes of its arguments before, with these
    variables alone in its environment.

    VmHWM begins with the program; ru_maxrss would remember the size of the process that forked.
    """
    code = (
        f"{setup}\n"
        "from pathlib import Path\n"
        "from mtp_export.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "lines = Path('/proc/self/status').read_text().splitlines()\n"
        "print(next(line.split()[1] for line in lines if line.startswith('VmHWM:')))"
    )
    arguments = ["--input-dir", str(source), "--output-dir", str(output), "--quiet", *options]
    environment = variables | {"PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    return int(done.stdout) * 1024
