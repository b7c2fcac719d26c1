"""Cases in forked children: the parent has imported everything, a child has limits and a clock."""

from __future__ import annotations

import faulthandler
import itertools
import multiprocessing
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from fuzz.clock import ChildClock
from fuzz.inputs import Key, Verdict, command_of
from fuzz.sandbox import WATCH, Finding, place_in

MAX_SECONDS = 5.0  # of one input, by the child's own clock
_BUSY = 20  # times as long as that at most it may take on a busy machine
_POLL_SECONDS = 0.2
# Beyond what the parent has. Each thread may reserve 128 MB of it; the resident limit is far lower.
_ADDRESS_SPACE_BYTES = 6_000_000_000
_BATCH = 20
_STACKS = "stacks"  # file that a hanging child writes the stacks of its threads to
_ASK = signal.SIGUSR1  # by which it is asked for them
_FORK = multiprocessing.get_context("fork")
Judge = Callable[[Key, Path], Verdict]


def verdicts(keys: Iterator[Key], judge: Judge, folder: Path) -> Iterator[Verdict]:
    """Yield the verdict of every key, in order. judge takes a key and an empty folder's path.

    A hang is judged once more, by another child: the machine may have been busy.
    """
    while batch := list(itertools.islice(keys, _BATCH)):
        while batch:
            done = 0
            with closing(_of_one_child(batch, judge, folder)) as found:
                for verdict in found:
                    done += 1
                    if _hangs(verdict):
                        break
                    yield verdict
            if _hangs(verdict):  # its child has ended: it could still write to the folder
                yield from list(_of_one_child([verdict.key], judge, folder))
            batch = batch[done:]


def _hangs(verdict: Verdict) -> bool:
    return verdict.finding is not None and verdict.finding.oracle == "hang"


def _of_one_child(keys: Sequence[Key], judge: Judge, folder: Path) -> Generator[Verdict]:
    """Yield verdicts until the child has done all, had a finding, hung or died."""
    shutil.rmtree(folder, ignore_errors=True)  # what a killed child left
    folder.mkdir(parents=True)
    here, there = _FORK.Pipe(duplex=False)
    child = _FORK.Process(target=_work, args=(keys, judge, folder, there), daemon=True)
    child.start()
    there.close()
    try:
        for key in keys:
            verdict = _received(here, child, key) or _ended(child, key, folder / _STACKS)
            yield verdict
            if verdict.finding is not None:
                return
    finally:
        child.kill()
        child.join()
        here.close()


def _received(here: Connection, child: BaseProcess, key: Key) -> Verdict | None:
    """Return the next verdict; None from a child that hangs or died."""
    assert child.pid is not None
    clock, end = ChildClock(child.pid), time.monotonic() + _BUSY * MAX_SECONDS
    with suppress(EOFError):
        while clock.seconds < MAX_SECONDS and time.monotonic() < end:
            if here.poll(_POLL_SECONDS):
                verdict = here.recv()
                assert isinstance(verdict, Verdict) and verdict.key == key
                return verdict
    return None


def _ended(child: BaseProcess, key: Key, stacks: Path) -> Verdict:
    """Return the verdict of a case whose child hangs, with its threads' stacks, or died."""
    child.join(0.5)
    if child.exitcode is None:
        stack = _stacks_of(child, stacks)
        finding = Finding("hang", place_in(stack), f"no end in {MAX_SECONDS:.0f} s\n{stack[:4000]}")
    elif child.exitcode == 0:  # it was done just now, with all of its cases
        finding = Finding("hang", "an end too late", f"no end in {MAX_SECONDS:.0f} s")
    else:
        finding = Finding("death", f"exit code {child.exitcode}")
    name = command_of(key)
    return Verdict(key, command=name, mutators=(), codes=(), seconds=MAX_SECONDS, finding=finding)


def _stacks_of(child: BaseProcess, stacks: Path) -> str:
    """Return the stacks of a child's threads, which it writes when it is asked to."""
    assert child.pid is not None
    os.kill(child.pid, _ASK)
    text = ""
    for _ in range(100):
        time.sleep(0.05)
        before, text = text, stacks.read_text()
        if text and text == before:
            break
    return text


def _work(keys: Sequence[Key], judge: Judge, folder: Path, there: Connection) -> None:
    own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = own + _ADDRESS_SPACE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The end, should nobody watch any more.
    signal.alarm(int(_BUSY * MAX_SECONDS * (len(keys) + 1)))
    WATCH.install()
    with (folder / _STACKS).open("w") as stacks:
        faulthandler.register(_ASK, file=stacks)
        for number, key in enumerate(keys):
            verdict = judge(key, folder / str(number))
            there.send(verdict)
            if verdict.finding is not None:
                break
    there.close()
    os._exit(0)
