"""Watch of the ranks over each other: one that ends, hangs or is cut off ends all others soon.

A rank that waits in a collective notices by itself when the other end of its connection closes. One
that waits for another that is neither dead nor alive, or is idle, would not: so each counts up a
number in the store that all of them share, and looks at the others'.
"""

from __future__ import annotations

import os
import threading
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from mtp_checkpoints.errors import IoError

BEAT_SECONDS = 1.0
SILENT_BEATS = 20  # own ones, so that processes that were all suspended together go on
_STDERR, _WRITE_SECONDS = 2, 5.0


class Watch:
    """A thread that ends this process when another rank falls silent."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Start, when all ranks are there."""
        self._store.set_timeout(timedelta(seconds=SILENT_BEATS * BEAT_SECONDS))
        self._store.set(_key(self._rank), "0")
        self._thread.start()

    def stop(self) -> None:
        """End the watch: what the others do from now on is their own."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(2 * BEAT_SECONDS)

    def _run(self) -> None:
        others = [_key(rank) for rank in range(self._size) if rank != self._rank]
        seen = dict.fromkeys(others, (b"", 0))
        beats = 0
        while not self._stop.wait(BEAT_SECONDS):
            beats += 1
            try:
                self._store.set(_key(self._rank), str(beats))
                values = self._store.multi_get(others)
            except RuntimeError as error:
                self._end(f"no answer from the run's store: {str(error).partition(chr(10))[0]}")
                return
            for key, value in zip(others, values, strict=True):
                if value != seen[key][0]:
                    seen[key] = value, beats
                elif beats - seen[key][1] > SILENT_BEATS:
                    self._end(f"no sign of rank {key} for {SILENT_BEATS * BEAT_SECONDS:.0f} s")
                    return

    def _end(self, found: str) -> None:
        if self._stop.wait(BEAT_SECONDS):  # the run ended while this rank looked
            return
        _end_process(
            IoError(
                "Another process of this run has ended or cannot be reached",
                where=f"rank {self._rank} of {self._size}",
                found=found,
                todo="Its own message says why; start all of them again",
            )
        )


def _key(rank: int) -> str:
    return str(rank)


def _end_process(error: IoError) -> None:
    """End the process at once: its main thread may wait for ever.

    A server's standard error passes texts on later than that, so it is written past; nobody may
    read it, which is not waited for either.
    """
    text = f"mtp-export: error: {error}\n".encode(errors="backslashreplace")
    written = threading.Thread(target=os.write, args=(_STDERR, text), daemon=True)
    written.start()
    written.join(_WRITE_SECONDS)
    os._exit(error.exit_code)
