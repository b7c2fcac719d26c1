"""Parallel heads: every layout against sums written out here, and output that stays the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.families.parallel_heads import HeadsLayout
from mtp_export.verify.evidence.decode import Decoded, decode
from mtp_runtime import LLM, SamplingParams
from mtp_runtime.drafters.parallel_heads import read_parallel_heads
from mtp_runtime.loading.draft_folder import DraftFolder, read_draft, values_of
from mtp_runtime.models.load import Loaded, LoadOptions, load_model
from mtp_runtime.models.parallel_heads import StoredHeads
from mtp_runtime.teacher_forcing import Text, Texts, model_states
from runtime.checkpoints import SMALL, write_checkpoint
from runtime.drafts import (
    Tensors,
    ffn_layout,
    heads_tensors,
    save_draft,
    write_heads,
    write_layer_heads,
)
from runtime.harness import prompts_of, run

PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)
LENGTHS = [1, 3, 15, 16, 17, 40]
LAYOUTS: dict[str, dict[str, Any]] = {
    "blockwise": {"inner": 64, "activation": "relu"},
    "medusa": {"own_projections": True},
    "medusa, two blocks": {"own_projections": True, "blocks": 2},
    "medusa, legacy": {},
    "vllm, shared head": {"stored_projection": True, "biases": False},
}


@pytest.fixture(scope="module")
def loaded(small: Path) -> Loaded:
    return load_model(small, LoadOptions())


def expected_drafts(
    tensors: Tensors, layout: HeadsLayout, hidden: torch.Tensor, head: torch.Tensor
) -> list[int]:
    """The best token of every head over one hidden state [d]; head [vocab, d] is the target's."""
    found = []
    for i in range(layout.heads):
        x = hidden.double()
        for j in range(layout.blocks):

            def affine(x: torch.Tensor, name: str) -> torch.Tensor:
                y = x @ tensors[f"{name}.weight"].double().T
                return y + tensors[f"{name}.bias"].double() if f"{name}.bias" in tensors else y

            name = f"blocks.{i}.layers.{j}"
            if layout.inner:
                x = x + affine(affine(x, f"{name}.up").relu(), f"{name}.down")
            else:
                x = x + F.silu(affine(x, name))
        own = tensors.get(f"lm_heads.{i}.weight", tensors.get("lm_head.weight", head))
        found.append(int((x @ own.double().T).argmax()))
    return found


def proposals_of(loaded: Loaded, folder: Path, k: int) -> Decoded:
    draft = read_parallel_heads(folder, loaded)
    model = loaded.model.tapped(draft.taps)
    prompts = prompts_of(LENGTHS, 96)
    return decode(model, prompts, PARAMS, method="parallel_heads", k=k, build=draft.build)


BY_TORCH = LoadOptions(dequantize_at_load=False)


@torch.inference_mode()
@pytest.mark.parametrize("options", [LoadOptions(), BY_TORCH], ids=["compiled", "torch"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_drafts_of_residual_blocks(
    small: Path, tmp_path: Path, name: str, options: LoadOptions
) -> None:
    """At most as many as there are heads, whatever is asked for."""
    loaded = load_model(small, options)
    layout = ffn_layout(**LAYOUTS[name])
    tensors, folder = heads_tensors(layout), write_heads(tmp_path, layout)
    head = load_file(small / "model.safetensors")["lm_head.weight"]
    decoded = proposals_of(loaded, folder, k=5)
    compared = 0
    for proposal in decoded.proposals:
        known = decoded.requests[proposal.request].tokens[: proposal.last + 1]
        states = model_states(loaded.model, Texts((Text(tuple(known[:-1]), 1),)))
        wanted = expected_drafts(tensors, layout, states.after[-1], head)
        assert list(proposal.tokens) == wanted[: len(proposal.tokens)], proposal
        compared += len(proposal.tokens) == layout.heads
    assert compared > 20


@torch.inference_mode()
@pytest.mark.parametrize("options", [LoadOptions(), BY_TORCH], ids=["compiled", "torch"])
def test_drafts_of_layers(small: Path, tmp_path: Path, options: LoadOptions) -> None:
    """Each head is a model whose last layer is replaced."""
    folder, loaded = write_layer_heads(tmp_path / "heads"), load_model(small, options)
    own = load_file(folder / "model.safetensors")
    models = []
    for head in range(2):
        tensors = load_file(small / "model.safetensors")
        for name, tensor in own.items():
            if name.startswith(f"extra_heads.{head}."):
                tensors[name.replace(f"extra_heads.{head}", "model.layers.2")] = tensor
        other = write_checkpoint(tmp_path / f"model{head}")
        save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
        models.append(load_model(other, options).model)
    decoded = proposals_of(loaded, folder, k=2)
    compared = 0
    for proposal in decoded.proposals:
        known = decoded.requests[proposal.request].tokens[: proposal.last + 1]
        texts = Texts((Text(tuple(known[:-1]), 1),))
        after = [model_states(model, texts).after[-1:] for model in models]
        wanted = [
            int(model.head.logits(x).argmax()) for model, x in zip(models, after, strict=True)
        ]
        assert list(proposal.tokens) == wanted[: len(proposal.tokens)], proposal
        compared += len(proposal.tokens) == 2
    assert compared > 20


@pytest.mark.parametrize("body", ["ffn", "layer"])
@pytest.mark.parametrize("sampled", [False, True])
def test_output_is_that_of_plain_decoding(
    small: Path, tmp_path: Path, body: str, sampled: bool
) -> None:
    folder = tmp_path / "draft"
    write_layer_heads(folder) if body == "layer" else write_heads(folder, ffn_layout())
    llm = LLM(
        small, speculate_method="parallel_heads", draft_model=folder,
        speculate_max_draft_token_num=3,
    )  # fmt: skip
    prompts = [list(prompt) for prompt in prompts_of(LENGTHS, 96)]
    if sampled:
        params = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True)
        assert sum(one.metrics.accepted[0] for one in llm.generate(prompts, params)) > 0
        return
    expected = LLM(small).generate(prompts, PARAMS)
    found = llm.generate(prompts, PARAMS)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]


