"""Cost of drafts by the bytes of weights that they touch: sums of a model's files, and the
acceptance from which drafts pay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_runtime import engine
from mtp_runtime.config import EngineConfig, SpeculationConfig
from mtp_runtime.draft_length import DraftLength, draft_length
from mtp_runtime.drafters import DRAFTERS
from mtp_runtime.models.draft_cost import DraftCost, Routed, Touched
from mtp_runtime.models.load import LoadOptions, load_model, open_model
from runtime.checkpoints import SMALL_CONFIGS, write_checkpoint

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
USUAL = LoadOptions()
# A row picks an eighth of the experts, and those of a row are a quarter of what it touches.
SPARSE = DraftCost(Touched(300, (Routed(800, 1 / 8),)), Touched(20))


def cost_of(folder: Path, options: LoadOptions = USUAL) -> DraftCost | None:
    return open_model(folder, options, packs=True).memory_plan(options).drafts


def test_rows_touch_what_any_of_them_picks() -> None:
    random, rows = np.random.default_rng(0), 4
    picks = random.random((5000, rows, 64)).argsort(axis=-1)[..., :8]  # of 64 experts 8
    distinct = np.mean([len(set(one.ravel())) for one in picks])
    touched = Touched(1000, (Routed(6400, 8 / 64), Routed(64, 8 / 64))).by(rows)
    assert touched == pytest.approx(1000 + (100 + 1) * distinct, rel=0.005)


def test_bytes_are_those_of_the_files() -> None:
    """Each tensor counts once: the draft has the main model's head, and no pass its embedding."""
    tensors = Checkpoint.open(FIXTURES / "glm4-moe-tiny").tensors.values()
    cost = cost_of(FIXTURES / "glm4-moe-tiny")
    assert cost is not None
    matrices = {t.name: t.size_bytes for t in tensors if len(t.shape) == 2}
    of_mtp = {name for name in matrices if name.startswith("model.layers.3.")}
    copies = {name for name in of_mtp if "embed_tokens" in name or "shared_head" in name}
    experts = {name for name in matrices if ".experts." in name}
    vectors_bytes = 1 << 14  # norms and biases, and routers, which become float32
    for touched, names in (
        (cost.target, matrices.keys() - of_mtp - {"model.embed_tokens.weight"}),
        (cost.draft, of_mtp - copies | {"lm_head.weight"}),
    ):
        routed = sum(layer.held_bytes for layer in touched.routed)
        assert routed == sum(matrices[name] for name in names & experts) > 0
        fixed = sum(matrices[name] for name in names - experts)
        assert fixed < touched.fixed_bytes < fixed + vectors_bytes
        assert {layer.picked for layer in touched.routed} == {2 / 8}


def test_fused_experts_are_picked_too(tmp_path: Path) -> None:
    config = SMALL_CONFIGS["qwen3_5_moe"]
    fields = config["text_config"]
    cost = cost_of(write_checkpoint(tmp_path, config))
    assert cost is not None and len(cost.target.routed) == fields["num_hidden_layers"]
    numbers = 3 * fields["num_experts"] * fields["hidden_size"] * fields["moe_intermediate_size"]
    assert {layer.held_bytes / numbers for layer in cost.target.routed} <= {2.0, 4.0}


def test_a_head_that_is_the_embedding_is_read() -> None:
    cost = cost_of(FIXTURES / "qwen3-5-tiny")
    tensors = Checkpoint.open(FIXTURES / "qwen3-5-tiny").tensors
    assert not any("lm_head" in name for name in tensors)
    embedding = next(one for name, one in tensors.items() if "embed_tokens" in name)
    assert cost is not None and cost.draft.fixed_bytes > embedding.size_bytes
    assert cost.v(3) == 1.0 and cost.c() < 1


def test_without_mtp_modules_nothing_is_known() -> None:
    assert cost_of(FIXTURES / "glm4-moe-tiny", LoadOptions(with_mtp=False)) is None


def test_weights_that_are_read_on_demand_have_no_cost() -> None:
    assert cost_of(FIXTURES / "glm4-moe-tiny", LoadOptions(on_demand=True)) is None


def test_v_and_c_are_over_a_step_of_the_same_batch() -> None:
    assert SPARSE.v(1) == pytest.approx((300 + 800 * 15 / 64) / 400)
    assert SPARSE.c() == pytest.approx(20 / 400)
    assert SPARSE.v(1, batch=2) == pytest.approx((300 + 800 * (1 - (7 / 8) ** 4)) / 487.5)
    assert SPARSE.step(2) == pytest.approx(SPARSE.v(2) + 2 * SPARSE.c())


@pytest.mark.parametrize("k", [1, 3])
def test_drafts_pay_where_they_yield_as_much_as_they_cost(k: int) -> None:
    needed = SPARSE.needed_acceptance(k)
    assert needed is not None and 0 < needed < 1
    assert sum(needed**place for place in range(k + 1)) == pytest.approx(SPARSE.step(k))


def test_reading_costs_what_experts_do() -> None:
    assert SPARSE.read.step(1) == pytest.approx(15 / 8)
    assert SPARSE.read.needed_acceptance(1) == pytest.approx(7 / 8)


def test_drafts_that_cost_as_much_as_they_can_yield_never_pay() -> None:
    dear = DraftCost(Touched(100), Touched(100))
    assert dear.needed_acceptance(1) is None and dear.needed_acceptance(2) is None


@pytest.mark.parametrize("method", ["mtp", "inference_with_reference"])
def test_adaptive_drafts_by_a_module_have_its_cost(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = list[DraftCost | None]()

    def noted(config: SpeculationConfig, cost: DraftCost | None = None) -> DraftLength:
        given.append(cost)
        return draft_length(config, cost)

    monkeypatch.setattr(engine, "draft_length", noted)
    model = load_model(FIXTURES / "glm4-moe-tiny", USUAL).model
    speculation = SpeculationConfig(method, max_draft_tokens=3, adaptive=True)
    engine.Engine(model, EngineConfig(speculation=speculation), DRAFTERS[method].build)
    assert given == [cost_of(FIXTURES / "glm4-moe-tiny") if method == "mtp" else None]


def test_where_experts_are_cached_steps_wait_for_what_they_read() -> None:
    plan = open_model(FIXTURES / "glm4-moe-tiny", USUAL, packs=True).memory_plan(USUAL)
    assert plan.drafts is not None
    assert plan.step_cost == plan.drafts
    assert plan.with_slots(6).step_cost == plan.drafts.read
