"""Drafters on requests of a few tokens, with a table for a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from mtp_checkpoints.errors import UnsupportedError
from mtp_runtime.acceptance.base import Draft
from mtp_runtime.cache import LayerCaches, PageAllocator
from mtp_runtime.config import EngineConfig, SpeculationConfig
from mtp_runtime.drafters import DRAFTERS
from mtp_runtime.drafters.base import Drafter, DrafterParts, Pass
from mtp_runtime.drafters.chain import Chain, extend, take_best
from mtp_runtime.drafters.known_answers import KnownAnswersDrafter
from mtp_runtime.drafters.ngram import find_last
from mtp_runtime.models.model import Model, ModelCache, States
from mtp_runtime.request import Request
from mtp_runtime.sampling import SamplingParams, SeededChoices, one_hot, probabilities_of
from runtime.table_model import Table

VOCAB = 5
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.7, top_k=3, seed=11)


def request_of(
    prompt: Sequence[int],
    output: Sequence[int] = (),
    params: SamplingParams = GREEDY,
    number: int = 0,
) -> Request:
    request = Request(number, tuple(prompt), params)
    request.commit(output, 0)
    return request


def parts_of(target: Any = None, draft: Any = None, **settings: Any) -> DrafterParts:
    config = EngineConfig(
        page_size=2,
        cache_tokens=16,
        poison_freed=settings.pop("poison_freed", False),
        speculation=SpeculationConfig(**settings),
    )
    return DrafterParts(
        target=target, pages=PageAllocator(8, 2), cache=cast(Any, None), config=config,
        draft_model=draft,
    )  # fmt: skip


def test_what_must_be_loaded_for_a_drafter() -> None:
    needs = {name: (one.needs_mtp, one.needs_draft_model) for name, one in DRAFTERS.items()}
    assert needs == {
        "none": (False, False),
        "mtp": (True, False),
        "eagle": (True, False),
        "inference_with_reference": (False, False),
        "draft_model": (False, True),
        "eagle3": (False, False),
        "parallel_heads": (False, False),
        "assistant": (False, False),
    }
    without_prefixes = {name for name, one in DRAFTERS.items() if not one.prefix_cache}
    assert without_prefixes == {"draft_model"}, "whose cache is its own"
    read = {name for name, one in DRAFTERS.items() if one.read}
    assert read == {"eagle3", "parallel_heads", "assistant"}


def test_plain_decoding_drafts_nothing() -> None:
    drafter = DRAFTERS["none"].build(parts_of())
    requests = [request_of([1]), request_of([2], number=1)]
    drafter.observe([])
    drafter.forget(requests[0])
    assert drafter.propose(requests, [3, 3]) == [Draft((), None)] * 2


@pytest.mark.parametrize(
    ("ngram", "first", "end", "at"),
    [
        ([1, 2], 0, 6, 3),
        ([1, 2], 0, 4, 3),
        ([1, 2], 0, 3, 0),
        ([1, 2], 1, 3, None),
        ([1, 2], 3, 4, 3),
        ([1, 2], 4, 6, None),
        ([1, 2, 3], 0, 6, 0),
        ([1, 2, 4], 0, 6, 3),
        ([4], 0, 5, None),
        ([4], 0, 6, 5),
        ([4, 1], 0, 6, None),
        ([1], 0, 0, None),
    ],
)
def test_the_last_place_of_an_ngram(ngram: list[int], first: int, end: int, at: int | None) -> None:
    assert find_last([1, 2, 3, 1, 2, 4], ngram, first, end) == at


@pytest.mark.parametrize(
    ("prompt", "output", "count", "drafts"),
    [
        ((5, 6, 7, 8), (5, 6), 2, (7, 8)),
        ((5, 6, 7, 8, 5, 6), (), 3, (7, 8, 5)),
        ((5, 6, 7, 8, 5, 6), (), 0, ()),
        ((5, 6, 7, 8, 5, 6), (), 1, (7,)),
        ((1, 2, 3), (1, 2, 4, 1, 2), 1, (3,)),  # the prompt comes first
        ((9,), (1, 2, 3, 1, 2), 2, (3, 1)),
        ((1, 5, 2, 5, 3, 5), (), 1, (3,)),  # the last place
        ((1, 2, 3, 9, 2, 3, 8), (1, 2, 3), 1, (9,)),  # the longest n-gram
        ((4, 1, 2, 3, 9, 1, 2, 3, 8), (4, 1, 2, 3), 1, (8,)),  # at most three tokens are looked up
        ((1, 2), (3, 4), 2, ()),
        ((7,), (), 2, ()),
        ((7, 7), (), 2, (7,)),
        ((1, 2), (3, 2), 2, (3, 2)),  # from the prompt's end into the output
        ((9,), (9, 9), 3, (9,)),
    ],
)
def test_lookup_drafts_what_followed(
    prompt: tuple[int, ...], output: tuple[int, ...], count: int, drafts: tuple[int, ...]
) -> None:
    drafter = DRAFTERS["inference_with_reference"].build(parts_of())
    other = request_of((3, 3, 4, 3), number=1)
    drafter.observe([])
    drafter.forget(other)
    found = drafter.propose([request_of(prompt, output), other], [count, 1])
    assert found == [Draft(drafts), Draft((4,))]


def test_lookup_of_one_token_finds_its_last_place() -> None:
    prompt = (1, 2, 9, 3, 2, 8, 1, 2)
    build = DRAFTERS["inference_with_reference"].build
    drafts = [
        build(parts_of(max_ngram_size=size)).propose([request_of(prompt)], [1])[0].tokens
        for size in (1, 2)
    ]
    assert drafts == [(8,), (9,)]


def test_every_request_has_its_count() -> None:
    answers = {(1,): (1, 2)}
    known = KnownAnswersDrafter(answers, VOCAB)
    drafters: list[Drafter] = [known, DRAFTERS["inference_with_reference"].build(parts_of())]
    for drafter in drafters:
        with pytest.raises(ValueError, match="shorter"):
            drafter.propose([request_of([1])], [])


@pytest.mark.parametrize(
    ("options", "output", "count", "drafts"),
    [
        ({}, (), 3, (4, 1, 2)),
        ({}, (4,), 2, (1, 2)),
        ({}, (4, 1), 9, (2, 4)),
        ({}, (4,), 0, ()),
        ({"rate": 0.0}, (), 4, (0, 2, 3, 0)),  # the next id of each, around the vocabulary
        ({"right_for": 2}, (), 4, (4, 1, 3, 0)),
        ({"right_for": 0}, (), 2, (0, 2)),
    ],
)
def test_known_answers_are_right_and_wrong_where_asked(
    options: dict[str, Any], output: tuple[int, ...], count: int, drafts: tuple[int, ...]
) -> None:
    drafter = KnownAnswersDrafter({(3, 3): (4, 1, 2, 4)}, VOCAB, **options)
    request = request_of((3, 3), output)
    drafter.observe([])
    drafter.forget(request)
    assert drafter.propose([request], [count]) == [Draft(drafts)]


def test_known_answers_are_right_at_their_rate() -> None:
    answer = (2,) * 1000

    def drafts(seed: int, rate: float = 0.25) -> tuple[int, ...]:
        drafter = KnownAnswersDrafter({(3,): answer}, VOCAB, rate=rate, seed=seed)
        return drafter.propose([request_of((3,))], [1000])[0].tokens

    assert drafts(0) == drafts(0) != drafts(1)
    assert set(drafts(0)) == {2, 3}
    assert 200 < drafts(0).count(2) < 300
    default = KnownAnswersDrafter({(3,): answer}, VOCAB, rate=0.25)
    assert default.propose([request_of((3,))], [1000])[0].tokens == drafts(0)


LOGITS = torch.tensor([[0.0, 3.0, 1.0, 3.0, 2.0], [5.0, 0.0, 4.5, 4.0, 4.5], [1.0, 1, 1, 1, 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sample", [True, False])
def test_a_chain_grows_from_its_row(sample: bool, dtype: torch.dtype) -> None:
    settings = SpeculationConfig(draft_temperature=() if sample else (0.0,))
    params = [GREEDY, SAMPLED, GREEDY]
    chains = [Chain(request_of([1], params=own), 2) for own in params]
    for _ in range(2):
        extend(chains, LOGITS.to(dtype), settings)
    assert [chain.tokens for chain in chains if chain.request.params.greedy] == [[1, 1], [4, 4]]
    for chain in chains[::2]:
        assert chain.draft() == Draft(tuple(chain.tokens), None)
    drawn = chains[1].draft()
    assert drawn.draft_probs is not None
    expected = (
        probabilities_of(LOGITS[1].numpy(), SAMPLED) if sample else one_hot(np.array(0), VOCAB)
    )
    assert drawn.draft_probs.tolist() == [expected.tolist()] * 2
    choices = SeededChoices(11)
    tokens = [choices.draw(expected) for _ in range(2)] if sample else [0, 0]
    assert drawn.tokens == tuple(tokens)


def test_a_draft_has_the_temperature_of_its_position() -> None:
    settings = SpeculationConfig(draft_temperature=(0.5, 2.0))
    chain = Chain(request_of([1], params=SAMPLED), 3)
    for _ in range(3):
        extend([chain], LOGITS[1:2], settings)
    expected = [
        probabilities_of(LOGITS[1].numpy(), replace(SAMPLED, temperature=t)).tolist()
        for t in (0.5, 2.0, 2.0)
    ]
    drawn = chain.draft().draft_probs
    assert drawn is not None
    assert drawn.tolist() == expected


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_a_chain_ends_before_an_uncertain_draft(params: SamplingParams) -> None:
    sharp, flat = torch.tensor([[9.0, 0, 0, 0, 0]]), torch.zeros(1, 5)
    chain = Chain(request_of([1], params=params), 3)
    for logits in (sharp, flat):
        assert not chain.is_whole
        extend([chain], logits, SpeculationConfig(draft_stop_entropy=0.3))
    assert chain.is_whole
    assert chain.tokens == [0]
    assert len(chain.distributions) == (0 if params.greedy else 1)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_a_chain_goes_on_at_the_entropy_that_ends_it(params: SamplingParams) -> None:
    """That of the request's own distribution, of a greedy one's at temperature 1."""
    row = LOGITS[1].numpy()
    own = replace(params, temperature=1.0) if params.greedy else params
    distribution = probabilities_of(row, own)
    likely = distribution[distribution > 0.0]
    entropy = float(-(likely * np.log(likely)).sum())
    for limit, drafts in ((entropy, 1), (np.nextafter(entropy, 0.0), 0)):
        chain = Chain(request_of([1], params=params), 3)
        extend([chain], LOGITS[1:2], SpeculationConfig(draft_stop_entropy=float(limit)))
        assert (len(chain.tokens), chain.is_whole) == (drafts, not drafts)


def test_drafts_come_with_their_log_probabilities() -> None:
    """Those at temperature 1, of drafts that are drawn too; a chain that has ended gets none."""
    settings = SpeculationConfig(draft_logprobs=True, draft_stop_entropy=1.0)
    rows, flat = torch.tensor([[4.0, 0, 1, 0, 2], [0.0, 5, 0, 1, 0]]), torch.zeros(1, 5)
    chains = [Chain(request_of([1], params=own), 2) for own in (GREEDY, SAMPLED, GREEDY)]
    assert not take_best(chains[:1], SpeculationConfig(draft_logprobs=True))
    extend(chains, torch.cat([rows[:1], rows[:1], flat]), settings)
    extend(chains[:2], rows[[1, 1]], settings)
    for chain in chains[:2]:
        expected = [float(rows.log_softmax(-1)[n, token]) for n, token in enumerate(chain.tokens)]
        assert len(expected) == 2
        assert chain.draft().logprobs == pytest.approx(expected)
    assert (chains[2].tokens, chains[2].draft().logprobs) == ([], ())


def test_an_empty_chain_is_an_empty_draft() -> None:
    assert Chain(request_of([1]), 0).draft() == Draft((), None)


class Recorded(Table):
    """A table that notes the rows it computes, as (position, token, slot)."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        super().__init__(torch.randn(VOCAB, VOCAB, generator=generator))
        self.rows: list[list[tuple[int, int, int]]] = []
        self.kept = torch.zeros(1)

    def new_cache(self, pages: Any) -> ModelCache:
        self.pages = pages
        self.kept = torch.zeros(pages.pages, pages.page_size)
        return ModelCache(LayerCaches(((self.kept,),)), ())

    def __call__(self, tokens: torch.Tensor, cache: Any, layout: Any) -> Any:
        assert layout.kv_lens.tolist() == [
            int(layout.positions[end - 1]) + 1 for end in layout.cu_q.tolist()[1:]
        ]
        rows = zip(layout.positions.tolist(), tokens.tolist(), layout.slots.tolist(), strict=True)
        self.rows.append(list(rows))
        hidden = self.embedding[tokens]
        return States(-hidden, hidden)

    def best(self, token: int) -> int:
        return int(self.table[token].argmax())


