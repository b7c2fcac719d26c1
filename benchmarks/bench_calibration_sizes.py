"""Time, memory and disk of calibrating a layer of real widths, beside what a dry run says.

    python -m benchmarks.bench_calibration_sizes WORK [--experts 8] [--texts 8] [--out FOLDER]

A main layer of GLM-4.7-Flash's widths with some of its 64 experts, and a small vocabulary; all
weights are random. It is calibrated by GPTQ in nvfp4, in one process and one thread, along texts of
512 random tokens; the MTP layer stays bf16. Writes calibration_sizes.json to FOLDER
(benchmarks/results), and in WORK 1 GB for 8 experts, which is removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common.drafts_on_texts import ROOT
from benchmarks.common.measure import machine
from benchmarks.make_checkpoint import make_checkpoint
from benchmarks.released import RELEASED

VOCAB, TEXT_TOKENS, PROMPT_TOKENS, DATA = 4096, 512, 16, "texts.jsonl"
SCHEMES = ("--base-quant", "weight_only_nvfp4", "--mtp-quant", "bf16")
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}
_SHARD_BYTES = 1_000_000_000
_SECONDS = 1.0  # between two looks at the disk
PROGRAM = "from mtp_export.cli import main; main()"


def config_of(experts: int) -> dict[str, Any]:
    """Return the config of one main layer with so many experts, and the MTP layer."""
    fewer = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "vocab_size": VOCAB}
    return RELEASED["glm4_moe_lite"].config | fewer | {"n_routed_experts": experts}


def write_texts(path: Path, count: int) -> None:
    """Write lines of random tokens, with answers."""
    chance = random.Random(40)
    rows = [[chance.randrange(2, VOCAB) for _ in range(TEXT_TOKENS)] for _ in range(count)]
    lines = [
        {"prompt_token_ids": row[:PROMPT_TOKENS], "completion_token_ids": row[PROMPT_TOKENS:]}
        for row in rows
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def size_of(folder: Path) -> int:
    """Return the bytes of the files of a folder; some may go meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_blocks * 512 if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def words_of(work: Path, source: Path) -> list[str]:
    """Return the words of the calibration of a checkpoint."""
    places = ("--input-dir", source, "--output-dir", work / "bundle", "--calibrate", work / DATA)
    return ["quantize", *map(str, places), *SCHEMES, "--calibrate-main", "--stream"]


def said_of(work: Path, source: Path) -> str:
    """Return what a dry run says of the calibration of a checkpoint."""
    words = [*words_of(work, source), "--dry-run", "--json"]
    run = [sys.executable, "-c", PROGRAM, *words]
    said = subprocess.run(run, env=ONE_THREAD, stdout=subprocess.PIPE, check=True)
    (remark,) = (one for one in json.loads(said.stdout)["remarks"] if "Calibration of" in one)
    return str(remark)


def measured(work: Path, source: Path) -> dict[str, Any]:
    """Run a calibration; return its seconds and the processor's, and peaks of memory and of its
    work folder."""
    words = [*words_of(work, source), "--workers", "1", "--quiet"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start, disk_bytes = time.monotonic(), 0
    with subprocess.Popen([sys.executable, "-c", PROGRAM, *words], env=ONE_THREAD) as child:
        while child.poll() is None:
            time.sleep(_SECONDS)
            disk_bytes = max(disk_bytes, size_of(work / "bundle-work"))
    assert child.returncode == 0, child.returncode
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    own, system = used.ru_utime - before.ru_utime, used.ru_stime - before.ru_stime
    return {
        "seconds": round(time.monotonic() - start, 1),
        "processor_seconds": round(own + system, 1),
        "memory_bytes": used.ru_maxrss * 1024,
        "disk_bytes": disk_bytes,
    }


def main() -> None:
    """Measure, and record the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--experts", type=int, default=8, help="of the layer, at least 4")
    parser.add_argument("--texts", type=int, default=8, help="to calibrate with")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    given = parser.parse_args()
    source = given.work / "source"
    make_checkpoint(source, config_of(given.experts), max_shard_bytes=_SHARD_BYTES)
    write_texts(given.work / DATA, given.texts)
    facts = {"machine": machine(), "experts": given.experts, "tokens": given.texts * TEXT_TOKENS}
    facts |= {"said": said_of(given.work, source), **measured(given.work, source)}
    for folder in (source, given.work / "bundle", given.work / "bundle-work"):
        shutil.rmtree(folder)
    (given.out / "calibration_sizes.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
