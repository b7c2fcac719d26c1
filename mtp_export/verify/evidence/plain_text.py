"""Plain text, which a language model finds likely: the built-in prompts, which are code and prose
on it, and a novel.

alice.txt is the beginning of Lewis Carroll's "Alice's Adventures in Wonderland" (1865), which is in
the public domain, in the wording of the Canterbury Corpus' alice29.txt.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

from mtp_export.verify.evidence.prompts import BUILT_IN
from mtp_runtime.teacher_forcing import Text, Texts
from mtp_runtime.tokenizer import Tokenizer

BUILT_IN_PROMPTS, NOVEL = "built-in prompts", "a novel"
KINDS = (BUILT_IN_PROMPTS, NOVEL)
# Passages of the novel, evenly spread over it.
_PASSAGES, _PASSAGE_TOKENS = 4, 128
# A sample has every so many texts, and their first tokens.
_SAMPLING_STEP, _SAMPLED_TOKENS = 2, 48
_LEAST_TOKENS = 2  # of a text, of which one is predicted


@dataclass(frozen=True)
class PlainTexts:
    """Texts, and the kind of each."""

    texts: Texts
    kinds: tuple[str, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> PlainTexts:
        """Encode them, as for the start of a document."""
        found = [(BUILT_IN_PROMPTS, tokenizer.encode(prompt)) for prompt in BUILT_IN]
        novel = tokenizer.encode(files(__package__).joinpath("alice.txt").read_text("utf-8"))
        for passage in range(_PASSAGES):
            first = passage * len(novel) // _PASSAGES
            found.append((NOVEL, novel[first : first + _PASSAGE_TOKENS]))
        found = [(kind, tokens) for kind, tokens in found if len(tokens) >= _LEAST_TOKENS]
        texts = Texts(tuple(Text(tuple(tokens), 1) for _, tokens in found))
        return cls(texts, tuple(kind for kind, _ in found))

    def sampled(self) -> PlainTexts:
        """A part of them, on which many variants of a model are compared."""
        texts = self.texts.texts[::_SAMPLING_STEP]
        cut = tuple(Text(text.tokens[:_SAMPLED_TOKENS], 1) for text in texts)
        return PlainTexts(Texts(cut), self.kinds[::_SAMPLING_STEP])
