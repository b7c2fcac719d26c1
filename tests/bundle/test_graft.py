"""Grafts: the original's MTP layer on main models that others quantized, by several methods."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.bench_quantize_acceptance import difference, fixture_prompts, on_texts
from cases import (
    MTP_LAYER,
    Outcome,
    drop_tensor,
    edit_json,
    looks_finished,
    make_checkpoint,
    nightly_but,
    read_json,
    read_tensors,
    run_in_a_fork,
    run_program,
    shard_of,
    tree,
)
from faults import planting
from hub_server import HubServer
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.sampling import SamplingParams
from mtp_runtime.teacher_forcing import Text, Texts
from quantized_by_others import LINEAR, METHODS, unquantized, write
from runtime.harness import run

LAYER = f"model.layers.{MTP_LAYER}"
EVERY_PUSH = ("awq", "awq, experts alone", "gptq", "fp8", "modelopt nvfp4")
MAINS = nightly_but(EVERY_PUSH, METHODS)
EMBEDDING = f"{LAYER}.embed_tokens.weight"
CONFIG = "config.json"
FIXTURE = Path(__file__).resolve().parents[2] / "fixtures/deepseek-v3-tiny"
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
Config = dict[str, Any]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small lose time to a second thread, and more on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def graft(main: object, mtp: object, output: Path, *options: object) -> Outcome:
    return run_program("graft", "--main", main, "--mtp", mtp, "--output-dir", output, *options)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("original") / "original")


def tokenizer(**changes: int) -> Config:
    """A tokenizer.json as far as it says what ids mean."""
    vocabulary = {"a": 0, "b": 1, **changes}
    return {"model": {"vocab": vocabulary}, "added_tokens": [{"id": 2, "content": "<eos>"}]}


@pytest.fixture(scope="module")
def grafts(
    original: Path, mains: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Grafted bundles by the method of the main model."""

    @cache
    def grafted(name: str) -> Path:
        output = tmp_path_factory.mktemp("graft") / "output"
        outcome = graft(mains(name), original, output, "--quiet")
        assert outcome.code == 0, outcome.err
        return output

    return grafted


# Rules by which engines find out whether a linear is quantized, written out from their sources: by
# method, whether a module is left out. vLLM asks them of both parts with the main folder's config.


def _parts_of_names(config: Config, module: str) -> bool:
    return any(part in module for part in config["modules_to_not_convert"])


def _first_pattern(config: Config, module: str) -> bool:
    for pattern in config["dynamic"]:
        if re.match(pattern.removeprefix("-:").removeprefix("+:"), module):
            return bool(pattern.startswith("-:"))
    return False


def _changes(config: Config, module: str) -> bool:
    """AutoRound: a module by its name, else the first pattern that is found in it."""
    changes = config["extra_config"]
    found = [changes[key] for key in changes if key == module]
    found += [change for key, change in changes.items() if re.search(key, module)]
    return bool(found) and found[0]["bits"] >= 16


def _wildcards(config: Config, module: str) -> bool:
    return any(p in module or fnmatchcase(module, p) for p in config["ignore"])


def _patterns(config: Config, module: str) -> bool:
    return any(re.match(p.removeprefix("re:"), module) for p in config["ignore"])


def _whole_names(config: Config, module: str) -> bool:
    experts = re.sub(r"(\.mlp\.experts)\..*", r"\1", module)
    return module in config["ignored_layers"] or experts in config["ignored_layers"]


CHANGED_FIELDS = ("modules_to_not_convert", "dynamic", "ignore", "quantization", "extra_config")
LEFT_OUT: Mapping[str, Callable[[Config, str], bool]] = {
    "awq": _parts_of_names,
    "gptq": _first_pattern,
    "modelopt": _wildcards,
    "auto-round": _changes,
    "compressed-tensors": _patterns,
    "fp8": _whole_names,
}


