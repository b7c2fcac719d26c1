"""A checkpoint with two MTP layers: draft i comes from layer i, then the last recurs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import DeepseekV3ForCausalLM
from transformers.modeling_layers import MtpModel

from mtp_checkpoints.families.contract import Hidden, MtpContract
from mtp_export.verify.evidence.decode import Decoded, decode
from mtp_runtime.cache import CachedSequence, PageAllocator, lay_out
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.models.model import Model, MtpModule
from mtp_runtime.sampling import SamplingParams
from mtp_runtime.teacher_forcing import DraftInputs, Text, Texts, draft_states, target_states
from runtime.checkpoints import SMALL, write_checkpoint
from runtime.harness import load, prompts_of, run

LAYERS = 2
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
# Prompts shorter than a module lags behind, and about pages of 16.
LENGTHS = [1, 2, 3, 14, 16, 17, 40]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = SMALL | {"num_nextn_predict_layers": LAYERS}
    return write_checkpoint(tmp_path_factory.mktemp("two"), config)


def test_every_layer_is_loaded(two: Path) -> None:
    loaded = load_model(two, LoadOptions())
    assert len(loaded.model.mtp_modules) == LAYERS
    assert loaded.ledger.loaded == load_file(two / "model.safetensors").keys()
    alone = load_model(two, LoadOptions(with_mtp=False))
    assert not alone.model.mtp_modules
    assert {name.split(".")[2] for name in alone.ledger.skipped} == {"3", "4"}


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_output_is_that_of_plain_decoding(two: Path, compiled: bool, k: int) -> None:
    model, prompts = load(two, compiled=compiled), prompts_of(LENGTHS, 96)
    expected = run(model, prompts, PARAMS).outputs
    assert run(model, prompts, PARAMS, method="mtp", k=k).outputs == expected


def module_output(
    module: MtpModule, tokens: Sequence[int], hidden: torch.Tensor, positions: int
) -> torch.Tensor:
    """The module over rows from 0, alone in a cache of its own: [positions, d] before the norm."""
    pages, sequence = PageAllocator(8, 16), CachedSequence()
    cache = module.new_cache(pages)
    pages.append(sequence, positions)
    layout = lay_out(pages, [sequence], [(0, positions)], hidden.device)
    return module(torch.tensor(tokens), hidden, cache, layout)


def wanted_drafts(
    model: Model, known: Sequence[int], k: int, given: Sequence[int] | None = None
) -> list[int]:
    """Best drafts after known tokens and, if there are, given drafts, every module computed anew
    over all rows.

    Row i of module m takes token i+m+1 and what module m-1 made of row i; a recursion of the last
    one goes on a row further each time.
    """
    _, after = target_states(model, Texts((Text(tuple(known[:-1]), 1),)))
    tokens, hidden, drafts = list(known), after, list[int]()
    layers = len(model.mtp_modules)
    for depth in range(k):
        module = model.mtp_modules[min(depth, layers - 1)]
        if depth < layers:
            fed, shift = hidden, depth + 1
        else:  # what the rows of the last module were fed, and its last output behind them
            fed, shift = torch.cat([fed, hidden[-1:]]), layers
        x = module_output(module, tokens[shift : shift + len(fed)], fed, len(fed))
        normed = module.head.normed(x)
        drafts.append(int(module.head.logits(normed[-1:]).argmax()))
        tokens.append(drafts[-1] if given is None else given[depth])
        hidden = module.recycled(x, normed)
    return drafts


def proposals_of(model: Model, prompts: list[tuple[int, ...]], k: int) -> Decoded:
    return decode(model, prompts, PARAMS, method="mtp", k=k)


@torch.inference_mode()
@pytest.mark.parametrize("recycled", list(Hidden))
@pytest.mark.parametrize("k", [2, 4])
def test_drafts_are_those_of_teacher_forcing(two: Path, k: int, recycled: Hidden) -> None:
    """Every proposal of a run, first drafts, second layer and recursion."""
    contract = MtpContract(recycled_hidden=recycled)
    model = load_model(two, LoadOptions(contract=contract)).model
    decoded = proposals_of(model, prompts_of([1, 3, 17, 20], 96), k)
    compared = 0
    for proposal in decoded.proposals:
        known = decoded.requests[proposal.request].tokens[: proposal.last + 1]
        count = len(proposal.tokens)
        assert list(proposal.tokens) == wanted_drafts(model, known, count), proposal
        compared += count == k
    assert compared > 10


@torch.inference_mode()
def test_a_layer_between_the_first_and_the_last(tmp_path: Path) -> None:
    """Of three layers the second takes its own last known row along when it drafts."""
    model = load(write_checkpoint(tmp_path, SMALL | {"num_nextn_predict_layers": 3}))
    decoded = proposals_of(model, prompts_of([1, 2, 5, 17], 96), 4)
    for proposal in decoded.proposals:
        known = decoded.requests[proposal.request].tokens[: proposal.last + 1]
        assert list(proposal.tokens) == wanted_drafts(model, known, len(proposal.tokens))
    assert max(len(proposal.tokens) for proposal in decoded.proposals) == 4


@torch.inference_mode()
def test_accepted_drafts_leave_the_right_rows(two: Path) -> None:
    """Some drafts of requests that sample are accepted: the proposals stay those of the text."""
    model = load(two)
    params = SamplingParams(temperature=3.0, max_tokens=24, ignore_eos=True, seed=3)
    decoded = decode(model, prompts_of([9, 20], 96), params, method="mtp", k=3)
    counts = [request.metrics for request in decoded.requests]
    assert any(m.accepted[1] for m in counts), "choose another seed"
    assert any(m.accepted[0] < m.drafted[0] for m in counts)
    for proposal in decoded.proposals:
        assert proposal.peaks is not None
        known = decoded.requests[proposal.request].tokens[: proposal.last + 1]
        best = wanted_drafts(model, known, len(proposal.tokens), proposal.tokens)
        assert proposal.peaks.tokens[:, 0].tolist() == best


@torch.inference_mode()
def test_transformers_drafts_the_same(two: Path) -> None:
    """An implementation of its own: transformers' MtpModel, teacher-forced on the same text."""
    reference: Any = DeepseekV3ForCausalLM.from_pretrained(two, dtype=torch.float32).eval()
    # It finds MTP tensors by the names that the class knows, those of layer 61.
    reference._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[34]\."]
    mtp: Any = MtpModel.from_pretrained(reference).eval()
    decoded = proposals_of(load(two), prompts_of([5, 20], 96), LAYERS)
    compared = 0
    for proposal in decoded.proposals:
        if len(proposal.tokens) < LAYERS:
            continue
        known = torch.tensor([decoded.requests[proposal.request].tokens[: proposal.last + 1]])
        hidden = reference.model(known[:, :-1]).last_hidden_state
        positions = torch.arange(1, known.shape[1])[None]
        drafts, _, _ = mtp(
            input_ids=known[:, 1:],
            last_hidden_states=hidden,
            attention_mask=None,
            position_ids=positions,
            mtp_cache=None,
        )
        assert tuple(drafts[0].tolist()) == proposal.tokens
        compared += 1
    assert compared > 10


