"""Decoder layers with gated delta nets: the definition in plain torch, bits that depend on nothing
but a request's rows, and drafts that leave no trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from decoder_cases import BACKENDS, check, make_backend

from mtp_kernels import decoder
from mtp_kernels.batch_layout import StateLayout
from mtp_kernels.cpu.team import Team
from mtp_kernels.decoder import DeltaConfig, DeltaWeights, LayerKind, LayerWeights
from mtp_kernels.gated_delta import DeltaState
from mtp_kernels.sizes import DeltaSizes, Routing

SIZES = DeltaSizes(key_heads=2, value_heads=4, key=16, value=12, width=4)
CONFIG = DeltaConfig(
    hidden=48,
    attention=SIZES,
    norm_eps=1e-6,
    routing=Routing(2, 1, 1, normalises=True, scale=1.0),
    has_softmax=True,
)
WIDE = replace(CONFIG, hidden=64, attention=DeltaSizes(2, 2, key=32, value=48, width=3))
DRAFTS, EXPERTS, INNER, SLOTS = 3, 6, 40, 5


@dataclass(frozen=True)
class Turn:
    """A request's part of a pass: its slot and rows [n, d], drafts of the last pass that were
    accepted, and rows that are no drafts."""

    slot: int
    rows: torch.Tensor
    replayed: int
    certain: int


def make_layer(config: DeltaConfig, is_sparse: bool, generator: torch.Generator) -> LayerWeights:
    """Random weights; matrices keep the size of what they multiply."""

    def near_one(size: int) -> torch.Tensor:
        return 1 + 0.3 * torch.randn(size, generator=generator)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    hidden, heads = config.hidden, config.attention.value_heads
    shapes = config.attention.weights(hidden, hidden)
    made = {name: matrix(*shape) for name, shape in shapes.items() if shape}
    made |= {
        "rate": -2 * torch.rand(heads, generator=generator),
        "decay_bias": near_one(heads),
        "value_norm": near_one(config.attention.value),
    }
    experts = EXPERTS + 1 if is_sparse else 1
    return LayerWeights(
        input_norm=near_one(hidden),
        attention=DeltaWeights(**made),
        post_norm=near_one(hidden),
        router=matrix(EXPERTS, hidden) if is_sparse else None,
        router_bias=None,
        gate_up=torch.cat([matrix(experts, INNER, hidden) for _ in range(2)], dim=1),
        expert_down=matrix(experts, hidden, INNER),
        shared_gate=matrix(hidden) if is_sparse else None,
    )


def make_nets(
    name: str,
    config: DeltaConfig = CONFIG,
    layers: str = "dm",
    given: DeltaConfig | None = None,
) -> decoder.DeltaDecoder:
    """Layers on a new backend: d dense, m a mixture of experts. given: another config for the
    decoder than theirs."""
    made, generator = make_backend(name), torch.Generator().manual_seed(0)
    packed = [made.pack(make_layer(config, kind == "m", generator)) for kind in layers]
    return made.delta_decoder(given or config, packed)


def new_state(config: DeltaConfig, layers: int) -> DeltaState:
    """States of all layers, cleared; gates are NaN where none were written."""
    parts = [
        DeltaState.empty(SLOTS, DRAFTS, config.attention, torch.float32, "cpu")
        for _ in range(layers)
    ]
    joined = DeltaState(
        *(torch.stack([getattr(part, name) for part in parts])
          for name in ("states", "inputs", "gates"))
    )  # fmt: skip
    joined.gates.fill_(torch.nan)
    for part in (joined.states, joined.inputs):
        part.zero_()
    return joined


def run(made: decoder.DeltaDecoder, state: DeltaState, turns: Sequence[Turn]) -> list[torch.Tensor]:
    """Run a pass; return each request's outputs [n, d]."""
    x, lengths = torch.cat([turn.rows for turn in turns]), [len(turn.rows) for turn in turns]

    def counts(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    layout = StateLayout(
        cu_rows=counts([0, *torch.tensor(lengths).cumsum(0).tolist()]),
        slots=counts([turn.slot for turn in turns]),
        replayed=counts([turn.replayed for turn in turns]),
        certain=counts([turn.certain for turn in turns]),
    )
    made(x, layout, state)
    return list(x.split(lengths))


def random_rows(config: DeltaConfig, count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, config.hidden, generator=torch.Generator().manual_seed(seed))


def whole(config: DeltaConfig, *spans: tuple[int, int]) -> list[Turn]:
    """Requests that begin: slots and numbers of rows."""
    return [Turn(slot, random_rows(config, count, seed=count), 0, count) for slot, count in spans]


@pytest.mark.parametrize("layers", ["d", "m", "dmd"])
@pytest.mark.parametrize("config", [CONFIG, WIDE], ids=["grouped", "wide"])
@pytest.mark.parametrize("backend", sorted(decoder.BACKENDS))
def test_rows_and_states(backend: str, config: DeltaConfig, layers: str) -> None:
    first = whole(config, (3, 40), (0, 1), (2, 7))
    second = [
        Turn(2, random_rows(config, 4, seed=50), 0, 1),
        Turn(3, random_rows(config, 3, seed=51), 0, 3),
    ]
    third = [Turn(2, random_rows(config, 2, seed=52), 2, 1)]
    states = {name: new_state(config, len(layers)) for name in ("reference", backend)}
    made = {name: make_nets(name, config, layers) for name in states}
    for turns in (first, second, third):
        found, expected = (
            torch.cat(run(made[name], states[name], turns)) for name in (backend, "reference")
        )
        check(found, expected)
    for slot in (0, 2, 3):
        found, expected = (states[name].states[:, slot] for name in (backend, "reference"))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("backend", sorted(decoder.BACKENDS))
def test_bits_depend_on_the_rows_alone(
    monkeypatch: pytest.MonkeyPatch, backend: str, threads: int
) -> None:
    """A request alone in one pass, and in a batch, cut, with drafts of which some are right."""
    made, rows = make_nets(backend), random_rows(CONFIG, 20, seed=1)
    alone = new_state(CONFIG, 2)
    (wanted,) = run(made, alone, [Turn(1, rows, 0, 20)])
    monkeypatch.setattr(Team, "threads_for", staticmethod(lambda multiplications: threads))
    state, wrong = new_state(CONFIG, 2), random_rows(CONFIG, 2, seed=2)
    others = whole(CONFIG, (0, 5), (3, 33))
    outs = run(made, state, [others[0], Turn(1, rows[:9], 0, 9), others[1]])[1:2]
    drafted = torch.cat([rows[9:12], wrong[:1]])
    outs.append(run(made, state, [Turn(1, drafted, 0, 1)])[0][:3])
    outs.append(run(made, state, [Turn(1, torch.cat([rows[12:13], wrong]), 2, 1)])[0][:1])
    outs += run(made, state, [Turn(1, rows[13:], 0, 7)])
    assert torch.equal(torch.cat(outs), wanted)
    assert torch.equal(state.states[:, 1], alone.states[:, 1])
    assert torch.equal(state.inputs[:, 1, : SIZES.width - 1], alone.inputs[:, 1, :-DRAFTS])


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_are_the_whole(backend: str) -> None:
    made, turns = make_nets(backend, layers="dmd"), whole(CONFIG, (0, 6))
    (wanted,), state = run(made, new_state(CONFIG, 3), turns), new_state(CONFIG, 3)
    (rows,) = run(made.part(0, 1), state, turns)
    rest = DeltaState(state.states[1:], state.inputs[1:], state.gates[1:])
    (rows,) = run(made.part(1, 3), rest, [replace(turns[0], rows=rows)])
    assert torch.equal(rows, wanted)
    assert len(made) == 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_does_not_fit_is_refused(backend: str) -> None:
    made, turns = make_nets(backend), whole(CONFIG, (0, 6))
    assert make_backend(backend).runs(LayerKind("gated_delta", "softmax_moe"))
    with pytest.raises(ValueError, match="state: expected at least 2 layers, found 1"):
        run(made, new_state(CONFIG, 1), turns)
    with pytest.raises(ValueError, match="states: expected shape"):
        run(made, new_state(WIDE, 2), turns)
    with pytest.raises(ValueError, match="slots: expected different ones of 0 to 4"):
        run(made, new_state(CONFIG, 2), [*turns, *turns])
    with pytest.raises(ValueError, match="layer 0, inputs: expected shape .160, 48., found .192, "):
        make_nets(backend, replace(CONFIG, attention=SIZES._replace(value=16)), given=CONFIG)
    with pytest.raises(ValueError, match="value_heads: expected a multiple of 3, found 4"):
        config = replace(CONFIG, attention=SIZES._replace(key_heads=3))
        make_backend(backend).delta_decoder(config, [])
