"""A main model that is damaged is told first, and nothing else as the cause of its drafts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from faults.matrix import no_progress
from mtp_export.verify import CHECKS
from mtp_export.verify.check import Item, Level, Status, failed, passed
from mtp_export.verify.context import Context
from mtp_export.verify.decoding import acceptance
from mtp_export.verify.decoding.training import OF_MODULE
from mtp_export.verify.options import VerifyOptions

HARM = failed("no layer of the main model does harm", "o_proj of layer 2 has the wrong sign")


FIXTURE = Path(__file__).resolve().parents[2] / "fixtures/glm4-moe-tiny"


def accepted(folder: Path, *found: Item) -> dict[str, Item]:
    """Items of check acceptance, after what check likelihood found."""
    prompts = folder / "prompts.jsonl"
    lines = [json.dumps({"prompt": text}) for text in ("def add(a, b):", "import json\n")]
    prompts.write_text("\n".join(lines))
    options = VerifyOptions(FIXTURE, None, Level.RUN, prompts=prompts, max_new_tokens=8, ks=(2,))
    context = Context.open(options, no_progress)
    context.note_failures("likelihood", found)
    return {item.name: item for item in acceptance.run(context)}


def test_what_a_damaged_main_model_accepts_is_no_evidence(tmp_path: Path) -> None:
    assert [*CHECKS].index("likelihood") < [*CHECKS].index("acceptance")
    items = accepted(tmp_path, passed("temperature of plain text"), HARM)
    left = {name for name, item in items.items() if item.status is Status.NOT_TESTED}
    assert left == {
        *("later drafts hold", "sanity band of draft 1", "no other layout drafts better"),
        *("first-token handling", "contract"),
    }
    assert items["contract"].cause == (
        "the main model, which feeds the drafts and judges them, is damaged, as check likelihood,"
        " no layer of the main model does harm says"
    )
    assert "k=2, draft 1" in items and "k=2, mean accepted length" in items


@pytest.mark.parametrize(
    "found", [failed(OF_MODULE, "eh_proj is damaged"), passed("none")], ids=["module", "nothing"]
)
def test_all_else_leaves_the_module_to_be_judged(
    found: Item, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptance, "alternatives", lambda corpus: [])
    monkeypatch.setattr(acceptance, "diagnosed", lambda *a, **b: [passed("contract")])
    items = accepted(tmp_path, found)
    assert items["contract"].status is Status.PASS
    assert items["later drafts hold"].status is not Status.NOT_TESTED
