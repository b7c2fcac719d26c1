"""Layout of a ragged batch over a paged cache, the one description that every kernel goes by."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StateLayout:
    """Rows of a pass by request, and the slot that each request's state lies in.

    Request i of b owns rows cu_rows[i] to cu_rows[i+1]: certain[i] tokens, then drafts. Before
    them, the first replayed[i] drafts of its last pass, those that were accepted, go through its
    state once more. All on the CPU.
    """

    cu_rows: torch.Tensor  # [b+1] int32
    slots: torch.Tensor  # [b] int32, no two the same
    replayed: torch.Tensor  # [b] int32
    certain: torch.Tensor  # [b] int32


@dataclass(frozen=True)
class BatchLayout:
    """The rows of a forward pass, the request each belongs to, and where its cache lies.

    Request i of b owns rows cu_q[i] to cu_q[i+1] of T, in order of position, and reads and writes
    the cache in the pages of page_table[i]. A slot is page * page_size + offset. All tensors lie on
    the device of the pass, but for kv_lens and cu_q where the cache is split: on the CPU.
    max_q_len None: kernels that need it read cu_q back from their device. states None: no layer
    keeps a state per request, or none of them takes the rows.
    """

    positions: torch.Tensor  # [T] int64, of each row in its request
    slots: torch.Tensor  # [T] int64, where each row's cache entry goes
    page_table: torch.Tensor  # [b, max_pages] int32; what is past a request's last page is unused
    kv_lens: torch.Tensor  # [b] int32, cached tokens after the pass, those of its rows included
    cu_q: torch.Tensor  # [b+1] int32, rows before each request
    max_q_len: int | None = None  # most rows of a request
    states: StateLayout | None = None  # for layers that keep a state per request
