"""Names answers of a server that are damaged, each with the seed of its damage.

fuzz/network.py has the servers, and the damage.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

from fuzz.mutators.values import dump, load

_FIRST = 30  # as many answers as most commands get


def mutate(path: Path, random: Random) -> None:
    """Add one to three answers by their numbers."""
    answers = load(path)
    if not isinstance(answers, dict):
        return
    for _ in range(random.choice((1, 1, 2, 3))):
        answers[str(random.randrange(_FIRST))] = random.randrange(1 << 30)
    dump(path, answers)
