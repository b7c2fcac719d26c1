"""Faults that, without a source, only running a bundle shows: each leaves files, names, shapes and
checksums intact. They are planted into the trained fixture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from faults import planting
from faults.fault import Fault
from mtp_export.verify.evidence.decode import PassThroughDrafter
from mtp_runtime.acceptance.base import Draft
from mtp_runtime.drafters.base import DrafterParts
from mtp_runtime.drafters.chain import extend
from mtp_runtime.drafters.mtp import MtpDrafter, Rows
from mtp_runtime.models.model import MtpModule
from mtp_runtime.request import Request
from mtp_runtime.sampling import one_hot

MTP = "model.layers.61"
EXPERT = f"{MTP}.mlp.experts.%d.%s_proj.%s"
ENDS = ("weight", "weight_scale_inv")
ROPE, NOPE, HEADS = 64, 32, 4


def concatenation_reversed(bundle: Path) -> None:
    name = f"{MTP}.eh_proj.weight"
    planting.change(bundle / "mtp", name, lambda w: w.roll(w.shape[1] // 2, 1))


def norms_swapped(bundle: Path) -> None:
    planting.swap(bundle / "mtp", f"{MTP}.enorm.weight", f"{MTP}.hnorm.weight")


def rope_as_halves(bundle: Path) -> None:
    """The rotary rows of keys and of every head's queries, as two halves."""
    order = torch.arange(ROPE).view(-1, 2).t().reshape(-1)

    def keys(rows: torch.Tensor) -> torch.Tensor:
        raw = rows.view(torch.uint8).clone()
        raw[-ROPE:] = raw[-ROPE:][order]
        return raw.view(rows.dtype)

    def queries(rows: torch.Tensor) -> torch.Tensor:
        raw = rows.view(torch.uint8).clone().view(HEADS, NOPE + ROPE, -1)
        raw[:, NOPE:] = raw[:, NOPE:][:, order]
        return raw.view(rows.shape).view(rows.dtype)

    prefix = f"{MTP}.self_attn"
    planting.change(bundle / "mtp", f"{prefix}.kv_a_proj_with_mqa.weight", keys)
    planting.change(bundle / "mtp", f"{prefix}.q_b_proj.weight", queries)


def experts_swapped(bundle: Path) -> None:
    for projection in ("gate", "up", "down"):
        for end in ENDS:
            planting.swap(
                bundle / "mtp", EXPERT % (1, projection, end), EXPERT % (2, projection, end)
            )


def gate_and_up_swapped(expert: int, bundle: Path) -> None:
    for end in ENDS:
        planting.swap(bundle / "mtp", EXPERT % (expert, "gate", end), EXPERT % (expert, "up", end))


def embedding_of_another_checkpoint(bundle: Path) -> None:
    """Rows of another vocabulary order."""
    name = f"{MTP}.embed_tokens.weight"
    planting.change(bundle / "mtp", name, lambda table: table.roll(7, 0))


def head_of_another_checkpoint(bundle: Path) -> None:
    name = f"{MTP}.shared_head.head.weight"
    planting.change(bundle / "mtp", name, lambda table: table.roll(7, 0))


def contract(field: str, value: object, bundle: Path) -> None:
    for part in ("main", "mtp"):
        planting.edit_config(
            bundle / part, lambda config: config.update(mtp_contract={field: value})
        )


