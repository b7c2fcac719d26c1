"""Mutators: each damages one file in its own way. A new one is one file, and one line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from fuzz.mutators import (
    answers,
    body,
    card,
    claim,
    config,
    gguf_head,
    header_bits,
    header_structure,
    header_text,
    index,
    journal,
    json_text,
    manifest,
    prompts,
    special_files,
    state,
    tokenizer,
    values,
)


@dataclass(frozen=True)
class Mutator:
    """A way to damage a file, the pattern of the files that it damages, and how often it is drawn.

    mutate changes the file in place; all that it does follows from the generator it is given.
    """

    pattern: str
    mutate: Callable[[Path, Random], None]
    weight: float = 1.0


# Weights make up for how many subjects have such a file.
MUTATORS: dict[str, Mutator] = {
    "header_bits": Mutator("*.safetensors", header_bits.mutate),
    "header_text": Mutator("*.safetensors", header_text.mutate),
    "header_structure": Mutator("*.safetensors", header_structure.mutate),
    "gguf_head": Mutator("*.gguf", gguf_head.mutate, weight=8),
    "index": Mutator("*.safetensors.index.json", index.mutate),
    "config": Mutator("config.json", config.mutate, weight=2),
    "quant_config": Mutator("hf_quant_config.json", values.edit_json_file, weight=3),
    "card": Mutator("README.md", card.mutate, weight=2),
    "manifest": Mutator("mtp_export.json", manifest.mutate, weight=4),
    "journal": Mutator(".mtp_export.journal", journal.mutate, weight=15),
    "owner": Mutator(".mtp_export.owner", claim.mutate, weight=3),
    "request": Mutator("request.json", claim.mutate, weight=15),
    "body": Mutator("*.body", body.mutate),
    "state": Mutator("*.pt", state.mutate, weight=10),
    "tokenizer": Mutator("tokenizer*.json", tokenizer.mutate, weight=0.5),
    "answers": Mutator("answers.json", answers.mutate, weight=15),
    "prompts": Mutator("*.jsonl", prompts.mutate, weight=10),
    "json_text": Mutator("*.json", json_text.mutate, weight=0.5),
    "special_files": Mutator("*", special_files.mutate, weight=0.3),
}
