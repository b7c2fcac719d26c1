"""Every decoder backend against the reference: shapes, batches, and what they must not read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decoder_cases import (
    BACKENDS,
    Case,
    Inputs,
    build,
    changed,
    check,
    grouped,
    make_backend,
    make_decoder,
    run,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_kernels import decoder
from mtp_kernels.cpu.team import Team
from mtp_kernels.decoder import LayerKind

OTHERS = sorted(decoder.BACKENDS)
MIXED = Case((1, 40, 0, 4, 1, 70), (130, 40, 9, 64, 1, 100))  # prefill and decode in one batch
GROUPED = grouped(MIXED)
ONE_GROUP = {"groups": 1, "groups_per_token": 1}
CASES = {
    "one row": Case((1,), (1,)),
    "decode": Case((1, 1, 1), (17, 200, 64)),
    "verification": Case((4, 2, 3), (20, 65, 128)),
    "prefill": Case((100, 33), (100, 33)),
    "mixed": MIXED,
    "no rows": Case((0, 0), (5, 0)),
    "no requests": Case((), ()),
    "dense layers": replace(MIXED, layers="ddd"),
    "expert layers": replace(MIXED, layers="mm"),
    "one head": changed(MIXED, heads=1),
    "more heads than a tile has rows": changed(MIXED, heads=70),
    "no query rank": changed(MIXED, query_rank=0),
    "no shared expert": replace(MIXED, shared=0),
    "three shared experts": replace(MIXED, shared=3),
    "one group": changed(MIXED, **ONE_GROUP),
    "one group of two kept": changed(MIXED, groups=2, groups_per_token=1),
    "all groups kept": changed(MIXED, groups_per_token=4),
    "all experts": changed(MIXED, experts_per_token=8, **ONE_GROUP),
    "weights as they are": changed(MIXED, normalises=False, scale=1.0),
    "softmax": changed(replace(MIXED, layers="gm"), has_softmax=True, **ONE_GROUP),
    "softmax as it is": changed(MIXED, has_softmax=True, normalises=False, scale=1.0, **ONE_GROUP),
    "a gate of shared experts": replace(MIXED, layers="gdg"),
    "yarn": changed(replace(MIXED, attention_scaling=1.37), softmax_scale=0.55),
    "whole vectors": changed(replace(MIXED, inner=64), hidden=64, value=32, latent=64, rope=16),
    "ragged sizes": changed(
        replace(MIXED, inner=33), hidden=47, value=7, latent=19, nope=5, rope=2
    ),
    "rows given": replace(MIXED, layers="t"),
    "rows given, then layers": replace(MIXED, layers="tmd"),
    "rows given, no rows": Case((0, 0), (5, 0), layers="t"),
    "rows given, ragged sizes": changed(
        replace(MIXED, inner=33, layers="t"), hidden=47, value=7, latent=19, nope=5, rope=2
    ),
    "rows given, grouped": grouped(replace(MIXED, layers="t")),
    "pages of 3": replace(MIXED, page=3),
    "pages of 64": replace(MIXED, page=64),
    "grouped": GROUPED,
    "grouped, prefill": grouped(Case((100, 33), (100, 33))),
    "grouped, no rows": grouped(Case((0, 0), (5, 0))),
    "grouped, no bias": changed(GROUPED, has_bias=False),
    "grouped, no norms": changed(GROUPED, has_norms=False),
    "grouped, neither": changed(GROUPED, has_bias=False, has_norms=False),
    "grouped, a key for each head": changed(GROUPED, kv_heads=6),
    "grouped, one key": changed(GROUPED, kv_heads=1),
    "grouped, many heads": changed(GROUPED, heads=96, kv_heads=3),
    "grouped, whole head rotated": changed(GROUPED, rope=16),
    "grouped, yarn": changed(replace(GROUPED, attention_scaling=1.37), softmax_scale=0.55),
    "grouped, ragged sizes": changed(GROUPED, hidden=47, head=19, rope=6),
    "grouped, gated": changed(GROUPED, is_gated=True),
    "grouped, gated, plain": changed(GROUPED, is_gated=True, has_bias=False, has_norms=False),
    "grouped, wide heads": changed(replace(GROUPED, page=3), hidden=64, head=64, rope=32),
}


@pytest.mark.parametrize("backend", OTHERS)
@pytest.mark.parametrize("name", CASES)
def test_rows_and_cache(name: str, backend: str) -> None:
    case = CASES[name]
    inputs = build(case)
    expected, expected_cache = run(make_decoder(case, "reference"), inputs)
    found, found_cache = run(make_decoder(case, backend), inputs)
    check(found, expected)
    check_cache(inputs, found_cache, expected_cache)


@pytest.mark.parametrize("backend", OTHERS)
@pytest.mark.parametrize(
    "name", ["mixed", "no query rank", "whole vectors", "ragged sizes", "grouped", "rows given"]
)
def test_matrices_in_bf16(name: str, backend: str) -> None:
    """The sums of matrices that were rounded before."""
    case = CASES[name]
    made = [make_backend(one, dtype=torch.bfloat16) for one in ("reference", backend)]
    (expected, _), (found, _) = (run(make_decoder(case, one), build(case)) for one in made)
    check(found, expected)
    exact, _ = run(make_decoder(case, "reference"), build(case))
    assert not torch.allclose(exact, expected, rtol=1e-4)


def check_cache(inputs: Inputs, found: torch.Tensor, expected: torch.Tensor) -> None:
    """The rows' slots are written in all layers, and nothing else is."""
    own = torch.zeros(found.shape[1] * found.shape[2], dtype=torch.bool)
    own[inputs.layout.slots] = True
    flat, before = found.flatten(1, 2), inputs.kv_cache.flatten(1, 2)
    assert torch.equal(flat[:, ~own].view(torch.int32), before[:, ~own].view(torch.int32))
    check(flat[:, own].flatten(0, 1), expected.flatten(1, 2)[:, own].flatten(0, 1))


