"""Greedy speculative decoding equals greedy plain decoding, token by token, on compiled kernels:
every drafter, k 1 to 5, batch 1, 7 and 128, page boundaries, mixed lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import nightly_but
from mtp_runtime.drafters import DRAFTERS
from mtp_runtime.drafters.base import Drafter, DrafterParts, TargetDraft
from mtp_runtime.drafters.eagle3 import read_eagle3
from mtp_runtime.drafters.known_answers import KnownAnswersDrafter
from mtp_runtime.drafters.parallel_heads import read_parallel_heads
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.models.model import Model
from mtp_runtime.sampling import SamplingParams
from runtime.drafts import write_eagle3, write_layer_heads
from runtime.harness import Prompt, Run, load, prompts_of, run

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
Build = Callable[[DrafterParts], Drafter]


@dataclass
class Plain:
    """A model, and plain decoding of prompts, each decoded once; alone, or with the others."""

    model: Model
    params: SamplingParams = PARAMS
    alone: bool = True
    answers: dict[Prompt, list[int]] = field(default_factory=dict)
    drafts: dict[str, TargetDraft] = field(default_factory=dict)

    def outputs(self, prompts: list[Prompt]) -> list[list[int]]:
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self.answers]
        for batch in [[prompt] for prompt in new] if self.alone else [new] if new else []:
            outputs = run(self.model, batch, self.params).outputs
            self.answers |= dict(zip(batch, outputs, strict=True))
        return [self.answers[prompt] for prompt in prompts]

    def knowing(self, rate: float = 1.0, right_for: int | None = None) -> Build:
        vocab = self.model.config.vocab
        return lambda parts: KnownAnswersDrafter(self.answers, vocab, rate, right_for)


# An assistant has a target of its own: test_assistant.py.
OF_THIS_TARGET = [name for name in DRAFTERS if name != "assistant"]


@pytest.fixture(scope="module")
def small_plain(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """With random drafts for every method that reads one."""
    folder, loaded = tmp_path_factory.mktemp("drafts"), load_model(small, LoadOptions())
    drafts = {
        "eagle3": read_eagle3(write_eagle3(folder / "eagle3"), loaded),
        "parallel_heads": read_parallel_heads(write_layer_heads(folder / "heads"), loaded),
    }
    assert drafts.keys() == {name for name in OF_THIS_TARGET if DRAFTERS[name].read}
    return Plain(loaded.model, drafts=drafts)


@pytest.fixture(scope="module")
def trained_plain(trained_model: Model) -> Plain:
    return Plain(trained_model, SamplingParams(max_tokens=8, ignore_eos=True), alone=False)


def repeating(prompts: list[Prompt]) -> list[Prompt]:
    """Prompts in which n-grams come again, for the lookup to find something."""
    return [prompt * 2 if len(prompt) > 1 else prompt for prompt in prompts]


KNOWN = {
    "always right": {},
    "never right": {"rate": 0.0},
    "right for 2": {"right_for": 2},
    "right at 0.7": {"rate": 0.7},
}


def speculate(plain: Plain, prompts: list[Prompt], name: str, k: int, **settings: int) -> Run:
    expected = plain.outputs(prompts)
    if name in KNOWN:
        found = run(
            plain.model, prompts, plain.params, k=k, build=plain.knowing(**KNOWN[name]), **settings
        )
    else:
        draft = plain.drafts.get(name)
        found = run(
            plain.model.tapped(draft.taps if draft else ()),
            prompts,
            plain.params,
            method=name,
            build=draft.build if draft else None,
            k=k,
            draft_model=plain.model,
            **settings,
        )
    assert found.outputs == expected
    return found


# Every drafter with every k, in one of both batches.
@pytest.mark.parametrize(
    ("name", "k", "batch"),
    nightly_but(
        [(name, k, 1 + 6 * (k % 2)) for name in (*OF_THIS_TARGET, *KNOWN) for k in range(1, 6)],
        product((*OF_THIS_TARGET, *KNOWN), range(1, 6), (1, 7)),
    ),
)
def test_small_model(small_plain: Plain, name: str, k: int, batch: int) -> None:
    lengths = [1, 15, 16, 17, 5, 31, 33][:batch] if batch > 1 else [13]
    speculate(small_plain, repeating(prompts_of(lengths, 96)), name, k)


@pytest.mark.parametrize("length", range(10, 36))
def test_every_offset_to_a_page_boundary(small_plain: Plain, length: int) -> None:
    speculate(small_plain, prompts_of([length], 96, seed=length), "right at 0.7", 4)


@pytest.mark.parametrize("name", ["mtp", "right at 0.7"])
def test_small_model_batch_128(small_plain: Plain, name: str) -> None:
    lengths = [1 + number % 37 for number in range(128)]
    speculate(small_plain, prompts_of(lengths, 96), name, 3)


# The small model has every drafter and k with every batch.
@pytest.mark.parametrize(
    ("name", "batch", "k"),
    nightly_but(
        [
            *(("mtp", 1, 2), ("mtp", 7, 1), ("mtp", 7, 5), ("inference_with_reference", 7, 3)),
            *(("draft_model", 7, 3), ("always right", 1, 2), ("always right", 7, 5)),
        ],
        product(
            ["mtp", "inference_with_reference", "draft_model", "always right"], (1, 7), range(1, 6)
        ),
    ),
)
def test_trained_model(trained_plain: Plain, name: str, batch: int, k: int) -> None:
    lengths = [9] if batch == 1 else [5, 15, 16, 1, 9, 30, 12]
    found = speculate(trained_plain, repeating(prompts_of(lengths, 2048)), name, k)
    if name == "mtp":
        assert found.counts("drafted", k - 1) > 0
    if name == "always right":
        assert [found.counts("accepted", j) for j in range(k)] == [
            found.counts("drafted", j) for j in range(k)
        ]


# The small model has this batch with every push.
@pytest.mark.nightly
def test_trained_model_batch_128(trained_plain: Plain) -> None:
    """Plain decoding of some alone, of all together, and speculative decoding of all."""
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    prompts = prompts_of([1 + number % 9 for number in range(128)], 2048)
    together = Plain(trained_plain.model, params, alone=False)
    alone = Plain(trained_plain.model, params)
    some = prompts[::48]
    together.outputs(prompts)
    assert alone.outputs(some) == together.outputs(some), "plain decoding depends on its batch"
    speculate(together, prompts, "mtp", 3)


@pytest.mark.parametrize(
    "lengths",
    [
        {"adaptive": True},
        {"k_schedule": ((1, 5), (3, 2), (5, 0), (7, 1))},
        {"draft_stop_entropy": 1.0},
        {"adaptive": True, "draft_stop_entropy": 2.0, "draft_temperature": (0.5,)},
    ],
    ids=["adaptive", "schedule", "entropy", "all"],
)
def test_any_number_of_drafts(trained_plain: Plain, lengths: dict[str, Any]) -> None:
    """Requests of different ends, so that the batch shrinks through the schedule."""
    prompts = prompts_of([5, 15, 16, 1, 9, 30, 12], 2048)
    expected = trained_plain.outputs(prompts)
    each = [replace(trained_plain.params, max_tokens=2 + number) for number in range(7)]
    found = run(trained_plain.model, prompts, each, method="mtp", k=5, lengths=lengths)
    cut = [tokens[: own.max_tokens] for tokens, own in zip(expected, each, strict=True)]
    assert found.outputs == cut
    drafted = [found.counts("drafted", position) for position in range(5)]
    assert drafted[0] > drafted[-1], drafted


def test_chunked_prefill_preemption_and_small_batches(small_plain: Plain) -> None:
    """Seven requests in a cache for three: they take turns, lose their pages, and lose nothing."""
    prompts = prompts_of([40, 3, 25, 60, 17, 33, 8], 96)
    found = speculate(
        small_plain,
        prompts,
        "mtp",
        3,
        cache_tokens=16 * 9,
        prefill_chunk=7,
        max_step_tokens=20,
        max_batch_size=5,
    )
    assert sum(request.metrics.preemptions for request in found.requests) > 0


def test_torch_agrees_on_these_prompts(trained: Path, trained_plain: Plain) -> None:
    """Nothing but near-ties can differ; these prompts have none."""
    prompts = prompts_of([5, 15, 16], 2048)
    fast = load(trained, compiled=False)
    found = run(fast, prompts, trained_plain.params, method="mtp", k=2)
    assert found.outputs == trained_plain.outputs(prompts)


@pytest.mark.parametrize("rows", [1, 2, 31, 32, 33, 70])
def test_a_rows_bits_do_not_depend_on_its_batch(small: Path, rows: int) -> None:
    """Each token alone and in a chunk: equality of tokens rests on this."""
    from runtime.harness import Walk

    model = load(small)
    (tokens,) = prompts_of([70], 96)
    whole = Walk(model).feed(tokens)
    walk = Walk(model)
    parts = [walk.feed(tokens[at : at + rows]) for at in range(0, 70, rows)]
    for index, tensor in enumerate(whole):
        assert torch.equal(torch.cat([part[index] for part in parts]), tensor)
