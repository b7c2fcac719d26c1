"""Special tokens of a vocabulary, and whether they come before or behind a text, as keys of a GGUF
file.

Source: `SpecialVocab` of llama.cpp's gguf-py, whose readings these are: of tokenizer_config.json,
of the post-processor in tokenizer.json, which counts for more, and of config.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mtp_checkpoints.containers.gguf_values import Value, boolean, u32

# By their names in tokenizer_config.json and config.json.
_KEYS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
    "unk": "unknown_token_id",
    "sep": "seperator_token_id",
    "pad": "padding_token_id",
    "mask": "mask_token_id",
}
_NAMED = ("bos", "eos", "unk", "sep", "pad", "mask")
_ADDED = ("bos", "eos", "sep")
# Of GLM's tokenizers, whose config names no first token, and whose turns end with others than eos.
_OF_GLM = {
    "bos": "[gMASK]",
    "eot": "<|user|>",
    "unk": "<|endoftext|>",
    "eom": "<|observation|>",
}


@dataclass
class SpecialTokens:
    """Ids of special tokens, and which are added to texts, by their names."""

    ids: dict[str, int] = field(default_factory=dict)
    added: dict[str, bool] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        tokenizer: Mapping[str, Any],
        settings: Mapping[str, Any],
        config: Mapping[str, Any],
        *,
        glm: bool,
    ) -> SpecialTokens:
        """Read tokenizer.json, tokenizer_config.json and config.json; glm: with the tokens of GLM's
        tokenizers that none of them names."""
        found, known = cls(), _added_ids(tokenizer)
        words = {name: _content(settings.get(f"{name}_token")) for name in _NAMED}
        for processor in _processors(tokenizer):
            found._read_processor(processor, words)
        for name in _NAMED:
            flag = settings.get(f"add_{name}_token")
            if name in _ADDED and isinstance(flag, bool):
                found.added.setdefault(name, flag)
            found._name(name, known.get(words[name] or ""))
            found._name(name, config.get(f"{name}_token_id"))
        for name, word in _OF_GLM.items() if glm else ():
            found._name(name, known.get(word))
        return found

    def keys(self) -> Iterator[tuple[str, Value]]:
        """Yield the keys."""
        for name, number in self.ids.items():
            yield f"tokenizer.ggml.{_KEYS[name]}", u32(number)
        for name, flag in self.added.items():
            yield f"tokenizer.ggml.add_{name}_token", boolean(flag)

    def _name(self, name: str, number: object) -> None:
        """Give a token its id, unless it has one."""
        if type(number) is int and 0 <= number < 1 << 32:
            self.ids.setdefault(name, number)

    def _read_processor(self, processor: Mapping[str, Any], words: dict[str, str | None]) -> None:
        """Read what a post-processor adds to a text, and to two."""
        kind = processor.get("type")
        if kind == "ByteLevel":
            self.added.setdefault("bos", False)
            self.added.setdefault("eos", False)
        if kind != "TemplateProcessing":
            return
        single, pair = (_pieces(processor.get(name)) for name in ("single", "pair"))
        first, last = (_special(single[at]) if len(single) > 1 else None for at in (0, -1))
        if first:
            words["bos"] = words["bos"] or first
            self.added["bos"] = first == words["bos"]
        if last:
            words["eos"] = last
            self.added["eos"] = True
        inner = pair[bool(first) : -1 if last else None]
        between = [_special(piece) for piece in inner[1:-1]]
        if inner and _sequence(inner[0]) == "A" and _sequence(inner[-1]) == "B" and between:
            ends = {words["sep"] or words["eos"], words["eos"]}
            self.added["sep"] = not last and between[0] in ends
            words["sep"] = words["sep"] or (words["eos"] if self.added["sep"] else None)


def _processors(tokenizer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the post-processors of a tokenizer.json, those of a sequence one by one."""
    own = tokenizer.get("post_processor")
    if not isinstance(own, Mapping):
        return []
    listed = own.get("processors", [own])
    return [one for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []


def _pieces(template: object) -> list[Mapping[str, Any]]:
    return (
        [one for one in template if isinstance(one, Mapping)] if isinstance(template, list) else []
    )


def _special(piece: Mapping[str, Any]) -> str | None:
    return _content(_member(piece, "SpecialToken"))


def _sequence(piece: Mapping[str, Any]) -> str | None:
    return _content(_member(piece, "Sequence"))


def _member(piece: Mapping[str, Any], name: str) -> object:
    own = piece.get(name)
    return own.get("id") if isinstance(own, Mapping) else None


def _content(token: object) -> str | None:
    """Return the text of a token, which may be written with how it is matched."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) and text else None


def _added_ids(tokenizer: Mapping[str, Any]) -> dict[str, object]:
    """Return the ids of added tokens by their text, the first of each."""
    listed = tokenizer.get("added_tokens")
    ids: dict[str, object] = {}
    for one in listed if isinstance(listed, list) else ():
        if isinstance(one, Mapping) and isinstance(one.get("content"), str):
            ids.setdefault(one["content"], one.get("id"))
    return ids
