"""Manifest and parts as they were opened, then compared with the manifest: all of it is there with
the same bytes, and nothing else that an engine would load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_checkpoints.containers.base import SINGLE_NAME, Repeated, ShardHeader
from mtp_checkpoints.containers.repeated import RepeatedTensorsError, are_equal
from mtp_checkpoints.containers.safetensors import INDEX_NAME
from mtp_checkpoints.errors import MtpExportError
from mtp_checkpoints.sources.byte_source import Place
from mtp_checkpoints.sources.disk_queue import DiskQueue, disk_depth
from mtp_checkpoints.tensors.bundle_folder import MTP
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_export.bundle.journal import JOURNAL_NAME
from mtp_export.progress import counted, format_bytes, silent
from mtp_export.verify.check import (
    LEFT_OUT,
    Item,
    Level,
    Problem,
    ended_by,
    failed,
    judged,
    measured,
    not_tested,
    raise_trouble,
    verdict,
)
from mtp_export.verify.diagnosis.causes import files as causes
from mtp_export.verify.evidence.part_walk import WalkPlan, recorded_checksums
from mtp_export.verify.evidence.parts import are_in_one_place
from mtp_export.verify.files.listed_files import unlike_listed
from mtp_runtime.drafters import extra_drafts

if TYPE_CHECKING:
    from mtp_export.verify.context import Context
    from mtp_export.verify.evidence.parts import Part

# What has the bytes of linked shards compared.
_RECORDED = "--checksums all records them at export"
_COMPARED = f"--source compares their bytes from level weights on, {_RECORDED}"
# Files that engines load from a folder by their endings; others do no harm there.
READ_BY_ENGINES = (
    *(".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json", ".py"),
    *(".model", ".tiktoken", ".jinja"),
)


def opened(context: Context) -> Iterator[Item]:
    """The manifest and each part, with the error of one that could not be opened."""
    bundle = context.options.bundle
    if not context.is_bundle:
        error = next((part.error for part in context.parts if part.error is not None), None)
        yield _opened_item("headers and index", error, bundle)
        yield from _remarks(context)
        return
    yield _opened_item("manifest", context.manifest_error, bundle)
    listed = (context.manifest or {}).get("parts", {})
    drafts = (context.extra_draft_part(name) for name in extra_drafts() if name in listed)
    for part in (*context.parts, *filter(None, drafts)):
        yield _opened_item(f"{part.name}: headers and index", part.error, bundle)


def _opened_item(name: str, error: Exception | None, bundle: Place) -> Item:
    if error is None:
        return verdict(name, [])
    raise_trouble(error, bundle)
    if isinstance(error, RepeatedTensorsError):
        words = f"{error} {_repeated(error)}"
        return verdict(name, [Problem(str(error.where), words)])
    if isinstance(error, MtpExportError):
        return verdict(name, [Problem(str(error.where), str(error))])
    return ended_by(error, bundle)


def _remarks(context: Context) -> Iterator[Item]:
    """The files that hold tensors of the index again: nothing depends on which is loaded."""
    for one in _repeated_shards(context):
        words = causes.repeated_alike(one.compared, len(one.pairs))
        figure = (
            f"{counted(len(one.pairs), 'tensor')} of other files again. {words}: it can be deleted"
        )
        yield measured(one.name, figure, {"tensors": len(one.pairs), "compared": one.compared})
    opened = next(iter(context.checkpoints.values()), None)
    for shard in opened.strays if opened is not None else ():
        count, first = len(shard.tensors), [one.name for one in shard.tensors[:1]]
        figure = causes.of_something_else(counted(count, "tensor"), first)
        yield measured(shard.path.name, figure, {"tensors": count})
    yield from _read_by_transformers(context)


def _read_by_transformers(context: Context) -> Iterator[Item]:
    """The file that transformers loads in place of the index holds the main model."""
    main = context.main
    if main is None or INDEX_NAME not in main.files.names():
        return
    unlisted = (shard for shard in main.shards if shard.path.name in main.unindexed)
    beside = (*(one.shard for one in main.repeated), *main.strays, *unlisted)
    shard = next((one for one in beside if one.path.name == SINGLE_NAME), None)
    if shard is None:
        return
    name, chosen = f"{SINGLE_NAME}, as transformers reads it", context.options.engine
    if chosen is not None:
        yield not_tested(name, f"--engine {chosen} leaves it out", data={LEFT_OUT: True})
        return
    lost = main.tensors.keys() - {one.name for one in shard.tensors}
    problems = []
    if lost:
        words = causes.loaded_in_place_of_index(SINGLE_NAME, len(lost), len(main.tensors))
        problems.append(Problem(SINGLE_NAME, words))
    yield verdict(name, problems, counted(len(shard.tensors), "tensor"))


def repeated_values(context: Context) -> Iterator[Item]:
    """The same, by every byte."""
    if not context.is_local:
        return
    for one in _repeated_shards(context):
        unlike = [own.name for own, listed in one.pairs if not are_equal((own, listed))]
        words = causes.repeated_differ(len(unlike), len(one.pairs), unlike[0]) if unlike else ""
        error = RepeatedTensorsError(one.shard, one.pairs, len(one.pairs), unlike)
        yield judged(
            f"{one.name}: tensors of other files again",
            not unlike,
            f"{error} {words}",
            figure=f"{counted(len(one.pairs), 'tensor')}, {format_bytes(one.shard.size_bytes)}",
            subject=str(one.shard.path),
        )


def _repeated_shards(context: Context) -> tuple[Repeated, ...]:
    """The shards of a checkpoint, whose parts have one folder."""
    if context.is_bundle or not context.checkpoints:
        return ()
    return next(iter(context.checkpoints.values())).repeated


def _repeated(error: RepeatedTensorsError) -> str:
    """Return whether the tensors that two files hold are the same, by some bytes of each."""
    if error.unlike:
        return causes.repeated_differ(len(error.unlike), error.compared, error.unlike[0])
    if error.others and str(error.where).endswith(f"/{SINGLE_NAME}"):
        return causes.others_beside(error.others)
    return causes.repeated_alike(error.compared, len(error.pairs))


def run(context: Context) -> Iterator[Item]:
    """Each part's files, shards and tensors compared with the manifest's checksums, of a bundle."""
    if not context.is_bundle:
        return
    if context.manifest is None:
        yield not_tested("checksums", "there is no manifest to compare them with")
    else:
        yield from _parts(context, context.manifest.get("parts", {}))
    yield _unfinished(context.folder)


def _parts(context: Context, parts: Mapping[str, Any]) -> Iterator[Item]:
    """Each part compared with its entry in the manifest."""
    for name in sorted({*parts, *(part.name for part in context.parts), *extra_drafts()}):
        extra = context.extra_draft_part(name)
        part, entry = context.part(name) or extra, parts.get(name)
        if name == MTP and are_in_one_place(context.parts):
            continue  # the main model's entry lists them
        if entry is None and extra is not None:
            yield not_tested(f"{name}: checksums", "the manifest does not list this draft")
            continue
        if part is None and entry is None:  # the bundle has no such draft
            continue
        if part is None or entry is None:
            cause = causes.PART_NOT_IN_BUNDLE if part is None else causes.PART_NOT_IN_MANIFEST
            yield failed(f"{name}: part", cause, subject=name)
            continue
        yield _small_files(part, entry)
        yield _shards(part, entry)
        if extra is not None and extra.checkpoint is not None:
            yield _draft_tensors(context, name, checkpoint=extra.checkpoint, entry=entry)
        elif part.checkpoint is not None:
            yield from _tensors(context, part=part.name, checkpoint=part.checkpoint, entry=entry)


def _small_files(part: Part, entry: Mapping[str, Any]) -> Item:
    """Config, index and tokenizer have the manifest's checksums."""
    unlike = unlike_listed(part, entry)
    problems = [Problem(str(part.folder / name), words) for name, words in unlike.items()]
    return verdict(f"{part.name}: files", problems, counted(len(entry.get("files", {})), "file"))


