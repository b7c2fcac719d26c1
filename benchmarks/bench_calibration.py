"""Gain of an MTP layer in 4 bits by calibration on its true inputs: RTN, sweep, GPTQ and AWQ.

    python -m benchmarks.bench_calibration [--prompts 64] [--texts 64] [--out FOLDER]

The main model of the trained fixture is quantized as it will run, experts and MLPs in int4. It
answers the fixture's prompts, on which drafts are judged at depths 1 to 3, and other prompts, cut
from the modules that the fixture was trained on, to calibrate with: hidden states of that main
model, embeddings of the next tokens, and what the module is fed again at depths 2 and 3. All rows
go through all experts, which so share one Hessian. Linears that a 4-bit scheme packs are rounded,
but for the projection of the inputs and what latent attention absorbs, which stay as they are.

AWQ's scales are divided out again after rounding: that is what a model with folded scales computes.
Linears of attention get none, as in the product; that rows of up are divided before they are
rounded, which changes no int4, is left out. Intervals are 95 %, clustered by prompt
and paired. Writes calibration.json and .md to FOLDER (benchmarks/results).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.calibrated import (
    Grids,
    Inputs,
    Joined,
    Rounding,
    int4_grids,
    nvfp4_grids,
)
from benchmarks.common.drafts_on_texts import (
    KS,
    NEW_TOKENS,
    ROOT,
    SOURCE,
    Counts,
    difference,
    fixture_prompts,
    written,
)
from benchmarks.common.measure import machine
from benchmarks.common.tiny_prompts import training_prompts
from mtp_export.bundle.build import run_bundle
from mtp_export.bundle.options import BundleOptions
from mtp_export.bundle.precision import Int4Scope
from mtp_export.bundle.quantize import QuantizeOptions, plan_quantize
from mtp_export.calibrate.linears import Linears
from mtp_export.progress import silent
from mtp_export.verify.evidence.corpus import Corpus
from mtp_runtime.layers.moe import gated
from mtp_runtime.models.execution import TorchExecution
from mtp_runtime.models.load import LoadOptions, OpenedModel, load_model, open_model
from mtp_runtime.models.model import MtpModule

GROUP_SIZE = 64  # divides the widths of the fixture's experts
SPAN = ("value", "low", "high")
GRIDS: dict[str, dict[str, Grids]] = {
    "int4": {
        "amax": int4_grids(GROUP_SIZE, "minmax"),
        "sweep": int4_grids(GROUP_SIZE, "mse"),
    },
    "nvfp4": {"amax": nvfp4_grids("minmax"), "sweep": nvfp4_grids("mse")},
}


@dataclass(frozen=True)
class Layer:
    """The MTP layer of a bundle: linears of a plan that packs all, their weights in float32 by
    name, and the module with others."""

    opened: OpenedModel
    module: MtpModule
    linears: Linears

    @classmethod
    def of(cls, bundle: Path) -> Layer:
        """Open the MTP layer of a bundle."""
        opened = open_model(bundle, LoadOptions(dequantize_at_load=False))
        (module,) = opened.model(TorchExecution(), layers=0).mtp_modules
        options = QuantizeOptions(
            BundleOptions(SOURCE, bundle.with_name("unwritten")),
            base_quant="weight_only_nvfp4",
            mtp_quant="weight_only_nvfp4",
        )
        return cls(opened, module, Linears(plan_quantize(options, dry_run=True)))

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """Weights [N, K] of all linears."""
        return {name: self.linears.values(name) for name in self.linears.steps}

    def with_values(self, values: Mapping[str, Tensor]) -> MtpModule:
        """Return the module with other values of its weights."""
        source = replace(self.opened.source, values=dict(values), keep_dense=True)
        opened, own = replace(self.opened, source=source), self.module
        (mtp,) = opened.spec.mtp
        return opened.mtp_layer(mtp, own.embedding, head=own.head, contract=own.contract)

    def inputs(self, corpus: Corpus) -> list[Joined]:
        """Return what goes into the weights along texts, at all depths."""
        rows = self.linears.observation([self.module]).rows(corpus.texts, corpus.hidden)
        units, weights = self.linears.of_experts, self.weights
        sums = {name: Inputs.of(own) for name, own in rows.items()}
        found = [*self.linears.of_modules([self.module]), *units]
        joined = [Joined(one.weights, sums[one.input], one.down is not None) for one in found]
        for unit in units:
            assert unit.down is not None
            both = torch.cat([weights[name] for name in unit.weights])
            inner = gated(rows[unit.input].float() @ both.t())
            joined.append(Joined((unit.down,), Inputs.of(inner), scaled=True))
        return joined


def judged(corpus: Corpus, module: MtpModule) -> list[Counts]:
    """Return drafts of each depth, accepted and proposed, along the texts of the target."""
    drafts, result = corpus.drafts(max(KS), module), []
    for depth in KS:
        where = drafts.reached(depth - 1) & drafts.room[depth - 1]
        right = drafts.hit[depth - 1].float()
        sums = (corpus.by_text(values, where) for values in (right, torch.ones_like(right)))
        result.append(Counts(*map(tuple, sums)))
    return result


def shown(counts: Sequence[Counts], before: Sequence[Counts]) -> list[dict[str, Any]]:
    """Return acceptance by depth, and its difference from that of the layer before rounding."""
    pairs = [
        (own.estimate, difference(own, other)) for own, other in zip(counts, before, strict=True)
    ]
    return [
        {"acceptance": own.as_json(), "minus_unrounded": minus.as_json()}
        for own, minus in pairs
        if own is not None and minus is not None
    ]


def table(rows: Mapping[str, Any]) -> str:
    """Return the table of docs/benchmarks.md."""
    lines = [
        "| MTP layer | SQNR of weights, dB | of outputs | draft 1 accepted | minus unrounded,"
        " points | drafts 2, 3 |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, row in rows.items():
        first, *deeper = (one["acceptance"]["value"] for one in row["drafts"])
        value, low, high = (100 * row["drafts"][0]["minus_unrounded"][key] for key in SPAN)
        levels = [row.get(key) for key in ("weights_sqnr_db", "outputs_sqnr_db")]
        cells = [name, *("-" if level is None else f"{level:.1f}" for level in levels)]
        cells += [f"{first:.4f}", f"{value:+.2f} [{low:+.2f}, {high:+.2f}]"]
        lines.append("| " + " | ".join([*cells, ", ".join(f"{d:.4f}" for d in deeper)]) + " |")
    return "\n".join(lines) + "\n"


def make_bundle(folder: Path) -> Path:
    """Quantize the fixture's main model; its MTP layer is in bf16."""
    options = QuantizeOptions(
        BundleOptions(SOURCE, folder / "bundle"),
        base_quant="weight_only_int4",
        mtp_quant="bf16",
        int4_scope=Int4Scope.ALL,
        group_size=GROUP_SIZE,
        allow_untested_pair=True,
    )
    run_bundle(plan_quantize(options), silent)
    return folder / "bundle"


