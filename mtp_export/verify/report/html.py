"""The report as one self-contained HTML page: style, charts and tables inline."""

from __future__ import annotations

from html import escape

from mtp_export.verify.check import CheckResult, Item, Status
from mtp_export.verify.report.charts import charts
from mtp_export.verify.report.plots import MOST_SERIES, legend
from mtp_export.verify.report.report import Report, verdict_words

_STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1c2126;--soft:#5b6670;--line:#d9dee3;--card:#f6f8fa;
--pass:#1a7f43;--fail:#c2272d;--none:#8a6100;--s0:#2f6fb7;--s1:#c8641b;--s2:#2c8a57;--s3:#8a4fb0;
--s4:#b03a63;--s5:#5d6b1f}
@media(prefers-color-scheme:dark){:root{--bg:#14181c;--fg:#e4e8ec;--soft:#9aa5b0;--line:#323a42;
--card:#1c2228;--pass:#4cc27d;--fail:#ff7b7b;--none:#e0b04a;--s0:#6aa9ef;--s1:#f0995a;--s2:#5cc690;
--s3:#bf8ee0;--s4:#ea80a5;--s5:#b3c25c}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1180px;padding:20px 16px 48px;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:1.35rem;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:1.05rem;margin:28px 0 8px}
h3{font-size:.95rem;margin:0 0 6px}
p{margin:4px 0;overflow-wrap:anywhere}
.soft{color:var(--soft)}
.verdict{font-weight:650;font-size:1.1rem}
.pass{color:var(--pass)}.fail{color:var(--fail)}.not-tested{color:var(--none)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:16px}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 14px;
min-width:0}
svg{width:100%;height:auto;max-width:640px;display:block}
svg text{font:11px system-ui,sans-serif;fill:var(--soft)}
svg .strong{fill:var(--fg)}
svg .grid{stroke:var(--line);stroke-width:1}
.line{fill:none!important;stroke-width:1.8}
.ci{stroke-width:5;opacity:.45}
.legend span{display:inline-block;margin-right:14px;font-size:.85rem}
.legend i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px}
table{border-collapse:collapse;width:100%;font-size:.9rem;table-layout:fixed}
th,td{text-align:left;vertical-align:top;padding:5px 8px;border-top:1px solid var(--line);
overflow-wrap:anywhere}
th{color:var(--soft);font-weight:500;border-top:0}
th:nth-child(1){width:34%}th:nth-child(2){width:11%}th:nth-child(3){width:33%}
.why{color:var(--soft)}
.fail+td,.fails{font-weight:500}
details{margin:6px 0}
summary{cursor:pointer;font-weight:600}
@media(max-width:640px){thead{display:none}tr{display:grid;grid-template-columns:1fr auto;
border-top:1px solid var(--line);padding:6px 0}td{border:0;padding:1px 2px}
td:nth-child(1){font-weight:500}td:nth-child(n+3){grid-column:1/-1}td:empty{display:none}
td:nth-child(4)::before{content:"bound: ";color:var(--soft)}}
"""
_SERIES = "".join(
    f".s{n}{{fill:var(--s{n});stroke:var(--s{n})}}.b{n}{{background:var(--s{n})}}"
    for n in range(MOST_SERIES)
)


def html_page(report: Report) -> str:
    """The page: verdict, failures in words, charts of the measured figures, every item."""
    title = f"mtp-export verify: {report.options.bundle}"
    body = "".join((_head(report), _failures(report), _charts(report), _checks(report)))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}{_SERIES}</style></head>"
        f"<body>{body}</body></html>\n"
    )


def _class(status: Status) -> str:
    return status.replace(" ", "-")


def _head(report: Report) -> str:
    facts = report.as_json()
    options = facts["bundle"]["options"]
    made = ", ".join(f"{key} {options[key]}" for key in ("base_quant", "mtp_quant", "target")
                     if options.get(key))  # fmt: skip
    machine = facts["machine"]
    return (
        f"<h1>{escape(str(report.options.bundle))}</h1>"
        f'<p class="verdict {_class(report.status)}">{escape(verdict_words(report))}</p>'
        f'<p class="soft">{escape(made)}. mtp-export {facts["tool_version"]}, level'
        f" {facts['options']['level']}, {escape(machine['platform'])},"
        f" {machine['cores']} cores.</p>"
    )


def _failures(report: Report) -> str:
    failed = [(check, item) for check, item in report.items if item.status is Status.FAIL]
    if not failed:
        return ""
    rows = "".join(
        f'<div class="card"><h3 class="fail">{escape(check.name)}: {escape(item.name)}</h3>'
        f"<p>{escape(item.cause)}</p><p class='soft'>{escape(_measured(item))}</p></div>"
        for check, item in failed
    )
    return f'<h2>What failed</h2><div class="cards">{rows}</div>'


def _measured(item: Item) -> str:
    return f"{item.figure} (bound: {item.bound})" if item.bound else item.figure


def _charts(report: Report) -> str:
    cards = "".join(
        f'<div class="card"><h3>{escape(chart.title)}</h3>{chart.svg}{legend(chart.labels)}</div>'
        for chart in charts(report)
    )
    return f'<h2>Measured</h2><div class="cards">{cards}</div>' if cards else ""


def _checks(report: Report) -> str:
    return "<h2>Every item</h2>" + "".join(_check(result) for result in report.results)


def _check(result: CheckResult) -> str:
    head = "<tr><th>item</th><th>result</th><th>figure</th><th>bound</th></tr>"
    rows = "".join(_row(item) for item in result.items)
    shown = " open" if result.status is Status.FAIL else ""
    return (
        f'<details{shown}><summary>{escape(result.title)} <span class="{_class(result.status)}">'
        f'{escape(result.status)}</span> <span class="soft">{len(result.items)} items,'
        f" {result.seconds:.1f} s</span></summary><table><thead>{head}</thead>"
        f"<tbody>{rows}</tbody></table></details>"
    )


def _row(item: Item) -> str:
    why = ""
    if item.cause:
        why = f'<div class="why">{escape(item.cause)}</div>'
    return (
        f'<tr><td>{escape(item.name)}{why}</td><td class="{_class(item.status)}">'
        f"{escape(item.status)}</td><td>{escape(item.figure)}</td><td>{escape(item.bound)}</td></tr>"
    )
