"""Progress as people see it: a bar on a terminal, lines in a log, nothing when quiet."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import re
import struct
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cases import export
from mtp_checkpoints.errors import Interrupted
from mtp_export.cli import main
from mtp_export.commands.output import remark, status
from mtp_export.commands.progress_bar import CountBar, count_bar, loading_bars, progress_bar
from mtp_runtime.models.load import LoadOptions, load_model
from terminal.screen import Seen


class Screen:
    """A terminal and what was written on it."""

    def __init__(self, columns: int = 100) -> None:
        self.shown = b""
        self._ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.file = os.fdopen(theirs, "w")
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # Linux's way to say that the other end was closed
            while data := os.read(self._ours, 4096):
                self.shown += data

    def close(self) -> str:
        self.file.close()
        self._reader.join()
        os.close(self._ours)
        return self.shown.decode()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The seconds that tqdm believes have passed."""
    now = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    yield now


def test_a_remark_goes_above_what_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a bar nor a status has it on its own line."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Screen()
    with contextlib.redirect_stderr(screen.file):
        with progress_bar("export", 10_000_000) as progress:
            progress(4_000_000)
            remark("Tried again.")
            progress(6_000_000)
        with status("Loading"):
            while b"Loading" not in screen.shown:
                time.sleep(0.01)
            remark("Compiling the kernels.")
        remark("The end.")
    lines = Seen(0, screen.close()).lines
    remarks = ["Tried again.", "Compiling the kernels.", "The end."]
    assert [line for line in lines if line in remarks] == remarks


def test_a_bar_that_waits_is_not_drawn_before_the_work(clock: list[float]) -> None:
    """As of a run that is refused."""
    screen, log = Screen(), io.StringIO()
    for file in (screen.file, log):
        with (
            contextlib.redirect_stderr(file),
            contextlib.suppress(InterruptedError),
            progress_bar("export", 10_000_000, waits=True),
        ):
            raise InterruptedError
    assert (screen.close(), log.getvalue()) == ("", "")
    screen = Screen()
    with (
        contextlib.redirect_stderr(screen.file),
        pytest.raises(Interrupted, match="40 %"),
        progress_bar("export", 10_000_000, waits=True) as progress,
    ):
        progress(0)
        progress(4_000_000)
        raise KeyboardInterrupt
    assert "export: " in screen.close()


def test_ctrl_c_tells_how_much_is_done(clock: list[float]) -> None:
    with (
        pytest.raises(Interrupted, match=r"Interrupted at 45 %\."),
        contextlib.redirect_stderr(io.StringIO()),
        progress_bar("export", 10_000_000) as progress,
    ):
        progress(4_599_999)
        raise KeyboardInterrupt


def test_a_log_gets_a_line_every_few_seconds_and_one_at_the_end(clock: list[float]) -> None:
    log = io.StringIO()
    with contextlib.redirect_stderr(log), progress_bar("export", 10_000_000) as progress:
        for _ in range(10):
            clock[0] += 2
            progress(1_000_000)
    lines = log.getvalue().splitlines()
    assert [line.rpartition(", ")[0] for line in lines] == [
        "export: 30%, 3.00MB of 10.0MB, 500kB/s",
        "export: 60%, 6.00MB of 10.0MB, 500kB/s",
        "export: 90%, 9.00MB of 10.0MB, 500kB/s",
        "export: 100%, 10.0MB of 10.0MB, 500kB/s",
    ]
    left = [int(re.findall(r"00:(\d\d) left$", line)[0]) for line in lines]
    assert left == pytest.approx([14, 8, 2, 0], abs=1)  # tqdm cuts the seconds off
    assert "\r" not in log.getvalue()


def test_the_last_line_of_a_count_is_written_once(clock: list[float]) -> None:
    """Also where it was due when the count was reached."""
    log = io.StringIO()
    with contextlib.redirect_stderr(log):
        bar = CountBar("train", 4, "steps")
        for _ in range(4):
            clock[0] += 4
            bar.advance(1, "loss 2.0")
    counts = [line.partition(",")[0] for line in log.getvalue().splitlines()]
    assert counts == ["train: 50%", "train: 100%"]


def test_a_log_ends_where_a_failure_stopped_the_run(clock: list[float]) -> None:
    log = io.StringIO()
    with (
        contextlib.redirect_stderr(log),
        contextlib.suppress(ValueError),
        progress_bar("export", 4_000_000) as progress,
    ):
        progress(1_000_000)
        clock[0] += 1
        raise ValueError
    assert log.getvalue() == "export: 25%, 1.00MB of 4.00MB, 1.00MB/s, 00:03 left\n"


