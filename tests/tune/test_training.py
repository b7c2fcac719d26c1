"""Steps of a training: which drafts of a chain count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from mtp_export.tune.options import TrainOptions
from mtp_export.tune.row_store import Batch, RowStore
from mtp_export.tune.rows import Rows
from mtp_export.tune.training import Training
from mtp_runtime.parallel.group import Group
from mtp_runtime.teacher_forcing import Text, Texts

VOCAB, LENGTH = 8, 6


@dataclass
class Grown:
    """Drafts by a table [depth, slot] of what each is."""

    best: Tensor
    weight: Tensor
    starts: list[list[int]] = field(default_factory=list)

    def drafts(self, starts: Tensor) -> Tensor:
        best = self.best[len(self.starts), starts]
        self.starts.append(starts.tolist())
        return torch.eye(VOCAB)[best] * self.weight


@dataclass
class FixedDraft:
    """A draft that always proposes the same; one number scales its logits."""

    best: Tensor
    parameters: Mapping[str, nn.Parameter] = field(
        default_factory=lambda: {"weight": nn.Parameter(torch.ones(()))}
    )
    head: Tensor = field(default_factory=lambda: torch.eye(VOCAB) * 5)
    device: torch.device = torch.device("cpu")

    def chains(self, batch: Batch) -> Grown:
        self.grown = Grown(self.best, self.parameters["weight"])
        return self.grown


def test_a_chain_ends_with_its_first_wrong_draft(tmp_path: Path) -> None:
    """Its draft that is wrong counts, and none after it."""
    tokens = torch.tensor([1, 2, 3, 4, 5, 6])
    goals = tokens.roll(-1)[:, None].int()
    rows = Rows(Texts((Text(tuple(tokens.tolist()), 1),)), torch.zeros(6, 1), goals, goals * 0.0)
    store = RowStore(tmp_path, (), torch.float32)
    store.__dict__["parts"] = [rows]
    # Draft j of slot i is right if it is token i + 2 + j.
    right = torch.tensor([[2, 3, 4, 5, 6, 7], [3, 4, 5, 6, 7, 7], [4, 5, 6, 7, 7, 7]]) + 1
    right[0, 1], right[1, 2] = 0, 0
    draft = FixedDraft(right.remainder(VOCAB))
    training = Training(
        draft=draft,  # type: ignore[arg-type]
        options=TrainOptions(k=3, steps=1, batch_tokens=16),
        group=Group(),
        place=tmp_path / "state.pt",
        save_seconds=1e9,
    )
    training.depths_of = lambda step: 3  # type: ignore[method-assign]
    training.run(store, lambda step, losses: None)
    assert draft.grown.starts == [[0, 1, 2, 3, 4], [0, 2, 3], [0]]
    assert training.cpu_seconds > 0
