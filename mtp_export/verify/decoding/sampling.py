"""Check `sampling`: sampling with drafts follows the target's distribution: enumerated exactly over
every decision on a tiny vocabulary, and by a chi-square test on the real model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from mtp_export.verify.check import Item, failed, judged, not_tested, passed
from mtp_export.verify.context import Context
from mtp_export.verify.decoding.table_model import (
    build_of,
    distance,
    engine_of,
    output_distribution,
    tables,
    target_distribution,
)
from mtp_export.verify.diagnosis.causes import decoding as causes
from mtp_export.verify.evidence.corpus import Corpus
from mtp_export.verify.evidence.decode import decode
from mtp_export.verify.evidence.pass_through import PassThroughDrafter
from mtp_export.verify.evidence.prompts import Prompt
from mtp_export.verify.evidence.statistics import critical_chi_square
from mtp_runtime.acceptance.base import Draft
from mtp_runtime.config import NO_DRAFTS
from mtp_runtime.drafters import DRAFTERS
from mtp_runtime.drafters.base import Drafter, DrafterParts
from mtp_runtime.request import Request
from mtp_runtime.sampling import Probabilities, SamplingParams, probabilities_of
from mtp_runtime.teacher_forcing import Text, Texts, target_states

# Beyond rounding: sums of a few hundred products of float64.
LARGEST_DISTANCE = 1e-9
ALPHA = 1e-6
BATCH = 64
FEWEST_EXPECTED = 5
_TABLES_SEED = 3
_SETTINGS = {
    "temperature 1": SamplingParams(temperature=1.0, max_tokens=3),
    "top_k 2": SamplingParams(temperature=0.6, top_k=2, max_tokens=3),
    "top_p 0.8": SamplingParams(temperature=1.5, top_p=0.8, max_tokens=3),
}


@dataclass
class SumInspector(PassThroughDrafter):
    """Record the sums of reported probabilities that are not 1."""

    broken: list[float] = field(default_factory=list)

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        drafts = super().propose(requests, counts)
        for draft in drafts:
            if draft.draft_probs is not None:
                sums = draft.draft_probs.sum(axis=-1)
                self.broken += [float(s) for s in sums if abs(s - 1) > LARGEST_DISTANCE]
        return drafts


def run(context: Context) -> Iterator[Item]:
    """Exact distributions with every drafter, the limit of top_p, and the real model's."""
    for method in DRAFTERS:
        if method != NO_DRAFTS:
            yield _exact(method)
    yield _top_p_limit(context)
    yield _chi_square(context)


def _exact(method: str) -> Item:
    """Drafter, acceptance rule and bonus token together give the target's distribution."""
    target, draft = tables(_TABLES_SEED)
    worst, where, broken = 0.0, "", 0.0
    for name, params in _SETTINGS.items():
        inspectors: list[SumInspector] = []

        def build(parts: DrafterParts, seen: list[SumInspector] = inspectors) -> Drafter:
            seen.append(SumInspector(build_of(method)(parts)))
            return seen[0]

        engine = engine_of(target, draft, build, max_draft_tokens=2)
        away = distance(output_distribution(engine, params), target_distribution(target, params))
        if inspectors[0].broken:
            broken = min(inspectors[0].broken)
        if away >= worst:
            worst, where = away, name
    return judged(
        f"exact distribution, {method}",
        worst <= LARGEST_DISTANCE,
        causes.reported_sum(broken) if broken else causes.NOT_DRAWN_AS_REPORTED,
        figure=f"total variation {worst:.1e} ({where})",
        bound=f"at most {LARGEST_DISTANCE:.0e}",
    )


def _top_p_limit(context: Context) -> Item:
    """Sampling with top_p 0, which keeps only the best token, equals greedy decoding."""
    corpus = context.corpus
    tokens = min(8, corpus.new_tokens)
    prompts = list(corpus.prompts[:4])
    params = SamplingParams(temperature=1.0, top_p=0.0, max_tokens=tokens)
    found = decode(corpus.model, prompts, params, method="mtp", k=2).outputs
    wanted = [output[:tokens] for output in corpus.plain.outputs[: len(prompts)]]
    return judged(
        "top_p 0 equals greedy",
        found == wanted,
        causes.NUCLEUS_WRONG,
        figure=f"{sum(map(len, found))} tokens",
        bound="every token equal",
    )


def _chi_square(context: Context) -> Item:
    """Pairs of tokens after one prompt, sampled with drafts, follow the target's distribution."""
    corpus = context.corpus
    name, bound = "chi-square on the model", f"alpha {ALPHA:.0e}"
    params = SamplingParams(temperature=1.5, top_k=4, max_tokens=3, ignore_eos=True)
    prompt = corpus.prompts[0][:4]
    expected = pair_distribution(corpus, prompt, params)
    draws = BATCH * max(3, min(16, corpus.new_tokens // 8))
    seen: Counter[tuple[int, ...]] = Counter()
    accepted = drafted = 0
    for first in range(0, draws, BATCH):
        each = [replace(params, seed=seed) for seed in range(first, first + BATCH)]
        found = decode(corpus.model, [prompt] * BATCH, each, method="mtp", k=1)
        seen.update(output[:2] for output in found.outputs)
        accepted += sum(sum(r.metrics.accepted) for r in found.requests)
        drafted += sum(sum(r.metrics.drafted) for r in found.requests)
    statistic, freedom = chi_square(seen, expected, draws)
    critical = critical_chi_square(freedom, ALPHA)
    figure = f"{statistic:.1f} of at most {critical:.1f}, {freedom} degrees, {draws} draws"
    if statistic > critical:
        return failed(name, causes.PAIRS_OFF, figure=figure, bound=bound)
    if 0 < accepted < drafted:
        return passed(name, figure=figure, bound=bound)
    figure = f"{accepted} of {drafted} drafts accepted"
    return not_tested(name, "both verdicts must occur", figure=figure, bound=bound)


def chi_square(
    seen: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float], draws: int
) -> tuple[float, int]:
    """The chi-square statistic and its degrees of freedom. Rare outcomes share one cell; an outcome
    of probability 0 makes the statistic infinite."""
    if seen.keys() - expected.keys():
        return float("inf"), max(1, len(expected) - 1)
    rare = {pair for pair, p in expected.items() if p * draws < FEWEST_EXPECTED}
    cells = [(seen[pair], p * draws) for pair, p in expected.items() if pair not in rare]
    left = draws * sum(expected[pair] for pair in rare)
    if left >= 1:
        cells.append((sum(seen[pair] for pair in rare), left))
    statistic = sum((count - wanted) ** 2 / wanted for count, wanted in cells)
    return float(statistic), max(1, len(cells) - 1)


@torch.inference_mode()
def pair_distribution(
    corpus: Corpus, prompt: Prompt, params: SamplingParams
) -> dict[tuple[int, ...], float]:
    """The target's distribution of the next two tokens."""

    def next_probs(tokens: Sequence[Prompt]) -> list[Probabilities]:
        texts = Texts(tuple(Text(own, len(own)) for own in tokens))
        _, after = target_states(corpus.model, texts)
        ends = [start + len(own) - 1 for start, own in zip(texts.starts, tokens, strict=True)]
        return list(probabilities_of(corpus.model.head.logits(after[ends]).cpu().numpy(), params))

    (first,) = next_probs([prompt])
    firsts = [int(token) for token in first.nonzero()[0]]
    seconds = next_probs([(*prompt, token) for token in firsts])
    return {
        (a, int(b)): float(first[a] * second[b])
        for a, second in zip(firsts, seconds, strict=True)
        for b in second.nonzero()[0]
    }
