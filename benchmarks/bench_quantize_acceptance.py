"""Loss of acceptance by quantization: every row of the precision table on the trained fixture.

    python -m benchmarks.bench_quantize_acceptance [--rows NAME ...] [--ks 1 2 3] [--out FOLDER]

Each row is quantized, and decodes the fixture's prompts greedily, 128 tokens each, end of sentence
ignored, with k = 1, 2 and 3 drafts (fp32 arithmetic on the dequantized weights; fp8 activations are
not simulated). A row writes other texts than the source, and texts differ in how predictable they
are. So each row is also compared with the source on the same texts, those that the source wrote:
at every position, is the row's draft what the row's own target would choose there? Intervals are
95 %, clustered by prompt, those of differences paired. Writes quantize_acceptance.json and .md to
FOLDER (benchmarks/results); rows that are not run keep the figures they have; --ks with
nothing behind it measures on the source's texts alone.

w4afp8 is no row here: its groups of 128 do not divide the fixture's K of 64.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.drafts_on_texts import (
    KS,
    NEW_TOKENS,
    ROOT,
    SOURCE,
    Counts,
    Prompts,
    difference,
    fixture_prompts,
    written,
)
from benchmarks.common.measure import machine
from mtp_export.bundle.build import run_bundle
from mtp_export.bundle.options import BundleOptions, RunOptions
from mtp_export.bundle.precision import ScaleRule
from mtp_export.bundle.quantize import QuantizeOptions, plan_quantize
from mtp_export.plan import Link
from mtp_export.progress import silent
from mtp_export.verify.evidence.corpus import Corpus
from mtp_export.verify.evidence.decode import decode
from mtp_export.verify.evidence.statistics import Estimate
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.models.model import Model
from mtp_runtime.sampling import SamplingParams
from mtp_runtime.teacher_forcing import Texts, best_tokens

SOURCE_ROW, FORCED = "source", "on the source's texts"


@dataclass(frozen=True)
class Row:
    """A pair of schemes, how it is written, and by how many points acceptance may fall at k = 1
    (None: no bound is given)."""

    base: str
    mtp: str
    most_points_lost: float | None
    target: str = "hf"
    group_size: int = 64
    scale: ScaleRule = ScaleRule.MINMAX


ROWS = {
    "a8w8_fp8_wint4": Row("a8w8_fp8_wint4", "a8w8_fp8", 3.0),
    "a8w8_fp8_wint4, SGLang": Row("a8w8_fp8_wint4", "a8w8_fp8", 3.0, target="sglang"),
    "weight_only_int4": Row("weight_only_int4", "weight_only_int8", 3.0),
    "weight_only_int4, mse": Row("weight_only_int4", "weight_only_int8", 3.0, scale=ScaleRule.MSE),
    "weight_only_int4, groups of 32": Row(
        "weight_only_int4", "weight_only_int8", 3.0, group_size=32
    ),
    "a8w8_fp8": Row("a8w8_fp8", "a8w8_fp8", 0.0),
    "weight_only_int8": Row("weight_only_int8", "weight_only_int8", 1.0),
    "bf16": Row("bf16", "bf16", None),
}


def quantized(row: Row, source: Path, output: Path) -> Path:
    """The source as a bundle of a row."""
    bundle = BundleOptions(source, output, target=row.target, run=RunOptions(link=Link.COPY))
    options = QuantizeOptions(bundle, row.base, row.mtp, group_size=row.group_size, scale=row.scale)
    run_bundle(plan_quantize(options), silent)
    return output


def free_running(model: Model, prompts: Prompts, new_tokens: int, k: int) -> list[Counts]:
    """Drafts of each position, decoding: those whose predecessors in the step were all accepted."""
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    metrics = [r.metrics for r in decode(model, prompts, params, method="mtp", k=k).requests]
    return [
        Counts(
            tuple(m.accepted[at] if at < len(m.accepted) else 0.0 for m in metrics),
            tuple(m.reached[at] if at < len(m.reached) else 0.0 for m in metrics),
        )
        for at in range(k)
    ]


@torch.inference_mode()
def on_texts(model: Model, texts: Texts, depths: int) -> list[Counts]:
    """Drafts of each depth on given texts, against the target's own choice there; at depth 2 and
    more where the text goes on with the drafts before it."""
    corpus = Corpus(model, (), 0, texts)
    drafts, anchors = corpus.drafts(depths), corpus.anchors
    chosen = best_tokens(model.head, corpus.states[1]).cpu()
    result = []
    for depth in range(1, depths + 1):
        where = drafts.reached(depth - 1) & drafts.room[depth - 1]
        wanted = chosen[(anchors.rows + depth).clamp(max=len(chosen) - 1)]
        right = (drafts.best[depth - 1] == wanted).float()
        result.append(
            Counts(
                tuple(corpus.by_text(right, where)),
                tuple(corpus.by_text(torch.ones_like(right), where)),
            )
        )
    return result


@dataclass(frozen=True)
class Measured:
    """A model's drafts: free[k] decoding with k drafts and forced on the shared texts, each a list
    by draft position."""

    free: Mapping[int, list[Counts]]
    forced: list[Counts]

    def as_json(self, source: Measured) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for k, counts in self.free.items():
            result[f"decoding, k={k}"] = _figures(counts, source.free[k])
        result[FORCED] = _figures(self.forced, source.forced)
        return result


def _figures(counts: list[Counts], source: list[Counts]) -> list[dict[str, Any]]:
    def shown(estimate: Estimate | None) -> dict[str, Any] | None:
        return None if estimate is None else estimate.as_json()

    return [
        {
            "draft": number,
            "acceptance": shown(own.estimate),
            "minus_source": shown(difference(own, other)),
        }
        for number, (own, other) in enumerate(zip(counts, source, strict=True), 1)
    ]


def measured(
    model: Model, prompts: Prompts, texts: Texts, new_tokens: int, ks: Sequence[int]
) -> Measured:
    """The drafts of a model."""
    forced = on_texts(model, texts, max(KS))
    return Measured({k: free_running(model, prompts, new_tokens, k) for k in ks}, forced)


def table(rows: Mapping[str, Any]) -> str:
    """Return the table of docs/benchmarks.md."""
    lines = [
        "| base + mtp | k = 1, decoding | minus source, points | k = 1, same texts "
        "| minus source, points | drafts 2, 3 of 3 |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        cells = [name]
        for key in ("decoding, k=1", FORCED):
            first = row[key][0] if key in row else None
            cells += (
                ["-", "-"]
                if first is None
                else [_shown(first["acceptance"]), _points(first["minus_source"])]
            )
        deeper = row.get("decoding, k=3", row[FORCED])[1:]
        found = [entry["acceptance"] for entry in deeper if entry["acceptance"] is not None]
        cells.append(", ".join(f"{estimate['value']:.3f}" for estimate in found))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _shown(estimate: Mapping[str, float]) -> str:
    return f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"


def _points(estimate: Mapping[str, float]) -> str:
    value, low, high = (100 * estimate[key] for key in ("value", "low", "high"))
    return "0" if value == low == high == 0 else f"{value:+.2f} [{low:+.2f}, {high:+.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--ks", type=int, nargs="*", default=list(KS), help="drafts, decoding")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    arguments = parser.parse_args()
    prompts, tokens = fixture_prompts(arguments.prompts), arguments.new_tokens
    model = load_model(SOURCE, LoadOptions()).model
    texts = written(model, prompts, tokens)
    source = measured(model, prompts, texts, tokens, arguments.ks)
    path = arguments.out / "quantize_acceptance.json"
    document = json.loads(path.read_text()) if path.exists() else {"rows": {}}
    document |= {"machine": machine(), "prompts": len(prompts), "tokens": tokens}
    rows = document["rows"]
    rows.setdefault(SOURCE_ROW, {}).update(source.as_json(source))
    for name in arguments.rows:
        with tempfile.TemporaryDirectory() as folder:
            bundle = quantized(ROWS[name], SOURCE, Path(folder) / "bundle")
            model = load_model(bundle, LoadOptions()).model
        row = measured(model, prompts, texts, tokens, arguments.ks)
        rows.setdefault(name, {}).update(row.as_json(source))
        document["rows"] = {n: rows[n] for n in (SOURCE_ROW, *ROWS) if n in rows}
        path.write_text(json.dumps(document, indent=1) + "\n")
        path.with_suffix(".md").write_text(table(document["rows"]))


if __name__ == "__main__":
    main()
