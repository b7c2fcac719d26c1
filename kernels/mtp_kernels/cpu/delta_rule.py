"""Gated delta rule in float32: a causal convolution, then a recurrence over a request's rows.

A column of a state depends on the keys, the queries and one element of every value alone, so that
columns are shared out, and each goes through all rows of a pass while it lies in a core's
first-level cache. Sums run in a fixed order: a row's bits depend on its request's rows alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from mtp_kernels.cpu.code import (
    FLOAT,
    FLOAT_BYTES,
    LANES,
    VECTOR,
    added,
    entries,
    fma,
    fold,
    integer,
    load,
    loop,
    prefetch,
    row_at,
    splat,
    store,
)
from mtp_kernels.cpu.elementwise import exponential, sigmoid
from mtp_kernels.cpu.jit import inner
from mtp_kernels.cpu.team import owns, share, wait
from mtp_kernels.cpu.vectors import address, dot_row, floats

COLUMNS = 4  # of a state that go through a row together
BLOCK_COLUMNS = 32  # of a head's state that a thread takes
READ_COST = 4  # rows that columns go through while they are read and written
NORM_EPS = np.float32(1e-6)
ONE = np.float32(1.0)


class Pool(NamedTuple):
    """State of a layer's requests, by slot: S, then raw rows and gates of drafts."""

    states: Any  # [slots, Hv, V, K]
    inputs: Any  # [slots, width - 1 + drafts, channels]
    gates: Any  # [slots, drafts, 2, Hv]


class Spans(NamedTuple):
    """Rows of a pass by request, as the fields of gated_delta.StateLayout, in int64.

    starts [b+1]: rows before each request, replayed ones included.
    """

    cu_rows: Any  # [b+1]
    slots: Any  # [b]
    replayed: Any  # [b]
    certain: Any  # [b]
    starts: Any


class Convolved(NamedTuple):
    """Queries, keys and values of all heads after the convolution, and what gates multiply with;
    of replayed rows too."""

    channels: Any  # [R, channels]
    gates: Any  # [R, Hv, 2]: decay and beta


@dataclass(frozen=True)
class _Columns:
    """Code that goes through columns of a state side by side, `vectors` vectors each."""

    builder: Any
    columns: int
    vectors: Any

    def part(self, base: Any, index: Any, column: int = 0) -> Any:
        """Return the address of a vector of a column."""
        size = integer(LANES * FLOAT_BYTES)
        at = row_at(self.builder, base, self.builder.mul(self.vectors, size), column)
        return self.builder.add(at, self.builder.mul(index, size))

    def read(self, source: Any, index: Any) -> list[Any]:
        """Return a vector of each column."""
        places = [self.part(source, index, column) for column in range(self.columns)]
        return [load(self.builder, place, VECTOR) for place in places]

    def sums(self, factor: Any, vectors_at: Callable[[Any], list[Any]]) -> Any:
        """Return the sum of each column's products with the entries at address `factor`."""

        def step(index: Any, totals: list[Any]) -> list[Any]:
            own, vectors = load(self.builder, self.part(factor, index), VECTOR), vectors_at(index)
            pairs = zip(vectors, totals, strict=True)
            return [fma(self.builder, vector, own, total) for vector, total in pairs]

        zeros = [ir.Constant(VECTOR, None)] * self.columns
        return fold(self.builder, loop(self.builder, self.vectors, zeros, step), added)


def _step(columns: int) -> Any:
    """Take columns of a state, given by the address of the first, through a row, to a target.

    key, query, value, gates (decay and beta), out: addresses. A column has `vectors` vectors.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, target, key, query, value, gates, vectors, out = arguments
        decay = load(builder, gates, FLOAT)
        beta = load(builder, builder.add(gates, integer(FLOAT_BYTES)), FLOAT)
        every_decay, state = splat(builder, decay), _Columns(builder, columns, vectors)
        recalled = state.sums(key, lambda index: state.read(source, index))
        moves = []
        for column in range(columns):
            wanted = load(builder, builder.add(value, integer(column * FLOAT_BYTES)), FLOAT)
            found = builder.extract_element(recalled, ir.Constant(ir.IntType(32), column))
            error = builder.fsub(wanted, builder.fmul(decay, found))
            moves.append(splat(builder, builder.fmul(beta, error)))

        def moved(index: Any) -> list[Any]:
            own_key = load(builder, state.part(key, index), VECTOR)
            kept = [builder.fmul(vector, every_decay) for vector in state.read(source, index)]
            pairs = zip(moves, kept, strict=True)
            made = [fma(builder, own_key, move, vector) for move, vector in pairs]
            for column, vector in enumerate(made):
                store(builder, vector, state.part(target, index, column))
            return made

        read = state.sums(query, moved)
        store(builder, entries(builder, read, 0, columns), out)
        return context.get_dummy_value()

    def step(
        typing: Any,
        source: Any,
        target: Any,
        key: Any,
        query: Any,
        value: Any,
        gates: Any,
        vectors: Any,
        out: Any,
    ) -> Any:
        return types.void(*[types.int64] * 8), codegen

    return intrinsic(step)


def _ask(typing: Any, at: Any, vectors: Any) -> Any:
    """Ask for the cache lines of vectors from an address on."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def step(index: Any, values: list[Any]) -> list[Any]:
            offset = builder.mul(index, integer(LANES * FLOAT_BYTES))
            prefetch(builder, builder.add(arguments[0], offset))
            return values

        loop(builder, arguments[1], [], step)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


