"""Stages in processes of their own: what one does that fails, ends or hangs."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from stage_rows import dying, failing, good, hanging

from benchmarks.gpu_report.apart import rows_apart
from benchmarks.gpu_report.stages import OutOfTime, Report, Row, Stage


def apart(
    make: Callable[..., Iterator[Row]], *arguments: Any, later: float = 100.0, limit: float = 60.0
) -> Iterator[Row]:
    """Rows of a report that has 100 seconds left before the first, in which a process starts, and
    others later."""
    left = itertools.chain([100.0], itertools.repeat(later))
    return rows_apart(make, arguments, seconds_left=lambda: next(left), row_seconds=limit)


def test_rows_are_those_of_another_process() -> None:
    rows = list(apart(good, 3))
    assert [row["number"] for row in rows] == [0, 1, 2]
    (process,) = {row["process"] for row in rows}
    assert process != os.getpid() and not Path(f"/proc/{process}").exists()


def test_a_process_ends_with_its_stage() -> None:
    made = apart(good, 1000)
    process = next(made)["process"]
    made.close()  # type: ignore[attr-defined]
    assert not Path(f"/proc/{process}").exists()


def test_what_goes_wrong_is_said_and_costs_no_other(tmp_path: Path) -> None:
    """A row before it is kept, and a later stage runs."""
    stages = [
        Stage("failing", 1, partial(apart, failing)),
        Stage("dying", 1, partial(apart, dying)),
        Stage("good", 1, partial(apart, good, 2)),
    ]
    report = Report(tmp_path / "report.json", {})
    report.run(stages, 1000.0)
    assert [len(report.rows(stage.name)) for stage in stages] == [1, 1, 2]
    assert report.failed == ["failing", "dying"]
    assert "illegal memory access" in report.stages["failing"]["error"]
    assert "the process ended with code 7" in report.stages["dying"]["error"]


@pytest.mark.parametrize(
    ("later", "limit", "error"), [(100.0, 6.0, TimeoutError), (0.2, 100.0, OutOfTime)]
)
def test_a_hang_ends_with_the_time_of_its_row_or_of_the_report(
    later: float, limit: float, error: type[Exception]
) -> None:
    made = apart(hanging, later=later, limit=limit)
    process = next(made)["process"]
    with pytest.raises(error):
        next(made)
    assert not Path(f"/proc/{process}").exists()


def test_a_report_whose_time_ends_within_a_row_has_not_failed(tmp_path: Path) -> None:
    report = Report(tmp_path / "report.json", {})
    report.run([Stage("hanging", 1, partial(apart, hanging, later=0.2))], 1000.0)
    assert report.failed == [] and not report.stages["hanging"]["complete"]
    assert len(report.rows("hanging")) == 1
