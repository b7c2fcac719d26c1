"""Routed experts that do not all fit into memory: tokens and logits are those of a model that is
loaded whole, whatever a cache holds."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_checkpoints.errors import InvalidInputError, IoError, UnsupportedError
from mtp_kernels.decoder.compiled_cpu.expert_cache import ExpertCache
from mtp_runtime import LLM
from mtp_runtime.loading.weight_source import WeightSource
from mtp_runtime.models.load import Loaded, LoadOptions, load_model, open_model
from mtp_runtime.sampling import SamplingParams
from runtime.checkpoints import SMALL_CONFIGS, write_checkpoint
from runtime.harness import Walk, prompts_of

GLM = Path(__file__).resolve().parents[2] / "fixtures/glm4-moe-tiny"
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.9, seed=3)
# Experts that fit: all 16 of the fixture; two tokens' 2 picks in 2 layers; less, by quotas; one for
# both layers.
SLOTS = (16, 8, 5, 2, 1)


# Shared experts of a family's small config.
TWO_SHARED = {"n_shared_experts": 2}
SHARED = dict.fromkeys(  # as wide as the others
    ("qwen3_next", "qwen3_5_moe_text"), {"shared_expert_intermediate_size": 64}
)


def slot_bytes(folder: Path) -> int:
    options = LoadOptions()
    experts = open_model(folder, options, packs=True).memory_plan(options).experts
    assert experts is not None
    return experts.slot_bytes


def with_slots(folder: Path, slots: int, **options: Any) -> Loaded:
    """A model with room for some of its routed experts."""
    size = slots * slot_bytes(folder)
    loaded = load_model(folder, LoadOptions(expert_bytes=size, **options))
    cache = cache_of(loaded)
    assert (cache.slots, cache.slots * cache.slot_bytes) == (slots, size)  # as it was planned
    return loaded


def cache_of(loaded: Loaded) -> ExpertCache:
    assert loaded.expert_cache is not None
    return loaded.expert_cache


def generated(folder: Path, loaded: Loaded) -> list[list[tuple[int, ...]]]:
    """Tokens of four prompts together and of one alone, greedy and sampled, with drafts and
    without; prompts in chunks."""
    prompts, found = prompts_of([11, 3, 7, 2], 90), []
    for method in ("none", "mtp"):
        llm = LLM(
            folder, loaded=loaded, cache_tokens=1024, speculate_method=method, prefill_chunk=4
        )
        for params in (GREEDY, SAMPLED):
            for asked in (prompts, prompts[:1]):
                found.append([each.token_ids for each in llm.generate(asked, params)])
    return found


def logits_of(loaded: Loaded) -> list[torch.Tensor]:
    walk = Walk(loaded.model)
    return [walk.feed(tokens)[0] for tokens in ([5, 6, 7, 8, 9, 10, 11], [3], [44, 45])]


@pytest.fixture(scope="module")
def whole() -> Loaded:
    return load_model(GLM, LoadOptions())


@pytest.fixture(scope="module")
def tokens(whole: Loaded) -> list[list[tuple[int, ...]]]:
    return generated(GLM, whole)


@pytest.mark.parametrize("slots", SLOTS)
def test_tokens_are_those_of_the_whole_model(
    slots: int, whole: Loaded, tokens: list[list[tuple[int, ...]]]
) -> None:
    loaded = with_slots(GLM, slots)
    assert generated(GLM, loaded) == tokens
    for ours, theirs in zip(logits_of(loaded), logits_of(whole), strict=True):
        assert torch.equal(ours, theirs)
    counts = cache_of(loaded).counts
    assert counts.requested > 0 and (slots < 16) == (counts.held < counts.requested - 16)
    assert counts.read_bytes == (counts.requested - counts.held) * slot_bytes(GLM)


def test_layers_are_cut_at_taps(whole: Loaded) -> None:
    """As for drafts that take the inputs of some layers; both parts have one cache."""
    loaded = with_slots(GLM, 3)
    for taps in ([1], [1, 2]):
        ours, theirs = (Walk(one.model.tapped(taps)) for one in (loaded, whole))
        assert torch.equal(ours.feed([5, 6, 7])[0], theirs.feed([5, 6, 7])[0])


def test_each_expert_that_is_not_held_is_read_once() -> None:
    loaded = with_slots(GLM, 16)
    cache, walk = cache_of(loaded), Walk(loaded.model)
    walk.feed(list(range(2, 34)))
    counts = cache.counts
    assert counts.held == 0
    assert counts.read_bytes == counts.requested * slot_bytes(GLM)  # bf16, as it is stored
    first = counts.requested
    walk.feed([2])
    assert counts.requested == first + 4 and counts.held >= 1
    assert counts.read_bytes == (counts.requested - counts.held) * slot_bytes(GLM)
    assert counts.waited_seconds > 0
    cache.restart_counts()
    assert cache.counts.requested == cache.counts.read_bytes == 0


@pytest.mark.parametrize(
    "family", ["deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_next", "qwen3_5_moe_text"]
)
def test_families_compute_the_same_logits(family: str, tmp_path: Path) -> None:
    """Experts of the last one are stored fused."""
    path = write_checkpoint(tmp_path, SMALL_CONFIGS[family] | SHARED.get(family, TWO_SHARED))
    expected = logits_of(load_model(path, LoadOptions()))
    for slots in (7, 3):
        found = logits_of(with_slots(path, slots))
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ("fp8", "fp8"),
        ("int4", "bf16"),
        ("int8", "bf16"),
        ("wint4, w4afp8", "fp8"),
    ],
)
def test_stored_formats_compute_the_same_logits(
    row: str, kind: str, row_bundle: Callable[[str, str], Path]
) -> None:
    bundle = row_bundle(row, kind)
    for activations in ("float32", "int8"):
        expected = logits_of(load_model(bundle, LoadOptions(activations=activations)))
        for slots in (8, 3):
            found = logits_of(with_slots(bundle, slots, activations=activations))
            assert all(map(torch.equal, found, expected))


def test_a_read_that_fails_leaves_nothing_half_read(
    monkeypatch: pytest.MonkeyPatch, whole: Loaded
) -> None:
    """The pass ends with its error, and the next one reads the experts again."""
    loaded = with_slots(GLM, 8)
    walk, read = Walk(loaded.model), WeightSource._read_window
    fails = [True]

    def read_window(source: WeightSource, tensor: Any, *place: Any) -> torch.Tensor:
        if fails[0] and ".down_proj" in tensor.name:
            raise InvalidInputError("Planted", where=tensor.name)
        return read(source, tensor, *place)

    monkeypatch.setattr(WeightSource, "_read_window", read_window)
    with pytest.raises(InvalidInputError, match="Planted"):
        walk.feed([5, 6, 7, 8, 9, 10, 11])
    assert all(not pool.held for pool in cache_of(loaded)._pools)
    fails[0] = False
    for ours, theirs in zip(logits_of(loaded), logits_of(whole), strict=True):
        assert torch.equal(ours, theirs)


def test_no_read_goes_on_behind_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slot will be another expert's."""
    loaded = with_slots(GLM, 8)
    read, begun, ended = WeightSource._read_window, [0], [0]

    def read_window(source: WeightSource, tensor: Any, *place: Any) -> torch.Tensor:
        if ".down_proj" in tensor.name:
            raise InvalidInputError("Planted", where=tensor.name)
        begun[0] += 1
        time.sleep(0.02)
        ended[0] += 1
        return read(source, tensor, *place)

    monkeypatch.setattr(WeightSource, "_read_window", read_window)
    with pytest.raises(InvalidInputError, match="Planted"):
        Walk(loaded.model).feed([5, 6, 7, 8, 9, 10, 11])
    assert begun == ended


