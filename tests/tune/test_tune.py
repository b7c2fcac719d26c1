"""Tuning from end to end on the tiny GLM-4.5: what it learns, what it writes, how it resumes."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import (
    Outcome,
    edit_json,
    export,
    read_json,
    read_shard,
    read_tensors,
    run_program,
    shard_of,
    tree,
)
from mtp_checkpoints.errors import InvalidInputError, UsageError
from mtp_checkpoints.sources.files import write_json
from mtp_export import state_files
from mtp_export.tune.draft import draft_type
from mtp_export.tune.options import TuneOptions
from mtp_export.tune.row_store import PART_LINES, RowStore
from mtp_export.tune.rows import Rows
from mtp_export.tune.run import TuneResult, open_checked, tune
from mtp_export.tune.source_bundle import SourceBundle
from mtp_export.tune.training import Training
from mtp_runtime.parallel.group import LONE, Group, Split
from tune.conftest import GLM
from tune.running import STEPS, TRAIN, K, Watch, value

EMBEDDING = "model.layers.3.embed_tokens.weight"


def test_acceptance_does_not_drop_and_the_loss_falls(tuned: tuple[TuneResult, Path]) -> None:
    result, _ = tuned
    before, after = (side.blocks[K] for side in (result.before, result.after))
    assert value(after.conditional[0]) >= value(before.conditional[0]) - 0.01
    assert value(after.tokens_per_step) >= value(before.tokens_per_step) - 0.01
    losses = [loss for _, loss in result.losses]
    assert sum(losses[-4:]) < sum(losses[:4])


def test_the_main_part_is_linked_and_the_draft_alone_changes(
    tuned: tuple[TuneResult, Path], bundle: Path
) -> None:
    _, output = tuned
    for shard in (bundle / "main").glob("*.safetensors"):
        assert (output / "main" / shard.name).samefile(shard)
    before, after = read_tensors(bundle / "mtp"), read_tensors(output / "mtp")
    forms = [{n: (t.dtype, t.shape) for n, t in side.items()} for side in (before, after)]
    assert forms[0] == forms[1]
    changed = {name for name in before if not before[name].equal(after[name])}
    assert any("experts" in name for name in changed)
    assert any(name.endswith("eh_proj.weight") for name in changed)
    assert not any("embed_tokens" in name or "head.head" in name for name in changed)


def test_the_manifest_records_the_training(tuned: tuple[TuneResult, Path], bundle: Path) -> None:
    result, output = tuned
    recorded = read_json(output / "mtp_export.json")["options"]
    (facts,) = (tune := recorded.pop("tune")).values()
    before = read_json(bundle / "mtp_export.json")["options"]
    assert recorded.pop("calibrate") == {"method": "gptq", "parts": ["main"]}, "others were chosen"
    assert before.pop("calibrate")["parts"] == ["main", "mtp"] and recorded == before
    assert ([*tune], facts["steps"], facts["k"]) == (["mtp"], STEPS, K)
    assert facts["after"] == result.after.as_json()
    assert str(output.parent) not in (output / "mtp_export.json").read_text()


def test_verify_accepts_the_tuned_bundle(tuned: tuple[TuneResult, Path]) -> None:
    _, output = tuned
    outcome = run_program("verify", output, "--level", "weights", "--json")
    assert outcome.code == 0, outcome.out[-2000:] + outcome.err


def test_an_export_of_a_tuned_bundle_records_its_training(tmp_path: Path) -> None:
    """So that verify does not take it for another model's."""
    tuned, again = tmp_path / "tuned", tmp_path / "again"
    assert export(GLM, tuned, "--link", "copy", "--quiet").code == 0
    record = {"tune": {"mtp": {"steps": 2}}}
    edit_json(tuned / "mtp_export.json", lambda manifest: manifest["options"].update(record))
    weight = "model.layers.3.eh_proj.weight"
    shard = shard_of(tuned / "mtp", weight)
    with shard.open("r+b") as file:
        file.seek(offset_of(shard, weight))
        file.write(b"\0\1")
    assert export(tuned, again, "--quiet").code == 0
    assert read_json(again / "mtp_export.json")["options"]["tune"] == record["tune"]
    for source, tells in ((GLM, True), (tuned, False)):
        outcome = run_program("verify", again, "--source", source, "--level", "weights", "--json")
        assert outcome.code == 0, outcome.out[-2000:] + outcome.err
        assert ("mtp: tuned weights" in items_of(outcome)) == tells
    assert export(tuned, tmp_path / "main", "--part", "main", "--quiet").code == 0
    assert "tune" not in read_json(tmp_path / "main/mtp_export.json")["options"]


