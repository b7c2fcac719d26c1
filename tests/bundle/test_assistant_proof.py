"""Gemma-4 with an assistant that was made for it, and with one that was not: proven by `graft
--prove`, and run by every check of `verify --level run`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cases import Outcome, run_program
from faults.small_model import write_tokenizer
from runtime.gemma import (
    HIDDEN,
    OF_ASSISTANT,
    VOCAB,
    share_as_before,
    write_assistant,
    write_target,
)

# Norms behind what layers add.
ADDED = ("post_attention_layernorm", "post_feedforward_layernorm", "post_per_layer_input_norm")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that says the last token again, an assistant that does so too, and a random one."""
    folder = tmp_path_factory.mktemp("gemma")
    with pytest.MonkeyPatch.context() as patch:
        share_as_before(patch)
        write_target(folder / "target", "small", bos_token_id=0)  # as the tokenizer has it
        for name in ("own", "another"):
            write_assistant(folder / name, "small")
    write_tokenizer(folder / "target", VOCAB)
    embedding = changed(folder / "target", {})["model.embed_tokens.weight"]
    changed(folder / "own", echoes(embedding, load_file(folder / "own/model.safetensors")))
    lines = [json.dumps({"prompt_token_ids": ids}) + "\n" for ids in ([5, 9, 12], [40, 3, 77])]
    (folder / "one.jsonl").write_text(lines[0])
    (folder / "two.jsonl").write_text("".join(lines))
    return folder


def changed(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Put tensors into a checkpoint, whose layers then add little to the stream."""
    file = folder / "model.safetensors"
    stored = load_file(file) | tensors
    for name in stored:
        if name.split(".")[-2] in ADDED:
            stored[name] = stored[name] * 0.02
    save_file(stored, file, metadata={"format": "pt"})
    return stored


def echoes(embedding: torch.Tensor, of: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of an assistant that drafts the token which it is given."""
    narrow = OF_ASSISTANT["hidden_size"]
    projection = torch.zeros(narrow, 2 * HIDDEN)
    projection[:, :HIDDEN] = torch.linalg.qr(embedding.T @ embedding)[0][:, :narrow].T
    own = embedding @ projection[:, :HIDDEN].T
    members = own[of["masked_embedding.token_ordering"].view(12, -1)]
    return {
        "pre_projection.weight": projection,
        "model.embed_tokens.weight": own.contiguous(),
        "masked_embedding.centroids.weight": members.mean(dim=1),
    }


def graft(folders: Path, assistant: str, output: Path) -> Outcome:
    pair = ("--main", folders / "target", "--mtp", folders / assistant, "--output-dir", output)
    return run_program("graft", *pair, "--prove", "--prompts", folders / "one.jsonl", "--json")


def test_an_assistant_of_the_target_is_proven(folders: Path, tmp_path: Path) -> None:
    made = graft(folders, "own", tmp_path / "out")
    assert made.code == 0, made.err
    pairing = json.loads(made.out)["pairing"]
    assert pairing["status"] == "pass"
    assert pairing["words"].startswith("Pairing proven by acceptance: draft 1 ")
    assert "prove" not in json.loads(made.out)["next"]


@pytest.mark.nightly
def test_every_check_passes_or_says_what_it_would_need(folders: Path, tmp_path: Path) -> None:
    assert graft(folders, "own", tmp_path / "out").code == 0
    options = ("--prompts", folders / "two.jsonl", "--max-new-tokens", 8, "--k", "1,2")
    found = run_program("verify", tmp_path / "out", *options, "--json", "--quiet")
    assert found.code == 0, found.out + found.err
    items: dict[str, dict[str, Any]] = {
        f"{check['name']}: {item['name']}": item
        for check in json.loads(found.out)["checks"]
        for item in check["items"]
    }
    ran = [f"greedy: assistant, k={k}" for k in range(1, 6)]
    ran += ["greedy: fast fp32, assistant, k=2", "greedy: bf16, assistant, k=2"]
    ran += ["acceptance: sanity band of draft 1", "acceptance: later drafts hold"]
    ran += ["sampling: top_p 0 equals greedy", "paths: speculation off or on, k=2"]
    ran += ["controls: target: no row sees a later token", "paths: batch 1 or 2"]
    assert {name: items[name]["status"] for name in ran} == dict.fromkeys(ran, "pass")
    assert not any(name.startswith("greedy: mtp") for name in items)
    assert "not read one by one" in items["likelihood: all of it"]["cause"]


def test_an_assistant_of_another_training_is_not(folders: Path, tmp_path: Path) -> None:
    made = graft(folders, "another", tmp_path / "out")
    assert made.code == 7, made.out + made.err
    assert json.loads(made.out)["pairing"]["status"] == "fail"
    assert "this main model's" in made.err and "released with it" in made.err
