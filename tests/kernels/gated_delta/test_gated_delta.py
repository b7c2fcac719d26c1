"""Gated delta net: transformers' numbers, the same bits however rows are cut, and drafts that leave
no trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from delta_cases import (
    BATCH,
    DRAFTS,
    EQUAL,
    SIZES,
    WIDE,
    Layer,
    Pass,
    Rows,
    Turn,
    make_layer,
    random_rows,
    run_pass,
    unequal,
)
from transformers.models.qwen3_next import modeling_qwen3_next as transformers_layer

from mtp_kernels.batch_layout import StateLayout
from mtp_kernels.cpu.team import Team
from mtp_kernels.gated_delta import BACKENDS, DeltaState, gated_delta
from mtp_kernels.sizes import DeltaSizes

# Sequences of accepted and rejected drafts that each backend decodes, in batches.
SEQUENCES = {"compiled_cpu": 2000, "reference": 96}


def theirs(layer: Layer, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Transformers' outputs [n, Hv, V] and state [Hv, V, K] of a request."""
    sizes, module = layer.sizes, transformers_layer
    mixed = module.causal_conv1d_fn(rows.inputs.t()[None], layer.weight, activation="silu")
    width = sizes.key_heads * sizes.key
    parts = mixed.transpose(1, 2).split([width, width, sizes.output], dim=-1)
    query, key = (part.view(1, len(rows), sizes.key_heads, sizes.key) for part in parts[:2])
    out, state = module.torch_recurrent_gated_delta_rule(
        query,
        key,
        parts[2].view(1, len(rows), sizes.value_heads, sizes.value),
        g=rows.gates[None, :, 0],
        beta=rows.gates[None, :, 1].to(rows.inputs.dtype),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out[0], state[0].transpose(-1, -2)


@pytest.mark.parametrize("sizes", [SIZES, WIDE, EQUAL])
@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_outputs_and_states_are_transformers(backend: str, sizes: DeltaSizes) -> None:
    layer, rows = make_layer(sizes, backend), random_rows(sizes, 40, seed=2)
    state = layer.state(1)
    state.clear(0)
    (out,) = run_pass(layer, state, [Turn(0, rows, 0, len(rows))])
    wanted, wanted_state = theirs(layer, rows)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state.states[0], wanted_state, rtol=1e-5, atol=1e-6)


def test_bfloat16_is_rounded_as_transformers_rounds_it() -> None:
    """All but a few outputs are equal: sums in another order may fall on the other side."""
    layer = make_layer(WIDE, "auto", torch.bfloat16)
    rows = random_rows(WIDE, 40, seed=3, dtype=torch.bfloat16)
    rows = replace(rows, gates=rows.gates.bfloat16().float())
    state = layer.state(1)
    state.clear(0)
    (out,) = run_pass(layer, state, [Turn(0, rows, 0, len(rows))])
    wanted, wanted_state = theirs(layer, rows)
    assert out.dtype is torch.bfloat16
    assert (out == wanted).float().mean() > 0.99
    torch.testing.assert_close(state.states[0], wanted_state, rtol=1e-4, atol=1e-5)


def in_chunks(layer: Layer, rows: Rows, ends: Sequence[int]) -> tuple[DeltaState, torch.Tensor]:
    """Take one request through its rows in passes that end at some of them."""
    state, out, first = layer.state(2), [], 0
    state.clear(1)
    for end in ends:
        out += run_pass(layer, state, [Turn(1, rows.part(first, end), 0, end - first)])
        first = end
    return state, torch.cat(out)


