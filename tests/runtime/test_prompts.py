"""Prompts from files and command lines: what is read, and the line that a refusal names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cases import run_program, unread_model
from mtp_checkpoints.errors import InvalidInputError, UsageError
from mtp_runtime.prompts import read_prompts, read_texts
from mtp_runtime.sampling import SamplingParams

GOOD = b'{"prompt": "caf\xc3\xa9"}\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "prompts.jsonl"


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        b"\xef\xbb\xbf" + GOOD,
        b"\n \t\n" + GOOD.replace(b"\n", b"\r\n") + b"\r\n\n",
        b'{"prompt": "caf\\u00e9"}',
    ],
)
def test_blank_lines_and_a_byte_order_mark_are_skipped(text: bytes, file: Path) -> None:
    file.write_bytes(text)
    assert read_prompts(file) == ("café",)


def test_completions_are_read(file: Path) -> None:
    file.write_bytes(b'{"prompt": "a", "completion_token_ids": []}\n{"prompt_token_ids": [1]}\n')
    assert read_texts(file) == (("a", ()), ((1,), None))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"prompt": "caf\xe9"}', "Line 3 is not UTF-8"),
        (b'{"prompt": "\\ud800"}', "line 3 of"),
        (b'{"prompt": "a", "completion": "\\udfff"}', "The completion in line 3 of"),
        (b'{"prompt": ' + b"[" * 100_000, "Line 3 is no prompt"),
        (b'{"prompt_token_ids": [' + b"9" * 5000 + b"]}", "Line 3 is no prompt"),
        (b'{"prompt_token_ids": []}', "Line 3 is no prompt"),
        (b'{"prompt_token_ids": [true]}', "Line 3 is no prompt"),
        (b'{"prompt": "a", "completion": 5}', "Line 3 is no prompt"),
        (b"5", "Line 3 is no prompt"),
        (b"{", "Line 3 is no prompt"),
        (b"\xef\xbb\xbf" + GOOD.strip(), "Line 3 is no prompt"),
    ],
)
def test_a_refusal_names_the_line(line: bytes, words: str, file: Path) -> None:
    file.write_bytes(GOOD + b"\n" + line + b"\n" + GOOD)
    with pytest.raises(InvalidInputError, match=words) as refusal:
        read_prompts(file)
    text = str(refusal.value)
    assert str(file) in text and len(text) < 1000 and text.isprintable()


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_other_encodings_are_refused(encoding: str, file: Path) -> None:
    file.write_bytes(GOOD.decode().encode(encoding))
    with pytest.raises(InvalidInputError, match="Line 1 is"):
        read_prompts(file)


@pytest.mark.parametrize("text", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_a_file_without_a_prompt_says_so(text: bytes, file: Path) -> None:
    file.write_bytes(text)
    outcome = run_program("generate", file.parent, "--prompts", file)
    assert (outcome.code, "holds no prompt" in outcome.err) == (3, True)


def test_prompts_and_options_are_checked_before_the_model_is_loaded(file: Path) -> None:
    file.write_bytes(b"5\n")
    prompt, model = ("--prompt", "a"), unread_model(file.parent / "model")
    for arguments, code, words in (
        (("--prompt", "a", "--prompt", os.fsdecode(b"caf\xe9")), 3, "Prompt 2 of --prompt"),
        (("--prompts", file), 3, "Line 1 is no prompt"),
        ((), 2, "There is no prompt"),
        ((*prompt, "--temperature", "-1"), 2, "temperature"),
        ((*prompt, "--temperature", "nan"), 2, "temperature"),
        ((*prompt, "--top-p", "1.5"), 2, "--top-p"),
        ((*prompt, "--top-k", "-1"), 2, "--top-k is out of range"),
        ((*prompt, "--max-new-tokens", "0"), 2, "--max-new-tokens"),
        ((*prompt, "--stop", ""), 2, "stop"),
        ((*prompt, *prompt, "--seed", (1 << 64) - 1), 2, "seed"),
        ((*prompt, "--draft-model", "d", "--speculate-method", "mtp"), 2, "takes no draft_model"),
        ((*prompt, "--speculate-method", "draft_model"), 2, "needs a draft_model"),
    ):
        outcome = run_program("generate", model, *arguments)
        assert (outcome.code, outcome.err.count("\n")) == (code, 1), outcome.err
        assert words in outcome.err


@pytest.mark.parametrize(
    "option",
    [
        {"max_tokens": 2.5},
        {"max_tokens": True},
        {"max_tokens": "3"},
        {"top_k": 1.0},
        {"seed": 0.5},
        {"temperature": "1"},
        {"top_p": None},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop": 5},
        {"stop": b"ab"},
    ],
)
def test_options_of_another_type_are_refused(option: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=f"Option {next(iter(option))}"):
        SamplingParams(**option)  # type: ignore[arg-type]
