"""Plots of a report's rows.

python -m benchmarks.gpu_report.plots DIR     draws DIR/report.json, where matplotlib is
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu_report.stages import Report, Row

TIMES = ("fused", "expanded_adjacent", "expanded_apart", "sdpa", "flash_mla", "flashinfer", "floor")


def draw(report: Report, folder: Path) -> list[Path]:
    """Draw what there are rows of; return the files, none without matplotlib."""
    if find_spec("matplotlib") is None:
        print(f"no plots without matplotlib; python -m {__spec__.name} {folder} draws them later")
        return []
    plots = {"attention": _attention, "decode": _decoding, "quantize": _conversions}
    paths = []
    for stage, plot in plots.items():
        rows = [row for row in report.rows(stage) if "error" not in row]
        if rows:
            paths.append(folder / f"{stage}.png")
            _save(plot, rows, report.facts["gpu"], paths[-1])
    return paths


def _save(plot: Callable[[Any, list[Row]], None], rows: list[Row], title: str, path: Path) -> None:
    import matplotlib
    from matplotlib import pyplot as plt

    matplotlib.use("Agg")
    figure = plt.figure(figsize=(12, 7))
    plot(figure, rows)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _attention(figure: Any, rows: list[Row]) -> None:
    """Time against n, batch and context for either number of heads, about the largest line."""
    heads = sorted({row["heads"] for row in rows})
    axes = figure.subplots(len(heads), 3, squeeze=False)
    for line, h in zip(axes, heads, strict=True):
        own = [row for row in rows if row["heads"] == h and not row["ragged"]]
        for axis, by in zip(line, ("queries", "batch", "tokens"), strict=True):
            _times(axis, longest_line(own, by), by)
            axis.set_title(f"h {h}")


def longest_line(rows: Sequence[Row], by: str) -> list[Row]:
    """Return the rows that differ in one size alone: of those with most points, the largest."""
    others = [size for size in ("batch", "queries", "tokens") if size != by]
    lines: dict[tuple[int, ...], list[Row]] = {}
    for row in rows:
        lines.setdefault(tuple(row[size] for size in others), []).append(row)
    if not lines:
        return []
    sizes = max(lines, key=lambda sizes: (len(lines[sizes]), sizes))
    return sorted(lines[sizes], key=lambda row: int(row[by]))


def _times(axis: Any, rows: list[Row], by: str) -> None:
    for name in TIMES:
        points = [(row[by], row[f"{name}_us"]) for row in rows if f"{name}_us" in row]
        if points:
            style = "k--" if name == "floor" else "o-"
            axis.plot(*zip(*points, strict=True), style, label=name)
    axis.set(xlabel=by, ylabel="µs", yscale="log")
    if by != "queries":
        axis.set_xscale("log", base=2)
    axis.legend(fontsize=7)


def _decoding(figure: Any, rows: list[Row]) -> None:
    axes = figure.subplots(1, 2)
    kinds = "dtype", "batch", "cuda_graphs"
    for kind in dict.fromkeys(tuple(row[name] for name in kinds) for row in rows):
        line = [row for row in rows if tuple(row[name] for name in kinds) == kind]
        dtype, batch, graphs = kind
        for axis, name in zip(axes, ("tokens_per_second", "speedup"), strict=True):
            label = f"{dtype}, {batch} at a time{', CUDA graphs' if graphs else ''}"
            axis.plot([r["drafts"] for r in line], [r[name] for r in line], "o-", label=label)
            axis.set(xlabel="drafts", ylabel=name.replace("_", " "))
            axis.legend(fontsize=7)


def _conversions(figure: Any, rows: list[Row]) -> None:
    axis = figure.subplots()
    shapes = list(dict.fromkeys(tuple(row["shape"]) for row in rows))
    for place, shape in enumerate(shapes):
        mine = [row for row in rows if tuple(row["shape"]) == shape]
        at = [number + place / (len(shapes) + 1) for number in range(len(mine))]
        axis.barh(at, [row["gb_per_second"] for row in mine], 0.8 / len(shapes), label=str(shape))
        axis.set_yticks(at, [row["conversion"] for row in mine])
    axis.set_xlabel("GB/s read and written")
    axis.legend()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    facts = json.loads((folder / "report.json").read_text())
    print(*draw(Report(folder / "report.json", facts, facts.pop("stages")), folder), sep="\n")
