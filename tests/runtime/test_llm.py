"""LLM and mtp-export generate, on a trained miniature with its tokenizer."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from cases import edit_json, export, run_program
from mtp_checkpoints.errors import MtpExportError, UsageError
from mtp_export import busy_machine
from mtp_runtime import LLM, RequestMetrics, SamplingParams, TokenEvent, summarise
from mtp_runtime import llm as llm_module
from mtp_runtime.config import EngineConfig, LLMOptions, SpeculationConfig
from mtp_runtime.memory import bound_device, cache_tokens_within, resident_bytes
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.models.model import Model
from mtp_runtime.parallel.group import Group, Split

PROMPTS = ["Once upon a time", "def add(a, b):"]


@pytest.fixture(scope="module")
def llm(trained_glm: Path) -> LLM:
    return LLM(trained_glm, speculate_method="mtp", speculate_max_draft_token_num=2)


def test_one_output_a_prompt_and_every_token_streamed(llm: LLM) -> None:
    events: list[TokenEvent] = []
    first_id = llm.next_request_id
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=10), events.append)
    assert len(outputs) == 2
    for number, output in enumerate(outputs):
        mine = [event for event in events if event.request_id == first_id + number]
        assert tuple(event.token for event in mine) == output.token_ids
        assert "".join(event.text for event in mine) == output.text
        assert output.text == llm.tokenizer.decode(output.token_ids)
        assert sum(event.from_draft for event in mine) == sum(output.metrics.accepted)
    again = llm.generate([llm.tokenizer.encode(PROMPTS[0])], SamplingParams(max_tokens=10))
    assert again[0].token_ids == outputs[0].token_ids


def test_stop_texts_cut_the_output(llm: LLM) -> None:
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    whole = llm.generate(PROMPTS[0], params)[0]
    for place in range(1, len(whole.text) - 1):
        stop = whole.text[place : place + 2]
        params = SamplingParams(max_tokens=10, ignore_eos=True, stop=stop)
        events: list[TokenEvent] = []
        output = llm.generate(PROMPTS[0], params, events.append)[0]
        assert output.text == whole.text[: whole.text.find(stop)]
        assert "".join(event.text for event in events) == output.text
        assert output.finish_reason == "stop"
        assert output.token_ids == whole.token_ids[: len(output.token_ids)]


def test_what_a_call_leaves_is_dropped(llm: LLM) -> None:
    """Refused prompts and interrupted calls do not run on in the next call."""

    def interrupt(event: TokenEvent) -> None:
        raise KeyboardInterrupt

    with pytest.raises(UsageError, match="empty"):
        llm.generate([PROMPTS[0], ()])
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, SamplingParams(max_tokens=10), interrupt)
    assert not llm.engine.has_work
    assert llm.engine.pages.free_pages == llm.engine.pages.pages


def test_calls_of_many_threads_get_their_own_outputs(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = [f"{text} {number}" for number in range(10) for text in PROMPTS]
    alone = [output.token_ids for output in llm.generate(prompts, params)]

    def call(prompt: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        events: list[TokenEvent] = []
        (output,) = llm.generate(prompt, params, events.append)
        assert len({event.request_id for event in events}) == 1
        return output.token_ids, tuple(event.token for event in events)

    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(call, prompts)) == [(tokens, tokens) for tokens in alone]
    assert not llm.engine.has_work
    assert llm.engine.pages.free_pages == llm.engine.pages.pages


def test_a_call_runs_while_another_one_is_under_way(llm: LLM) -> None:
    """A caller that is busy with a token keeps no other one waiting, or from failing alone."""
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    expected = [output.token_ids for output in llm.generate(PROMPTS, params)]
    inner: list[tuple[int, ...]] = []
    outer: list[int] = []

    def call_meanwhile(event: TokenEvent) -> None:
        outer.append(event.token)
        if len(outer) == 1:
            with ThreadPoolExecutor(1) as pool:
                call = pool.submit(llm.generate, PROMPTS[1], params)
                inner.append(call.result(timeout=60)[0].token_ids)
                with pytest.raises(UsageError, match="empty"):
                    pool.submit(llm.generate, [()]).result(timeout=60)

    output = llm.generate(PROMPTS[0], params, call_meanwhile)[0]
    assert [output.token_ids, inner[0]] == expected and tuple(outer) == expected[0]


def test_a_lost_mtp_layer_is_said_once(
    trained_glm: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where drafts were left to the model, and its config.json announces a layer to draft with."""
    bundle = tmp_path / "my bundle"
    assert export(trained_glm, bundle, "--part", "main", "--quiet").code == 0
    llm = LLM(bundle, speculate_method="auto")
    assert caplog.messages == [
        "Decoding without drafts: config.json announces an MTP layer, and there is none. See"
        f" mtp-export verify '{bundle}/main'"
    ]
    told = run_program("verify", bundle / "main", "--level", "files")
    assert told.code == 7 and "mtp-export graft" in told.out
    caplog.clear()
    LLM(bundle, speculate_method="none")  # as was asked for
    LLM(trained_glm, speculate_method="auto")
    LLM(bundle, speculate_method="inference_with_reference")
    edit_json(bundle / "main/config.json", lambda c: c.update(num_nextn_predict_layers=0))
    LLM(bundle, speculate_method="auto")
    assert not caplog.messages and llm.engine.config.speculation.draft_tokens == 0


