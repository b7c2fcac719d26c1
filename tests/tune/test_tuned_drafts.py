"""Drafts trained from nothing: parallel heads and EAGLE-3, from rows to decoding with them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import edit_json, export, nightly_but, read_json, read_tensors, run_program
from mtp_export.tune.draft import draft_type
from mtp_export.tune.drafts import DRAFTS
from mtp_export.tune.eagle3 import Eagle3Draft
from mtp_export.tune.options import DataOptions, TrainOptions, TuneOptions
from mtp_export.tune.row_store import RowStore
from mtp_export.tune.rows import Rows
from mtp_export.tune.run import tune
from mtp_export.tune.source_bundle import SourceBundle
from mtp_runtime import LLM, SamplingParams
from mtp_runtime.teacher_forcing import Text, Texts
from runtime.checkpoints import SMALL, SMALL_CONFIGS, TRAINED, write_checkpoint
from runtime.drafts import write_eagle3
from tune.running import Watch, value

DEPTHS = 3
FUSED = "mtp.layers.0.mlp.experts.gate_up_proj"
INPUTS = ("eh_proj.weight", "input_proj.weight", "fc.weight")  # of hidden states and embeddings


@pytest.fixture(scope="module")
def random_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random DeepSeek-V3 with enough layers for EAGLE-3's taps."""
    folder = tmp_path_factory.mktemp("random")
    checkpoint = write_checkpoint(folder / "checkpoint", SMALL | {"num_hidden_layers": 8})
    assert export(checkpoint, folder / "bundle", "--allow-untied", "--quiet").code == 0
    record = {"calibrate": {"method": "gptq"}}
    manifest = folder / "bundle/mtp_export.json"
    edit_json(manifest, lambda content: content["options"].update(record))
    return folder / "bundle"


@pytest.fixture(scope="module")
def random_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("random-data") / "prompts.jsonl"
    random = torch.Generator().manual_seed(3)
    rows = torch.randint(2, SMALL["vocab_size"], (12, 8), generator=random).tolist()
    path.write_text("".join(json.dumps({"prompt_token_ids": row}) + "\n" for row in rows))
    return path


def options_of(bundle: Path, prompts: Path, folder: Path, draft: str, steps: int) -> TuneOptions:
    return TuneOptions(
        bundle,
        folder / "tuned",
        DataOptions(prompts, new_tokens=24),
        draft=draft,
        train=TrainOptions(k=DEPTHS, steps=steps, rate=3e-3, batch_tokens=256),
        workdir=folder / "work",
    )


def test_heads_learn_and_draft(bundle: Path, prompts: Path, tmp_path: Path) -> None:
    options = options_of(bundle, prompts, tmp_path, "parallel_heads", steps=60)
    watch = Watch()
    result = tune(options, watch)
    assert result is not None
    before, after = (value(s.blocks[DEPTHS].conditional[0]) for s in (result.before, result.after))
    assert after > before + 0.05
    check_bundle(options, "parallel_heads")
    train = TrainOptions(k=1, steps=1)
    mtp = replace(options, draft="mtp", train=train, output_dir=tmp_path / "mtp")
    assert tune(mtp, Watch()) is not None
    assert len(list(options.work.glob("rows-*"))) == 1, "both are fed the same states"


def test_eagle3_learns_and_drafts(
    random_bundle: Path, random_prompts: Path, tmp_path: Path
) -> None:
    options = options_of(random_bundle, random_prompts, tmp_path, "eagle3", steps=40)
    watch = Watch()
    assert tune(options, watch) is not None
    first = [losses[0] for losses in watch.losses]
    assert sum(first[-5:]) < 0.9 * sum(first[:5])
    check_bundle(options, "eagle3")


