"""The runtime on a GPU: tokens of the fixture in float32 and bfloat16, and the commands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import export, run_program
from mtp_runtime import LLM, RequestOutput, SamplingParams
from mtp_runtime.cache import CachedSequence, PageAllocator, lay_out
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.static_graph.cuda import CudaGraphs
from mtp_runtime.static_graph.steps import pool_bytes

pytestmark = pytest.mark.cuda
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
TWO_DRAFTS = {"speculate_method": "mtp", "speculate_max_draft_token_num": 2}


@pytest.fixture(scope="module")
def prompts(trained: Path) -> list[str]:
    lines = (trained.parent / "prompts.jsonl").read_text().splitlines()
    return sorted((str(json.loads(line)["prompt"]) for line in lines), key=len)[:4]


@pytest.fixture(scope="module")
def wanted(trained: Path, prompts: list[str]) -> list[tuple[int, ...]]:
    """The CPU's tokens."""
    return tokens_of(LLM(trained).generate(prompts, PARAMS))


def on_gpu(trained: Path, dtype: str, *, drafts: bool, **options: bool) -> LLM:
    speculation = TWO_DRAFTS if drafts else {}
    return LLM(trained, device="cuda", dtype=dtype, **options, **speculation)  # type: ignore[arg-type]


def tokens_of(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


def agreement(found: list[tuple[int, ...]], wanted: list[tuple[int, ...]]) -> float:
    """Share of tokens up to the first that differs."""
    same = 0
    for ours, theirs in zip(found, wanted, strict=True):
        pairs = enumerate(zip(ours, theirs, strict=True))
        same += next((place for place, (a, b) in pairs if a != b), len(ours))
    return same / sum(map(len, wanted))


@pytest.mark.parametrize("drafts", [False, True])
def test_float32_tokens_are_the_cpu_s(
    trained: Path, prompts: list[str], wanted: list[tuple[int, ...]], drafts: bool
) -> None:
    """Sums in another order differ by 1e-6, and the fixture's choices by more."""
    found = tokens_of(on_gpu(trained, "float32", drafts=drafts).generate(prompts, PARAMS))
    assert agreement(found, wanted) > 0.97


@pytest.mark.parametrize("drafts", [False, True])
def test_bfloat16_tokens_are_near_the_cpu_s(
    trained: Path, prompts: list[str], wanted: list[tuple[int, ...]], drafts: bool
) -> None:
    """Activations are rounded too, and one other choice ends a text's agreement."""
    outputs = on_gpu(trained, "bfloat16", drafts=drafts).generate(prompts, PARAMS)
    assert all(len(output.token_ids) == PARAMS.max_tokens for output in outputs)
    assert agreement(tokens_of(outputs), wanted) > 0.4
    if drafts:
        assert sum(output.metrics.accepted[0] for output in outputs) > 0


def test_stored_weights_give_the_tokens_of_dense_ones(trained: Path, prompts: list[str]) -> None:
    stored = on_gpu(trained, "float32", drafts=True, dequantize_at_load=False)
    dense = on_gpu(trained, "float32", drafts=True, dequantize_at_load=True)
    found = tokens_of(stored.generate(prompts, PARAMS))
    assert agreement(found, tokens_of(dense.generate(prompts, PARAMS))) > 0.97


@pytest.fixture(scope="module")
def bundle(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu") / "bundle"
    assert export(trained, folder).code == 0
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_generate_on_a_gpu(bundle: Path, dtype: str) -> None:
    options = ["--device", "cuda", "--dtype", dtype, "--max-new-tokens", "8", "--json"]
    outcome = run_program("generate", bundle, "--prompt", "Once upon a time", *options)
    assert outcome.code == 0, outcome.err
    assert len(json.loads(outcome.out)["outputs"][0]["token_ids"]) > 0


def test_verify_on_a_gpu(bundle: Path, trained: Path) -> None:
    options = ["--device", "cuda", "--max-new-tokens", "16"]
    outcome = run_program("verify", bundle, "--source", trained, *options)
    assert outcome.code == 0, outcome.out + outcome.err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_captured_steps_give_the_tokens_of_eager_ones(
    trained: Path, prompts: list[str], dtype: str
) -> None:
    """Batches of 4, 2 and 1 in turn, whose steps a graph repeats over the same tensors."""
    lengths = [PARAMS, PARAMS, replace(PARAMS, max_tokens=12), replace(PARAMS, max_tokens=5)]
    eager = on_gpu(trained, dtype, drafts=True).generate(prompts, lengths)
    llm = on_gpu(trained, dtype, drafts=True, static_graph=True)
    for _ in range(2):
        found = llm.generate(prompts, lengths)
        least = 0.97 if dtype == "float32" else 0.4
        assert agreement(tokens_of(found), tokens_of(eager)) > least
    assert sum(output.metrics.accepted[0] for output in found) > 0


def test_graphs_keep_within_what_the_cache_leaves_them(trained: Path, prompts: list[str]) -> None:
    """Batches of 4 to 1 with 0 to 2 drafts find room in the memory of the largest graph."""
    options: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "static_graph": True}
    loaded = load_model(trained, LoadOptions("cuda", "bfloat16", static_graph=True))
    used = torch.cuda.memory_reserved()
    llm = LLM(trained, loaded=loaded, max_memory_bytes=used + (1 << 30), **options, **TWO_DRAFTS)
    engine = llm.engine
    kept = pool_bytes(CudaGraphs(engine.model.device), engine.model, engine.config)
    assert kept > 0
    cache = sum(tensor.numel() * tensor.element_size() for tensor in engine.cache.tensors)
    assert cache + kept < 1 << 30
    lengths = [replace(PARAMS, max_tokens=6 * number) for number in (1, 2, 3, 4)]
    llm.generate(prompts, lengths)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - used < 1 << 30


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_tokens_on_a_second_gpu(trained: Path, prompts: list[str]) -> None:
    """Kernels and graphs go to the device of the model, whichever is the current one."""
    for graphs in (False, True):
        options: dict[str, Any] = {"dtype": "float32", "static_graph": graphs}
        first, second = (
            LLM(trained, device=device, **options, **TWO_DRAFTS).generate(prompts, PARAMS)
            for device in ("cuda:0", "cuda:1")
        )
        assert agreement(tokens_of(second), tokens_of(first)) > 0.97


@pytest.mark.parametrize("dense", [False, True])
@torch.inference_mode()
def test_a_step_waits_for_nothing(trained: Path, dense: bool) -> None:
    """Whatever would read a tensor of the device back raises."""
    options = LoadOptions("cuda", "bfloat16", dequantize_at_load=dense)
    model = load_model(trained, options).model
    pages, sequences = PageAllocator(8, 16), [CachedSequence(), CachedSequence()]
    cache = model.new_cache(pages)
    for sequence, length in zip(sequences, (20, 3), strict=True):
        pages.append(sequence, length)
    layout = lay_out(pages, sequences, [(0, 20), (0, 3)], model.device)
    tokens = torch.arange(23, device=model.device)
    expected = model(tokens, cache, layout).after
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = model(tokens, cache, layout).after
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, expected)


def test_caches_are_on_the_gpu(trained: Path) -> None:
    llm = on_gpu(trained, "bfloat16", drafts=True)
    assert {tensor.device.type for tensor in llm.engine.cache.tensors} == {"cuda"}
    assert {tensor.dtype for tensor in llm.engine.cache.tensors} == {torch.bfloat16}