def test_verify_says_what_tuning_changed(tuned: tuple[TuneResult, Path], tmp_path: Path) -> None:
    """All that it did not change is compared with the source: the embedding, for one."""
    _, output = tuned
    copy = Path(shutil.copytree(output, tmp_path / "copy"))
    arguments = ("verify", copy, "--source", GLM, "--level", "weights", "--json")
    outcome = run_program(*arguments)
    assert outcome.code == 0, outcome.out[-2000:] + outcome.err
    items = items_of(outcome)
    trained = items["mtp: tuned weights"]
    assert trained["status"] == "not tested" and "tune" in trained["cause"]
    assert items["mtp: copied weights"]["status"] == "pass"
    shard = shard_of(copy / "mtp", EMBEDDING)
    with shard.open("r+b") as file:
        file.seek(offset_of(shard, EMBEDDING))
        file.write(b"\0\1")
    damaged = failed(items_of(run_program(*arguments)))
    assert "mtp: copied weights" in damaged
    edit_json(copy / "mtp_export.json", lambda manifest: manifest["options"].pop("tune"))
    assert failed(items_of(run_program(*arguments))) > damaged


def failed(items: dict[str, Any]) -> set[str]:
    return {name for name, item in items.items() if item["status"] == "fail"}


def items_of(outcome: Outcome) -> dict[str, Any]:
    checks = json.loads(outcome.out)["checks"]
    return {item["name"]: item for check in checks for item in check["items"]}


def offset_of(shard: Path, tensor: str) -> int:
    header, _ = read_shard(shard)
    return 8 + int.from_bytes(shard.read_bytes()[:8], "little") + header[tensor]["data_offsets"][0]


def test_an_interrupted_run_ends_with_the_same_bytes(
    options: TuneOptions, tuned: tuple[TuneResult, Path], work: Path, tmp_path: Path
) -> None:
    own = replace(options, output_dir=tmp_path / "bundle", workdir=work, save_seconds=0.0)
    for stop in (1, 7):
        with pytest.raises(KeyboardInterrupt):
            tune(own, Watch(stop_after=stop))
        assert not own.output_dir.exists()
    watch = Watch()
    tune(own, watch)
    assert len(watch.losses) == STEPS - 7
    assert tree(own.output_dir) == tree(tuned[1])


def test_a_state_of_another_protocol_is_refused_without_a_warning(tmp_path: Path) -> None:
    """Of which torch itself warns."""
    path = tmp_path / "training.pt"
    path.write_bytes(pickle.dumps({"step": 1}, protocol=4))
    with pytest.raises(InvalidInputError, match=r"damaged .*training\.pt"):
        state_files.load(path)


@pytest.mark.parametrize("name", ["rows-*/held-out/*.pt", "training-*.pt"])
@pytest.mark.parametrize(
    "damage", ["cut", "one element changed", "an entry lost", "no dictionary", "no state"]
)
def test_a_damaged_state_is_named(
    name: str,
    damage: str,
    options: TuneOptions,
    tuned: tuple[TuneResult, Path],
    tmp_path: Path,
) -> None:
    assert options.workdir is not None
    work = Path(shutil.copytree(options.workdir, tmp_path / "work"))
    for path in work.glob(name):
        match damage:
            case "cut":
                path.write_bytes(path.read_bytes()[:-100])
            case "one element changed":
                state = torch.load(path, weights_only=True)
                tensor = state.get("tokens", next(iter(state.get("parameters", {}).values()), None))
                tensor.view(-1)[0] += 1
                torch.save(state, path)
            case "an entry lost":
                state = torch.load(path, weights_only=True)
                torch.save(dict(list(state.items())[1:]), path)
            case "no dictionary":
                torch.save([1, 2], path)
            case _:
                path.write_bytes(b"")
    own = replace(options, output_dir=tmp_path / "bundle", workdir=work)
    with pytest.raises(InvalidInputError, match="work folder is damaged") as refusal:
        tune(own, Watch())
    assert Path(str(refusal.value.where)).match(name)
    assert not own.output_dir.exists()


