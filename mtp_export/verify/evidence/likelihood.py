"""Likelihood of plain text under a main model that is read layer by layer, at several temperatures
of its distribution."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mtp_export.progress import CountCallback
from mtp_export.verify.evidence.plain_text import KINDS, PlainTexts
from mtp_export.verify.evidence.statistics import Estimate, ratio
from mtp_runtime.layers.decoder_layer import DecoderLayer
from mtp_runtime.models.execution import Head
from mtp_runtime.streaming import StreamedModel, pass_through
from mtp_runtime.teacher_forcing import PagedTexts, logits_by_chunk

# Halves of an octave from 1/8 to 8: the maximum between them is that of a parabola.
_STEPS, _PER_OCTAVE = 6, 2
TEMPERATURES = tuple(2 ** (step / _PER_OCTAVE) for step in range(-_STEPS, _STEPS + 1))
_ROWS = 64  # of logits at a time, which stay in a core's cache
# The layer that is run in place of one, by its number.
LayerOf = Callable[[int, DecoderLayer], DecoderLayer]


def as_it_is(number: int, layer: DecoderLayer) -> DecoderLayer:
    """Return the layer."""
    return layer


@dataclass(frozen=True)
class Likelihood:
    """Log-likelihood of plain texts: sums in nats by text and temperature [n, t], float64, and the
    number of tokens predicted of each text [n]. states [T, d]: those that were scored."""

    plain: PlainTexts
    sums: torch.Tensor
    counts: torch.Tensor
    states: torch.Tensor

    @classmethod
    @torch.inference_mode()
    def of(
        cls,
        streamed: StreamedModel,
        plain: PlainTexts,
        *,
        layer_of: LayerOf = as_it_is,
        advance: CountCallback = int,
    ) -> Likelihood:
        """Take the texts through the layers, one at a time. layer_of: what runs
        in place of a layer. advance takes the number of layers that are done."""
        texts = plain.texts
        x = streamed.embedded(texts.tokens.to(streamed.device))
        paged = PagedTexts.of(texts)
        chunks = paged.chunks(streamed.device)
        for number, layer in enumerate(streamed.layers(0)):
            pass_through(layer_of(number, layer), x, paged, chunks)
            advance(1)
        return cls.of_states(x, streamed.rest().head, plain)

    @classmethod
    def of_states(cls, states: torch.Tensor, head: Head, plain: PlainTexts) -> Likelihood:
        """Score the next token of every row [T, d], which did not pass the last norm, but for the
        last row of each text."""
        texts = plain.texts
        sizes = torch.tensor([len(text.tokens) for text in texts.texts])
        owners = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        rows = (owners[1:] == owners[:-1]).nonzero()[:, 0]
        scores = tempered_scores(head, states[rows.to(states.device)], texts.tokens[rows + 1])
        sums = torch.zeros(len(sizes), len(TEMPERATURES), dtype=torch.float64)
        sums.index_add_(0, owners[rows], scores)
        return cls(plain, sums, sizes - 1, states)

    def per_token(self, kind: str) -> list[float]:
        """The mean log-likelihood of a token of a kind of texts, by temperature."""
        of_kind = self._of_kind(kind)
        sums, count = self.sums[of_kind].sum(dim=0), int(self.counts[of_kind].sum())
        return [float(value) / count for value in sums]

    def fitted(self) -> float:
        """The mean log-likelihood of a token of all texts, at the temperature that fits them."""
        return float(self.sums.sum(dim=0).max()) / int(self.counts.sum())

    def _of_kind(self, kind: str) -> torch.Tensor:
        """The mask of texts [n] of a kind."""
        return torch.tensor([one == kind for one in self.plain.kinds])

    def first(self, count: int) -> Likelihood:
        """So many of the texts."""
        plain = self.plain.first(count)
        rows = len(plain.texts.tokens)
        return Likelihood(plain, self.sums[:count], self.counts[:count], self.states[:rows])

    def temperature(self, kind: str) -> float:
        """The temperature at which a kind of texts is likeliest."""
        means = self.per_token(kind)
        best = max(range(len(means)), key=means.__getitem__)
        if 0 < best < len(means) - 1:
            before, here, after = means[best - 1 : best + 2]
            bend = before - 2 * here + after
            offset = (before - after) / (2 * bend) if bend < 0 else 0.0
        else:
            offset = 0.0
        return float(2 ** ((best + offset - _STEPS) / _PER_OCTAVE))

    def gain(self, other: Likelihood, confidence: float) -> Estimate:
        """The mean log-likelihood of a token under another model less that under this one, at
        temperature 1: of all texts or of the kind for which its interval begins highest."""
        difference = (other.sums - self.sums)[:, _STEPS]
        found = []
        for of_kind in (self.counts > 0, *map(self._of_kind, KINDS)):
            sums, counts = difference[of_kind].tolist(), self.counts[of_kind].tolist()
            if (gain := ratio(sums, counts, confidence)) is not None:
                found.append(gain)
        return max(found, key=lambda gain: -math.inf if gain.low is None else gain.low)

    def fitted_gain(self, other: Likelihood, confidence: float) -> Estimate | None:
        """The gain of all texts with each model at the temperature that fits it: one that is more
        or less certain, and nothing else, gains nothing. None for other texts."""
        if len(self.counts) != len(other.counts):
            return None
        own, others = (one.sums[:, int(one.sums.sum(dim=0).argmax())] for one in (self, other))
        return ratio((others - own).tolist(), self.counts.tolist(), confidence)


def tempered_scores(head: Head, states: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of wanted tokens [n] after states [n, d], which did not pass the
    last norm, by temperature [n, t], float64, on the CPU."""
    found = []
    for part, logits in logits_by_chunk(head, head.normed(states)):
        pair = (logits, wanted[part].to(logits.device))
        blocks = zip(*(torch.split(each, _ROWS) for each in pair), strict=True)
        found += [_scores(*block).cpu() for block in blocks]
    return torch.cat(found)


def _scores(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The log-probability of wanted tokens [n] by temperature [n, t], float64. At half a
    temperature the powers of e are squared."""
    below = logits - logits.amax(dim=-1, keepdim=True)
    picked = below.gather(1, wanted[:, None]).double()
    sums = picked.new_empty(len(wanted), len(TEMPERATURES))
    for hottest in range(len(TEMPERATURES) - _PER_OCTAVE, len(TEMPERATURES)):
        powers = (below / TEMPERATURES[hottest]).exp_()
        for at in range(hottest, -1, -_PER_OCTAVE):
            sums[:, at] = powers.sum(dim=-1)
            powers.square_()
    return picked / sums.new_tensor(TEMPERATURES) - sums.log()


def chance(vocab: int) -> float:
    """The log-likelihood of a token of which nothing is known."""
    return -math.log(vocab)
