"""Prompts of the trained fixture: those that acceptance is measured on, and others like them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer

from benchmarks.common.drafts_on_texts import ROOT, SOURCE
from fixtures.tiny.data import standard_library
from fixtures.tiny.prompts import COUNTS, make_prompts, prompt_ids, read_prompts
from mtp_export.tune.row_store import PART_LINES

PROMPT_SEED = 19
COMMON_TOKENS = 16  # of a training prompt that is too much like a held-out one


def encoded(items: Iterable[dict[str, str]]) -> list[list[int]]:
    """Return the token ids of prompts, those of chat in the chat template."""
    tokenizer = Tokenizer.from_file(str(SOURCE / "tokenizer.json"))
    return [prompt_ids(tokenizer, item["kind"], item["prompt"]) for item in items]


def held_out_prompts() -> list[list[int]]:
    """Return the prompts that acceptance is measured on."""
    return encoded(read_prompts(ROOT / "fixtures/prompts.jsonl"))


def training_prompts(count: int) -> list[list[int]]:
    """Make prompts of the training modules, in the proportions of the held-out ones, of which none
    has much in common with those; as many as a part of rows takes are of similar length."""
    tokenizer = Tokenizer.from_file(str(SOURCE / "tokenizer.json"))
    counts = {kind: count * own // sum(COUNTS.values()) for kind, own in COUNTS.items()}
    training, _ = standard_library()
    made = encoded(make_prompts(training, tokenizer, PROMPT_SEED, counts))
    ordered = sorted(without_common(made, held_out_prompts()), key=len)
    parts = [ordered[at : at + PART_LINES] for at in range(0, len(ordered), PART_LINES)]
    random.Random(PROMPT_SEED).shuffle(parts)
    return [prompt for part in sorted(parts, key=len, reverse=True) for prompt in part]


def without_common(
    prompts: Iterable[Sequence[int]], others: Iterable[Sequence[int]]
) -> list[list[int]]:
    """Return the prompts that have no run of COMMON_TOKENS tokens in common with others."""
    known = {run for other in others for run in _runs(other)}
    return [list(prompt) for prompt in prompts if known.isdisjoint(_runs(prompt))]


def _runs(tokens: Sequence[int]) -> set[tuple[int, ...]]:
    last = len(tokens) - COMMON_TOKENS
    return {tuple(tokens[at : at + COMMON_TOKENS]) for at in range(last + 1)}
