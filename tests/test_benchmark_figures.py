"""Figures of docs/benchmarks.md are those of the result files; the README's are on that page."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_decode, bench_scaling, bench_sizes, bench_static_graph
from pages import README, ROOT, rows_of, sections_of

PAGE = ROOT / "docs/benchmarks.md"
TEXT = PAGE.read_text()
SECTIONS = sections_of(PAGE)


def results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks/results" / name).read_text())


def row_starting(section: str, first: str) -> list[str]:
    """Return the row of a section's table whose first cell begins so."""
    (row,) = [row for row in rows_of(SECTIONS[section]) if row[0].startswith(first)]
    return row


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("(a) mtp-export", "(a)"),
        ("(b) cp", "(b)"),
        ("(c) load, save_file", "(c)"),
        ("(d) mtp-export --target xllm", "(d)"),
        ("(e) cp, the bytes of (d)", "(e)"),
        ("(f) the bytes of (a), direct I/O", "(f)"),
        ("(g) the bytes of (d), direct I/O", "(g)"),
        ("inspect", "`inspect`"),
        ("--dry-run", "`--dry-run`"),
    ],
)
def test_export(name: str, first: str) -> None:
    facts = results("export.json")["rows"][name]
    _, median, peak = row_starting("Export", first)
    shown = [float(figure) for figure in re.findall(r"[\d.]+", median)]
    assert shown == pytest.approx([facts["median_seconds"], *facts["seconds"]], abs=0.051)
    assert peak == f"{facts['peak_bytes'] / 1e6:,.0f} MB"


def test_judging_a_repository() -> None:
    facts = results("upload.json")
    ((_, sent), (_, computed), (load, seconds), (_, peak)) = rows_of(
        SECTIONS["Judging a repository"]
    )
    assert sent == f"{facts['sent_bytes'] / 1e6:.1f} MB"
    assert facts["sent_bytes"] <= facts["bounds"]["megabytes"] * 1e6
    assert max(facts["seconds"]) <= facts["bounds"]["seconds"]
    assert computed == f"{facts['cpu_seconds']:.1f}"
    shown = [float(figure) for figure in re.findall(r"[\d.]+", seconds)]
    assert shown == pytest.approx(
        [statistics.median(facts["seconds"]), *facts["seconds"]], abs=0.051
    )
    assert f"load {facts['load_average']:.0f}" in load
    assert peak == f"{facts['peak_bytes'] / 1e6:.0f} MB"


def test_sizes() -> None:
    facts = results("sizes.json")
    assert rows_of(SECTIONS["Time and memory by size"]) == [
        [
            f"{point['bytes'] / 1e9:.1f} GB",
            *(f"{point[n]['median_seconds']:.1f} s" for n in ("mtp-export", "cp", "direct I/O")),
            f"{point['share_of_limit']:.2f}",
            f"{point['mtp-export']['peak_bytes'] / 1e6:.0f} MB",
        ]
        for point in facts["points"]
    ]
    assert facts["machine"]["commit"][:12] in TEXT


@pytest.mark.parametrize(
    ("name", "position"),
    [("fp8 -> int8", 0), ("cp, the bytes of fp8 -> int8", 1), ("fp8 -> int4", 2),
     ("cp, the bytes of fp8 -> int4", 3), ("direct I/O, the bytes of fp8 -> int8", 4),
     ("direct I/O, the bytes of fp8 -> int4", 5)],
)  # fmt: skip
def test_quantize(name: str, position: int) -> None:
    facts = results("quantize.json")
    _, median, peak, ratio, share = rows_of(SECTIONS["Quantization"])[position]
    assert share == (f"{facts['shares'][name]:.2f}" if name in facts["shares"] else "")
    shown = [float(figure) for figure in re.findall(r"[\d.]+", median)]
    runs = [run["seconds"] for run in facts["runs"][name]]
    assert shown == pytest.approx([facts["median_seconds"][name], *runs], abs=0.051)
    if peak:
        peaks = [run["peak_bytes"] / 1e6 for run in facts["runs"][name]]
        assert float(peak.removesuffix(" MB")) in [round(value) for value in peaks]
        assert float(ratio) == round(facts["ratios"][f"{name[-4:]} / cp (at most 1.5)"], 2)


@pytest.mark.parametrize(
    ("name", "scheme", "digits"), [("amd", "int8", 2), ("gguf", "q8_0", None), ("q4_0", "q4_0", 1)]
)
def test_quantize_on_other_machines(name: str, scheme: str, digits: int | None) -> None:
    facts = results(f"quantize_{name}.json")
    kernels = facts["limits"][scheme]["kernels_seconds"]
    shown = [] if digits is None else [f"{kernels:.{digits}f} s"]
    for run, runs in facts["runs"].items():
        seconds = ", ".join(f"{run['seconds']:.1f}" for run in runs)
        shown.append(f"{facts['median_seconds'][run]:.1f} s ({seconds})")
    shown.append(f"share of {facts['shares'][f'fp8 -> {scheme}']:.2f}")
    shown.append(facts["machine"]["commit"][:12])
    section = " ".join(SECTIONS["Quantization"].split())
    assert [figure for figure in shown if figure not in section] == []


