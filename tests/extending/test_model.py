"""A model is a family, and where its attention is new, a part with its layer.

A toy attention with grouped queries, biases, norms of queries and keys and partial rotary positions
is registered and run end to end, its MTP module included."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F

from cases import export
from faults.matrix import no_progress
from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families import FAMILIES, parts
from mtp_checkpoints.families.base import ModulePatterns, Role, TensorMaker, TensorSpec
from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.moe_decoder import moe_decoder
from mtp_checkpoints.families.spec import ModelSpec
from mtp_export.verify.check import Level, Status
from mtp_export.verify.context import Context
from mtp_export.verify.decoding import paths, stream
from mtp_export.verify.decoding.stream_cost import VARIANT_COPIES
from mtp_export.verify.options import VerifyOptions
from mtp_runtime import LLM, SamplingParams
from mtp_runtime.cache import CacheSpec, LayerCache
from mtp_runtime.layers.attention import ForwardPass
from mtp_runtime.layers.linear import Linear
from mtp_runtime.layers.mla import Mla
from mtp_runtime.layers.norm import RmsNorm
from mtp_runtime.layers.rope import Rope, rotate_pairs
from mtp_runtime.models.compiled import CompiledLayers, MixedLayers
from mtp_runtime.models.execution import TorchLayers
from mtp_runtime.models.layer_loader import LayerLoader
from mtp_runtime.models.layer_types import LAYERS, LayerType
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.models.model import Model
from runtime.checkpoints import SMALL, write_checkpoint
from runtime.harness import Walk, prompts_of, run

HEADS, KV_HEADS, HEAD, ROTATED = 4, 2, 16, 8
LATENT_KEYS = frozenset(
    {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}
)
HYBRID = SMALL | {"model_type": "toy_gqa"}
CONFIG = {key: value for key, value in HYBRID.items() if key not in LATENT_KEYS}


@dataclass(frozen=True)
class ToyGqa:
    """The part: q, k and v projections with biases, and norms of queries and keys."""

    hidden: int
    rope: parts.Rope

    patterns: ClassVar[ModulePatterns] = parts.Gqa.patterns

    def tensors(self, prefix: str, make: TensorMaker) -> Iterator[TensorSpec]:
        for name, rows in (("q", HEADS * HEAD), ("k", KV_HEADS * HEAD), ("v", KV_HEADS * HEAD)):
            weight = make.matrix(f"{prefix}.{name}_proj", (rows, self.hidden), Role.ATTENTION)
            yield weight
            yield weight._replace(name=f"{prefix}.{name}_proj.bias", shape=(rows,))
        yield make.matrix(f"{prefix}.o_proj", (self.hidden, HEADS * HEAD), Role.ATTENTION)
        for name in ("q", "k"):
            yield make.norm(f"{prefix}.{name}_norm", HEAD)


def toy_family(latent: Sequence[int] = ()) -> Callable[[Fields], ModelSpec]:
    """A family with the toy's attention, and latent attention in some layers."""

    def spec(fields: Fields) -> ModelSpec:
        toy = ToyGqa(fields.whole("hidden_size"), parts.Rope.of(fields, ROTATED))
        mla = parts.Mla.of(fields) if latent else None
        return moe_decoder(
            fields,
            lambda layer: mla if mla is not None and layer in latent else toy,
            usual_contract=MtpContract(source="the toy"),
        )

    return spec


