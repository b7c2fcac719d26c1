"""Recursion under autograd compared with the runtime's, which decodes with a paged cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mtp_runtime.models.load import LoadOptions, open_model
from mtp_runtime.models.model import MtpModule, TorchExecution
from mtp_runtime.teacher_forcing import DraftInputs, Text, Texts, draft_states
from mtp_runtime.training.recursion import draft_outputs
from tune.conftest import DEEPSEEK, GLM

DEPTHS, TEXTS, LENGTH = 4, 2, 14


def module_of(checkpoint: Path) -> MtpModule:
    opened = open_model(checkpoint, LoadOptions())
    module = opened.builder.model(TorchExecution(), opened.contract, layers=0).mtp
    assert module is not None
    return module


@pytest.mark.parametrize("checkpoint", [DEEPSEEK, GLM], ids=lambda path: path.name)
def test_outputs_are_those_of_decoding(checkpoint: Path) -> None:
    module, random = module_of(checkpoint), torch.Generator().manual_seed(0)
    size = module.hidden_norm.weight.shape[0]
    tokens = torch.randint(2, 2000, (TEXTS, LENGTH), generator=random)
    hidden = torch.randn(TEXTS, LENGTH, size, generator=random)
    texts = Texts(tuple(Text(tuple(row), 1) for row in tokens.tolist()))
    anchors = texts.anchors(0)
    with torch.no_grad():
        wanted = draft_states((module,), DraftInputs(texts, hidden.flatten(0, 1), anchors), DEPTHS)
        padded = torch.nn.functional.pad(tokens, (0, DEPTHS))
        found = draft_outputs(module, hidden[:, :-1], padded, DEPTHS)
    slots = anchors.rows - anchors.owners * LENGTH
    for depth, (own, other) in enumerate(zip(found, wanted, strict=True), start=1):
        room = texts.room(anchors, depth)
        assert room.any()
        ours = own[anchors.owners[room], slots[room]]
        torch.testing.assert_close(ours, module.head.normed(other)[room], atol=2e-4, rtol=2e-4)
