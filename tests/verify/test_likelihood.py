"""Plain text under a main model: good ones find it likeliest near temperature 1, and what is wrong
with others is named without a source."""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path

import pytest
import torch

from cases import export, nightly_but, quantize, read_json
from faults.fault import Fault
from faults.matrix import no_progress
from faults.small_model import ROWS
from faults.suspected_faults import SUSPECTED_MAIN_FAULTS, config_value
from mtp_export.verify.check import Item, Level, Status
from mtp_export.verify.context import Context
from mtp_export.verify.decoding import likelihood, training
from mtp_export.verify.diagnosis.leanings import Leaning, Leanings
from mtp_export.verify.diagnosis.suspected import MainEvidence, group_variants
from mtp_export.verify.evidence.likelihood import TEMPERATURES, Likelihood
from mtp_export.verify.evidence.plain_text import CODE, KINDS, NOVEL, PlainTexts
from mtp_export.verify.evidence.statistics import Estimate
from mtp_export.verify.options import VerifyOptions
from mtp_runtime.streaming import StreamedModel, open_streamed
from mtp_runtime.teacher_forcing import Text, Texts
from mtp_runtime.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
TEMPERATURE = "temperature of plain text"
LIKELIER = "no undone fault betters the main model"


def judged(folder: Path) -> dict[str, Item]:
    """The items of the check, by name."""
    context = Context.open(VerifyOptions(folder, None, Level.RUN), no_progress)
    return {item.name: item for item in likelihood.run(context)}


@pytest.mark.parametrize(
    ("name", "row"),
    nightly_but(
        [("glm4-moe-tiny", "int8")],
        [*product(["glm4-moe-tiny", "qwen3-5-tiny"], ["", "fp8", "int8", "int4 everywhere"])],
    ),
)
def test_a_good_model_passes(name: str, row: str, tmp_path: Path) -> None:
    """As released, and in pairs of the precision table."""
    folder = ROOT / "fixtures" / name
    if row:
        base, mtp, *more = ROWS[row]
        schemes = ("--base-quant", base, "--mtp-quant", mtp, *more)
        assert quantize(folder, tmp_path / "bundle", *schemes, "--quiet").code == 0
        folder = tmp_path / "bundle"
    items = judged(folder)
    assert [item.status for item in items.values()] == [Status.PASS] * 5
    found = items[TEMPERATURE].data["temperatures"]
    assert found[CODE] == pytest.approx(1.0, abs=0.1)
    assert found[NOVEL] == pytest.approx(1.4, abs=0.15)


@pytest.mark.parametrize(
    "fault",
    nightly_but(SUSPECTED_MAIN_FAULTS[:1], SUSPECTED_MAIN_FAULTS),
    ids=lambda fault: fault.name,
)
def test_fault_of_a_main_model_is_named(fault: Fault, trained_bundle: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(trained_bundle, tmp_path / "bundle"))
    fault.plant(bundle)
    failed = [item for item in judged(bundle).values() if item.status is Status.FAIL]
    assert len(failed) == 1 and fault.cause in failed[0].cause


def test_a_value_of_another_release_is_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value that no release has is only blamed where a release's makes plain text likelier; the
    model, too large to be trained, says so."""
    monkeypatch.setattr(training, "MOST_BYTES", 1 << 20)
    bundle = tmp_path / "bundle"
    source = ROOT / "fixtures/glm4-moe-tiny"
    assert export(source, bundle, "--link", "copy", "--quiet").code == 0
    config_value("rope_theta", 1010000.0, bundle)
    items = judged(bundle)
    large = items.pop(training.NAME)
    assert large.status is Status.NOT_TESTED and "more than 1 MiB" in large.cause
    assert {item.status for item in items.values()} == {Status.PASS}
    assert "when rope_theta is 1000000.0, as in a release" in items[LIKELIER].figure


@pytest.mark.parametrize(
    ("unreleased", "tried"),
    [
        ({"topk_group": (4,)}, ["topk_group is 4"]),
        ({"n_group": (8,)}, ["topk_group is 4"]),  # 8 experts are no 8 groups
        ({"n_group": (2,)}, ["n_group is 2", "topk_group is 4"]),
        ({"rope_theta": (1e4,)}, []),
        ({}, []),
        (None, ["topk_group is 4"]),  # no release was read
    ],
)
def test_other_groups_are_tried(
    unreleased: dict[str, tuple[object, ...]] | None, tried: list[str]
) -> None:
    """Where their numbers are no release's: those that the experts fall into."""
    folder = ROOT / "fixtures/deepseek-v3-tiny"
    config = read_json(folder / "config.json")
    evidence = MainEvidence(open_streamed(folder, "cpu"), config, unreleased, Leanings(Texts(())))
    found = [*group_variants(evidence)]
    assert [one.change for one in found] == tried
    assert all(one.is_guessed for one in found)


