"""Small charts as inline SVG without scripts, drawn for a phone's width and scaled up.

Colours are CSS classes, so that light and dark pages share them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from textwrap import wrap

_WIDTH, _LEFT, _RIGHT = 360, 34, 8
_ROW, _TOP, _BOTTOM = 26, 8, 24
_HEIGHT = 210
_LEGEND_ROW = 18
_LABEL, _LINE = 54, 14  # characters of a line above a bar, and its height
_VALUE = 130  # room for a value behind a bar
_DOT = 4  # radius of a series of one point
MOST_SERIES = 6
# A chart in a file of its own is seen on pages of any colour: it brings its background.
_COLOURS = ("#2f6fb7", "#c8641b", "#2c8a57", "#8a4fb0", "#b03a63", "#5d6b1f")
_OWN_STYLE = (
    "svg{background:#fff}text{font:11px system-ui,sans-serif;fill:#5b6670}.strong{fill:#1c2126}"
    ".grid{stroke:#d9dee3;stroke-width:1}.line{fill:none!important;stroke-width:1.8}"
    ".ci{stroke-width:5;opacity:.45}"
    + "".join(f".s{n}{{fill:{colour};stroke:{colour}}}" for n, colour in enumerate(_COLOURS))
)


@dataclass(frozen=True)
class Interval:
    """A share between 0 and 1 with its confidence interval, if there is one."""

    label: str
    value: float
    low: float | None
    high: float | None
    series: int = 0


@dataclass(frozen=True)
class Bar:
    """A value with the text to show beside it."""

    label: str
    value: float
    text: str
    series: int = 0


@dataclass(frozen=True)
class Line:
    """A series of points, by x."""

    label: str
    points: Sequence[tuple[float, float]]


def intervals(rows: Sequence[Interval], title: str) -> str:
    """A chart of shares: a dot at the value, a bar over the interval, an axis from 0 to 100 %."""
    left, height = 112, _TOP + _ROW * len(rows) + _BOTTOM
    span = _WIDTH - left - 54

    def x(share: float) -> float:
        return left + span * min(1.0, max(0.0, share))

    parts = [_grid(x(tick / 4), _TOP, height - _BOTTOM, f"{tick * 25}%") for tick in range(5)]
    for number, row in enumerate(rows):
        y = _TOP + _ROW * (number + 0.5)
        parts.append(_text(left - 8, y + 4, row.label, "end"))
        if row.low is not None and row.high is not None:
            parts.append(
                f'<line class="s{row.series} ci" x1="{x(row.low):.1f}" x2="{x(row.high):.1f}"'
                f' y1="{y}" y2="{y}"/>'
            )
        parts.append(f'<circle class="s{row.series}" cx="{x(row.value):.1f}" cy="{y}" r="4.5"/>')
        parts.append(
            _text(_WIDTH - _RIGHT, y + 4, text=f"{row.value:.1%}", anchor="end", style="strong")
        )
    return _svg(height, parts, title)


def bars(rows: Sequence[Bar], title: str, mark: float | None = None) -> str:
    """A chart of horizontal bars from zero, with a line at the mark, if there is one."""
    left, height = 112, 2 * _TOP + _ROW * len(rows)
    most = max((row.value for row in rows), default=0.0) or 1.0
    span = _WIDTH - left - 72
    parts = []
    for number, row in enumerate(rows):
        y = _TOP + _ROW * number
        width = max(1.0, span * row.value / most)
        parts.append(_text(left - 8, y + 17, row.label, "end"))
        parts.append(
            f'<rect class="s{row.series}" x="{left}" y="{y + 5}" width="{width:.1f}" height="16"'
            ' rx="2"/>'
        )
        parts.append(_text(left + width + 6, y + 17, text=row.text, anchor="start", style="strong"))
    if mark is not None and mark <= most:
        x = left + span * mark / most
        parts.append(
            f'<line class="grid mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{height - _TOP}"/>'
        )
    return _svg(height, parts, title)


def ranking(rows: Sequence[Bar], title: str) -> str:
    """A chart of horizontal bars from zero, each below its label of two lines at most; one that is
    longer is shown whole where the bar is pointed at. The best one is of another series."""
    labels = [wrap(row.label, _LABEL, max_lines=2, placeholder="…") for row in rows]
    height = 2 * _TOP + _ROW * len(rows) + sum(_label_height(label) for label in labels)
    most = max((row.value for row in rows), default=0.0) or 1.0
    span = _WIDTH - 2 * _RIGHT - _VALUE
    parts = []
    y = _TOP
    for number, (row, label) in enumerate(zip(rows, labels, strict=True)):
        width = max(1.0, span * row.value / most)
        for line, text in enumerate(label):
            parts.append(_text(_RIGHT, y + 17 + line * _LINE, text=text, anchor="start"))
        y += _label_height(label)
        parts.append(
            f'<rect class="s{0 if number else 1}" x="{_RIGHT}" y="{y}" width="{width:.1f}"'
            f' height="16" rx="2"><title>{escape(row.label)}</title></rect>'
        )
        x = _RIGHT + width + 6
        parts.append(_text(x, y + 12, text=row.text, anchor="start", style="strong"))
        y += _ROW
    return _svg(height, parts, title)


def _label_height(lines: Sequence[str]) -> int:
    return _ROW + _LINE * (len(lines) - 1)


def lines(
    series: Sequence[Line],
    unit: str,
    *,
    title: str = "",
    across: str = "layer",
    finest_step: float = 1.0,
) -> str:
    """A chart of lines over numbers of layers, or of what `across` says; the y axis spans the data
    in round steps, none of them finer than finest_step."""
    points = [point for line in series for point in line.points]
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    low, high = _rounded_range([y for _, y in points], finest_step)
    digits = max(0, math.ceil(-math.log10(finest_step)))
    bottom = _HEIGHT - _BOTTOM

    def place(point: tuple[float, float]) -> tuple[float, float]:
        across = (point[0] - low_x) / max(1.0, high_x - low_x)
        up = (point[1] - low) / (high - low)
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), bottom - up * (bottom - _TOP)

    parts = []
    for step in range(5):
        value = low + (high - low) * step / 4
        y = place((low_x, value))[1]
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(_text(_LEFT - 5, y + 4, f"{value:.{digits}f}", "end"))
    for value in sorted({low_x, (low_x + high_x) // 2, high_x}):
        name = f"{across} {value:.0f}" if value == low_x else f"{value:.0f}"
        anchor = "start" if value == low_x else "end" if value == high_x else "middle"
        parts.append(_text(place((value, low))[0], _HEIGHT - 7, name, anchor))
    alone: list[tuple[float, float]] = []
    for number, line in enumerate(series):
        path = " ".join("{:.1f},{:.1f}".format(*place(point)) for point in line.points)
        if len(line.points) > 1:
            parts.append(f'<polyline class="s{number} line" points="{path}"/>')
        else:
            x, y = place(line.points[0])
            hidden = sum(abs(x - x0) + abs(y - y0) < _DOT for x0, y0 in alone)
            ring = " line" if hidden else ""  # around a dot that it would cover
            place_of_dot = f'cx="{x:.1f}" cy="{y:.1f}" r="{_DOT + 3 * hidden}"'
            parts.append(f'<circle class="s{number}{ring}" {place_of_dot}/>')
            alone.append((x, y))
    return _svg(_HEIGHT, parts, title or f"{unit}, by {across}")


def standalone(svg: str, labels: Sequence[str]) -> str:
    """A chart as a file of its own, with its colours and the legend below it."""
    head, height, body = re.split(rf'(?<=viewBox="0 0 {_WIDTH} )([0-9.]+)', svg, maxsplit=1)
    rows = [
        f'<rect class="s{number}" x="{_LEFT}" y="{float(height) + _LEGEND_ROW * number}" width="9"'
        f' height="9" rx="2"/>'
        + _text(_LEFT + 16, float(height) + _LEGEND_ROW * number + 9, text=label, anchor="start")
        for number, label in enumerate(labels)
    ]
    whole = f"{head}{float(height) + _LEGEND_ROW * len(rows):g}{body}"
    opened = whole.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" width="640" ', 1)
    start = opened.index(">") + 1
    drawn = opened[start:].removesuffix("</svg>") + "".join(rows)
    return f"{opened[:start]}<style>{_OWN_STYLE}</style>{drawn}</svg>\n"


def _rounded_range(values: Sequence[float], finest_step: float) -> tuple[float, float]:
    """Ends of an axis of four round steps around the values."""
    low, high = min(values), max(values)
    for step in (finest_step * factor for factor in (1, 2, 5, 10, 20, 50, 100)):
        start = step * (low // step)
        if start + 4 * step >= high:
            return start, start + 4 * step
    return low, high


def _grid(x: float, top: float, bottom: float, label: str) -> str:
    line = f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>'
    return line + _text(x, bottom + 16, label, "middle")


def _text(x: float, y: float, text: str, anchor: str, style: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{style}" {place}>{escape(text)}</text>'


def _svg(height: float, parts: Sequence[str], title: str) -> str:
    name = escape(title)
    opened = f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{name}">'
    return f"{opened}<title>{name}</title>{''.join(parts)}</svg>"