def check_bundle(options: TuneOptions, method: str) -> None:
    """The bundle has the draft in a folder of its own; verify accepts it; output stays the same."""
    output = options.output_dir
    assert set(read_json(output / "mtp_export.json")["parts"]) == {"main", "mtp", method}
    report = json.loads(run_program("verify", output, "--level", "weights", "--json").out)
    items = {item["name"]: item for check in report["checks"] for item in check["items"]}
    failed = {name for name, item in items.items() if item["status"] == "fail"}
    assert failed <= {"main: tokenizer", "mtp: tokenizer"}  # the random model has none
    assert items[f"{method}: checksums"]["status"] == "pass"
    prompts, params = [(5, 9, 40, 8), (3, 77, 6, 21, 30)], SamplingParams(max_tokens=12)
    plain = LLM(output).generate(prompts, params)
    drafted = LLM(output, speculate_method=method, speculate_max_draft_token_num=DEPTHS).generate(
        prompts, params
    )
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    again = run_program(
        *("tune", "--bundle", options.bundle, "--data", options.data.prompts),
        *("--output-dir", output, "--draft", method, "--k", DEPTHS, "--dry-run", "--overwrite"),
    )
    assert again.code == 0, again.err
    check_damage_is_noticed(output, method)


def check_damage_is_noticed(output: Path, method: str) -> None:
    """Header and last byte of a draft are looked at; without a manifest's entry, verify says so."""
    (shard,) = (output / method).glob("*.safetensors")
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    assert file_items(output)[f"{method}: checksums"]["status"] == "fail"
    shard.write_bytes(raw.replace(b"{", b"[", 1))
    assert file_items(output)[f"{method}: headers and index"]["status"] == "fail"
    edit_json(output / "mtp_export.json", lambda manifest: manifest["parts"].pop(method))
    unlisted = file_items(output)[f"{method}: checksums"]
    assert unlisted["status"] == "not tested" and "manifest" in unlisted["cause"]


def file_items(output: Path) -> dict[str, dict[str, Any]]:
    report = json.loads(run_program("verify", output, "--level", "files", "--json").out)
    return {item["name"]: item for check in report["checks"] for item in check["items"]}


def test_eagle3_computes_what_decoding_does(
    random_bundle: Path, random_prompts: Path, tmp_path: Path
) -> None:
    options = options_of(random_bundle, random_prompts, tmp_path, "eagle3", steps=1)
    draft = Eagle3Draft.open(options, SourceBundle.open(random_bundle))
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, SMALL["vocab_size"], (2, 12), generator=random)
    taps = torch.randn(2, 12, 3 * SMALL["hidden_size"], generator=random)
    texts = Texts(tuple(Text(tuple(row), 1) for row in tokens.tolist()))
    goals = torch.zeros(24, 4)
    rows = Rows(texts, taps.flatten(0, 1), goals.int(), goals)
    judged = draft.judged(rows, DEPTHS)
    store = RowStore(tmp_path, (), torch.float32)
    store.__dict__["parts"] = [rows]
    chains, anchors = draft.chains(store.batch([0, 1], torch.device("cpu"))), texts.anchors()
    for depth, best in enumerate(judged.best, start=1):
        room = texts.room(anchors, depth)
        with torch.no_grad():
            found = (chains.drafts(anchors.rows[room]) @ draft.head.T).argmax(dim=-1)
        assert torch.equal(found, best[room])


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_dry_run_knows_every_draft(
    draft: str, random_bundle: Path, random_prompts: Path, tmp_path: Path
) -> None:
    options = options_of(random_bundle, random_prompts, tmp_path, draft, steps=1)
    sizes = draft_type(draft).sizes(options, SourceBundle.open(random_bundle))
    opened = draft_type(draft).open(options, SourceBundle.open(random_bundle))
    assert sizes.trained == sum(p.numel() for p in opened.parameters.values())
    assert sizes.used <= sizes.parameters


def test_eagle3_needs_latent_attention(bundle: Path, prompts: Path, tmp_path: Path) -> None:
    outcome = run_program(
        *("tune", "--bundle", bundle, "--data", prompts, "--output-dir", tmp_path / "output"),
        *("--draft", "eagle3"),
    )
    assert outcome.code == 4
    assert "latent attention" in outcome.err