@pytest.mark.parametrize("place", [9, -1])
def test_a_damaged_shard_of_trained_weights_is_written_again(
    place: int, options: TuneOptions, tuned: tuple[TuneResult, Path], tmp_path: Path
) -> None:
    assert options.workdir is not None
    work = Path(shutil.copytree(options.workdir, tmp_path / "work"))
    (shard,) = work.glob("trained-*/model.safetensors")
    raw = bytearray(shard.read_bytes())
    raw[place] ^= 1
    shard.write_bytes(raw)
    own = replace(options, output_dir=tmp_path / "bundle", workdir=work)
    assert tune(own, Watch()) is not None
    assert tree(own.output_dir) == tree(tuned[1])


def test_low_rank_changes_train_few_parameters(
    options: TuneOptions, work: Path, tmp_path: Path
) -> None:
    train = replace(TRAIN, lora_rank=2, steps=6)
    own = replace(options, output_dir=tmp_path / "bundle", workdir=work, train=train)
    result = tune(own, Watch())
    assert result is not None
    before, after = (value(side.blocks[K].conditional[0]) for side in (result.before, result.after))
    assert after >= before - 0.02
    assert read_json(own.output_dir / "mtp_export.json")["options"]["tune"]["mtp"]["lora_rank"] == 2


@pytest.mark.nightly
def test_a_damaged_draft_recovers(options: TuneOptions, bundle: Path, tmp_path: Path) -> None:
    """A draft that is fed the target's state before its norm is worth less; training mends it."""
    damaged = Path(shutil.copytree(bundle, tmp_path / "damaged"))
    for part in ("main", "mtp"):
        config = read_json(damaged / part / "config.json")
        config["mtp_contract"] = {"target_hidden": "before_norm"}
        write_json(damaged / part / "config.json", config)
    own = replace(
        options,
        bundle=damaged,
        output_dir=tmp_path / "bundle",
        workdir=tmp_path / "work",
        train=replace(TRAIN, steps=40),
    )
    result = tune(own, Watch())
    assert result is not None
    before, after = (value(side.blocks[K].conditional[0]) for side in (result.before, result.after))
    assert after > before + 0.02


@dataclass
class Meeting:
    """Tensors that two threads add up."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(2))
    given: list[torch.Tensor] = field(default_factory=list)


class Threads(Group):
    """One of two threads in place of two processes."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(Split(rank, 2))
        self._meeting = meeting

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        given, barrier = self._meeting.given, self._meeting.barrier
        given.append(x.clone())
        barrier.wait()
        total = given[0] + given[1]
        if barrier.wait() == 0:
            given.clear()
        barrier.wait()
        return x.copy_(total)


def losses_of(options: TuneOptions, group: Group) -> list[list[float]]:
    """Losses of four steps on the rows that are there."""
    assert options.workdir is not None
    (folder,) = options.workdir.glob("rows-*")
    parts = len(list((folder / "training").iterdir()))
    store = RowStore(folder / "training", range(parts * PART_LINES), torch.bfloat16)
    draft = draft_type("mtp").open(options, SourceBundle.open(options.bundle))
    way = f"{group.rank}-of-{group.size}-{options.device}-{options.offload}-{options.train.dtype}"
    training = Training(
        draft,
        replace(options.train, steps=4),
        group,
        place=options.workdir / f"state-{way}.pt",
        save_seconds=1e9,
    )
    training.run(store, lambda step, losses: None)
    return training.log.losses


