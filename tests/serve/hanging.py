"""Servers of which a part hangs: they run mtp-export with these arguments."""

from __future__ import annotations

import sys
import threading

from forked import program
from mtp_runtime.engine import Engine
from mtp_runtime.tokenizer import Tokenizer


def hanging_engine(*arguments: object) -> None:
    """Run one of which a step never ends."""
    real = Engine.step

    def step(engine: Engine) -> None:
        if threading.current_thread().name == "engine":
            _hang()
        real(engine)

    Engine.step = step  # type: ignore[method-assign]
    program(*arguments)


def hanging_tokenizer(*arguments: object) -> None:
    """Run one that tokenizes a prompt for ever."""
    Tokenizer.encode = _hang  # type: ignore[method-assign, assignment]
    program(*arguments)


def _hang(*given: object, **more: object) -> None:
    print("hangs", file=sys.stderr, flush=True)
    while True:
        pass


HANGING = {"engine": hanging_engine, "tokenizer": hanging_tokenizer}
