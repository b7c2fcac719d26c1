"""Texts that the trained fixture writes, and counts of the drafts that are accepted on them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fixtures.tiny.prompts import prompt_ids
from mtp_export.verify.evidence.corpus import texts_of
from mtp_export.verify.evidence.decode import decode
from mtp_export.verify.evidence.statistics import CONFIDENCE, Estimate, ratio, student_quantile
from mtp_runtime.models.model import Model
from mtp_runtime.sampling import SamplingParams
from mtp_runtime.teacher_forcing import Texts
from mtp_runtime.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "fixtures/deepseek-v3-tiny"
NEW_TOKENS = 128
KS = (1, 2, 3)
Prompts = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Counts:
    """Accepted and proposed drafts of each prompt."""

    accepted: tuple[float, ...]
    proposed: tuple[float, ...]

    @property
    def estimate(self) -> Estimate | None:
        return ratio(self.accepted, self.proposed)


def fixture_prompts(count: int) -> Prompts:
    """The first prompts of each kind in turn, as the fixture's own measure gives them."""
    tokenizer = Tokenizer.find(SOURCE)
    tokenizer.require()
    lines = (SOURCE.parent / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    items = [json.loads(line) for line in lines]
    step = len(items) / count
    chosen = [items[int(number * step)] for number in range(count)]
    return [tuple(prompt_ids(tokenizer.backend, i["kind"], i["prompt"])) for i in chosen]


def difference(one: Counts, other: Counts) -> Estimate | None:
    """One ratio minus another over the same prompts, with the interval of their linearised
    difference; None where one has no draft."""
    first, second = one.estimate, other.estimate
    if first is None or second is None:
        return None
    totals = sum(one.proposed), sum(other.proposed)
    residuals = [
        (a - first.value * b) / totals[0] - (c - second.value * d) / totals[1]
        for a, b, c, d in zip(
            one.accepted, one.proposed, other.accepted, other.proposed, strict=True
        )
    ]
    count = len(residuals)
    error = math.sqrt(count / (count - 1) * sum(residual**2 for residual in residuals))
    reach = student_quantile(0.5 + CONFIDENCE / 2, count - 1) * error
    value = first.value - second.value
    return Estimate(value, value - reach, value + reach, int(totals[0]))


def written(model: Model, prompts: Prompts, new_tokens: int) -> Texts:
    """Return the output of a model; greedy tokens do not depend on the drafts."""
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    return texts_of(decode(model, prompts, params, method="mtp", k=max(KS)))