def _shards(part: Part, entry: Mapping[str, Any]) -> Item:
    """Shards have the manifest's names, sizes and, if they were linked, headers; the folder has no
    other file that engines load."""
    shards: Mapping[str, Any] = entry.get("shards", {})
    headers = {} if part.checkpoint is None else {s.path.name: s for s in part.checkpoint.shards}
    problems: list[Problem] = []
    for name, facts in shards.items():
        problems += [Problem(str(part.folder / name), words) for words in
                     _shard_problems(part.folder / name, facts, headers.get(name))]  # fmt: skip
    known = {*shards, *entry.get("files", {})}
    for path in sorted(part.folder.iterdir()):
        if path.name not in known and path.suffix in READ_BY_ENGINES:
            problems.append(Problem(str(path), causes.file_not_in_manifest(path.name)))
    return verdict(f"{part.name}: shards", problems, counted(len(shards), "shard"))


def _shard_problems(
    path: Path, facts: Mapping[str, Any], header: ShardHeader | None
) -> Iterator[str]:
    if not path.is_file():
        yield causes.file_missing(path.name)
        return
    found, wanted = path.stat().st_size, facts.get("size_bytes")
    if found != wanted:
        yield causes.another_size(path.name, found, wanted)
    if header is None:
        return
    if facts.get("header_sha256", header.header_sha256) != header.header_sha256:
        yield causes.another_header(path.name)
    tensors = facts.get("tensors")
    if tensors is not None:
        names = {tensor.name for tensor in header.written}
        for tensor in sorted(names.symmetric_difference(tensors)):
            place = "shard" if tensor in names else "manifest"
            yield causes.tensor_only_in(tensor, path.name, place)


