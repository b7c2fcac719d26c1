"""Texts that small models are calibrated with."""

from __future__ import annotations

from runtime.checkpoints import SMALL

PROMPT, LENGTH = 16, 40
TEXTS = [
    [(7 * first + number * number) % SMALL["vocab_size"] for number in range(LENGTH)]
    for first in range(8)
]
