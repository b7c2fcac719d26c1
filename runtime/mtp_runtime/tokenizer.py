"""Tokenizer of a checkpoint: its tokenizer.json, read by the tokenizers package if installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_checkpoints.errors import UsageError
from mtp_checkpoints.sources.local_folder import LocalFolder
from mtp_checkpoints.sources.tokenizer_file import TOKENIZER_NAME, tokenizer_failures

_INCOMPLETE = "\ufffd"  # which bytes decode to that are no whole character
_PIECE = 1 << 16  # characters; tokenizing so many takes about 0.1 s

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Tokenizer:
    """Translates text to ids and back; `backend` is None where there is no tokenizer."""

    folder: Path
    backend: Any

    @classmethod
    def find(cls, folder: Path) -> Tokenizer:
        """Open the tokenizer of a checkpoint folder; its backend is None where there is none.

        Raises InvalidInputError for a file that is no tokenizer, IoError.
        """
        source = LocalFolder(folder)
        if TOKENIZER_NAME not in source.names():
            return cls(folder, None)
        try:
            from tokenizers import Tokenizer as Backend
        except ModuleNotFoundError:
            return cls(folder, None)
        raw = source.read(TOKENIZER_NAME)
        with tokenizer_failures(folder / TOKENIZER_NAME, "The tokenizer cannot be read"):
            return cls(folder, Backend.from_buffer(raw))

    @property
    def found(self) -> bool:
        return self.backend is not None

    def require(self) -> None:
        """Raise UsageError where there is no tokenizer."""
        if not self.found:
            raise UsageError(
                "There is no tokenizer for text prompts and stop texts",
                where=self.folder,
                expected=f"{TOKENIZER_NAME}, and the tokenizers package",
                todo="Install tokenizers, or give prompts as token ids",
            )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return a text's ids. A rendered chat has its special tokens already.

        Other threads run meanwhile: only the calls for batches release the interpreter's lock.
        """
        with tokenizer_failures(self.folder / TOKENIZER_NAME, "The tokenizer fails on a text"):
            (encoding,) = self.backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
            return tuple(encoding.ids)

    def require_fit(self, text: str, positions: int) -> None:
        """Refuse a text of far more tokens than positions (UsageError).

        It is counted piece by piece, where cuts add less than as many tokens again: to tokenize all
        of it takes time, and hundreds of bytes per token.
        """
        tokens = 0
        for start in range(0, len(text) if len(text) > _PIECE else 0, _PIECE):
            tokens += len(self.encode(text[start : start + _PIECE], add_special_tokens=False))
            if tokens > 2 * positions:
                raise UsageError(
                    "A text has more tokens than there are positions",
                    expected=f"at most {positions}",
                    found=f"far more in {len(text)} characters",
                )

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids. Other threads run while many are decoded."""
        with tokenizer_failures(self.folder / TOKENIZER_NAME, "The tokenizer fails on token ids"):
            return str(self.backend.decode_batch([list(ids)])[0])

    def token_text(self, token: int) -> str:
        """Return one token by itself, a special one by its name."""
        with tokenizer_failures(self.folder / TOKENIZER_NAME, "The tokenizer fails on token ids"):
            return str(self.backend.decode([token], skip_special_tokens=False))


class TextStream:
    """Text of tokens that come one by one, as all of them together decode.

    A token's text may depend on the one before: each is decoded behind the tokens that the last
    text came from, and those without text since, so that a long output takes no longer per token.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._known = 0  # of these tokens, the number that _known_text comes from
        self._known_text = ""

    def add(self, token: int) -> str:
        """Return the text that a token adds; none while a character's bytes are incomplete."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if text.endswith(_INCOMPLETE):
            return ""
        piece = text[len(self._known_text) :]
        if piece:
            del self._tokens[: self._known]
            self._known, self._known_text = len(self._tokens), self._decode(self._tokens)
        elif self._known_text:
            self._tokens.pop()  # such as an end token, of which there may be thousands
        return piece

    def end(self) -> str:
        """Return the text that is held back, when no token follows: characters that stay
        incomplete."""
        return self._decode(self._tokens)[len(self._known_text) :] if self._tokens else ""
