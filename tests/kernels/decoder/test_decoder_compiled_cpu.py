"""Bits of the compiled decoder, which depend on nothing but a row and its request; its threads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from decoder_cases import (
    Case,
    Inputs,
    build,
    changed,
    decoder_of,
    grouped,
    make_backend,
    make_decoder,
    make_layer,
    requests_of,
    run,
)

from mtp_kernels import decoder, quantize
from mtp_kernels.cpu.memory import Arena
from mtp_kernels.cpu.team import Team
from mtp_kernels.decoder.compiled_cpu import passes, recursion
from mtp_kernels.quantize.block_floats import quantize_nvfp4
from mtp_kernels.quantize.layouts import Fp8Channel
from mtp_kernels.quantize.row_codes import RowCodes, integer_rows, row_codes

# Request 3 spans several blocks of 32 rows, and several tiles.
MIXED = Case((1, 4, 0, 70, 1), (130, 64, 9, 100, 1), layers="dm")
CASES = {
    "mixed": MIXED,
    "no query rank": changed(MIXED, query_rank=0, heads=5),
    "grouped": grouped(MIXED, heads=10),
    "rows given": replace(MIXED, layers="tm"),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", CASES)
def test_bits_do_not_depend_on_the_batch(name: str) -> None:
    """Each request alone, and all of them in another order."""
    case = CASES[name]
    made, inputs = make_decoder(case, "compiled_cpu"), build(case)
    expected, _ = run(made, inputs)
    for wanted in [*([request] for request in range(len(case.q_lens))), [3, 1, 4, 2, 0]]:
        part, rows = requests_of(inputs, wanted)
        assert torch.equal(run(made, part)[0], expected[rows]), wanted


@pytest.mark.parametrize("step", [1, 3, 33])
@pytest.mark.parametrize("layers", ["dm", "t"])
def test_bits_do_not_depend_on_how_a_prompt_is_cut(layers: str, step: int) -> None:
    case = Case((70,), (100,), layers=layers)
    made, inputs = make_decoder(case, "compiled_cpu"), build(case)
    expected, expected_cache = run(made, inputs)
    cache, rows = inputs.kv_cache.clone(), []
    for start in range(0, 70, step):
        end = min(70, start + step)
        x = inputs.x[start:end].clone()
        layout = replace(
            inputs.layout,
            positions=inputs.layout.positions[start:end],
            slots=inputs.layout.slots[start:end],
            kv_lens=torch.tensor([30 + end], dtype=torch.int32),
            cu_q=torch.tensor([0, end - start], dtype=torch.int32),
        )
        made(
            x,
            layout,
            cache,
            None if inputs.attention_input is None else inputs.attention_input[start:end],
        )
        rows.append(x)
    assert torch.equal(torch.cat(rows), expected)
    assert torch.equal(cache.view(torch.int32), expected_cache.view(torch.int32))


@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize("name", CASES)
def test_threads_do_not_change_bits(
    monkeypatch: pytest.MonkeyPatch, name: str, threads: int
) -> None:
    made, inputs = make_decoder(CASES[name], "compiled_cpu"), build(CASES[name])
    expected, expected_cache = run(made, inputs)
    monkeypatch.setattr(Team, "threads_for", staticmethod(lambda multiplications: threads))
    found, found_cache = run(made, inputs)
    assert torch.equal(found, expected)
    assert torch.equal(found_cache.view(torch.int32), expected_cache.view(torch.int32))


@pytest.mark.parametrize("threads", [1, 2])
def test_several_callers_at_once(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """Callers share a decoder, each with a batch and a cache of its own."""
    monkeypatch.setattr(Team, "threads_for", staticmethod(lambda multiplications: threads))
    made = make_decoder(MIXED, "compiled_cpu")
    batches = [build(replace(MIXED, seed=seed)) for seed in range(4)]
    expected = [run(made, batch)[0] for batch in batches]

    def repeat(number: int) -> bool:
        return all(torch.equal(run(made, batches[number])[0], expected[number]) for _ in range(20))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(repeat, range(4)))


def test_inference_mode_changes_nothing() -> None:
    made, inputs = make_decoder(MIXED, "compiled_cpu"), build(MIXED)
    expected, _ = run(made, inputs)
    with torch.inference_mode():
        assert torch.equal(run(make_decoder(MIXED, "compiled_cpu"), build(MIXED))[0], expected)


def test_one_compilation_of_each_attention_serves_all_storages() -> None:
    """Compiling takes far longer than a pass: all else is known when it runs, and of the attentions
    a model has one."""
    for dtype in (torch.float32, torch.bfloat16):
        backend = make_backend("compiled_cpu", dtype=dtype)
        for case in CASES.values():
            run(make_decoder(case, backend), build(case))
        backend.projection(torch.zeros(40, 24))(torch.zeros(3, 24))
    assert len(recursion.run.signatures) == 2
    assert len(passes.run_project.signatures) == 1


class Stored:
    """Matrices [h, out, in] whose rows come in two pieces."""

    def __init__(self, shape: tuple[int, ...], rows: decoder.Piece) -> None:
        self.shape, self._rows = shape, rows

    def pieces(self) -> Iterator[decoder.Piece]:
        yield self._rows[:7]
        yield self._rows[7:]


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("float32", 0),
        ("bf16", 0),
        ("fp8_block", 128),
        ("fp8_channel", 320),
        ("int8_channel", 320),
        ("int4_group_32", 32),
        ("int4_group_64", 64),
        ("above minimums", 32),
        ("nvfp4", 16),
        ("odd heads", 0),
    ],
)
def test_halves_that_are_absorbed_are_multiplied_as_they_are_stored(name: str, group: int) -> None:
    """Against the same numbers in float64; a head of 18 keys has no whole steps of codes."""
    sizes = {"heads": 3, "nope": 18 if name == "odd heads" else 24, "value": 20, "latent": 320}
    case = changed(Case((3, 40), (9, 60), layers="d"), **sizes)
    layer = make_layer(case, "d", torch.Generator().manual_seed(case.seed))
    assert isinstance(layer.attention, decoder.LatentWeights)
    stored, dense = {}, {}
    for half in ("key_up", "value_up"):
        matrix = getattr(layer.attention, half)
        rows = stored_rows(name, matrix.flatten(0, 1))
        stored[half] = Stored(tuple(matrix.shape), rows)
        values = rows.values() if isinstance(rows, RowCodes) else rows.float()
        dense[half] = values.view(matrix.shape)
    found, expected = (
        decoder_of(case, backend, replace(layer, attention=replace(layer.attention, **halves)))
        for backend, halves in (("compiled_cpu", stored), ("reference", dense))
    )
    assert found.layers[0].record["key_group"] == group
    inputs = build(case)
    assert torch.allclose(run(found, inputs)[0], run(expected, inputs)[0], atol=1e-5)


def stored_rows(name: str, rows: torch.Tensor) -> decoder.Piece:
    """Rows of a matrix in a stored form."""
    if name in ("float32", "bf16"):
        return rows if name == "float32" else rows.bfloat16()
    if name == "fp8_channel":
        scale = rows.abs().amax(dim=1, keepdim=True) / 448
        return row_codes(Fp8Channel((rows / scale).to(torch.float8_e4m3fn), scale))
    if name.startswith("int4"):
        return row_codes(quantize.quantize_int4_group(rows, group_size=int(name[-2:]))[0])
    if name == "above minimums":
        scale = rows.reshape(len(rows), -1, 32).abs().amax(dim=-1) / 4
        numbers = (rows / scale.repeat_interleave(32, dim=1)).round()
        return integer_rows(numbers.to(torch.int8), scale, bits=4)
    if name == "nvfp4":
        codes, e4m3, _ = quantize_nvfp4(rows, 4.0, sweep=False)
        return RowCodes(codes, e4m3.float() / 4, 16)
    made = quantize.quantize_fp8_block if name == "fp8_block" else quantize.quantize_int8_channel
    return row_codes(made(rows)[0])


def test_long_prefill_goes_in_waves() -> None:
    """More parts of attention than the scratch memory of a wave holds."""
    case = changed(Case((600, 3), (900, 130), layers="d"), heads=4)
    made, inputs = make_decoder(case, "compiled_cpu"), build(case)
    expected, _ = run(made, inputs)
    for request in range(2):
        part, rows = requests_of(inputs, [request])
        assert torch.equal(run(made, part)[0], expected[rows])
    assert torch.allclose(expected, run(make_decoder(case, "reference"), inputs)[0], atol=1e-4)


def test_weights_may_be_dropped() -> None:
    """A decoder owns copies: overwriting the given tensors changes nothing."""
    backend = make_backend("compiled_cpu")
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(40, 24, generator=generator)
    project, x = backend.projection(matrix), torch.randn(3, 24, generator=generator)
    before = project(x)
    matrix.fill_(torch.nan)
    assert torch.equal(project(x), before)


def test_parts_of_another_backend_are_refused() -> None:
    backend, reference = make_backend("compiled_cpu"), make_backend("reference")
    norm = backend.norm(torch.ones(48), 1e-6)
    parts = decoder.RecursionParts(
        decoder=make_decoder(Case((1,), (1,), layers="m"), backend),
        embedding=torch.zeros(9, 48),
        inputs=decoder.ModuleInputs(norm, norm, reference.projection(torch.zeros(48, 96))),
        head_norm=norm,
        head=backend.projection(torch.zeros(9, 48)),
        tokens=torch.arange(9),
        recycles_normed=False,
    )
    with pytest.raises(TypeError, match="expected parts of compiled_cpu"):
        backend.recursion(parts)
    own = replace(parts.inputs, projection=backend.projection(torch.zeros(48, 96)))
    parts = replace(parts, inputs=own)
    with pytest.raises(ValueError, match=r"tokens: expected shape \[9\], found \[8\]"):
        backend.recursion(replace(parts, tokens=torch.arange(8)))


def test_threads_may_pack_into_one_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that change places while a chunk is divided."""

    def chunk(arena: Arena) -> np.ndarray:
        found: np.ndarray = vars(arena)["chunk"]
        time.sleep(2e-5)
        return found

    def replace_chunk(arena: Arena, rest: np.ndarray) -> None:
        vars(arena)["chunk"] = rest

    monkeypatch.setattr(Arena, "_chunk", property(chunk, replace_chunk), raising=False)
    arena = Arena()

    def pack(seed: int) -> list[np.ndarray]:
        places = [arena.take(3, 7) for _ in range(200)]
        for place in places:
            place[...] = seed
        return places

    with ThreadPoolExecutor(4) as pool:
        kept = list(pool.map(pack, range(4)))
    assert all((array == seed).all() for seed in range(4) for array in kept[seed])
    places = {array.ctypes.data for arrays in kept for array in arrays}
    assert len(places) == 800
    assert all(place % 64 == 0 for place in places)


def poisoned_outside(inputs: Inputs) -> Inputs:
    """The inputs with other junk in every slot that no row may see."""
    used = torch.zeros(inputs.kv_cache.shape[1] * inputs.kv_cache.shape[2], dtype=torch.bool)
    page = inputs.kv_cache.shape[2]
    for pages, kv_len in zip(
        inputs.layout.page_table.tolist(), inputs.layout.kv_lens.tolist(), strict=True
    ):
        for token in range(kv_len):
            used[pages[token // page] * page + token % page] = True
    cache = inputs.kv_cache.clone()
    cache.flatten(1, 2)[:, ~used] = 1e30
    return replace(inputs, kv_cache=cache)


def test_unused_slots_change_no_bit() -> None:
    made, inputs = make_decoder(MIXED, "compiled_cpu"), build(MIXED)
    assert torch.equal(run(made, poisoned_outside(inputs))[0], run(made, inputs)[0])
