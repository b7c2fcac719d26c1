"""Training of a draft: steps over batches of rows, and the state that a run resumes from."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtp_checkpoints.errors import UsageError
from mtp_export import state_files
from mtp_export.tune.draft import TrainedDraft
from mtp_export.tune.options import TrainOptions
from mtp_export.tune.row_store import Batch, RowStore, shuffled
from mtp_runtime.models.load import DTYPES
from mtp_runtime.parallel.group import Group
from mtp_runtime.training.head_loss import loss_and_best
from mtp_runtime.training.optimizer import Course, adamw, set_rate

DEPTH_DECAY = 0.8  # of the weights of losses, from one depth to the next
GROWING_SHARE = 0.3  # first part of the steps, over which the depths grow to k
WARM_UP_SHARE, FINAL_SHARE = 0.05, 0.02  # of the steps, and of the highest rate
LARGEST_GRADIENT = 1.0

# A step, and its losses by depth.
OnStep = Callable[[int, Sequence[float]], object]


@dataclass
class Log:
    """Losses by depth of every step so far."""

    losses: list[list[float]] = field(default_factory=list)

    def means(self) -> list[tuple[float, float]]:
        """Return the first depth's loss by step, smoothed over 5 % of the steps."""
        first = [losses[0] for losses in self.losses]
        width = max(1, int(0.05 * len(first)))
        return [
            (float(at + width), math.fsum(first[at : at + width]) / width)
            for at in range(0, len(first) - width + 1, width)
        ]


@dataclass
class Training:
    """A draft, its optimizer, and the steps done; `place` is the file of the saved state.

    cpu_seconds: processor time of all threads in the steps so far.
    """

    draft: TrainedDraft
    options: TrainOptions
    group: Group
    place: Path
    save_seconds: float
    log: Log = field(default_factory=Log)
    cpu_seconds: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        parameters = self.draft.parameters.values()
        self._optimizer = adamw(list(parameters), decay=0.0)  # it stays near where it began
        self._course = Course(
            steps=self.options.steps,
            warmup_steps=max(1, int(self.options.steps * WARM_UP_SHARE)),
            peak_rate=self.options.rate,
            final_rate=self.options.rate * FINAL_SHARE,
            decay_share=0.9,
        )
        if self.place.is_file():
            self._resume()

    @property
    def done(self) -> int:
        """Number of steps done."""
        return len(self.log.losses)

    def run(self, store: RowStore, on_step: OnStep) -> None:
        """Train to the last step; whatever ends it early, the last saved state stays."""
        batches = shuffled(store.lengths, self.options.batch_tokens, self.options.seed)
        saved = time.monotonic()
        for numbers in islice(batches, self.done, self.options.steps):
            started = time.process_time()
            losses = self._step(store, numbers)
            self.cpu_seconds += time.process_time() - started
            self.log.losses.append(losses)
            last = self.done == self.options.steps
            if last or time.monotonic() - saved >= self.save_seconds:
                self._save()
                saved = time.monotonic()
            on_step(self.done, losses)

    def depths_of(self, step: int) -> int:
        """Return how many drafts of a chain a step trains: one at first, soon all."""
        growing = max(1.0, GROWING_SHARE * self.options.steps)
        return min(self.options.k, 1 + int(self.options.k * step / growing))

    def _step(self, store: RowStore, numbers: Sequence[int]) -> list[float]:
        """Do one step of the optimizer; returns each depth's loss, summed over the chains that came
        so far and divided by all, over all processes."""
        depths, device = self.depths_of(self.done), self.draft.device
        counts = [
            max(1, sum(store.chains(number, depth) for number in numbers))
            for depth in range(depths)
        ]
        losses = torch.zeros(depths, device=device)
        own = numbers[self.group.rank :: self.group.size]
        if own:
            means = self._losses(store.batch(own, device), counts)
            weights = [DEPTH_DECAY**depth for depth in range(depths)]
            weighted = [w * mean for w, mean in zip(weights, means, strict=True)]
            torch.autograd.backward(torch.stack(weighted).sum())
            losses = torch.stack(means).detach()
        length = self._advance()
        return self._checked(self.group.add_up(losses).tolist(), length)

    def _losses(self, batch: Batch, counts: Sequence[int]) -> list[Tensor]:
        """Return each depth's loss, divided by the counts of all processes.

        A chain ends with its first draft that is not the text's own token, as in decoding.
        """
        device, dtype = batch.tokens.device.type, DTYPES[self.options.dtype]
        tokens, goals = batch.tokens.flatten(), batch.goals.flattened()
        starts, losses = batch.starts(), list[Tensor]()
        with torch.autocast(device, dtype=dtype, enabled=dtype is not torch.float32):
            chains = self.draft.chains(batch)
            for depth, count in enumerate(counts):
                starts = starts[batch.room(depth)[starts]]
                if not len(starts):
                    losses.append(torch.zeros((), device=self.draft.device))
                    continue
                wanted, normed = goals[starts + 1 + depth], chains.drafts(starts)
                mean, best = loss_and_best(normed, self.draft.head, goals=wanted, dtype=dtype)
                losses.append(mean * (len(starts) / count))
                following = (starts + 2 + depth).clamp(max=len(tokens) - 1)
                starts = starts[best == tokens[following]]
        return losses

    def _advance(self) -> float:
        """Change the parameters by the sum of all processes' gradients; returns its length."""
        parameters = list(self.draft.parameters.values())
        for parameter in parameters:
            if parameter.grad is None:  # here, but perhaps not in the other processes
                parameter.grad = torch.zeros_like(parameter)
            self.group.add_up(parameter.grad)
        length = torch.nn.utils.clip_grad_norm_(parameters, LARGEST_GRADIENT)
        set_rate(self._optimizer, self._course.rate(self.done))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(length)

    def _checked(self, losses: list[float], length: float) -> list[float]:
        """Return losses; refuse them, or a gradient, that are no numbers (UsageError)."""
        if all(map(math.isfinite, (*losses, length))):
            return losses
        raise UsageError(
            f"The training diverged at step {self.done + 1}: its loss is no number",
            expected="a lower --lr",
            found=f"--lr {self.options.rate}",
            todo=f"Remove {self.place}, and run with another --lr",
        )

    def _save(self) -> None:
        if self.group.is_first:
            state_files.save(self.place, self._state())

    def _state(self) -> dict[str, Any]:
        return {
            "parameters": {name: p.detach() for name, p in self.draft.parameters.items()},
            "optimizer": self._optimizer.state_dict(),
            "losses": self.log.losses,
            "cpu_seconds": self.cpu_seconds,
        }

    def _resume(self) -> None:
        state = state_files.load(self.place)
        with torch.no_grad():
            for name, parameter in self.draft.parameters.items():
                parameter.copy_(state["parameters"][name])
        self._optimizer.load_state_dict(state["optimizer"])
        self.log.losses = state["losses"]
        self.cpu_seconds = state["cpu_seconds"]
