"""The runtime on a GPU: tokens of the fixture in float32 and bfloat16, and the commands."""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import export, run_program
from mtp_runtime import LLM, RequestOutput, SamplingParams
from mtp_runtime.cache import CachedSequence, PageAllocator, lay_out
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.static_graph.options import CudaGraphs
from mtp_runtime.static_graph.steps import pool_bytes
from runtime.departures import TOP, check

pytestmark = pytest.mark.cuda
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
TWO_DRAFTS = {"speculate_method": "mtp", "speculate_max_draft_token_num": 2}


@pytest.fixture(scope="module")
def prompts(trained: Path) -> list[str]:
    lines = (trained.parent / "prompts.jsonl").read_text().splitlines()
    return sorted((str(json.loads(line)["prompt"]) for line in lines), key=len)[:4]


@pytest.fixture(scope="module")
def wanted(trained: Path, prompts: list[str]) -> list[RequestOutput]:
    """The CPU's tokens in float32 by torch, with the most probable ones at every place."""
    loaded = load_model(trained, LoadOptions(static_graph=True))
    return LLM(trained, loaded=loaded).generate(prompts, replace(PARAMS, logprobs=TOP))


def on_gpu(trained: Path, dtype: str, *, drafts: bool, **options: bool) -> LLM:
    speculation = TWO_DRAFTS if drafts else {}
    return LLM(trained, device="cuda", dtype=dtype, **options, **speculation)  # type: ignore[arg-type]


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_are_the_cpu_s(
    trained: Path, prompts: list[str], wanted: list[RequestOutput], dtype: str, drafts: bool
) -> None:
    outputs = on_gpu(trained, dtype, drafts=drafts).generate(prompts, PARAMS)
    assert all(len(output.token_ids) == PARAMS.max_tokens for output in outputs)
    check(outputs, wanted, dtype)
    if drafts:
        assert sum(output.metrics.accepted[0] for output in outputs) > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dense_weights_give_the_cpu_s_tokens(
    trained: Path, prompts: list[str], wanted: list[RequestOutput], dtype: str
) -> None:
    """Stored ones are usual on a GPU."""
    dense = on_gpu(trained, dtype, drafts=True, dequantize_at_load=True)
    check(dense.generate(prompts, PARAMS), wanted, dtype)


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
def test_captured_steps_give_the_cpu_s_tokens(
    trained: Path, prompts: list[str], wanted: list[RequestOutput], dtype: str
) -> None:
    """Batches of 4, 2 and 1 in turn, whose steps a graph repeats over the same tensors."""
    lengths = [PARAMS, PARAMS, replace(PARAMS, max_tokens=12), replace(PARAMS, max_tokens=5)]
    llm = on_gpu(trained, dtype, drafts=True, static_graph=True)
    for _ in range(2):
        found = llm.generate(prompts, lengths)
        check(found, wanted, dtype)
    assert sum(output.metrics.accepted[0] for output in found) > 0


def test_graphs_keep_within_what_the_cache_leaves_them(trained: Path, prompts: list[str]) -> None:
    """Batches of 4 to 1 with 0 to 2 drafts find room in the memory of the largest graph."""
    options: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "static_graph": True}
    loaded = load_model(trained, LoadOptions("cuda", "bfloat16", static_graph=True))
    gc.collect()
    torch.cuda.empty_cache()  # of the tests before
    used, held, limit = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), 4 << 30
    llm = LLM(trained, loaded=loaded, max_memory_bytes=used + limit, **options, **TWO_DRAFTS)
    engine = llm.engine
    kept = pool_bytes(CudaGraphs(engine.model.device), engine.model, engine.config)
    assert kept > 0
    cache = sum(tensor.numel() * tensor.element_size() for tensor in engine.cache.tensors)
    assert cache + kept < limit
    lengths = [replace(PARAMS, max_tokens=6 * number) for number in (1, 2, 3, 4)]
    llm.generate(prompts, lengths)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - held < limit


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_tokens_on_a_second_gpu(
    trained: Path, prompts: list[str], wanted: list[RequestOutput]
) -> None:
    """Kernels and graphs go to the device of the model, whichever is the current one."""
    for graphs in (False, True):
        options: dict[str, Any] = {"device": "cuda:1", "static_graph": graphs}
        found = LLM(trained, **options, **TWO_DRAFTS).generate(prompts, PARAMS)
        check(found, wanted, "float32")


@contextmanager
def refused_waits() -> Iterator[None]:
    """torch announces the mode as a prototype."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


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
    with refused_waits():
        found = model(tokens, cache, layout).after
    assert torch.equal(found, expected)


def test_caches_are_on_the_gpu(trained: Path) -> None:
    llm = on_gpu(trained, "bfloat16", drafts=True)
    assert {tensor.device.type for tensor in llm.engine.cache.tensors} == {"cuda"}
    assert {tensor.dtype for tensor in llm.engine.cache.tensors} == {torch.bfloat16}