def test_options_that_make_no_sense(trained_glm: Path, llm: LLM) -> None:
    with pytest.raises(UsageError, match="speculate_method"):
        LLM(trained_glm, speculate_method="eagel")
    with pytest.raises(UsageError, match="acceptance"):
        LLM(trained_glm, acceptance="typical")
    with pytest.raises(UsageError, match="one SamplingParams per prompt"):
        llm.generate(PROMPTS, [SamplingParams()])
    with pytest.raises(UsageError, match="temperature"):
        SamplingParams(temperature=-1.0)
    with pytest.raises(UsageError, match="seed"):
        SamplingParams(seed=-1)
    with pytest.raises(UsageError, match="speculate_method"):
        LLM(trained_glm, speculate_method="mtp", draft_model=trained_glm)
    with pytest.raises(UsageError, match="no prompt"):
        llm.generate([{"prompt": PROMPTS[0]}])  # type: ignore[list-item]
    for prompts in (b"abc", [b"abc"], [bytearray(b"abc")], [5, "a"], [5, True]):
        with pytest.raises(UsageError, match="no prompt"):
            llm.generate(prompts)  # type: ignore[arg-type]
    assert llm.generate([]) == []


def test_options_of_other_kinds_are_refused(trained_glm: Path) -> None:
    for options, words in (
        ({"max_model_len": 1.5}, "max_model_len is no whole number"),
        ({"max_model_len": "9"}, "max_model_len is no number"),
        ({"prefix_cache": "no"}, "prefix_cache is neither true nor false"),
        ({"deterministic": 1}, "deterministic is neither"),
        ({"dequantize_at_load": "yes"}, "dequantize_at_load is neither"),
        ({"adaptive": "no", "speculate_method": "mtp"}, "adaptive is neither"),
        ({"max_batch_size": True}, "max_batch_size is no number"),
        ({"max_memory_bytes": 1e9}, "max_memory_bytes is no whole number"),
        ({"static_graph": 1}, "static_graph cannot be read"),
    ):
        with pytest.raises(UsageError, match=words):
            LLM(trained_glm, **options)  # type: ignore[arg-type]


def test_an_option_that_there_is_not_is_refused_before_loading(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="'page_sizes'"):
        LLM(tmp_path / "nothing", page_sizes=16)


def test_every_option_of_the_engine_reaches_it() -> None:
    options = LLMOptions(
        max_batch_size=3,
        page_size=16,
        cache_tokens=4096,
        prefill_chunk=8,
        max_step_tokens=9,
        prefix_cache=True,
        speculate_method="mtp",
        speculate_max_draft_token_num=2,
        speculate_max_ngram_size=5,
        speculate_verify_window=4,
        speculate_max_candidate_len=6,
        acceptance="relaxed",
        relaxed_top_n=7,
        relaxed_margin=0.5,
        adaptive=True,
        draft_temperature=[0.75],
        draft_stop_entropy=1.5,
    )
    speculation = SpeculationConfig(
        method="mtp",
        max_draft_tokens=2,
        max_ngram_size=5,
        verify_window=4,
        max_candidate_len=6,
        acceptance="relaxed",
        relaxed_top_n=7,
        relaxed_margin=0.5,
        adaptive=True,
        draft_temperature=(0.75,),
        draft_stop_entropy=1.5,
    )
    sizes = EngineConfig(
        max_batch_size=3,
        page_size=16,
        cache_tokens=4096,
        prefill_chunk=8,
        max_step_tokens=9,
        prefix_cache=True,
    )
    assert options.engine() == replace(sizes, speculation=speculation)
    assert LLMOptions().engine() == EngineConfig()
    assert LLMOptions(k_schedule=[[1, 2]], speculate_method="mtp").engine() == EngineConfig(
        speculation=SpeculationConfig("mtp", k_schedule=((1, 2),))
    )


