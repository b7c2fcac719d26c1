"""Multi-head latent attention in its absorbed form: queries meet the cached latent directly, so a
token costs c + r cached numbers whatever the number of heads.

Source: DeepSeek-V2 report (arXiv 2405.04434), section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtp_runtime.layers.linear import Linear
from mtp_runtime.layers.norm import RmsNorm
from mtp_runtime.layers.rope import rotate


@dataclass(frozen=True)
class Mla:
    """The projections around attention; the caller keeps the cache and attends.

    down maps x to [query (or its low rank) | latent | rope key]. key_up [h, n, c] and value_up
    [h, c, v] are the two halves of kv_b_proj, dense, since they are absorbed.
    """

    down: Linear
    query_norm: RmsNorm | None
    query_up: Linear | None
    latent_norm: RmsNorm
    key_up: torch.Tensor
    value_up: torch.Tensor
    output: Linear
    rope_size: int
    scale: float

    def project(
        self, x: torch.Tensor, rotations: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [T, d] -> q_latent [T, h, c], q_rope [T, h, r], and what to cache [T, c+r]."""
        heads, nope, latent = self.key_up.shape
        projected = self.down(x)
        query_size = projected.shape[1] - latent - self.rope_size
        sizes = [query_size, latent, self.rope_size]
        query, kv, k_rope = torch.split(projected, sizes, dim=1)
        if self.query_up is not None and self.query_norm is not None:
            query = self.query_up(self.query_norm(query))
        q_nope, q_rope = torch.split(query.view(len(x), heads, -1), [nope, self.rope_size], dim=2)
        q_latent = torch.bmm(q_nope.transpose(0, 1), self.key_up).transpose(0, 1).contiguous()
        turning = torch.cat([q_rope, k_rope[:, None]], dim=1)  # [T, h+1, r]
        turned = rotate(turning, rotations[:, None])
        cached = torch.cat([self.latent_norm(kv), turned[:, heads]], dim=1)
        return q_latent, turned[:, :heads], cached

    def finish(self, attended: torch.Tensor) -> torch.Tensor:
        """Attended latents [T, h, c] -> [T, d]."""
        values = torch.bmm(attended.transpose(0, 1), self.value_up)  # [h, T, v]
        return self.output(values.transpose(0, 1).reshape(len(attended), -1))
