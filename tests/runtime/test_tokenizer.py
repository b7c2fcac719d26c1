"""The tokenizer of a checkpoint: a damaged one is one clear paragraph, wherever it fails."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, normalizers
from tokenizers.models import BPE, WordLevel

from cases import run_program
from mtp_checkpoints.errors import InvalidInputError, UsageError
from mtp_runtime.tokenizer import TextStream, Tokenizer


def words(folder: Path) -> dict[str, Any]:
    """A small good tokenizer, as JSON."""
    path = folder / "tokenizer.json"
    Backend(WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]")).save(str(path))
    content: dict[str, Any] = json.loads(path.read_text())
    return content


Change = Callable[[dict[str, Any]], object]
DAMAGE: dict[str, Change] = {
    "an id that is text": lambda t: t["model"]["vocab"].update(a="0"),
    "a negative id": lambda t: t["model"]["vocab"].update(a=-1),
    "a fraction for an id": lambda t: t["model"]["vocab"].update(a=1.5),
    "an id beyond 32 bits": lambda t: t["model"]["vocab"].update(a=2**40),
    "no vocabulary": lambda t: t["model"].pop("vocab"),
    "an unknown model": lambda t: t.update(model={"type": "Oracle"}),
    "no model": lambda t: t.pop("model"),
    "an added token without id": lambda t: t.update(added_tokens=[{"content": "x"}]),
    "an added token with another id": lambda t: t.update(
        added_tokens=[
            dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
            | {"id": "7", "content": "x"}
        ]
    ),
    "an unknown step": lambda t: t.update(pre_tokenizer={"type": "Magic"}),
    "a pattern that is none": lambda t: t.update(
        pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"}
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_tokenizer_is_refused(case: str, tmp_path: Path) -> None:
    content = words(tmp_path)
    DAMAGE[case](content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(InvalidInputError, match="tokenizer.json"):
        Tokenizer.find(tmp_path)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff\xfe", b"null", b'{"model": "\\ud800"}'])
def test_what_is_no_tokenizer_is_refused(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(raw)
    with pytest.raises(InvalidInputError, match="tokenizer.json"):
        Tokenizer.find(tmp_path)


def test_a_tokenizer_that_fails_on_a_text_says_so(tmp_path: Path) -> None:
    """The unknown word's token is itself unknown."""
    content = words(tmp_path)
    del content["model"]["vocab"]["[UNK]"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.find(tmp_path)
    assert tokenizer.encode("a") == (0,)
    with pytest.raises(InvalidInputError, match="fails on a text"):
        tokenizer.encode("c")


def test_a_tokenizer_that_panics_says_so(tmp_path: Path) -> None:
    """The package ends in a panic, which is no Exception, where a template names no token."""
    content = words(tmp_path)
    piece = [{"SpecialToken": {"id": "[X]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    template = {"type": "TemplateProcessing", "single": piece, "pair": piece, "special_tokens": {}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | {"post_processor": template}))
    with pytest.raises(InvalidInputError, match="tokenizer.json"):
        Tokenizer.find(tmp_path).encode("a")


def test_a_good_tokenizer(tmp_path: Path) -> None:
    words(tmp_path)
    tokenizer = Tokenizer.find(tmp_path)
    assert tokenizer.found and tokenizer.encode("b") == (1,) and tokenizer.decode([0, 1]) == "a b"
    assert not Tokenizer.find(tmp_path / "none").found


def test_generate_names_a_damaged_tokenizer(small: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(small, tmp_path / "model", copy_function=os.link))
    (folder / "tokenizer.json").write_text('{"model": 1}')
    outcome = run_program("generate", folder, "--prompt", "x")
    assert outcome.code == 3 and "tokenizer.json" in outcome.err
    assert len(outcome.err.splitlines()) == 1


def byte_fallback() -> Backend:
    """A tokenizer as Llama's: words with their spaces, and single bytes."""
    words = ["\u2581", "\u2581a", "\u2581\u2581", "\u20ac", *map(chr, range(33, 127))]
    vocab = {word: number for number, word in enumerate(words)}
    vocab |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    backend = Backend(BPE(vocab, [], byte_fallback=True))
    steps = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    backend.decoder = decoders.Sequence(steps)
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.add_special_tokens(["<end>"])
    return backend


def sequences(backend: Backend, text: str, *, cut: bool) -> list[list[int]]:
    """Tokens of a text, with special ones between; random ones, where characters may be cut."""
    choice = random.Random(7)
    vocabulary = backend.get_vocab_size()
    own, end = list(backend.encode(text).ids), list(backend.get_added_tokens_decoder())[-1]
    ends = [end, end, *own, end, end, *own, end]
    if not cut:
        return [own, ends]
    mixed = [one for token in own for one in (token, *choice.sample(range(vocabulary), k=1))]
    return [own, ends, mixed, [choice.randrange(vocabulary) for _ in range(300)]]


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_tokens_one_by_one_give_the_text_of_all(kind: str, trained: Path) -> None:
    """Wherever no character is cut: where one is, byte fallback makes the bytes before it none."""
    fallback = kind == "byte fallback"
    backend = byte_fallback() if fallback else Tokenizer.find(trained).backend
    tokenizer = Tokenizer(trained, backend)
    text = "na\u00efve \u20ac5 \U0001f600\U0001f680 a b  ab \u4f60\u597d \n\n a"
    for tokens in sequences(backend, text, cut=not fallback):
        stream, made = TextStream(tokenizer.decode), ""
        for count in range(1, len(tokens) + 1):
            made += stream.add(tokens[count - 1])
            whole = tokenizer.decode(tokens[:count])
            assert made == whole or whole.endswith("\ufffd")


def test_a_token_is_decoded_with_few_others(trained: Path) -> None:
    """Also behind thousands of end tokens, which have no text."""
    tokenizer, given = Tokenizer.find(trained), 0

    def decode(tokens: Sequence[int]) -> str:
        nonlocal given
        given += len(tokens)
        return tokenizer.decode(tokens)

    stream = TextStream(decode)
    tokens = [*tokenizer.encode("Once upon a time \u20ac \u4f60\u597d" * 40), *[1] * 4000]
    for token in tokens:
        stream.add(token)
    assert given < 12 * len(tokens)


def test_a_long_text_is_counted_only_as_far_as_it_fits(trained: Path) -> None:
    tokenizer = Tokenizer.find(trained)
    text = "a story of the sea " * 20_000
    tokens = len(tokenizer.encode(text))
    tokenizer.require_fit(text, tokens)
    tokenizer.require_fit("a " * 1000, 1)  # too short to take long
    with pytest.raises(UsageError, match="at most 1000"):
        tokenizer.require_fit(text, 1000)
    counted: list[int] = []
    tokenizer = Tokenizer(trained, Counting(tokenizer.backend, counted))
    with pytest.raises(UsageError):
        tokenizer.require_fit("a " * 1_000_000, 4096)
    assert counted == [1 << 16]


class Counting:
    """A backend that notes how long the texts are that it tokenizes."""

    def __init__(self, backend: Any, lengths: list[int]) -> None:
        self._backend, self._lengths = backend, lengths

    def encode_batch_fast(self, texts: Sequence[str], **options: Any) -> Any:
        self._lengths += map(len, texts)
        return self._backend.encode_batch_fast(texts, **options)


@pytest.mark.parametrize("direction", ["encode", "decode"])
def test_other_threads_run_while_a_text_is_translated(trained: Path, direction: str) -> None:
    """They would not where the tokenizer keeps the interpreter's lock, as some of its calls do."""
    tokenizer, ended, count = Tokenizer.find(trained), threading.Event(), 0

    def counting() -> None:
        nonlocal count
        while not ended.wait(0.001):
            count += 1

    thread, interval = threading.Thread(target=counting), sys.getswitchinterval()
    ids = tokenizer.encode("a " * 300_000)
    sys.setswitchinterval(100)  # no thread gives the lock away unless it waits
    try:
        thread.start()
        before = count
        tokenizer.encode("a " * 300_000) if direction == "encode" else tokenizer.decode(ids)
        assert count - before > 5
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        thread.join()
