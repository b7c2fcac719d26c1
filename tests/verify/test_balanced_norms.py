"""Norms that training keeps alike, and experts beside their router: what breaks them is named
without a source, and models that were trained or not pass."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path

import pytest
import torch

from cases import export, nightly_but
from faults.fault import Fault
from faults.matrix import no_progress
from faults.suspected_faults import SUSPECTED_NORM_FAULTS
from mtp_export.verify.check import Item, Level, Status
from mtp_export.verify.context import Context
from mtp_export.verify.diagnosis.expert_places import Answer, wrong_order
from mtp_export.verify.diagnosis.neurons import Neurons, problems
from mtp_export.verify.options import VerifyOptions
from mtp_export.verify.weights import neurons, query_and_key_norms

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
Bundle = Callable[[str], Path]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The bundle of a fixture, as released."""

    @cache
    def made(name: str) -> Path:
        bundle = tmp_path_factory.mktemp("balanced") / name
        assert export(FIXTURES / name, bundle, "--link", "copy", "--quiet").code == 0
        return bundle

    return made


def judged(folder: Path) -> list[Item]:
    context = Context.open(VerifyOptions(folder, None, Level.WEIGHTS), no_progress)
    return [*chain(neurons.run(context), query_and_key_norms.run(context))]


@pytest.mark.parametrize(
    "name", nightly_but(["qwen3-5-tiny"], ["glm4-moe-tiny", "qwen3-5-tiny", "deepseek-v3-tiny"])
)
def test_a_trained_model_passes(name: str) -> None:
    """Most layers of deepseek-v3-tiny add next to nothing: their down_proj is far smaller."""
    assert {item.status for item in judged(FIXTURES / name)} == {Status.PASS}


@pytest.mark.parametrize(
    "fault",
    nightly_but([*SUSPECTED_NORM_FAULTS[:1], *SUSPECTED_NORM_FAULTS[5:8:2]], SUSPECTED_NORM_FAULTS),
    ids=lambda f: f.name,
)
def test_what_breaks_the_balance_is_named(fault: Fault, good: Bundle, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(good(fault.needs), tmp_path / "bundle"))
    fault.plant(bundle)
    causes = [item.cause for item in judged(bundle) if item.status is Status.FAIL]
    assert len(causes) == 1 and fault.cause in causes[0]


def mlps(*, trained: bool, count: int = 6, size: int = 64) -> list[list[torch.Tensor]]:
    """Gate, up and down of some MLPs, whose neurons differ in size where they are trained."""
    torch.manual_seed(3)
    found = []
    for _ in range(count):
        gate, up, down = torch.randn(3, size, 32)
        if trained:
            scale = torch.randn(size, 1).mul(0.5).exp()
            gate, up, down = gate * scale, up * scale, down * scale
        found.append([gate, up, down.t()])
    return found


def told(of: Sequence[Sequence[torch.Tensor]], *, across: bool = False) -> list[str]:
    """Names and words that are told of experts of a layer, or of MLPs across layers."""
    alike = [Neurons.of((f"{n}.gate", f"{n}.up", f"{n}.down"), one) for n, one in enumerate(of)]
    found = problems([], [alike]) if across else problems([alike], [])
    return [f"{name}: {words}" for name, words in found]


ORDERS = {
    "reverse order": lambda w: w.flip(0),
    "halves .* exchanged": lambda w: w.roll(32, 0),
    "by turns": lambda w: w.view(2, 32, -1).transpose(0, 1).reshape(w.shape),
    "de-interleaved": lambda w: torch.cat([w[::2], w[1::2]]),
    "moved on by 5": lambda w: w.roll(5, 0),
    "moved back by 3": lambda w: w.roll(-3, 0),
    "another order, or of another": lambda w: w[torch.randperm(64)],
    "about 0.5": lambda w: w / 2,
}


@pytest.mark.parametrize("words", ORDERS)
def test_an_order_or_factor_of_one_matrix_is_named(words: str) -> None:
    """Of any of the three; of the columns of down, by its rows transposed."""
    for place, name in enumerate(("gate", "up", "down")):
        found = mlps(trained=True)
        if name == "down":
            found[4][2] = ORDERS[words](found[4][2].t()).t()
        else:
            found[4][place] = ORDERS[words](found[4][place])
        (one,) = told(found)
        assert one.startswith(f"4.{name}: ") and re.search(words, one)


def test_nothing_is_told_of_good_untrained_or_few_models() -> None:
    assert not told(mlps(trained=True))
    for found in (mlps(trained=False), mlps(trained=True, count=4)):
        found[1][1] = found[1][1].flip(0)
        assert not told(found)


def test_layers_may_differ_in_size_and_in_how_far_norms_go_together() -> None:
    """But none of a trained model has norms that do not go together at all."""
    found = mlps(trained=True, size=1024)
    found[2][2] *= 4
    found[4][1] *= torch.randn(1024, 1).exp()
    assert not told(found, across=True)
    found[4][1] = found[4][1][torch.randperm(1024)]
    assert [one.split(":")[0] for one in told(found, across=True)] == ["4.up"]


def test_a_router_is_told_by_what_experts_answer_to_most() -> None:
    """A share of each expert along its own row; none along any, of an untrained model."""
    torch.manual_seed(4)
    router = torch.randn(8, 64)
    experts = [torch.randn(32, 64) + torch.randn(32, 1) * row for row in router]
    for order, words in (
        (router.flip(0), "reverse order"),
        (router, ""),
        (router.roll(1, 0), "on"),
    ):
        found = wrong_order([Answer.of(number, one, order) for number, one in enumerate(experts)])
        assert words in found and bool(words) == bool(found)
    few = [Answer.of(number, one, router.flip(0)) for number, one in enumerate(experts[:7])]
    assert not wrong_order(few)
