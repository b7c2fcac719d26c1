"""Tools that quantize checkpoints, each run in a process of its own environment, and the facts of
what they wrote: what became of the MTP layer, what mtp-export says, and whether a graft repairs it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cases import read_json, run_program

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "benchmarks/results/tools.json"
SCRIPTS = Path(__file__).parent / "scripts"
_WARNING = re.compile(r"(?:WARNING|ERROR) - (.*\bMTP\b.*)")
Facts = dict[str, Any]


@dataclass(frozen=True)
class Tool:
    """A tool: its distribution, its environment below .venv-tools, and the script that runs it."""

    distribution: str
    environment: str
    script: str

    @property
    def python(self) -> Path:
        return ROOT / ".venv-tools" / self.environment / "bin/python"

    def version(self) -> str:
        code = f"import importlib.metadata as m; print(m.version({self.distribution!r}))"
        found = subprocess.run(
            [self.python, "-c", code], capture_output=True, text=True, check=True
        )
        return found.stdout.strip()


TOOLS = {
    "llm-compressor": Tool("llmcompressor", "llm-compressor", "with_llm_compressor.py"),
    "AutoRound": Tool("auto-round", "others", "with_auto_round.py"),
    "GPTQModel": Tool("gptqmodel", "others", "with_gptqmodel.py"),
    "ModelOpt": Tool("nvidia-modelopt", "others", "with_modelopt.py"),
    "Quark": Tool("amd-quark", "others", "with_quark.py"),
}


@dataclass(frozen=True)
class Run:
    """A tool's run on the miniature of a family."""

    tool: str
    scheme: str
    family: str

    def __str__(self) -> str:
        return f"{self.tool}: {self.scheme}, {self.family}"


FAMILIES = GLM, DEEPSEEK = ("glm4_moe", "deepseek_v3")
# The miniature of DeepSeek-V3 is twenty times as deep: one or two schemes of each tool.
SCHEMES: dict[tuple[str, str], tuple[str, ...]] = {
    ("llm-compressor", GLM): (
        "FP8_DYNAMIC",
        "W8A8",
        "NVFP4A16",
        "W4A16",
        "W4A16 GPTQ",
        "W4A16 AWQ",
        "W4A16 AWQ, mappings",
    ),
    ("llm-compressor", DEEPSEEK): ("FP8_DYNAMIC", "W4A16"),
    ("AutoRound", GLM): ("auto_round", "auto_round, model free", "auto_round:auto_gptq"),
    ("AutoRound", DEEPSEEK): ("auto_round, model free",),
    ("GPTQModel", GLM): ("gptq",),
    ("GPTQModel", DEEPSEEK): ("gptq",),
    ("ModelOpt", GLM): ("FP8", "NVFP4"),
    ("ModelOpt", DEEPSEEK): ("FP8",),
    ("Quark", GLM): ("INT4", "MXFP4"),
    ("Quark", DEEPSEEK): ("INT4",),
}
RUNS = tuple(
    Run(tool, scheme, family) for (tool, family), schemes in SCHEMES.items() for scheme in schemes
)


@dataclass(frozen=True)
class Written:
    """Exit code and log of a tool, and the checkpoint's folder, None where it wrote none."""

    code: int
    log: str
    folder: Path | None


def run_tool(run: Run, source: Path, calibration: Path, output: Path) -> Written:
    """Run a tool on a checkpoint. Nothing outside is reached, and no more threads than two."""
    tool = TOOLS[run.tool]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(output.parent / "hub")}
    # With its default of one worker on two cores GPTQModel does not start.
    settings = {**os.environ, **offline, "GPTQMODEL_CPU_WORKERS": "2", "OMP_NUM_THREADS": "2"}
    settings.pop("PYTHONPATH", None)
    done = subprocess.run(
        [tool.python, SCRIPTS / tool.script, run.scheme, source, output, calibration],
        cwd=output.parent,
        env=settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1500,
        check=False,
    )
    output.parent.joinpath("log").write_text(done.stdout)
    configs = sorted(output.rglob("config.json"))  # AutoRound writes a folder below the given one
    return Written(done.returncode, done.stdout, configs[0].parent if configs else None)


def layer_facts(folder: Path) -> Facts:
    """Facts of the MTP layer in a checkpoint: whether config.json announces it, its tensors by
    dtype, and the files that they are in."""
    config = read_json(folder / "config.json")
    prefix = layer_prefix(folder)
    dtypes: Counter[str] = Counter()
    files = set()
    for path in folder.glob("*.safetensors"):
        header = _header(path)
        found = [tensor["dtype"] for name, tensor in header.items() if name.startswith(prefix)]
        dtypes.update(found)
        files |= {path.name} if found else set()
    announced = config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0
    return {"announced": announced, "tensors": dict(sorted(dtypes.items())), "files": sorted(files)}


def layer_prefix(folder: Path) -> str:
    return f"model.layers.{read_json(folder / 'config.json')['num_hidden_layers']}."


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(size))
    return {name: tensor for name, tensor in header.items() if name != "__metadata__"}


def facts_of(written: Written, original: Path, bundle: Path) -> Facts:
    """Judge what a tool wrote, graft the original's layer, and judge again. A graft replaces a
    layer that is there; one that is kept as it was needs none."""
    facts: Facts = {"code": written.code}
    if written.code or written.folder is None:
        return facts | {"message": written.log.strip().splitlines()[-1]}
    facts["warnings"] = sorted(set(_WARNING.findall(written.log)))
    facts["layer"] = layer_facts(written.folder) | {"of": layer_facts(original)["tensors"]}
    facts["verify"], repair = _verified(written.folder, "--level", "files", "--source", original)
    facts["repair"] = repair.split(" --")[0]
    if facts["layer"]["tensors"]:
        facts["run"] = ran(written.folder)
    if facts["verify"]["code"]:
        facts["graft"] = _grafted(written.folder, original, repair, bundle)
    return facts


def _grafted(main: Path, original: Path, repair: str, bundle: Path) -> Facts:
    """Graft by the command that verify printed, if it did, and run the bundle."""
    usual = f"mtp-export graft --main {main} --mtp {original} --output-dir BUNDLE"
    words = (repair or usual).split()[1:]
    outcome = run_program(*(bundle if word == "BUNDLE" else word for word in words), "--quiet")
    if outcome.code:
        return {"code": outcome.code, "message": outcome.err.strip().splitlines()[0]}
    return {"code": 0, "verify": ran(bundle)}


def ran(folder: Path) -> Facts:
    """Return what verify says of a bundle or checkpoint at level run: its failed items, and the
    share of first drafts that were accepted."""
    return _verified(folder, "--level", "run", "--max-new-tokens", 32, "--k", 1)[0]


def _verified(folder: Path, *options: object) -> tuple[Facts, str]:
    """Return what verify says, and the command of its report that repairs what is lost, in which
    BUNDLE stands for the output; "" for none."""
    outcome = run_program("verify", folder, *options, "--json", "--quiet")
    items = {
        f"{check['name']}: {item['name']}": item
        for check in json.loads(outcome.out)["checks"]
        for item in check["items"]
    }
    failed = {name: item for name, item in items.items() if item["status"] == "fail"}
    first = items.get("acceptance: k=1, draft 1", {}).get("data") or {}
    repairs = [item["repair"] for item in failed.values() if item.get("repair")]
    facts = {
        "code": outcome.code,
        "failed": {name: item["figure"] for name, item in sorted(failed.items())},
    }
    if "conditional" in first:
        facts["acceptance"] = first["conditional"]
    return facts, repairs[0] if repairs else ""