def test_a_terminal_gets_a_bar(clock: list[float]) -> None:
    screen = Screen()
    with contextlib.redirect_stderr(screen.file), progress_bar("export", 4_000_000) as progress:
        clock[0] += 1
        progress(1_000_000)
        clock[0] += 3
        progress(3_000_000)
    states = screen.close().rstrip().split("\r")
    quarter = r"export:  25%\|█+.*\| 1\.00M of 4\.00MB, 1\.00MB/s, 00:0[23] left"
    assert any(re.fullmatch(quarter, state) for state in states)
    assert "100%|█" in states[-1]
    assert "| 4.00M of 4.00MB" in states[-1]
    assert all(len(state) <= 100 for state in states)


def test_a_narrow_terminal_gets_the_time_left_first(clock: list[float]) -> None:
    screen = Screen(columns=40)
    title = "acceptance, with faults undone"
    with contextlib.redirect_stderr(screen.file), count_bar(title, 40, "faults") as advance:
        clock[0] += 5
        advance(10)
    states = screen.close().rstrip().split("\r")
    assert any(state.startswith(" 25%, 00:15 left: acceptance") for state in states), states
    assert all(len(state) <= 40 for state in states)


def test_a_log_has_no_line_of_what_is_counted_at_once(clock: list[float]) -> None:
    log = io.StringIO()
    with contextlib.redirect_stderr(log):
        for title, seconds in (("at once", 4), ("slow", 6)):
            with count_bar(title, 4, "turns") as advance:
                for _ in range(2):
                    clock[0] += seconds / 2
                    advance(1)
                clock[0] += seconds / 2
                advance(2)
    counts = [line.partition(",")[0] for line in log.getvalue().splitlines()]
    assert counts == ["at once: 100%", "slow: 50%", "slow: 100%"]


def test_a_loaded_model_is_shown_by_its_bytes(pristine: Path) -> None:
    screen = Screen()
    with contextlib.redirect_stderr(screen.file), loading_bars():
        load_model(pristine, LoadOptions())
    stored = sum(shard.stat().st_size for shard in pristine.glob("*.safetensors"))
    states = screen.close().split("\r")
    bars = [state for state in states if state.startswith(f"Loading {pristine.name}: ")]
    (size,) = {float(re.findall(r"of ([\d.]+)MB", state)[0]) for state in bars}
    assert size == pytest.approx(stored / 1e6, rel=0.2)
    for quiet in (True, False):
        log = io.StringIO()
        with contextlib.redirect_stderr(log), loading_bars(quiet=quiet):
            load_model(pristine, LoadOptions(on_demand=not quiet))
        assert log.getvalue() == ""


@pytest.mark.parametrize(("total_bytes", "quiet"), [(10, True), (0, False)])
def test_quiet_and_no_work_show_nothing(total_bytes: int, quiet: bool) -> None:
    log = io.StringIO()
    with (
        contextlib.redirect_stderr(log),
        progress_bar("export", total_bytes, quiet=quiet) as progress,
    ):
        progress(10)
    assert log.getvalue() == ""


def test_threads_share_a_callback() -> None:
    log = io.StringIO()
    with contextlib.redirect_stderr(log), progress_bar("export", 8_000) as progress:
        workers = [
            threading.Thread(target=lambda: [progress(1) for _ in range(1000)]) for _ in range(8)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert "8.00kB of 8.00kB" in log.getvalue().splitlines()[-1]


def test_an_export_draws_on_stderr_and_keeps_stdout_clean(pristine: Path, output: Path) -> None:
    screen, out = Screen(), io.StringIO()
    arguments = ["--input-dir", str(pristine), "--output-dir", str(output), "--json"]
    with (
        contextlib.redirect_stderr(screen.file),
        contextlib.redirect_stdout(out),
        pytest.raises(SystemExit),
    ):
        main(arguments)
    assert "export: 100%|" in screen.close()
    assert json.loads(out.getvalue())["parts"]["mtp"]["tensors"] == 52


def test_a_quiet_export_draws_nothing_on_a_terminal(pristine: Path, output: Path) -> None:
    screen = Screen()
    arguments = ["--input-dir", str(pristine), "--output-dir", str(output), "--quiet"]
    with contextlib.redirect_stderr(screen.file), pytest.raises(SystemExit):
        main(arguments)
    assert screen.close() == ""


def test_an_export_logs_lines(pristine: Path, output: Path) -> None:
    outcome = export(pristine, output)
    assert outcome.err.startswith("export: 100%, ")
    assert outcome.err.count("\n") == 1
