"""EAGLE-3 drafts against an implementation of their own, written here from vLLM's semantics."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from mtp_checkpoints.errors import InvalidInputError, UnsupportedError
from mtp_checkpoints.families.eagle3 import Eagle3Family, eagle3_config, usual_taps
from mtp_export.verify.evidence.decode import decode
from mtp_runtime import LLM, SamplingParams, memory
from mtp_runtime.drafters import DRAFTERS
from mtp_runtime.drafters.base import TargetDraft
from mtp_runtime.drafters.eagle3 import read_eagle3
from mtp_runtime.layers.mla import Mla
from mtp_runtime.loading.draft_folder import read_draft, values_of
from mtp_runtime.models.eagle3 import Eagle3Module, checked_tensors, eagle3_module
from mtp_runtime.models.load import Loaded, LoadOptions, load_model
from mtp_runtime.models.model import Model
from mtp_runtime.teacher_forcing import Text, Texts, model_states
from runtime.checkpoints import SMALL, YARN
from runtime.drafts import DRAFT_VOCAB, TAPS, Tensors, eagle3_tensors, save_draft, write_eagle3
from runtime.harness import prompts_of, run

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
LENGTHS = [1, 3, 15, 16, 17, 40]


@pytest.fixture(scope="module")
def loaded(small: Path) -> Loaded:
    return load_model(small, LoadOptions())


def test_a_limit_of_memory_counts_the_draft_s_cache(
    small: Path, loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "used_bytes", lambda device: 0)
    folder, limit = write_eagle3(tmp_path), 1 << 20
    pages = LLM(
        small,
        loaded=loaded,
        draft_model=folder,
        speculate_method="eagle3",
        max_memory_bytes=limit,
    ).engine.pages
    caches = loaded.model.new_cache(pages), read_eagle3(folder, loaded).weights.new_cache(pages)
    taken = sum(tensor.nbytes for cache in caches for tensor in cache.tensors)
    assert 0.8 * limit < taken <= 0.9 * limit


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + SMALL["rms_norm_eps"]) * weight


def turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring pairs of x [T, ..., r] by their positions."""
    size = x.shape[-1]
    angle = positions[:, None] / SMALL["rope_theta"] ** (torch.arange(0, size, 2) / size)
    angle = angle.view(len(x), *[1] * (x.dim() - 2), -1)
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


