"""A limit of memory into which a model does not fit: divided between what every token uses, routed
experts and cached tokens, or refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from cases import run_program
from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.errors import ResourceError
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_checkpoints.tensors.tensor_reader import TensorReader
from mtp_runtime import LLM, LLMOptions, SamplingParams
from mtp_runtime.llm import PREFILL_CHUNK
from mtp_runtime.loading.read_speed import read_speed
from mtp_runtime.models import memory_plan
from mtp_runtime.models.expert_memory import ExpertMemory
from mtp_runtime.models.load import LoadOptions, open_model
from mtp_runtime.models.memory_plan import WORKING_BYTES, MemoryPlan, PageSizes
from mtp_runtime.run_plan import planned_memory

GLM = Path(__file__).resolve().parents[2] / "fixtures/glm4-moe-tiny"
PLAN = open_model(GLM, LoadOptions(), packs=True).memory_plan(LoadOptions())
GB, MB = 10**9, 10**6
# Of 100 experts of 1 GB a token goes through 4, two in each of two layers.
LARGE = MemoryPlan(
    weight_bytes=110 * GB,
    dense_bytes=0,
    token_bytes=MB,
    dtype=torch.float32,
    experts=ExpertMemory(
        number=100,
        layer_picks=2,
        row_picks=4,
        held_bytes=100 * GB,
        dense_bytes=0,
        slot_bytes=GB,
        stored_bytes=GB,
    ),
)
USUAL = PageSizes(page_tokens=64, most_tokens=32768)


@pytest.fixture(autouse=True)
def nothing_else_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("memory", "run_plan"):
        monkeypatch.setattr(f"mtp_runtime.{module}.resident_bytes", lambda: 0)
    monkeypatch.setattr("mtp_runtime.run_plan.READING_BYTES", 0)


def test_experts_have_what_tokens_leave_of_nine_tenths() -> None:
    cached = LARGE.with_expert_cache(30 * GB, USUAL)
    assert cached is not None
    plan, tokens = cached  # of 18 GB an eighth is tokens'
    assert tokens == 2250 // 64 * 64 and plan.slots == 15
    assert plan.weight_bytes == 25 * GB and plan.always_bytes == 10 * GB
    assert plan.slot_bytes == 15 * GB and plan.holds_two_tokens
    given = LARGE.with_expert_cache(30 * GB, PageSizes(64, 32768, tokens=6400))
    assert given is not None and (given[0].slots, given[1]) == (11, 6400)
    few = LARGE.with_expert_cache(30 * GB, PageSizes(64, 640))
    assert few is not None and (few[0].slots, few[1]) == (17, 640)
    every = LARGE.with_expert_cache(300 * GB, USUAL)
    assert every is not None and every[0].slots == 100


def test_the_least_limit_is_named_and_works() -> None:
    for sizes in (USUAL, PageSizes(64, 32768, tokens=640)):
        for picks in (2, 8):
            least = LARGE.bytes_with_experts(picks, sizes)
            cached = LARGE.with_expert_cache(least, sizes)
            assert cached is not None and cached[0].slots is not None and cached[0].slots >= picks
        assert LARGE.with_expert_cache(LARGE.bytes_with_experts(1, sizes), sizes) is None


def test_a_model_that_fits_is_loaded_whole() -> None:
    page = 64 * PLAN.token_bytes
    fitting = PLAN.weight_bytes + -(-page * 10 // 9)
    for limit, is_whole in ((fitting, True), (fitting - 2, False)):
        memory = planned_memory(GLM, LLMOptions(max_memory_bytes=limit, speculate_method="auto"))
        assert (memory.plan.slots is None) == is_whole and memory.needed_bytes <= limit
        assert memory.cache_tokens == 64


def test_a_limit_leaves_the_tokens_as_they_are() -> None:
    limit, params = 3 * MB, SamplingParams(max_tokens=6)
    (expected,) = LLM(GLM, speculate_method="mtp").generate([(5, 6, 7)], params)
    llm = LLM(GLM, max_memory_bytes=limit, speculate_method="mtp")
    assert llm.expert_cache is not None
    memory = planned_memory(GLM, LLMOptions(max_memory_bytes=limit, speculate_method="mtp"))
    assert memory.plan.slots == llm.expert_cache.slots < llm.expert_cache.experts
    assert llm.engine.config.cache_tokens == memory.cache_tokens
    assert llm.engine.config.prefill_chunk == LLMOptions.prefill_chunk  # of little memory
    (found,) = llm.generate([(5, 6, 7)], params)
    assert found.token_ids == expected.token_ids


def test_longer_parts_of_prompts_are_computed_where_there_is_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert PLAN.experts is not None
    token_bytes, found = PLAN.experts.token_bytes, []
    for left in (600 * token_bytes, 5000 * token_bytes):
        memory = planned_memory(GLM, LLMOptions(max_memory_bytes=3 * MB, speculate_method="mtp"))
        limit = memory.needed_bytes + left
        monkeypatch.setattr("mtp_runtime.llm.planned_memory", lambda *_, memory=memory: memory)
        llm = LLM(GLM, max_memory_bytes=limit, speculate_method="mtp")
        found.append(llm.engine.config.prefill_chunk)
    assert found == [600, PREFILL_CHUNK]


def test_too_small_a_limit_is_refused_with_what_would_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mtp_runtime.llm.load_model", lambda *_, **__: pytest.fail())
    with pytest.raises(ResourceError, match="not even with its routed experts on disk") as refusal:
        LLM(GLM, max_memory_bytes=2 * MB, speculate_method="mtp")
    assert str(refusal.value.expected).startswith("3 MB at least, and 3 MB to hold the experts")
    assert refusal.value.found == "--max-memory of 2 MB"


def test_a_machine_with_less_memory_refuses_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = LARGE.with_slots(20)
    monkeypatch.setattr(memory_plan, "free_memory", lambda: {"available memory": 30 * GB})
    with pytest.raises(ResourceError, match="does not fit into memory") as refusal:
        plan.check(GLM, 64)
    limit = int(str(refusal.value.todo).split("--max-memory ")[1].split()[0])
    cached = LARGE.with_expert_cache(limit, PageSizes(64, 64))
    assert cached is not None
    cached[0].check(GLM, cached[1])
    monkeypatch.setattr(memory_plan, "free_memory", lambda: {"available memory": 11 * GB})
    with pytest.raises(ResourceError) as refusal:
        plan.check(GLM, 64)
    assert "Use a machine with more memory" in str(refusal.value.todo)


def test_a_model_that_does_not_fit_is_told_of_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "free_memory", lambda: {"available memory": 40 * GB})
    with pytest.raises(ResourceError) as refusal:
        LARGE.check(GLM, 640)
    words = str(refusal.value.todo).split()
    limit = int(words[words.index("--max-memory") + 1])
    cached = LARGE.with_expert_cache(limit, PageSizes(64, 640))
    assert cached is not None
    plan, tokens = cached
    plan.check(GLM, tokens)
    assert plan.weight_bytes > 0.8 * (40 * GB - WORKING_BYTES)
    assert f"at least {words[words.index('least') + 1]} of 100 routed experts" in " ".join(words)


def test_generate_decodes_beyond_a_limit() -> None:
    words = ("generate", GLM, "--prompt", "def read(", "--max-new-tokens", "8")
    whole, limited = (run_program(*words, *more) for more in ((), ("--max-memory", "3MB")))
    assert limited.code == 0, limited.err
    text, line = limited.out.partition("\n8 tokens")[0], limited.out.splitlines()
    assert text == whole.out.partition("\n8 tokens")[0]
    assert any(each.startswith("experts: ") and each.endswith("of 16 fit)") for each in line)
    facts = json.loads(run_program(*words, "--max-memory", "3MB", "--json").out)["experts"]
    assert facts["experts"] == 16 > facts["slots"] and facts["requested"] > facts["held"]
    assert facts["read_bytes"] > 0 and facts["waited_seconds"] >= 0


def test_a_dry_run_says_what_the_cache_holds() -> None:
    memory = planned_memory(GLM, LLMOptions(max_memory_bytes=3 * MB, speculate_method="auto"))
    for command in ("generate", "serve"):
        outcome = run_program(command, GLM, "--dry-run", "--max-memory", "3MB")
        assert outcome.code == 0, outcome.err
        assert f"{memory.plan.slots} of 16 routed ones" in outcome.out
        assert "at most 196.6 kB a token" in outcome.out  # four of 49,152 bytes
        assert "less than two tokens' experts" not in outcome.out
        drafts = "a step reads up to 1.75 times the bytes of weights: that pays where over 75%"
        assert drafts in " ".join(outcome.out.split())
    words = ("generate", GLM, "--dry-run", "--json", "--max-memory")
    facts = json.loads(run_program(*words, "3MB").out)
    assert facts["experts"] == 16 and facts["experts_in_memory"] == memory.plan.slots
    assert facts["expert_bytes"] == memory.plan.slot_bytes
    assert facts["token_read_bytes"] == 4 * 49152 and facts["holds_two_tokens"]
    assert memory.plan.drafts is not None
    for name, cost in (("drafts", memory.plan.drafts), ("read_drafts", memory.plan.drafts.read)):
        needed = cost.needed_acceptance(1)
        told = {"k": 1, "bytes_ratio": cost.step(1), "needed_acceptance": needed}
        assert facts[name] == [told]
    assert not json.loads(run_program(*words, "2.8MB").out)["holds_two_tokens"]
    assert "experts" not in json.loads(run_program(*words, "1GB").out)


def test_a_dry_run_tells_how_long_a_token_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("generate", GLM, "--dry-run", "--max-memory", "3MB")
    facts = json.loads(run_program(*words, "--json").out)
    assert facts["read_bytes_per_second"] is None and facts["token_read_seconds"] is None
    sizes: list[int] = []

    def speed(tensors: Sequence[TensorInfo]) -> float:
        sizes.extend(tensor.size_bytes for tensor in tensors)
        return 1e6

    monkeypatch.setattr("mtp_runtime.run_plan.read_speed", speed)
    outcome = run_program(*words)
    words_shown = " ".join(outcome.out.split())
    assert "at most 196.6 kB a token, 0.20 s at the 1.0 MB/s of this disk." in words_shown
    assert sizes == [16384] * 48  # of the main layers' 16 experts alone


def test_read_speed_is_that_of_large_tensors_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [t for t in Checkpoint.open(GLM).tensors.values() if t.size_bytes == 16384]
    assert read_speed(tensors) is None
    read: list[str] = []
    monkeypatch.setattr(
        TensorReader,
        "rows",
        lambda reader, *_: read.append(reader.info.name) or torch.empty(16384, dtype=torch.uint8),
    )
    monkeypatch.setattr("mtp_runtime.loading.read_speed.PROBE_BYTES", 5 * 16384)
    speed = read_speed(tensors, least_bytes=16384)
    assert speed is not None and speed > 0
    step = len(tensors) // 5
    assert sorted(read) == sorted(tensor.name for tensor in tensors[::step][:5])


def test_what_is_read_is_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtp_runtime.run_plan.READING_BYTES", 1000 * MB)
    limit = 1003 * MB
    options = LLMOptions(max_memory_bytes=limit, speculate_method="auto")
    assert planned_memory(GLM, options).plan.slots is None  # of a model that fits nothing is read
    monkeypatch.setattr("mtp_runtime.run_plan.resident_bytes", lambda: 1000 * MB)
    refused = planned_memory(GLM, options).refusal
    assert refused is not None and str(refused.expected).startswith("2,003 MB at least")
