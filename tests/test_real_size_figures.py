"""The tables of real layer sizes in docs/benchmarks.md are those of the result files."""

from __future__ import annotations

import json

from pages import ROOT, rows_of, sections_of

PAGE = ROOT / "docs/benchmarks.md"
SECTION = sections_of(PAGE)["Real layer sizes, beside llama.cpp"]
# Of each table the result files, and whether it has a column with drafts.
TABLES = (
    (("real_sizes.json", "real_sizes_int8.json"), False),
    (
        (
            "real_sizes_zen5.json",
            "real_sizes_zen5_int8.json",
            "real_sizes_zen5_whole.json",
            "real_sizes_zen5_whole_bf16.json",
        ),
        True,
    ),
    (("real_sizes_v3.json",), False),
    (("real_sizes_avx2.json", "real_sizes_whole.json"), True),
    (("real_sizes_qwen.json",), True),
)


def test_real_sizes() -> None:
    measured = []
    for names, drafted in TABLES:
        for name in names:
            result = json.loads((ROOT / "benchmarks/results" / name).read_text())
            assert result["machine"]["commit"][:8] in SECTION
            for row in result["rows"].values():
                speeds = [row["prompt"], *row["decode"].values(), row.get("drafted")][: 4 + drafted]
                measured.append(["–" if speed is None else f"{speed:.1f}" for speed in speeds])
    shown = [cells for _, *cells in rows_of(SECTION)]
    assert sorted(shown) == sorted(measured)
