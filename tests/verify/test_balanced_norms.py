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
from mtp_export.verify.diagnosis.expert_places import Answer, wrong_orders
from mtp_export.verify.diagnosis.neurons import Neurons, problems
from mtp_export.verify.diagnosis.norm_places import NormPlace, misplaced
from mtp_export.verify.options import VerifyOptions
from mtp_export.verify.weights import neurons, norm_places, query_and_key_norms
from quantized_by_others import read_all

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
    checks = (neurons, norm_places, query_and_key_norms)
    return [*chain.from_iterable(check.run(context) for check in checks)]


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


def norms(*, trained: bool = True, count: int = 4) -> list[torch.Tensor]:
    """Logarithms of norms and columns [2, 128] of some layers, which go together if trained."""
    torch.manual_seed(4)
    shared = 2 * torch.randn(count, 128) if trained else torch.zeros(count, 128)
    return [*(shared[:, None] + torch.randn(count, 2, 128)).double()]


def told_of_norms(found: Sequence[torch.Tensor]) -> list[str]:
    places = [NormPlace(f"norm {n}", *one) for n, one in enumerate(found)]
    return [f"{name}: {words}" for name, words in misplaced(places)]


def test_norms_in_the_wrong_place_or_order_are_named() -> None:
    """Of trained models alone, and where few layers do not hide what is usual."""
    assert not told_of_norms(norms())
    for trained, count, wanted in ((True, 4, 1), (False, 4, 0), (True, 2, 0)):
        found = norms(trained=trained, count=count)
        found[0][0], found[1][0] = found[1][0].clone(), found[0][0].clone()
        assert told_of_norms(found) == ["norm 0: norm 0 and norm 1 are exchanged"][:wanted]
    found = norms()
    found[2][0] = found[2][0].flip(0)
    (one,) = told_of_norms(found)
    assert one.startswith("norm 2: norm 2 has its elements in reverse order")


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


def test_the_best_of_many_orders_is_no_cause_by_chance() -> None:
    """Keys in the place of the gate of an expert are moved by no number of rows."""
    tensors = read_all(FIXTURES / "glm4-moe-tiny")
    layer, parts = "model.layers.3", ("gate", "up", "down")
    found = [
        [tensors[f"{layer}.mlp.experts.{e}.{part}_proj.weight"].float() for part in parts]
        for e in range(8)
    ]
    found[1][0] = tensors[f"{layer}.self_attn.k_proj.weight"].float()
    (one,) = told(found)
    assert one.startswith("1.gate: ") and "another order, or of another" in one


def test_nothing_is_told_of_good_untrained_or_few_models() -> None:
    assert not told(mlps(trained=True))
    for found in (mlps(trained=False), mlps(trained=True, count=4)):
        found[1][1] = found[1][1].flip(0)
        assert not told(found)


def test_the_farthest_of_few_that_differ_in_size_is_none() -> None:
    """Most are alike, and some are not: by the median alone the last would be far off."""
    found = mlps(trained=True)
    for number, factor in enumerate((1.0, 0.5, 0.6, 1.7), start=2):
        found[number][2] = found[number][2] * factor
    assert not told(found)
    found[3][2] = found[3][2] / 4
    (one,) = told(found)
    assert one.startswith("3.down: ") and "about 0.1" in one


def test_one_of_few_stands_out_from_all_of_its_like() -> None:
    """Of weights that were made at random the farthest is often twice as far off as any other."""
    found = mlps(trained=False, count=8)
    for number, octaves in enumerate((0.0, 0.0, 0.02, -0.02, 0.0, 0.45, 1.2)):
        found[number][1] = found[number][1] * 2.0**octaves
    assert not told(found)
    found[6][1] = found[6][1] * 2
    assert len(told(found)) == 1