_STEP_COLUMNS, _STEP_1 = _step(COLUMNS), _step(1)
ask: Any = intrinsic(_ask)


@inner
def delta_rule(
    member: Any, x: Any, gates: Any, taps: Any, pool: Pool, spans: Spans, sizes: Any,
    rows: Convolved, out: Any,
) -> None:  # fmt: skip
    """Write what value heads read from their states to out [T, Hv, V], and advance the pool.

    x [T, >= channels] raw rows; gates [T, 2, Hv], log decay and beta; taps [width, channels]; rows
    is memory for all of them and for replayed ones. Members have called `wait` when all is done.
    """
    convolve_rows(member, x, gates, taps, pool, spans, sizes, rows)
    wait(member)
    advance_states(member, pool, spans, sizes, rows, out)
    keep_drafts(member, x, gates, pool, spans)
    wait(member)


@inner
def convolve_rows(
    member: Any, x: Any, gates: Any, taps: Any, pool: Pool, spans: Spans, sizes: Any,
    rows: Convolved,
) -> None:  # fmt: skip
    """Make queries, keys, values and gates of the member's heads and rows."""
    keys, squares = 2 * sizes.key_heads, np.empty(1, np.float32)
    heads = keys + sizes.value_heads
    first, last = share(member, rows.channels.shape[0] * heads)
    for request in range(spans.slots.size):
        start, end = spans.starts[request], spans.starts[request + 1]
        for unit in range(max(first, start * heads), min(last, end * heads)):
            row, head = unit // heads, unit % heads
            size = sizes.key if head < keys else sizes.value
            column = head * sizes.key
            if head >= keys:
                column = keys * sizes.key + (head - keys) * sizes.value
                copy_gates(gates, pool, spans, request, row - start, head - keys, rows.gates[row])
            out = rows.channels[row, column : column + size]
            convolve(x, taps, pool, spans, request, row - start, column, out)
            if head < keys:
                scale = np.float32(1.0 / math.sqrt(size)) if head < sizes.key_heads else ONE
                normalise(out, scale, squares)


@inner
def convolve(
    x: Any, taps: Any, pool: Pool, spans: Spans, request: Any, row: Any, column: Any, out: Any
) -> None:
    """Write silu of the convolution of a request's row to out, its channels from `column` on."""
    for tap in range(taps.shape[0]):
        at = raw_row(x, pool, spans, request, row + tap) + FLOAT_BYTES * column
        source, factors = carray(floats(at), (out.size,)), taps[tap, column : column + out.size]
        for c in range(out.size):
            product = source[c] * factors[c]
            out[c] = product if tap == 0 else out[c] + product
    for c in range(out.size):
        out[c] *= sigmoid(out[c])


@inner
def raw_row(x: Any, pool: Pool, spans: Spans, request: Any, number: Any) -> Any:
    """Return the address of a request's raw row, counted from the first of its slot."""
    kept = pool.inputs.shape[1] - pool.gates.shape[1] + spans.replayed[request]
    if number < kept:
        line = spans.slots[request] * pool.inputs.shape[1] + number
        return address(pool.inputs) + FLOAT_BYTES * line * pool.inputs.shape[2]
    return address(x) + FLOAT_BYTES * (spans.cu_rows[request] + number - kept) * x.shape[1]


@inner
def normalise(out: Any, scale: Any, squares: Any) -> None:
    """Make a head's query or key as long as the scale."""
    dot_row(address(out), address(out), out.size, address(squares))
    factor = ONE / np.float32(math.sqrt(np.float32(squares[0] + NORM_EPS)))
    for c in range(out.size):
        out[c] = out[c] * factor * scale


@inner
def copy_gates(
    gates: Any, pool: Pool, spans: Spans, request: Any, row: Any, head: Any, out: Any
) -> None:
    """Write a value head's decay and beta to those of its row [Hv, 2]."""
    replayed = spans.replayed[request]
    if row < replayed:
        own = pool.gates[spans.slots[request], row]
    else:
        own = gates[spans.cu_rows[request] + row - replayed]
    out[head, 0], out[head, 1] = exponential(own[0, head]), own[1, head]


