"""The table and the plot of decoding have a row for every method that is compared."""

from __future__ import annotations

from pathlib import Path

from benchmarks.bench_decode import compared, concurrency_row, drafting_llms, draw, table
from mtp_runtime import LLM
from runtime.drafts import ffn_layout, write_eagle3, write_heads
from runtime.harness import prompts_of


def test_every_method_has_a_row(small: Path, tmp_path: Path) -> None:
    drafts = [
        ("eagle3", "3", str(write_eagle3(tmp_path / "eagle3"))),
        ("parallel_heads", "1", str(write_heads(tmp_path / "heads", ffn_layout()))),
    ]
    plain, llms = LLM(small), drafting_llms(small, 2, drafts)
    names = ["mtp k=2", "inference_with_reference k=2", "eagle3 k=3", "parallel_heads k=1"]
    assert list(llms) == names
    prompts = prompts_of([5, 6], 96)
    at_once = compared(plain, llms, prompts[:1], tokens=4)
    assert [row["method"] for row in at_once] == names
    assert all(row["mean_accepted_length"] >= 1 and row["speedup"] > 0 for row in at_once)
    engines = {"baseline": plain, **llms}
    rows = [concurrency_row(llm, name, 2, prompts, 4) for name, llm in engines.items()]
    shown = [line.split(" | ")[0] for line in table(rows).splitlines()[2:]]
    assert shown == [f"| {name}" for name in engines]
    drafting = {name for name in names if llms[name].engine.totals.drafted}
    assert drafting >= {"mtp k=2", "eagle3 k=3", "parallel_heads k=1"}
    draw(rows, tmp_path / "decode.svg")
    drawn = (tmp_path / "decode.svg").read_text()
    assert all(name in drawn for name in engines)
