"""Prompts that a bundle is run on: the user's, or built-in ones."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.families import family_of
from mtp_checkpoints.tensors.reader import Checkpoint

Prompt = tuple[int, ...]
# A line of a prompts file, text or token ids: the prompt, and a model's answer where there is one.
GivenText = tuple[str | Prompt, str | Prompt | None]

# Code and prose, some of it easy to continue: drafts are accepted on such text.
BUILT_IN = (
    'def read(path):\n    """Read a file and return its lines."""\n',
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import os\nimport sys\n\ndef main():\n",
    "for name in sorted(names):\n    if not name.startswith('_'):\n",
    "Return a list of the names in the current scope. If the object has a method named",
    "The following example shows how a dictionary is built from a list of pairs:\n\n    >>>",
    "try:\n    value = int(text)\nexcept ValueError:\n",
    "def __eq__(self, other):\n    return self.key == other.key\n\ndef __lt__(self, other):\n",
    "    def test_empty(self):\n        self.assertEqual(len(self.queue), 0)\n\n    def test_",
    "Open the file in text mode. The default encoding depends on the platform, so",
    "if a < b:\n    return -1\nif a > b:\n    return 1\n",
    "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14,",
    "Raise an error when the argument is not a string. Raise an error when the argument is",
    "while True:\n    line = stream.readline()\n    if not line:\n        break\n",
    "The value is true if and only if",
    "@property\ndef name(self):\n    return self._name\n\n@property\ndef ",
)
_RANDOM_PROMPTS, _RANDOM_TOKENS = 16, 24


def choose_prompts(
    path: Path | None, given: Sequence[GivenText] | None, main: Checkpoint | None
) -> tuple[Prompt, ...]:
    """Token ids of the prompts that a file gave, else of the built-in texts; random ids without a
    tokenizer.

    Raises InvalidInputError for token ids outside the vocabulary, UsageError for texts without a
    tokenizer.
    """
    from mtp_runtime.tokenizer import Tokenizer

    assert main is not None, "checks that run a model do not start without one"
    if given is not None:
        return encoded(main, path, (prompt for prompt, _ in given))
    if not Tokenizer.find(main.folder).found:
        return _random_prompts(family_of(main.config).facts.vocab)
    return encoded(main, path, BUILT_IN)


def texts_of_prompts(
    given: Sequence[GivenText] | None, main: Checkpoint | None
) -> tuple[str | None, ...]:
    """Text of each prompt that choose_prompts returns; None for one that is no text."""
    from mtp_runtime.tokenizer import Tokenizer

    assert main is not None, "checks that run a model do not start without one"
    if given is not None:
        return tuple(prompt if isinstance(prompt, str) else None for prompt, _ in given)
    return BUILT_IN if Tokenizer.find(main.folder).found else (None,) * _RANDOM_PROMPTS


def encoded(
    main: Checkpoint, path: Path | None, prompts: Iterable[str | Prompt]
) -> tuple[Prompt, ...]:
    """Token ids of texts; ids stay as they are. Raises what choose_prompts raises."""
    from mtp_runtime.tokenizer import Tokenizer

    tokenizer, vocab = Tokenizer.find(main.folder), family_of(main.config).facts.vocab
    found: list[Prompt] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            tokenizer.require()
            prompt = tokenizer.encode(prompt)
        if any(not 0 <= token < vocab for token in prompt):
            raise InvalidInputError(
                "A prompt has a token that the model does not know",
                where=path or main.folder,
                expected=f"ids below vocab_size {vocab}",
                found=max(prompt),
                todo="Give prompts for this model, and check that the tokenizer is its own",
            )
        found.append(prompt)
    return tuple(found)


def _random_prompts(vocab: int) -> tuple[Prompt, ...]:
    generator = random.Random(0)
    return tuple(
        tuple(generator.randrange(vocab) for _ in range(_RANDOM_TOKENS))
        for _ in range(_RANDOM_PROMPTS)
    )
