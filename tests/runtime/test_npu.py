"""The runtime on an NPU's attention: every layer calls the documented operator, on a CPU.

AUTO says which backend a device has; the CPU is given that of NPUs, whose caches are split.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forked import completed, script
from mtp_checkpoints.errors import UnsupportedError
from mtp_kernels import verify_attention
from mtp_runtime import SamplingParams
from mtp_runtime.cache import PageAllocator
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.models.model import Model
from npu_operator import registered
from runtime.checkpoints import SMALL, SMALL_CONFIGS, write_checkpoint
from runtime.harness import Prompt, prompts_of, run

SIZES: dict[str, Any] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
CONFIG = SMALL | SIZES | HEADS | {"num_hidden_layers": 2, "n_group": 1, "topk_group": 1}
PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)


@pytest.fixture
def calls() -> Iterator[list[dict[str, Any]]]:
    with registered() as calls:
        yield calls


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("wide"), CONFIG)


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return prompts_of([5, 40, 18], 96)


def load(path: Path, **options: Any) -> Model:
    """The model on torch, in bf16."""
    given = {"dtype": "bfloat16", "dequantize_at_load": False} | options
    return load_model(path, LoadOptions(**given)).model


def on_cpu(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setitem(verify_attention.AUTO, "cpu", backend)


def test_tokens_are_those_of_the_reference(
    path: Path,
    prompts: list[Prompt],
    calls: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Attention to the same bits, so that all that follows is the same."""
    on_cpu(monkeypatch, "reference")
    expected = run(load(path), prompts, PARAMS, method="mtp", k=2)
    assert not calls
    on_cpu(monkeypatch, "ascend_npu")
    found = run(load(path), prompts, PARAMS, method="mtp", k=2)
    assert found.outputs == expected.outputs
    assert found.counts("drafted", 1) == expected.counts("drafted", 1) > 0
    assert len(calls) >= 3 * max(r.metrics.target_steps for r in found.requests)
    assert max(len(call["actual_seq_qlen"]) for call in calls) > len(prompts), "prefill is cut"


def test_the_split_cache_is_as_large_as_the_joined_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(path)
    pages = PageAllocator(2, 16)
    joined = sum(tensor.numel() for tensor in model.new_cache(pages).tensors)
    on_cpu(monkeypatch, "ascend_npu")
    halves = list(model.new_cache(pages).tensors)
    assert [tensor.shape[-1] for tensor in halves[:2]] == [512, 64]
    assert sum(tensor.numel() for tensor in halves) == joined
    assert all(tensor.is_contiguous() for tensor in halves)


@pytest.mark.parametrize(
    ("changes", "page_size", "message"),
    [
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, 16, "heads, found 3"),
        ({"kv_lora_rank": 32}, 16, "latents of 512, found 32"),
        ({}, 24, "pages of a multiple of 16 tokens up to 1024, found 24"),
    ],
)
def test_models_outside_the_limits_are_refused(
    changes: dict[str, Any],
    page_size: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load(write_checkpoint(tmp_path, CONFIG | changes))
    on_cpu(monkeypatch, "ascend_npu")
    with pytest.raises(UnsupportedError, match=message):
        model.new_cache(PageAllocator(2, page_size))


def test_sparse_attention_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SMALL_CONFIGS["deepseek_v32"] | SIZES | HEADS | {"index_topk": 64}
    model = load(write_checkpoint(tmp_path, config), max_model_len=128)
    on_cpu(monkeypatch, "ascend_npu")
    with pytest.raises(UnsupportedError, match="at most 64 tokens, or device cpu or cuda"):
        model.new_cache(PageAllocator(2, 16))


def test_what_an_npu_does_not_load() -> None:
    with pytest.raises(
        UnsupportedError, match=r"16 bits\. Expected dtype bfloat16\. Found float32"
    ):
        LoadOptions("npu:0")
    with pytest.raises(UnsupportedError, match="expanded where they are multiplied"):
        LoadOptions("npu", "bfloat16", on_demand=True)
    with pytest.raises(UnsupportedError, match="deterministic"):
        LoadOptions("npu", "bfloat16", deterministic=True)


def test_a_device_of_that_name(path: Path) -> None:
    """From loading to tokens, no operator gets tensors of both devices; drafts change nothing."""
    done = completed(script, Path(__file__).resolve().parents[1] / "npu_device.py", path)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    plain, drafted = found["tokens"]
    assert plain == drafted and [len(tokens) for tokens in plain] == [5, 5]
    assert set(found["caches"]) == {"npu:0"}
    assert found["calls"] > 2 * 5


def test_a_machine_without_one(path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"There is no NPU \(torch_npu beside CANN\) here"):
        load_model(path, LoadOptions("npu", "bfloat16"))
    with pytest.raises(UnsupportedError, match="Expected cpu, cuda, npu. Found tpu"):
        load_model(path, LoadOptions("tpu"))
