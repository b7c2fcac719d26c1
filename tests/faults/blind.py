"""Faults drawn at random, each exported whole and judged without its source.

python -m faults.blind --count 60 --seed 7 --into FOLDER   (with tests/ on the path; too long for
the test suite). FOLDER/judged.jsonl has one line per fault: what was drawn, what it changes, what
failed. A fault is planted into a trained fixture in bf16, which is then exported in a row of the
precision table, so that checksums and manifest agree with the damage.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from cases import quantize, read_json
from faults import planting
from faults.matrix import no_progress
from mtp_export.verify import CHECKS, check_result
from mtp_export.verify.check import Item, Level, Status
from mtp_export.verify.context import Context
from mtp_export.verify.decoding import controls, likelihood
from mtp_export.verify.decoding.acceptance import diagnosed
from mtp_export.verify.evidence.corpus import Corpus
from mtp_export.verify.evidence.prompts import BUILT_IN
from mtp_export.verify.options import VerifyOptions
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
# Weights of the draw. deepseek-v3-tiny takes minutes for each fault, and most of its layers add
# next to nothing.
FIXTURES = {"glm4-moe-tiny": 3, "qwen3-5-tiny": 2}
TOKENS = 32
ROWS = {
    "bf16": ("bf16", "bf16"),
    "fp8": ("a8w8_fp8", "a8w8_fp8"),
    "int8": ("weight_only_int8", "weight_only_int8"),
    "int4": ("weight_only_int4", "weight_only_int8", "--int4-scope", "all", "--group-size", "32"),
}
# The checks that look at the bundle; the others look at the runtime, of which nothing is wrong.
JUDGES: dict[str, Callable[[Context], Iterator[Item]]] = {
    "files": lambda context: iter(check_result("files", CHECKS["files"], context).items),
    "ledger": lambda context: iter(check_result("ledger", CHECKS["ledger"], context).items),
    "acceptance": lambda context: diagnosed(context.corpus, damage=context.named_damage),
    "likelihood": likelihood.run,
    "controls": lambda context: controls.items_of(context.corpus),
}
LEAST_CHANGE = 0.01
Change = Callable[[torch.Tensor], torch.Tensor]


def rows_rolled(w: torch.Tensor) -> torch.Tensor:
    return w.roll(max(1, len(w) // 8), 0)


def rows_interleaved(w: torch.Tensor) -> torch.Tensor:
    return w.view(2, len(w) // 2, *w.shape[1:]).transpose(0, 1).reshape(w.shape)


def half_scaled(w: torch.Tensor) -> torch.Tensor:
    return torch.cat([w[: len(w) // 2] * 4, w[len(w) // 2 :]])


SCALED = r"times|scale|too (flat|sharp)|too much|too little|multipl|number of"
ORDER = r"order|swapped|reversed|moved|halves|interleaved|damaged"
SIGN = r"sign|negated"
ONE = r"\b1\b"
# What is done to one tensor: the change, and words of a cause that names it.
MATRIX: dict[str, tuple[Change, str]] = {
    "negated": (torch.neg, SIGN),
    "times 0.25": (lambda w: w * 0.25, SCALED),
    "times 0.5": (lambda w: w * 0.5, SCALED),
    "times 2": (lambda w: w * 2, SCALED),
    "times 4": (lambda w: w * 4, SCALED),
    "rows reversed": (lambda w: w.flip(0), ORDER),
    "row halves exchanged": (lambda w: w.roll(len(w) // 2, 0), ORDER),
    "rows rolled": (rows_rolled, ORDER),
    "rows interleaved": (rows_interleaved, ORDER),
    "column halves exchanged": (lambda w: w.roll(w.shape[1] // 2, 1), ORDER),
    "half of the rows times 4": (half_scaled, SCALED + "|damaged"),
}
VECTOR: dict[str, tuple[Change, str]] = {
    "negated": (torch.neg, SIGN),
    "less one": (lambda w: (w.float() - 1).to(w.dtype), ONE),
    "plus one": (lambda w: (w.float() + 1).to(w.dtype), ONE),
    "times 0.5": (lambda w: w * 0.5, SCALED),
    "times 2": (lambda w: w * 2, SCALED),
    "reversed": (lambda w: w.flip(0), ORDER),
    "rolled": (rows_rolled, ORDER),
}
# Values of config.json, by field: what the field becomes of its value.
CONFIG: dict[str, Callable[[Any], Any]] = {
    "rope_theta": lambda v: v * 10,
    "rms_norm_eps": lambda v: 1e-2,
    "norm_topk_prob": lambda v: not v,
    "routed_scaling_factor": lambda v: v / 2,
    "num_experts_per_tok": lambda v: v - 1,
    "partial_rotary_factor": lambda v: v / 2,
}
# Words of a cause for the place of a tensor; {0} is what the pattern's group matched.
PLACES = (
    (r"eh_proj|mtp\.fc\.", r"eh_proj|concatenation|enorm|hnorm"),
    (r"enorm|norm_embedding", r"enorm|embedding half"),
    (r"hnorm|norm_hidden", r"hnorm|hidden half"),
    (r"shared_head\.norm|mtp\.norm", r"norm before the draft's head"),
    (r"model\.norm", r"last norm|model\.norm"),
    (r"(input_layernorm|post_attention_layernorm)", r"{0}|layernorm"),
    (r"(?:self|linear)_attn", r"attention|[qkvo]_proj|q_b|rope|rotary|[qk]_norm|kv_"),
    (r"\.experts\.(\d+)\.", r"expert {0}\b|experts? .*\b{0}\b"),
    (r"shared_experts", r"shared expert"),
    (r"mlp\.gate\.", r"router"),
    (r"mlp\.(?:gate|up|down)_proj", r"feed-forward|mlp|(gate|up|down)_proj"),
    (r"embed_tokens", r"embedding"),
    (r"lm_head|shared_head\.head", r"head"),
)


@dataclass(frozen=True)
class Drawn:
    """A fault: where, what, and patterns of the words that name both in a cause."""

    number: int
    fixture: str
    row: str
    part: str
    what: str
    names: tuple[str, ...]
    place: str
    kind: str


def layer_of(name: str) -> str:
    found = re.search(r"layers\.(\d+)\.", name)
    return found[1] if found else ""


def place_of(name: str, part: str) -> str:
    """The pattern of a cause that names the place of a tensor, in words or by its name."""
    for pattern, words in PLACES:
        if found := re.search(pattern, name):
            place = words.format(*found.groups())
            if part == "main" and layer_of(name):
                place = rf"(?=.*layer {layer_of(name)}\b).*({place})"
            return f"{place}|{re.escape(name)}"
    return re.escape(name)


def draw(chance: random.Random, number: int, folders: dict[str, Path]) -> Drawn:
    """One fault: a fixture, a row, a part, and a tensor, a pair, or a value of config.json."""
    fixture, row = chance.choices([*FIXTURES], [*FIXTURES.values()])[0], chance.choice([*ROWS])
    part = chance.choices(("mtp", "main"), (3, 2))[0]
    folder = folders[fixture] / part
    sort = chance.choices(("tensor", "pair", "config"), (7, 3, 1))[0]
    names = planting.names(folder)
    fixed = {"number": number, "fixture": fixture, "row": row, "part": part}
    if sort == "config":
        config = read_json(folders[fixture] / "main" / "config.json")
        known = {**config, **(config.get("rope_parameters") or {})}
        field = chance.choice([field for field in CONFIG if field in known])
        fixed["part"] = "main"
        return Drawn(**fixed, what="config", names=(field,), place=field, kind=field)
    if sort == "pair":
        pairs = [(a, b) for a, b, _ in alike(folder, names)]
        one, other = chance.choice(pairs)
        kind = r"swapped|exchanged|order|reversed"
        both = f"({place_of(one, part)})|({place_of(other, part)})"
        return Drawn(**fixed, what="pair", names=(one, other), place=both, kind=kind)
    by_role: dict[str, list[str]] = {}
    for name in names:
        by_role.setdefault(re.sub(r"\d+", "N", name), []).append(name)
    name = chance.choice(by_role[chance.choice([*by_role])])
    kinds = MATRIX if planting.read(folder, name).dim() > 1 else VECTOR
    what = chance.choice([*kinds])
    place = place_of(name, part)
    return Drawn(**fixed, what=what, names=(name,), place=place, kind=kinds[what][1])


def alike(folder: Path, names: list[str]) -> Iterator[tuple[str, str, str]]:
    """Pairs of tensors of one shape that an exporter could confuse: of one layer, or one role."""
    shapes = {name: tuple(planting.read(folder, name).shape) for name in names}
    for at, one in enumerate(names):
        for other in names[at + 1 :]:
            same_layer = layer_of(one) == layer_of(other)
            same_role = re.sub(r"\d+", "N", one) == re.sub(r"\d+", "N", other)
            if shapes[one] == shapes[other] and (same_layer or same_role):
                yield one, other, "layer" if same_layer else "role"


def plant(drawn: Drawn, bundle: Path) -> None:
    """Plant a fault into a bundle in bf16; an expert that is exchanged goes as a whole."""
    folder = bundle / drawn.part
    if drawn.what == "config":
        (field,) = drawn.names
        for part in ("main", "mtp"):
            planting.edit_config(bundle / part, lambda config: _edit(config, field))
    elif drawn.what == "pair":
        planting.swap(folder, *drawn.names)
    else:
        (name,) = drawn.names
        kinds = MATRIX if planting.read(folder, name).dim() > 1 else VECTOR
        planting.change(folder, name, kinds[drawn.what][0])


def _edit(config: dict[str, Any], field: str) -> None:
    holder = config if field in config else config.get("rope_parameters", {})
    holder[field] = CONFIG[field](holder[field])


class Effects:
    """Changes of tokens and of acceptance, each fixture's beside those of the good one."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self._folders = folders
        self._good: dict[str, Corpus] = {}

    def of(self, drawn: Drawn, bundle: Path) -> tuple[float, float]:
        """Share of the best tokens that differ, and the change of acceptance at two drafts."""
        if drawn.fixture not in self._good:
            self._good[drawn.fixture] = self._corpus(self._folders[drawn.fixture])
        good = self._good[drawn.fixture]
        other = self._corpus(bundle, good)
        with torch.inference_mode():
            tokens = float((good.choices != other.choices).float().mean())
            shares = [_accepted(one) for one in (good, other)]
        return tokens, shares[1] - shares[0]

    def _corpus(self, bundle: Path, like: Corpus | None = None) -> Corpus:
        model = load_model(bundle, LoadOptions()).model
        tokenizer = Tokenizer.find(bundle / "main")
        prompts = tuple(tokenizer.encode(text) for text in BUILT_IN)
        return Corpus(model, prompts, TOKENS, given=None if like is None else like.texts)


