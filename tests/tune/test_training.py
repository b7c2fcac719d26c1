"""Steps of a training: drafts of a chain that count, growing chains, and the order by a seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
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


def store_of(folder: Path, *texts: Tensor) -> RowStore:
    """Rows of texts whose goals are their own next tokens."""
    goals = torch.cat([tokens.roll(-1) for tokens in texts])[:, None].int()
    parts = Texts(tuple(Text(tuple(tokens.tolist()), 1) for tokens in texts))
    store = RowStore(folder, (), torch.float32)
    store.__dict__["parts"] = [Rows(parts, torch.zeros(len(goals), 1), goals, goals * 0.0)]
    return store


def training_of(draft: FixedDraft, folder: Path, options: TrainOptions) -> Training:
    return Training(
        draft=draft,  # type: ignore[arg-type]
        options=options,
        group=Group(),
        place=folder / f"state-{options.seed}.pt",
        save_seconds=1e9,
    )


def test_a_chain_ends_with_its_first_wrong_draft(tmp_path: Path) -> None:
    """Its draft that is wrong counts, and none after it."""
    store = store_of(tmp_path, torch.tensor([1, 2, 3, 4, 5, 6]))
    # Draft j of slot i is right if it is token i + 2 + j.
    right = torch.tensor([[2, 3, 4, 5, 6, 7], [3, 4, 5, 6, 7, 7], [4, 5, 6, 7, 7, 7]]) + 1
    right[0, 1], right[1, 2] = 0, 0
    draft = FixedDraft(right.remainder(VOCAB))
    training = training_of(draft, tmp_path, TrainOptions(k=3, steps=1, batch_tokens=16))
    training.depths_of = lambda step: 3  # type: ignore[method-assign]
    training.run(store, lambda step, losses: None)
    assert draft.grown.starts == [[0, 1, 2, 3, 4], [0, 2, 3], [0]]
    assert training.cpu_seconds > 0


def test_chains_grow_deeper_over_the_first_steps(tmp_path: Path) -> None:
    """From one draft to k in the first 30 % of the steps, and k from then on."""
    draft = FixedDraft(torch.zeros(3, LENGTH, dtype=torch.long))
    training = training_of(draft, tmp_path, TrainOptions(k=3, steps=20, batch_tokens=16))
    training.run(store_of(tmp_path, torch.arange(LENGTH)), lambda step, losses: None)
    depths = [len(losses) for losses in training.log.losses]
    assert depths == [1, 1, 2, 2, *[3] * 16]


def test_a_seed_decides_the_order_of_texts(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    texts = [torch.randint(VOCAB, (LENGTH,), generator=random) for _ in range(8)]
    best = torch.randint(VOCAB, (1, 2 * LENGTH), generator=random)
    losses = []
    for number, seed in enumerate((7, 7, 8)):
        folder = tmp_path / str(number)
        options = TrainOptions(k=1, steps=8, batch_tokens=16, seed=seed)
        training = training_of(FixedDraft(best), folder, options)
        training.run(store_of(folder, *texts), lambda step, losses: None)
        losses.append(training.log.losses)
    assert losses[0] == losses[1] != losses[2]


def test_deeper_losses_weigh_less(tmp_path: Path) -> None:
    """The gradient is that of the sum of all depths' losses, each 0.8 of the one before."""
    store = store_of(tmp_path, torch.arange(LENGTH))
    best = torch.arange(2, 2 + LENGTH) + torch.arange(3)[:, None]

    def step(weight: float) -> tuple[list[float], float]:
        draft, gradients = FixedDraft(best.remainder(VOCAB)), list[Tensor]()
        with torch.no_grad():
            draft.parameters["weight"].fill_(weight)
        draft.parameters["weight"].register_hook(gradients.append)
        options = TrainOptions(k=3, steps=1, batch_tokens=16)
        training = training_of(draft, tmp_path / str(weight), options)
        training.depths_of = lambda step: 3  # type: ignore[method-assign]
        training.run(store, lambda step, losses: None)
        (gradient,) = gradients
        return training.log.losses[0], float(gradient)

    change = 1e-2
    (low, _), (high, _), (_, gradient) = step(1 - change), step(1 + change), step(1.0)
    slopes = [(b - a) / (2 * change) for a, b in zip(low, high, strict=True)]
    assert min(map(abs, slopes)) > 0.1, slopes
    wanted = sum(0.8**depth * slope for depth, slope in enumerate(slopes))
    assert gradient == pytest.approx(wanted, rel=1e-2)
    assert gradient != pytest.approx(sum(slopes), rel=1e-2)
