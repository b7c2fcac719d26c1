"""Grafts onto main models in GGUF files: the files stay as they are, the module gets one beside."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.make_checkpoint import TINY_CONFIG
from bundle.commands import check_nothing_looks_whole
from cases import (
    Outcome,
    edit_json,
    looks_finished,
    make_checkpoint,
    quantize,
    read_json,
    run_in_a_fork,
    run_program,
    tree,
)
from gguf_files import GgufModel, gguf_model, is_of_module, without_module
from mtp_checkpoints.containers.gguf_file import GgufHeader, read_header
from mtp_checkpoints.containers.gguf_values import text, texts, u32
from mtp_checkpoints.dtypes import DType
from mtp_checkpoints.sources.local_folder import LocalFolder
from mtp_export.verify.evidence.prompts import BUILT_IN

CONFIG = {key: value for key, value in TINY_CONFIG.items() if key != "quantization_config"}
LAYERS = CONFIG["num_hidden_layers"]
MODULE = f"blk.{LAYERS}."
TRAINED = Path(__file__).resolve().parents[2] / "fixtures/glm4-moe-tiny"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("original") / "tiny", CONFIG)


@pytest.fixture(scope="module")
def whole(original: Path) -> GgufModel:
    """Somebody's model in Q4_0, with their own chat template."""
    model = gguf_model(original, "q4_0")
    return GgufModel({**model.keys, "tokenizer.chat_template": text("theirs")}, model.tensors)


