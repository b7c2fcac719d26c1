"""Lines that tell whoever watches a server's terminal what it does while it is busy."""

from __future__ import annotations

from dataclasses import dataclass

from mtp_runtime.engine import Engine

SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True)
class _Counts:
    """Totals of an engine at some time."""

    output_tokens: int
    drafted: int
    accepted: int

    @classmethod
    def of(cls, engine: Engine) -> _Counts:
        totals = engine.totals
        return cls(totals.output_tokens, sum(totals.drafted), sum(totals.accepted))


class Activity:
    """Requests and rates of an engine since the last line."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._last = _Counts.of(engine)

    def line(self, seconds: float) -> str | None:
        """Return the requests and the rates of so many seconds; None where there was nothing to
        do."""
        engine, last, now = self._engine, self._last, _Counts.of(self._engine)
        self._last = now
        tokens, drafted = now.output_tokens - last.output_tokens, now.drafted - last.drafted
        if not (tokens or engine.has_work):
            return None
        words = (
            f"{engine.running} running, {engine.waiting} waiting, {tokens / seconds:.0f} tokens/s"
        )
        if not drafted:
            return words
        return f"{words}, acceptance {(now.accepted - last.accepted) / drafted:.2f}"
