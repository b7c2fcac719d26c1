"""A server that watches itself: python -m serve.watched OPTIONS runs mtp-export serve with them,
and writes at its end, as JSON, for how long its event loop and its other threads were kept.

Times are of computing, so that a busy machine lengthens none of them: of one callback of the event
loop, what its thread computed; of a thread that wants the interpreter's lock, what the process
computed while it waited for that, without what it waited for a processor. Threads that want it take
short turns meanwhile, so that this is what one of them kept it for, and no queue of them.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from mtp_export.cli import main

WATCH = signal.SIGUSR1  # begins it, once the server runs
_NAP_SECONDS = 0.002
_TURN_SECONDS = 0.0005  # Python's own is 0.005


class Watch:
    """The longest times so far, the callback that took so long, and where the threads were when
    the lock that was kept so long was free again."""

    def __init__(self) -> None:
        self.callback_seconds = 0.0
        self.callback = ""
        self.lock_seconds = 0.0
        self.lock: list[str] = []

    def begin(self, *signal_and_frame: object) -> None:
        """Measure every callback of event loops, and what threads wait for, from here on."""
        run = asyncio.Handle._run

        def measured(handle: asyncio.Handle) -> None:
            start = time.thread_time()
            run(handle)
            seconds = time.thread_time() - start
            if seconds > self.callback_seconds:
                self.callback_seconds, self.callback = seconds, repr(handle)[:300]

        asyncio.Handle._run = measured  # type: ignore[method-assign]
        sys.setswitchinterval(_TURN_SECONDS)
        threading.Thread(target=self._want_lock, daemon=True).start()

    def _want_lock(self) -> None:
        """Want the lock every few milliseconds."""
        account = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        waited = int(account.read_text().split()[1])
        while True:
            start, computed, waited_before = time.monotonic(), time.process_time(), waited
            time.sleep(_NAP_SECONDS)
            late = time.monotonic() - start - _NAP_SECONDS
            waited = int(account.read_text().split()[1])
            late -= (waited - waited_before) / 1e9
            seconds = min(late, time.process_time() - computed)
            if seconds > self.lock_seconds:
                self.lock_seconds, self.lock = seconds, _where()


def _where() -> list[str]:
    """Return where the other threads are."""
    own, frames = threading.get_ident(), sys._current_frames()
    return ["".join(traceback.format_stack(f, 4)) for thread, f in frames.items() if thread != own]


def serve() -> None:
    """Serve until the end, and tell."""
    watch = Watch()
    signal.signal(WATCH, watch.begin)
    try:
        main(["serve", *sys.argv[1:]])
    finally:
        print(json.dumps(vars(watch)), flush=True)


if __name__ == "__main__":
    serve()
