"""Time and memory of an export against its bytes, beside cp and the disk's limit, with a plot.

    python -m benchmarks.bench_sizes /data/scratch
    python -m benchmarks.bench_sizes /data/scratch --points 64x16160 128x64640 176x64640

Each point is a checkpoint of V3's widths with so many experts and tokens, made for it and removed
afterwards: its MTP part is exported with copies of every tensor. The last is V3's own MTP layer.
Medians of --runs (cp is run once), the page cache dropped before each and `sync` counted. The
largest point needs 34 GB of disk; --points chooses others of 16 experts and more, such as 176x64640
(22 GB).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.limits import DiskLimit, DiskWork
from benchmarks.common.measure import Measured, cp_of_size, fresh, machine

POINTS = ((64, 16_160), (128, 64_640), (192, 129_280), (256, 129_280))  # experts, tokens
_MAKE = """
import sys
from pathlib import Path
from benchmarks.make_checkpoint import REAL_CONFIG, make_checkpoint
experts, tokens = map(int, sys.argv[2:])
config = REAL_CONFIG | {"n_routed_experts": experts, "vocab_size": tokens, "num_hidden_layers": 4}
make_checkpoint(Path(sys.argv[1]), config, max_shard_bytes=4_300_000_000, parted=False,
    filled=lambda name: name.startswith("model.layers.4.") or "layers" not in name)
"""
_WORK = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from benchmarks.common.limits import DiskWork
from mtp_export.bundle.export import plan_export
from mtp_export.bundle.options import BundleOptions, ContentOptions, Part, RunOptions
from mtp_export.plan import Link
options = BundleOptions(Path(sys.argv[1]), Path(sys.argv[2]), "hf",
    ContentOptions(part=Part.MTP), RunOptions(link=Link.COPY))
print(json.dumps(asdict(DiskWork.of(plan_export(options, dry_run=True)))))
"""
_EXPORT = [sys.executable, "-c", "from mtp_export.cli import main; main()", "--part", "mtp"]


def measured_point(scratch: Path, experts: int, tokens: int, runs: int) -> dict[str, Any]:
    """Make a checkpoint, run all three on it, and remove it."""
    source = scratch / "source"
    # In processes of their own: a process's peak memory, as the kernel counts it, begins at its
    # parent's.
    subprocess.check_call([sys.executable, "-c", _MAKE, str(source), str(experts), str(tokens)])
    try:
        return _measured(source, scratch, runs)
    finally:
        shutil.rmtree(source)


def _measured(source: Path, scratch: Path, runs: int) -> dict[str, Any]:
    planned = [sys.executable, "-c", _WORK, str(source), str(scratch / "plan")]
    facts = json.loads(subprocess.check_output(planned))
    work = DiskWork(tuple(map(tuple, facts["reads"])), facts["write_bytes"])
    limit = DiskLimit.of(work, scratch)
    output = str(scratch / "out/bundle")
    places = ["--input-dir", str(source), "--output-dir", output]
    export = fresh([*_EXPORT, *places, "--link", "copy", "--quiet"], scratch)
    shards = sorted({Path(path) for path, _, _ in work.reads})
    copy = fresh(["sh", "-c", cp_of_size(shards, work.size_bytes // 2), output], scratch)
    rows: dict[str, list[Measured]] = {"mtp-export": [], "direct I/O": []}
    for _ in range(runs):
        rows["mtp-export"].append(export())
        rows["direct I/O"].append(limit.run())
    rows["cp"] = [copy()]
    found: dict[str, Any] = limit.facts() | {
        name: {
            "median_seconds": round(median(run.seconds for run in each), 2),
            "seconds": [round(run.seconds, 2) for run in each],
            "peak_bytes": max(run.peak_bytes for run in each),
        }
        for name, each in rows.items()
    }
    seconds = {name: found[name]["median_seconds"] for name in rows}
    found["share_of_limit"] = round(seconds["direct I/O"] / seconds["mtp-export"], 3)
    print(json.dumps(found), flush=True)
    return found


def plot(points: list[dict[str, Any]], path: Path) -> None:
    """Draw time and memory against bytes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (time, memory) = pyplot.subplots(1, 2, figsize=(9, 3.6))
    gigabytes = [point["bytes"] / 1e9 for point in points]
    for name in ("cp", "mtp-export", "direct I/O"):
        time.plot(gigabytes, [p[name]["median_seconds"] for p in points], marker="o", label=name)
    peaks = [p["mtp-export"]["peak_bytes"] / 1e6 for p in points]
    memory.plot(gigabytes, peaks, marker="o")
    time.set(xlabel="GB read and written", ylabel="seconds", xlim=0, ylim=0)
    memory.set(
        xlabel="GB read and written", ylabel="peak memory, MB", xlim=0, ylim=(0, 1.2 * max(peaks))
    )
    time.legend()
    time.set_title("Time of an export")
    memory.set_title("Memory of an export")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def point(text: str) -> tuple[int, int]:
    """Read a point such as 64x16160."""
    experts, tokens = map(int, text.split("x"))
    return experts, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--points", type=point, nargs="+", default=POINTS, metavar="EXPERTSxTOKENS")
    parser.add_argument("--result", type=Path, default=Path("benchmarks/results/sizes.json"))
    arguments = parser.parse_args()
    points = [
        measured_point(arguments.scratch, experts, tokens, arguments.runs)
        for experts, tokens in arguments.points
    ]
    arguments.result.parent.mkdir(parents=True, exist_ok=True)
    result = {"machine": machine(), "points": points}
    arguments.result.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    plot(points, arguments.result.with_suffix(".png"))


if __name__ == "__main__":
    main()
