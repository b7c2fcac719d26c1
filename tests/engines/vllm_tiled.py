"""vLLM's own reading of a joined projection in fp8: `python vllm_tiled.py JOB RESULT`.

For every rank of as many as stored it, and for one that takes all: queries, keys and values as vLLM
multiplies with them.
"""

from __future__ import annotations

from typing import Any

from vllm_modules import run_job


def read(file: str, name: str, ranks: int, sizes: dict[str, int]) -> dict[str, Any]:
    """The rows of every rank, dequantized, as lists."""
    import torch
    from safetensors import safe_open
    from vllm.model_executor.models.mimo_v2 import _shard_fp8_qkv_proj

    with safe_open(file, "pt") as opened:
        codes, scale = opened.get_tensor(name), opened.get_tensor(f"{name}_scale_inv")
    found = {}
    for of in (1, ranks):
        rows = []
        for rank in range(of):
            w, s = _shard_fp8_qkv_proj(
                codes, scale, **sizes, tp_rank=rank, tp_size=of, ckpt_tp=ranks
            )
            whole = s.repeat_interleave(128, 0).repeat_interleave(128, 1)
            rows.append((w.to(torch.float32) * whole[: w.shape[0], : w.shape[1]]).tolist())
        found[str(of)] = rows
    return found


if __name__ == "__main__":
    run_job(read)