@pytest.mark.parametrize("name", MAINS)
def test_engines_build_each_part_as_it_is_stored(
    name: str, original: Path, mains: Callable[[str], Path], grafts: Callable[[str], Path]
) -> None:
    config = read_json(grafts(name) / "main" / CONFIG)["quantization_config"]
    left_out = LEFT_OUT[config["quant_method"]]
    stored = read_tensors(mains(name))
    every = [key for key in read_tensors(original) if LINEAR.match(key)]
    assert len([key for key in every if key.startswith(LAYER)]) > 10
    for key in every:
        module = key.removesuffix(".weight")
        plain = key.startswith(LAYER) or stored.get(key, torch.empty(0)).dtype in (
            torch.float16,
            torch.bfloat16,
        )
        assert left_out(config, module) == plain, module
    for key, value in METHODS[name].config.items():
        if key not in CHANGED_FIELDS:
            assert config[key] == value
    draft = read_json(grafts(name) / "mtp" / CONFIG)
    assert "quantization_config" not in draft


@pytest.mark.parametrize("name", MAINS)
def test_main_is_linked_and_the_layer_is_the_original_s(
    name: str, original: Path, mains: Callable[[str], Path], grafts: Callable[[str], Path]
) -> None:
    main, output = mains(name), grafts(name)
    for shard in main.glob("*.safetensors"):
        assert (output / "main" / shard.name).samefile(shard)
    expected = unquantized(read_tensors(original))
    found = read_tensors(output / "mtp")
    assert found.keys() == {key for key in expected if key.startswith(f"{LAYER}.")}
    for key, tensor in found.items():
        assert tensor.dtype in (torch.bfloat16, torch.float32)
        assert torch.equal(tensor, expected[key].to(tensor.dtype)), key
    config = read_json(output / "main" / CONFIG)
    assert config["num_nextn_predict_layers"] == 1
    own = read_json(main / CONFIG)
    assert {key: config[key] for key in own if key != "quantization_config"} == {
        key: value for key, value in own.items() if key != "quantization_config"
    }
    manifest = read_json(output / "mtp_export.json")
    assert manifest["options"]["base_quant"] == "grafted"
    assert manifest["options"]["mtp_quant"] == "bf16"
    assert manifest["source"].keys() == {"main", "mtp", "config_sha256", "shards"}
    assert {shard.partition("/")[0] for shard in manifest["source"]["shards"]} == {"main", "mtp"}


@pytest.mark.parametrize("name", MAINS)
def test_verify_and_inspect_take_the_bundle(name: str, grafts: Callable[[str], Path]) -> None:
    outcome = run_program("verify", grafts(name), "--level", "weights", "--json", "--quiet")
    assert outcome.code == 0, outcome.out
    report = json.loads(outcome.out)
    by_name = {check["name"]: check["status"] for check in report["checks"]}
    assert by_name["files"] == by_name["ledger"] == "pass"
    for part in ("main", "mtp"):
        found = json.loads(run_program("inspect", grafts(name) / part, "--json").out)
        assert (found["parts"], found["problems"]) == ([part], [])


@pytest.mark.parametrize("name", ["awq", "gptq"])
def test_checksums_of_a_copied_main_model_are_those_of_its_files(
    name: str, mains: Callable[[str], Path], original: Path, tmp_path: Path
) -> None:
    """Codes that others pack along columns are hashed as they lie in the file."""
    options = ("--link", "copy", "--checksums", "all", "--quiet")
    assert graft(mains(name), original, tmp_path / "output", *options).code == 0
    outcome = run_program("verify", tmp_path / "output", "--level", "weights", "--quiet")
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize("name", MAINS)
def test_the_runtime_decodes_with_the_draft(name: str, grafts: Callable[[str], Path]) -> None:
    """Weights are dequantized at load, or kept as they are stored: the same tokens."""
    outputs = []
    for dense in (True, False):
        loaded = load_model(grafts(name), LoadOptions(dequantize_at_load=dense))
        assert not loaded.ledger.skipped
        found = run(loaded.model, [[5, 9, 12, 7]], PARAMS, method="mtp", k=2)
        assert found.requests[0].metrics.drafted[0] > 0
        outputs.append(found.outputs)
    assert outputs[0] == outputs[1]


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["awq", "gptq", "compressed-tensors, int4", "modelopt nvfp4"])
def test_acceptance_of_the_grafted_draft(name: str, tmp_path: Path) -> None:
    """int4 main models lose a few points of the miniature's acceptance; measured: 1.7 and 2.5."""
    write(FIXTURE, tmp_path / "main", name)
    assert graft(tmp_path / "main", FIXTURE, tmp_path / "output", "--quiet").code == 0
    texts = Texts(tuple(Text(prompt[:96], 1) for prompt in fixture_prompts(8)))
    counts = [
        on_texts(load_model(folder, LoadOptions()).model, texts, 1)[0]
        for folder in (FIXTURE, tmp_path / "output")
    ]
    lost = difference(counts[1], counts[0])
    assert lost is not None
    assert lost.value > -0.06


