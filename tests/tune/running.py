"""Runs of a training in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mtp_export.tune.options import TrainOptions
from mtp_export.verify.evidence.statistics import Estimate

K, STEPS = 2, 16
TRAIN = TrainOptions(k=K, steps=STEPS, rate=1e-3, batch_tokens=256)


class Watch:
    """Progress that keeps the losses, and interrupts after a step."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after = stop_after
        self.losses: list[list[float]] = []

    def texts(self, count: int) -> Callable[[int], object]:
        return lambda done: None

    def steps(self, done: int, count: int) -> Callable[[int, Sequence[float]], object]:
        def on_step(step: int, losses: Sequence[float]) -> None:
            self.losses.append(list(losses))
            if step == self.stop_after:
                raise KeyboardInterrupt

        return on_step


def value(estimate: Estimate | None) -> float:
    assert estimate is not None
    return estimate.value
