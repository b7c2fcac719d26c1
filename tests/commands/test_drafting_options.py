"""Options of drafting are the same in generate, serve and LLM, and are looked at before any weight
is read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import pytest

import mtp_runtime
from cases import export, run_program, unread_model
from mtp_checkpoints.errors import UsageError
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_checkpoints.tensors.tensor_reader import TensorReader
from mtp_runtime import LLM
from mtp_runtime.config import LLMOptions, SpeculationConfig
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.parallel.group import Group

pytest.importorskip("starlette", reason="the extra serve is not installed")

COMMANDS = (("generate", "--prompt", "a"), ("serve",))
MTP = ("--speculate-method", "mtp")
Words = tuple[object, ...]

# Of the commands, the same of LLM, and words of the refusal.
REFUSED: list[tuple[Words, dict[str, Any], str]] = [
    (("--k-schedule", "1"), {"k_schedule": [1]}, "cannot be read"),
    (("--k-schedule", "1:x"), {"k_schedule": "1:5"}, "cannot be read"),
    (("--k-schedule", "1:2:3"), {"k_schedule": [(1, 2, 3)]}, "cannot be read"),
    (("--k-schedule", "2:1"), {"k_schedule": [(2, 1)]}, "every batch size"),
    (("--k-schedule", "1:9"), {"k_schedule": [(1, 9)]}, "out of range"),
    (("--draft-temperature", "a"), {"draft_temperature": 0.5}, "cannot be read"),
    (("--draft-temperature", "0.5,"), {"draft_temperature": "0.5"}, "cannot be read"),
    (("--draft-temperature", "0.5,-1"), {"draft_temperature": [0.5, -1]}, "out of range"),
    (("--draft-temperature", "nan"), {"draft_temperature": [math.nan]}, "out of range"),
    (("--draft-stop-entropy", "-1"), {"draft_stop_entropy": -1}, "out of range"),
    (("--draft-stop-entropy", "nan"), {"draft_stop_entropy": math.nan}, "out of range"),
    (
        ("--adaptive", "--k-schedule", "1:2"),
        {"adaptive": True, "k_schedule": [(1, 2)]},
        "one of the options adaptive and k_schedule",
    ),
    (
        ("--speculate-max-draft-token-num", 2, "--k-schedule", "1:2"),
        {"speculate_max_draft_token_num": 2, "k_schedule": [(1, 2)]},
        "one of the options speculate_max_draft_token_num and k_schedule",
    ),
    *(
        (
            ("--speculate-method", method, *words),
            {"speculate_method": method, **options},
            "are for drafts that are drawn",
        )
        for method in ("none", "inference_with_reference")
        for words, options in (
            (("--draft-temperature", "0.5"), {"draft_temperature": [0.5]}),
            (("--draft-stop-entropy", "1"), {"draft_stop_entropy": 1.0}),
        )
    ),
    *(
        (
            ("--speculate-method", "none", *words),
            {"speculate_method": "none", **options},
            "choose how many drafts there are",
        )
        for words, options in (
            (("--adaptive",), {"adaptive": True}),
            (("--k-schedule", "1:2"), {"k_schedule": [(1, 2)]}),
        )
    ),
]


@pytest.mark.parametrize(("words", "options", "refusal"), REFUSED)
def test_the_same_is_refused_before_loading(
    words: Words, options: dict[str, Any], refusal: str, tmp_path: Path
) -> None:
    """Loading would say that there is no bundle."""
    nothing = unread_model(tmp_path / "nothing")
    for command, *more in COMMANDS:
        outcome = run_program(command, nothing, *more, *words)
        assert (outcome.code, outcome.out) == (2, ""), outcome
        assert refusal in outcome.err and len(outcome.err.strip().splitlines()) == 1
    with pytest.raises(UsageError, match=refusal):
        LLM(nothing, **cast(Any, {"speculate_method": "auto"} | options))


ACCEPTED: list[tuple[Words, SpeculationConfig]] = [
    (("--adaptive",), SpeculationConfig("mtp", max_draft_tokens=5, adaptive=True)),
    (
        ("--adaptive", "--speculate-max-draft-token-num", 3, "--draft-stop-entropy", 1.5),
        SpeculationConfig("mtp", max_draft_tokens=3, adaptive=True, draft_stop_entropy=1.5),
    ),
    (
        ("--k-schedule", "1:5, 16:2,64:0", "--draft-temperature", "0.5,0.8"),
        SpeculationConfig(
            "mtp", k_schedule=((1, 5), (16, 2), (64, 0)), draft_temperature=(0.5, 0.8)
        ),
    ),
]


@pytest.mark.parametrize(("words", "expected"), ACCEPTED)
def test_the_commands_hand_on_the_same(
    words: Words, expected: SpeculationConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def handed_on(group: Group, bundle: Path, options: LLMOptions) -> LLM:
        asked.append(options.speculation())
        raise UsageError("Enough was seen")

    monkeypatch.setattr(mtp_runtime.llm, "llm_of", handed_on)
    for command, *more in COMMANDS:
        outcome = run_program(command, unread_model(tmp_path), *more, *MTP, *words)
        assert "Enough was seen" in outcome.err
    assert asked == [expected] * len(COMMANDS)


def test_options_of_drafts_want_a_module_before_loading(
    pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "bundle"
    assert export(pristine, output, "--part", "main", "--quiet").code == 0
    monkeypatch.setattr(TensorReader, "__init__", lambda *_, **__: pytest.fail("a tensor is read"))
    asking: list[dict[str, Any]] = [
        {"adaptive": True},
        {"k_schedule": [(1, 2)]},
        {"draft_stop_entropy": 1.0},
    ]
    for options in asking:
        with pytest.raises(UsageError, match="no MTP module to draft with"):
            LLM(output, speculate_method="auto", **cast(Any, options))


def test_options_of_drafts_want_a_module_of_a_model_loaded_before(pristine: Path) -> None:
    loaded = load_model(pristine, LoadOptions(with_mtp=False))
    with pytest.raises(UsageError, match="no MTP module to draft with"):
        LLM(pristine, loaded=loaded, speculate_method="auto", adaptive=True)


def test_looking_for_a_module_opens_headers_once(
    pristine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, usual = list[Path](), Checkpoint.open
    noting = staticmethod(lambda folder: opened.append(folder) or usual(folder))
    monkeypatch.setattr(Checkpoint, "open", noting)
    llm = LLM(pristine, speculate_method="auto", adaptive=True)
    assert llm.engine.config.speculation.method == "mtp"
    assert opened == [pristine]


def test_a_draft_that_is_not_there_is_missed_before_loading(tmp_path: Path) -> None:
    nothing = unread_model(tmp_path / "nothing")
    for method in ("eagle3", "parallel_heads", "draft_model"):
        words = ("--speculate-method", method, "--draft-model", tmp_path / "draft")
        for command, *more in COMMANDS:
            outcome = run_program(command, nothing, *more, *words)
            assert outcome.code == 3 and "no draft_model here" in outcome.err
