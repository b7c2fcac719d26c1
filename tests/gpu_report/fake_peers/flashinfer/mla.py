"""FlashInfer's wrapper of paged MLA, with what its documentation wants of the arguments; it refuses
more than one query, as a version without a fitting kernel does."""

from __future__ import annotations

import torch


class BatchMLAPagedAttentionWrapper:
    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str) -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and backend == "auto"

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert (head_dim_ckv, head_dim_kpe, page_size, causal) == (512, 64, 64, True)
        assert len(qo_indptr) == len(kv_indptr) == len(kv_len_arr) + 1 and sm_scale > 0
        assert kv_indptr.dtype == torch.int32 and int(kv_indptr[-1]) == len(kv_indices)
        assert q_data_type == kv_data_type and num_heads > 0
        if int(qo_indptr[1]) > 1:
            raise NotImplementedError("one query a request")

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        return_lse: bool,
    ) -> torch.Tensor:
        assert ckv_cache.shape[1:] == (64, 512) and kpe_cache.shape[1:] == (64, 64) and return_lse
        assert ckv_cache.is_contiguous() and kpe_cache.is_contiguous()
        assert q_nope.shape[:2] == q_pe.shape[:2]
        return torch.zeros_like(q_nope)
