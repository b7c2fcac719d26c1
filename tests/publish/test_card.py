"""Model cards: metadata that the Hub reads, the manifest's table, the verdict, its plots, and the
commands that serve what was pushed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from cases import edit_json, export, quantize, read_json, run_program
from hub_server import HubServer
from publish.pushing import NAME, content, push

ACCEPTANCE = {"value": 0.8, "low": 0.7, "high": 0.9, "count": 40}


def card_of(hub: HubServer, name: str = NAME) -> tuple[dict[str, Any], str]:
    """Return metadata and text of a repository's card."""
    _, metadata, text = content(hub, name)["README.md"].decode().split("---\n", 2)
    return yaml.safe_load(metadata), text


def test_card_of_a_verified_bundle(hub: HubServer, exported: Path) -> None:
    hub.serve("acme/base", exported / "source")
    commit = hub.repositories["acme/base"].revisions["main"]
    push(exported, "--base-model", "acme/base")
    metadata, text = card_of(hub)
    assert metadata["base_model"] == "acme/base" and "base_model_relation" not in metadata
    assert {"mtp", "speculative-decoding", "deepseek_v3"} <= set(metadata["tags"])
    assert metadata["library_name"] == "mtp-export"
    assert f"(commit `{commit}`)" in text
    for part in ("main", "mtp"):
        shards = len(list((exported / "bundle" / part).glob("*.safetensors")))
        assert f"| {part} | `{part}` | {shards} |" in text
    counts = read_json(exported / "report.json")["counts"]
    assert (
        f"**No fault in headers and configs: {counts['pass']} pass, 0 fail,"
        f" {counts['not tested']} not tested" in text
    )
    assert "`mtp-export verify --level files`, without the source" in text
    assert "hf download org/name --local-dir /models/name" in text
    for words in ("vllm serve /models/name/main", '"model": "/models/name/mtp"', "sglang"):
        assert words in text
    assert str(exported) not in text  # nothing of this machine


def test_card_of_gguf_files(hub: HubServer, exported: Path, tmp_path: Path) -> None:
    bundle, options = tmp_path / "bundle", ("--target", "llama.cpp", "--pre-tokenizer", "none")
    assert export(exported / "source", bundle, *options, "--quiet").code == 0
    assert run_program("push", bundle, NAME, "--unverified", "--quiet").code == 0
    metadata, text = card_of(hub)
    assert "gguf" in metadata["tags"]
    files = ("main/source.gguf", "-md /models/name/mtp/mtp-source.gguf")
    assert all(words in text for words in ("llama-server -m /models/name/main", *files))
    main = tmp_path / "main"
    assert export(exported / "source", main, *options, "--part", "main", "--quiet").code == 0
    assert run_program("push", main, "org/main", "--unverified", "--quiet").code == 0
    metadata, _ = card_of(hub, "org/main")
    assert metadata["library_name"] == "mtp-export"  # transformers reads no such folder


def test_card_of_a_draft_that_nothing_verified(
    hub: HubServer, exported: Path, tmp_path: Path
) -> None:
    hub.serve("acme/base", exported / "source")
    bundle = tmp_path / "bundle"
    options = ("--part", "mtp", "--link", "copy", "--quiet")
    assert export("hf://acme/base", bundle, *options).code == 0
    assert run_program("push", bundle, NAME, "--unverified", "--quiet").code == 0
    metadata, text = card_of(hub)
    assert metadata["base_model"] == "acme/base"  # the manifest names it
    assert "pipeline_tag" not in metadata
    assert "**Not verified**" in text
    assert "| mtp | top |" in text


def test_card_of_a_quantized_bundle(hub: HubServer, exported: Path, tmp_path: Path) -> None:
    int8 = ("--base-quant", "weight_only_int8", "--mtp-quant", "weight_only_int8", "--quiet")
    assert quantize(exported / "source", tmp_path / "bundle", *int8).code == 0
    source = Path(shutil.copytree(exported / "source", tmp_path / "base"))
    (source / "README.md").write_text("---\nlicense: mit\n---\n")
    hub.serve("acme/base", source)
    options = ("--unverified", "--quiet", "--base-model", "acme/base")
    assert run_program("push", tmp_path / "bundle", NAME, *options, "--part", "mtp").code == 0
    metadata, text = card_of(hub)
    assert metadata["base_model_relation"] == "quantized"
    assert metadata["license"] == "mit" and "weight_only_int8" in metadata["tags"]
    row = next(line for line in text.splitlines() if line.startswith("| mtp |"))
    assert "quantize_int8_channel" in row and " dB |" in row
    # Its main model is the converted one, which this repository does not have.
    assert "hf download MAIN --local-dir /models/name/main" in text
    assert "`MAIN` stands for" in text


def test_plots_are_pictures_of_their_own(hub: HubServer, exported: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported, tmp_path / "copy"))
    measured = {
        "name": "draft 1", "status": "pass", "figure": "0.8",
        "data": {"k": 1, "position": 1, "conditional": ACCEPTANCE, "cumulative": ACCEPTANCE},
    }  # fmt: skip
    layers = {"layer": 0, "min": 40.0, "median": 41.0}
    weights = measured | {
        "data": {"role": "attention <b>", "storage": "int8", "sqnr_db_by_layer": [layers]}
    }

    def add(report: dict[str, Any]) -> None:
        checks = {check["name"]: check for check in report["checks"]}
        checks["acceptance"]["items"] = [measured]
        checks["weights"]["items"] = [weights]

    edit_json(folder / "report.json", add)
    push(folder)
    _, text = card_of(hub)
    plots = {n: data for n, data in content(hub).items() if n.startswith("verification/")}
    names = {"acceptance-conditional", "acceptance-cumulative", "size", "sqnr"}
    assert set(plots) == {f"verification/{name}.svg" for name in names}
    for name, data in plots.items():
        root = ElementTree.fromstring(data)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert root.find("{*}style") is not None
        assert f"]({name})" in text
    assert b"attention &lt;b&gt;, int8" in plots["verification/sqnr.svg"]


@pytest.mark.parametrize("spoilt", ["figure", "k"])
def test_reports_whose_plots_cannot_be_drawn_are_refused(
    spoilt: str, hub: HubServer, exported: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(exported, tmp_path / "copy"))
    acceptance = ACCEPTANCE if spoilt == "k" else {"value": "<svg>", "low": None, "high": None}
    item = {"name": "draft 1", "status": "pass", "data": {
        "k": [] if spoilt == "k" else 1, "position": 1, "conditional": acceptance,
        "cumulative": acceptance}}  # fmt: skip
    edit_json(
        folder / "report.json", lambda r: r["checks"][0].update(name="acceptance", items=[item])
    )
    outcome = push(folder)
    assert outcome.code == 3 and "no report of a verification" in outcome.err


def test_a_failed_verdict_is_on_the_card(hub: HubServer, exported: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported, tmp_path / "copy"))
    edit_json(folder / "report.json", lambda r: r["checks"][0]["items"][0].update(status="fail"))
    report = ("--report", folder / "report.json")
    outcome = run_program("push", folder / "bundle", NAME, *report, "--unverified", "--json")
    assert outcome.code == 0, outcome.err
    assert "**NOT verified: " in card_of(hub)[1]
