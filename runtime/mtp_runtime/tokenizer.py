"""Tokenizer of a checkpoint: its tokenizer.json, read by the tokenizers package if installed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_export.errors import UsageError

TOKENIZER_NAME = "tokenizer.json"


@dataclass(frozen=True)
class Tokenizer:
    """Translates text to ids and back; `backend` is None where there is no tokenizer."""

    folder: Path
    backend: Any

    @classmethod
    def find(cls, folder: Path) -> Tokenizer:
        """Open the tokenizer of a checkpoint folder; its backend is None where there is none."""
        path = folder / TOKENIZER_NAME
        if not path.is_file():
            return cls(folder, None)
        try:
            from tokenizers import Tokenizer as Backend
        except ModuleNotFoundError:
            return cls(folder, None)
        return cls(folder, Backend.from_file(str(path)))

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

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.backend.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.backend.decode(list(ids)))
