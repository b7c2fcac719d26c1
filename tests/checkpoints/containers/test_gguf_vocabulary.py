"""Vocabularies as keys of GGUF files, against the reading of the package that llama.cpp's converter
writes with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cases import edit_json
from mtp_checkpoints.containers.gguf_pre_tokenizers import _OF_HASH, pre_tokenizer_of
from mtp_checkpoints.containers.gguf_values import Value
from mtp_checkpoints.containers.gguf_vocabulary import vocabulary_keys
from mtp_checkpoints.errors import InvalidInputError, UnsupportedError, UsageError
from mtp_checkpoints.sources.local_folder import LocalFolder

MINIATURE = Path(__file__).parents[3] / "fixtures/deepseek-v3-tiny"
TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
# By SpecialVocab's names.
IDS = {"unk": "unknown", "sep": "seperator", "pad": "padding"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The trained fixture's tokenizer and config, to be changed."""
    for name in (TOKENIZER, SETTINGS, "config.json"):
        shutil.copy(MINIATURE / name, tmp_path)
    return tmp_path


def keys_of(folder: Path, pre_tokenizer: str | None = "gpt-2", **config: Any) -> dict[str, Value]:
    config = {**json.loads((folder / "config.json").read_text()), **config}
    size = config["vocab_size"]
    return vocabulary_keys(LocalFolder(folder), config, size, pre_tokenizer)


def change(folder: Path, name: str, **fields: Any) -> None:
    edit_json(folder / name, lambda value: value.update(fields))


def template(*pieces: str) -> list[dict[str, Any]]:
    """A template of a post-processor: A and B stand for the texts."""
    return [
        {"Sequence": {"id": piece, "type_id": 0}}
        if piece in "AB"
        else {"SpecialToken": {"id": piece, "type_id": 0}}
        for piece in pieces
    ]


def processor(single: tuple[str, ...], pair: tuple[str, ...]) -> dict[str, Any]:
    templates = {"single": template(*single), "pair": template(*pair)}
    return {"type": "TemplateProcessing", **templates, "special_tokens": {}}


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
# Of the package that tests install the settings count for more than the post-processor; of that of
# llama.cpp, which the converter uses, it is the other way round.
LATER: dict[str, dict[str, bool]] = {
    "byte level": {"bos": False, "eos": False},
    "eos behind": {"bos": True, "eos": True, "sep": False},
}
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "released": ({}, {}),
    "byte level": ({"post_processor": BYTE_LEVEL}, {"add_bos_token": True}),
    "no post-processor": ({"post_processor": None}, {"add_eos_token": True}),
    "eos behind": ({"post_processor": processor(("A", EOS), ("A", EOS, "B", EOS))}, {}),
    "sequence": (
        {
            "post_processor": {
                "type": "Sequence",
                "processors": [BYTE_LEVEL, processor((BOS, "A"), (BOS, "A", "B"))],
            }
        },
        {"bos_token": None},
    ),
    "separated": ({"post_processor": processor((BOS, "A"), (BOS, "A", EOS, "B"))}, {}),
    "tokens as objects": ({}, {"eos_token": {"content": EOS, "lstrip": False}, "pad_token": None}),
    "unknown words": ({}, {"unk_token": "<nowhere>", "mask_token": EOS}),
}


@pytest.mark.parametrize("case", CHANGES)
def test_special_tokens_are_those_of_the_converter(folder: Path, case: str) -> None:
    gguf = pytest.importorskip("gguf")
    for name, fields in zip((TOKENIZER, SETTINGS), CHANGES[case], strict=True):
        change(folder, name, **fields)
    keys, theirs = keys_of(folder), gguf.SpecialVocab(folder, load_merges=True)
    ids = {
        f"tokenizer.ggml.{IDS.get(name, name)}_token_id": number
        for name, number in theirs.special_token_ids.items()
    }
    ours = {name: value.data for name, value in keys.items() if name.endswith("_token_id")}
    assert ours == ids
    added = {name: value.data for name, value in keys.items() if ".add_" in name}
    flags = LATER.get(case, theirs.add_special_token)
    assert added == {f"tokenizer.ggml.add_{name}_token": flag for name, flag in flags.items()}
    assert list(keys["tokenizer.ggml.merges"].data) == theirs.merges  # type: ignore[arg-type]
    assert keys["tokenizer.chat_template"].data == theirs.chat_template


def test_tokens_have_kinds(folder: Path) -> None:
    added = json.loads((folder / TOKENIZER).read_text())["added_tokens"]
    own = {"special": False, "normalized": False, "single_word": False}
    added += [
        {"id": 2048, "content": "<|looks|>", **own},
        {"id": 2050, "content": "▁own word", **own},
    ]
    change(folder, TOKENIZER, added_tokens=added)
    keys = keys_of(folder, vocab_size=2052)
    tokens, kinds = (keys[f"tokenizer.ggml.{name}"].data for name in ("tokens", "token_type"))
    assert isinstance(tokens, tuple) and isinstance(kinds, tuple)
    assert len(tokens) == len(kinds) == 2052
    assert tokens[:2] == (BOS, EOS)
    assert kinds[:5] == (3,) * 5
    assert set(kinds[5:2048]) == {1}
    assert tokens[2048:] == ("<|looks|>", "[PAD2049]", " own word", "[PAD2051]")
    assert kinds[2048:] == (3, 5, 4, 5)
    assert keys["tokenizer.ggml.model"].data == "gpt2"
    assert keys["tokenizer.ggml.pre"].data == "gpt-2"


def test_merges_of_pairs_keep_their_spaces(folder: Path) -> None:
    model = json.loads((folder / TOKENIZER).read_text())["model"]
    change(folder, TOKENIZER, model={**model, "merges": [["a b", "c"], ["d", "e"]]})
    assert keys_of(folder)["tokenizer.ggml.merges"].data == ("aĠb c", "d e")