@inner
def advance_states(
    member: Any, pool: Pool, spans: Spans, sizes: Any, rows: Convolved, out: Any
) -> None:
    """Take all states through their rows, shared out by request, head and block of columns."""
    drafted, made = np.empty(COLUMNS * sizes.key, np.float32), np.empty(COLUMNS, np.float32)
    blocks = -(-sizes.value // BLOCK_COLUMNS)
    units = sizes.value_heads * blocks
    total = (spans.starts[-1] + READ_COST * spans.slots.size) * units
    done = 0
    for request in range(spans.slots.size):
        cost = spans.starts[request + 1] - spans.starts[request] + READ_COST
        for unit in range(units):
            if owns(member, done, cost, total):
                head, column = unit // blocks, unit % blocks * BLOCK_COLUMNS
                advance_block(pool, spans, sizes, rows, request, head, column, drafted, made, out)
            done += cost


@inner
def advance_block(
    pool: Pool, spans: Spans, sizes: Any, rows: Convolved, request: Any, head: Any, column: Any,
    drafted: Any, made: Any, out: Any,
) -> None:  # fmt: skip
    """Take a block of a head's columns through the request's rows, a few columns after the other.

    Certain rows change the state where it lies; drafts go on in `drafted`, memory for some columns.
    `made`: room for what is read by replayed rows, which nobody wants.
    """
    state = spans.slots[request] * sizes.value_heads + head
    end = min(column + BLOCK_COLUMNS, sizes.value)
    first, last = spans.starts[request], spans.starts[request + 1]
    outputs = first + spans.replayed[request]
    drafts = outputs + spans.certain[request]
    key_head = head // (sizes.value_heads // sizes.key_heads)
    while column < end:
        step = COLUMNS if column + COLUMNS <= end else 1
        line = (state * sizes.value + column) * sizes.key
        at = address(pool.states) + FLOAT_BYTES * line
        source = at
        ask(at, step * sizes.key // LANES)  # of all at once, not vector after vector
        for row in range(first, last):
            target = at if row < drafts else address(drafted)
            read = address(made)
            if row >= outputs:
                number = spans.cu_rows[request] + row - outputs
                place = (number * sizes.value_heads + head) * sizes.value + column
                read = address(out) + FLOAT_BYTES * place
            query = address(rows.channels) + FLOAT_BYTES * row * rows.channels.shape[1]
            value = (2 * sizes.key_heads) * sizes.key + head * sizes.value + column
            step_columns(
                step,
                source,
                target,
                query + FLOAT_BYTES * key_head * sizes.key,
                FLOAT_BYTES * sizes.key_heads * sizes.key,
                query + FLOAT_BYTES * value,
                address(rows.gates) + FLOAT_BYTES * 2 * (row * sizes.value_heads + head),
                sizes.key // LANES,
                read,
            )
            source = target
        column += step


@inner
def step_columns(
    columns: Any, source: Any, target: Any, query: Any, to_key: Any, value: Any, gates: Any,
    vectors: Any, out: Any,
) -> None:  # fmt: skip
    """Take COLUMNS columns of a state, or one, through a row: all are addresses, but for the bytes
    from the query to its key and the vectors of a column.

    S = decay * S; S = S + beta * (value - S key) key^T; out = S query.
    """
    if columns == COLUMNS:
        _STEP_COLUMNS(source, target, query + to_key, query, value, gates, vectors, out)
    else:
        _STEP_1(source, target, query + to_key, query, value, gates, vectors, out)


@inner
def keep_drafts(member: Any, x: Any, gates: Any, pool: Pool, spans: Spans) -> None:
    """Keep the raw rows that the next pass needs, and the drafts' gates, by the member's
    channels."""
    first, last = share(member, pool.inputs.shape[2])
    before = pool.inputs.shape[1] - pool.gates.shape[1]
    for request in range(spans.slots.size):
        slot, certain = spans.slots[request], spans.certain[request]
        end, stored = spans.cu_rows[request + 1], spans.replayed[request] + certain
        start = spans.cu_rows[request] + certain  # of drafts
        for number in range(before + end - start):  # ascending: rows move down in their slot
            at = raw_row(x, pool, spans, request, number + stored) + FLOAT_BYTES * first
            source, kept = carray(floats(at), (last - first,)), pool.inputs[slot, number]
            for c in range(last - first):
                kept[first + c] = source[c]
        for draft in range(end - start if member.number == 0 else 0):
            for head in range(gates.shape[2]):
                for gate in range(2):
                    pool.gates[slot, draft, gate, head] = gates[start + draft, gate, head]