@pytest.mark.parametrize("sizes", [SIZES, WIDE])
@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_cuts_do_not_change_bits(backend: str, sizes: DeltaSizes) -> None:
    layer, rows = make_layer(sizes, backend), random_rows(sizes, 23, seed=4)
    whole, wanted = in_chunks(layer, rows, [23])
    for ends in ([1, 2, 3, 23], [4, 11, 23], [16, 20, 23], list(range(1, 24))):
        state, out = in_chunks(layer, rows, ends)
        assert torch.equal(out, wanted)
        assert torch.equal(state.states[1], whole.states[1])
        assert torch.equal(state.inputs[1, :3], rows.inputs[-3:])


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_batch_and_threads_do_not_change_bits(
    monkeypatch: pytest.MonkeyPatch, backend: str, threads: int
) -> None:
    layer = make_layer(WIDE, backend)
    requests = [random_rows(WIDE, count, seed=count) for count in (1, 9, 3, 17)]
    alone = [in_chunks(layer, rows, [len(rows)]) for rows in requests]
    monkeypatch.setattr(Team, "threads_for", staticmethod(lambda multiplications: threads))
    state = layer.state(5)
    for slot in range(5):
        state.clear(slot)
    slots = (4, 0, 3, 1)
    turns = [Turn(s, rows, 0, len(rows)) for s, rows in zip(slots, requests, strict=True)]
    out = run_pass(layer, state, turns)
    for slot, (own, wanted), read in zip(slots, alone, out, strict=True):
        assert torch.equal(read, wanted)
        assert torch.equal(state.states[slot], own.states[1])
    assert not state.states[2].any(), "the slot of no request is left alone"


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_drafts_leave_the_state_of_plain_decoding(backend: str) -> None:
    layer = make_layer(SIZES, backend)
    assert unequal(layer, SEQUENCES[backend] // BATCH, seed=5) == 0


def store_after_drafts(
    layer: Layer, state: DeltaState, turns: Sequence[Turn]
) -> list[torch.Tensor]:
    """Take drafts for certain rows."""
    return run_pass(layer, state, [replace(turn, certain=len(turn.rows)) for turn in turns])


def skip_replay(layer: Layer, state: DeltaState, turns: Sequence[Turn]) -> list[torch.Tensor]:
    """Forget accepted drafts."""
    return run_pass(layer, state, [replace(turn, replayed=0) for turn in turns])


def replay_one_too_many(
    layer: Layer, state: DeltaState, turns: Sequence[Turn]
) -> list[torch.Tensor]:
    """Take a rejected draft for an accepted one."""
    more = [replace(turn, replayed=min(DRAFTS, turn.replayed + 1)) for turn in turns]
    state.gates.nan_to_num_()
    state.inputs.nan_to_num_()
    return run_pass(layer, state, more)


def move_raw_rows(layer: Layer, state: DeltaState, turns: Sequence[Turn]) -> list[torch.Tensor]:
    """Keep raw rows one place off."""
    out = run_pass(layer, state, turns)
    state.inputs.copy_(state.inputs.roll(1, dims=1))
    return out


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize(
    "fault", [store_after_drafts, skip_replay, replay_one_too_many, move_raw_rows]
)
def test_faults_of_rolling_back_are_seen(backend: str, fault: Pass) -> None:
    layer = make_layer(SIZES, backend)
    assert unequal(layer, 1, seed=6, run=fault) > BATCH // 2


def test_auto_takes_what_is_compiled() -> None:
    """float32 keys of whole vectors are compiled, others and bf16 left to the reference."""
    for sizes, dtype, name in (
        (WIDE, torch.float32, "compiled_cpu"),
        (WIDE, torch.bfloat16, "reference"),
        (WIDE._replace(key=24), torch.float32, "reference"),
    ):
        rows = random_rows(sizes, 9, seed=7, dtype=dtype)
        outs = []
        for backend in ("auto", name):
            layer = make_layer(sizes, backend, dtype)
            state = layer.state(1)
            state.clear(0)
            outs += run_pass(layer, state, [Turn(0, rows, 0, 9)])
        assert torch.equal(*outs)
    with pytest.raises(ValueError, match="backend compiled_cpu: does not take torch.bfloat16"):
        rows = random_rows(WIDE, 1, seed=1, dtype=torch.bfloat16)
        in_chunks(make_layer(WIDE, "compiled_cpu", torch.bfloat16), rows, [1])
    with pytest.raises(ValueError, match="backend: expected auto or one of"):
        in_chunks(make_layer(WIDE, "fast"), random_rows(WIDE, 1, seed=1), [1])


def counts(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"cu_rows": counts(0, 2, 4)}, r"cu_rows: expected 0 rising to 5, found \[0, 2, 4\]"),
        ({"cu_rows": counts(0, 5)}, r"cu_rows: expected shape \[3\], found \[2\]"),
        ({"slots": counts(1, 1)}, r"slots: expected different ones of 0 to 2, found \[1, 1\]"),
        ({"slots": counts(0, 3)}, r"slots: expected different ones of 0 to 2, found \[0, 3\]"),
        ({"replayed": counts(0, 4)}, r"replayed: expected 0 to 3 drafts, found \[0, 4\]"),
        ({"certain": counts(4, 1)}, "certain: expected 0 to 3 of the 3 rows of request 0"),
        ({"cu_rows": counts(0, 5, 5)}, "certain: expected 2 to 5 of the 5 rows of request 0"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(
    changed: dict[str, torch.Tensor], message: str
) -> None:
    layer, rows = make_layer(SIZES, "auto"), random_rows(SIZES, 5, seed=8)
    layout = StateLayout(counts(0, 3, 5), counts(2, 0), counts(0, 1), counts(1, 2))
    state = DeltaState.empty(3, DRAFTS, SIZES, torch.float32, "cpu")
    gated_delta(rows.inputs, rows.gates, layer.weight, state, layout, SIZES)
    with pytest.raises(ValueError, match=message):
        changed_layout = replace(layout, **changed)
        gated_delta(rows.inputs, rows.gates, layer.weight, state, changed_layout, SIZES)


def test_tensors_that_do_not_fit_are_refused() -> None:
    layer, rows = make_layer(SIZES, "auto"), random_rows(SIZES, 2, seed=9)
    state = DeltaState.empty(1, DRAFTS, SIZES, torch.float32, "cpu")
    layout = StateLayout(counts(0, 2), counts(0), counts(0), counts(2))
    good = (rows.inputs, rows.gates, layer.weight, state, layout, SIZES)
    bad = {
        "inputs: expected shape": {0: rows.inputs[:, 1:].contiguous()},
        "gates: expected shape": {1: rows.gates[:1]},
        "weight: expected dtype": {2: layer.weight.bfloat16()},
        "states: expected dtype": {3: state._replace(states=state.states.bfloat16())},
        "state's inputs: expected shape": {3: state._replace(inputs=state.inputs[:, 1:])},
        "value_heads: expected a multiple of 4, found 2": {5: SIZES._replace(key_heads=4)},
    }
    for message, changed in bad.items():
        arguments = [changed.get(place, argument) for place, argument in enumerate(good)]
        with pytest.raises((TypeError, ValueError), match=message):
            gated_delta(*arguments)


def test_a_cleared_slot_is_a_new_one() -> None:
    layer = make_layer(SIZES, "auto")
    rows = random_rows(SIZES, 6, seed=10)
    state, wanted = in_chunks(layer, rows, [6])
    state.clear(1)
    (out,) = run_pass(layer, state, [Turn(1, rows, 0, 6)])
    assert torch.equal(out, wanted)