def test_the_draft_may_be_stored_as_the_main_model_is(
    original: Path, mains: Callable[[str], Path], tmp_path: Path
) -> None:
    """Native fp8 beside native fp8: nothing has to be listed, and the layer is copied."""
    output = tmp_path / "output"
    outcome = graft(mains("fp8"), original, output, "--mtp-quant", "a8w8_fp8", "--quiet")
    assert outcome.code == 0, outcome.err
    config = read_json(output / "main" / CONFIG)["quantization_config"]
    assert config == METHODS["fp8"].config
    assert read_json(output / "mtp" / CONFIG)["quantization_config"] == config
    stored, found = read_tensors(original), read_tensors(output / "mtp")
    key = f"{LAYER}.mlp.experts.1.up_proj.weight"
    for name in (key, f"{key}_scale_inv"):
        assert torch.equal(found[name].view(torch.uint8), stored[name].view(torch.uint8))
    assert run_program("verify", output, "--level", "weights", "--quiet").code == 0


def test_the_engines_launch_lines(mains: Callable[[str], Path], original: Path) -> None:
    output = original.parent / "launched"
    outcome = graft(mains("awq"), original, output, "--json", "--quiet")
    assert outcome.code == 0
    assert json.loads(outcome.out)["launch"].keys() == {"vllm", "sglang"}
    again = graft(mains("awq"), original, output, "--overwrite")
    assert again.code == 0
    assert "Grafted to" in again.out
    assert "The main model computes in float16; its draft is stored in bfloat16" in again.err


def _forget(bundle: Path, key: str, value: object) -> None:
    planting.edit_config(bundle / "main", lambda c: c["quantization_config"].update({key: value}))


EXCLUSIONS: Mapping[str, Callable[[Path], None]] = {
    "awq": lambda bundle: _forget(bundle, "modules_to_not_convert", []),
    "gptq": lambda bundle: _forget(bundle, "dynamic", {}),
    "fp8": lambda bundle: planting.edit_config(
        bundle / "main",
        lambda c: c["quantization_config"].update(ignored_layers=[], modules_to_not_convert=[]),
    ),
    "modelopt nvfp4": lambda bundle: _forget(
        bundle, "ignore", ["lm_head", "model.layers.*.self_attn*"]
    ),
    "compressed-tensors, fp8": lambda bundle: _forget(bundle, "ignore", ["lm_head"]),
}


