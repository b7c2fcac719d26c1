"""Recursion under autograd compared with the runtime's, which decodes with a paged cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mtp_runtime.models.execution import TorchExecution
from mtp_runtime.models.load import LoadOptions, open_model
from mtp_runtime.models.model import MtpModule
from mtp_runtime.teacher_forcing import DraftInputs, Text, Texts, draft_states
from mtp_runtime.training.recursion import RecursiveChains
from tune.conftest import DEEPSEEK, GLM, QWEN

DEPTHS, TEXTS, LENGTH = 4, 2, 14


def module_of(checkpoint: Path) -> MtpModule:
    opened = open_model(checkpoint, LoadOptions())
    module = opened.model(TorchExecution(), layers=0).mtp
    assert module is not None
    return module


@pytest.mark.parametrize("checkpoint", [DEEPSEEK, GLM, QWEN], ids=lambda path: path.name)
@pytest.mark.parametrize("ending", [False, True], ids=["all go on", "chains end"])
def test_outputs_are_those_of_decoding(checkpoint: Path, ending: bool) -> None:
    """Chains that end change nothing of the others, even where a text loses all of its own."""
    module, random = module_of(checkpoint), torch.Generator().manual_seed(0)
    size = module.hidden_norm.weight.shape[0]
    tokens = torch.randint(2, 2000, (TEXTS, LENGTH), generator=random)
    hidden = torch.randn(TEXTS, LENGTH, size, generator=random)
    texts = Texts(tuple(Text(tuple(row), 1) for row in tokens.tolist()))
    anchors = texts.anchors(0)
    with torch.no_grad():
        wanted = draft_states((module,), DraftInputs(texts, hidden.flatten(0, 1), anchors), DEPTHS)
        chains, starts = RecursiveChains(module, hidden, tokens), anchors.rows
        for depth, other in enumerate(wanted, start=1):
            starts = starts[torch.isin(starts, anchors.rows[texts.room(anchors, depth)])]
            if ending and depth > 1:
                kept = torch.rand(len(starts), generator=random) < 0.6
                starts = starts[kept & ((starts < LENGTH) | (depth < DEPTHS))]
            assert len(starts)
            ours = chains.drafts(starts)
            theirs = module.head.normed(other)[torch.isin(anchors.rows, starts)]
            torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)
