"""The report of a GPU, on a device that Triton's interpreter plays: every stage, the table that it
leaves, its time, and what a stage that fails costs the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402

from benchmarks.common.attention_shapes import Shape, cache_count  # noqa: E402
from benchmarks.gpu_report import __main__ as program  # noqa: E402
from benchmarks.gpu_report import plots, tuning  # noqa: E402
from benchmarks.gpu_report.device import CudaDevice  # noqa: E402
from benchmarks.gpu_report.matrix import attention_shapes  # noqa: E402
from benchmarks.gpu_report.stages import Report, Row, Stage  # noqa: E402
from benchmarks.gpu_report.tuning import (  # noqa: E402
    Target,
    Tuner,
    candidates,
    compiled_bytes,
    fits,
    tables_of,
)
from mtp_kernels.gpu.devices import Gpu  # noqa: E402
from mtp_kernels.verify_attention.triton_tuning import Launch  # noqa: E402

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
STAGES = ["limits", "tune", "attention", "products", "quantize", "decode"]
HOPPER = Gpu("H", GPUTarget("cuda", 90, 32), 132, 232_448, "3.6.0")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, str]:
    """A whole report: its folder, its JSON, and what was printed."""
    folder = tmp_path_factory.mktemp("report")
    roots = (
        ROOT,
        ROOT / "runtime",
        ROOT / "checkpoints",
        ROOT / "kernels",
        HERE / "fake_peers",
    )
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "NUMBA_CACHE_DIR": os.environ.get("NUMBA_CACHE_DIR")
        or str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "mtp-export")),
        "PYTHONPATH": os.pathsep.join(map(str, roots)),
    }
    bundle = ROOT / "fixtures/glm4-moe-tiny"  # of few layers
    done = subprocess.run(
        [sys.executable, HERE / "interpreted_report.py", folder / "out", bundle],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, json.loads((folder / "out/report.json").read_text()), done.stdout


def test_every_stage_has_its_rows(written: tuple[Path, Any, str]) -> None:
    _, facts, _ = written
    assert facts["gpu"] == "Triton's interpreter" and facts["commit"] and facts["versions"]["torch"]
    stages = facts["stages"]
    assert list(stages) == STAGES
    for name, stage in stages.items():
        assert stage["complete"] and stage["error"] is None and stage["rows"], name
    assert {row["limit"] for row in stages["limits"]["rows"]} == {"copy", "product"}
    one, two, ragged, too_large = stages["attention"]["rows"]
    assert one["share_of_copy"] > 0 and one["tflops"] > 0 and "expanded_apart_us" not in one
    assert two["expanded_adjacent_us"] != two["expanded_apart_us"]
    assert {"sdpa_us", "flash_mla_us", "flashinfer_us"} <= one.keys()
    assert two["flashinfer_error"] == "NotImplementedError: one query a request"
    assert "sdpa_us" not in ragged and "bytes needed" in too_large["error"]
    assert {row["conversion"] for row in stages["quantize"]["rows"]} >= {"bf16 -> fp8"}
    products = stages["products"]["rows"]
    assert [row["form"] for row in products] == [
        "dense",
        *(2 * ["fp8 blocks", "int8", "int4 in 128"]),
    ]
    assert [row.get("experts") for row in products] == [None] * 4 + [3] * 3
    plain, drafted = stages["decode"]["rows"]
    assert (plain["speedup"], plain["drafts"], drafted["drafts"]) == (1.0, 0, 1)
    assert drafted["tokens_per_step"] > plain["tokens_per_step"] == 1.0


def test_the_tuned_table_serves_from_then_on(written: tuple[Path, Any, str]) -> None:
    folder, facts, printed = written
    rows = facts["stages"]["tune"]["rows"]
    broken = [row for row in rows if row["launch"]["rows"] == 24]
    assert broken and all(row["us"] is None and row["error"] for row in broken)
    (kept,) = (folder / "cache/mtp-export/gpu").iterdir()
    assert kept.read_text() == (folder / "out" / kept.name).read_text()
    table = json.loads(kept.read_text())["tables"]["verify_attention"]["16 bit"]
    first = next(row["launch"] for row in rows if row["target_rows"] == 16)
    assert table[0] == first
    chosen = printed.rpartition("chosen")[2]
    assert chosen.count("Launch") == len(table) and f"tokens={first['tokens']}" in chosen


def test_plots_are_drawn(written: tuple[Path, Any, str]) -> None:
    for name in ("attention", "decode", "quantize"):
        assert (written[0] / "out" / f"{name}.png").stat().st_size > 1000


class Clock:
    """Seconds that pass when a row is made."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def rows(self, seconds: float, count: int = 1000) -> Callable[[], Iterator[Row]]:
        def make() -> Iterator[Row]:
            for number in range(count):
                self.now += seconds
                yield {"number": number}

        return make


