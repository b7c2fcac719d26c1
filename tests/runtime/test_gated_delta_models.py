"""Models whose layers keep a state per request, gated delta nets of Qwen3-Next and Qwen3.5 and
Mamba-2 of Nemotron-3: tokens equal transformers', and rejected drafts leave no trace in the states.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from cases import nightly_but
from mtp_checkpoints.errors import ResourceError
from mtp_runtime import SamplingParams
from mtp_runtime.cache import CachedSequence, PageAllocator, lay_out
from mtp_runtime.layers.moe import Moe
from mtp_runtime.memory import bytes_per_page, state_pages
from mtp_runtime.models.layer_types import load_layer
from mtp_runtime.models.load import LoadOptions, load_model, open_model
from mtp_runtime.models.model import Model
from runtime.checkpoints import SMALL_CONFIGS, write_checkpoint
from runtime.harness import Walk, load, prompts_of, run
from runtime.oracles import oracle

TOLERANCE = 1e-4
ONE_EXPERT = "mtp.layers.0.mlp.experts.0.gate_proj.weight"
FUSED = "mtp.layers.0.mlp.experts.gate_up_proj"
MODELS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
WITH_STATES = (*MODELS, "nemotron_h")


def small(name: str, folder: Path, names: tuple[str, ...] = (), **changes: Any) -> Path:
    """A random checkpoint of few tokens, which drafts by chance and never ends; its shared experts
    are as wide as others, which kernels run."""
    config = SMALL_CONFIGS[name] | {"vocab_size": 4, "eos_token_id": None} | changes
    if "num_experts" in config:
        config |= {"shared_expert_intermediate_size": config["moe_intermediate_size"]}
    return write_checkpoint(folder, config, names=names)


@pytest.mark.parametrize("names", [(ONE_EXPERT,), (FUSED,)])
@pytest.mark.parametrize("name", nightly_but(["qwen3_5_moe_text"], MODELS))
def test_the_module_computes_what_transformers_does(
    name: str, names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With experts of either layout, on hidden states and tokens one further on."""
    path = write_checkpoint(tmp_path, SMALL_CONFIGS[name], names=names)
    reference, tokens = oracle(path, monkeypatch), prompts_of([40], 96)[0]
    config = reference.config.get_text_config()
    monkeypatch.setattr(config, "num_mtp_layers", 1, raising=False)
    monkeypatch.setattr(config, "mtp_layer_types", ["full_attention"], raising=False)
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        hidden = reference.model(ids).last_hidden_state
        module = MtpModel.from_pretrained(reference)
        positions = torch.arange(1, len(tokens))[None]
        expected = module.forward_layer(0, hidden[:, :-1], positions, None, input_ids=ids[:, 1:])[0]
    model = load(path)
    assert model.mtp is not None
    walk = Walk(model)
    _, _, after = walk.feed(tokens)
    layout = lay_out(walk.pages, [walk.sequence], [(0, len(tokens) - 1)], model.device)
    with torch.inference_mode():
        out = model.mtp(ids[0, 1:], after[:-1], walk.cache.mtp[0], layout)
        found = model.mtp.head.normed(out)
    assert float((found - expected).abs().max() / expected.abs().max()) <= TOLERANCE


