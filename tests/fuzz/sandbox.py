"""Folder in which one input is run, and what the program must not do whatever it reads."""

from __future__ import annotations

import os
import re
import resource
import stat
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cases import Outcome, run_program
from fuzz.mutators.special_files import SECRET

EXIT_CODES = (0, 2, 3, 4, 5, 6, 7, 8)
MAX_GROWTH_BYTES = 650_000_000  # of an input; with the program itself 1 GB
_MAX_MESSAGE = 2500  # characters
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CHANGES = {  # audit events, and which of their arguments are paths, each with its folder's number
    "os.remove": ((0, 1),),
    "os.mkdir": ((0, 2),),
    "os.rmdir": ((0, 1),),
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((1, 3),),
    "os.symlink": ((1, 2),),
    "os.truncate": ((0, None),),
    "os.chmod": ((0, 2),),
    "os.chown": ((0, 3),),
    "os.utime": ((0, 3),),
}
_RUNS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect")
_CACHES = re.compile("/__pycache__/|/mtp-export/kernels/")  # of bytecode, and of compiled kernels
Tree = dict[str, tuple[Any, ...]]


class Finding(Exception):
    """A thing that must not happen: the oracle that saw it, its place, and the details.

    Findings of one oracle at one place are one fault.
    """

    def __init__(self, oracle: str, place: str, details: str = "") -> None:
        super().__init__(oracle, place, details)
        self.oracle, self.place, self.details = oracle, place, details


@dataclass
class Sandbox:
    """One input's folder, with the copy to be damaged, and what commands did there."""

    folder: Path
    codes: list[tuple[str, int]] = field(default_factory=list)
    asks_servers: bool = False  # of this machine, which is allowed then

    @property
    def input(self) -> Path:
        return self.folder / "input"

    @property
    def source(self) -> Path:
        return self.input / "source"

    @property
    def bundle(self) -> Path:
        return self.input / "bundle"

    @property
    def output(self) -> Path:
        return self.folder / "output"

    def run(self, *arguments: object) -> Outcome:
        """Run the program; its exit must be documented and its message short and whole."""
        WATCH.begin(self.folder, loopback=self.asks_servers)
        outcome = run_program(*arguments)
        seen = WATCH.end()
        command = next((str(a) for a in arguments if not str(a).startswith("-")), "")
        name = command if "/" not in command else "export"
        self.codes.append((name, outcome.code))
        if seen:
            raise Finding("outside", name, "\n".join(seen))
        _check_exit(outcome, arguments)
        return outcome


def _check_exit(outcome: Outcome, arguments: tuple[object, ...]) -> None:
    if outcome.code == 1:
        again = run_program(*arguments, "--debug")
        text = f"{again.err[-6000:]}\nAt first: {outcome.err[-1000:]}"
        raise Finding("internal error", _place_of(again.err), text)
    shown = " ".join(map(str, arguments))
    if outcome.code not in EXIT_CODES:
        raise Finding("exit", f"code {outcome.code}", f"{shown}\n{outcome.err[-3000:]}")
    if "Out of memory" in outcome.err:
        raise Finding("memory", outcome.err[:60], outcome.err[-3000:])
    if outcome.code in (0, 7):
        return
    message = outcome.err
    if not message.startswith("mtp-export: error: ") or message.count("\n") != 1:
        raise Finding("message", "no single line", f"{shown}\n{message[:3000]}")
    if len(message) > _MAX_MESSAGE:
        raise Finding("message", f"too long: {message[:60]}", f"{shown}\n{len(message)} characters")


def _place_of(error: str) -> str:
    """Return the program's innermost place in a traceback, and the exception."""
    lines = [line for line in error.splitlines() if line and not line[0].isspace()]
    raised = next((line for line in reversed(lines) if not line.startswith("mtp-export")), "?")
    return f"{place_in(error)} {raised.partition(':')[0]}"


def place_in(stack: str) -> str:
    """Return the innermost place of the program that a traceback or a dump of stacks names."""
    files = [line.strip() for line in stack.splitlines() if line.strip().startswith("File ")]
    own = [line for line in files if re.search(r"/mtp_(export|runtime|checkpoints|kernels)/", line)]
    newest_last = "most recent call last" in stack
    chosen = (own or files or ["?"])[-1 if newest_last else 0]
    return re.sub(r'File "(.*/)?(mtp_)', r"\2", chosen)[:100]


