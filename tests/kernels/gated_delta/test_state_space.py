"""State space of Mamba-2: transformers' numbers, the same bits however rows are cut, and drafts
that leave no trace."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from delta_cases import (
    BATCH,
    WIDE,
    Layer,
    Pass,
    Rows,
    Turn,
    random_rows,
    run_pass,
    unequal,
)
from test_gated_delta import in_chunks, replay_one_too_many, skip_replay, store_after_drafts
from transformers.models.nemotron_h import modeling_nemotron_h as transformers_layer

from cases import nightly_but
from mtp_kernels.batch_layout import StateLayout
from mtp_kernels.gated_delta import DeltaState
from mtp_kernels.sizes import DeltaSizes
from mtp_kernels.state_space import StateSpaceWeights, state_space

SIZES = DeltaSizes(key_heads=2, value_heads=4, key=8, value=6, width=4)


@dataclass(frozen=True)
class StateSpace(Layer):
    """A state space with a random convolution, bias and skip."""

    def weights(self) -> StateSpaceWeights:
        generator = torch.Generator().manual_seed(2)
        bias = torch.randn(self.sizes.channels, generator=generator).to(self.weight.dtype)
        skip = torch.randn(self.sizes.value_heads, generator=generator)
        return StateSpaceWeights(self.weight, bias, skip)

    def passed(self, rows: Rows, state: DeltaState, layout: StateLayout) -> torch.Tensor:
        return state_space(rows.inputs, rows.gates, self.weights(), state, layout, self.sizes)


def make_layer(sizes: DeltaSizes) -> StateSpace:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(sizes.channels, sizes.width, generator=generator) * 0.5
    return StateSpace(sizes, weight, "reference")


def theirs(layer: StateSpace, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Transformers' outputs [n, Hv, V] and state [Hv, V, K] of a request; gates have the logarithm
    of each decay, which is the step times a rate there."""
    sizes, weights, count = layer.sizes, layer.weights(), len(rows)
    mixed = transformers_layer.causal_conv1d_fn(
        rows.inputs.t()[None], weights.convolution, weights.convolution_bias, activation="silu"
    )
    width = sizes.key_heads * sizes.key
    query, key, value = mixed.transpose(1, 2).split([width, width, sizes.output], dim=-1)
    state = torch.zeros(1, sizes.value_heads, sizes.value, sizes.key)
    outputs = []
    for row in range(count):
        log_decay, step = (part[None, :, None] for part in rows.gates[row])
        rate = log_decay / step
        outputs.append(
            transformers_layer.mamba2_selective_state_update(
                state,
                value[:, row].view(1, sizes.value_heads, sizes.value),
                step.expand(-1, -1, sizes.value),
                rate[0, ..., None].expand(-1, sizes.value, sizes.key),
                key[:, row].view(1, sizes.key_heads, sizes.key),
                query[:, row].view(1, sizes.key_heads, sizes.key),
                weights.skip[:, None].expand(-1, sizes.value),
            )
        )
    return torch.cat(outputs), state[0]


@pytest.mark.parametrize("sizes", [SIZES, WIDE])
def test_outputs_and_states_are_transformers(sizes: DeltaSizes) -> None:
    layer, rows = make_layer(sizes), random_rows(sizes, 24, seed=2)
    state = layer.state(1)
    state.clear(0)
    (out,) = run_pass(layer, state, [Turn(0, rows, 0, len(rows))])
    wanted, wanted_state = theirs(layer, rows)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.states[0], wanted_state, rtol=1e-5, atol=1e-5)


def test_cuts_do_not_change_bits() -> None:
    layer, rows = make_layer(SIZES), random_rows(SIZES, 13, seed=4)
    whole, wanted = in_chunks(layer, rows, [13])
    for ends in ([1, 2, 3, 13], list(range(1, 14))):
        state, out = in_chunks(layer, rows, ends)
        assert torch.equal(out, wanted)
        assert torch.equal(state.states[1], whole.states[1])


@pytest.mark.parametrize("sequences", nightly_but([64], [64, 2000]))
def test_drafts_leave_the_state_of_plain_decoding(sequences: int) -> None:
    assert unequal(make_layer(SIZES), sequences // BATCH, seed=5) == 0


@pytest.mark.parametrize("fault", [store_after_drafts, skip_replay, replay_one_too_many])
def test_faults_of_rolling_back_are_seen(fault: Pass) -> None:
    assert unequal(make_layer(SIZES), 1, seed=6, run=fault) > BATCH // 2


def test_tensors_that_do_not_fit_are_refused() -> None:
    layer, rows = make_layer(SIZES), random_rows(SIZES, 2, seed=9)
    weights, short = layer.weights(), torch.zeros(1)
    for message, changed in (
        ("bias: expected shape", weights._replace(convolution_bias=short)),
        ("skip: expected shape", weights._replace(skip=short)),
    ):
        with pytest.raises(ValueError, match=message):
            state_space(*replace(rows).__dict__.values(), changed, layer.state(1), None, SIZES)
