"""Check `sampling`: sampled tokens follow the target's distribution, with drafts as without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from mtp_export.verify.check import Item, failed, judged, not_tested, passed
from mtp_export.verify.context import Context
from mtp_export.verify.diagnosis.causes import decoding as causes
from mtp_export.verify.evidence.corpus import Corpus
from mtp_export.verify.evidence.prompts import Prompt
from mtp_export.verify.evidence.statistics import critical_chi_square
from mtp_runtime.sampling import Probabilities, SamplingParams, probabilities_of
from mtp_runtime.teacher_forcing import Text, Texts, target_states

ALPHA = 1e-6
BATCH = 64
FEWEST_EXPECTED = 5
SMALLEST_SUM = 1 - 1e-6  # of the probabilities that a drafter reports, by rounding alone


def run(context: Context) -> Iterator[Item]:
    """The limit of top_p, and the distribution of sampled pairs of tokens."""
    yield _top_p_limit(context)
    yield _chi_square(context)


def _top_p_limit(context: Context) -> Item:
    """Sampling with top_p 0, which keeps only the best token, equals greedy decoding."""
    corpus = context.corpus
    tokens = min(8, corpus.new_tokens)
    prompts = list(corpus.prompts[:4])
    params = SamplingParams(temperature=1.0, top_p=0.0, max_tokens=tokens)
    most_tokens = len(prompts) * tokens
    with corpus.show_count("sampling with top_p 0", most_tokens, "tokens") as advance:
        decoded = corpus.drafted(prompts, params, 2, advance)
    found = decoded.outputs
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
    # So few tokens that Peaks hold all of each distribution.
    params = SamplingParams(temperature=1.5, top_k=4, max_tokens=3, ignore_eos=True)
    prompt = corpus.prompts[0][:4]
    expected = pair_distribution(corpus, prompt, params)
    draws = BATCH * max(3, min(16, corpus.new_tokens // 8))
    each = [replace(params, seed=seed) for seed in range(draws)]
    tokens = draws * params.max_tokens
    with corpus.show_count("sampling with drafts", tokens, "tokens") as advance:
        found = corpus.drafted([prompt] * draws, each, 1, advance, at_once=BATCH)
    seen = Counter(output[:2] for output in found.outputs)
    sums = [float(p.peaks.probs.sum()) for p in found.proposals if p.peaks is not None]
    accepted = sum(sum(r.metrics.accepted) for r in found.requests)
    drafted = sum(sum(r.metrics.drafted) for r in found.requests)
    statistic, freedom = chi_square(seen, expected, draws)
    critical = critical_chi_square(freedom, ALPHA)
    figure = f"{statistic:.1f} of at most {critical:.1f}, {freedom} degrees, {draws} draws"
    smallest = min(sums, default=1.0)
    if smallest < SMALLEST_SUM:
        return failed(name, causes.reported_sum(smallest), figure=figure, bound=bound)
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
