"""Inputs of a step in static shapes: batches are padded to buckets, which share their tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtp_kernels.batch_layout import BatchLayout


@dataclass(frozen=True)
class Bucket:
    """Sizes of a step: requests, and most rows of each, one more than its drafts."""

    requests: int
    q_len: int

    @classmethod
    def of(cls, layout: BatchLayout, most_requests: int) -> Bucket:
        """Return the bucket of a batch: its requests are a power of two, or as many as there may
        be."""
        assert layout.max_q_len is not None, "the host laid the batch out"
        power = 1 << (len(layout.kv_lens) - 1).bit_length()
        return cls(min(power, most_requests), layout.max_q_len)

    @property
    def rows(self) -> int:
        """Rows of the step; an exported graph has no sizes of 1."""
        return max(2, self.requests * self.q_len)

    @property
    def entries(self) -> int:
        """Requests of the step's layout: as many again, for the rows that a batch leaves over."""
        return 2 * self.requests


@dataclass(frozen=True)
class Inputs:
    """Tokens [T] of a step, and their layout."""

    tokens: torch.Tensor
    layout: BatchLayout


class Buffers:
    """Tensors of the inputs of all buckets up to one: a bucket has the first elements of each.

    Rows that a batch leaves over stand for nothing. They belong to further requests, of up to q_len
    rows like all others and without tokens, so that attention computes them: they are all alike,
    and pick the same experts. Their cache entries go to a slot that no request has, and so do those
    of every row before the first batch.
    """

    def __init__(
        self, largest: Bucket, columns: int, *, spare_slot: int, device: torch.device
    ) -> None:
        rows, entries = largest.rows, largest.entries

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self._tokens = zeros(rows, dtype=torch.int64)
        self._positions = zeros(rows, dtype=torch.int64)
        self._slots = zeros(rows, dtype=torch.int64).fill_(spare_slot)
        self._page_table = zeros(entries, max(2, columns))
        self._kv_lens = zeros(entries)
        self._cu_q = zeros(entries + 1)
        _deal(self._cu_q[1:], 0, largest)
        self._spare_slot = spare_slot

    def inputs(self, bucket: Bucket) -> Inputs:
        """Return the tensors of a bucket."""
        rows, entries = bucket.rows, bucket.entries
        layout = BatchLayout(
            positions=self._positions[:rows],
            slots=self._slots[:rows],
            page_table=self._page_table[:entries],
            kv_lens=self._kv_lens[:entries],
            cu_q=self._cu_q[: entries + 1],
            max_q_len=bucket.q_len,
        )
        return Inputs(self._tokens[:rows], layout)

    def fill(self, bucket: Bucket, tokens: torch.Tensor, layout: BatchLayout) -> None:
        """Write a batch into the tensors of its bucket."""
        inputs = self.inputs(bucket)
        static = inputs.layout
        _write(inputs.tokens, tokens, 0)
        _write(static.positions, layout.positions, 0)
        _write(static.slots, layout.slots, self._spare_slot)
        _write(static.kv_lens, layout.kv_lens, 0)
        _write(static.cu_q, layout.cu_q, 0)
        _deal(static.cu_q[len(layout.cu_q) :], len(tokens), bucket)
        requests, columns = layout.page_table.shape
        static.page_table[:requests, :columns].copy_(layout.page_table)


def _write(static: torch.Tensor, values: torch.Tensor, rest: int) -> None:
    """Write values into the first elements of a tensor, and one number into the rest."""
    static[: len(values)].copy_(values)
    static[len(values) :].fill_(rest)


def _deal(ends: torch.Tensor, used: int, bucket: Bucket) -> None:
    """Write where further requests end, which share the rows that are left over."""
    first, step = used + bucket.q_len, bucket.q_len
    stop = first + step * len(ends)
    dealt = torch.arange(first, stop, step, dtype=ends.dtype, device=ends.device)
    ends.copy_(dealt.clamp_(max=bucket.rows))
