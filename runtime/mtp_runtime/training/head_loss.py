"""Cross entropy of a large head, in chunks of logits, with distributions of a teacher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_TOKENS = 256
TEACHER_SHARPNESS = 2.0  # inverse temperature: a greedy draft must equal the most probable token


@dataclass(frozen=True)
class Goals:
    """Distributions to learn, by the tokens that they give mass to: ids and probs [..., g]."""

    ids: Tensor
    probs: Tensor

    @classmethod
    def of_tokens(cls, tokens: Tensor) -> Goals:
        """Return the certainty of each of tokens [...]."""
        ids = tokens[..., None]
        return cls(ids, torch.ones(ids.shape, device=tokens.device))

    @classmethod
    def sharpened(cls, ids: Tensor, log_probs: Tensor) -> Goals:
        """Return the distributions over the most probable tokens, sharpened and made whole."""
        return cls(ids, torch.softmax(log_probs.float() * TEACHER_SHARPNESS, dim=-1))

    def flattened(self) -> Goals:
        """Return the goals of all rows [T, g] side by side."""
        return Goals(self.ids.flatten(0, -2), self.probs.flatten(0, -2))

    def __getitem__(self, rows: Any) -> Goals:
        return Goals(self.ids[rows], self.probs[rows])


def loss_and_gradient(logits: Tensor, ids: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summed cross entropy of logits [n, vocab], which are overwritten, its gradient,
    and the best token of each row [n]."""
    wide = logits.float()
    highest, best = wide.max(dim=-1, keepdim=True)
    of_ids = wide.gather(1, ids)
    shares = wide.sub_(highest).exp_()
    total = shares.sum(dim=-1, keepdim=True)
    loss = (probs * (highest + total.log() - of_ids)).sum()
    gradient = shares.div_(total).scatter_add_(1, ids, -probs)
    return loss, gradient.to(logits.dtype), best[:, 0]


def _loss_and_gradient_of_teacher(logits: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide = logits.float()
    log_probs = wide - torch.logsumexp(wide, dim=-1, keepdim=True)
    goal = torch.softmax(teacher.float() * TEACHER_SHARPNESS, dim=-1)
    loss = -(goal * log_probs).sum()
    return loss, log_probs.exp_().sub_(goal).to(logits.dtype), wide.argmax(dim=-1)


class HeadLoss(torch.autograd.Function):
    """Mean cross entropy of hidden [n, d] @ head [vocab, d].T, chunk by chunk in `dtype`, and the
    best token of every row [n].

    goals are Goals of n rows, or a teacher's hidden states [n, d], whose sharpened distribution is
    then the goal. The gradient is computed with the loss, so that no chunk's logits are kept.
    """

    chunk_function = staticmethod(loss_and_gradient)

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, goals: Goals | Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        low_head = head.to(dtype)
        trains_head = ctx.needs_input_grad[1]
        d_hidden = torch.empty_like(hidden)
        d_head = torch.zeros_like(head) if trains_head else head.new_empty(0)
        total = hidden.new_zeros(())
        best = torch.zeros(len(hidden), dtype=torch.long, device=hidden.device)
        for start in range(0, hidden.shape[0], CHUNK_TOKENS):
            rows = slice(start, start + CHUNK_TOKENS)
            low_hidden = hidden[rows].to(dtype)
            logits = low_hidden @ low_head.T
            if isinstance(goals, Goals):
                chunk = goals[rows]
                results = HeadLoss.chunk_function(logits, chunk.ids, chunk.probs)
            else:
                teacher = goals[rows].to(dtype) @ low_head.T
                results = _loss_and_gradient_of_teacher(logits, teacher)
            loss, gradient, best[rows] = results
            total += loss
            d_hidden[rows] = gradient @ low_head
            if trains_head:
                d_head += gradient.T @ low_hidden
        ctx.save_for_backward(d_hidden, d_head)
        ctx.trains_head = trains_head
        ctx.count = count = max(1, hidden.shape[0])
        ctx.mark_non_differentiable(best)
        return total / count, best

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        d_hidden, d_head = ctx.saved_tensors
        share = grad / ctx.count
        return d_hidden * share, d_head * share if ctx.trains_head else None, None, None


def head_loss(hidden: Tensor, head: Tensor, goals: Goals | Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mean cross entropy of hidden [n, d] under a head [vocab, d], as HeadLoss does."""
    return loss_and_best(hidden, head, goals=goals, dtype=dtype)[0]


def loss_and_best(
    hidden: Tensor, head: Tensor, goals: Goals | Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the mean cross entropy of hidden [n, d] under a head [vocab, d], and the best token of
    every row [n], as HeadLoss does."""
    apply: Callable[..., tuple[Tensor, Tensor]] = HeadLoss.apply
    return apply(hidden.float(), head, goals, dtype)
