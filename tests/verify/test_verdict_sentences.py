"""The three verdicts of level run on foreign folders: fed otherwise than it was trained, loaded
otherwise than it was stored, or too coarse."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from cases import run_program
from verify.foreign_damages import norms_exchanged
from verify.foreign_sources import GLM, Checkpoint, released


def trained_before_the_norm(checkpoint: Checkpoint) -> None:
    """As a module is that takes the target's hidden state from before the last norm, whose weights
    its own norm of that state has: fed what is behind that norm, it drafts with them twice."""
    last = checkpoint.tensors["model.norm.weight"].float()
    own = checkpoint.of("hnorm.weight")
    checkpoint.set("hnorm.weight", (own.float() * last / last.mean()).to(own.dtype))


def rounded(checkpoint: Checkpoint) -> None:
    """Round linears of the MTP layer to three values each."""
    for name, tensor in checkpoint.mtp().items():
        if tensor.dim() == 2 and "embed" not in name and "head" not in name:
            step = tensor.float().abs().mean()
            checkpoint.tensors[name] = ((tensor / step).round().clamp(-1, 1) * step).bfloat16()


SENTENCES: dict[str, tuple[Callable[[Checkpoint], None], list[object], str]] = {
    "contract": (
        trained_before_the_norm,
        [],
        r"contract: acceptance rises from (\S+) to (\S+) when the module is fed the target's hidden"
        r" state before the norm",
    ),
    "loading": (
        norms_exchanged,
        [],
        r"loading: acceptance rises from (\S+) to (\S+) when enorm and hnorm are exchanged",
    ),
    "precision": (
        rounded,
        ["--source", GLM],
        r"precision: the MTP part loses it, (\S+) against the (\S+) of the source's module",
    ),
}


@pytest.mark.nightly  # a level run each
@pytest.mark.parametrize("kind", SENTENCES)
def test_a_verdict_says_what_acceptance_would_be(kind: str, tmp_path: Path) -> None:
    damage, options, sentence = SENTENCES[kind]
    checkpoint = released(GLM)
    damage(checkpoint)
    checkpoint.save(tmp_path / "model")
    few = ("--max-new-tokens", "24", "--k", "1", "--quiet")
    outcome = run_program("verify", tmp_path / "model", *options, *few)
    assert outcome.code == 7, outcome.out
    told = re.search(sentence, " ".join(outcome.err.split()))
    assert told is not None, outcome.err
    found, wanted = map(float, told.groups())
    assert wanted > max(0.6, found + 0.05)