@pytest.mark.parametrize("backend", OTHERS)
@given(
    requests=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 90)), min_size=1, max_size=5),
    heads=st.integers(1, 9),
    kv_heads=st.integers(0, 3),
    page=st.sampled_from([1, 3, 16, 64]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=25, deadline=None)
def test_random_ragged_batches(
    backend: str,
    requests: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    page: int,
    seed: int,
) -> None:
    """Latent attention, and of grouped queries where there are heads of keys."""
    q_lens = tuple(q_len for q_len, _ in requests)
    kv_lens = tuple(q_len + earlier for q_len, earlier in requests)
    case = Case(q_lens, kv_lens, page=page, seed=seed)
    if kv_heads:
        case = grouped(case, heads=heads * kv_heads, kv_heads=kv_heads)
    else:
        case = changed(case, heads=heads)
    inputs = build(case)
    check(
        run(make_decoder(case, backend), inputs)[0], run(make_decoder(case, "reference"), inputs)[0]
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_layer_by_itself(backend: str) -> None:
    """Layers one after the other are the whole; a cache may have further layers."""
    case = replace(MIXED, layers="dmm")
    made, inputs = make_decoder(case, backend), build(case)
    expected, expected_cache = run(made, inputs)
    x, cache = inputs.x.clone(), inputs.kv_cache.clone()
    assert len(made) == 3
    for number in range(3):
        layer = made.part(number, number + 1)
        assert len(layer) == 1
        layer(x, inputs.layout, cache[number:])
    assert torch.equal(x, expected)
    assert torch.equal(cache.view(torch.int32), expected_cache.view(torch.int32))


@pytest.mark.parametrize("backend", BACKENDS)
def test_kinds_of_layers(backend: str) -> None:
    made = make_backend(backend)
    for attention in ("mla", "gqa"):
        assert made.runs(LayerKind(attention, "dense"))
        assert made.runs(LayerKind(attention, "sigmoid_moe"))
        assert made.runs(LayerKind(attention, "softmax_moe"))
    for kind in (LayerKind("gdn", "dense"), LayerKind("mla", "tanh_moe"), LayerKind("", "")):
        assert not made.runs(kind)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("columns", [5, 16, 96, 515])
def test_norm(backend: str, columns: int, size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, columns, generator=generator) * size
    weight = torch.randn(columns, generator=generator)
    norm = make_backend(backend).norm(weight, 1e-6)
    expected = torch.rms_norm(x, (columns,), weight, 1e-6)
    assert torch.allclose(norm(x), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(norm(x[:0]), x[:0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 7, 5), (40, 64, 96), (9, 33, 70)])
def test_projection(backend: str, rows: int, inputs: int, outputs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(outputs, inputs, generator=generator)
    x = torch.randn(rows, inputs, generator=generator)
    project = make_backend(backend).projection(matrix)
    check(project(x), (x.double() @ matrix.double().T).float())
    assert project(x[:0]).shape == (0, outputs)
    assert torch.equal(project.best(x), project(x).argmax(dim=-1))
    assert project.best(x[:0]).shape == (0,)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("backend", OTHERS)  # a matrix library may tell equal columns apart
def test_the_lowest_of_equal_outputs_is_best(
    monkeypatch: pytest.MonkeyPatch, backend: str, threads: int
) -> None:
    monkeypatch.setattr(Team, "threads_for", staticmethod(lambda multiplications: threads))
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(50, 16, generator=generator).repeat(3, 1)
    project = make_backend(backend).projection(matrix)
    x = torch.randn(40, 16, generator=generator)
    best = project.best(x)
    assert torch.equal(best, project(x)[:, :50].argmax(dim=-1))
    assert project.best(torch.zeros(2, 16)).tolist() == [0, 0]


def test_backends_are_made_by_name() -> None:
    with pytest.raises(ValueError, match=r"backend: expected auto or one of .*, found 'gpu'"):
        decoder.make_backend("gpu")
    with pytest.raises(ValueError, match=r"expected a device of \['cpu'\], found meta"):
        decoder.make_backend("auto", torch.device("meta"))
