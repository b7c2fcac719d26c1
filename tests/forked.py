"""Processes forked from one that has imported the program and computed nothing.

They start at once, where an interpreter of their own takes seconds to import torch and numba; and
no thread of another process is missing in them.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing.context import ForkServerContext
from multiprocessing.reduction import DupFd
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from typing import Any, TextIO

import pytest

ROOT = Path(__file__).resolve().parents[1]
# What commands, ranks, and runs that are killed import.
IMPORTED = [
    "bundle.commands",
    "faults.matrix",
    "mtp_export.commands.export",
    "mtp_export.commands.generate",
    "mtp_export.commands.program",
    "mtp_export.commands.quantize",
    "mtp_export.commands.serve",
    "mtp_export.commands.verify",
    "mtp_export.verify.decoding.stream",
    "mtp_export.verify.files.repair",
    "mtp_export.verify.report.verdict",
    "mtp_export.verify.weights.load_report",
    "mtp_kernels.decoder.compiled_cpu",
    "mtp_kernels.quantize.cpu",
    "mtp_kernels.quantize.cpu_rows",
    "mtp_runtime.llm",
    "mtp_runtime.parallel.join",
    "numba_ready",
    "pytest",
    "tokenizers",
]
# By trainings and calibrations alone, which run nightly: torch's part by optimizers.
IMPORTED_TO_TRAIN = ["mtp_export.tune.run", "torch._dynamo", "mtp_export.calibrate.run"]
# Variables of the tests' own environment that decide what the program prints.
OF_TERMINALS = (
    "NO_COLOR",
    "FORCE_COLOR",
    "TERM",
    "COLUMNS",
    "LINES",
    "TTY_COMPATIBLE",
    "COLORTERM",
)


def environment_of(added: Mapping[str, str]) -> dict[str, str]:
    """Return the tests' environment without what decides what the program prints, and with some
    variables added."""
    own = {name: value for name, value in os.environ.items() if name not in OF_TERMINALS}
    paths = [str(ROOT / name) for name in ("", "runtime", "checkpoints", "kernels")]
    return {**own, "PYTHONPATH": os.pathsep.join(paths), **added}


@cache
def forks() -> ForkServerContext:
    """Context of the processes that are forked; the one that they are forked from has started."""
    context = multiprocessing.get_context("forkserver")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tests")  # before other folders with a `cases`
        for name in OF_TERMINALS:
            patch.delenv(name, raising=False)
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        context.set_forkserver_preload(IMPORTED)
        multiprocessing.forkserver.ensure_running()
    return context


class Pipe:
    """A pipe that a forked process writes into; its texts come as they were written."""

    def __init__(self) -> None:
        reader, self._writer = os.pipe()
        self.reader = open(reader, errors="replace", newline="")  # noqa: SIM115 (closed on exit)

    def __enter__(self) -> TextIO:
        return self.reader

    def __exit__(self, *failure: object) -> None:
        self.reader.close()

    def read(self) -> str:
        """Return all that is written until its end."""
        with self.reader:
            return self.reader.read()

    def fileno(self) -> int:
        """Return the end that is written into."""
        return self._writer

    def close(self) -> None:
        """Leave that end to the process alone, whose end is then that of the texts."""
        os.close(self._writer)


class Descriptor:
    """A file descriptor that a forked process gets a copy of."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getstate__(self) -> Any:
        return DupFd(self.number)

    def __setstate__(self, copy: Any) -> None:
        self.number = copy.detach()


class Forked:
    """A function in a forked process, used as a Popen is.

    streams: stdin, stdout and stderr, by their descriptors or as a Pipe. There is nothing to read
    from 0; another terminal becomes the process's own, so that Ctrl-C reaches it as a signal.
    """

    def __init__(
        self,
        function: Callable[..., object],
        *arguments: object,
        streams: Sequence[int | Pipe] = (0, 1, 2),
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        pipes = {stream for stream in streams if isinstance(stream, Pipe)}
        numbers = [one.fileno() if isinstance(one, Pipe) else one for one in streams]
        variables = {**(os.environ if environment is None else environment)}
        with open(os.devnull) as nothing:
            given = [Descriptor(number or nothing.fileno()) for number in numbers]
            place = given, variables, folder or os.getcwd()
            self._process = forks().Process(target=_run, args=(place, function, arguments))
            self._process.start()
        for pipe in pipes:
            pipe.close()

    @property
    def pid(self) -> int:
        """Number of the process."""
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, minus the number of the signal that ended it, or None while it
        runs."""
        return self._process.exitcode

    def wait(self, seconds: float | None = None) -> int:
        """Wait for the end, and return the exit code; TimeoutExpired where it does not come."""
        self._process.join(seconds)
        code = self.poll()
        if code is None:
            raise TimeoutExpired(self._process.name, seconds or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, where it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


def _run(place: Any, function: Callable[..., object], arguments: Sequence[object]) -> None:
    """Call a function in this process, which becomes like one that was started for it."""
    streams, environment, folder = place
    for number, stream in enumerate(streams):
        os.dup2(stream.number, number)
        os.close(stream.number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.isatty(0):
        _own_terminal()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 (to the end)
    sys.stdout = open(1, "w", buffering=1 if os.isatty(1) else -1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    function(*arguments)


def _own_terminal() -> None:
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def completed(
    function: Callable[..., object],
    *arguments: object,
    environment: Mapping[str, str] | None = None,
) -> CompletedProcess[str]:
    """Run a function in a forked process to its end; return its exit code and what it wrote."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        streams = 0, out.fileno(), err.fileno()
        process = Forked(function, *arguments, streams=streams, environment=environment)
        code = process.wait()
        for file in (out, err):
            file.seek(0)
        return CompletedProcess(arguments, code, out.read(), err.read())


def script(path: Path, *arguments: object) -> None:
    """Run a Python file as a program."""
    sys.argv = [*map(str, (path, *arguments))]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


def program(*arguments: object) -> None:
    """Run mtp-export with these arguments, and exit with its code."""
    from mtp_export.cli import main

    sys.argv = ["mtp-export", *map(str, arguments)]
    main()