def test_glms_own_tokens_are_named(folder: Path) -> None:
    """GLM's first token, and what ends its turns, are in no field of its configs."""
    added = json.loads((folder / TOKENIZER).read_text())["added_tokens"]
    for entry, word in zip(added[2:], ["[gMASK]", "<|user|>", "<|observation|>"], strict=True):
        entry["content"] = word
    change(folder, TOKENIZER, added_tokens=added, post_processor=None)
    change(folder, SETTINGS, bos_token=None, pad_token=None)
    keys = keys_of(folder, model_type="glm4_moe", bos_token_id=None)
    ids = {name: keys[f"tokenizer.ggml.{name}_token_id"].data for name in ("bos", "eot", "eom")}
    assert ids == {"bos": 2, "eot": 3, "eom": 4}
    other = keys_of(folder, bos_token_id=None)
    assert not {"tokenizer.ggml.bos_token_id", "tokenizer.ggml.eot_token_id"} & other.keys()


def test_templates_may_be_several(folder: Path) -> None:
    entries = [{"name": "default", "template": "A"}, {"name": "tool use", "template": "B"}]
    change(folder, SETTINGS, chat_template=entries)
    keys = keys_of(folder)
    assert keys["tokenizer.chat_template"].data == "A"
    assert keys["tokenizer.chat_template.tool_use"].data == "B"
    assert keys["tokenizer.chat_templates"].data == ("tool_use",)


def test_templates_may_be_files(folder: Path) -> None:
    edit_json(folder / SETTINGS, lambda value: value.pop("chat_template"))
    (folder / "chat_template.json").write_text('{"chat_template": "of the object"}')
    assert keys_of(folder)["tokenizer.chat_template"].data == "of the object"
    (folder / "chat_template.jinja").write_text("of the file")
    assert keys_of(folder)["tokenizer.chat_template"].data == "of the file"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/rag.jinja").write_text("another")
    keys = keys_of(folder)
    assert keys["tokenizer.chat_template"].data == "of the file"
    assert keys["tokenizer.chat_template.rag"].data == "another"


def test_an_unknown_pre_tokenizer_is_refused_with_its_hash(folder: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"hash [0-9a-f]{64}.*--pre-tokenizer gpt-2"):
        keys_of(folder, None)


def test_a_known_pre_tokenizer_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError) as refused:
        keys_of(folder, None)
    found = str(refused.value.found).removeprefix("hash ")
    monkeypatch.setitem(_OF_HASH, found, "glm4")
    assert keys_of(folder, None)["tokenizer.ggml.pre"].data == "glm4"


def test_the_first_token_counts_as_transformers_adds_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some tokenizer.json have no post-processor that adds what their class in transformers does:
    the hash is of the ids with it."""
    with pytest.raises(UnsupportedError) as usual:
        keys_of(folder, None)
    change(folder, TOKENIZER, post_processor=None)
    raw = (folder / TOKENIZER).read_bytes()
    with pytest.raises(UnsupportedError) as added:
        pre_tokenizer_of(folder / TOKENIZER, raw, bos=0)
    assert added.value.found == usual.value.found
    with pytest.raises(UnsupportedError) as plain:
        pre_tokenizer_of(folder / TOKENIZER, raw, bos=None)
    assert plain.value.found != usual.value.found


def test_hashes_are_those_of_transformers(folder: Path) -> None:
    """The converter hashes what transformers' tokenizer makes of its text."""
    transformers = pytest.importorskip("transformers")
    import hashlib

    from mtp_checkpoints.containers.gguf_pre_tokenizers import _TEXT

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    digest = hashlib.sha256(str(list(tokenizer.encode(_TEXT))).encode()).hexdigest()
    with pytest.raises(UnsupportedError, match=digest):
        keys_of(folder, None)


def test_no_vocabulary_is_written_where_none_is_wanted(folder: Path) -> None:
    (folder / TOKENIZER).unlink()
    assert {key: value.data for key, value in keys_of(folder, "none").items()} == {
        "tokenizer.ggml.model": "none"
    }
    with pytest.raises(UnsupportedError, match="--pre-tokenizer none"):
        keys_of(folder)


def test_another_name_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="deepseek-v3"):
        keys_of(folder, "deepseek_v3")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": {"type": "Unigram", "vocab": []}}, "Only BPE"),
        ({"model": None}, "Only BPE"),
        ({"model": {"type": "BPE", "vocab": []}}, "no usable vocab"),
        ({"model": {"type": "BPE", "vocab": {"a": 2048}}}, "no row for: 'a'"),
        ({"model": {"type": "BPE", "vocab": {"a": True}}}, "no row for: 'a'"),
        ({"model": {"type": "BPE", "vocab": {"a": 1}, "merges": [["a"]]}}, "no usable merges"),
        ({"added_tokens": [7]}, "no usable added_tokens"),
        ({"added_tokens": [{"content": "x", "id": -1}]}, "no row for: 'x'"),
        ({"added_tokens": 7}, "no usable vocab and added_tokens"),
    ],
)
def test_damaged_tokenizers_are_refused(folder: Path, fields: dict[str, Any], words: str) -> None:
    change(folder, TOKENIZER, **fields)
    with pytest.raises((InvalidInputError, UnsupportedError), match=words):
        keys_of(folder)


def test_what_the_package_cannot_read_is_refused(folder: Path) -> None:
    change(folder, TOKENIZER, pre_tokenizer={"type": "NoSuchThing"})
    with pytest.raises(InvalidInputError, match="The tokenizer cannot be read"):
        keys_of(folder, None)