def test_start_up() -> None:
    facts = results("startup.json")
    shown = [(first.replace("`", ""), cell) for first, cell in rows_of(SECTIONS["Start-up"])]
    runs = [
        (name, row["median_seconds"], row["seconds"], 2) for name, row in facts["rows"].items()
    ] + [
        (f"compiling, first {name}", row["compiling_seconds"], list(row.values())[:2], 1)
        for name, row in facts["compiling"].items()
    ]
    for (name, cell), (expected, median, seconds, digits) in zip(shown, runs, strict=True):
        figures = [f"{figure:.{digits}f}" for figure in (median, *seconds)]
        assert (name, re.findall(r"[\d.]+", cell)) == (expected, figures)


def test_shares_of_an_export() -> None:
    shares = results("export.json")["shares"]
    assert f"(a) reaches a share of {shares['(a)']:.2f} and (d) {shares['(d)']:.2f}" in TEXT


@pytest.mark.parametrize("position", range(3))
def test_hub(position: int) -> None:
    facts = results("hub.json")
    name, row = list(facts["rows"].items())[position]
    first, rate, peak = rows_of(SECTIONS["From the Hub"])[position]
    shown = [float(figure) for figure in re.findall(r"[\d.]+", rate)]
    assert first.startswith(name[:3])
    assert shown == pytest.approx([round(row["mb_per_second"]), *row["seconds"]], abs=0.051)
    assert peak == f"{row['peak_bytes'] / 1e6:,.0f} MB"
    one, other = facts["ratios"].values()
    assert f"a / b = {one:.2f}, a / c = {other:.2f}" in TEXT


def test_stream() -> None:
    rows = results("stream.json")["rows"]
    check, whole = rows["check"], rows["pass"]
    page = (ROOT / "docs/verify.md").read_text()
    for shown in (
        f"{rows['reading']['bytes'] / 1e9:.1f} GB of V3's widths",
        f"read in {rows['reading']['seconds']:.1f} s by direct",
        f"were chosen | {check['layer_seconds'][-1]:.1f} s |",
        f"1,024 tokens | {whole['layer_seconds'][-1]:.1f} s |",
        f"96 tokens | {check['memory_bytes'] / 1e9:.1f} GB |",
        f"{check['said']['read_bytes'] / 1e9:.1f} and {check['read_bytes'] / 1e9:.1f} GB |",
        f"{check['said']['seconds']:.0f} and {check['seconds']:.0f} s |",
        f"take {whole['layer_seconds'][-1] / rows['reading']['seconds']:.1f} times the reading",
    ):
        assert shown in page


def test_families() -> None:
    facts = results("families.json")
    page = ROOT / "docs/models.md"
    section = sections_of(page)["Speed"]
    assert facts["hardware"]["commit"][:12] in section
    seconds = {(row["way"], row["batch"]): row["seconds"] for row in facts["rows"]}
    shown = rows_of(section)
    assert len(seconds) == 2 * len(shown)
    for way, *cells in shown:
        assert cells == [f"{seconds[way, batch]:.2f} s" for batch in (1, 16)]


def test_load() -> None:
    facts = results("serve.json")
    section = sections_of(ROOT / "docs/serve.md")["Load"]
    assert facts["hardware"]["commit"][:12] in section
    turns = [row["in_turns"] for row in facts["rows"].values() if "in_turns" in row]
    plain, drafted = (f"{each['server_over_generate']:.2f}" for each in turns)
    assert f"{plain} of `generate` without drafts and {drafted} with two" in section


def test_load_beside_vllm() -> None:
    facts = results("serve_vllm.json")
    section = sections_of(ROOT / "docs/serve.md")["Beside vLLM"]
    assert facts["hardware"]["commit"][:12] in section
    shown = rows_of(section)
    assert len(shown) == sum(map(len, facts["rows"].values()))
    for name, clients, *cells in shown:
        row = facts["rows"][name][clients]
        tokens, first, later = (
            row[key] for key in ("output_tokens_per_second", "ttft_ms_p50", "tpot_ms_p50")
        )
        assert cells == [f"{tokens:.0f}", f"{first:,.0f} ms", f"{later:.1f} ms"]


