"""Acceptance of drafts that a bundle holds in folders of their own, and causes of a low share."""

from __future__ import annotations

from collections.abc import Iterator

from mtp_export.verify.check import Item, judged, not_tested
from mtp_export.verify.context import Context
from mtp_export.verify.decoding.acceptance import best_of, of_k
from mtp_export.verify.diagnosis.alternatives import LEAST_GAIN_NATS
from mtp_export.verify.diagnosis.own_drafts import own_alternatives
from mtp_export.verify.evidence.corpus import Corpus
from mtp_export.verify.evidence.own_drafts import OwnDraft


def run(context: Context) -> Iterator[Item]:
    """Acceptance of each draft per k, then the draft compared with its variants."""
    for own in context.own_drafts:
        corpus = context.corpus
        for k in context.options.ks:
            decoded = own.speculative(corpus.prompts, corpus.params, k)
            yield from of_k(decoded, k, own.method)
        yield diagnosed(corpus, own)


def diagnosed(corpus: Corpus, own: OwnDraft) -> Item:
    """The draft compared with its variants: one that drafts better names a known bug."""
    tried = own_alternatives(corpus, own)
    name = f"{own.method}: no other reading drafts better"
    bound = f"none of {len(tried)} gains {LEAST_GAIN_NATS} nats by its interval"
    if not tried or all(one.gain.low is None for one in tried):
        return not_tested(name, "it takes two prompts whose texts have drafts")
    better = best_of(tried)
    best = better or tried[0]
    figure = f"{best.gain.value:+.3f} nats when {best.change}"
    cause = "" if better is None else better.explained
    return judged(name, better is None, cause, figure=figure, bound=bound)