def _accepted(corpus: Corpus) -> float:
    drafts = corpus.drafts(2)
    return float(torch.stack(drafts.hit).sum() / torch.stack(drafts.room).sum())


def judged(
    bundle: Path, judges: Iterable[str] = JUDGES, prompts: Path | None = None
) -> tuple[list[str], float]:
    """Causes of what fails without a source, and the seconds that it took. prompts: a file of them,
    in place of the built-in ones."""
    start = time.monotonic()
    options = VerifyOptions(
        bundle, None, Level.RUN, max_new_tokens=TOKENS, ks=(2,), prompts=prompts
    )
    context = Context.open(options, no_progress)
    said = []
    for name in judges:
        found = tuple(JUDGES[name](context))
        context.note_failures(name, found)
        failed = [item for item in found if item.status is Status.FAIL]
        said += [f"{name}: {item.name}: {item.cause}" for item in failed]
    return said, time.monotonic() - start


def named(drawn: Drawn, said: list[str]) -> bool:
    """True where one cause names the place and the kind of a fault."""
    return any(re.search(drawn.place, c) and re.search(drawn.kind, c) for c in said)


def run(arguments: argparse.Namespace) -> None:
    """Judge the faults that are not judged yet."""
    torch.set_num_threads(1)
    into = Path(arguments.into)
    into.mkdir(parents=True, exist_ok=True)
    folders = {fixture: _in_bf16(fixture, into / fixture) for fixture in FIXTURES}
    chance, effects, record = random.Random(arguments.seed), Effects(folders), into / "judged.jsonl"
    done = len(record.read_text().splitlines()) if record.exists() else 0
    for number in range(arguments.count):
        drawn = draw(chance, number, folders)
        if number < done:
            continue
        found = _found(drawn, folders[drawn.fixture], into, effects)
        with record.open("a") as file:
            file.write(json.dumps(asdict(drawn) | found) + "\n")
    print(counted([json.loads(line) for line in record.read_text().splitlines()]))