def test_drafts_that_a_bundle_has_come_along(
    random_bundle: Path, random_prompts: Path, tmp_path: Path
) -> None:
    """Linked, whatever else is trained; one that is trained anew takes the place of its own."""
    bundle = Path(shutil.copytree(random_bundle, tmp_path / "bundle"))
    write_eagle3(bundle / "eagle3", read_json(bundle / "main/config.json"), taps=(2, 4, 5))
    heads = options_of(bundle, random_prompts, tmp_path / "heads", "parallel_heads", steps=1)
    assert tune(heads, Watch()) is not None
    again = options_of(heads.output_dir, random_prompts, tmp_path / "again", "mtp", steps=1)
    assert tune(again, Watch()) is not None
    before, after = (read_tensors(b / "eagle3") for b in (bundle, again.output_dir))
    assert before.keys() == after.keys() and all(before[n].equal(after[n]) for n in before)
    for name in ("main", "eagle3", "parallel_heads"):
        (shard,) = (again.output_dir / name).glob("*.safetensors")
        assert shard.samefile(heads.output_dir / name / shard.name)
    items = file_items(again.output_dir)
    assert {items[f"{name}: checksums"]["status"] for name in ("eagle3", "parallel_heads")} == {
        "pass"
    }
    anew = options_of(again.output_dir, random_prompts, tmp_path / "anew", "eagle3", steps=1)
    assert tune(anew, Watch()) is not None
    found = read_tensors(anew.output_dir / "eagle3")
    assert found.keys() != before.keys() or not found["fc.weight"].equal(before["fc.weight"])
    manifest = read_json(anew.output_dir / "mtp_export.json")
    assert set(manifest["parts"]) == {"main", "mtp", "eagle3", "parallel_heads"}
    trainings = manifest["options"]["tune"]
    assert set(trainings) == {"mtp", "eagle3", "parallel_heads"}, "none is forgotten"
    heads_manifest = read_json(heads.output_dir / "mtp_export.json")
    assert heads_manifest["options"]["calibrate"] == {"method": "gptq"}, "its codes are kept"
    assert heads_manifest["options"]["tune"] == {"parallel_heads": trainings["parallel_heads"]}


def test_eagle3_needs_three_layers_to_tap(random_prompts: Path, tmp_path: Path) -> None:
    """Before any row is made."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", SMALL | {"num_hidden_layers": 6})
    assert export(checkpoint, tmp_path / "bundle", "--allow-untied", "--quiet").code == 0
    outcome = run_program(
        *("tune", "--bundle", tmp_path / "bundle", "--data", random_prompts),
        *("--output-dir", tmp_path / "output", "--draft", "eagle3"),
    )
    assert outcome.code == 4
    assert "7 layers or more" in outcome.err
    assert not list(tmp_path.glob("output*"))


@pytest.mark.parametrize("model_type", nightly_but(["deepseek_v32", "qwen3_5_moe_text"], TRAINED))
def test_the_module_of_every_family_is_trained(
    model_type: str, random_prompts: Path, tmp_path: Path
) -> None:
    """Fused experts too, which are written one by one."""
    names = [FUSED] if model_type == "qwen3_5_moe_text" else []
    checkpoint = write_checkpoint(tmp_path / "checkpoint", SMALL_CONFIGS[model_type], names=names)
    assert export(checkpoint, tmp_path / "bundle", "--allow-untied", "--quiet").code == 0
    options = options_of(tmp_path / "bundle", random_prompts, tmp_path, "mtp", steps=2)
    assert tune(options, Watch()) is not None
    before, after = (
        read_tensors(folder / "mtp") for folder in (options.bundle, options.output_dir)
    )
    assert any(one.dim() == 3 for one in before.values()) == bool(names)
    assert all(one.dim() < 3 for one in after.values())
    changed = {n for n in before.keys() & after.keys() if not before[n].equal(after[n])}
    assert any(name.endswith(INPUTS) for name in changed)
    assert len(changed) > 5
    assert not any(".indexer." in name for name in changed)
    source = SourceBundle.open(options.bundle)
    opened = draft_type("mtp").open(options, source)
    trained = sum(parameter.numel() for parameter in opened.parameters.values())
    assert draft_type("mtp").sizes(options, source).trained == trained, "what --dry-run says"