@dataclass(frozen=True)
class Gqa:
    """Grouped-query attention; the cache is keys and values [pages, page, g, n]."""

    query: Linear
    key: Linear
    value: Linear
    biases: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    query_norm: RmsNorm
    key_norm: RmsNorm
    output: Linear
    rope: Rope

    @property
    def row_elements(self) -> int:
        return 3 * HEADS * HEAD

    @property
    def has_reference(self) -> bool:
        return False

    def new_cache(self, spec: CacheSpec) -> LayerCache:
        return spec.empty(KV_HEADS, HEAD), spec.empty(KV_HEADS, HEAD)

    def __call__(self, x: torch.Tensor, cache: LayerCache, forward: ForwardPass) -> torch.Tensor:
        keys, values = cache
        layout, cos_sin = forward.layout, forward.cos_sin(self.rope)
        q, k, v = (
            (linear(x) + bias).view(len(x), -1, HEAD)
            for linear, bias in zip((self.query, self.key, self.value), self.biases, strict=True)
        )
        q = self._rotated(self.query_norm(q), cos_sin)
        keys.flatten(0, 1)[layout.slots] = self._rotated(self.key_norm(k), cos_sin)
        values.flatten(0, 1)[layout.slots] = v
        out = torch.empty_like(q)
        for request, end in enumerate(layout.kv_lens.tolist()):
            rows = slice(*layout.cu_q[request : request + 2].tolist())
            pages = layout.page_table[request]
            past = [tensor[pages].flatten(0, 1)[:end] for tensor in (keys, values)]
            k, v = (tensor.repeat_interleave(HEADS // KV_HEADS, dim=1) for tensor in past)
            scores = torch.einsum("shn,thn->hst", q[rows], k) * HEAD**-0.5
            seen = torch.arange(end) <= layout.positions[rows, None]
            probs = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
            out[rows] = torch.einsum("hst,thn->shn", probs, v)
        return self.output(out.flatten(1))

    def _rotated(self, x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        turned = rotate_pairs(x[..., :ROTATED], cos_sin[:, None])
        return torch.cat([turned, x[..., ROTATED:]], dim=-1)


def load_toy(loader: LayerLoader, part: ToyGqa, prefix: str) -> Gqa:
    source = loader.source
    q, k, v = (f"{prefix}.{name}_proj" for name in "qkv")
    return Gqa(
        *map(source.linear, (q, k, v)),
        biases=(source.tensor(f"{q}.bias"), source.tensor(f"{k}.bias"), source.tensor(f"{v}.bias")),
        query_norm=loader.norm(f"{prefix}.q_norm"),
        key_norm=loader.norm(f"{prefix}.k_norm"),
        output=source.linear(f"{prefix}.o_proj"),
        rope=loader.rope(part.rope),
    )


def register(patch: pytest.MonkeyPatch, latent: Sequence[int] = ()) -> None:
    """One line for the family, one for the part's layer."""
    patch.setitem(FAMILIES, "toy_gqa", toy_family(latent))
    patch.setitem(LAYERS, ToyGqa, LayerType(load_toy))


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        register(patch)
        yield write_checkpoint(tmp_path_factory.mktemp("toy"), CONFIG)


def plain_logits(model: Model, tokens: tuple[int, ...]) -> torch.Tensor:
    """The toy without a cache: every layer over the whole text at once."""
    x = model.embedding(torch.tensor(tokens))
    assert isinstance(model.layers, TorchLayers)
    causal = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    for layer in model.layers.layers:
        attention = layer.attention
        assert isinstance(attention, Gqa)
        normed = layer.normed(x)
        cos_sin = attention.rope.cos_sin(torch.arange(len(x)))[:, None]
        q, k, v = (
            F.linear(normed, linear.matrix(torch.float32).t(), bias).view(len(x), -1, HEAD)
            for linear, bias in zip(
                (attention.query, attention.key, attention.value), attention.biases, strict=True
            )
        )
        q, k = attention.query_norm(q), attention.key_norm(k)
        q, k = (
            torch.cat([rotate_pairs(a[..., :ROTATED], cos_sin), a[..., ROTATED:]], -1)
            for a in (q, k)
        )
        out = F.scaled_dot_product_attention(
            *(a.transpose(0, 1)[None] for a in (q, k, v)), attn_mask=causal, enable_gqa=True
        )
        x = x + attention.output(out[0].transpose(0, 1).flatten(1))
        x = x + layer.feed_forward(layer.post_norm(x))
    return model.head.logits(model.head.normed(x))


@torch.inference_mode()
def test_logits_are_those_without_a_cache(toy: Path) -> None:
    loaded = load_model(toy, LoadOptions())
    assert not loaded.ledger.skipped
    (tokens,) = prompts_of([40], 96)
    expected = plain_logits(loaded.model, tokens)
    walk = Walk(loaded.model)
    parts = [tokens[:17], tokens[17:30], *([token] for token in tokens[30:])]
    found = torch.cat([walk.feed(part)[0] for part in parts])
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["mtp", "draft_model"])
def test_speculation_end_to_end(toy: Path, method: str) -> None:
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    prompts = [list(prompt) for prompt in prompts_of([3, 17, 20], 96)]
    expected = LLM(toy).generate(prompts, params)
    draft = toy if method == "draft_model" else None
    llm = LLM(toy, speculate_method=method, speculate_max_draft_token_num=3, draft_model=draft)
    found = llm.generate(prompts, params)
    assert [o.token_ids for o in found] == [o.token_ids for o in expected]
    assert all(o.metrics.drafted for o in found)
    if method == "draft_model":
        assert all(o.metrics.accepted == o.metrics.drafted for o in found)


def test_layers_that_kernels_do_not_know_are_run_by_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention counts, not only feed-forward; the layers around them stay compiled."""

    register(monkeypatch, latent=(0, 2, 3))
    path = write_checkpoint(tmp_path / "hybrid", HYBRID)
    model = load_model(path, LoadOptions()).model
    assert isinstance(model.layers, MixedLayers)
    assert [type(part) for part in model.layers.runs] == [
        CompiledLayers,
        TorchLayers,
        CompiledLayers,
    ]
    assert [len(part) for part in model.layers.each()] == [1, 1, 1]
    by_torch = load_model(path, LoadOptions(dequantize_at_load=False)).model
    assert isinstance(by_torch.layers, TorchLayers)
    assert isinstance(by_torch.layers.layers[0].attention, Mla)
    (tokens,) = prompts_of([20], 96)
    expected, found = (Walk(each).feed(tokens)[0] for each in (by_torch, model))
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    prompts = prompts_of([5, 16], 96)
    plain = run(model, prompts, params).outputs
    assert run(model, prompts, params, method="mtp", k=3).outputs == plain


@pytest.mark.parametrize(
    ("layer", "latent"), [(0, ()), (1, (0, 2, 3)), (3, (0, 1, 2))], ids=["all", "one", "module"]
)
def test_what_kernels_do_not_run_is_not_deterministic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer: int, latent: tuple[int, ...]
) -> None:
    """One such layer is enough, and the MTP module's counts; the layer is named."""
    register(monkeypatch, latent)
    path = write_checkpoint(tmp_path, HYBRID)
    with pytest.raises(UnsupportedError, match=f"layer {layer} of .*(?s:.*)attention Gqa"):
        load_model(path, LoadOptions(deterministic=True))
    if layer == 3:
        load_model(path, LoadOptions(deterministic=True, with_mtp=False))


@pytest.fixture(scope="module")
def context(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Context:
    """The toy's bundle, to be verified on short texts."""
    folder = tmp_path_factory.mktemp("bundle")
    assert export(toy, folder / "bundle", "--link", "copy", "--quiet").code == 0
    prompts = folder / "prompts.jsonl"
    lines = [json.dumps({"prompt_token_ids": prompt}) for prompt in prompts_of([5, 9], 96)]
    prompts.write_text("\n".join(lines))
    options = VerifyOptions(
        folder / "bundle",
        source=None,
        level=Level.RUN,
        prompts=prompts,
        max_new_tokens=8,
        ks=(2,),
        stream=True,
        workdir=folder / "state",
    )
    return Context.open(options, no_progress)


def test_the_cost_of_a_streamed_pass_is_the_attentions(context: Context) -> None:
    """By the cache of this attention; config.json has none of the sizes of another's."""
    items = list(stream.run(context))
    assert all(item.status is not Status.FAIL for item in items)
    cost = next(item.data for item in items if item.name == "cost estimate")
    hidden, rows, vocab = CONFIG["hidden_size"], 5 + 9, CONFIG["vocab_size"]
    width = 3 * hidden + 2 * KV_HEADS * HEAD + VARIANT_COPIES * hidden
    assert cost["activation_bytes"] == 4 * rows * width + 32 * rows * vocab  # states, then logits


def test_attention_without_a_reference_is_not_compared_with_itself(context: Context) -> None:
    items = {item.name: item for item in paths.run(context)}
    compared = items["attention kernel or its reference"]
    assert compared.status is Status.NOT_TESTED and "attention Gqa" in compared.cause
    assert items["batch 1 or 2"].status is Status.PASS