def test_two_that_share_a_batch_have_the_same_losses(
    options: TuneOptions, tuned: tuple[TuneResult, Path]
) -> None:
    """Sums of gradients differ in their last bits alone."""
    alone, meeting = losses_of(options, LONE), Meeting()
    with ThreadPoolExecutor(2) as pool:
        threads = [Threads(rank, meeting) for rank in range(2)]
        both = [*pool.map(partial(losses_of, options), threads)]
    assert both[0] == both[1]
    for found, wanted in zip(both[0], alone, strict=True):
        assert found == pytest.approx(wanted, abs=2e-4)
    assert alone[0] != pytest.approx(alone[3], abs=2e-4)


def test_bfloat16_products_train_alike(
    options: TuneOptions, tuned: tuple[TuneResult, Path]
) -> None:
    low = replace(options, train=replace(TRAIN, dtype="bfloat16"))
    wanted, found = losses_of(options, LONE), losses_of(low, LONE)
    assert found != wanted
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=0.05)


@pytest.mark.cuda
@pytest.mark.skipif(find_spec("numba") is None, reason="the bundle is tuned on the CPU by numba")
def test_an_offloaded_training_has_the_same_losses(
    options: TuneOptions, tuned: tuple[TuneResult, Path]
) -> None:
    """Parameters and optimizer stay in main memory while the GPU computes."""
    losses = []
    for offload in (False, True):
        own = replace(options, device="cuda", offload=offload)
        draft = draft_type("mtp").open(own, open_checked(own))
        places = {parameter.device.type for parameter in draft.parameters.values()}
        assert places == {"cpu" if offload else "cuda"}
        losses.append(losses_of(own, Group()))
    for found, wanted in zip(*losses, strict=True):
        assert found == pytest.approx(wanted, abs=2e-3)


@pytest.mark.nightly
def test_two_processes_of_torchrun_have_the_same_losses(
    options: TuneOptions, tuned: tuple[TuneResult, Path], tmp_path: Path
) -> None:
    arguments = [
        *("tune", "--bundle", options.bundle, "--output-dir", tmp_path / "both"),
        *("--data", options.data.prompts, "--held-out", options.data.held_out),
        *("--max-new-tokens", 32, "--workdir", tmp_path / "work"),
        *("--k", K, "--steps", STEPS, "--lr", 1e-3, "--batch-tokens", 256),
        *("--report", tmp_path / "report.json", "--quiet"),
    ]
    command = ["torch.distributed.run", "--nproc-per-node", "2", "-m", "mtp_export", *arguments]
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [entry["loss"] for entry in read_json(tmp_path / "report.json")["losses"]]
    assert found == pytest.approx([loss for _, loss in tuned[0].losses], abs=2e-3)


def test_a_streamed_target_computes_the_same_rows(
    options: TuneOptions, tuned: tuple[TuneResult, Path], tmp_path: Path
) -> None:
    """It reads what the held one wrote; a prompt without an answer is refused."""
    assert options.workdir is not None
    (folder,) = options.workdir.glob("rows-*")
    wanted = Rows.of(state_files.load(folder / "held-out/part-00000.pt"))
    parts = [(t.tokens[: t.prompt_size], t.tokens[t.prompt_size :]) for t in wanted.texts.texts]
    names = ("prompt_token_ids", "completion_token_ids")
    lines = [dict(zip(names, part, strict=True)) for part in parts]
    data = tmp_path / "answered.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = replace(
        options,
        stream=True,
        data=replace(options.data, held_out=data),
        output_dir=tmp_path / "bundle",
        workdir=tmp_path / "work",
    )
    with pytest.raises(UsageError, match="answers no prompts"):
        tune(own, Watch())
    own = replace(own, data=replace(own.data, prompts=data), train=replace(TRAIN, steps=1))
    assert tune(own, Watch()) is not None
    (path,) = (tmp_path / "work").glob("rows-*/held-out/part-00000.pt")
    found = Rows.of(state_files.load(path))
    assert found.texts == wanted.texts
    torch.testing.assert_close(found.hidden, wanted.hidden, atol=1e-3, rtol=1e-3)
