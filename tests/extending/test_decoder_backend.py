"""A decoder backend is one file and one line: a toy one, registered here, runs the runtime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kernels.decoder import reference
from mtp_kernels.batch_layout import BatchLayout
from mtp_kernels.decoder import AUTO, BACKENDS
from mtp_runtime import LLM, SamplingParams
from runtime.checkpoints import write_checkpoint

PROMPTS: list[Sequence[int]] = [(5, 9, 17, 3), (40, 2), (7,) * 20]


class CountedDecoder(reference.Decoder):
    """Counts the passes of all decoders."""

    passes = 0

    def __call__(
        self,
        x: torch.Tensor,
        layout: BatchLayout,
        kv_cache: torch.Tensor,
        attention_input: torch.Tensor | None = None,
    ) -> None:
        CountedDecoder.passes += 1
        super().__call__(x, layout, kv_cache, attention_input)


class Backend(reference.Backend):
    """The toy: the reference, whose decoders count."""

    def decoder(self, *given: object, **named: object) -> CountedDecoder:
        made = super().decoder(*given, **named)  # type: ignore[arg-type]
        return CountedDecoder(made.config, made.layers, made.rope)


def tokens_of(folder: Path, method: str) -> list[tuple[int, ...]]:
    llm = LLM(folder, speculate_method=method, speculate_max_draft_token_num=3)
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=12))
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("method", ["none", "mtp"])
def test_a_toy_backend_runs_the_runtime(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str
) -> None:
    folder = write_checkpoint(tmp_path / "model")
    expected = tokens_of(folder, method)
    monkeypatch.setattr(CountedDecoder, "passes", 0)
    monkeypatch.setitem(BACKENDS, "toy", __name__)
    monkeypatch.setitem(AUTO, "cpu", "toy")
    assert tokens_of(folder, method) == expected
    assert CountedDecoder.passes >= 12 if method == "none" else CountedDecoder.passes > 3
