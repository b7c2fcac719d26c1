"""Stages of a report: each yields rows until its share of the time is used up, and what is there is
written after every row, so that a run that is cut keeps what it has."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class OutOfTime(Exception):
    """A row that was not there when the report's time ended."""


@dataclass(frozen=True)
class Stage:
    """A name, a weight in the division of the time, and the rows, the most wanted first.

    done takes the rows when no more come, whether all were made or not.
    """

    name: str
    weight: float
    rows: Callable[[], Iterator[Row]]
    done: Callable[[list[Row]], None] = lambda rows: None


@dataclass
class Report:
    """Facts and rows by stage, and the file that they are kept in."""

    path: Path
    facts: dict[str, Any]
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)

    def rows(self, stage: str) -> list[Row]:
        """Return a stage's rows, none of one that has not run."""
        return list(self.stages.get(stage, {}).get("rows", ()))

    @property
    def failed(self) -> list[str]:
        return [name for name, stage in self.stages.items() if stage["error"]]

    def save(self) -> None:
        """Write the file anew, whole at every moment."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".tmp")
        beside.write_text(json.dumps(self.facts | {"stages": self.stages}, indent=1) + "\n")
        beside.replace(self.path)

    def run(
        self,
        stages: Sequence[Stage],
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Run the stages in order; what one leaves of its time goes to those after it."""
        end = clock() + seconds
        for number, stage in enumerate(stages):
            weights = sum(later.weight for later in stages[number:])
            start = clock()
            deadline = start + max(0.0, end - start) * stage.weight / weights
            print(f"{stage.name}: {deadline - start:.0f} s", flush=True)
            kept: dict[str, Any] = {"rows": [], "complete": False, "error": None}
            self.stages[stage.name] = kept
            try:
                kept["complete"] = self._collect(stage, kept["rows"], deadline, clock)
                stage.done(kept["rows"])
            except Exception:  # the others still tell something
                kept["error"] = traceback.format_exc()
                print(kept["error"], flush=True)
            kept["seconds"] = clock() - start
            self.save()

    def _collect(
        self, stage: Stage, rows: list[Row], deadline: float, clock: Callable[[], float]
    ) -> bool:
        """Add rows until there are no more (True) or the time is over."""
        made = stage.rows()
        try:
            while clock() < deadline:
                try:
                    row = next(made, None)
                except OutOfTime:
                    return False
                if row is None:
                    return True
                rows.append(row)
                show(row)
                self.save()
            return False
        finally:
            made.close()  # type: ignore[attr-defined]


def show(row: Row) -> None:
    """Print a row in one line."""
    cells = (
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in row.items()
    )
    print("  " + " ".join(cells), flush=True)
