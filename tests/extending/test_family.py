"""A family of known parts is one file and one line, for export and runtime alike; one with a part
that the runtime has no layer for is exported, quantized and judged all the same."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from cases import edit_json, export, quantize, run_program
from faults.small_model import family_config, write_dense
from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families import FAMILIES, parts
from mtp_checkpoints.families.base import ModulePatterns, Role, TensorMaker, TensorSpec
from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.moe_decoder import moe_decoder
from mtp_checkpoints.families.spec import Input, ModelSpec
from mtp_runtime import LLM, SamplingParams
from mtp_runtime.models.load import LoadOptions, load_model

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]
PAIR = ("--base-quant", "weight_only_int4", "--mtp-quant", "weight_only_int8")
FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
INT8 = ("--base-quant", "weight_only_int8", "--mtp-quant", "weight_only_int8")
OPTIONS = (*PAIR, "--group-size", "32", "--target", "vllm", "--quiet")


def ordered(fields: Fields, order: tuple[Input, Input]) -> ModelSpec:
    """A family of the parts of two others, whose MTP modules take their inputs in an order."""
    latent, grouped = parts.Mla.of(fields), parts.Gqa.of(fields)
    spec = moe_decoder(
        fields,
        lambda layer: grouped if layer % 2 else latent,
        usual_contract=MtpContract(source="the toy"),
    )
    return replace(spec, mtp=tuple(replace(module, inputs=order) for module in spec.mtp))


def swapped(fields: Fields) -> ModelSpec:
    """The toy family, which takes the hidden state first."""
    return ordered(fields, (Input.HIDDEN, Input.EMBEDDING))


@dataclass(frozen=True)
class DeltaRule:
    """An attention that only its tensors are known of."""

    hidden: int

    patterns: ClassVar[ModulePatterns] = ModulePatterns(
        linears={Role.ATTENTION: "self_attn.*_proj.*"}
    )

    @property
    def rope(self) -> None:
        return None

    def tensors(self, prefix: str, make: TensorMaker) -> Iterator[TensorSpec]:
        for name in ("in", "out"):
            shape = (self.hidden, self.hidden)
            yield make.matrix(f"{prefix}.{name}_proj", shape, Role.ATTENTION)
        yield make.kept(f"{prefix}.decay", (self.hidden,), Role.NORM)


def unknown(fields: Fields) -> ModelSpec:
    """The toy family of an attention without a layer."""
    attention = DeltaRule(fields.whole("hidden_size"))
    return moe_decoder(fields, lambda layer: attention, usual_contract=MtpContract(source="toy"))


def of_known_parts(fields: Fields) -> ModelSpec:
    """The toy family of the trained miniature's parts."""
    attention = parts.Gqa.of(fields)
    return moe_decoder(
        fields, lambda layer: attention, usual_contract=MtpContract(source="the toy")
    )


def config_of(model_type: str) -> dict[str, Any]:
    """The sizes of latent attention, and those of grouped queries."""
    grouped = {"head_dim": 16, "num_key_value_heads": 2, "partial_rotary_factor": 0.5}
    return family_config("glm4_moe_lite") | grouped | {"model_type": model_type}


@pytest.fixture
def known_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(FAMILIES, "toy_swapped", swapped)
    return write_dense(tmp_path / "source", config=config_of("toy_swapped"))


@pytest.fixture
def unknown_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(FAMILIES, "toy_delta", unknown)
    return write_dense(tmp_path / "source", config=config_of("toy_delta"))


def test_a_family_of_known_parts_is_one_line(known_parts: Path, tmp_path: Path) -> None:
    """Exported, quantized, verified and run, with drafts and without."""
    assert export(known_parts, tmp_path / "bf16", "--link", "copy", "--quiet").code == 0
    for folder in (tmp_path / "bf16", tmp_path / "int4"):
        if folder.name == "int4":
            assert quantize(known_parts, folder, *OPTIONS).code == 0
        options = ("--source", known_parts, "--level", "weights", "--quiet")
        verified = run_program("verify", folder, *options)
        assert verified.code == 0, verified.out + verified.err
        plain, drafted = (
            LLM(folder, speculate_method=method, speculate_max_draft_token_num=2).generate(
                PROMPTS, GREEDY
            )
            for method in ("none", "mtp")
        )
        assert [one.token_ids for one in plain] == [one.token_ids for one in drafted]
        assert (
            run_program("generate", folder, "--prompt", "def read(", "--max-new-tokens", 4).code
            == 0
        )