def test_a_prompt_of_ids_is_one_prompt(llm: LLM) -> None:
    """As a text is, whatever sequence it is."""
    params = SamplingParams(max_tokens=4)
    (expected,) = llm.generate([(5, 6, 7)], params)
    for prompt in ([5, 6, 7], (5, 6, 7)):
        (output,) = llm.generate(prompt, params)
        assert output.token_ids == expected.token_ids and output.prompt_token_ids == (5, 6, 7)


def test_summary_adds_up() -> None:
    first, second = RequestMetrics(output_tokens=5), RequestMetrics(output_tokens=3)
    first.count(2, 2)
    first.count(2, 0)
    second.count(2, 1)
    summary = summarise([first, second], 4.0)
    assert [(p.verified, p.reached, p.accepted) for p in summary.acceptance] == [
        (3, 3, 2),
        (3, 2, 1),
    ]
    assert summary.acceptance[1].conditional == 0.5
    assert summary.tokens_per_step == 8 / 3
    assert summary.tokens_per_second == 2.0


def invoke(*arguments: str) -> str:
    outcome = run_program("generate", *arguments)
    assert outcome.code == 0, outcome.err
    return outcome.out


def test_generate_command_json(trained_glm: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Once upon a time"}\n{"prompt_token_ids": [5, 6, 7]}\n')
    options = ["--speculate-method", "mtp", "--max-new-tokens", "6", "--json"]
    facts = json.loads(invoke(str(trained_glm), "--prompts", str(prompts), *options))
    assert [output["prompt"] for output in facts["outputs"]] == ["Once upon a time", [5, 6, 7]]
    assert all(len(output["token_ids"]) <= 6 for output in facts["outputs"])
    assert facts["summary"]["acceptance"][0]["verified"] > 0


@pytest.mark.parametrize(("waited", "busy"), [(0.9, True), (0.1, False), (0.0, False)])
def test_generate_says_that_the_machine_is_busy(
    waited: float, busy: bool, trained_glm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what its threads waited for processors beside two seconds of computing."""
    seconds = iter([(5.0, 7.0), (7.0, 7.0 + waited)] * 2)
    monkeypatch.setattr(busy_machine, "processor_seconds", lambda: next(seconds))
    options = (str(trained_glm), "--prompt", "a b", "--max-new-tokens", "4")
    assert ("too busy to tell" in invoke(*options)) is busy
    facts = json.loads(invoke(*options, "--json"))
    assert facts["waiting_for_processors"] == pytest.approx(waited / (2 + waited))


def test_the_kernel_tells_what_threads_computed() -> None:
    before = busy_machine.processor_seconds()
    if before == (0.0, 0.0):
        pytest.skip("this kernel keeps no account")
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    assert busy_machine.processor_seconds()[0] - before[0] > 0.02


def test_generate_drafts_where_there_is_a_module(trained_glm: Path, tmp_path: Path) -> None:
    assert export(trained_glm, tmp_path / "bundle", "--quiet").code == 0
    for bundle, method in ((trained_glm, "mtp"), (tmp_path / "bundle/main", "none")):
        facts = json.loads(
            invoke(str(bundle), "--prompt", "a b", "--max-new-tokens", "6", "--json")
        )
        assert facts["speculate_method"] == method
        assert bool(facts["summary"]["acceptance"]) == (method == "mtp")


def test_generate_names_the_seeds_that_repeat_it(trained_glm: Path) -> None:
    options = [str(trained_glm), "--prompt", "a b", "--prompt", "a b", "--temperature", "1.5"]
    options += ["--max-new-tokens", "12", "--json"]
    first = json.loads(invoke(*options))["outputs"]
    seeds = [output["seed"] for output in first]
    assert seeds[1] == seeds[0] + 1
    again = json.loads(invoke(*options, "--seed", str(seeds[0])))["outputs"]
    assert [o["token_ids"] for o in again] == [o["token_ids"] for o in first]
    assert first[0]["token_ids"] != first[1]["token_ids"]


def test_generate_chat(trained_glm: Path, llm: LLM, tmp_path: Path) -> None:
    facts = json.loads(
        invoke(str(trained_glm), "--chat", "--prompt", "Tell me", "--max-new-tokens", "8", "--json")
    )
    tokens = llm.chat_prompt([{"role": "user", "content": "Tell me"}])
    (expected,) = llm.generate([tokens], SamplingParams(max_tokens=8))
    (output,) = facts["outputs"]
    assert (output["prompt"], output["text"]) == ("Tell me", expected.text)
    assert output["metrics"]["prompt_tokens"] == len(tokens)
    ids = tmp_path / "ids.jsonl"
    ids.write_text('{"prompt_token_ids": [5]}\n')
    refused = run_program("generate", trained_glm, "--chat", "--prompts", ids)
    assert refused.code == 2 and "--chat" in refused.err


def test_a_limit_of_memory_sizes_the_cache(trained_glm: Path, llm: LLM) -> None:
    loaded = load_model(trained_glm, LoadOptions())
    limits = [resident_bytes() + (size << 20) for size in (100, 300)]
    small, large = (
        LLM(trained_glm, loaded=loaded, max_memory_bytes=limit).engine.pages.pages
        for limit in limits
    )
    page_bytes = sum(
        tensor[:1].numel() * tensor.element_size() for tensor in llm.engine.cache.tensors
    )
    assert 0 < small < large < (300 << 20) / page_bytes
    with pytest.raises(MtpExportError, match="no memory for the cache"):
        LLM(trained_glm, loaded=loaded, max_memory_bytes=1 << 20)


def test_a_limit_of_a_gpu_s_memory_sizes_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what torch has allocated there, of which it may have no more than the limit."""
    gpu, bounds = torch.device("cuda", 1), []
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 600 if device == gpu else 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=4000)
    )
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda part, device: bounds.append((part, device)),
    )
    page = SimpleNamespace(tensors=(torch.zeros(2, 5),))  # 40 bytes
    model = cast(Model, SimpleNamespace(device=gpu, new_cache=lambda pages: page))
    assert cache_tokens_within(1000, gpu, [model], 16) == 9 * 16
    assert cache_tokens_within(1000, gpu, [model, model], 16) == 4 * 16
    with pytest.raises(MtpExportError, match=r"Expected more than 640 bytes\. Found 640 bytes"):
        cache_tokens_within(640, gpu, [model], 16)
    for limit in (1000, 9000):
        bound_device(gpu, limit)
    bound_device(torch.device("cpu"), 1000)
    assert bounds == [(0.25, gpu), (1.0, gpu)]