def tree_of(folder: Path) -> Tree:
    """Return type, mode, time and content of everything below a folder, links as links."""
    found: Tree = {}
    for path in sorted(folder.rglob("*")):
        facts = path.lstat()
        content: Any = None
        if stat.S_ISLNK(facts.st_mode):
            content = os.readlink(path)
        elif stat.S_ISREG(facts.st_mode):
            content = path.read_bytes() if facts.st_size < 10_000_000 else facts.st_size
        time = facts.st_mtime_ns if not stat.S_ISDIR(facts.st_mode) else None
        found[str(path.relative_to(folder))] = (facts.st_mode, time, content)
    return found


def check_same(before: Tree, after: Tree, what: str) -> None:
    """Raise a Finding when anything below a folder changed."""
    names = [n for n in sorted({*before, *after}) if before.get(n) != after.get(n)]
    if names:
        raise Finding("source changed", what, ", ".join(names[:10]))


def check_no_secret(folder: Path) -> None:
    """Raise a Finding when a file below a folder holds what lies outside the input."""
    secret = SECRET.read_bytes().strip()
    for path in folder.rglob("*"):
        if path.is_symlink():
            raise Finding("leak", "a link in the output", f"{path} -> {os.readlink(path)}")
        if path.is_file() and secret in path.read_bytes():
            raise Finding("leak", "a file from outside the checkpoint", str(path))


class Watch:
    """Record of what a command does outside its folder, by Python's audit events, and of the memory
    that a child takes. The parent, which may compile kernels, is not watched."""

    def __init__(self) -> None:
        self._folder: str | None = None
        self._seen: list[str] = []
        self._loopback = False
        self._inherited_bytes: int | None = None

    def install(self) -> None:
        """Start to listen, for the rest of this child's life."""
        sys.addaudithook(self._hear)
        self._inherited_bytes = _peak_bytes()

    def check_memory(self) -> None:
        """Raise a Finding when this child ever took more memory than an input may."""
        if self._inherited_bytes is None:
            return
        growth = _peak_bytes() - self._inherited_bytes
        if growth > MAX_GROWTH_BYTES:
            raise Finding("memory", "resident", f"{growth / 1e6:.0f} MB more")

    def begin(self, folder: Path, *, loopback: bool) -> None:
        """Record from now on; everything in the folder is allowed, and this machine's servers."""
        self._loopback = loopback
        self._folder, self._seen = f"{os.path.realpath(folder)}/", []

    def end(self) -> list[str]:
        """Stop, and return what was seen."""
        self._folder = None
        return self._seen

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._folder is None:
            return
        if event == "open":
            path, mode, flags = arguments
            if flags is not None and flags & _WRITING and not isinstance(path, int):
                self._check(event, path, None, follows=not flags & os.O_NOFOLLOW)
        elif event in _CHANGES:
            for place, folder in _CHANGES[event]:
                below = None if folder is None else arguments[folder]
                self._check(event, arguments[place], below, follows=False)
        elif event in _RUNS and not (event == "socket.connect" and self._may_connect(arguments)):
            self._note(event, str(arguments[:2]))
        elif event == "exec" and getattr(arguments[0], "co_filename", "").startswith(self._folder):
            self._note(event, arguments[0].co_filename)

    def _may_connect(self, arguments: Any) -> bool:
        return self._loopback and arguments[1][0] in ("127.0.0.1", "::1")

    def _check(self, event: str, path: Any, folder: int | None, *, follows: bool) -> None:
        """Note a path outside the folder; follows: of a link at its end, where that leads."""
        if isinstance(path, int):
            return
        text = os.fsdecode(path)
        if folder not in (None, -1):
            text = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), text)
        folder_of, name = os.path.split(os.path.abspath(text))
        real = os.path.join(os.path.realpath(folder_of), name)
        if follows:
            real = os.path.realpath(real)
        inside = real.startswith(str(self._folder))
        if not inside and not _CACHES.search(f"{real}/") and real != "/dev/null":
            self._note(event, text)

    def _note(self, event: str, what: str) -> None:
        where = "".join(traceback.format_stack(limit=8)[:-3])
        self._seen.append(f"{event} {what}\n{where}")


def _peak_bytes() -> int:
    """Return the most memory that this process held; a fork begins with what its parent has."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


WATCH = Watch()
