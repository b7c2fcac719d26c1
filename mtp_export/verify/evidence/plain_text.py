"""Plain text, which a language model finds likely: code, and prose on it, and a novel.

Code is the built-in prompts and passages of the standard library's queue.py, as the Python that
runs has it. alice.txt is the beginning of Lewis Carroll's "Alice's Adventures in Wonderland"
(1865), which is in the public domain, in the wording of the Canterbury Corpus' alice29.txt.
"""

from __future__ import annotations

import linecache
import queue
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from itertools import zip_longest

import torch

from mtp_export.verify.evidence.prompts import BUILT_IN
from mtp_runtime.teacher_forcing import Text, Texts
from mtp_runtime.tokenizer import Tokenizer

CODE, NOVEL = "code", "a novel"
KINDS = (CODE, NOVEL)
# Of each long text, evenly spread over it: rotary values show after many tokens.
PASSAGES, MANY_PASSAGES, _PASSAGE_TOKENS = 2, 16, 128
_LEAST_TOKENS = 2  # of a text, of which one is predicted
# Of the standard library: those that tensors are trained on, in more steps on more of them, and
# those that judge them.
TRAINING = ("heapq", "textwrap", "shlex", "calendar", "fractions", "csv", "configparser",
            "tempfile", "subprocess", "socketserver", "difflib", "cmd")  # fmt: skip
MORE_TRAINING = ("ast", "tarfile", "typing", "doctest", "pickle", "optparse", "mailbox", "pdb",
                 "uuid", "smtplib", "imaplib", "datetime", "enum", "locale", "platform", "plistlib",
                 "tokenize", "trace", "traceback", "webbrowser", "copy", "glob", "logging",
                 "turtle")  # fmt: skip
JUDGING = ("statistics", "threading", "string", "gettext", "random", "sched", "shelve", "pprint",
           "inspect", "ftplib", "argparse", "zipfile")  # fmt: skip
TRAINING_PASSAGES, JUDGING_PASSAGES = 8, 4  # of each
MORE_JUDGING_PASSAGES = 8


@dataclass(frozen=True)
class PlainTexts:
    """Texts, and the kind of each."""

    texts: Texts
    kinds: tuple[str, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, passages: int = PASSAGES) -> PlainTexts:
        """Encode them, as for the start of a document. passages: of each long text."""
        found = [(CODE, tokenizer.encode(prompt)) for prompt in BUILT_IN]
        code = "".join(linecache.getlines(queue.__file__))
        novel = files(__package__).joinpath("alice.txt").read_text("utf-8")
        for kind, text in ((CODE, code), (NOVEL, novel)):
            tokens = tokenizer.encode(text)
            firsts = (passage * len(tokens) // passages for passage in range(passages))
            found += [(kind, tokens[first : first + _PASSAGE_TOKENS]) for first in firsts]
        found = [(kind, tokens) for kind, tokens in found if len(tokens) >= _LEAST_TOKENS]
        texts = Texts(tuple(Text(tuple(tokens), 1) for _, tokens in found))
        return cls(texts, tuple(kind for kind, _ in found))

    @classmethod
    def of_modules(cls, tokenizer: Tokenizer, modules: Iterable[str], passages: int) -> PlainTexts:
        """Encode so many passages of each of some modules of the standard library, all of one
        length, by turns."""
        found = []
        for name in modules:
            spec = find_spec(name)
            path = None if spec is None else spec.origin
            tokens = tokenizer.encode("".join(linecache.getlines(path or "")))
            last = len(tokens) - _PASSAGE_TOKENS
            firsts = range(0, last + 1, max(1, last // (passages - 1))) if last >= 0 else ()
            found.append([Text(tuple(tokens[at : at + _PASSAGE_TOKENS]), 1) for at in firsts])
        texts = tuple(text for turn in zip_longest(*found) for text in turn if text is not None)
        return cls(Texts(texts), (CODE,) * len(texts))

    @property
    def table(self) -> torch.Tensor:
        """Their tokens [b, s], where all have one length."""
        return self.texts.tokens.view(len(self.kinds), -1)

    def without_first(self) -> PlainTexts:
        """The texts without the first token of each."""
        texts = (Text(text.tokens[1:], text.prompt_size) for text in self.texts.texts)
        return PlainTexts(Texts(tuple(texts)), self.kinds)

    def first(self, count: int) -> PlainTexts:
        """So many of the texts, of which the built-in prompts come first."""
        return PlainTexts(Texts(self.texts.texts[:count]), self.kinds[:count])

    def code(self) -> PlainTexts:
        """The code, on which many variants of a model are compared."""
        code = [one for one, kind in zip(self.texts.texts, self.kinds, strict=True) if kind == CODE]
        return PlainTexts(Texts(tuple(code)), (CODE,) * len(code))