def test_a_limit_bounds_the_gpu_of_every_rank(
    trained_glm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each its own, before anything is loaded."""

    def load(*arguments: object) -> None:
        raise InterruptedError

    bounds: list[tuple[torch.device, int]] = []
    monkeypatch.setattr(llm_module, "bound_device", lambda *bound: bounds.append(bound))
    monkeypatch.setattr(llm_module, "load_model", load)
    for number in range(2):
        group = Group(Split(number, 2), torch.device("cuda", number))
        with pytest.raises(InterruptedError):
            LLM(trained_glm, device="cuda", max_memory_bytes=9, group=group)
    assert bounds == [(torch.device("cuda", number), 9) for number in range(2)]


def test_generate_command_text(trained_glm: Path) -> None:
    options = ["--speculate-method", "inference_with_reference", "--max-new-tokens", "12"]
    out = invoke(str(trained_glm), "--prompt", "a b a b a b", *options)
    assert "tokens per step (plain: 1)" in out
    sampled = ("--temperature", "1", "--seed", "41")
    out = invoke(str(trained_glm), "--prompt", "a b a b", "--prompt", "x", *options, *sampled)
    assert "[1]" in out and "[2]" in out and "41" in out


def test_generate_command_refusals(trained_glm: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": 1}\n')
    for arguments in ([], ["--prompts", str(bad)], ["--prompts", str(tmp_path / "none.jsonl")]):
        assert run_program("generate", trained_glm, *arguments).code > 1, arguments