def draft_of_another_model(bundle: Path) -> None:
    """A draft that was trained for another main model: its mixing matrix is random."""

    def another(tensor: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std()
        return noise.to(tensor.dtype)

    planting.change(bundle / "mtp", f"{MTP}.eh_proj.weight", another)


_fields = {"needs": "trained"}
RUN_FAULTS: tuple[Fault, ...] = (
    Fault("concatenation reversed", concatenation_reversed, "acceptance",
          "the concatenation is reversed", **_fields, seen_as="mlx-lm 1469"),
    Fault("enorm and hnorm swapped", norms_swapped, "acceptance",
          "enorm and hnorm are swapped", **_fields, seen_as="mlx-lm 1469"),
    Fault("RoPE halves", rope_as_halves, "acceptance",
          "in halves instead of interleaved pairs", **_fields),
    Fault("two experts swapped", experts_swapped, "acceptance",
          "experts 1 and 2 are swapped", **_fields),
    Fault("gate and up of one expert", partial(gate_and_up_swapped, 3), "acceptance",
          "gate_proj and up_proj of expert 3 are swapped", **_fields),
    Fault("embedding of another checkpoint", embedding_of_another_checkpoint, "acceptance",
          "the draft's embedding is of another checkpoint", **_fields, seen_as="vllm-ascend 6754"),
    Fault("head of another checkpoint", head_of_another_checkpoint, "acceptance",
          "the draft's head is of another checkpoint", **_fields, seen_as="vllm-ascend 6754"),
    Fault("contract: pre-norm hidden recycled",
          partial(contract, "recycled_hidden", "before_norm"), "acceptance",
          "pre-norm hidden recycled", **_fields, seen_as="vLLM 36531, 47448, ATOM 1764"),
    Fault("contract: target hidden before the norm",
          partial(contract, "target_hidden", "before_norm"), "acceptance",
          "the target's hidden state is taken before the norm", **_fields),
    Fault("contract: first embedding zeroed",
          partial(contract, "zero_first_embedding", True), "acceptance",
          "first-token handling", **_fields, seen_as="vLLM 14647"),
    Fault("draft of another model", draft_of_another_model, "acceptance",
          "the draft belongs to another main model", **_fields, seen_as="DeepSeek-V3 190"),
)  # fmt: skip


@dataclass(frozen=True)
class DrafterFault:
    """A faulty drafter that runs a correct module."""

    name: str
    build: Any
    cause: str
    seen_as: str = ""


class StaleDrafter(MtpDrafter):
    """Feed every draft the target's last hidden state."""

    def observe(self, passes: Any) -> None:
        super().observe(passes)
        self._targets = getattr(self, "_targets", {})
        for p in passes:
            self._targets[p.request.request_id] = p.hidden[-1]

    def grow(self, chains: Any) -> None:
        grow_with(self, chains, lambda x, normed, r: self._targets[r.request_id])


class PreNormDrafter(MtpDrafter):
    """Recycle the module's output from before its norm."""

    def grow(self, chains: Any) -> None:
        grow_with(self, chains, lambda x, normed, r: x)


def grow_with(drafter: Any, chains: list[Any], recycled: Any) -> None:
    """MtpDrafter's recursion fed with another hidden state, one chain at a time."""
    head = drafter._modules[0].head
    for chain in chains:
        x = drafter._first_output(chain.request)
        while True:
            normed = head.normed(x)
            extend([chain], head.logits(normed), drafter._settings)
            if chain.is_whole:
                break
            start = len(chain.request.tokens) - 2 + len(chain.tokens)
            back = recycled(x[0], normed[0], chain.request)[None]
            rows = Rows(chain.request, (start, start + 1), [chain.tokens[-1]], back)
            (x,) = drafter._run(0, [rows])


class FirstTokenDrafter(MtpDrafter):
    """Zero the embedding of position 0, which the module was trained to see."""

    def __init__(self, parts: DrafterParts) -> None:
        super().__init__(parts)
        (module,) = self._modules
        if isinstance(module, MtpModule):  # a table model stands in for one elsewhere
            contract = replace(module.contract, zero_first_embedding=True)
            self._modules = (replace(module, contract=contract),)


class KeepsOneProbability(PassThroughDrafter):
    """Report, of each distribution, the drawn token's probability alone."""

    def __init__(self, parts: DrafterParts) -> None:
        super().__init__(MtpDrafter(parts))

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        found = []
        for draft in super().propose(requests, counts):
            if draft.draft_probs is not None:
                kept = one_hot(np.array(draft.tokens), draft.draft_probs.shape[-1])
                draft = Draft(draft.tokens, kept * draft.draft_probs)
            found.append(draft)
        return found


DRAFTER_FAULTS = (
    DrafterFault("stale hidden state", StaleDrafter, "stale hidden state", "ik_llama 1718"),
    DrafterFault("pre-norm hidden recycled", PreNormDrafter, "pre-norm hidden recycled",
                 "vLLM 36531, 47448, ATOM 1764"),
    DrafterFault("first-token handling", FirstTokenDrafter, "first-token handling", "vLLM 14647"),
)  # fmt: skip