def test_quantize_kernels() -> None:
    facts = results("quantize_kernels_cpu.json")["results"]
    rows = rows_of(SECTIONS["Kernels"])
    assert len(rows) == 9
    for operation, one, two, share, times in rows:
        runs = [run for run in facts if run["operation"] == operation]
        assert one == ", ".join(f"{run['gelem_per_second_one_worker']:.2f}" for run in runs)
        assert two == ", ".join(f"{run['gelem_per_second_two_workers']:.2f}" for run in runs)
        assert share == ", ".join(f"{100 * run['share_of_copy']:.0f}%" for run in runs)
        theirs = [run.get("times_compressed_tensors") for run in runs]
        assert times == ", ".join(str(value) for value in theirs if value is not None)


def test_acceptance_per_precision() -> None:
    facts = results("quantize_acceptance.json")["rows"]
    rows = {row[0]: row for row in rows_of(SECTIONS["Acceptance per precision"])}
    assert list(rows) == list(facts)
    for name, (_, first, change, deeper) in rows.items():
        drafts = facts[name]["on the source's texts"]
        own = drafts[0]["acceptance"]
        assert first == f"{own['value']:.3f} [{own['low']:.3f}, {own['high']:.3f}]"
        points = [100 * drafts[0]["minus_source"][key] for key in ("value", "low", "high")]
        value, low, high = points
        assert change == ("0" if not any(points) else f"{value:+.2f} [{low:+.2f}, {high:+.2f}]")
        assert deeper == ", ".join(f"{draft['acceptance']['value']:.3f}" for draft in drafts[1:])


def test_speculation_at_batch_1() -> None:
    facts = results("decode.json")
    shown = [row for row in rows_of(SECTIONS["Decoding"]) if len(row) == 8]
    assert len(shown) == len(facts["speculation_at_batch_1"])
    for row, run in zip(shown, facts["speculation_at_batch_1"], strict=True):
        speedups = run["measured_speedups"]
        measured = f"{run['measured_speedup']:.2f} ({min(speedups):.2f}–{max(speedups):.2f})"
        assert row == [
            str(run["k"]),
            f"{run['mean_accepted_length']:.2f}",
            f"{run['v']:.2f}",
            f"{run['c']:.3f}",
            f"{run['o']:.2f}".removeprefix("-"),
            f"{run['predicted_speedup']:.2f}",
            measured,
            f"{run['measured_over_predicted']:.2f}",
        ]
    for run in facts["against_transformers"]:
        assert f"{run['times_faster']:.1f} times" in TEXT


def test_the_concurrency_table() -> None:
    assert (ROOT / "benchmarks/results/decode.md").read_text() in TEXT


@pytest.mark.parametrize("name", ["export", "quantize", "decode", "hub", "startup"])
def test_the_commit_is_named(name: str) -> None:
    facts = results(f"{name}.json")
    machine = facts.get("machine") or facts["hardware"]
    assert machine["commit"][:12] in TEXT


def test_the_readme_s_figures_are_on_the_page() -> None:
    rows = rows_of(sections_of(README)["Results"])
    assert len(rows) == 5
    for _, *cells in rows:
        for figure in re.findall(r"\d+\.\d+", " ".join(cells)):
            assert figure in TEXT, figure


def test_the_readme_s_engines_have_the_versions_of_the_engines_page() -> None:
    page = (ROOT / "docs/engines.md").read_text()
    named = re.findall(r"\| (\w+ \d+\.\d[\d.]*) (?=\|)", README.read_text())
    assert len(named) == 2
    for version in named:
        assert version in page


def test_methods_at_batch_1() -> None:
    facts = results("decode.json").get("methods_at_batch_1", [])
    shown = [row for row in rows_of(SECTIONS["Decoding"]) if len(row) == 3]
    assert shown == [
        [
            run["method"],
            f"{run['mean_accepted_length']:.2f}",
            f"{run['speedup']:.2f} ({min(run['speedups']):.2f}–{max(run['speedups']):.2f})",
        ]
        for run in facts
    ]


@pytest.mark.parametrize("benchmark", [bench_scaling, bench_static_graph])
def test_a_section_that_is_written_from_its_measurement(benchmark: Any) -> None:
    """The measured table is there when it was measured, and only then."""
    page = (ROOT / benchmark.PAGE).read_text()
    is_measured = (ROOT / benchmark.RESULT).exists()
    shown = benchmark.section(results(benchmark.RESULT.name)) if is_measured else ""
    assert (benchmark.HEADING in page) == is_measured and shown in page


def test_the_page_about_scaling() -> None:
    assert bench_scaling.paper() in (ROOT / bench_scaling.PAGE).read_text()