def draft_model(**settings: Any) -> tuple[Recorded, Drafter]:
    model = Recorded()
    target = Recorded()
    build = DRAFTERS["draft_model"].build
    return model, build(parts_of(cast(Model, target), cast(Model, model), **settings))


def test_a_draft_model_computes_what_it_has_not_computed() -> None:
    model, drafter = draft_model()
    first, second = request_of([1, 2, 3]), request_of([4], number=1)
    requests = [first, second, request_of([0], number=2)]
    drafts = drafter.propose(requests, [2, 1, 0])
    best = model.best
    assert [draft.tokens for draft in drafts] == [(best(3), best(best(3))), (best(4),), ()]
    assert model.rows == [
        [(0, 1, 0), (1, 2, 1), (2, 3, 2), (0, 4, 4)],
        [(3, best(3), 3)],
    ]
    # the first draft is accepted, and the second is not: its entry is computed anew
    first.commit([best(3), 0, 1], 1)
    drafter.observe([Pass(first, 3, torch.zeros(2, VOCAB))])
    model.rows.clear()
    drafter.propose([first], [1])
    assert [row[:2] for row in model.rows[0]] == [(4, 0), (5, 1)]


def test_a_draft_model_forgets_the_tokens_of_rejected_drafts() -> None:
    model, drafter = draft_model()
    request, stranger = request_of([1, 2]), request_of([3], number=9)
    drafter.propose([request], [3])
    assert model.pages.free_pages == 8 - 2, "two tokens, and two of the three drafts"
    request.commit([4], 0)
    drafter.observe([Pass(stranger, 0, torch.zeros(1, VOCAB)), Pass(request, 1, torch.zeros(1, 5))])
    assert model.pages.free_pages == 8 - 1
    model.rows.clear()
    drafter.propose([request], [1])
    assert [row[:2] for row in model.rows[0]] == [(2, 4)]
    drafter.forget(stranger)
    assert model.pages.free_pages == 8 - 2
    drafter.forget(request)
    assert model.pages.free_pages == 8
    drafter.forget(request)
    model.rows.clear()
    drafter.propose([request], [1])
    assert [row[0] for row in model.rows[0]] == [0, 1, 2]