@pytest.mark.parametrize("body", ["ffn", "layer"])
def test_in_bfloat16(small: Path, tmp_path: Path, body: str) -> None:
    write_layer_heads(tmp_path) if body == "layer" else write_heads(tmp_path, ffn_layout())
    llm = LLM(
        small, dtype="bfloat16", speculate_method="parallel_heads", draft_model=tmp_path,
        speculate_max_draft_token_num=2,
    )  # fmt: skip
    (output,) = llm.generate([list(prompts_of([20], 96)[0])], PARAMS)
    assert output.metrics.drafted[1] > 0


@pytest.mark.parametrize("body", ["ffn", "layer"])
def test_preempted_requests_draft_on(loaded: Loaded, tmp_path: Path, body: str) -> None:
    write_layer_heads(tmp_path) if body == "layer" else write_heads(tmp_path, ffn_layout())
    draft = read_parallel_heads(tmp_path, loaded)
    model, prompts = loaded.model.tapped(draft.taps), prompts_of([40, 3, 25, 60, 17, 33, 8], 96)
    sizes = {"cache_tokens": 16 * 9, "prefill_chunk": 7, "max_step_tokens": 20}
    found = run(model, prompts, PARAMS, k=2, build=draft.build, **sizes, max_batch_size=5)
    assert sum(request.metrics.preemptions for request in found.requests) > 0
    assert found.outputs == run(model, prompts, PARAMS).outputs


def medusa_names(tensors: Tensors, prefix: str = "") -> Tensors:
    """vLLM's names as FasterDecoding/Medusa has them: a projection follows the blocks."""
    named = {}
    for name, tensor in tensors.items():
        name = re.sub(r"blocks\.(\d+)\.layers\.(\d+)\.", r"\1.\2.linear.", name)
        named[prefix + re.sub(r"lm_heads\.(\d+)\.", r"\1.1.", name)] = tensor
    return named


