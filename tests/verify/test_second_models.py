"""Models that a verification loads beside the usual one: activations of int8, bf16, torch's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cases import quantize
from faults.matrix import no_progress
from mtp_export.verify.check import Level, Status
from mtp_export.verify.context import Context
from mtp_export.verify.decoding import acceptance, greedy, paths
from mtp_export.verify.options import VerifyOptions
from mtp_runtime.models import memory_plan

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures/deepseek-v3-tiny"
K = 2


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    folder = tmp_path_factory.mktemp("int8") / "out"
    row = ("--base-quant", "weight_only_int8", "--mtp-quant", "weight_only_int8")
    assert quantize(FIXTURE, folder, *row).code == 0
    options = VerifyOptions(
        folder, None, Level.RUN, max_new_tokens=16, ks=(1, K), activations="int8"
    )
    context = Context.open(options, no_progress)
    vars(context)["prompts"] = context.prompts[:8]
    return context


def test_acceptance_with_other_activations_is_shown_beside_the_usual(context: Context) -> None:
    *drafts, length, texts = acceptance._with_activations(context, K)
    names = [f"activations int8, k={K}, {what}" for what in ("draft 1", "draft 2")]
    assert [item.name for item in drafts] == names
    assert all(item.status is Status.PASS for item in (*drafts, length, texts))
    usual = acceptance.conditional(context.corpus.speculative(K), 0)
    assert usual is not None
    assert abs(drafts[0].data["conditional"]["value"] - usual.value) < 0.1
    assert {options.activations for options in context._loaded} == {"float32", "int8"}
    prompts = len(context.corpus.prompts)
    assert prompts // 2 < texts.data["equal_texts"] <= prompts
    assert texts.figure == f"{texts.data['equal_texts']} of {prompts} as with float32"


def test_usual_activations_are_not_run_twice(context: Context) -> None:
    usual = VerifyOptions(context.options.bundle)
    assert not [*acceptance._with_activations(Context.open(usual, no_progress), K)]


def test_other_activations_are_not_tested_where_torch_runs_the_model(context: Context) -> None:
    """The rest of the check goes on."""
    options = replace(context.options, device="cuda")
    (item,) = acceptance._with_activations(Context.open(options, no_progress), K)
    assert item.status is Status.NOT_TESTED and "Only the compiled kernels" in item.cause


def test_models_without_room_beside_the_usual_one_are_not_tested(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    _ = context.corpus.plain
    monkeypatch.setattr(memory_plan, "free_memory", lambda: {"available memory": 1000})
    fresh = Context.open(context.options, no_progress)
    fresh._loaded.update(list(context._loaded.items())[:1])
    items = [
        *acceptance._with_activations(fresh, K),
        greedy._in_bf16(fresh, 4),
        paths._attention(fresh, [], []),
    ]
    assert [item.status for item in items] == [Status.NOT_TESTED] * 3
    assert all("of memory are free" in item.cause for item in items)
