"""Feed-forward half of a decoder layer: routed and shared experts, or one dense MLP.

A row's experts are added to it in order of their numbers, whatever other rows picked.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mtp_kernels.cpu.code import FLOAT_BYTES
from mtp_kernels.cpu.elementwise import exponential, sigmoid
from mtp_kernels.cpu.jit import inner
from mtp_kernels.cpu.panel_forms import FLOAT32, PANEL
from mtp_kernels.cpu.team import owns, share, wait
from mtp_kernels.cpu.vectors import address, dot_row, first_rows, rows_of
from mtp_kernels.decoder.compiled_cpu.rows import (
    BLOCK_ROWS,
    STRIP,
    STRIP_PANELS,
    block_of,
    copy,
    norm_row,
    panel_in,
    panel_of,
    panels_of,
    project,
    vector,
)

READ_COST = 8  # rows that a panel could be multiplied with while it is read
NOT_PICKED = np.float32(-np.inf)


@inner
def feed_forward(member: Any, layer: Any, sizes: Any, scratch: Any, x: Any) -> None:
    """Add the experts' output to the stream x [T, d]."""
    route(member, layer, sizes, scratch, x)
    wait(member)
    rows, places, ends = sort_by_expert(layer, scratch.picked, x.shape[0])
    experts = picked_by_any(ends)
    make_inner(member, layer, sizes, scratch, rows, ends, experts)
    wait(member)
    add_experts(member, layer, sizes, scratch, rows, places, ends, experts, x)
    wait(member)


