"""Embedding and head in the folder of --mtp under the main model's names are compared with the main
model's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import read_json, run_program
from verify.foreign import DEEPSEEK, GLM, Tensors, rewritten, without

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TABLES = {
    EMBEDDING: "draft's embed_tokens.weight is the main model's",
    HEAD: "draft's shared_head.head.weight is the main model's",
}
QWEN = GLM.parent / "qwen3-5-tiny"  # of tied tables
Change = Callable[[torch.Tensor], torch.Tensor]


def of_mtp(source: Path) -> str:
    """Prefix of the MTP layer's tensors."""
    return f"model.layers.{read_json(source / 'config.json')['num_hidden_layers']}."


def draft_of(source: Path, folder: Path, change: Change | None) -> Path:
    """The MTP layer without copies beside the changed tables; None for a folder without any."""
    copies = tuple(of_mtp(source) + name for name in ("embed_tokens", "shared_head.head"))

    def kept(stored: Tensors) -> Tensors:
        layer = {n: one for n, one in stored.items() if n.startswith(of_mtp(source))}
        own = {n: one for n, one in layer.items() if not n.startswith(copies)}
        return own if change is None else own | {n: change(stored[n]).clone() for n in TABLES}

    return rewritten(source, folder, kept)


def judged(main: Path, draft: Path, level: str = "weights") -> tuple[int, dict[str, Any]]:
    options = ("--mtp", draft, "--level", level, "--json", "--quiet")
    outcome = run_program("verify", main, *options)
    checks = json.loads(outcome.out)["checks"]
    return outcome.code, {item["name"]: item for check in checks for item in check["items"]}


def near(table: torch.Tensor) -> torch.Tensor:
    noise = torch.randn(table.shape, generator=torch.Generator().manual_seed(1))
    return (table.float() + 0.1 * table.float().std() * noise).to(table.dtype)


def main_of(source: Path, folder: Path) -> Path:
    return rewritten(source, folder, without(of_mtp(source)))


@pytest.mark.parametrize("source", [GLM, DEEPSEEK], ids=lambda source: source.name)
def test_tables_of_another_model_are_told(source: Path, tmp_path: Path) -> None:
    main = main_of(source, tmp_path / "main")
    draft = draft_of(source, tmp_path / "draft", lambda table: table.flip(0))
    assert judged(main, draft, "files")[0] == 0
    code, items = judged(main, draft)
    failed = {name: item["cause"] for name, item in items.items() if item["status"] == "fail"}
    assert (code, failed.keys()) == (7, {*TABLES.values()})
    for table, name in TABLES.items():
        words = f"{table} of {draft} differs from the main model's: the draft is of another"
        assert failed[name].startswith(words)


GOOD: dict[str, tuple[Change | None, str]] = {
    "equal": (torch.clone, "pass"),
    "in fp32": (torch.Tensor.float, "pass"),
    "none": (None, "not tested"),
    "padded": (lambda one: torch.cat([one, one[:64] * 0]), "not tested"),
    "trained on": (near, "not tested"),
}


@pytest.mark.parametrize("case", GOOD)
def test_good_ones_are_no_failure(case: str, tmp_path: Path) -> None:
    change, status = GOOD[case]
    main = main_of(GLM, tmp_path / "main")
    code, items = judged(main, draft_of(GLM, tmp_path / "draft", change))
    assert (code, {items[name]["status"] for name in TABLES.values()}) == (0, {status})
    assert ("near" in items[TABLES[HEAD]]["cause"]) is (case == "trained on")


@pytest.mark.parametrize("same", [True, False])
def test_of_a_tied_model_the_embedding_is_compared(same: bool, tmp_path: Path) -> None:
    """Whatever a head beside it holds, which no such model computes with."""

    def kept(stored: Tensors) -> Tensors:
        mtp = {own: one for own, one in stored.items() if own.startswith("mtp.")}
        table = stored[EMBEDDING] if same else stored[EMBEDDING].flip(0)
        return {**mtp, EMBEDDING: table.clone(), HEAD: table.flip(1).contiguous()}

    main = rewritten(QWEN, tmp_path / "main", without("mtp."))
    code, items = judged(main, rewritten(QWEN, tmp_path / "draft", kept))
    (item,) = (one for name, one in items.items() if name.endswith("is the main model's"))
    assert (code, item["status"]) == ((0, "pass") if same else (7, "fail")), item["cause"]


def test_the_draft_s_own_copies_are_judged_in_their_place(tmp_path: Path) -> None:
    def others(stored: Tensors) -> None:
        stored.update({name: stored[name].flip(0) for name in TABLES})

    main = main_of(DEEPSEEK, tmp_path / "main")
    code, items = judged(main, rewritten(DEEPSEEK, tmp_path / "draft", others))
    assert (code, {items[name]["status"] for name in TABLES.values()}) == (0, {"pass"})
