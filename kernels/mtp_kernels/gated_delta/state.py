"""Recurrent state of requests in a gated delta net, and the rows that a pass takes it through."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mtp_kernels.batch_layout import StateLayout
from mtp_kernels.sizes import DeltaSizes
from mtp_kernels.tensor_checks import check_tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of activations
_COUNT = (torch.int32,)


class DeltaState(NamedTuple):
    """State of one layer's requests, by slot.

    A slot holds S after a request's certain tokens, and what replays the drafts that followed them
    in its last pass, should they be accepted: raw inputs of the convolution, of which the first
    width - 1 precede those drafts, and gates. Rejected drafts are dropped by not replaying them.
    """

    states: torch.Tensor  # [slots, Hv, V, K] float32
    inputs: torch.Tensor  # [slots, width - 1 + max_drafts, channels], in the activations' dtype
    gates: torch.Tensor  # [slots, max_drafts, 2, Hv] float32: log decay and beta

    @classmethod
    def empty(
        cls,
        slots: int,
        max_drafts: int,
        sizes: DeltaSizes,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> DeltaState:
        """Return uninitialized state with room for drafts of a pass: a slot is cleared where its
        request begins, so that memory is taken by those alone that have begun."""
        rows = sizes.width - 1 + max_drafts
        heads = sizes.value_heads
        return cls(
            states=torch.empty(slots, heads, sizes.value, sizes.key, device=device),
            inputs=torch.empty(slots, rows, sizes.channels, dtype=dtype, device=device),
            gates=torch.empty(slots, max_drafts, 2, heads, device=device),
        )

    @property
    def max_drafts(self) -> int:
        """Drafts of a pass that a slot has room for."""
        return self.gates.shape[1]

    def clear(self, slot: int) -> None:
        """Make a slot that of a request without tokens."""
        self.states[slot] = 0.0
        self.inputs[slot] = 0.0


def check_rows(
    inputs: torch.Tensor, gates: torch.Tensor, weight: torch.Tensor, sizes: DeltaSizes
) -> None:
    """Check the rows of a pass and the convolution's weight against the sizes."""
    if sizes.value_heads % sizes.key_heads:
        raise ValueError(
            f"value_heads: expected a multiple of {sizes.key_heads}, found {sizes.value_heads}"
        )
    device, dtype = inputs.device, (inputs.dtype,)
    check_tensor("inputs", inputs, ("T", sizes.channels), DTYPES, device)
    shape = (len(inputs), 2, sizes.value_heads)
    check_tensor("gates", gates, shape, (torch.float32,), device)
    check_tensor("weight", weight, (sizes.channels, sizes.width), dtype, device)


def check_state(state: DeltaState, inputs: torch.Tensor, sizes: DeltaSizes) -> None:
    """Check that a state is that of a layer of these sizes, on the device of its rows."""
    slots, drafts, heads = len(state.states), state.max_drafts, sizes.value_heads
    device, exact = inputs.device, (torch.float32,)
    check_tensor("states", state.states, (slots, heads, sizes.value, sizes.key), exact, device)
    rows = (slots, sizes.width - 1 + drafts, sizes.channels)
    check_tensor("state's inputs", state.inputs, rows, (inputs.dtype,), device)
    check_tensor("state's gates", state.gates, (slots, drafts, 2, heads), exact, device)


def check_layout(layout: StateLayout, state: DeltaState, rows: int) -> None:
    """Check that a layout covers so many rows in order, and that slots have room for its drafts."""
    cpu = torch.device("cpu")
    check_tensor("slots", layout.slots, ("b",), _COUNT, cpu)
    batch = len(layout.slots)
    check_tensor("cu_rows", layout.cu_rows, (batch + 1,), _COUNT, cpu)
    check_tensor("replayed", layout.replayed, (batch,), _COUNT, cpu)
    check_tensor("certain", layout.certain, (batch,), _COUNT, cpu)
    starts, slots = layout.cu_rows.tolist(), layout.slots.tolist()
    if starts[0] != 0 or starts[-1] != rows or starts != sorted(starts):
        raise ValueError(f"cu_rows: expected 0 rising to {rows}, found {starts}")
    number, drafts = len(state.states), state.max_drafts
    if len(set(slots)) < batch or not all(0 <= slot < number for slot in slots):
        raise ValueError(f"slots: expected different ones of 0 to {number - 1}, found {slots}")
    replayed, certain = layout.replayed.tolist(), layout.certain.tolist()
    if not all(0 <= count <= drafts for count in replayed):
        raise ValueError(f"replayed: expected 0 to {drafts} drafts, found {replayed}")
    for request, count in enumerate(certain):
        own = starts[request + 1] - starts[request]
        if not max(0, own - drafts) <= count <= own:
            raise ValueError(
                f"certain: expected {max(0, own - drafts)} to {own} of the {own} rows of request "
                f"{request}, whose slot has room for {drafts} drafts, found {count}"
            )