def test_stages_keep_to_their_shares_of_the_time(tmp_path: Path) -> None:
    """Time that the first leaves goes to the others, by their weights; each ends with a row."""
    clock, report = Clock(), Report(tmp_path / "report.json", {})
    stages = [
        Stage("short", 5, clock.rows(1.0, count=10)),
        Stage("long", 2, clock.rows(1.0)),
        Stage("longer", 3, clock.rows(1.0)),
    ]
    report.run(stages, 100.0, clock)
    assert [len(report.rows(stage.name)) for stage in stages] == [10, 36, 54]
    assert [stage["complete"] for stage in report.stages.values()] == [True, False, False]


def test_a_stage_that_fails_costs_no_other(tmp_path: Path) -> None:
    def broken() -> Iterator[Row]:
        yield {"number": 0}
        raise RuntimeError("out of memory")

    clock, report = Clock(), Report(tmp_path / "report.json", {"gpu": "none"})
    done: list[int] = []
    stages = [
        Stage("broken", 1, broken, lambda rows: done.append(len(rows))),
        Stage("whole", 1, clock.rows(1.0, 3), lambda rows: done.append(len(rows))),
    ]
    report.run(stages, 100.0, clock)
    assert report.failed == ["broken"] and done == [3]
    kept = json.loads((tmp_path / "report.json").read_text())
    assert kept["gpu"] == "none" and kept["stages"]["broken"]["rows"] == [{"number": 0}]
    assert "out of memory" in kept["stages"]["broken"]["error"]


def test_what_is_there_is_written_after_every_row(tmp_path: Path) -> None:
    path = tmp_path / "report.json"

    def rows() -> Iterator[Row]:
        for number in range(3):
            if number:
                assert len(json.loads(path.read_text())["stages"]["one"]["rows"]) == number
            yield {"number": number}

    Report(path, {}).run([Stage("one", 1, rows)], 10.0)
    assert json.loads(path.read_text())["stages"]["one"]["complete"]


TARGETS = (Target(Shape(1, 1, 1, 16), 16), Target(Shape(1, 1, 2, 16), 32))
LAST = Target(Shape(1, 1, 2, 128), 64, last=True)


def timed(target: Target, launch: Launch, us: float | None) -> Row:
    return {
        "target_rows": target.rows, "last": target.last, "launch": vars(launch), "us": us
    }  # fmt: skip


def test_a_table_holds_the_fastest_of_each_size() -> None:
    small, large = Launch(16, 32, 4, 3, 1), Launch(32, 32, 4, 3, 1)
    rows = [timed(TARGETS[0], small, 2.0), timed(TARGETS[0], Launch(16, 64, 4, 1, 1), None)]
    rows += [timed(TARGETS[1], small, 3.0), timed(TARGETS[1], large, 2.5)]
    (table,) = tables_of(rows, (*TARGETS, LAST), torch.bfloat16).values()
    assert [Launch(**row) for row in table] == [small, large]
    rows += [timed(TARGETS[1], small, 2.0), timed(LAST, Launch(64, 32, 8, 2, 1), 9.0)]
    (table,) = tables_of(rows, (*TARGETS, LAST), torch.bfloat16).values()
    assert [row["rows"] for row in table] == [16, 64]
    assert tables_of([], TARGETS, torch.bfloat16) == {}