def test_a_few_of_a_kind_are_compared_with_others_of_as_many_neurons() -> None:
    """For their orders alone: another kind may go together less."""
    experts, shared = (
        [Neurons.of((f"{kind} {n}.gate", f"{kind} {n}.up", f"{kind} {n}.down"), one)
         for n, one in enumerate(mlps(trained=True, count=count))]
        for kind, count in (("expert", 6), ("shared", 2))
    )  # fmt: skip
    assert not list(problems([experts], [shared]))
    one = shared[1]
    rolled, elsewhere = (one.with_logs(2, one.logs[2][order]) for order in orders_of(64))
    (found,) = problems([experts], [[shared[0], rolled]])
    assert found == ("shared 1.down", "shared 1.down has its columns moved on by 5")
    assert not list(problems([experts], [[shared[0], elsewhere]]))
    assert not list(problems([experts[:2]], [[shared[0], rolled]]))


def orders_of(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Five places on, and anywhere."""
    return torch.arange(size).roll(5), torch.randperm(size)


def test_layers_may_differ_in_size_and_in_how_far_norms_go_together() -> None:
    """But none of a trained model has norms that do not go together at all."""
    found = mlps(trained=True, size=1024)
    found[2][2] *= 4
    found[4][1] *= torch.randn(1024, 1).exp()
    assert not told(found, across=True)
    found[4][1] = found[4][1][torch.randperm(1024)]
    assert [one.split(":")[0] for one in told(found, across=True)] == ["4.up"]


def unused(found: list[list[torch.Tensor]]) -> None:
    """Experts that no token picked are as they were made, where training made gates larger."""
    for gate, up, down in found:
        gate.mul_(3), up.mul_(1.2), down.mul_(0.8)
    for number in (7, 11):
        found[number] = [one * 0.5 for one in mlps(trained=False, count=1)[0]]


def pruned(found: list[list[torch.Tensor]]) -> None:
    """Neurons of which nothing is left, another share of each MLP."""
    for number, matrices in enumerate(found):
        lost = torch.randperm(64)[: 2 * number]
        for matrix, axis in zip(matrices, (0, 0, 1), strict=True):
            matrix.index_fill_(axis, lost, 0.0)


def outliers(found: list[list[torch.Tensor]]) -> None:
    """Single neurons whose output, or gate, is hundreds of times as large as the others'."""
    for number, (gate, _, down) in enumerate(found):
        down[:, number] *= 1000
        gate[(5 * number) % 64] *= 300


def by_degrees(found: list[list[torch.Tensor]]) -> None:
    """Experts that are picked less and less, whose neurons go together less and less."""
    for number, matrices in enumerate(found):
        matrices[0].mul_(torch.randn(64, 1).mul(0.1 * number).exp())
        matrices[1].mul_(torch.randn(64, 1).mul(0.06 * number).exp())


def copies(found: list[list[torch.Tensor]]) -> None:
    """Experts that were made of one, and changed little since."""
    for number in range(8, 16):
        found[number] = [one + 0.01 * torch.randn_like(one) for one in found[number - 8]]


def of_two_sizes(found: list[list[torch.Tensor]]) -> None:
    """Experts of which some are picked far more often, and have grown."""
    for matrices in found[:3]:
        for matrix, factor in zip(matrices, (6, 2, 3), strict=True):
            matrix.mul_(factor)


REAL = (unused, pruned, outliers, by_degrees, copies, of_two_sizes)


@pytest.mark.parametrize("change", REAL, ids=lambda change: change.__name__)
@pytest.mark.parametrize("across", [False, True])
def test_nothing_is_told_of_what_training_leaves(change: Callable[..., None], across: bool) -> None:
    """As experts of a layer and as MLPs of several; what is damaged among them is still told."""
    found = mlps(trained=True, count=16)
    change(found)
    assert told(found, across=across) == []
    found[2][1] = found[2][1].flip(0)
    (one,) = told(found, across=across)
    assert one.startswith("2.up: ") and "reverse order" in one


def test_a_router_is_told_by_what_experts_answer_to_most() -> None:
    """A share of each expert along its own row; none along any, of an untrained model."""
    torch.manual_seed(1)
    router = torch.randn(8, 64)
    experts = [torch.randn(32, 64) + torch.randn(32, 1) * row for row in router]
    good = [Answer.of(number, one, router) for number, one in enumerate(experts)]
    for order, words in (
        (router.flip(0), "reverse order"),
        (router, ""),
        (router.roll(1, 0), "on"),
        (router.flip(1), "router does not go with its experts"),
    ):
        found = [Answer.of(number, one, order) for number, one in enumerate(experts)]
        first, other, second = wrong_orders([good, found, good])
        assert words in other and bool(words) == bool(other) and not first + second
        assert wrong_orders([found]) == [""]
    few = [Answer.of(number, one, router.flip(0)) for number, one in enumerate(experts[:7])]
    assert not any(wrong_orders([good, few, good]))
    lost = [Answer.of(number, one, router.flip(1)) for number, one in enumerate(experts)]
    assert not any(wrong_orders([good, lost, good, lost]))


def test_experts_by_turns_are_told_where_some_stay_in_their_places() -> None:
    """Which answer to their rows, so that the order suits less much better than as they are."""
    torch.manual_seed(2)
    router = torch.randn(8, 64)
    experts = [torch.randn(32, 64) + 0.1 * torch.randn(32, 1) * row for row in router]
    good = [Answer.of(number, one, router) for number, one in enumerate(experts)]
    merged = [experts[at] for at in (0, 4, 1, 5, 2, 6, 3, 7)]
    found = [Answer.of(number, one, router) for number, one in enumerate(merged)]
    words = wrong_orders([good, found, good])[1]
    assert words.endswith("; or its experts come by turns from two halves")


def test_routers_that_experts_do_not_answer_to_tell_nothing() -> None:
    """Of many layers some suit another order by chance."""
    layers = []
    for _ in range(60):
        router, experts = torch.randn(8, 16), torch.randn(8, 4, 16)
        layers.append([Answer.of(number, one, router) for number, one in enumerate(experts)])
    assert not any(wrong_orders(layers))


def pair(query: torch.Tensor, key: torch.Tensor) -> query_and_key_norms.Pair:
    return query_and_key_norms.Pair(("q", "k"), (query, key), offset=0.0, rotary=32)


def test_norms_of_queries_and_keys_may_have_outliers_and_zeros() -> None:
    """Of a good layer; one that is doubled, or in another order, lies beyond its like all the
    same."""
    torch.manual_seed(5)
    weights = torch.rand(64).mul(3).exp() / 4
    weights[[3, 40, 41, 60]] = torch.tensor([1e-4, -2e-3, 5e-3, 1e-5])
    found = [weights * torch.randn(64).mul(0.05).exp() for _ in range(2)]
    found[0][[7, 50]] *= 30
    found[1][[40, 60]] *= -20
    good = [pair(weights, weights * 1.02)] * 5
    of_wide_layers = [pair(weights, weights * factor) for factor in (1.02, 1.05, 1.1, 1.2, 1.4)]
    assert not query_and_key_norms.far_apart([*good, pair(*found)])
    assert not query_and_key_norms.far_apart(of_wide_layers)
    of_few = [pair(weights, weights * factor) for factor in (1.02, 1.08, 1.5, 2.4)]
    assert not query_and_key_norms.far_apart(of_few)
    for query in (found[0] * 2, found[0].flip(0)):
        (one,) = query_and_key_norms.far_apart([*good, pair(query, found[1])])
        assert one.weights[0] is query


def test_narrow_norms_of_queries_and_keys_are_near_by_chance() -> None:
    """Whose elements do not go together, as those of a trained model do."""
    torch.manual_seed(5)
    sizes = ((1.0, 1.03), (0.9, 0.92), (1.1, 1.05), (1.25, 0.8))
    made = [pair(one + torch.randn(64) / 100, two + torch.randn(64) / 100) for one, two in sizes]
    assert not query_and_key_norms.far_apart(made)
    weights = [1 + torch.randn(64) / 10 for _ in sizes]
    trained = [pair(w * one, w * two) for w, (one, two) in zip(weights, sizes, strict=True)]
    assert query_and_key_norms.far_apart(trained) == trained[3:]
