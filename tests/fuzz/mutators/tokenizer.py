"""Edits tokenizer.json and tokenizer_config.json: vocabulary, ids, added tokens, steps."""

from __future__ import annotations

from pathlib import Path
from random import Random

from fuzz.mutators.values import dump, edit_value, load, nasty

_STEPS = ("model", "normalizer", "pre_tokenizer", "post_processor", "decoder", "added_tokens")


def mutate(path: Path, random: Random) -> None:
    """Change one entry."""
    value = load(path)
    if not isinstance(value, dict):
        return
    model = value.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    match random.randrange(5):
        case 0 if isinstance(vocab, dict) and vocab:
            token = random.choice(list(vocab))
            vocab[token] = nasty(random, vocab[token])
        case 1:
            value[random.choice(_STEPS)] = nasty(random)
        case 2:
            value["added_tokens"] = [{"id": nasty(random, 1), "content": nasty(random, "<bos>")}]
        case _:
            edit_value(value, random)
    dump(path, value)