@pytest.mark.parametrize("name", nightly_but(EVERY_PUSH[2:], EXCLUSIONS))
def test_a_missing_exclusion_is_named(
    name: str, mains: Callable[[str], Path], original: Path, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    assert graft(mains(name), original, output, "--quiet").code == 0
    EXCLUSIONS[name](output)
    outcome = run_program("verify", output, "--level", "files", "--quiet", "--json")
    assert outcome.code == 7
    items = [i for check in json.loads(outcome.out)["checks"] for i in check["items"]]
    failed = {item["name"]: item["cause"] for item in items if item["status"] == "fail"}
    assert failed.keys() == {"mtp: precision as vLLM reads it"}
    assert "vLLM builds the draft with the quantization of the main model" in str(failed)


def changed(folder: Path, source: Path, how: Callable[[Config], object] = lambda c: None) -> Path:
    """A copy of a checkpoint by links, with another config.json."""
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    edit_json(folder / CONFIG, how)
    return folder


def test_refusals(
    mains: Callable[[str], Path], original: Path, pristine: Path, tmp_path: Path
) -> None:
    main = mains("awq")

    def refused(code: int, words: str, *given: object, options: tuple[object, ...] = ()) -> None:
        host, donor, output = (*given, tmp_path / "output")[:3]
        outcome = graft(host, donor, Path(str(output)), "--quiet", *options)
        assert outcome.code == code, outcome.err
        assert words in outcome.err, outcome.err
        assert len(outcome.err.splitlines()) == 1
        assert not (tmp_path / "output").exists()

    def altered(name: str, how: Callable[[Config], object]) -> Path:
        return changed(tmp_path / name, main, how)

    def quantized(**changes: object) -> Callable[[Config], object]:
        return lambda config: config["quantization_config"].update(changes)

    refused(2, "are the same", original, original)
    refused(2, "must lie apart", main, original, main / "output")
    refused(2, "must lie apart", main, original, original / "output")
    own = [name for name in read_tensors(original) if name.startswith(f"{LAYER}.")]
    again = changed(tmp_path / "again", original)
    refused(3, "has an MTP layer already", original, again)
    refused(3, f"({len(own) - 1} more)", original, again)
    lost = changed(tmp_path / "two", main)
    for name in ("model.norm.weight", "lm_head.weight"):
        drop_tensor(lost, name)
    refused(3, "missing (1 more like this)", lost, original)
    refused(4, "no MTP layer", main, changed(tmp_path / "lost", mains("fp8")))
    refused(3, "There is no checkpoint folder here", tmp_path / "none", original)
    refused(4, "Nothing here reads from such an address", "ftp://x/y", original)
    sizes = {"vocab_size": 7, "hidden_size": 64, "n_routed_experts": 8, "num_hidden_layers": 3}
    for key, value in sizes.items():
        host = altered(key, lambda c, k=key, v=value: c.update({k: v}))  # type: ignore[misc]
        refused(3, f"another model than this one: {key} differs", host, original)
    rope = altered("rope", lambda c: c.update(rope_theta=5e5))
    refused(3, "rotary embedding differs", rope, original)
    router = altered("router", lambda c: c.update(routed_scaling_factor=1.0))
    refused(3, "router differs", router, original)
    norms = altered("norms", lambda c: c.update(rms_norm_eps=1e-3))
    refused(3, "rms_norm_eps differs", norms, original)
    other = altered("other", lambda c: c.update(model_type="qwen3"))
    refused(3, "model_type differs", other, original)
    unknown = altered("unknown", quantized(quant_method="hqq"))
    refused(4, "a quantization method that this tool does not read", unknown, original)
    w4afp8 = altered("w4afp8", quantized(quant_method="w4afp8"))
    refused(4, "cannot be described beside", w4afp8, original)
    groups = altered("groups", quantized(group_size=64))
    refused(3, "K divisible by 64", groups, original)
    narrow = altered("narrow", quantized(group_size=16))
    refused(3, "wrong shape", narrow, original)
    eight = altered("eight", quantized(bits=8))
    refused(4, "AWQ weights that this tool does not read", eight, original)
    for scheme in ("a8w8_fp8", "weight_only_int8"):
        refused(4, "vLLM builds both parts", main, original, options=("--mtp-quant", scheme))
    plain = altered("plain", lambda c: c.pop("quantization_config"))
    options = ("--mtp-quant", "a8w8_fp8")
    refused(4, "beside an unquantized main model", plain, original, options=options)
    refused(4, "does not read models that others", main, original, options=("--target", "xllm"))
    refused(2, "'x' is no target for --target", main, original, options=("--target", "x"))
    refused(2, "mtp-quant", main, original, options=("--mtp-quant", "weight_only_int4"))


def test_a_quantization_in_a_file_of_its_own(
    mains: Callable[[str], Path], original: Path, tmp_path: Path
) -> None:
    """ModelOpt's older exports have it there; a damaged one is no reason to guess."""
    main = changed(tmp_path / "main", mains("modelopt fp8, in a file"))
    output = tmp_path / "output"
    assert graft(main, original, output, "--dry-run").code == 0
    (main / "hf_quant_config.json").write_text("[]")
    outcome = graft(main, original, output)
    assert (outcome.code, "hf_quant_config.json" in outcome.err) == (3, True), outcome.err


def test_tokenizers(mains: Callable[[str], Path], original: Path, tmp_path: Path) -> None:
    """Ids are compared, not bytes, and other vocabularies byte by byte."""
    main, donor = changed(tmp_path / "main", mains("gptq")), changed(tmp_path / "mtp", original)
    for folder in (main, donor):
        (folder / "tokenizer.json").unlink()

    def grafted(name: str, ours: str, theirs: str) -> Outcome:
        (main / name).write_text(ours)
        (donor / name).write_text(theirs)
        return graft(main, donor, tmp_path / "output", "--quiet", "--dry-run")

    for name in ("vocab.json", "tokenizer.model"):
        assert grafted(name, "same", "same").code == 0
        outcome = grafted(name, "same", "others")
        assert (outcome.code, f"{name} differs" in outcome.err) == (3, True)
        (donor / name).write_text("same")
    own = json.dumps(tokenizer())
    for same in (own, json.dumps(tokenizer() | {"version": "1.0"}, indent=4)):
        assert grafted("tokenizer.json", same, own).code == 0
    pieces = {"model": {"vocab": [["a", 0.0], ["b", -1.0]]}, "added_tokens": None}
    assert grafted("tokenizer.json", json.dumps(pieces), json.dumps(pieces) + " ").code == 0
    for other, words in (
        (json.dumps(tokenizer(b=3)), "token 'b' differs"),
        (json.dumps(tokenizer(c=3)), "token 'c' differs"),
        ("{}", "A tokenizer cannot be read"),
        ("{", "A tokenizer cannot be read"),
    ):
        outcome = grafted("tokenizer.json", other, own)
        assert (outcome.code, words in outcome.err) == (3, True), outcome.err


def test_the_layer_of_another_checkpoint(
    mains: Callable[[str], Path], original: Path, tmp_path: Path
) -> None:
    """Its own copies of embedding and head tell, whatever dtype the main model's are in."""
    other = make_checkpoint(tmp_path / "other", seed=1)
    for name in ("awq", "fp8"):
        outcome = graft(mains(name), other, tmp_path / "output", "--quiet")
        assert outcome.code == 3
        assert "differs from the main model's" in outcome.err
        assert not looks_finished(tmp_path / "output")
    outcome = graft(mains("fp8"), other, tmp_path / "output", "--quiet", "--allow-untied")
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize("name", ["awq", "fp8"])
def test_a_few_rows_tell_another_checkpoint(
    name: str, mains: Callable[[str], Path], original: Path, tmp_path: Path
) -> None:
    """And so do small changes throughout, as of a fine-tune."""

    def without_rows(values: torch.Tensor) -> torch.Tensor:
        return values.index_fill(0, torch.tensor([5, 6]), 0)

    def noisy(values: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(1))
        return (values + 0.08 * values.float().std() * noise).to(values.dtype)

    for how in (without_rows, noisy):
        donor = Path(shutil.copytree(original, tmp_path / how.__name__))
        shard = shard_of(donor, EMBEDDING)
        tensors = load_file(shard)
        save_file(tensors | {EMBEDDING: how(tensors[EMBEDDING])}, shard, metadata={"format": "pt"})
        outcome = graft(mains(name), donor, tmp_path / "output", "--quiet")
        assert (outcome.code, "differs from the main model's" in outcome.err) == (3, True)
    bundle = tmp_path / "bundle"
    assert graft(mains(name), original, bundle, "--quiet").code == 0
    planting.change(bundle / "mtp", EMBEDDING, without_rows)
    outcome = run_program("verify", bundle, "--level", "weights")
    assert outcome.code == 7 and "is damaged (" in " ".join(outcome.out.split())


def test_a_layer_without_copies_of_its_own(
    mains: Callable[[str], Path], original: Path, tmp_path: Path
) -> None:
    """The original's main embedding and head are compared and come along."""
    without = make_checkpoint(tmp_path / "without", own_copies=False)
    other = make_checkpoint(tmp_path / "other", own_copies=False, seed=1)
    outcome = graft(mains("awq"), other, tmp_path / "output", "--quiet")
    assert outcome.code == 3
    assert "differs from the main model's" in outcome.err
    assert graft(mains("awq"), without, tmp_path / "output", "--quiet").code == 0
    found = read_tensors(tmp_path / "output/mtp")
    tensors = read_tensors(original)
    for own, main in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        assert torch.equal(found[f"{LAYER}.{own}.weight"], tensors[f"{main}.weight"])
    assert run_program("verify", tmp_path / "output", "--level", "weights", "--quiet").code == 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_killed_graft_resumes(
    mains: Callable[[str], Path], original: Path, tmp_path: Path
) -> None:
    options = ("--quiet", "--max-shard-size", "300kB", "--link", "copy", "--workers", "2")
    assert graft(mains("fp8"), original, tmp_path / "whole", *options).code == 0
    whole, died = tree(tmp_path / "whole"), 0
    for call in (5, 25, 60):
        output = tmp_path / f"killed-{call}"
        code = run_in_a_fork(lambda o=output: graft(mains("fp8"), original, o, *options), call)  # type: ignore[misc]
        died += code == 9
        assert code in (0, 9)
        assert graft(mains("fp8"), original, output, *options).code == 0 or looks_finished(output)
        assert tree(output) == whole
    assert died >= 2


def test_a_changed_source_is_no_resume(
    mains: Callable[[str], Path], original: Path, tmp_path: Path
) -> None:
    """The identity of a run names both sources."""
    manifest = {}
    for name in ("fp8", "awq"):
        output = tmp_path / name
        assert graft(mains(name), original, output, "--quiet").code == 0
        manifest[name] = read_json(output / "mtp_export.json")["source"]
    assert manifest["fp8"]["mtp"] == manifest["awq"]["mtp"]
    assert manifest["fp8"]["main"] != manifest["awq"]["main"]


def test_either_side_from_the_hub(
    mains: Callable[[str], Path],
    original: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The layer alone is downloaded; a main model from there is copied."""
    main, expected = mains("awq"), tmp_path / "expected"
    assert graft(main, original, expected, "--quiet", "--link", "copy").code == 0
    server = HubServer()
    server.serve("acme/original", original)
    server.serve("acme/awq", main)
    with server.running():
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        outcome = graft(main, "hf://acme/original", tmp_path / "one", "--quiet", "--json")
        assert outcome.code == 0, outcome.err
        facts = json.loads(outcome.out)
        size = sum(path.stat().st_size for path in (expected / "mtp").glob("*.safetensors"))
        assert 0 < facts["download_bytes"] < size
        assert facts["parts"]["main"]["linked_shards"] == 2
        outcome = graft("hf://acme/awq", "hf://acme/original", tmp_path / "both", "--quiet")
        assert outcome.code == 0, outcome.err
    for output in ("one", "both"):
        found, wanted = tree(tmp_path / output), tree(expected)
        assert found.keys() == wanted.keys()
        differing = {name for name in wanted if found[name] != wanted[name]}
        assert differing == {"mtp_export.json"}
    source = read_json(tmp_path / "one/mtp_export.json")["source"]
    assert source["mtp"]["repo"] == "acme/original"
    assert "repo" not in source["main"]