def test_candidates_that_do_not_compile_or_fit_are_left_out() -> None:
    small = Launch(16, 16, 4, 1, 1)
    assert fits(small, HOPPER, 10) and not fits(small, HOPPER, None)
    assert fits(replace(small, programs_per_sm=2), HOPPER, 116_224)
    assert not fits(replace(small, programs_per_sm=2), HOPPER, 116_225)
    assert len(candidates()) == len(set(candidates())) > 100
    sizes = [
        compiled_bytes(HOPPER.target, 16, launch, torch.bfloat16)
        for launch in (small, Launch(24, 16, 4, 1, 1))
    ]
    assert sizes[0] is not None and 0 < sizes[0] < 100_000 and sizes[1] is None


class Compilers(Executor):
    """Processes of which one never ends, whose launches it notes."""

    def __init__(self) -> None:
        self.jobs: list[tuple[int, Launch]] = []

    def submit(self, fn: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        _, heads, launch, _ = arguments
        future = Future[Any]()
        self.jobs.append((heads, launch))
        if launch.tokens == 64:
            future.set_running_or_notify_cancel()
        else:
            future.set_result(1000)
        return future


def test_candidates_are_timed_as_they_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of either number of heads are compiled once, and none waits for the one that hangs."""
    device = SimpleNamespace(gpu=HOPPER)
    launches = [Launch(16, tokens, 4, 1, sm) for tokens in (16, 64, 128) for sm in (1, 2)]
    compilers = Compilers()
    tuner = Tuner(device, (*TARGETS, LAST), torch.bfloat16, compilers, launches)  # type: ignore[arg-type]
    monkeypatch.setattr(Tuner, "_row", lambda self, target, launch: (target, launch))
    rows = tuner.rows()
    found: list[Any] = [next(rows) for _ in range(3 + 3 * 4)]
    assert [target for target, _ in found[:3]] == [*TARGETS, LAST]
    assert {launch for _, launch in found[3:]} == {one for one in launches if one.tokens != 64}
    assert len(compilers.jobs) == len(set(compilers.jobs)) == 2 * 3


def test_a_launch_that_computes_something_else_is_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A compiler's fault must not become the table that every later run takes."""
    right, wrong = Launch(16, 16, 4, 1, 1), Launch(16, 32, 4, 1, 1)

    def launched(device: object, shape: Shape, dtype: object, launch: Launch) -> list[Any]:
        return [lambda: torch.full((2, 3), 1.0 if launch.tokens < 32 else torch.nan)]

    monkeypatch.setattr(tuning, "launched", launched)
    monkeypatch.setattr(tuning, "launch_for", lambda gpu, **options: right)
    device = SimpleNamespace(gpu=HOPPER, seconds=lambda calls: 1e-6)
    tuner = Tuner(device, TARGETS[:1], torch.bfloat16, Compilers(), [right, wrong])  # type: ignore[arg-type]
    first, second = tuner.rows()
    assert first["us"] == 1.0 and second["us"] is None and "nan apart" in second["error"]
    (table,) = tables_of([first, second], TARGETS[:1], torch.bfloat16).values()
    assert table == [vars(right)]


def test_caches_are_many_where_they_are_small() -> None:
    assert cache_count(Shape(1, 1024, 1, 16)) == 4 and cache_count(Shape(128, 65536, 1, 16)) == 1
    shapes = attention_shapes()
    assert len(shapes) == len(set(shapes)) == 208
    assert {shape.tokens for shape in shapes} == {1024, 4096, 8192, 32768, 65536}


class FakeCuda(SimpleNamespace):
    """torch.cuda as CudaDevice uses it: graphs that repeat what was captured, and a clock that
    every call advances by a millisecond."""

    def __init__(self) -> None:
        super().__init__(now=0.0, graphs=0)
        outer = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = outer.now

            def synchronize(self) -> None:
                outer.graphs += 1

            def elapsed_time(self, end: Event) -> float:
                return end.at - self.at

        class Graph:
            def replay(self) -> None:
                outer.now += self.captured

            def __enter__(self) -> None:
                self.start = outer.now

            def __exit__(self, *error: object) -> None:
                self.captured = outer.now - self.start

        self.Event, self.CUDAGraph, self.graph = Event, Graph, lambda graph: graph

    def tick(self) -> None:
        self.now += 1.0

    def synchronize(self) -> None: ...

    def empty_cache(self) -> None:
        self.now = -1.0

    def current_device(self) -> int:
        return 3

    def mem_get_info(self) -> tuple[int, int]:
        return 5, 9


def test_calls_are_timed_by_the_device_s_events() -> None:
    cuda = FakeCuda()
    device = CudaDevice(cuda, replays=3)
    calls = [cuda.tick, cuda.tick, lambda: None, lambda: None]
    for captured in (True, False):
        assert device.seconds(calls, captured=captured) == pytest.approx(0.5e-3)
    assert (device.device, device.free_bytes) == (torch.device("cuda", 3), 5)
    device.forget()
    assert cuda.now == -1.0


def test_without_a_gpu_the_program_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        program.main(["--out", str(tmp_path / "out")])
    assert end.value.code == 2 and not (tmp_path / "out").exists()
    assert "expected a GPU that torch can use, found none" in capsys.readouterr().err


@pytest.mark.parametrize(("failed", "code"), [([], 0), (["decode"], 1)])
def test_the_program_writes_a_report_in_its_minutes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failed: list[str], code: int
) -> None:
    given: dict[str, Any] = {}

    def write(device: object, stages: Any, folder: Path, **options: Any) -> SimpleNamespace:
        given.update(options, folder=folder, stages=stages)
        return SimpleNamespace(failed=failed)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(program, "write_report", write)
    arguments = ["--out", str(tmp_path), "--minutes", "2", "--commit", "abc"]
    assert program.main(arguments) == code
    assert (given["seconds"], given["folder"]) == (120.0, tmp_path)
    assert given["facts"]["commit"] == "abc" and given["facts"]["date"]
    stages = given["stages"](Report(tmp_path / "report.json", {}))
    assert [stage.name for stage in stages] == STAGES


