"""OpenAI's own client, unchanged, against the server."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from mtp_runtime import LLM, SamplingParams
from serve.running import Running

PROMPT = "def read("
MESSAGES = [{"role": "user", "content": "Tell me a story"}]


@pytest.fixture(scope="module")
def api(served: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_completions_are_those_of_the_runtime(api: openai.OpenAI, plain: LLM) -> None:
    (expected,) = plain.generate(PROMPT, SamplingParams(max_tokens=24))
    found = api.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, temperature=0)
    (choice,) = found.choices
    assert choice.text == expected.text
    assert choice.finish_reason == expected.finish_reason
    assert found.usage is not None
    assert found.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert found.usage.completion_tokens == len(expected.token_ids)
    ids = list(expected.prompt_token_ids)
    by_ids = api.completions.create(model="tiny", prompt=ids, max_tokens=24, temperature=0)
    assert by_ids.choices[0].text == expected.text


def test_a_chat_is_the_template_s_text(api: openai.OpenAI, plain: LLM) -> None:
    tokens = plain.chat_prompt(MESSAGES)
    (expected,) = plain.generate([tokens], SamplingParams(max_tokens=24))
    found = api.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=24, temperature=0
    )
    assert found.choices[0].message.content == expected.text
    assert found.choices[0].message.role == "assistant"
    assert found.usage is not None and found.usage.prompt_tokens == len(tokens)
    parts = [{"role": "user", "content": [{"type": "text", "text": "Tell me a story"}]}]
    again = api.chat.completions.create(model="tiny", messages=parts, max_tokens=24, temperature=0)
    assert again.choices[0].message.content == expected.text
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == (len(tokens) - 1) // 16 * 16
    sent_back = [*MESSAGES, found.choices[0].message.model_dump(), *MESSAGES]
    nulls = dict.fromkeys(("temperature", "n", "top_p", "stop", "seed", "tools", "logit_bias"))
    later = api.chat.completions.create(model="tiny", messages=sent_back, max_tokens=2, **nulls)
    assert later.choices[0].message.content is not None


def test_streams_carry_the_same_text_and_the_usage(api: openai.OpenAI) -> None:
    options = {"model": "tiny", "max_tokens": 24, "temperature": 0}
    whole = api.completions.create(prompt=PROMPT, **options)
    usage = {"include_usage": True}
    chunks = list(
        api.completions.create(prompt=PROMPT, stream=True, stream_options=usage, **options)
    )
    assert "".join(c.choices[0].text for c in chunks[:-1]) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1
    spoken = api.chat.completions.create(messages=MESSAGES, **options)
    pieces = list(api.chat.completions.create(messages=MESSAGES, stream=True, **options))
    assert pieces[0].choices[0].delta.role == "assistant"
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == spoken.choices[0].message.content
    assert all(piece.usage is None for piece in pieces)


def test_choices_have_seeds_that_repeat_them(api: openai.OpenAI) -> None:
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 16, "temperature": 1.2}
    found = api.completions.create(n=3, seed=7, **options)
    texts = [choice.text for choice in found.choices]
    assert len(set(texts)) == 3
    assert [choice.model_extra["seed"] for choice in found.choices] == [7, 8, 9]
    assert [c.text for c in api.completions.create(n=3, seed=7, **options).choices] == texts
    (second,) = api.completions.create(seed=8, **options).choices
    assert second.text == texts[1]
    (first, other) = (api.completions.create(**options).choices[0] for _ in range(2))
    assert first.model_extra["seed"] != other.model_extra["seed"]
    again = api.completions.create(seed=first.model_extra["seed"], **options)
    assert again.choices[0].text == first.text
    streamed: dict[int, str] = {}
    for chunk in api.completions.create(n=3, seed=7, stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + choice.text
    assert [streamed[index] for index in range(3)] == texts


def test_logprobs_of_both_forms(api: openai.OpenAI, plain: LLM) -> None:
    params = SamplingParams(max_tokens=8, logprobs=2, prompt_logprobs=2)
    (expected,) = plain.generate(PROMPT, params)
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    found = api.completions.create(logprobs=2, echo=True, **options).choices[0]
    assert found.logprobs is not None and found.text == PROMPT + expected.text
    own = [one.logprob for one in (*expected.prompt_logprobs, *expected.logprobs)]
    assert found.logprobs.token_logprobs is not None
    assert found.logprobs.token_logprobs[0] is None
    assert found.logprobs.token_logprobs[1:] == pytest.approx(own)
    assert found.logprobs.text_offset is not None and found.logprobs.tokens is not None
    assert len(found.logprobs.text_offset) == len(found.logprobs.tokens) == len(own) + 1
    streamed = list(api.completions.create(logprobs=2, echo=True, stream=True, **options))
    logprobs = [c.choices[0].logprobs for c in streamed]
    assert sum((one.token_logprobs for one in logprobs), []) == found.logprobs.token_logprobs
    assert sum((one.text_offset for one in logprobs), []) == found.logprobs.text_offset
    spoken = api.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=8, logprobs=True, top_logprobs=2, temperature=0
    )
    assert spoken.choices[0].logprobs is not None
    content = spoken.choices[0].logprobs.content
    assert content is not None and len(content) == 8
    assert all(one.logprob == one.top_logprobs[0].logprob for one in content), "greedy"
    assert all(len(one.top_logprobs) == 2 and one.bytes is not None for one in content)


def test_ends(api: openai.OpenAI, plain: LLM) -> None:
    (whole,) = plain.generate(PROMPT, SamplingParams(max_tokens=24, ignore_eos=True))
    stop = whole.text[6:9]
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    found = api.completions.create(stop=[stop], **options).choices[0]
    assert found.text == whole.text[: whole.text.find(stop)]
    assert (found.finish_reason, found.model_extra["stop_reason"]) == ("stop", stop)
    end = whole.token_ids[3]
    more = {"stop_token_ids": [end], "ignore_eos": True}
    found = api.completions.create(extra_body=more, **options).choices[0]
    assert (found.finish_reason, found.model_extra["stop_reason"]) == ("stop", end)
    found_whole = api.completions.create(extra_body=more | {"min_tokens": 10}, **options)
    assert found_whole.usage is not None and found_whole.usage.completion_tokens > 10
    several = api.completions.create(model="tiny", prompt=["a b", "c d"], max_tokens=4)
    assert [choice.index for choice in several.choices] == [0, 1]


def test_models_and_refusals(api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == ["tiny"]
    assert api.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="no model"):
        api.completions.create(model="gpt", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        api.completions.create(model="tiny", prompt=PROMPT, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="positions"):
        api.completions.create(model="tiny", prompt=PROMPT, max_tokens=1_000_000)
    with pytest.raises(openai.BadRequestError, match="tools"):
        api.chat.completions.create(model="tiny", messages=MESSAGES, tools=[])
