"""EAGLE-1 on a DeepSeek model is its MTP module under other names: the same drafts, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cases import export
from mtp_export.verify.evidence.decode import Decoded, decode
from mtp_runtime import LLM, SamplingParams
from mtp_runtime.models.load import Loaded, LoadOptions, load_model
from mtp_runtime.models.model import Model
from runtime.harness import prompts_of

K = 3


@pytest.fixture(scope="module")
def bundle(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("eagle") / "bundle"
    assert export(trained, output, "--target", "eagle", "--quiet").code == 0
    return output


@pytest.fixture(scope="module")
def loaded(bundle: Path) -> Loaded:
    return load_model(bundle, LoadOptions())


def drafted(model: Model, method: str, params: SamplingParams) -> Decoded:
    prompts = prompts_of([4, 17, 33], model.config.vocab)
    return decode(model, prompts, params, method=method, k=K)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_equal_those_of_mtp(
    trained_model: Model, loaded: Loaded, temperature: float
) -> None:
    """Tokens, and of drafts that are drawn the likeliest tokens with their probabilities."""
    params = SamplingParams(temperature=temperature, max_tokens=12, ignore_eos=True, seed=5)
    wanted = drafted(trained_model, "mtp", params)
    found = drafted(loaded.model, "eagle", params)
    assert found.outputs == wanted.outputs
    assert len(found.proposals) == len(wanted.proposals) > 5
    for one, other in zip(found.proposals, wanted.proposals, strict=True):
        assert (one.request, one.last, one.tokens) == (other.request, other.last, other.tokens)
        assert (one.peaks is None) == (temperature == 0)
        if one.peaks is not None and other.peaks is not None:
            assert np.array_equal(one.peaks.probs, other.peaks.probs)
    mtp = [name for name in loaded.ledger.expected if name.startswith("model.layers.61.")]
    assert mtp and set(mtp) <= loaded.ledger.loaded | loaded.ledger.tied


def test_the_method_needs_the_module(
    bundle: Path, loaded: Loaded, trained: Path, tmp_path: Path
) -> None:
    llm = LLM(bundle, loaded=loaded, speculate_method="eagle", speculate_max_draft_token_num=2)
    (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, ignore_eos=True))
    assert output.metrics.drafted[0] > 0
    assert export(trained, tmp_path / "main", "--part", "main", "--quiet").code == 0
    (plain,) = LLM(tmp_path / "main").generate(
        [[5, 6, 7]], SamplingParams(max_tokens=8, ignore_eos=True)
    )
    assert plain.token_ids == output.token_ids, "a main part alone decodes plainly"
    with pytest.raises(Exception, match="without an MTP module"):
        LLM(tmp_path / "main", speculate_method="eagle")