@pytest.fixture(scope="module")
def host(whole: GgufModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It without the module, in three files."""
    folder = tmp_path_factory.mktemp("host")
    without_module(whole).write_parts(folder, "some-Q4_0", 3)
    return folder


def graft(main: Path, mtp: Path, output: Path, *options: object) -> Outcome:
    named = ("--output-dir", output, "--target", "llama.cpp", "--quiet")
    return run_program("graft", main, mtp, *named, *options)


@pytest.fixture(scope="module")
def bundle(host: Path, original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("bundle") / "out"
    outcome = graft(host, original, output, "--mtp-quant", "q8_0")
    assert outcome.code == 0, outcome.err
    return output


def header_of(path: Path) -> GgufHeader:
    return read_header(LocalFolder(path.parent).file(path.name))


def tensors_of(path: Path) -> Iterator[tuple[Any, ...]]:
    data = path.read_bytes()
    for one in header_of(path).shard.tensors:
        place = slice(one.offset_bytes, one.offset_bytes + one.size_bytes)
        yield one.name, one.dtype, one.shape, data[place]


def test_the_main_model_s_files_are_linked(bundle: Path, host: Path) -> None:
    files = sorted(host.iterdir())
    assert [path.name for path in sorted((bundle / "main").glob("*.gguf"))] == [
        path.name for path in files
    ]
    assert all((bundle / "main" / path.name).samefile(path) for path in files)
    recorded = read_json(bundle / "mtp_export.json")
    options = recorded["options"]
    assert (options["base_quant"], options["mtp_quant"]) == ("grafted", "q8_0")
    assert options["main_quant_method"] == "gguf" and "q4_0" in options["main_storages"]
    assert re.fullmatch("[0-9a-f]{64}", recorded["main_identity"])


def test_copies_are_theirs_to_the_byte(host: Path, original: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    outcome = graft(host, original, output, "--link", "copy")
    assert outcome.code == 0, outcome.err
    for path in host.iterdir():
        assert (output / "main" / path.name).read_bytes() == path.read_bytes()


def test_the_module_is_that_of_quantize_with_their_vocabulary(
    bundle: Path, host: Path, original: Path, tmp_path: Path
) -> None:
    options = ("--target", "llama.cpp", "--part", "mtp", "--base-quant", "q8_0")
    words = ("--pre-tokenizer", "gpt-2", "--quiet")
    assert quantize(original, tmp_path / "out", *options, *words).code == 0
    (made,) = (bundle / "mtp").glob("*.gguf")
    (alone,) = (tmp_path / "out/mtp").glob("*.gguf")
    assert made.name == "mtp-some-Q4_0.gguf"
    assert [*tensors_of(made)] == [*tensors_of(alone)]
    keys = header_of(made).keys
    assert keys["tokenizer.chat_template"].data == "theirs"
    theirs = header_of(min(host.iterdir())).keys
    assert {n: v for n, v in keys.items() if n.startswith("tokenizer.")} == {
        n: v for n, v in theirs.items() if n.startswith("tokenizer.")
    }


def test_the_module_names_its_main_model(
    bundle: Path, whole: GgufModel, original: Path, tmp_path: Path
) -> None:
    """Exchanged with that of another main model of the same layout, and put beside one."""
    identity = read_json(bundle / "mtp_export.json")["main_identity"]
    (module,) = (bundle / "mtp").glob("*.gguf")
    assert header_of(module).keys["mtp_export.main_identity"].data == identity
    norm = whole.tensors["blk.1.ffn_norm.weight"]
    changed = {**whole.tensors, norm.name: replace(norm, values=norm.values * 1.01)}
    (tmp_path / "flat").mkdir()
    other = without_module(GgufModel(whole.keys, changed)).write(tmp_path / "flat/some-Q4_0.gguf")
    assert graft(other, original, tmp_path / "out", "--mtp-quant", "q8_0").code == 0
    shutil.copy(module, tmp_path / "out/mtp")
    shutil.copy(module, tmp_path / "flat")
    for place, code, status in ((tmp_path / "out", 7, "fail"), (other, 0, "not tested")):
        outcome = run_program("verify", place, "--level", "files", "--json", "--quiet")
        items = {one["name"]: one for one in json.loads(outcome.out)["checks"][0]["items"]}
        pair = items["draft and main of one bundle"]
        assert (outcome.code, pair["status"]) == (code, status), outcome.out
        assert "the draft was made with the main model" in pair["cause"]


def test_the_pair_is_verified_and_served(bundle: Path, original: Path) -> None:
    found = run_program("verify", bundle, "--level", "weights", "--source", original)
    assert found.code == 0, found.out + found.err
    line = run_program("launch", bundle).out
    first, module = bundle / "main/some-Q4_0-00001-of-00003.gguf", bundle / "mtp/mtp-some-Q4_0.gguf"
    assert f"llama-server -m {first} -md {module} --spec-type draft-mtp" in line


def test_another_target_or_precision_is_refused(host: Path, original: Path, tmp_path: Path) -> None:
    eight_bits = ("--mtp-quant", "q8_0", "--target", "sglang")
    for main, mtp, options, code, words in (
        (host, original, ("--target", "hf"), 4, "Target hf does not read main models in GGUF"),
        (host, original, ("--mtp-quant", "a8w8_fp8"), 4, "the MTP module in a8w8_fp8. Expected"),
        (host, original, ("--pre-tokenizer", "gpt-2"), 2, "has their pre-tokenizer"),
        (original, original.parent, eight_bits, 4, "does not take the MTP module in q8_0"),
        (original, host, ("--target", "hf"), 4, "exported or quantized from GGUF files"),
    ):
        outcome = graft(main, mtp, tmp_path / "out", *options)
        assert (outcome.code, words in outcome.err) == (code, True), outcome.err
    assert not (tmp_path / "out").exists()


Change = Callable[[GgufModel], GgufModel]


def with_other_words(model: GgufModel) -> GgufModel:
    words = [f"word {number}" for number in range(CONFIG["vocab_size"])]
    return GgufModel({**model.keys, "tokenizer.ggml.tokens": texts(words)}, model.tensors)


def with_other_heads(model: GgufModel) -> GgufModel:
    return GgufModel({**model.keys, "deepseek2.expert_used_count": u32(1)}, model.tensors)


def without_a_tensor(model: GgufModel) -> GgufModel:
    return model.only(lambda name: name != "blk.1.ffn_norm.weight")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_other_words, "another model than this one: token 0 of tokenizer.json"),
        (with_other_heads, "another model than this one: "),
        (without_a_tensor, "model.layers.1.post_attention_layernorm.weight"),
    ],
)
def test_another_main_model_is_refused(
    change: Change, words: str, whole: GgufModel, original: Path, tmp_path: Path
) -> None:
    path = change(without_module(whole)).write(tmp_path / "other.gguf")
    outcome = graft(path, original, tmp_path / "out")
    assert (outcome.code, words in outcome.err) == (3, True), outcome.err
    assert not (tmp_path / "out").exists()


def test_an_original_whose_config_says_otherwise_than_the_keys_is_refused(
    host: Path, original: Path, tmp_path: Path
) -> None:
    """`verify` would fail the bundle, whose config.json is the original's."""
    other = Path(shutil.copytree(original, tmp_path / "other"))
    edit_json(other / "config.json", lambda config: config.update(architectures=["Other"]))
    outcome = graft(host, other, tmp_path / "out")
    assert (outcome.code, "this one: architectures differs" in outcome.err) == (3, True)
    assert "['Other'], as in the checkpoint with the MTP layer" in outcome.err
    assert not (tmp_path / "out").exists()


def test_a_module_that_is_there_already(whole: GgufModel, original: Path, tmp_path: Path) -> None:
    """Inside the main model's file it stays; in a file of its own it can be replaced."""
    inside = whole.write(tmp_path / "inside.gguf")
    outcome = graft(inside, original, tmp_path / "out")
    assert outcome.code == 3 and "has an MTP layer already" in outcome.err
    outcome = graft(inside, original, tmp_path / "out", "--replace")
    assert outcome.code == 4 and "has an MTP layer inside" in outcome.err
    assert not (tmp_path / "out").exists()
    (tmp_path / "beside").mkdir()
    without_module(whole).write(tmp_path / "beside/tiny.gguf")
    own = ("token_embd.weight", "output.weight", "output_norm.weight")
    module = whole.only(lambda name: name in own or name.startswith(MODULE))
    module.write(tmp_path / "beside/mtp-tiny.gguf")
    outcome = graft(tmp_path / "beside", original, tmp_path / "out", "--replace")
    assert outcome.code == 0, outcome.err
    assert [path.name for path in (tmp_path / "out/main").glob("*.gguf")] == ["tiny.gguf"]


def test_the_layer_of_another_model_is_told_by_its_copies(
    host: Path, original: Path, tmp_path: Path
) -> None:
    other = make_checkpoint(tmp_path / "other", CONFIG, seed=7)
    outcome = graft(host, other, tmp_path / "out")
    assert (outcome.code, "differs from the main model's" in outcome.err) == (3, True), outcome.err
    assert not (tmp_path / "out/mtp_export.json").exists()


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_killed_graft_resumes(host: Path, original: Path, tmp_path: Path) -> None:
    options = ("--mtp-quant", "q8_0", "--link", "copy", "--workers", "2")
    assert graft(host, original, tmp_path / "whole", *options).code == 0
    whole, died = tree(tmp_path / "whole"), 0
    for call in (5, 15, 25, 35):
        output = tmp_path / f"killed-{call}"
        code = run_in_a_fork(lambda o=output: graft(host, original, o, *options), call)  # type: ignore[misc]
        died += code == 9
        assert code in (0, 9)
        check_nothing_looks_whole(output, [whole])
        assert graft(host, original, output, *options).code == 0 or looks_finished(output)
        assert tree(output) == whole
    assert died >= 2


def test_a_main_model_in_types_that_are_not_decoded(
    whole: GgufModel, original: Path, tmp_path: Path
) -> None:
    """It is linked, judged by all else, and not run."""
    opaque = {"token_embd.weight", "blk.1.attn_v_b.weight", "blk.1.ffn_down_exps.weight"}
    assert all(whole.tensors[name].dtype is DType.GGML_Q4_0 for name in opaque)
    tensors = {
        name: replace(own, dtype=DType.GGML_IQ4_NL) if name in opaque else own
        for name, own in whole.tensors.items()
    }
    main = without_module(GgufModel(whole.keys, tensors)).write(tmp_path / "some-IQ4_NL.gguf")
    output = tmp_path / "out"
    refused = graft(main, original, output, "--mtp-quant", "q8_0", "--prove")
    assert refused.code == 4 and "(5 more) is of a type that is not decoded here" in refused.err
    assert not output.exists()
    assert graft(main, original, output, "--mtp-quant", "q8_0").code == 0
    assert (output / "main" / main.name).samefile(main)
    found = run_program("verify", output, "--level", "weights", "--json", "--quiet")
    assert found.code == 0, found.out
    checks = json.loads(found.out)["checks"]
    items = {one["name"]: one for check in checks for one in check["items"]}
    values = items["main: values of every tensor"]
    assert (values["status"], values["figure"]) == ("not tested", "6 tensors not read")
    assert values["cause"].startswith("IQ4_NL: types that are not decoded here")
    copy = items["draft's embed_tokens.weight is the main model's"]
    assert copy["status"] == "not tested" and "their values are not compared" in copy["cause"]
    run = run_program("generate", output, "--prompt", "x", "--max-new-tokens", "1")
    assert run.code == 4 and "not decoded here" in run.err, run.err


@pytest.mark.parametrize("apart", [True, False])
def test_a_module_in_a_type_that_is_not_decoded(
    whole: GgufModel, apart: bool, tmp_path: Path
) -> None:
    """Its main model runs, with drafts of others too; drafts of its own are refused."""
    name = next(name for name in whole.tensors if name.endswith("nextn.eh_proj.weight"))
    changed = replace(whole.tensors[name], dtype=DType.GGML_IQ4_NL)
    model = GgufModel(whole.keys, whole.tensors | {name: changed})
    if apart:
        without_module(model).write(tmp_path / "some.gguf")
        model.only(is_of_module(model)).write(tmp_path / "mtp-some.gguf")
    else:
        model.write(tmp_path / "some.gguf")
    (tmp_path / "prompts.jsonl").write_text('{"prompt_token_ids": [1, 2]}')
    for method, code in (("none", 0), ("inference_with_reference", 0), ("mtp", 4)):
        options = ("--prompts", tmp_path / "prompts.jsonl", "--max-new-tokens", "1")
        run = run_program("generate", tmp_path, "--speculate-method", method, *options)
        assert run.code == code and ("eh_proj" in run.err) == bool(code), run.err


@pytest.mark.nightly
def test_the_pair_is_proven_by_acceptance(tmp_path: Path) -> None:
    """By the runtime on both files."""
    original = Path(shutil.copytree(TRAINED, tmp_path / "glm"))
    path = without_module(gguf_model(original, "q4_0")).write(tmp_path / "glm.gguf")
    prompts, report = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in BUILT_IN[:4]))
    options = ("--mtp-quant", "q8_0", "--prove", "--prompts", prompts, "--report", report)
    outcome = graft(path, original, tmp_path / "out", *options)
    assert outcome.code == 0, outcome.err
    pairing = read_json(report)["pairing"]
    items = {item["name"]: item for item in pairing["items"]}
    assert pairing["status"] == "pass"
    assert items["k=1, draft 1"]["data"]["conditional"]["value"] > 0.5
