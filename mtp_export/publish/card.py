"""Model card of a pushed bundle: metadata, the manifest's table, the verdict, and how to serve it.

It holds no time and nothing of this machine, so that pushing the same again changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from huggingface_hub import ModelCardData

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.families import DRAFTED_APART
from mtp_checkpoints.layouts import TARGETS
from mtp_checkpoints.tensors.bundle_folder import MAIN, MTP, RELEASED
from mtp_checkpoints.tensors.manifest import MANIFEST_NAME, manifest_sha256
from mtp_export.bundle.launch import Served, native_scheme, serving_lines
from mtp_export.progress import format_bytes
from mtp_export.publish.base_model import BaseModel
from mtp_export.publish.content import Content
from mtp_export.schemes.scheme import KEEP
from mtp_export.verify.check import Status
from mtp_export.verify.report.charts import charts
from mtp_export.verify.report.plots import standalone
from mtp_export.verify.report.report import Report
from mtp_export.verify.report.verdict import verdict_words
from mtp_runtime.drafters import listed

CARD_NAME = "README.md"
_PLOTS = "verification"
_TAGS = ("mtp", "multi-token-prediction", "speculative-decoding", "mtp-export")
_AS_THEY_WERE = {"copy", "transpose"}
_APART = "Main model"  # whose draft is a checkpoint of its own
_TITLES = {
    (MAIN, MTP): "Main model and MTP module",
    (MAIN,): "Main model without its MTP module",
    (MTP,): "MTP module (draft model)",
}
_PLACE = Path("/models")  # absolute: one of the engines runs in a container
_OTHER = {MAIN: MTP, MTP: MAIN}


def card_files(
    repository: str, content: Content, base: BaseModel | None, report: Report | None
) -> dict[str, bytes]:
    """Return the model card and its plots by their paths in the repository.

    Raises InvalidInputError where the manifest lacks what a card is made of.
    """
    plots = {} if report is None else {
        f"{_PLOTS}/{chart.name}.svg": chart for chart in charts(report)
    }  # fmt: skip
    titles = {path: chart.title for path, chart in plots.items()}
    try:
        paragraphs = [
            f"---\n{_metadata(content, base).to_yaml()}\n---",
            *_head(repository, content, base),
            *_table(content),
            *_verification(report, titles),
            *_serving(repository, content, None if base is None else base.name),
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidInputError(
            "The manifest lacks what a model card is made of",
            where=content.bundle / MANIFEST_NAME,
            found=repr(error)[:100],
            todo="Export again",
        ) from error
    drawn = {path: standalone(plot.svg, plot.labels).encode() for path, plot in plots.items()}
    return {CARD_NAME: ("\n\n".join(paragraphs) + "\n").encode(), **drawn}


def _metadata(content: Content, base: BaseModel | None) -> ModelCardData:
    """Return the card's metadata; no library is named that could not load the repository."""
    options = content.manifest["options"]
    schemes = {str(options[key]) for key in ("base_quant", "mtp_quant") if key in options}
    target = TARGETS[options.get("target", RELEASED)]
    form = (target.container,) if target.rewrites_main else ()
    tags = [*_TAGS, *form, str(content.config["model_type"]), *sorted(schemes - {"keep"})]
    by_transformers = content.parts == (MAIN,) and not target.rewrites_main
    return ModelCardData(
        base_model=None if base is None else base.name,
        base_model_relation="quantized" if base is not None and _is_converted(content) else None,
        library_name="transformers" if by_transformers else "mtp-export",
        pipeline_tag="text-generation" if MAIN in content.parts else None,
        tags=tags,
        **({} if base is None else base.license),
    )


def _is_converted(content: Content) -> bool:
    return any(not _AS_THEY_WERE.issuperset(_operations(content, part)) for part in content.parts)


def _tensors(content: Content, part: str) -> Iterator[Mapping[str, Any]]:
    """Yield the manifest's entries of a part's tensors; of shards that were only linked, none."""
    for shard in content.manifest["parts"][part]["shards"].values():
        yield from shard.get("tensors", {}).values()


def _operations(content: Content, part: str) -> Counter[str]:
    return Counter(str(tensor["operation"]) for tensor in _tensors(content, part))


def _head(repository: str, content: Content, base: BaseModel | None) -> Iterator[str]:
    yield f"# {repository.rpartition('/')[2]}"
    of = "" if base is None else f" of [{base.name}](https://huggingface.co/{base.name})"
    at = "" if base is None or not base.commit else f" (commit `{base.commit}`)"
    version = content.manifest["tool_version"]
    halves = tuple(part for part in content.parts if part in (MAIN, MTP))
    drafts = [f"`{part}`" for part in content.parts if part not in halves]
    beside = f" with a draft for {listed(drafts, 'and')}" if drafts else ""
    title = _APART if content.config["model_type"] in DRAFTED_APART else _TITLES[halves]
    yield f"{title}{beside}{of}{at}, written by mtp-export {version}."


