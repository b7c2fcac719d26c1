"""The fixture's target as its training code computes it, which makes rows to tune on several times
faster than the runtime: keys and values of so narrow heads are smaller than the latents, and every
prompt of a part is decoded in step. The values are the runtime's but for rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from fixtures.tiny.attention import causal_mask, rms_norm, rope_table
from fixtures.tiny.config import TinyConfig
from fixtures.tiny.decode import decode_greedily
from fixtures.tiny.export import entries
from fixtures.tiny.model import TinyDeepseek
from mtp_export.tune.rows import Fed, Line, Rows
from mtp_runtime.models.load import LoadOptions, open_model
from mtp_runtime.models.model import States
from mtp_runtime.teacher_forcing import Text, Texts

Answers = Mapping[tuple[int, ...], tuple[int, ...]]
READ_TEXTS = 8


@torch.no_grad()
def read_target(bundle: Path) -> TinyDeepseek:
    """Load a bundle of the tiny DeepSeek-V3, dequantized, into the training model."""
    source = open_model(bundle, LoadOptions(dequantize_at_load=False)).source
    model = TinyDeepseek(TinyConfig())
    for name, parameter, _ in entries(model):
        parameter.copy_(source.encoded(name).dequantize(torch.float32))
    return model.eval()


@dataclass(frozen=True)
class TinyWriter:
    """Makes rows as mtp_export.tune.rows.Writer does.

    answers: what the target wrote before, by prompt.
    """

    model: TinyDeepseek
    fed: Fed
    taps: tuple[int, ...]
    new_tokens: int
    answers: Answers

    @classmethod
    def of(cls, bundle: Path, fed: Fed, taps: tuple[int, ...], answers: Answers) -> Self:
        """Make the writer for a bundle."""
        return cls(read_target(bundle), fed, taps, new_tokens=128, answers=answers)

    @torch.inference_mode()
    def rows(self, lines: Sequence[Line], dtype: torch.dtype) -> Rows:
        """Return the target's answers and what it computes of them."""
        prompts = [line.prompt for line in lines]
        if all(prompt in self.answers for prompt in prompts):
            texts = [Text((*prompt, *self.answers[prompt]), len(prompt)) for prompt in prompts]
            states = self._read(texts)
        else:
            texts, states = self._written(prompts)
            states = self._read(texts) if self.taps else states
        logits = (self.model.logits(part) for part in torch.split(states.after, 4096))
        return Rows.made(Texts(tuple(texts)), self.fed.of(states).to(dtype), logits)

    def _written(self, prompts: Sequence[tuple[int, ...]]) -> tuple[list[Text], States]:
        """Answer prompts; the last token that is written has no state, and is not in the texts."""
        one_more = self.new_tokens + 1
        done = decode_greedily(self.model, [list(prompt) for prompt in prompts], one_more)
        ends = [end - 1 for end in done.lengths.tolist()]
        texts = [
            Text(tuple(tokens[:end]), len(prompt))
            for prompt, tokens, end in zip(prompts, done.tokens.tolist(), ends, strict=True)
        ]
        after = torch.cat([own[:end] for own, end in zip(done.hidden, ends, strict=True)])
        return texts, States(after, after)

    def _read(self, texts: Sequence[Text]) -> States:
        """Return the states of all rows, some texts at a time."""
        tokens = [text.tokens for text in texts]
        starts = range(0, len(texts), READ_TEXTS)
        parts = [self._read_part(tokens[at : at + READ_TEXTS]) for at in starts]
        after, taps = (torch.cat(column) for column in zip(*parts, strict=True))
        return States(after, after, taps)

    def _read_part(self, texts: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
        """Return the rows' states after the last norm, and their taps."""
        lengths = [len(text) for text in texts]
        tokens = torch.zeros(len(texts), max(lengths), dtype=torch.long)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = torch.tensor(text)
        cos, sin = rope_table(self.model.config, torch.arange(tokens.shape[1])[None])
        mask, kept = causal_mask(tokens.shape[1], tokens.device), list[Tensor]()
        x = F.embedding(tokens, self.model.embed_tokens)
        for number, block in enumerate(self.model.blocks):
            if number in self.taps:
                kept.append(x)
            x, _ = block(x, cos, sin, mask)
        after = rms_norm(x, self.model.norm, self.model.config.rms_norm_eps)
        tapped = torch.cat(kept, dim=-1) if kept else x.new_zeros(*x.shape[:2], 0)
        inside = torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None]
        return after[inside], tapped[inside]
