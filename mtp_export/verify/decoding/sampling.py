"""Check 5: sampling with drafts follows the target's law: worked out exactly over every decision on
a tiny vocabulary, and by chi-square on the real model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from mtp_export.verify.check import Item, Status
from mtp_export.verify.context import Context
from mtp_export.verify.decoding.table_model import distance, engine_of, exact_law, law_of, tables
from mtp_export.verify.evidence.corpus import Corpus
from mtp_export.verify.evidence.decode import decode
from mtp_export.verify.evidence.prompts import Prompt
from mtp_export.verify.evidence.statistics import critical_chi_square
from mtp_runtime.acceptance.base import Draft
from mtp_runtime.drafters import DRAFTERS
from mtp_runtime.drafters.base import Drafter, Pass
from mtp_runtime.request import Request
from mtp_runtime.sampling import SamplingParams, probabilities_of
from mtp_runtime.teacher_forcing import Text, Texts, target_states

# Beyond rounding: sums of a few hundred products of float64.
LARGEST_DISTANCE = 1e-9
ALPHA = 1e-6
BATCH = 64
FEWEST_EXPECTED = 5
_TABLES_SEED = 3
_LAWS = {
    "temperature 1": SamplingParams(temperature=1.0, max_tokens=3),
    "top_k 2": SamplingParams(temperature=0.6, top_k=2, max_tokens=3),
    "top_p 0.8": SamplingParams(temperature=1.5, top_p=0.8, max_tokens=3),
}


@dataclass
class Inspector:
    """Hands on what a drafter does and notes whether its reported laws are laws."""

    inner: Drafter
    broken: list[float] = field(default_factory=list)

    def observe(self, passes: Sequence[Pass]) -> None:
        self.inner.observe(passes)

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        drafts = self.inner.propose(requests, counts)
        for draft in drafts:
            if draft.draft_probs is not None:
                sums = draft.draft_probs.sum(axis=-1)
                self.broken += [float(s) for s in sums if abs(s - 1) > LARGEST_DISTANCE]
        return drafts

    def forget(self, request: Request) -> None:
        self.inner.forget(request)


def run(context: Context) -> Iterator[Item]:
    """Exact laws of every drafter, the limit of top_p, and the real model's law."""
    for method in DRAFTERS:
        if method != "none":
            yield _exact(method)
    yield _top_p_limit(context)
    yield _chi_square(context)


def _exact(method: str) -> Item:
    """The drafter, the acceptance rule and the last token composed, against the target alone."""
    target, draft = tables(_TABLES_SEED)
    worst, where, broken = 0.0, "", 0.0
    for name, params in _LAWS.items():
        inspectors: list[Inspector] = []

        def build(parts: object, seen: list[Inspector] = inspectors) -> Drafter:
            seen.append(Inspector(DRAFTERS[method].build(parts)))  # type: ignore[arg-type]
            return seen[0]

        found = law_of(engine_of(target, draft, build, max_draft_tokens=2), params)
        away = distance(found, exact_law(target, params))
        if inspectors[0].broken:
            broken = min(inspectors[0].broken)
        if away >= worst:
            worst, where = away, name
    name, figure = f"exact law, {method}", f"total variation {worst:.1e} ({where})"
    bound = f"at most {LARGEST_DISTANCE:.0e}"
    if worst <= LARGEST_DISTANCE:
        return Item(name, Status.PASS, figure, bound)
    cause = "wrong proposal law: what comes out does not follow the target's law; "
    if broken:
        cause += (
            f"the drafter reports a law that sums to {broken:.3f}: it kept the drawn token's"
            " probability alone, and the residual needs the draft's full law"
        )
    else:
        cause += "drafts are not drawn from the law that is reported, or acceptance is not exact"
    return Item(name, Status.FAIL, figure, bound, cause=cause)


def _top_p_limit(context: Context) -> Item:
    """top_p 0 keeps the best token alone, so that sampling is greedy decoding."""
    corpus = context.corpus
    name, bound = "top_p 0 equals greedy", "every token equal"
    tokens = min(8, corpus.new_tokens)
    prompts = list(corpus.prompts[:4])
    params = SamplingParams(temperature=1.0, top_p=0.0, max_tokens=tokens)
    found = decode(corpus.model, prompts, params, method="mtp", k=2).outputs
    wanted = [output[:tokens] for output in corpus.plain.outputs[: len(prompts)]]
    figure = f"{sum(map(len, found))} tokens"
    if found == wanted:
        return Item(name, Status.PASS, figure, bound)
    cause = "with top_p 0 another token than the best is put out: the nucleus is cut wrongly"
    return Item(name, Status.FAIL, figure, bound, cause=cause)


def _chi_square(context: Context) -> Item:
    """Pairs of tokens after one prompt, drawn with drafts, against the target's own law."""
    corpus = context.corpus
    name, bound = "chi-square on the model", f"alpha {ALPHA:.0e}"
    params = SamplingParams(temperature=1.5, top_k=4, max_tokens=3, ignore_eos=True)
    prompt = corpus.prompts[0][:4]
    expected = pair_law(corpus, prompt, params)
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
        cause = "wrong proposal law: sampled pairs of tokens do not follow the target's law"
        return Item(name, Status.FAIL, figure, bound, cause=cause)
    if 0 < accepted < drafted:
        return Item(name, Status.PASS, figure, bound)
    figure = f"{accepted} of {drafted} drafts accepted"
    return Item(name, Status.NOT_TESTED, figure, bound, cause="both verdicts must occur")


def chi_square(
    seen: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float], draws: int
) -> tuple[float, int]:
    """The statistic and its degrees of freedom; rare outcomes are one cell. An outcome that cannot
    be makes it infinite."""
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
def pair_law(
    corpus: Corpus, prompt: Prompt, params: SamplingParams
) -> dict[tuple[int, ...], float]:
    """The target's law of the next two tokens."""

    def law(tokens: Sequence[Prompt]) -> list[np.ndarray[tuple[int, ...], np.dtype[np.float64]]]:
        texts = Texts(tuple(Text(own, len(own)) for own in tokens))
        _, after = target_states(corpus.model, texts)
        ends = [start + len(own) - 1 for start, own in zip(texts.starts, tokens, strict=True)]
        return list(probabilities_of(corpus.model.head.logits(after[ends]).cpu().numpy(), params))

    (first,) = law([prompt])
    firsts = [int(token) for token in first.nonzero()[0]]
    seconds = law([(*prompt, token) for token in firsts])
    return {
        (a, int(b)): float(first[a] * second[b])
        for a, second in zip(firsts, seconds, strict=True)
        for b in second.nonzero()[0]
    }