@pytest.mark.usefixtures("without_training")
def test_a_trained_model_of_a_family_passes_every_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its quantized bundle decodes, drafts as it was trained to, and generates."""
    monkeypatch.setitem(FAMILIES, "toy_trained", of_known_parts)
    source = Path(shutil.copytree(FIXTURES / "glm4-moe-tiny", tmp_path / "source"))
    edit_json(source / "config.json", lambda config: config.update(model_type="toy_trained"))
    exported, bundle = tmp_path / "bf16", tmp_path / "int8"
    assert export(source, exported, "--quiet").code == 0
    assert quantize(exported, bundle, *INT8, "--quiet").code == 0
    prompts = tmp_path / "prompts.jsonl"
    lines = (FIXTURES / "prompts.jsonl").read_text().splitlines()
    prompts.write_text("\n".join(lines[:4]))
    options = ("--prompts", prompts, "--max-new-tokens", 24, "--k", 1)
    verified = run_program("verify", bundle, "--source", source, "--level", "run", *options)
    assert verified.code == 0, verified.out + verified.err
    generated = run_program("generate", bundle, "--prompt", "def read(", "--max-new-tokens", 4)
    assert generated.code == 0, generated


def test_the_order_of_an_mtp_modules_inputs(
    known_parts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The halves of its projection are where the order says."""
    (first, second), (embedding, hidden) = (halves(known_parts) for _ in _families(monkeypatch))
    assert first.equal(hidden) and second.equal(embedding) and not first.equal(second)


def _families(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register the toy family, then one that takes the embedding first."""
    for order in ((Input.HIDDEN, Input.EMBEDDING), (Input.EMBEDDING, Input.HIDDEN)):
        monkeypatch.setitem(FAMILIES, "toy_swapped", partial(ordered, order=order))
        yield


def halves(path: Path) -> tuple[torch.Tensor, ...]:
    """The projection of the MTP module, by its inputs: embedding and hidden state."""
    module = load_model(path, LoadOptions()).model.mtp
    assert module is not None
    return module.projection.matrix(torch.float32).chunk(2)


def test_a_part_without_a_layer_is_exported_quantized_and_judged(
    unknown_part: Path, tmp_path: Path
) -> None:
    assert run_program("inspect", unknown_part).code == 0
    assert export(unknown_part, tmp_path / "bf16", "--link", "copy", "--quiet").code == 0
    assert quantize(unknown_part, tmp_path / "int4", *OPTIONS).code == 0
    for folder in (tmp_path / "bf16", tmp_path / "int4"):
        judged = ("verify", folder, "--source", unknown_part, "--level")
        verified = run_program(*judged, "weights")
        assert verified.code == 0, verified.out + verified.err
        tried = run_program(*judged, "run")
        assert tried.code == 0 and "no layer for DeltaRule" in " ".join(tried.out.split())
    damage(tmp_path / "int4/main")
    assert run_program(*judged, "weights").code != 0


def damage(folder: Path) -> None:
    """Double one norm of the attention, in the shard that has it."""
    name = "model.layers.0.self_attn.decay"
    for shard in folder.glob("*.safetensors"):
        tensors = load_file(shard)
        if name in tensors:
            save_file(tensors | {name: 2 * tensors[name]}, shard, metadata={"format": "pt"})
            return
    raise AssertionError(f"{folder} has no {name}")


def test_what_generates_names_the_part(unknown_part: Path, tmp_path: Path) -> None:
    """In one paragraph, before anything is read."""
    with pytest.raises(UnsupportedError, match=r"no layer for a part(?s:.*)Found DeltaRule"):
        LLM(unknown_part)
    outcome = run_program("generate", unknown_part, "--prompt", "a")
    assert outcome.code == 4 and "DeltaRule" in outcome.err and "Traceback" not in outcome.err
