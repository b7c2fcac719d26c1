"""The reference itself, against sums written out here in float64, token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_cases import Case, build

from mtp_kernels.verify_attention import verify_attention

CASE = Case(q_lens=(1, 3, 0, 2), kv_lens=(5, 20, 7, 1), heads=2, latent=8, rope=4, page=4)


def by_hand(arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row sees the tokens up to its own; one that sees none is 0, with a sum of none."""
    query = torch.cat([arguments["q_latent"], arguments["q_rope"]], dim=-1).double()
    out = torch.zeros(*arguments["q_latent"].shape, dtype=torch.float64)
    lse = torch.full(out.shape[:2], -math.inf, dtype=torch.float64)
    cache, scales, page = arguments["kv_cache"], arguments["kv_scale"], CASE.page
    row = 0
    for request, (q_len, kv_len) in enumerate(zip(CASE.q_lens, CASE.kv_lens, strict=True)):
        for own in range(q_len):
            for head in range(CASE.heads):
                total, mixed = 0.0, torch.zeros(CASE.latent, dtype=torch.float64)
                for token in range(kv_len - q_len + own + 1):
                    place = int(arguments["page_table"][request, token // page]), token % page
                    entry = cache[place].double()
                    if scales is not None:
                        entry = entry * scales[place].double()
                    weight = math.exp(float(query[row, head] @ entry) * arguments["scale"])
                    total, mixed = total + weight, mixed + weight * entry[: CASE.latent]
                if total:
                    out[row, head], lse[row, head] = mixed / total, math.log(total)
            row += 1
    return out, lse


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("apart", [False, True], ids=["joined", "apart"])
def test_every_row_is_its_definition(fp8: bool, apart: bool) -> None:
    """Also with the rope keys in a cache of their own."""
    arguments = build(Case(**{**vars(CASE), "fp8": fp8}))
    wanted = by_hand(arguments)
    if apart:
        latents, rope_keys = arguments["kv_cache"].split([CASE.latent, CASE.rope], dim=-1)
        arguments |= {"kv_cache": latents.contiguous(), "rope_cache": rope_keys.contiguous()}
    found = verify_attention(**arguments, backend="reference")
    assert bool((wanted[1] == -math.inf).any()) and bool((wanted[0][-2] == 0).all())
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=1e-6)