@pytest.mark.parametrize(
    ("on_prompts", "on_passages", "blamed"),
    [(0.08, 0.06, True), (0.08, 0.005, False), (-0.01, 0.06, False)],
)
def test_passages_judge_a_guess(
    on_prompts: float, on_passages: float, blamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that begin alike gain together: they only say what is worth trying."""
    folder = ROOT / "fixtures/deepseek-v3-tiny"
    streamed, config = open_streamed(folder, "cpu"), read_json(folder / "config.json")
    evidence = MainEvidence(streamed, config, {"topk_group": (4,)}, Leanings(Texts(())))
    plain = PlainTexts.of(Tokenizer.find(folder))

    def under(model: StreamedModel, texts: PlainTexts, **_: object) -> Likelihood:
        sizes = torch.tensor([len(text.tokens) for text in texts.texts.texts])
        gain = on_prompts if texts.kinds == plain.kinds[: len(texts.kinds)] else on_passages
        noise = 0.001 * torch.arange(len(sizes)).cos()
        each = sizes * (noise + gain) if model is not streamed else 0 * sizes
        sums = each.double()[:, None].expand(-1, len(TEMPERATURES))
        return Likelihood(texts, sums, sizes, torch.zeros(int(sizes.sum()), 1))

    monkeypatch.setattr(likelihood.Likelihood, "of", under)
    context = Context.open(VerifyOptions(folder, None, Level.RUN), no_progress)
    found = likelihood._none_better(under(streamed, plain), evidence, context)
    assert (found.status is Status.FAIL) is blamed


class Logits:
    """A head whose states are the logits."""

    linear = type("Linear", (), {"weight": torch.zeros(3, 1)})

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        return normed


@pytest.mark.parametrize("temperature", [0.25, 1.0, 1.5, 6.0])
def test_the_temperature_of_a_known_distribution(temperature: float) -> None:
    """Tokens in the shares of a distribution whose logits are multiplied by the temperature."""
    shares = torch.tensor([0.6, 0.3, 0.1])
    tokens = [0, *([0] * 60 + [1] * 30 + [2] * 10) * 2]
    texts = Texts((Text(tuple(tokens), 1), Text(tuple(tokens), 1)))
    plain = PlainTexts(texts, (CODE, NOVEL))
    states = (temperature * shares.log()).expand(len(texts.tokens), 3)
    found = Likelihood.of_states(states, Logits(), plain)  # type: ignore[arg-type]
    assert found.counts.tolist() == [200, 200]
    for kind in KINDS:
        assert found.temperature(kind) == pytest.approx(temperature, rel=0.05)
    at_one = found.per_token(NOVEL)[TEMPERATURES.index(1.0)]
    wanted = (shares * (temperature * shares.log()).log_softmax(0)).sum()
    assert at_one == pytest.approx(float(wanted), rel=1e-5)


def leanings(*cosines: tuple[float, float]) -> Leanings:
    """Leanings of one layer's experts: means and halves of their intervals."""
    found = [
        Leaning(0, range(expert, expert + 1), Estimate(mean, mean - half, mean + half, 100))
        for expert, (mean, half) in enumerate(cosines)
    ]
    return Leanings(Texts(()), found)


@pytest.mark.parametrize(
    ("cosines", "away"),
    [
        ([(0.2, 0.1)] * 7 + [(-0.2, 0.05)], [7]),
        ([(-0.15, 0.1), (0.2, 0.1), (0.2, 0.1), (-0.2, 0.05), (0.2, 0.1)], [3, 0]),
        ([(0.2, 0.1)] * 7 + [(-0.2, 0.3)], []),  # by chance
        ([(0.2, 0.1)] * 7 + [(-0.05, 0.01)], []),  # too little to be the sign
        ([(0.2, 0.1)] * 7 + [(-0.05, 0.01), (-0.2, 0.05)], []),  # a model of such experts
        ([(0.2, 0.1)] * 9 + [(-0.2, 0.05)] * 5, []),
    ],
)
def test_experts_that_lean_away(cosines: list[tuple[float, float]], away: list[int]) -> None:
    assert [one.experts.start for one in leanings(*cosines).away] == away


def test_a_shared_expert_explains_those_of_its_layer() -> None:
    """Which lean away from it; of another layer one is still named."""
    usual, other = Estimate(0.2, 0.1, 0.3, 100), Estimate(-0.2, -0.3, -0.1, 100)
    found = []
    for layer in range(3):
        shared = other if layer == 1 else usual
        found.append(Leaning(layer, range(8, 9), shared, is_shared=True))
        for expert in range(8):
            is_away = layer == 1 or (layer, expert) == (2, 3)
            found.append(Leaning(layer, range(expert, expert + 1), other if is_away else usual))
    names = {one.name for one in Leanings(Texts(()), found).away}
    assert names == {"the shared expert of layer 1", "expert 3 of layer 2"}


def test_experts_that_lean_little_are_tried() -> None:
    """Those that lean half as far as is usual; of shared ones none."""
    found = leanings(*[(0.2, 0.1)] * 6, (0.09, 0.1), (-0.2, 0.05), (0.11, 0.1))
    found.found.append(Leaning(0, range(9, 10), Estimate(0.0, -0.1, 0.1, 100), is_shared=True))
    assert [one.experts.start for one in found.weak] == [6, 7]