@inner
def route(member: Any, layer: Any, sizes: Any, scratch: Any, x: Any) -> None:
    """Norm the member's rows and pick their experts."""
    norm = vector(layer.post_norm, sizes.hidden)
    first, last = share(member, x.shape[0])
    for row in range(first, last):
        norm_row(x[row], norm, sizes.norm_eps, scratch.normed[row])
        weigh_shared(layer, sizes, scratch, row)
    if not layer.routed:
        return
    width = panels_of(layer.routed) * PANEL
    scores = np.empty((BLOCK_ROWS, width), np.float32)
    choice = np.empty(layer.routed, np.float32)
    normed = rows_of(scratch.normed)
    weight = panel_of(layer.router, FLOAT32, 0, sizes.hidden)
    for row in range(first, last, BLOCK_ROWS):
        block = block_of(normed, row, last)
        project(block, weight, (0, width // PANEL), address(scores), width)
        for r in range(block.count):
            own = scores[r, : layer.routed]
            if sizes.has_softmax:
                softmax(own, choice)
            else:
                score(own, vector(layer.router_bias, layer.routed), choice)
            keep_best_groups(choice, sizes.routing.groups, sizes.routing.groups_per_token)
            pick(own, choice, sizes, scratch.picked[row + r], scratch.weights[row + r])


@inner
def weigh_shared(layer: Any, sizes: Any, scratch: Any, row: Any) -> None:
    """Write the weight of shared experts in a normed row: 1, or the sigmoid of its gate."""
    if not layer.shared_gate:
        scratch.shared_weights[row] = np.float32(1.0)
        return
    at = address(scratch.shared_weights) + FLOAT_BYTES * row
    dot_row(address(scratch.normed[row]), layer.shared_gate, sizes.hidden, at)
    scratch.shared_weights[row] = sigmoid(scratch.shared_weights[row])


@inner
def score(scores: Any, bias: Any, choice: Any) -> None:
    """Replace a row's products with the router [e] by sigmoids; write these with the bias to
    choice."""
    for expert in range(scores.size):
        scores[expert] = sigmoid(scores[expert])
        choice[expert] = scores[expert] + bias[expert]


@inner
def softmax(scores: Any, choice: Any) -> None:
    """Replace a row's products with the router [e] by their softmax; copy it to choice."""
    largest, total = scores.max(), np.float32(0.0)
    for expert in range(scores.size):
        scores[expert] = exponential(scores[expert] - largest)
        total += scores[expert]
    for expert in range(scores.size):
        scores[expert] /= total
        choice[expert] = scores[expert]


@inner
def keep_best_groups(choice: Any, groups: Any, kept: Any) -> None:
    """Leave out the experts of all but the best groups, by the sum of a group's two best."""
    if kept >= groups:
        return
    size = choice.size // groups
    totals = np.empty(groups, np.float32)
    for group in range(groups):
        best, second = NOT_PICKED, NOT_PICKED
        for expert in range(group * size, (group + 1) * size):
            if choice[expert] > best:
                best, second = choice[expert], best
            elif choice[expert] > second:
                second = choice[expert]
        totals[group] = best + second
    for group in range(groups):
        better = 0
        for other in range(groups):
            first = totals[other] == totals[group] and other < group
            better += totals[other] > totals[group] or first
        if better >= kept:
            for expert in range(group * size, (group + 1) * size):
                choice[expert] = NOT_PICKED


@inner
def pick(scores: Any, choice: Any, sizes: Any, picked: Any, weights: Any) -> None:
    """Write the best experts [k] of one row, the lower of equals first, and their weights."""
    total = np.float32(0.0)
    for place in range(picked.size):
        expert = choice.argmax()
        picked[place] = expert
        weights[place] = scores[expert]
        total += scores[expert]
        choice[expert] = NOT_PICKED
    routing = sizes.routing
    scale = routing.scale / total if routing.normalises else routing.scale
    for place in range(picked.size):
        weights[place] *= scale


@inner
def sort_by_expert(layer: Any, picked: Any, count: Any) -> Any:
    """Return (row, expert) pairs by expert: their rows, their places in `picked`, and each
    expert's first pair [experts + 1].

    Shared experts follow the routed ones and have all rows; their places are -1.
    """
    pairs = picked.size if layer.routed else 0
    experts = layer.routed + layer.shared
    ends = np.zeros(experts + 1, np.int64)
    flat = picked.reshape(-1)
    for pair in range(pairs):
        ends[flat[pair] + 1] += 1
    for expert in range(layer.routed, experts):
        ends[expert + 1] = count
    for expert in range(experts):
        ends[expert + 1] += ends[expert]
    rows, places = np.empty(ends[experts], np.int64), np.full(ends[experts], -1)
    following = ends[:-1].copy()
    for pair in range(pairs):
        at = following[flat[pair]]
        following[flat[pair]] += 1
        rows[at], places[at] = pair // picked.shape[1], pair
    for expert in range(layer.routed, experts):
        for row in range(count):
            rows[ends[expert] + row] = row
    return rows, places, ends


@inner
def picked_by_any(ends: Any) -> Any:
    """Return the numbers of the experts that have pairs, ascending."""
    experts, count = np.empty(ends.size - 1, np.int64), 0
    for expert in range(ends.size - 1):
        if ends[expert + 1] > ends[expert]:
            experts[count] = expert
            count += 1
    return experts[:count]


@inner
def make_inner(
    member: Any, layer: Any, sizes: Any, scratch: Any, rows: Any, ends: Any, experts: Any
) -> None:
    """Compute silu(gate) * up of every pair of some experts, shared out by expert and panel."""
    panels = panels_of(layer.inner)
    total, done = 0, 0
    for expert in experts:
        total += (ends[expert + 1] - ends[expert] + READ_COST) * panels
    for expert in experts:
        first, last = ends[expert], ends[expert + 1]
        cost, panel = last - first + READ_COST, 0
        while panel < panels:
            count = 0
            while count < STRIP_PANELS // 2 and panel + count < panels:
                if not owns(member, done + count * cost, cost, total):
                    break
                count += 1
            if count:
                weight = panel_in(layer.gate_up, expert, 2 * panel, sizes.hidden)
                span, out = (panel, panel + count), scratch.inner[first:last]
                gate_panels(weight, scratch.normed, rows[first:last], span, out)
            panel, done = panel + max(1, count), done + max(1, count) * cost


@inner
def gate_panels(weight: Any, normed: Any, rows: Any, span: Any, out: Any) -> None:
    """Write panels [first, last) of an expert's inner values [rows, inner]; weight is the first of
    them, a panel of gate and one of up in turn."""
    panels = span[1] - span[0]
    width = 2 * panels * PANEL
    gathered = np.empty((BLOCK_ROWS, normed.shape[1]), np.float32)
    both = np.empty((BLOCK_ROWS, width), np.float32)
    for start in range(0, rows.size, BLOCK_ROWS):
        size = min(BLOCK_ROWS, rows.size - start)
        for r in range(size):
            copy(normed[rows[start + r]], gathered[r])
        block = first_rows(rows_of(gathered), size)
        project(block, weight, (0, 2 * panels), address(both), width)
        for r in range(size):
            for panel in range(panels):
                column = (span[0] + panel) * PANEL
                line = out[start + r, column : column + PANEL]
                pair = both[r, 2 * panel * PANEL : 2 * (panel + 1) * PANEL]
                for c in range(PANEL):
                    gate = pair[c]
                    line[c] = gate * sigmoid(gate) * pair[PANEL + c]


@inner
def add_experts(
    member: Any, layer: Any, sizes: Any, scratch: Any, rows: Any, places: Any, ends: Any,
    experts: Any, x: Any,
) -> None:  # fmt: skip
    """Add weight * down(inner) of some experts to x, one after the other, by panels of x."""
    hidden, panels = sizes.hidden, panels_of(sizes.hidden)
    made = np.empty((BLOCK_ROWS, STRIP), np.float32)
    weights, inputs = scratch.weights.reshape(-1), rows_of(scratch.inner)
    first, last = share(member, panels)
    for panel in range(first, last, STRIP_PANELS):
        column, count = panel * PANEL, min(STRIP_PANELS, last - panel)
        size = min(count * PANEL, hidden - column)
        for expert in experts:
            packed = panel_in(layer.expert_down, expert, panel, layer.inner)
            for start in range(ends[expert], ends[expert + 1], BLOCK_ROWS):
                block = block_of(inputs, start, ends[expert + 1])
                project(block, packed, (0, count), address(made), STRIP)
                for r in range(block.count):
                    place = places[start + r]
                    row = rows[start + r]
                    weight = weights[place] if place >= 0 else scratch.shared_weights[row]
                    out = x[row, column : column + size]
                    for c in range(size):
                        out[c] += weight * made[r, c]