def measure(given: argparse.Namespace, bundle: Path) -> dict[str, Any]:
    """Return the figures of all rows."""
    model, layer = load_model(bundle, LoadOptions()).model, Layer.of(bundle)
    prompts = [tuple(prompt) for prompt in training_prompts(given.texts)]
    calibrating, measuring = (
        Corpus(model, (), 0, written(model, some, given.new_tokens))
        for some in (prompts, fixture_prompts(given.prompts))
    )
    with torch.inference_mode():
        rounding = Rounding(layer.weights, layer.inputs(calibrating))
        measured = layer.inputs(measuring)
        before = judged(measuring, layer.with_values(layer.weights))
    rows: dict[str, Any] = {"bf16": {"drafts": shown(before, before)}}
    for (bits, kinds), method in product(GRIDS.items(), ("rtn", "gptq", "awq")):
        for scales, grids in kinds.items():
            with torch.inference_mode():
                kept = rounding.rounded(grids, method)
            counts = judged(measuring, layer.with_values(kept))
            row = rounding.facts(kept, measured) | {"drafts": shown(counts, before)}
            rows[f"{bits}, {method}, {scales}"] = row
    facts = {"machine": machine(), "calibrating_tokens": len(calibrating.texts.tokens)}
    facts |= {"prompts": given.prompts, "measuring_tokens": len(measuring.texts.tokens)}
    return facts | {"group_size": GROUP_SIZE, "rows": rows}


def main() -> None:
    """Measure all rows, and record them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=int, default=64, help="to measure on")
    parser.add_argument("--texts", type=int, default=64, help="to calibrate with")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        facts = measure(given, make_bundle(Path(folder)))
    (given.out / "calibration.json").write_text(json.dumps(facts, indent=1) + "\n")
    (given.out / "calibration.md").write_text(table(facts["rows"]))


if __name__ == "__main__":
    main()