def counted(judged: list[dict[str, Any]]) -> str:
    """Return how many of the faults that change tokens or acceptance are caught and rightly named;
    those that quantize refuses to export are caught before."""
    exported = [one for one in judged if "said" in one]
    refused, caught = (
        sum("refused" in one for one in judged),
        sum(bool(o["said"]) for o in exported),
    )
    right = sum(one["named"] for one in exported)
    changing = f"{len(exported) + refused} of {len(judged)} change tokens or acceptance by > 1 %"
    return f"{changing}; {refused} refused by quantize; {caught} caught, {right} rightly named"


def _found(drawn: Drawn, good: Path, into: Path, effects: Effects) -> dict[str, Any]:
    planted, bundle = into / "planted", into / "bundle"
    for folder in (planted, bundle):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good, planted)
    plant(drawn, planted)
    tokens, acceptance = effects.of(drawn, planted)
    found: dict[str, Any] = {"tokens": tokens, "acceptance": acceptance}
    if tokens > LEAST_CHANGE or abs(acceptance) > LEAST_CHANGE:
        base, mtp, *more = ROWS[drawn.row]
        schemes = ("--base-quant", base, "--mtp-quant", mtp, *more)
        outcome = quantize(planted, bundle, *schemes, "--quiet")
        if outcome.code:
            return found | {"refused": outcome.err}
        said, seconds = judged(bundle)
        found |= {"said": said, "named": named(drawn, said), "seconds": seconds}
    return found


def _in_bf16(fixture: str, folder: Path) -> Path:
    if not folder.exists():
        schemes = ("--base-quant", "bf16", "--mtp-quant", "bf16", "--link", "copy", "--quiet")
        assert quantize(ROOT / "fixtures" / fixture, folder, *schemes).code == 0
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--into", required=True)
    run(parser.parse_args())