@torch.inference_mode()
def test_teacher_forced_states_of_every_depth(two: Path) -> None:
    """draft_states at each anchor is what the modules give over the text up to there."""
    model = load(two)
    (tokens,) = prompts_of([24], 96)
    texts = Texts((Text(tokens, 2),))
    _, after = target_states(model, texts)
    anchors = texts.anchors()
    states = draft_states(model.mtp_modules, DraftInputs(texts, after, anchors), 4)
    for depth in range(1, 5):
        room = texts.room(anchors, depth).nonzero()[:, 0].tolist()
        assert room
        for anchor in room:
            row = int(anchors.rows[anchor])
            fed = after[: row + 1]
            for module_depth in range(1, min(depth, LAYERS) + 1):
                module = model.mtp_modules[module_depth - 1]
                taken = tokens[module_depth : module_depth + row + 1]
                x = module_output(module, taken, fed, row + 1)
                last_fed, fed = fed, module.recycled(x, module.head.normed(x))
            for step in range(1, depth - LAYERS + 1):
                last_fed = torch.cat([last_fed, fed[-1:]])
                x = module_output(
                    module, tokens[LAYERS : LAYERS + row + 1 + step], last_fed, row + 1 + step
                )
                fed = module.recycled(x, module.head.normed(x))
            assert torch.equal(states[depth - 1][anchor], x[-1])
