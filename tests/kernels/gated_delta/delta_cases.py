"""Requests of a gated delta net: random rows, passes over them, and speculative decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import torch

from mtp_kernels.batch_layout import StateLayout
from mtp_kernels.gated_delta import DeltaState, gated_delta
from mtp_kernels.sizes import DeltaSizes

SIZES = DeltaSizes(key_heads=1, value_heads=2, key=16, value=6, width=4)
WIDE = DeltaSizes(key_heads=2, value_heads=6, key=32, value=40, width=4)
EQUAL = DeltaSizes(key_heads=4, value_heads=4, key=16, value=16, width=3)
DRAFTS = 3
BATCH = 16


@dataclass(frozen=True)
class Layer:
    """A layer: sizes, and the convolution's weight [channels, width]."""

    sizes: DeltaSizes
    weight: torch.Tensor
    backend: str

    def state(self, slots: int) -> DeltaState:
        """Return a pool whose slots hold NaN: whatever a request reads was cleared or written."""
        state = DeltaState.empty(slots, DRAFTS, self.sizes, self.weight.dtype, "cpu")
        for part in (state.states, state.inputs, state.gates):
            part.fill_(torch.nan)
        return state

    def passed(self, rows: Rows, state: DeltaState, layout: StateLayout) -> torch.Tensor:
        """Return the outputs of a pass [T, Hv, V]."""
        inputs, gates, backend = rows.inputs, rows.gates, self.backend
        return gated_delta(inputs, gates, self.weight, state, layout, self.sizes, backend=backend)


@dataclass(frozen=True)
class Rows:
    """Raw rows [n, channels] and gates [n, 2, Hv] of one request."""

    inputs: torch.Tensor
    gates: torch.Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    def part(self, first: int, stop: int) -> Rows:
        return Rows(self.inputs[first:stop], self.gates[first:stop])


@dataclass(frozen=True)
class Turn:
    """A request's part of a pass."""

    slot: int
    rows: Rows
    replayed: int
    certain: int


Pass = Callable[[Layer, DeltaState, Sequence[Turn]], list[torch.Tensor]]


def make_layer(sizes: DeltaSizes, backend: str, dtype: torch.dtype = torch.float32) -> Layer:
    """Return a layer with a random convolution."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(sizes.channels, sizes.width, generator=generator) * 0.5
    return Layer(sizes, weight.to(dtype), backend)


def random_rows(
    sizes: DeltaSizes, count: int, seed: int, dtype: torch.dtype = torch.float32
) -> Rows:
    """Return rows, each head of which forgets little or much."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, sizes.channels, generator=generator)
    uniform = torch.rand(count, 2, sizes.value_heads, generator=generator)
    gates = torch.stack([-3.0 * uniform[:, 0] ** 3, uniform[:, 1]], dim=1)
    return Rows(inputs.to(dtype), gates)


def joined(rows: Sequence[Rows]) -> Rows:
    """Return rows one after the other."""
    return Rows(torch.cat([own.inputs for own in rows]), torch.cat([own.gates for own in rows]))


def run_pass(layer: Layer, state: DeltaState, turns: Sequence[Turn]) -> list[torch.Tensor]:
    """Run a pass; return each request's outputs [n, Hv, V]."""
    rows, lengths = joined([turn.rows for turn in turns]), [len(turn.rows) for turn in turns]
    layout = StateLayout(
        cu_rows=torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32),
        slots=torch.tensor([turn.slot for turn in turns], dtype=torch.int32),
        replayed=torch.tensor([turn.replayed for turn in turns], dtype=torch.int32),
        certain=torch.tensor([turn.certain for turn in turns], dtype=torch.int32),
    )
    return list(layer.passed(rows, state, layout).split(lengths))


def decode_plainly(layer: Layer, requests: Sequence[Rows]) -> tuple[DeltaState, list[torch.Tensor]]:
    """Take requests through their rows, one of each in a pass; return the state and outputs."""
    state = layer.state(len(requests))
    out: list[list[torch.Tensor]] = [[] for _ in requests]
    for slot in range(len(requests)):
        state.clear(slot)
    for row in range(max(map(len, requests))):
        own = [slot for slot, rows in enumerate(requests) if row < len(rows)]
        turns = [Turn(slot, requests[slot].part(row, row + 1), 0, 1) for slot in own]
        for slot, read in zip(own, run_pass(layer, state, turns), strict=True):
            out[slot].append(read)
    return state, [torch.cat(reads) for reads in out]


def decode_with_drafts(
    layer: Layer, requests: Sequence[Rows], random: Random, run: Pass = run_pass
) -> tuple[DeltaState, list[torch.Tensor]]:
    """Take requests through their rows as speculative decoding does, each in a slot of its own.

    A first pass has some certain rows; every other one has a certain row and drafts. Of these some
    are the request's next rows, which are accepted, then come others. Returns the state after a
    last pass that replays what is left, and the outputs of all certain and accepted rows.
    """
    state = layer.state(len(requests) + 1)
    done, accepted = [0] * len(requests), [0] * len(requests)
    out: list[list[torch.Tensor]] = [[] for _ in requests]
    for slot in range(len(requests)):
        state.clear(slot)
    while True:
        turns, taken = [], []
        for slot, rows in enumerate(requests):
            turn, right = _next_turn(slot, rows, done[slot], accepted[slot], random)
            turns.append(turn)
            taken.append(turn.certain + right)
            done[slot], accepted[slot] = done[slot] + turn.certain + right, right
        order = random.sample(range(len(turns)), len(turns))
        reads = run(layer, state, [turns[number] for number in order])
        for slot, read in zip(order, reads, strict=True):
            out[slot].append(read[: taken[slot]])
        if not any(len(turn.rows) for turn in turns):
            return state, [torch.cat(parts) for parts in out]


def _next_turn(slot: int, rows: Rows, done: int, accepted: int, random: Random) -> tuple[Turn, int]:
    """Return a request's next turn, and how many of its drafts are right."""
    certain = min(1 if done else random.randint(1, 5), len(rows) - done)
    drafts = random.randint(0, DRAFTS) if certain else 0
    right = min(random.randint(0, drafts), len(rows) - done - certain)
    stop = done + certain + right
    wrong = rows.part(0, drafts - right)
    wrong = Rows(wrong.inputs.flip(-1), wrong.gates.flip(-1))
    turn = Turn(slot, joined([rows.part(done, stop), wrong]), accepted, certain)
    return turn, right


def unequal(layer: Layer, batches: int, seed: int, run: Pass = run_pass) -> int:
    """Decode requests with drafts; count those that differ from plain decoding in any bit of their
    outputs, or of what later rows depend on."""
    random, before, found = Random(seed), layer.sizes.width - 1, 0
    for batch in range(batches):
        requests = [
            random_rows(layer.sizes, random.randint(1, 14), seed=seed + batch * BATCH + number)
            for number in range(BATCH)
        ]
        plain, wanted = decode_plainly(layer, requests)
        state, out = decode_with_drafts(layer, requests, random, run)
        for slot in range(BATCH):
            same = (
                torch.equal(out[slot], wanted[slot])
                and torch.equal(state.states[slot], plain.states[slot])
                and torch.equal(state.inputs[slot, :before], plain.inputs[slot, :before])
            )
            found += not same
    return found