@pytest.mark.parametrize("poison_freed", [True, False])
def test_a_draft_model_s_own_cache_is_poisoned_where_asked(poison_freed: bool) -> None:
    model, drafter = draft_model(poison_freed=poison_freed)
    assert bool(model.kept.isnan().all()) is poison_freed
    assert (model.pages.pages, model.pages.page_size) == (8, 2)


@pytest.mark.parametrize("temperature", [(), (0.0,)])
def test_a_draft_model_samples_where_asked(temperature: tuple[float, ...]) -> None:
    model, drafter = draft_model(draft_temperature=temperature)
    (draft,) = drafter.propose([request_of([2], params=SAMPLED)], [1])
    assert draft.draft_probs is not None
    certain = one_hot(model.best(2), VOCAB)
    own = probabilities_of(model.table[2].numpy(), SAMPLED)
    assert draft.draft_probs[0].tolist() == (certain if temperature else own).tolist()


def test_a_draft_model_must_be_there_and_share_the_vocabulary() -> None:
    build = DRAFTERS["draft_model"].build
    with pytest.raises(UnsupportedError, match="needs a second checkpoint.*Give one"):
        build(parts_of(Recorded()))
    other = Recorded()
    other.config = SimpleNamespace(vocab=VOCAB + 1)
    with pytest.raises(UnsupportedError, match=r"another vocabulary.*Expected 5\. Found 6"):
        build(parts_of(Recorded(), other))


def test_a_model_without_mtp_module_is_refused_by_its_layer() -> None:
    with pytest.raises(UnsupportedError, match=r"without an MTP module.*layer 1.*Use --spec"):
        DRAFTERS["mtp"].build(parts_of(Recorded()))
