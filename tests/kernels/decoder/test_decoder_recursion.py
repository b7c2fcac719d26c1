"""Greedy drafts by recursion: every backend against the reference, tokens and cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from decoder_cases import BACKENDS, Case, check, grouped, make_backend, make_decoder

from mtp_kernels import decoder
from mtp_kernels.cpu.team import Team
from mtp_kernels.decoder import Recursion

VOCAB, HIDDEN, PAGE = 70, 48, 16
OTHERS = sorted(decoder.BACKENDS)
LATENT = Case((1,), (1,), layers="m")
TAKEN = Case((1,), (1,), layers="t")  # an EAGLE-3 draft's layer
STARTS, COUNTS = [20, 3, 15, 0, 63, 14], [5, 4, 4, 2, 1, 1]


@dataclass(frozen=True)
class Drafting:
    """A recursion over requests with earlier tokens up to STARTS, poison elsewhere."""

    recursion: Recursion
    x: torch.Tensor
    page_table: torch.Tensor
    kv_cache: torch.Tensor

    def drafts(
        self, starts: Sequence[int] = STARTS, counts: Sequence[int] = COUNTS
    ) -> list[list[int]]:
        return self.recursion(self.x.clone(), starts, counts, self.page_table, self.kv_cache)


def prepare(
    backend: str,
    recycles_normed: bool = False,
    equal_tokens: bool = False,
    dtype: torch.dtype = torch.float32,
    case: Case = LATENT,
    **changes: Any,
) -> Drafting:
    made = make_backend(backend, dtype=dtype)
    given = case.layers == "t"
    generator = torch.Generator().manual_seed(5)

    def norm() -> Any:
        return made.norm(1 + 0.3 * torch.randn(HIDDEN, generator=generator), 1e-6)

    tokens = torch.arange(1, VOCAB, 2) if given else torch.arange(VOCAB)
    head = torch.randn(len(tokens), HIDDEN, generator=generator)
    if equal_tokens:  # token t and t + 35 are equally good
        head = head[: VOCAB // 2].repeat(2, 1)
    projection = made.projection(torch.randn(HIDDEN, 2 * HIDDEN, generator=generator) * 0.1)
    own = {name: changes.pop(name) for name in ("projection", "normed_residual") if name in changes}
    parts = decoder.RecursionParts(
        decoder=make_decoder(case, made),
        embedding=torch.randn(VOCAB, HIDDEN, generator=generator),
        inputs=replace(decoder.ModuleInputs(norm(), norm(), None if given else projection), **own),
        head_norm=norm(),
        head=made.projection(head),
        tokens=tokens,
        recycles_normed=recycles_normed,
    )
    pages = [-(-(start + count) // PAGE) for start, count in zip(STARTS, COUNTS, strict=True)]
    order = torch.randperm(sum(pages) + 2, generator=generator).to(torch.int32)
    table = torch.full((len(pages), max(pages) + 1), 2**31 - 1, dtype=torch.int32)
    width = case.config.attention.slot
    cache = torch.full((1, len(order) * PAGE, width), torch.nan)
    for request, count in enumerate(pages):
        first = sum(pages[:request])
        table[request, :count] = order[first : first + count]
        for token in range(STARTS[request] + 1):
            slot = int(table[request, token // PAGE]) * PAGE + token % PAGE
            cache[:, slot] = torch.randn(width, generator=generator)
    return Drafting(
        recursion=made.recursion(replace(parts, **changes)),
        x=torch.randn(len(STARTS), HIDDEN, generator=generator),
        page_table=table,
        kv_cache=cache.view(1, len(order), PAGE, width),
    )


EMBEDDING = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(8))
CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "embedding in bf16": (LATENT, {"embedding": EMBEDDING.bfloat16()}),
    "latent": (LATENT, {}),
    "grouped": (grouped(LATENT), {}),
    "rows given": (TAKEN, {}),
    "rows given, normed residual": (TAKEN, {"normed_residual": True}),
    "rows given, grouped": (grouped(TAKEN), {}),
}


@pytest.mark.parametrize("backend", OTHERS)
@pytest.mark.parametrize("recycles_normed", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_drafts_and_cache(
    monkeypatch: pytest.MonkeyPatch, backend: str, recycles_normed: bool, threads: int, name: str
) -> None:
    monkeypatch.setattr(Team, "threads_for", staticmethod(lambda multiplications: threads))
    case, changes = CASES[name]
    expected, found = (
        prepare(one, recycles_normed, case=case, **changes) for one in ("reference", backend)
    )
    assert found.drafts() == expected.drafts()
    written = expected.kv_cache.isfinite()
    assert torch.equal(found.kv_cache.isfinite(), written)
    rows = written.all(dim=-1)
    check(found.kv_cache[rows], expected.kv_cache[rows])


def test_recycling_changes_the_drafts() -> None:
    assert prepare("reference", False).drafts() != prepare("reference", True).drafts()
    given = prepare("reference", case=TAKEN).drafts()
    assert given != prepare("reference", True, case=TAKEN).drafts()
    assert given != prepare("reference", case=TAKEN, normed_residual=True).drafts()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_each_request_by_itself(backend: str, name: str) -> None:
    """Tokens, and in compiled kernels every bit of the cache."""
    case, changes = CASES[name]
    whole = prepare(backend, case=case, **changes)
    together = whole.drafts()
    for request, expected in enumerate(together):
        alone = prepare(backend, case=case, **changes)
        drafts = alone.recursion(
            alone.x[request : request + 1].clone(),
            STARTS[request : request + 1],
            COUNTS[request : request + 1],
            alone.page_table[request : request + 1],
            alone.kv_cache,
        )
        assert drafts == [expected]
        if backend != "reference":
            written = alone.kv_cache.isfinite()
            assert torch.equal(alone.kv_cache[written], whole.kv_cache[written])


@pytest.mark.parametrize("backend", OTHERS)  # a matrix library may tell equal columns apart
def test_the_lowest_of_equal_tokens_is_drafted(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setattr(Team, "threads_for", staticmethod(lambda multiplications: 3))
    drafts = prepare(backend, equal_tokens=True).drafts()
    assert max(max(row) for row in drafts) < VOCAB // 2


@pytest.mark.parametrize("name", CASES)
def test_threads_do_not_change_bits(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    case, changes = CASES[name]
    found = []
    for threads in (1, 2, 3, 5):
        monkeypatch.setattr(Team, "threads_for", staticmethod(lambda _, count=threads: count))
        own = prepare("compiled_cpu", case=case, **changes)
        found.append((own.drafts(), own.kv_cache.view(torch.int32)))
    for drafts, cache in found[1:]:
        assert drafts == found[0][0]
        assert torch.equal(cache, found[0][1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        (LATENT, {"projection": None}, "given rows of 96 entries, found none"),
        (TAKEN, {"projection": "one"}, "given rows of no entries, found 96"),
        (TAKEN, {"tokens": torch.arange(36, 71)}, "tokens: expected 0 to 69, found 36 to 70"),
        (TAKEN, {"tokens": torch.zeros(5, 7).long()}, r"tokens: expected shape \[n\]"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    backend: str, case: Case, changes: dict[str, Any], message: str
) -> None:
    made = make_backend(backend)
    if changes.get("projection") is not None:
        changes = {"projection": made.projection(torch.zeros(HIDDEN, 2 * HIDDEN))}
    with pytest.raises(ValueError, match=message):
        prepare(backend, case=case, **changes)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"counts": [5, 4, 4, 2, 1, 0]}, r"counts: expected at least 1 each, not rising, found"),
        ({"counts": [1, 4, 4, 2, 1, 1]}, r"counts: expected at least 1 each, not rising, found"),
        ({"counts": [5]}, r"expected a start and a count for each of 6 rows, .* found 6 and 1"),
        ({"starts": [-1, 3, 15, 0, 63, 14]}, r"starts: expected 0 to .*, found -1 to 63"),
        ({"starts": [90, 3, 15, 0, 63, 14]}, r"kv_lens: expected 0 to 80 tokens, found \[95"),
        ({"starts": [40, 3, 15, 0, 63, 14]}, r"page_table: expected page ids .* at \[0, 2\]"),
    ],
)
def test_wrong_arguments_are_refused(backend: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(backend).drafts(**change)