@dataclass
class Plain:
    """The draft, layer by layer in float64 over whole texts, attention unabsorbed and uncached."""

    weights: Tensors
    config: dict[str, Any]
    embedding: torch.Tensor

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.weights[f"{name}.weight"].double()

    def attention(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        heads, nope, rope = 3, SMALL["qk_nope_head_dim"], SMALL["qk_rope_head_dim"]
        own = "midlayer.self_attn"
        query = rms(x @ self[f"{own}.q_a_proj"].T, self[f"{own}.q_a_layernorm"])
        query = (query @ self[f"{own}.q_b_proj"].T).view(len(x), heads, nope + rope)
        latent, key_rope = (x @ self[f"{own}.kv_a_proj_with_mqa"].T).split(
            [SMALL["kv_lora_rank"], rope], dim=-1
        )
        latent = rms(latent, self[f"{own}.kv_a_layernorm"])
        key, value = (
            (latent @ self[f"{own}.kv_b_proj"].T)
            .view(len(x), heads, -1)
            .split([nope, SMALL["v_head_dim"]], dim=-1)
        )
        query = torch.cat([query[..., :nope], turned(query[..., nope:], positions)], dim=-1)
        shared = turned(key_rope, positions)[:, None].expand(-1, heads, -1)
        key = torch.cat([key, shared], dim=-1)
        scores = torch.einsum("shn,thn->hst", query, key) / math.sqrt(nope + rope)
        later = torch.ones(len(x), len(x)).triu(1).bool()
        mixed = torch.einsum(
            "hst,thv->shv", scores.masked_fill(later, -torch.inf).softmax(-1), value
        )
        return mixed.flatten(1) @ self[f"{own}.o_proj"].T

    def combined(self, taps: torch.Tensor) -> torch.Tensor:
        taps = taps.double()
        if self.config.get("fc_norm"):
            parts = taps.chunk(len(TAPS), dim=-1)
            taps = torch.cat([rms(p, self[f"fc_norm.{i}"]) for i, p in enumerate(parts)], dim=-1)
        return taps @ self["fc"].T

    def output(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        embedded = rms(self.embedding[tokens].double(), self["midlayer.input_layernorm"])
        normed = rms(hidden, self["midlayer.hidden_norm"])
        residual = normed if self.config.get("norm_before_residual") else hidden
        positions = torch.arange(len(tokens)).double()
        x = residual + self.attention(torch.cat([embedded, normed], dim=-1), positions)
        inner = rms(x, self["midlayer.post_attention_layernorm"])
        gate, up = (inner @ self[f"midlayer.mlp.{n}_proj"].T for n in ("gate", "up"))
        return x + (F.silu(gate) * up) @ self["midlayer.mlp.down_proj"].T

    def drafts(self, known: list[int], taps: torch.Tensor, k: int) -> list[int]:
        """The best k drafts after known tokens, every row computed anew for each."""
        fed, tokens = self.combined(taps), list(known)
        for _ in range(k):
            x = self.output(torch.tensor(tokens[1:]), fed)
            normed = rms(x, self["norm"])
            scores = normed[-1] @ self["lm_head"].T
            best = int(scores.argmax())
            tokens.append(best + int(self.weights["d2t"][best]))
            fed = torch.cat([fed, (normed if self.config.get("norm_output") else x)[-1:]])
        return tokens[len(known) :]


VARIANTS: dict[str, dict[str, object]] = {
    "usual": {},
    "normed": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
}


BY_TORCH = LoadOptions(dequantize_at_load=False)


@torch.inference_mode()
@pytest.mark.parametrize("options", [LoadOptions(), BY_TORCH], ids=["compiled", "torch"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_are_those_of_another_implementation(
    small: Path, tmp_path: Path, variant: str, options: LoadOptions
) -> None:
    loaded = load_model(small, options)
    folder = write_eagle3(tmp_path, **VARIANTS[variant])
    draft, model = read_eagle3(folder, loaded), loaded.model.tapped(TAPS)
    plain = Plain(
        load_file(folder / "model.safetensors"),
        json.loads((folder / "config.json").read_text()),
        load_file(small / "model.safetensors")["model.embed_tokens.weight"],
    )
    decoded = decode(
        model, prompts_of(LENGTHS, 96), PARAMS, method="eagle3", k=3, build=draft.build
    )
    compared = 0
    for proposal in decoded.proposals:
        known = decoded.requests[proposal.request].tokens[: proposal.last + 1]
        taps = model_states(model, Texts((Text(tuple(known[:-1]), 1),))).taps
        assert taps is not None
        assert list(proposal.tokens) == plain.drafts(known, taps, len(proposal.tokens)), proposal
        compared += len(proposal.tokens) == 3
    assert compared > 20


def test_taps_are_the_inputs_of_layers(small: Path) -> None:
    """By the compiled kernels and by torch, whose states are walked layer by layer."""
    texts = Texts((Text(prompts_of([20], 96)[0], 1),))
    for options in (LoadOptions(), LoadOptions(dequantize_at_load=False)):
        model = load_model(small, options).model
        states = model_states(model.tapped(TAPS), texts)
        assert states.taps is not None
        first, second = states.taps.chunk(2, dim=-1)
        embedded = model.embedding(texts.tokens)
        assert torch.equal(first, model_states_after(model, embedded, texts, 1))
        assert torch.equal(second, model_states_after(model, embedded, texts, 2))
        assert torch.equal(states.before, model_states(model, texts).before)


def model_states_after(model: Model, x: torch.Tensor, texts: Texts, layers: int) -> torch.Tensor:
    from mtp_runtime.cache import CachedSequence, PageAllocator, lay_out
    from mtp_runtime.layers.attention import ForwardPass

    pages, sequence = PageAllocator(4, 16), CachedSequence()
    pages.append(sequence, len(x))
    part = model.layers.part(0, layers)
    cache = part.new_cache(pages.spec(model.dtype, model.device))
    layout = lay_out(pages, [sequence], [(0, len(x))], model.device)
    return part(x.clone(), cache, ForwardPass(layout))


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("deterministic", [True, False])
def test_output_is_that_of_plain_decoding(
    small: Path, tmp_path: Path, k: int, deterministic: bool
) -> None:
    """Through LLM, which taps the target, with the draft in a folder given and in the bundle's."""
    folder = write_eagle3(tmp_path / "draft")
    prompts = [list(prompt) for prompt in prompts_of(LENGTHS, 96)]
    plain = LLM(small, deterministic=deterministic).generate(prompts, PARAMS)
    llm = LLM(
        small, deterministic=deterministic, speculate_method="eagle3", draft_model=folder,
        speculate_max_draft_token_num=k,
    )  # fmt: skip
    found = llm.generate(prompts, PARAMS)
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    assert all(one.metrics.drafted[k - 1] > 0 for one in found)


def test_in_bfloat16(small: Path, tmp_path: Path) -> None:
    """Drafts are computed in the dtype that the target is loaded in."""
    llm = LLM(
        small, dtype="bfloat16", speculate_method="eagle3", draft_model=write_eagle3(tmp_path),
        speculate_max_draft_token_num=3,
    )  # fmt: skip
    (output,) = llm.generate([list(prompts_of([20], 96)[0])], PARAMS)
    assert output.metrics.drafted[2] > 0


def test_preempted_requests_draft_on(loaded: Loaded, tmp_path: Path) -> None:
    draft = read_eagle3(write_eagle3(tmp_path), loaded)
    model, prompts = loaded.model.tapped(draft.taps), prompts_of([40, 3, 25, 60, 17, 33, 8], 96)
    sizes = {"cache_tokens": 16 * 9, "prefill_chunk": 7, "max_step_tokens": 20}
    found = run(model, prompts, PARAMS, k=3, build=draft.build, **sizes, max_batch_size=5)
    assert sum(request.metrics.preemptions for request in found.requests) > 0
    assert found.outputs == run(model, prompts, PARAMS).outputs


def module_of(config: dict[str, Any], tensors: Tensors, model: Model) -> Eagle3Module:
    return eagle3_module(Eagle3Family.from_config(config), tensors, model)


def test_every_parameter_has_a_gradient(small: Path) -> None:
    """But through attention over a cache, which a training computes from the same projections."""
    loaded = load_model(small, BY_TORCH)
    config = eagle3_config(SMALL, TAPS, DRAFT_VOCAB, "float32") | {"fc_norm": True}
    tensors = eagle3_tensors(config)
    parameters = {
        name: torch.nn.Parameter(one) for name, one in tensors.items() if one.is_floating_point()
    }
    module = module_of(config, tensors | parameters, loaded.model)
    hidden = module.combined(torch.randn(5, len(TAPS) * SMALL["hidden_size"]))
    both, residual = module.entering(torch.arange(5), hidden, torch.arange(5))
    attention, positions = module.attention, torch.arange(5)
    assert isinstance(attention, Mla)
    q_latent, q_rope, cached = attention.project(
        attention.lower(both), attention.rope.cos_sin(positions)
    )
    query = torch.cat([q_latent, q_rope], dim=-1)
    weights = torch.einsum("shm,tm->hst", query, cached).softmax(dim=-1)
    mixed = torch.einsum("hst,tc->shc", weights, cached[:, : SMALL["kv_lora_rank"]])
    x = module.leaving(residual, attention.finish(mixed))
    logits = module.head.projected(module.head.normed(x))
    F.cross_entropy(logits, torch.arange(5)).backward()  # type: ignore[no-untyped-call]
    assert all(one.grad is not None and one.grad.abs().sum() > 0 for one in parameters.values())


def test_written_as_read(loaded: Loaded, tmp_path: Path) -> None:
    """Under either of the layer's names, and byte by byte."""
    folder = write_eagle3(tmp_path / "one")
    family = Eagle3Family.from_config(read_draft(folder).config)
    tensors = checked_tensors(read_draft(folder), family)
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == tensors.keys()
    assert all(torch.equal(stored[name], values_of(tensors[name])) for name in stored)
    renamed = {name.replace("midlayer.", "layers.0."): one for name, one in stored.items()}
    other = save_draft(tmp_path / "two", dict(read_draft(folder).config), renamed)
    assert checked_tensors(read_draft(other), family).keys() == tensors.keys()


def damaged(folder: Path, name: str, tensor: torch.Tensor | None) -> Path:
    tensors = load_file(folder / "model.safetensors")
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    return save_draft(folder, json.loads((folder / "config.json").read_text()), tensors)


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("fc.weight", None, "missing"),
        ("fc.bias", torch.zeros(48), "not a tensor of this model"),
        ("midlayer.hidden_norm.weight", torch.zeros(47), "wrong shape"),
        ("d2t", torch.zeros(DRAFT_VOCAB), "wrong dtype"),
        ("d2t", torch.arange(DRAFT_VOCAB) * 3, "ascending"),
        ("d2t", -torch.arange(DRAFT_VOCAB), "ascending"),
        ("d2t", torch.ones(DRAFT_VOCAB, dtype=torch.long), "different tokens"),
    ],
)
def test_damaged_tensors_are_refused(
    loaded: Loaded, tmp_path: Path, name: str, tensor: torch.Tensor | None, words: str
) -> None:
    folder = damaged(write_eagle3(tmp_path), name, tensor)
    with pytest.raises(InvalidInputError, match=words):
        read_eagle3(folder, loaded)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, UnsupportedError, "no EAGLE-3 draft"),
        ({"num_hidden_layers": 2}, UnsupportedError, "several layers"),
        ({"hidden_act": "gelu"}, UnsupportedError, "hidden_act"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 1]}, InvalidInputError, "ascending"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3]}, InvalidInputError, "from 1 to 2"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1]}}, InvalidInputError, "top"),
        ({"num_aux_hidden_states": 3}, InvalidInputError, "fc.weight"),
        ({"draft_vocab_size": 97}, InvalidInputError, "draft_vocab_size"),
        ({"target_hidden_size": 24}, InvalidInputError, "another target"),
    ],
)
def test_other_configs_are_refused(
    loaded: Loaded, tmp_path: Path, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    folder = write_eagle3(tmp_path)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=words):
        read_eagle3(folder, loaded)