def _table(content: Content) -> Iterator[str]:
    """Yield the manifest's content by part, and the options that made it."""
    yield "## Content"
    heads = ("part", "folder", "shards", "bytes", "linked", "tensors by operation", "least SQNR")
    rows = [f"| {' | '.join(heads)} |", "|---|---|--:|--:|--:|---|--:|"]
    rows += [_row(content, part) for part in content.parts]
    yield "\n".join(rows)
    options = content.manifest["options"].items()
    yield ", ".join(f"`{key}` {_shown(value)}" for key, value in options) + "."
    listed = MANIFEST_NAME if len(content.parts) > 1 else "the bundle's manifest"
    digest = manifest_sha256(content.bundle)
    yield (
        "The operation and the checksum of every tensor that the export read are in"
        f" {listed}, whose SHA-256 is `{digest}`."
    )


def _shown(value: object) -> str:
    if isinstance(value, Mapping):  # trainings by draft, or a calibration: the manifest has figures
        return str(value.get("method") or ", ".join(f"`{name}`" for name in value))
    words = {"True": "yes", "False": "no", "None": "none"}
    return words.get(str(value), str(value))


def _row(content: Content, part: str) -> str:
    shards = content.manifest["parts"][part]["shards"].values()
    linked = [shard["size_bytes"] for shard in shards if "link" in shard]
    figures = [t["sqnr_db"] for t in _tensors(content, part) if t.get("sqnr_db") is not None]
    done = ", ".join(f"{count:,} {name}" for name, count in _operations(content, part).items())
    cells = (
        part,
        f"`{part}`" if len(content.parts) > 1 else "top",
        str(len(shards)),
        format_bytes(sum(shard["size_bytes"] for shard in shards)),
        format_bytes(sum(linked)) if linked else "–",
        done or "as in the source",
        f"{min(figures):.1f} dB" if figures else "–",
    )
    return f"| {' | '.join(cells)} |"


def _verification(report: Report | None, titles: Mapping[str, str]) -> Iterator[str]:
    """Yield the verdict, what was checked and the plots."""
    yield "## Verification"
    if report is None:
        yield "**Not verified**: pushed with `--unverified`."
        return
    yield f"**{verdict_words(report)}**"
    source = "with" if report.options.source else "without"
    level = report.options.level.name.lower()
    yield f"`mtp-export verify --level {level}`, {source} the source to compare with."
    rows = ["| check | result | pass | fail | not tested |", "|---|---|--:|--:|--:|"]
    for result in report.results:
        counts = Counter(item.status for item in result.items)
        figures = " | ".join(str(counts[status]) for status in Status)
        rows.append(f"| {result.title} | {result.status} | {figures} |")
    yield "\n".join(rows)
    for path, title in titles.items():
        yield f"*{title}*"
        yield f"![{title}]({path})"


def _serving(repository: str, content: Content, base: str | None) -> Iterator[str]:
    """Yield paragraphs: what to download, then each engine's command; nothing if none reads it."""
    options, folder = content.manifest["options"], _PLACE / repository.rpartition("/")[2]
    lines = serving_lines(
        options,
        wanted=TARGETS[options.get("target", RELEASED)].name,
        bundle=Served.of_manifest(folder, native_scheme(content.config), content.manifest["parts"]),
    )
    if not lines:
        return
    yield "## Serving it"
    yield from _downloads(repository, content, base=base, folder=folder)
    for engine, line in lines.items():
        yield f"With {engine}:"
        yield _shell(line)


def _downloads(
    repository: str, content: Content, *, base: str | None, folder: Path
) -> Iterator[str]:
    """Yield how both parts get into one folder, beside each other."""
    if len(content.parts) > 1:
        yield _shell(_download(repository, folder))
        return
    (part,) = content.parts
    other = _OTHER[part]
    base_scheme = content.manifest["options"].get("base_quant", KEEP)
    is_the_source = part == MTP and base_scheme == KEEP and base is not None
    place = base if is_the_source and base else other.upper()
    yield _shell(_download(repository, folder / part), _download(place, folder / other))
    if not is_the_source:
        yield f"`{place}` stands for the repository of the {other} part of the same bundle."
    yield "An engine that downloads models itself takes the repositories' names for these folders."


def _download(repository: str, folder: Path) -> str:
    return f"hf download {repository} --local-dir {quote(str(folder))}"


def _shell(*lines: str) -> str:
    return "\n".join(("```sh", *lines, "```"))
