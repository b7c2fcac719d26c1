"""CANN's fused inference attention, as op-plugin documents it: an operator that asserts what is
documented of latent attention over pages, and computes by the reference.

The schema is the documented one, so that torch refuses unknown names and wrong types.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mtp_kernels.verify_attention import verify_attention

NAME = "npu_fused_infer_attention_score_v2"
SCHEMA = (
    f"{NAME}(Tensor query, Tensor key, Tensor value, *, Tensor? query_rope=None, "
    "Tensor? key_rope=None, Tensor? pse_shift=None, Tensor? atten_mask=None, "
    "SymInt[]? actual_seq_qlen=None, SymInt[]? actual_seq_kvlen=None, Tensor? block_table=None, "
    "Tensor? dequant_scale_query=None, Tensor? dequant_scale_key=None, "
    "Tensor? dequant_offset_key=None, Tensor? dequant_scale_value=None, "
    "Tensor? dequant_offset_value=None, Tensor? dequant_scale_key_rope=None, "
    "Tensor? quant_scale_out=None, Tensor? quant_offset_out=None, Tensor? learnable_sink=None, "
    "int num_query_heads=1, int num_key_value_heads=0, float softmax_scale=1.0, "
    "int pre_tokens=2147483647, int next_tokens=2147483647, str input_layout='BSH', "
    "int sparse_mode=0, int block_size=0, int query_quant_mode=0, int key_quant_mode=0, "
    "int value_quant_mode=0, int inner_precise=0, bool return_softmax_lse=False, "
    "int? query_dtype=None, int? key_dtype=None, int? value_dtype=None, "
    "int? query_rope_dtype=None, int? key_rope_dtype=None, int? key_shared_prefix_dtype=None, "
    "int? value_shared_prefix_dtype=None, int? dequant_scale_query_dtype=None, "
    "int? dequant_scale_key_dtype=None, int? dequant_scale_value_dtype=None, "
    "int? dequant_scale_key_rope_dtype=None) -> (Tensor, Tensor)"
)
# Arguments that latent attention takes; all others have their defaults.
TAKEN = (
    *("query_rope", "key_rope", "atten_mask", "actual_seq_qlen", "actual_seq_kvlen"),
    *("block_table", "num_query_heads", "num_key_value_heads", "softmax_scale"),
    *("input_layout", "sparse_mode", "block_size", "return_softmax_lse"),
)
MASK = (2048, 2048)


@contextmanager
def registered(key: str = "CPU") -> Iterator[list[dict[str, Any]]]:
    """Register the operator for a dispatch key; yields the arguments of its calls."""
    calls: list[dict[str, Any]] = []

    def run(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **given: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert set(given) <= set(TAKEN), f"arguments that are not for this: {sorted(given)}"
        given.setdefault("num_query_heads", 1)  # torch leaves defaults out
        calls.append(given)
        check_tensors(query, key, value, **given)
        check_lengths(len(query), **given)
        return computed(query, key, **given)

    library = torch.library.Library("npu", "DEF")
    try:
        library.define(SCHEMA)
        library.impl(NAME, run, key)
        yield calls
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def check_tensors(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **given: Any
) -> None:
    """Assert dtypes, shapes, contiguity and fixed arguments, as documented for D = 512."""
    rows, heads, latent = query.shape
    blocks, page = key.shape[:2]
    assert query.dtype in (torch.bfloat16, torch.float16)
    assert rows > 0 and blocks > 0, "no empty tensors"
    assert latent == 512 and heads in (1, 2, 4, 8, 16, 32, 64, 128)
    assert page % 16 == 0 and page <= 1024 and given["block_size"] == page
    assert key.shape == (blocks, page, 512) and value.shape == key.shape
    assert given["query_rope"].shape == (rows, heads, 64)
    assert given["key_rope"].shape == (blocks, page, 64)
    in_16_bits = (query, key, value, given["query_rope"], given["key_rope"])
    assert {tensor.dtype for tensor in in_16_bits} == {query.dtype}
    mask, table = given["atten_mask"], given["block_table"]
    assert mask.shape == MASK and mask.dtype in (torch.bool, torch.int8, torch.uint8)
    assert torch.equal(mask, torch.ones(MASK, dtype=mask.dtype).triu(1))
    assert table.dtype == torch.int32 and table.ndim == 2
    everything = (*in_16_bits, mask, table)
    assert all(tensor.is_contiguous() for tensor in everything)
    assert {tensor.device for tensor in everything} == {query.device}
    assert given["input_layout"] == "TND" and given["sparse_mode"] == 3
    assert given["num_query_heads"] == heads and given["num_key_value_heads"] == 1
    assert given["return_softmax_lse"] is True and given["softmax_scale"] > 0


def check_lengths(rows: int, **given: Any) -> None:
    """Assert that both lists describe the rows, within the documented limits."""
    ends, kv_lens = given["actual_seq_qlen"], given["actual_seq_kvlen"]
    q_lens = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    assert all(type(length) is int for length in (*ends, *kv_lens))
    assert 1 <= len(ends) == len(kv_lens) == len(given["block_table"]) <= 4096
    assert ends[-1] == rows and all(1 <= q_len <= 16 for q_len in q_lens)
    assert all(kv_len >= q_len for kv_len, q_len in zip(kv_lens, q_lens, strict=True))
    pages = -(-max(kv_lens) // given["block_size"])
    assert given["block_table"].shape[1] >= pages
    for kv_len, row in zip(kv_lens, given["block_table"].tolist(), strict=True):
        used = row[: -(-kv_len // given["block_size"])]
        assert all(0 <= page < len(given["key_rope"]) for page in used), "ids are not checked there"


def computed(
    query: torch.Tensor, key: torch.Tensor, **given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention in the query's dtype [T, N, 512], and its lse [T, N, 1] in float32."""
    out, lse = verify_attention(
        query,
        given["query_rope"],
        key,
        page_table=given["block_table"],
        kv_lens=torch.tensor(given["actual_seq_kvlen"], dtype=torch.int32),
        cu_q=torch.tensor([0, *given["actual_seq_qlen"]], dtype=torch.int32),
        scale=given["softmax_scale"],
        rope_cache=given["key_rope"],
        backend="reference",
    )
    return out, lse[..., None]


def split(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of verify_attention with their cache split."""
    cache, latent = arguments["kv_cache"], arguments["q_latent"].shape[2]
    halves = cache[..., :latent].contiguous(), cache[..., latent:].contiguous()
    return arguments | {"kv_cache": halves[0], "rope_cache": halves[1]}
