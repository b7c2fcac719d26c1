"""Gemma-4 and its assistant as one bundle: grafted, served, quantized, exported again, and refused
where an engine has no assistants or the two are no pair."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cases import Outcome, export, nightly_but, quantize, read_json, read_tensors, run_program
from faults.small_model import write_tokenizer
from mtp_export.publish.card import card_files
from mtp_export.publish.content import read_content
from mtp_runtime import LLM, SamplingParams
from runtime.gemma import VOCAB, share_as_before, write_assistant, write_target
from runtime.harness import prompts_of

PLAIN = {"pre_projection", "post_projection", "embed_tokens", "centroids"}
IN_LAYERS = {"per_layer_input_gate", "per_layer_projection"}
SCHEMES = ["a8w8_fp8 a8w8_fp8", "weight_only_int8 bf16"]
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
PROMPTS = prompts_of([5, 40], VOCAB)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A target, and its assistant with a file that vLLM reads beside the weights."""
    folder = tmp_path_factory.mktemp("gemma")
    with pytest.MonkeyPatch.context() as patch:
        share_as_before(patch)
        write_target(folder / "target", "small", bos_token_id=0)  # as the tokenizer has it
        write_assistant(folder / "assistant", "small")
    write_tokenizer(folder / "target", VOCAB)
    (folder / "assistant/generation_config.json").write_text('{"suppress_tokens": [3]}')
    yield folder


@pytest.fixture(scope="module")
def bundle(folders: Path) -> Path:
    made = graft(folders, folders / "bundle")
    assert made.code == 0, made.err
    return folders / "bundle"


def graft(folders: Path, output: Path, *options: object) -> Outcome:
    pair = ("--main", folders / "target", "--mtp", folders / "assistant")
    return run_program("graft", *pair, "--output-dir", output, *options)


def decoded(folder: Path, **options: Any) -> list[list[int]]:
    outputs = LLM(folder, **options).generate(PROMPTS, PARAMS)
    return [list(one.token_ids) for one in outputs]


def test_a_graft_loses_nothing(folders: Path, bundle: Path) -> None:
    for part, source in (("main", "target"), ("assistant", "assistant")):
        ours, theirs = read_tensors(bundle / part), read_tensors(folders / source)
        assert ours.keys() == theirs.keys()
        assert all(ours[name].equal(tensor) for name, tensor in theirs.items())
        assert read_json(bundle / part / "config.json") == read_json(
            folders / source / "config.json"
        )
    assert read_json(bundle / "assistant/generation_config.json") == {"suppress_tokens": [3]}
    assert not (bundle / "mtp").exists()


@pytest.mark.nightly
def test_drafts_change_no_token(folders: Path, bundle: Path, tmp_path: Path) -> None:
    assert decoded(bundle, speculate_method="assistant") == decoded(folders / "target")
    options = ("--base-quant", "a8w8_fp8", "--mtp-quant", "a8w8_fp8")
    assert quantize(bundle, tmp_path / "fp8", *options).code == 0
    plain = decoded(tmp_path / "fp8/main")
    assert decoded(tmp_path / "fp8", speculate_method="assistant") == plain


def test_commands_that_serve_it(bundle: Path) -> None:
    lines = json.loads(run_program("launch", bundle, "--json").out)["engines"]
    assert lines.keys() == {"vllm", "sglang"}
    words = shlex.split(lines["vllm"]["commands"][0])
    assert words[:3] == ["vllm", "serve", str(bundle / "main")]
    assert json.loads(words[4]) == {
        "method": "mtp",
        "model": str(bundle / "assistant"),
        "num_speculative_tokens": 1,
    }
    assert f"--speculative-draft-model-path {bundle}/assistant" in lines["sglang"]["commands"][0]
    assert all(not engine["draft_commands"] for engine in lines.values())


def test_a_model_card_names_it(bundle: Path) -> None:
    card = card_files("org/gemma", read_content(bundle, None), None, None)["README.md"].decode()
    assert "Main model with a draft for `assistant`" in card
    assert '"model": "/models/gemma/assistant"' in card


def test_verify_takes_it(bundle: Path) -> None:
    found = run_program("verify", bundle, "--level", "files", "--quiet")
    assert found.code == 0, found.out + found.err


@pytest.mark.nightly
def test_a_bundle_is_exported_again(folders: Path, bundle: Path, tmp_path: Path) -> None:
    assert export(bundle, tmp_path / "again", "--target", "vllm").code == 0
    for part in ("main", "assistant"):
        ours, theirs = read_tensors(tmp_path / "again" / part), read_tensors(bundle / part)
        assert all(ours[name].equal(tensor) for name, tensor in theirs.items())
    name = "assistant/generation_config.json"
    assert (tmp_path / "again" / name).read_bytes() == (bundle / name).read_bytes()


@pytest.mark.parametrize("schemes", nightly_but([SCHEMES[0]], SCHEMES))
def test_quantized(schemes: str, bundle: Path, tmp_path: Path) -> None:
    """Each part by its own config.json, which leaves out what engines build as linears and is not
    quantized."""
    output, (base, mtp) = tmp_path / "quantized", schemes.split()
    options = ("--base-quant", base, "--mtp-quant", mtp, "--allow-untested-pair")
    made = quantize(bundle, output, *options)
    assert made.code == 0, made.err
    main, draft = (
        json.dumps(read_json(output / part / "config.json").get("quantization_config", {}))
        for part in ("main", "assistant")
    )
    assert all(name in main for name in (*IN_LAYERS, "per_layer_model_projection"))
    assert not any(name in main for name in ("pre_projection", "centroids"))
    assert all(name in draft for name in PLAIN - {"embed_tokens"}) == (mtp != "bf16")
    kept = {name.rpartition(".")[0].rpartition(".")[2] for name in read_tensors(bundle / "main")}
    assert kept >= IN_LAYERS
    for part, plain in (("main", IN_LAYERS), ("assistant", PLAIN)):
        before = read_tensors(bundle / part)
        for name, tensor in read_tensors(output / part).items():
            if name.split(".")[-2] in plain:
                assert tensor.equal(before[name]), name
    codes = {str(t.dtype) for n, t in read_tensors(output / "assistant").items() if "q_proj" in n}
    assert ("torch.float8_e4m3fn" in codes) == (mtp != "bf16")


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        ("target", "vllm", "graft --main TARGET --mtp DRAFT"),
        ("assistant", "vllm", "graft --main TARGET --mtp DRAFT"),
        ("bundle", "tensorrt-llm", "not known to load"),
        ("bundle", "llama.cpp", "no layout for this model"),
        ("bundle", "eagle", "no layout for this model"),
    ],
)
def test_refusals_of_exports(
    source: str, target: str, words: str, bundle: Path, tmp_path: Path
) -> None:
    refused = export(bundle.parent / source, tmp_path / "out", "--target", target)
    assert refused.code == 4 and words in " ".join(refused.err.split()), refused.err
    assert not (tmp_path / "out").exists()


def test_an_assistant_of_another_target_is_refused(folders: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        share_as_before(patch)
        write_target(tmp_path / "target", "large")
    (tmp_path / "assistant").symlink_to(folders / "assistant")
    refused = graft(tmp_path, tmp_path / "out")
    assert refused.code == 3 and "they differ in full_attention" in refused.err, refused.err
    assert not (tmp_path / "out").exists()
