"""The loss of a head in chunks compared with torch's own, value and gradients."""

from __future__ import annotations

import pytest
import torch

from mtp_runtime.training import head_loss as module
from mtp_runtime.training.head_loss import Goals, head_loss, loss_and_best
from mtp_runtime.training.optimizer import Course


def test_loss_and_gradients_are_those_of_cross_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three chunks, the last one smaller."""
    monkeypatch.setattr(module, "CHUNK_TOKENS", 4)
    random = torch.Generator().manual_seed(1)
    hidden = torch.randn(10, 6, generator=random, requires_grad=True)
    head = torch.randn(20, 6, generator=random, requires_grad=True)
    ids = torch.rand(10, 20, generator=random).argsort(dim=1)[:, :5]
    goals = Goals.sharpened(ids, torch.randn(10, 5, generator=random))
    found, best = loss_and_best(hidden, head, goals=goals, dtype=torch.float32)
    assert torch.equal(best, (hidden @ head.T).argmax(dim=-1))
    gradients = torch.autograd.grad(found, (hidden, head))
    whole = torch.zeros(10, 20).scatter(1, ids, goals.probs)
    wanted = torch.nn.functional.cross_entropy(hidden @ head.T, whole)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(gradients, torch.autograd.grad(wanted, (hidden, head)))


def test_no_rows_are_no_loss() -> None:
    goals = Goals.of_tokens(torch.zeros(0, dtype=torch.long))
    hidden = torch.zeros(0, 6, requires_grad=True)
    loss = head_loss(hidden, torch.zeros(20, 6), goals=goals, dtype=torch.float32)
    assert loss.item() == 0


def test_rates_rise_stay_and_fall() -> None:
    course = Course(steps=100, warmup_steps=10, peak_rate=1.0, final_rate=0.1, decay_share=0.5)
    rates = [course.rate(step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert set(rates[10:50]) == {1.0}
    assert rates[50:] == sorted(rates[50:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=0.01)
