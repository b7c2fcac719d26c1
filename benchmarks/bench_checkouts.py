"""Speed of the runtime in this checkout of the project beside another, as of an earlier commit.

    python -m benchmarks.bench_checkouts CHECKPOINT CHECKOUT OUTPUT.json [--turns 4]

In turn, each in a process of its own that imports one of the two: milliseconds of a prompt of 480
tokens, and per token of 1 and of 16 requests that decode 48 tokens, plainly and with 3 drafts each.
The best of all turns, and the other checkout's time over this one's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import mtp_runtime
from benchmarks.common.measure import machine
from mtp_runtime import LLM, SamplingParams

OWN = Path(__file__).resolve().parents[1]
PROMPT, TOKENS, REPEATS, DRAFTS = list(range(2, 50)) * 10, 48, 9, 3
METHODS = {
    "plain": {"speculate_method": "none"},
    f"{DRAFTS} drafts": {
        "speculate_method": "mtp",
        "speculate_max_draft_token_num": DRAFTS,
    },
}


def measure(checkpoint: Path) -> dict[str, float]:
    """Return milliseconds by what was measured."""
    found: dict[str, float] = {}
    for name, options in METHODS.items():
        llm = LLM(checkpoint, **options)
        for count in (1, 16):
            prompts = [[2 + number, *range(5, 12)] for number in range(count)]
            _generate(llm, prompts, 4)
            seconds = min(
                _generate(llm, prompts, 1 + TOKENS) - _generate(llm, prompts, 1)
                for _ in range(REPEATS)
            )
            found[f"{name}, {count} requests, per token"] = seconds / TOKENS * 1e3
        if name == "plain":
            best = min(_generate(llm, [PROMPT], 1) for _ in range(REPEATS))
            found[f"prompt of {len(PROMPT)}"] = best * 1e3
    return found


def _generate(llm: LLM, prompts: list[list[int]], tokens: int) -> float:
    begun = time.perf_counter()
    llm.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True))
    return time.perf_counter() - begun


def run_in(checkout: Path, checkpoint: Path) -> dict[str, float]:
    """Measure in a process that imports the runtime of a checkout, and this one's benchmarks."""
    folders = [*(checkout / name for name in ("runtime", "checkpoints", "kernels")), OWN]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, __file__, str(checkpoint), "--run"]
    output = subprocess.check_output(command, text=True, env=environment, cwd=checkout)
    found: dict[str, float] = json.loads(output.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("checkout", type=Path, nargs="?")
    parser.add_argument("output", type=Path, nargs="?")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    checkpoint = options.checkpoint.resolve()
    if options.run:
        if not Path(mtp_runtime.__file__).is_relative_to(Path.cwd()):
            parser.error(f"expected a checkout in {Path.cwd()}, found no mtp_runtime there")
        print(json.dumps(measure(checkpoint)))
        return
    turns = []
    for _ in range(options.turns):
        turns.append([run_in(one, checkpoint) for one in (OWN, options.checkout.resolve())])
        print(turns[-1], file=sys.stderr, flush=True)
    rows = {}
    for name in turns[0][0]:
        own, other = (min(turn[place][name] for turn in turns) for place in (0, 1))
        rows[name] = {"milliseconds": own, "other": other, "times_as_fast": other / own}
    commit = ["git", "-C", str(options.checkout), "rev-parse", "HEAD"]
    other = subprocess.check_output(commit, text=True).strip()
    result = {"machine": machine(), "other_commit": other, "rows": rows}
    options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