@pytest.mark.parametrize("name", nightly_but(["qwen3_next", "nemotron_h"], WITH_STATES))
def test_greedy_tokens(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' tokens, plain and with drafts of which some are accepted, eight requests at
    once whose prompts come in chunks, one at a time, and taken back for want of pages."""
    path = small(name, tmp_path)
    reference, prompts = oracle(path, monkeypatch), prompts_of(range(3, 35, 4), 4, seed=2)
    params, expected = SamplingParams(max_tokens=20, ignore_eos=True), []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=params.max_tokens,
            pad_token_id=0,
        )
        expected.append(out[0, len(prompt) :].tolist())
    model = load(path)
    chunks = {"prefill_chunk": 5, "max_step_tokens": 24}
    assert run(model, prompts, params, **chunks).outputs == expected
    assert run(model, prompts[:1], params).outputs == expected[:1]
    pages = 7 + 2 * state_pages(model, 16)  # two requests and their states, of which one grows
    few = run(model, prompts, params, method="mtp", k=2, cache_tokens=pages * 16)
    assert few.outputs == expected and few.engine.totals.preemptions
    for k in (1, 3):
        drafted = run(model, prompts, params, method="mtp", k=k, **chunks)
        assert drafted.outputs == expected
        assert 0 < drafted.counts("accepted", 0) < drafted.counts("drafted", 0)


@pytest.mark.parametrize("name", nightly_but(["qwen3_next"], MODELS))
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
def test_states_are_those_of_plain_decoding(name: str, compiled: bool, tmp_path: Path) -> None:
    """After passes with drafts of which any number was accepted: a pass stores none, and the next
    one replays those that were. Bit for bit by compiled kernels; torch's products of one row and of
    several differ in their last bits, which those of the recurrence do not.
    """
    path = small(name, tmp_path)
    options = LoadOptions(deterministic=True) if compiled else LoadOptions(dequantize_at_load=False)
    model = load_model(path, options).model
    generator = torch.Generator().manual_seed(0)
    pages = PageAllocator(24, 16, states=2, drafts=3)
    cache, sequence = model.new_cache(pages), CachedSequence()
    tokens = prompts_of([60], 4)[0]
    at = 5
    feed(model, cache, pages, sequence, tokens[:5], drafts=0)
    while at < 50:
        count, accepted = torch.randint(0, 4, (2,), generator=generator).tolist()
        accepted = min(count, accepted)
        wrong = [(token + 1) % 4 for token in tokens[at + 1 + accepted : at + 1 + count]]
        drafts = [*tokens[at + 1 : at + 1 + accepted], *wrong]
        feed(model, cache, pages, sequence, [tokens[at], *drafts], drafts=count)
        at += 1 + accepted
        pages.truncate(sequence, at)
    feed(model, cache, pages, sequence, tokens[at : at + 1], drafts=0)
    plain = CachedSequence()
    for token in tokens[: at + 1]:
        feed(model, cache, pages, plain, [token], drafts=0)
    kept = list(cache.states)
    assert len(kept) == 3 * 3  # layers with a state, and its tensors
    for number, tensor in enumerate(kept):
        if number % 3 < 2:  # the state, and the raw rows before the next token
            one, other = (tensor[each.state][:3] for each in (sequence, plain))
            bound = 0.0 if compiled else TOLERANCE * float(other.abs().max())
            assert float((one - other).abs().max()) <= bound


def test_fused_experts_are_packed_one_by_one_as_they_are_stored(tmp_path: Path) -> None:
    names = tuple(f"model.layers.{layer}.mlp.experts.gate_up_proj" for layer in range(4))
    path = small("qwen3_5_moe_text", tmp_path, names)
    for file in path.glob("*.safetensors"):
        save_file({name: one.bfloat16() for name, one in load_file(file).items()}, file)
    opened = open_model(path, options := LoadOptions(), packs=True)
    assert opened.memory_plan(options).dense_bytes == 0
    first = opened.spec.layers[0]
    moe = load_layer(opened.loader, first).feed_forward
    assert isinstance(moe, Moe)
    stored = {name: t for f in path.glob("*.safetensors") for name, t in load_file(f).items()}
    for number, expert in enumerate(moe.experts.each(range(moe.routed_experts))):
        for linear, name in ((expert.gate_up, "gate_up_proj"), (expert.down, "down_proj")):
            pieces = [piece for piece in linear.pieces() if isinstance(piece, torch.Tensor)]
            assert torch.equal(
                torch.cat(pieces), stored[f"{first.feed_forward_prefix}.experts.{name}"][number]
            )
    plain = run(load(path, compiled=False), prompts_of([9], 4), SamplingParams(max_tokens=8))
    assert (
        run(load(path), prompts_of([9], 4), SamplingParams(max_tokens=8)).outputs == plain.outputs
    )


def test_states_take_memory_from_the_cache(tmp_path: Path) -> None:
    """The size of the cache bounds what entries of tokens and states take together."""
    model = load(small("qwen3_5_text", tmp_path))
    each = state_pages(model, 16)
    state_bytes = sum(t[0].nbytes for t in model.new_cache(PageAllocator(1, 16, states=1)).states)
    page_bytes = bytes_per_page((model,), 16)
    assert (each - 1) * page_bytes < state_bytes <= each * page_bytes
    prompts = prompts_of([9, 9, 9], 4)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    one = (1 + each) * 16
    assert len(run(model, prompts, params, cache_tokens=one).outputs) == 3  # one at a time
    with pytest.raises(ResourceError, match=f"at least {one} cache_tokens"):
        run(model, prompts, params, cache_tokens=one - 16)


def feed(
    model: Model,
    cache: Any,
    pages: PageAllocator,
    sequence: CachedSequence,
    tokens: Any,
    *,
    drafts: int,
) -> None:
    start = sequence.length
    pages.append(sequence, len(tokens))
    spans = [(start, sequence.length)]
    states = pages.advance([sequence], spans, [len(tokens) - drafts])
    layout = lay_out(pages, [sequence], spans, model.device, states)
    with torch.inference_mode():
        model(torch.tensor(tokens), cache, layout)