def _tensors(
    context: Context, part: str, checkpoint: Checkpoint, entry: Mapping[str, Any]
) -> Iterator[Item]:
    sums = context.walks.checksums(part)
    name = f"{part}: checksums"
    if not context.options.checksums:
        yield not_tested(name, "--no-checksums leaves them out")
    elif sums:
        yield _hashed(name, sums, checkpoint, context.walks.of(part).checksums)
    unread = [
        shard
        for shard in checkpoint.shards
        if entry.get("shards", {}).get(shard.path.name, {}).get("tensors") is None
    ]
    if unread and not _compares_bytes(context, part):
        size = format_bytes(sum(shard.size_bytes for shard in unread))
        ways = _RECORDED if part in context.parts_of_others else _COMPARED
        yield not_tested(
            f"{part}: checksums of linked shards",
            f"they were linked, not read, so the manifest has their headers' hashes alone. {ways}",
            figure=f"{counted(len(unread), 'shard')}, {size}",
        )


def _compares_bytes(context: Context, part: str) -> bool:
    """True where check `weights` compares the part's bytes with the source's."""
    options = context.options
    asked = options.level >= Level.WEIGHTS and options.source is not None
    return asked and part not in context.parts_of_others


def _draft_tensors(
    context: Context, name: str, checkpoint: Checkpoint, entry: Mapping[str, Any]
) -> Item:
    """A draft's tensors, which no other check reads, have the manifest's checksums."""
    sums, title = recorded_checksums(checkpoint, entry), f"{name}: checksums"
    if not context.options.checksums:
        return not_tested(title, "--no-checksums leaves them out")
    plan = WalkPlan((), [checkpoint.written[tensor] for tensor in sums])
    with DiskQueue(disk_depth(context.folder)) as queue:
        found = plan.run(context.options.workers, queue, silent)
    return _hashed(title, sums, checkpoint, found.checksums)


def _hashed(
    name: str, sums: Mapping[str, str], checkpoint: Checkpoint, found: Mapping[str, str]
) -> Item:
    tensors = [checkpoint.written[tensor] for tensor in sums]
    problems = [
        Problem(tensor.name, causes.tensor_changed(tensor.name, tensor.path.name))
        for tensor in tensors
        if found[tensor.name] != sums[tensor.name]
    ]
    total_bytes = sum(tensor.size_bytes for tensor in tensors)
    return verdict(name, problems, f"{counted(len(sums), 'tensor')}, {format_bytes(total_bytes)}")


def _unfinished(bundle: Path) -> Item:
    journal, problems = bundle / JOURNAL_NAME, []
    if journal.exists():
        problems.append(Problem(str(journal), causes.export_unfinished(JOURNAL_NAME)))
    return verdict("export finished", problems)