def test_a_whole_vocabulary_shares_the_targets_head(small: Path, tmp_path: Path) -> None:
    """And yarn is the draft's as it is the target's."""
    config = eagle3_config(SMALL | {"rope_scaling": YARN}, TAPS, 96, "float32")
    folder = save_draft(tmp_path, config, eagle3_tensors(config))
    loaded = load_model(small, LoadOptions())
    draft = read_eagle3(folder, loaded)
    assert isinstance(draft, TargetDraft) and draft.taps == TAPS
    module = module_of(config, eagle3_tensors(config), loaded.model)
    assert module.head.linear is loaded.model.head.linear
    assert isinstance(module.attention, Mla)
    assert module.attention.rope.inv_freq[-1] < lowest_frequency(loaded)


def lowest_frequency(loaded: Loaded) -> torch.Tensor:
    """The slowest rotation of the draft without yarn."""
    config = eagle3_config(SMALL, TAPS, 96, "float32")
    attention = module_of(config, eagle3_tensors(config), loaded.model).attention
    assert isinstance(attention, Mla)
    return attention.rope.inv_freq[-1]


def test_the_layers_that_engines_tap() -> None:
    assert usual_taps(61) == (2, 30, 58)
    config = eagle3_config(SMALL, (2, 30, 58), DRAFT_VOCAB)
    for key in ("eagle_aux_hidden_state_layer_ids", "eagle_config"):
        del config[key]
    assert Eagle3Family.from_config(config).taps(61) == (2, 30, 58)


def test_without_a_draft_the_method_says_so(small: Path) -> None:
    with pytest.raises(Exception, match="folder eagle3 in the bundle"):
        LLM(small, speculate_method="eagle3")
    with pytest.raises(UnsupportedError, match="needs an EAGLE-3 draft"):
        run(
            load_model(small, LoadOptions()).model, [(1, 2)], PARAMS, build=DRAFTERS["eagle3"].build
        )
