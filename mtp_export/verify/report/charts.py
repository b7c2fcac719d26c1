"""Charts of what a verification measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from mtp_export.progress import format_bytes
from mtp_export.verify.report.plots import (
    MOST_SERIES,
    Bar,
    Interval,
    Line,
    bars,
    intervals,
    lines,
    ranking,
)
from mtp_export.verify.report.report import Report, method_of
from mtp_export.verify.report.undone import gain_text, undone_of


@dataclass(frozen=True)
class Chart:
    """A chart as SVG whose colours are classes; labels are those of its series, for a legend."""

    name: str
    title: str
    svg: str
    labels: tuple[str, ...] = ()


def charts(report: Report) -> tuple[Chart, ...]:
    """Return the charts of all figures that a report has."""
    return (
        *_undone(report),
        *(chart for draw in (_acceptance, _sqnr, _sizes, _speed) for chart in draw(report)),
    )


def _undone(report: Report) -> Iterator[Chart]:
    """The changes that were undone to explain a failure, best first."""
    for number, (check, _, rows) in enumerate(undone_of(report), start=1):
        bars_of = [
            Bar(row["change"], value=max(0.0, row["gain"]["value"]), text=gain_text(row["gain"]))
            for row in rows
        ]
        title = f"Check {check}: gain in nats per token when a fault is undone, with its interval"
        yield Chart(f"undone-{number}", title, ranking(bars_of, title))


def _acceptance(report: Report) -> Iterator[Chart]:
    found = list(report.data("acceptance", "k", "position", "conditional", "cumulative"))
    for kind, title in (
        ("conditional", "Draft accepted, if those before it were (95 % interval)"),
        ("cumulative", "Draft accepted, of all drafted at its position (95 % interval)"),
    ):
        rows = [
            Interval(
                f"{method_of(data)}k={data['k']}, draft {data['position']}",
                value=data[kind]["value"],
                low=data[kind]["low"],
                high=data[kind]["high"],
                series=data["k"] % MOST_SERIES,
            )
            for data in found
        ]
        if rows:
            yield Chart(f"acceptance-{kind}", title, intervals(rows, title))


def _sqnr(report: Report) -> Iterator[Chart]:
    """The least SQNR per layer, one line per role and form."""
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for data in report.data("weights", "sqnr_db_by_layer"):
        label = f"{data['role']}, {data['storage'].replace('_', ' ')}"
        points[label] += [(row["layer"], row["min"]) for row in data["sqnr_db_by_layer"]]
    series = [Line(label, sorted(own)) for label, own in points.items() if own][:MOST_SERIES]
    if series:
        title = "Signal to quantization noise against the source (dB): the least of each layer"
        yield Chart(
            name="sqnr",
            title=title,
            svg=lines(series, "SQNR in dB", title=title),
            labels=tuple(line.label for line in series),
        )


def _sizes(report: Report) -> Iterator[Chart]:
    parts, basis = dict(report.facts.get("tensor_bytes", {})), "tensors, without headers of files"
    source = parts.pop("source", 0)
    if not source:  # of a bundle that was made before manifests said it
        basis, source = "files, with their headers", report.facts["source_bytes"]
        parts = report.facts["parts_bytes"]
    if source:
        after = sum(parts.values())
        rows = [
            Bar("source", value=source, text=format_bytes(source), series=1),
            Bar("bundle", after, format_bytes(after)),
            *(Bar(f"  {name}", value=size, text=format_bytes(size), series=2)
              for name, size in parts.items()),
        ]  # fmt: skip
        title = f"Size before and after: {basis}"
        yield Chart("size", title, bars(rows, title))


def _speed(report: Report) -> Iterator[Chart]:
    rows: list[Bar] = []
    for data in report.data("speed", "batch", "k", "measured", "predicted"):
        label = f"{method_of(data)}batch {data['batch']}, k={data['k']}"
        rows.append(Bar(label, data["measured"], f"{data['measured']:.2f}×"))
        rows.append(
            Bar("predicted", value=data["predicted"], text=f"{data['predicted']:.2f}×", series=1)
        )
    if rows:
        title = "Speed of speculation over plain decoding, which is the line at 1×"
        yield Chart("speed", title, bars(rows, title, mark=1.0))