def test_stages_run_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the time that is left of the report's, with what the stages before found."""
    made: list[Any] = []
    monkeypatch.setattr(program, "rows_apart", lambda *given, **more: made.append((given, more)))
    report = Report(tmp_path / "report.json", {})
    for stage in program.stages_apart(tmp_path / "bundle", tmp_path, 50.0, report):
        stage.rows()
    names = [given[1] for given, _ in made]
    assert names == [(name, tmp_path / "bundle", tmp_path, report) for name in STAGES]
    assert {given[0] for given, _ in made} == {program.rows_on_gpu}
    assert all(0 < more["seconds_left"]() <= 50 for _, more in made)


def test_without_matplotlib_there_are_no_plots_until_later(
    written: tuple[Path, Any, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    report = Report(tmp_path / "report.json", {"gpu": "G"})
    with monkeypatch.context() as patch:
        patch.setattr(plots, "find_spec", lambda name: None)
        assert plots.draw(report, tmp_path) == []
    command = f"-m benchmarks.gpu_report.plots {tmp_path}"
    assert command in capsys.readouterr().out
    (tmp_path / "report.json").write_text((written[0] / "out/report.json").read_text())
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    names = [f"{name}.png" for name in ("attention", "decode", "quantize")]
    assert [Path(line).name for line in done.stdout.split()] == names
    assert all((tmp_path / name).stat().st_size > 1000 for name in names)


def test_a_folder_that_is_no_checkout_has_no_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert program.commit() != "not a git checkout" or not (ROOT / ".git").exists()
    monkeypatch.setattr(program, "ROOT", tmp_path)
    assert program.commit() == "not a git checkout"
