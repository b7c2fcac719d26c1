"""Activations of int8 and bf16: near float32, with bits that neither batch nor drafts change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cases import WHOLE_TILES, export, make_checkpoint, quantize
from mtp_checkpoints.errors import UnsupportedError
from mtp_kernels.cpu.matrix_units import HAS_TILES
from mtp_runtime.llm import LLM
from mtp_runtime.models.load import LoadOptions, load_model, open_model
from mtp_runtime.sampling import SamplingParams
from runtime.harness import Walk, prompts_of

PROMPTS = prompts_of([9, 40, 3], WHOLE_TILES["vocab_size"])
KINDS = pytest.mark.parametrize("kind", ["int8", "bfloat16"])
ROW = ("--base-quant", "weight_only_int4", "--mtp-quant", "weight_only_int8")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts and attention in int4, the MTP layer and kv_b_proj in int8, the head in bf16."""
    folder = tmp_path_factory.mktemp("encoded")
    source = make_checkpoint(folder / "source", WHOLE_TILES)
    assert quantize(source, folder / "out", *ROW, "--int4-scope", "linears").code == 0
    return folder / "out"


def logits(bundle: Path, activations: str) -> torch.Tensor:
    model = load_model(bundle, LoadOptions(activations=activations)).model
    return Walk(model).feed(PROMPTS[1])[0]


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.05), ("bfloat16", 0.02)])
def test_logits_are_near_those_of_float32(kind: str, most: float, bundle: Path) -> None:
    expected, found = logits(bundle, "float32"), logits(bundle, kind)
    assert 1e-4 < (found - expected).norm() / expected.norm() < most


@KINDS
def test_experts_that_are_read_when_they_are_picked_have_the_same_bits(
    kind: str, bundle: Path
) -> None:
    whole = LoadOptions(activations=kind)
    plan = open_model(bundle, whole, packs=True).memory_plan(whole)
    assert plan.experts is not None
    some = LoadOptions(activations=kind, expert_bytes=5 * plan.experts.slot_bytes)
    found = Walk(load_model(bundle, some).model).feed(PROMPTS[1])[0]
    assert torch.equal(found, logits(bundle, kind))


def test_nothing_changes_where_no_weight_is_in_codes(pristine: Path, tmp_path: Path) -> None:
    assert export(pristine, tmp_path / "out", "--target", "xllm").code == 0
    assert torch.equal(logits(tmp_path / "out", "float32"), logits(tmp_path / "out", "int8"))


def tokens(bundle: Path, prompts: list[list[int]], **options: object) -> list[tuple[int, ...]]:
    llm = LLM(bundle, **options)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=10, ignore_eos=True))
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize(
    "kind",
    ["int8", pytest.param("bfloat16", marks=pytest.mark.skipif(HAS_TILES, reason="whole tiles"))],
)
def test_tokens_depend_on_neither_batch_nor_drafts(kind: str, bundle: Path) -> None:
    plain = {"activations": kind, "speculate_method": "none"}
    alone = [tokens(bundle, [prompt], **plain)[0] for prompt in PROMPTS]
    for options in (
        {"speculate_method": "none"},
        {"speculate_max_draft_token_num": 3},
        {"speculate_max_draft_token_num": 1, "prefill_chunk": 7, "max_step_tokens": 16},
    ):
        assert tokens(bundle, PROMPTS, activations=kind, **options) == alone


def test_what_no_kernel_encodes_is_refused() -> None:
    for options in ({"device": "cuda"}, {"dequantize_at_load": False}, {"static_graph": True}):
        with pytest.raises(UnsupportedError, match="encode activations"):
            LoadOptions(activations="int8", **options)
    with pytest.raises(UnsupportedError, match="no activations of this kind"):
        LoadOptions(activations="fp8")