def test_a_file_that_shrinks_ends_what_reads_it_alone(tmp_path: Path) -> None:
    """The engine goes on once the file is whole again."""
    folder = Path(shutil.copytree(GLM, tmp_path / "copy"))
    loaded = with_slots(folder, 4, with_mtp=False)
    llm = LLM(folder, loaded=loaded, cache_tokens=1024)
    expected = llm.generate([(5, 6, 7)], GREEDY)[0].token_ids
    shards = sorted(folder.glob("*.safetensors"))
    contents = [shard.read_bytes() for shard in shards]
    for shard in shards:
        os.truncate(shard, 1 << 16)
    with pytest.raises(IoError, match="A file ends early"):
        llm.generate([(40, 41, 42)], GREEDY)
    for shard, content in zip(shards, contents, strict=True):
        shard.write_bytes(content)
    assert llm.generate([(5, 6, 7)], GREEDY)[0].token_ids == expected


def test_ctrl_c_while_experts_are_read_leaves_nothing_half_read(
    monkeypatch: pytest.MonkeyPatch, whole: Loaded
) -> None:
    loaded = with_slots(GLM, 8)
    waits = Future.result

    def interrupted(future: Future[Any], timeout: float | None = None) -> Any:
        monkeypatch.setattr(Future, "result", waits)
        raise KeyboardInterrupt

    monkeypatch.setattr(Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Walk(loaded.model).feed([5, 6, 7, 8, 9, 10, 11])
    for ours, theirs in zip(logits_of(loaded), logits_of(whole), strict=True):
        assert torch.equal(ours, theirs)


def test_a_cache_without_room_for_an_expert_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 49152 bytes at least, found 49151"):
        load_model(GLM, LoadOptions(expert_bytes=49151))


def test_layers_that_torch_runs_are_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, SMALL_CONFIGS["deepseek_v32"])
    with pytest.raises(UnsupportedError, match="do not run every layer of this model"):
        load_model(path, LoadOptions(expert_bytes=1 << 30, max_model_len=512))
