"""Cases in forked children: the parent has imported everything, a child has limits and a clock."""

from __future__ import annotations

import faulthandler
import itertools
import multiprocessing
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from fuzz.inputs import Key, Verdict, command_of
from fuzz.sandbox import WATCH, Finding, place_in

MAX_SECONDS = 5.0  # of one input
_ADDRESS_SPACE_BYTES = 2_000_000_000  # beyond what the parent has; the resident limit is lower
_BATCH = 20
_STACKS = "stacks"  # file that a hanging child writes the stacks of its threads to
_FORK = multiprocessing.get_context("fork")
Judge = Callable[[Key, Path], Verdict]


def verdicts(keys: Iterator[Key], judge: Judge, folder: Path) -> Iterator[Verdict]:
    """Yield the verdict of every key, in order. judge takes a key and an empty folder's path."""
    while batch := list(itertools.islice(keys, _BATCH)):
        while batch:
            done = 0
            for verdict in _of_one_child(batch, judge, folder):
                done += 1
                yield _confirmed(verdict, judge, folder)
            batch = batch[done:]


def _confirmed(verdict: Verdict, judge: Judge, folder: Path) -> Verdict:
    """Return a verdict, and of a hang that of a second run: the machine may have been busy."""
    if verdict.finding is None or verdict.finding.oracle != "hang":
        return verdict
    return next(_of_one_child([verdict.key], judge, folder))


def _of_one_child(keys: Sequence[Key], judge: Judge, folder: Path) -> Iterator[Verdict]:
    """Yield verdicts until the child has done all, had a finding, hung or died."""
    shutil.rmtree(folder, ignore_errors=True)  # what a killed child left
    folder.mkdir(parents=True)
    here, there = _FORK.Pipe(duplex=False)
    child = _FORK.Process(target=_work, args=(keys, judge, folder, there), daemon=True)
    child.start()
    there.close()
    try:
        for key in keys:
            verdict = _received(here, key) or _ended(child, key, folder / _STACKS)
            yield verdict
            if verdict.finding is not None:
                return
    finally:
        child.kill()
        child.join()
        here.close()


def _received(here: Connection, key: Key) -> Verdict | None:
    """Return the next verdict; None from a child that hangs or died."""
    with suppress(EOFError):
        if here.poll(MAX_SECONDS):
            verdict = here.recv()
            assert isinstance(verdict, Verdict) and verdict.key == key
            return verdict
    return None


def _ended(child: multiprocessing.process.BaseProcess, key: Key, stacks: Path) -> Verdict:
    """Return the verdict of a case whose child hangs, with its threads' stacks, or died."""
    child.join(0.5)
    if child.exitcode is None:
        stack = stacks.read_text()
        finding = Finding("hang", place_in(stack), f"no end in {MAX_SECONDS:.0f} s\n{stack[:4000]}")
    else:
        finding = Finding("death", f"exit code {child.exitcode}")
    name = command_of(key)
    return Verdict(key, command=name, mutators=(), codes=(), seconds=MAX_SECONDS, finding=finding)


def _work(keys: Sequence[Key], judge: Judge, folder: Path, there: Connection) -> None:
    own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = own + _ADDRESS_SPACE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(int(MAX_SECONDS * (len(keys) + 1)))  # the end, should nobody watch any more
    WATCH.install()
    with (folder / _STACKS).open("w") as stacks:
        for number, key in enumerate(keys):
            faulthandler.dump_traceback_later(MAX_SECONDS * 0.9, file=stacks)
            verdict = judge(key, folder / str(number))
            faulthandler.cancel_dump_traceback_later()
            there.send(verdict)
            if verdict.finding is not None:
                break
    there.close()
    os._exit(0)
