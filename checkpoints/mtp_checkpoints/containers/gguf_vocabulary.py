"""Vocabulary of a checkpoint as keys of a GGUF file: tokens, merges, special tokens, chat templates
and the pre-tokenizer, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

from mtp_checkpoints.containers.gguf_pre_tokenizers import NONE, checked, pre_tokenizer_of
from mtp_checkpoints.containers.gguf_special_tokens import SpecialTokens
from mtp_checkpoints.containers.gguf_values import Keys, Value, i32s, text, texts
from mtp_checkpoints.errors import InvalidInputError, UnsupportedError
from mtp_checkpoints.sources.byte_source import ByteSource, Place
from mtp_checkpoints.sources.strict_json import parsed_json_object
from mtp_checkpoints.sources.tokenizer_file import TOKENIZER_NAME

_SETTINGS, _TEMPLATE, _TEMPLATES = (
    "tokenizer_config.json",
    "chat_template.jinja",
    "additional_chat_templates",
)
_TEMPLATE_OBJECT = "chat_template.json"
_DEFAULT = "default"
_GLM = ("glm4", "glm5")
_OF_VOCABULARY = "tokenizer."
_MODEL = f"{_OF_VOCABULARY}ggml.model"
_TOKENS, _KINDS = f"{_OF_VOCABULARY}ggml.tokens", f"{_OF_VOCABULARY}ggml.token_type"
_ANY_PRE_TOKENIZER = "gpt-2"  # the tokens do not depend on it
_SPACE, _UNDERLINE = " ", "▁"
# How an added token looks that is meant as a control token, whatever its entry says.
_CONTROL = ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
_CONTROL_ENDS = (("<|", "|>"), ("<｜", "｜>"), ("<unused", ">"))


class _Kind(IntEnum):
    """Kind of a token, by its number in the file."""

    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5


def vocabulary_keys(
    source: ByteSource, config: Mapping[str, Any], vocab_size: int, pre_tokenizer: str | None
) -> dict[str, Value]:
    """Return the keys of a checkpoint's vocabulary of vocab_size tokens.

    pre_tokenizer: llama.cpp's name of it, else it is told by what it does; "none" leaves the
    vocabulary out. Raises UsageError for a name that llama.cpp does not have, UnsupportedError for
    a tokenizer that is not told or of another kind, InvalidInputError for a damaged one, IoError.
    """
    named = None if pre_tokenizer is None else checked(pre_tokenizer)
    if named == NONE:
        return {_MODEL: text(NONE)}
    path = source.path / TOKENIZER_NAME
    if TOKENIZER_NAME not in source.names():
        raise UnsupportedError(
            "The checkpoint has no tokenizer that a vocabulary for llama.cpp could be made of",
            where=path,
            expected=TOKENIZER_NAME,
            found="no such file",
            todo=f"Get it from the model's source, or pass --pre-tokenizer {NONE} for files without"
            " a vocabulary, which take token ids alone",
        )
    raw = source.read(TOKENIZER_NAME)
    tokenizer = parsed_json_object(path, raw)
    settings = _object(source, _SETTINGS)
    glm = str(config.get("model_type")).startswith("glm")
    special = SpecialTokens.of(tokenizer, settings, config, glm=glm)
    first = special.ids.get("bos") if settings.get("add_bos_token") is True else None
    name = named or pre_tokenizer_of(path, raw, first)
    tokens, kinds = _tokens(path, tokenizer, vocab_size)
    keys = {
        _MODEL: text("gpt2"),
        "tokenizer.ggml.pre": text(name),
        _TOKENS: texts(tokens),
        _KINDS: i32s(kinds),
        "tokenizer.ggml.merges": texts(_merges(path, tokenizer)),
        **dict(special.keys()),
        **dict(_template_keys(source, settings)),
    }
    return keys


def unlike_tokens(
    tokens: Sequence[object], source: ByteSource, config: Mapping[str, Any]
) -> list[tuple[int, object, object]]:
    """Return the ids of a file's tokens that a checkpoint's tokenizer gives another text, each with
    both texts, but for ids that it does not use. Raises what vocabulary_keys does."""
    keys = vocabulary_keys(source, config, len(tokens), _ANY_PRE_TOKENIZER)
    wanted, kinds = (keys[name].data for name in (_TOKENS, _KINDS))
    assert isinstance(wanted, tuple) and isinstance(kinds, tuple), "arrays"
    every = enumerate(zip(tokens, wanted, kinds, strict=True))
    return [(n, own, other) for n, (own, other, kind) in every
            if own != other and kind != _Kind.UNUSED]  # fmt: skip


def copied_keys(keys: Keys) -> dict[str, Value]:
    """Return the keys of the vocabulary of another file."""
    return {name: value for name, value in keys.items() if name.startswith(_OF_VOCABULARY)}


def _object(source: ByteSource, name: str) -> dict[str, Any]:
    """Return the object of a JSON file, empty where the file is missing."""
    if name not in source.names():
        return {}
    return parsed_json_object(source.path / name, source.read(name))


def _tokens(
    path: Place, tokenizer: Mapping[str, Any], vocab_size: int
) -> tuple[list[str], list[int]]:
    """Return the text and the kind of every token; ids that the tokenizer lacks are unused."""
    tokens = [f"[PAD{number}]" for number in range(vocab_size)]
    kinds = [int(_Kind.UNUSED)] * vocab_size
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens") or []
    if not isinstance(model, Mapping) or model.get("type") != "BPE":
        raise UnsupportedError(
            "Only BPE vocabularies are written for llama.cpp",
            where=path,
            expected="a model of type BPE",
            found=repr(model.get("type") if isinstance(model, Mapping) else model)[:100],
        )
    vocab = model.get("vocab")
    if not isinstance(vocab, Mapping) or not isinstance(added, list):
        raise _unusable(path, "vocab and added_tokens", "an object and a list")
    for word, number in vocab.items():
        _check_id(path, word, number, vocab_size)
        tokens[number], kinds[number] = word, int(_Kind.NORMAL)
    for entry in added:
        word, number = (entry.get(k) for k in ("content", "id")) if _is(entry) else (None, None)
        _check_id(path, word, number, vocab_size)
        assert isinstance(word, str) and isinstance(number, int), "checked"
        is_control = entry.get("special") is True or _looks_like_control(word)
        kinds[number] = int(_Kind.CONTROL if is_control else _Kind.USER_DEFINED)
        tokens[number] = word if is_control else word.replace(_UNDERLINE, _SPACE)
    return tokens, kinds


def _is(entry: object) -> bool:
    return isinstance(entry, Mapping)


def _check_id(path: Place, word: object, number: object, vocab_size: int) -> None:
    if not isinstance(word, str):
        raise _unusable(path, "added_tokens", "objects with a content and an id")
    if type(number) is not int or not 0 <= number < vocab_size:
        raise InvalidInputError(
            f"The tokenizer has a token that the model has no row for: {word[:50]!r}",
            where=path,
            expected=f"an id from 0 to {vocab_size - 1}, by config.json's vocab_size",
            found=repr(number)[:100],
            todo="It is another model's tokenizer: get the checkpoint again",
        )


def _unusable(path: Place, name: str, expected: str) -> InvalidInputError:
    return InvalidInputError(
        f"The tokenizer has no usable {name}",
        where=path,
        expected=expected,
        todo="Get the file again from the checkpoint's source",
    )


def _looks_like_control(word: str) -> bool:
    ends = any(word.startswith(first) and word.endswith(last) for first, last in _CONTROL_ENDS)
    return ends or word in _CONTROL


def _merges(path: Place, tokenizer: Mapping[str, Any]) -> Iterator[str]:
    """Yield the merges, the two parts of each with a space between; spaces in them as byte-level
    tokens have them."""
    merges = tokenizer["model"].get("merges", [])
    if not isinstance(merges, list):
        raise _unusable(path, "merges", "a list")
    for merge in merges:
        if isinstance(merge, str):
            yield merge
        elif isinstance(merge, list) and len(merge) == 2 and all(isinstance(p, str) for p in merge):
            yield _SPACE.join(part.replace(_SPACE, chr(ord(_SPACE) + 256)) for part in merge)
        else:
            raise _unusable(path, "merges", "texts, or pairs of them")


def _template_keys(source: ByteSource, settings: Mapping[str, Any]) -> Iterator[tuple[str, Value]]:
    """Yield the chat templates: the default one, and others by their names."""
    key = "tokenizer.chat_template"
    templates = settings.get("chat_template", _template_files(source))
    if isinstance(templates, str):
        yield key, text(templates)
    if not isinstance(templates, list):
        return
    named = {}
    for entry in templates:
        name, words = (entry.get(k) for k in ("name", "template")) if _is(entry) else (None, None)
        if isinstance(name, str) and name and isinstance(words, str):
            named["".join(c if c.isascii() and c.isalnum() else "_" for c in name)] = words
    default = named.pop(_DEFAULT, None)
    for name, words in named.items():
        yield f"{key}.{name}", text(words)
    if named:
        yield "tokenizer.chat_templates", texts(named)
    if default is not None:
        yield key, text(default)


def _template_files(source: ByteSource) -> object:
    """Return the template that a checkpoint has in files of its own, several as a list."""
    if _TEMPLATE not in source.names():
        return _object(source, _TEMPLATE_OBJECT).get("chat_template")
    own = _words(source, _TEMPLATE)
    others = sorted(n for n in source.names(_TEMPLATES) if n.endswith(".jinja"))
    if not others:
        return own
    return [
        {"name": _DEFAULT, "template": own},
        *(
            {
                "name": name.removesuffix(".jinja"),
                "template": _words(source, f"{_TEMPLATES}/{name}"),
            }
            for name in others
        ),
    ]


def _words(source: ByteSource, name: str) -> str:
    try:
        return source.read(name).decode()
    except UnicodeDecodeError:
        raise InvalidInputError(
            "A chat template is no UTF-8 text", where=source.path / name, todo="Get it again"
        ) from None