def test_the_section_about_scaling_replaces_the_one_before() -> None:
    times = {"seconds": {}, "median_seconds": {"1": 8.0, "2": 5.0}}
    disk = {"limit_seconds": [2.0, 4.0, 3.0], **times}
    places = {"memory": {"bytes": 6e9, **times}, "disk": disk}
    machine = {"cpu": "a CPU, 2 cores", "commit": "0123456789abcdef"}
    part = bench_scaling.section({"machine": machine, "places": places})
    assert "| 2 | 5.0 s | 1.60 | 5.0 s | 1.67 |" in part and "faster than 3.0 s" in part
    page = (ROOT / bench_scaling.PAGE).read_text()
    once = bench_scaling.put_into(page, part)
    assert once.count(bench_scaling.HEADING) == 1 and part in once
    assert bench_scaling.put_into(once, part) == once


def test_the_section_about_packages() -> None:
    seconds = {"torch, eager": 0.05, "package": 0.0312, "compiled kernels": 0.004}
    rates = {"torch, eager": 20.0, "package": 33.34, "compiled kernels": 200.0}
    same = {"torch, eager": 1.0, "package": 0.75, "compiled kernels": 1.0}
    decoding = {"batch": 4, "tokens_per_second": rates, "same_texts": same}
    row = {"dtype": "float32", "compile_seconds": 31.6, "package_bytes": 3.8e6}
    row |= {"steps": [{"batch": 4, "seconds": seconds}], "decoding": [decoding]}
    hardware = {"cpu": "a CPU", "threads": 2, "torch": "2.13.0", "commit": "0123456789abcdef"}
    result = {"hardware": hardware, "tokens": 16, "turns": 2, "rows": [row]}
    part = bench_static_graph.section(result)
    assert "| float32 | 4 | 50.0 | 31.2 | 4.0 | 20.0 | 33.3 | 200.0 |" in part
    assert "32 s in float32 (3.8 MB)" in part and "3 of 4 by the package" in part
    page = (ROOT / bench_static_graph.PAGE).read_text()
    once = bench_static_graph.put_into(page, part)
    assert once.count(bench_static_graph.HEADING) == 1
    assert bench_static_graph.put_into(once, part) == once


def tuning_rows() -> list[list[str]]:
    """Return the rows that docs/tune.md shows of tune.json."""

    def shown(estimate: dict[str, float] | None, digits: int) -> str:
        if estimate is None:
            return ""
        value, low, high = (f"{estimate[key]:.{digits}f}" for key in ("value", "low", "high"))
        return f"{value} [{low}, {high}]"

    rows = []
    for name, facts in results("tune.json")["rows"].items():
        for side in ("before", "after"):
            three, five = (facts[side].get(k) for k in ("k=3", "k=5"))
            cells = [shown(estimate, 3) for estimate in three["acceptance"]]
            cells += [shown(k and k["tokens_per_step"], 2) for k in (three, five)]
            rows.append([name if side == "before" else "", side, *cells])
    return rows


def test_tuning() -> None:
    page = ROOT / "docs/tune.md"
    shown = [row for row in rows_of(sections_of(page)["Measured"]) if len(row) == 7]
    assert shown == tuning_rows()
    for facts in results("tune.json")["rows"].values():
        assert f"{facts['cpu_seconds'] / 60:.1f}" in page.read_text()


def test_the_measured_table_of_drafters() -> None:
    known = {cell for row in tuning_rows() for cell in row[2:]}
    shown = rows_of(sections_of(ROOT / "docs/drafters.md")["Measured"])
    assert shown and all(cell in known for row in shown for cell in row[1:])


def test_adaptive() -> None:
    facts = results("adaptive.json")
    page = ROOT / "docs/drafters.md"
    assert (ROOT / "benchmarks/results/adaptive.md").read_text() in page.read_text()
    shown = rows_of(sections_of(page)["Adaptive against every fixed number"])
    assert [(row[0], row[-1][:4]) for row in shown] == [
        (str(row["concurrency"]), f"{row['adaptive_over_best']:.2f}") for row in facts["rows"]
    ]
    assert facts["hardware"]["commit"][:12] in page.read_text()


def test_every_plot_has_a_title_and_is_on_the_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from matplotlib.figure import Figure

    titles: list[list[str]] = []

    def saved(figure: Figure, path: Path, **more: object) -> None:
        whole = [figure.get_suptitle()] if figure.get_suptitle() else []
        titles.append(whole or [axis.get_title() for axis in figure.axes])

    monkeypatch.setattr(Figure, "savefig", saved)
    rows = results("decode.json")["concurrency"]
    bench_decode.draw([bench_decode.Row(**row) for row in rows], tmp_path / "decode.png")
    bench_sizes.plot(results("sizes.json")["points"], tmp_path / "sizes.png")
    assert len(titles) == 2 and all(title for plot in titles for title in plot), titles
    for name in ("decode.png", "sizes.png"):
        assert f"](../benchmarks/results/{name})" in TEXT, name
