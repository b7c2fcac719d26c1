"""Good bundles of the precision table at level run: their losses against the source, beside the
gates, over seeds of prompts. Writes docs/gates.md.

python -m faults.good_rows --seeds 3   (with tests/ on the path; too long for the test suite)
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cases import export, quantize, read_json
from faults.matrix import no_progress
from faults.small_model import ROWS, TARGETS
from faults.sweep import FIXTURE, ROOT, prompts_of
from mtp_export.verify.check import Item, Level, Status
from mtp_export.verify.context import Context
from mtp_export.verify.decoding import controls, likelihood
from mtp_export.verify.decoding.acceptance import diagnosed
from mtp_export.verify.decoding.differential import compared
from mtp_export.verify.evidence.corpus import Corpus
from mtp_export.verify.evidence.prompts import Prompt
from mtp_export.verify.gates import RunGate, gate_of
from mtp_export.verify.options import VerifyOptions
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.models.model import Model

# w4afp8 has one scale per 128 weights of a row, more than a row of the fixture's experts has; GGUF
# files are run by llama.cpp (tests/engines).
NAMES = (*(row for row in ROWS if row != "w4afp8" and "GGUF" not in row), *TARGETS)


@dataclass(frozen=True)
class Good:
    """A loaded good bundle, and its gate."""

    folder: Path
    model: Model
    scheme: str
    gate: RunGate

    @classmethod
    def written(cls, name: str, folder: Path) -> Good:
        """The trained fixture in a row of the table, or for a target."""
        if name in ROWS:
            base, mtp, *more = ROWS[name]
            if "int4" in base and "--group-size" not in more:
                more += ["--group-size", "64"]  # the fixture's experts have rows of 64
            outcome = quantize(FIXTURE, folder, "--base-quant", base, "--mtp-quant", mtp, *more)
        else:
            outcome = export(FIXTURE, folder, "--target", name)
        assert outcome.code == 0, outcome.err
        recorded = read_json(folder / "mtp_export.json")["options"]
        return cls(folder, load_model(folder, LoadOptions()).model, *gate_of(recorded))


def items_of(good: Good, source: Model, prompts: Sequence[Prompt], tokens: int) -> list[Item]:
    """Items of the checks that tell a good bundle from a bad one by drafts and plain text."""
    context = Context.open(VerifyOptions(good.folder, None, Level.RUN), no_progress)
    corpus = Corpus(good.model, tuple(prompts), tokens)
    return [
        *compared(corpus, source, scheme=good.scheme, gate=good.gate),
        *diagnosed(corpus, context=context),
        *controls.items_of(corpus),
        *likelihood.run(context),
    ]


@dataclass(frozen=True)
class Figures:
    """Losses of a row over one seed's prompts; acceptance in percentage points."""

    kl_nats: float
    top1: float
    lost_points: tuple[float, ...]
    failed: tuple[str, ...]

    @classmethod
    def of(cls, items: Sequence[Item]) -> Figures:
        by_name = {item.name: item for item in items}
        changes = [item for item in items if item.name.startswith("acceptance change")]
        return cls(
            float(by_name["KL of the target's distribution"].data["value"]),
            float(by_name["top-1 agreement"].data["value"]),
            tuple(-100 * float(item.data["change"]["value"]) for item in changes),
            tuple(f"{i.name}: {i.cause}" for i in items if i.status is Status.FAIL),
        )


def measured(
    names: Sequence[str], seeds: int, count: int, tokens: int
) -> Iterator[tuple[str, Good, list[Figures]]]:
    """Name, bundle and figures by seed, per row."""
    torch.set_num_threads(1)
    source = load_model(FIXTURE, LoadOptions()).model
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            good = Good.written(name, Path(folder) / "bundle")
        found = []
        for seed in range(seeds):
            found.append(
                Figures.of(
                    items_of(good, source=source, prompts=prompts_of(seed, count), tokens=tokens)
                )
            )
            sys.stderr.write(f"{name}, seed {seed}: {found[-1]}\n")
        yield name, good, found


def page(options: argparse.Namespace) -> str:
    """The result as Markdown."""
    lines = [
        "# Good bundles against the gates",
        "",
        f"`python -m faults.good_rows --seeds {options.seeds} --prompts {options.prompts}"
        f" --tokens {options.tokens} --rows {shlex.join(options.rows)}`:",
        "rows of the precision table, made from the trained fixture and run against it, with",
        "held-out prompts cut at random. Figures are the worst seed's, in brackets the best's.",
        "A gate is the bound beyond which `verify` fails; for acceptance only if the whole 95 %",
        "interval lies beyond it.",
        "`w4afp8` takes rows of 128 weights, which the fixture's experts do not have.",
        "",
        "| row | KL, nats | gate | top-1 agreement | gate | draft 1 loses, points | draft 2 | gate"
        " | items failed |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, good, found in measured(
        names=options.rows, seeds=options.seeds, count=options.prompts, tokens=options.tokens
    ):
        kls, top1s = [f.kl_nats for f in found], [f.top1 for f in found]
        losses = [[f.lost_points[depth] for f in found] for depth in (0, 1)]
        cells = (
            f"{name}: {good.scheme}",
            f"{max(kls):.2e} [{min(kls):.2e}]",
            f"{good.gate.kl_nats:g}",
            f"{min(top1s):.4f} [{max(top1s):.4f}]",
            f"{good.gate.top1:g}",
            *(f"{max(own):+.2f} [{min(own):+.2f}]" for own in losses),
            f"{good.gate.acceptance_points:g}",
            f"{sum(len(f.failed) for f in found)}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rows", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/gates.md")
    options = parser.parse_args()
    options.output.write_text(page(options))


if __name__ == "__main__":
    main()