@pytest.mark.parametrize("file", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("prefix", ["", "medusa_heads.", "medusa_head."])
def test_medusa_files(loaded: Loaded, tmp_path: Path, file: str, own: bool, prefix: str) -> None:
    """Published files, whose config.json says of the heads but their number."""
    tensors = heads_tensors(ffn_layout(own_projections=own))
    named, config = medusa_names(tensors, prefix), {"medusa_num_heads": 3, "medusa_num_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if file.endswith(".pt"):
        torch.save(named, tmp_path / file)
    else:
        save_file(named, tmp_path / file)
    found = StoredHeads.of(read_draft(tmp_path), loaded.model).tensors
    assert found.keys() == tensors.keys()
    assert all(torch.equal(values_of(found[name]), tensors[name]) for name in tensors)


def test_biases_that_medusas_files_lack_are_missed(loaded: Loaded, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    tensors = medusa_names(heads_tensors(ffn_layout(biases=False)))
    save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(InvalidInputError, match="biases of the heads are missing"):
        read_parallel_heads(tmp_path, loaded)


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("executed",)


def test_a_pickle_of_more_than_tensors_is_refused(loaded: Loaded, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for content in ({"0.0.linear.weight": Harmful()}, [1, 2]):
        torch.save(content, tmp_path / "medusa_lm_head.pt")
        with pytest.raises(InvalidInputError, match="more than tensors|something else"):
            read_parallel_heads(tmp_path, loaded)
    torch.save({"0.0.linear.weight": torch.ones(2)}, tmp_path / "medusa_lm_head.pt")
    whole = (tmp_path / "medusa_lm_head.pt").read_bytes()
    name = whole.rindex(b"medusa_lm_head/")  # in the archive's list of its files
    for damaged in (b"no pickle", whole[:name] + b"\xed" + whole[name + 1 :]):
        (tmp_path / "medusa_lm_head.pt").write_bytes(damaged)
        with pytest.raises(InvalidInputError, match="cannot be read"):
            read_parallel_heads(tmp_path, loaded)


BIASES = [f"blocks.{i}.layers.0.bias" for i in range(3)]


@pytest.mark.parametrize(
    ("dropped", "added", "config", "words"),
    [
        (BIASES, {}, {}, "biases of the heads are missing"),
        (BIASES[1:2], {}, {}, r"blocks\.1\.layers\.0\.bias"),
        ([], {}, {"medusa_fc_bias": False}, "leaves out"),
        (["blocks.1.layers.0.weight"], {}, {}, r"blocks\.1\.layers\.0\.weight"),
        ([], {"token_map": (3,)}, {}, "token_map"),
        ([], {"blocks.0.norm.weight": (48,)}, {}, "no known layout"),
        ([], {"blocks.0.layers.1.weight": (48, 48)}, {}, "blocks"),
        ([], {"lm_heads.0.weight": (96, 48)}, {"original_lm_head": False}, "1"),
        ([], {"extra_heads.0.x": (1,)}, {}, "two kinds"),
        ([], {}, {"num_heads": 4}, "another number of heads"),
        (BIASES, {}, {"medusa_fc_bias": False, "hidden_act": "gelu"}, "act"),
    ],
)
def test_damaged_heads_are_refused(
    loaded: Loaded,
    tmp_path: Path,
    dropped: list[str],
    added: dict[str, tuple[int, ...]],
    config: dict[str, Any],
    words: str,
) -> None:
    layout = ffn_layout()
    tensors = heads_tensors(layout) | {name: torch.zeros(shape) for name, shape in added.items()}
    kept = {name: tensor for name, tensor in tensors.items() if name not in dropped}
    folder = save_draft(tmp_path, layout.config("float32") | config, kept)
    with pytest.raises(InvalidInputError, match=words):
        read_parallel_heads(folder, loaded)


def test_layers_that_are_not_the_targets_are_refused(loaded: Loaded, tmp_path: Path) -> None:
    tensors = load_file(write_layer_heads(tmp_path) / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    name = "extra_heads.1.self_attn.o_proj.weight"
    folder = save_draft(tmp_path, config, {n: t for n, t in tensors.items() if n != name})
    with pytest.raises(InvalidInputError, match="missing"):
        read_parallel_heads(folder, loaded)
    one = {n: t for n, t in tensors.items() if not n.startswith("extra_heads.0.")}
    with pytest.raises(InvalidInputError, match="Head 0 of the draft is missing"):
        read_parallel_heads(save_draft(tmp_path, config, one), loaded)


def test_heads_of_another_target_are_refused(loaded: Loaded, tmp_path: Path) -> None:
    folder = write_heads(tmp_path, ffn_layout(hidden=24))
    with pytest.raises(InvalidInputError, match="another target"):
        read_parallel_heads(folder, loaded)


def test_every_parameter_has_a_gradient(small: Path) -> None:
    """Beside a target that torch runs."""
    loaded = load_model(small, BY_TORCH)
    for fields in LAYOUTS.values():
        layout = ffn_layout(**fields)
        tensors = {n: torch.nn.Parameter(t) for n, t in heads_tensors(layout).items()}
        heads = StoredHeads(layout, tensors).ffn(loaded.model)
        logits = heads.logits(heads.bodies(torch.randn(5, SMALL["hidden_size"])))
        goals = torch.arange(15)
        F.cross_entropy(logits.flatten(0, 1), goals).backward()  # type: ignore[no-untyped-call]
        assert all(one.grad is not None and one.grad.abs().sum() > 0 for one in tensors.values())


def test_what_vllm_computes() -> None:
    """Its MedusaModel adds SiLU of one matrix, under projections that are stored."""
    runs = {name: ffn_layout(**fields).runs_in_vllm for name, fields in LAYOUTS.items()}
    assert runs == {
        "blockwise": False,
        "medusa": True,
        "medusa, two blocks": True,
        "medusa, legacy": False,
        "vllm, shared head": True,
    }
    config = ffn_layout(stored_projection=True).config()
    assert config["model_type"] == "medusa" and config["original_lm_head"]
    assert isinstance(DraftFolder(Path(), config, {}).config["num_heads"], int)
