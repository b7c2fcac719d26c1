"""The commands that mend what is verified: that make or finish a bundle, or give a checkpoint the
MTP layer of the model that it was made from."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from mtp_checkpoints.errors import InvalidInputError, MtpExportError, UnsupportedError
from mtp_checkpoints.families import FAMILIES, family_of
from mtp_checkpoints.quantization.methods import quant_config_of, undecoded_of
from mtp_checkpoints.quantization.native import is_gguf, quantization_of
from mtp_checkpoints.tensors.bundle_folder import MAIN, MTP
from mtp_checkpoints.tensors.untied_head import with_head_like
from mtp_export.bundle.journal import journaled
from mtp_export.bundle.same_model import check_same_model, with_mtp_layers
from mtp_export.bundle.shares import division_of
from mtp_export.schemes.scheme import GRAFTED
from mtp_export.verify.check import CORRECTED, MTP_MODULE, UNFINISHED, Item, Status, Unknown, failed
from mtp_export.verify.diagnosis.causes.files import bundle_unfinished, shares_unfinished

if TYPE_CHECKING:
    from mtp_export.verify.context import Context

_CARD = "README.md"
# Blanks in few places: backtracking among them would take quadratic time.
_BASE_MODEL = re.compile(rb"^base_model:[ \t]*(?:\r?\n[ \t]*-[ \t]*)?[\"']?([\w.-]+/[\w.-]+)", re.M)
# Options that manifests record and the flags that set them, with the values that need none.
_FLAGS: Mapping[str, tuple[str, object]] = {
    "part": ("--part", "both"),
    "target": ("--target", "hf"),
    "shared_weights": ("--shared-weights", "keep"),
    "max_shard_bytes": ("--max-shard-size", 5_000_000_000),
    "allow_untied": ("--allow-untied", False),
    "checksums": ("--checksums", "written"),
    "base_quant": ("--base-quant", "keep"),
    "mtp_quant": ("--mtp-quant", "keep"),
    "format": ("--format", "compressed-tensors"),
    "group_size": ("--group-size", 128),
    "int4_scope": ("--int4-scope", "experts"),
    "int8_scope": ("--int8-scope", "mlps"),
    "head_quant": ("--head-quant", "keep"),
    "scale": ("--scale", "minmax"),
    "tensor_type": ("--tensor-type", []),
    "pre_tokenizer": ("--pre-tokenizer", None),
}
# Recorded besides, and no options.
_RECORDED = {"pair_in_table", "reader", "main_quant_method", "main_storages"}


def unfinished(context: Context) -> Item | None:
    """The one item of a bundle whose run has not ended, with the command that goes on with it; None
    for any other."""
    place = context.options.bundle
    if not context.is_bundle or context.manifest is not None or not isinstance(place, Path):
        return None
    found = unfinished_run(place)
    if found is None:
        return None
    cause, repair = found
    data = {UNFINISHED: True}
    return failed("export finished", cause, subject=str(place), repair=repair, data=data)


def unfinished_run(place: Path) -> tuple[str, str] | None:
    """The words for a folder whose run has not ended, and the command that goes on with it,
    "" where none does; None for any other folder (IoError)."""
    journal = journaled(place)
    if journal is None:
        return _unfinished_shares(place)
    shards, done = (
        sum(file.endswith(".safetensors") for file in files)
        for files in (journal.files, journal.finished)
    )
    cause = bundle_unfinished(str(place), done=done, shards=shards)
    return cause, journal.again(place)


def _unfinished_shares(place: Path) -> tuple[str, str] | None:
    """The words for a folder of shares, and the command of the first one that has not ended, or
    that of the end of all."""
    division = division_of(place)
    if division is None:
        return None
    missing = division.missing
    cause = shares_unfinished(str(place), list(map(str, missing)), division.count)
    if not missing:
        return cause, f"mtp-export finish {quote(str(place))}"
    return cause, division.run.again(place, missing[0])


def bundle_command(context: Context) -> str:
    """Return the command that makes a bundle again in its place, from the options that its manifest
    records; "" without a manifest, and for options that no command has."""
    place = context.options.bundle
    if context.manifest is None or not isinstance(place, Path):
        return ""
    made = remade(context.manifest, context.options.source, place)
    return f"{made} --overwrite" if made else ""


def remade(recorded: Mapping[str, Any], source: Path | None, output: Path) -> str:
    """Return the command that makes a bundle by the options and the source that its manifest
    records, "" for options that none has; a folder, of which nothing records the path, is
    called SOURCE where it is not given."""
    given, origin = dict(recorded.get("options", {})), recorded.get("source", {})
    if not given or given.keys() - _FLAGS.keys() - _RECORDED:
        return ""
    is_graft = given.get("base_quant") == GRAFTED
    address = _address_of(origin, MTP if is_graft else None)
    place = quote(str(source)) if source else address or Unknown.SOURCE
    command = f"mtp-export --input-dir {place}"
    if is_graft:
        del given["base_quant"]
        main = _address_of(origin, MAIN) or Unknown.MAIN
        command = f"mtp-export graft --main {main} --mtp {place}"
    elif "base_quant" in given:
        command = f"mtp-export quantize --input-dir {place}"
    words = [command, f"--output-dir {quote(str(output))}"]
    for name, (flag, usual) in _FLAGS.items():
        value = given.get(name, usual)
        if value is True:
            words.append(flag)
        elif value != usual:
            every = value if isinstance(value, list) else [value]
            words += [f"{flag} {quote(str(each))}" for each in every]
    if given.get("pair_in_table") is False:
        words.append("--allow-untested-pair")
    return " ".join(words)


def _address_of(origin: Any, part: str | None) -> str:
    """Return the address of a remote source for a shell, at the commit that was read; "" for a
    folder, and for what is no address: anybody may have written a manifest. part: that of a graft's
    two sources."""
    if part is not None and isinstance(origin, Mapping):
        origin = origin.get(part)
    if not isinstance(origin, Mapping):
        return ""
    where = [origin.get(key, "") for key in ("repo", "commit", "folder", "url")]
    if not all(isinstance(text, str) and text.isprintable() for text in where):
        return ""
    repo, commit, folder, url = where
    if not repo or not commit:
        return quote(url) if url else ""
    return quote(f"hf://{repo}@{commit}" + (f"/{folder}" if folder else ""))


def with_repair(context: Context, item: Item, *, remake: bool) -> Item:
    """An item with its repair where it fails and has none of its own: of a bundle the command that
    makes it again, if remake; of a checkpoint the graft, where a tensor of the MTP module is at
    fault, or the module as a whole."""
    if item.status is not Status.FAIL or item.repair or CORRECTED in item.data:
        return item
    if context.is_bundle:
        mends = remake and "traceback" not in item.data
        return replace(item, repair=bundle_command(context)) if mends else item
    if not item.subject:
        return item
    if item.subject != MTP_MODULE and item.subject not in _mtp_names(context):
        return item
    return replace(item, repair=graft_command(context))


def _mtp_names(context: Context) -> Collection[str]:
    """Names of the MTP part's tensors: of those that are there, and of a known family's."""
    part = context.part(MTP)
    if context.is_bundle or part is None or part.checkpoint is None:
        return ()
    tensors = part.checkpoint.tensors
    try:
        stored = context.layout(part).stored
    except MtpExportError:  # config_match says why
        return tensors.keys()
    copies = {pair.mtp_name for pair in stored.family.shared}
    # The original's is no larger or smaller: engines take the main model's.
    resized = {
        name
        for name in copies & tensors.keys() & stored.tensors.keys()
        if tensors[name].shape != stored.tensors[name].shape
    }
    return {*tensors, *stored.tensors, *context.layout(part).apart.stored.tensors} - resized


def graft_command(context: Context) -> str:
    """Return the command, ready to run where the original is known; "" for a bundle, a draft alone,
    and models or quantizations that a graft does not read, or main models that differ from them."""
    main = context.main
    if context.is_bundle or main is None or str(main.config.get("model_type")) not in FAMILIES:
        return ""
    if unlike_source(context) or context.unwritten_ends:  # whose main model no graft mends
        return ""
    try:
        family_of(main.config)
        if undecoded_of(main.config) is None:
            quant_config_of(quantization_of(main.config))
        of_main = next((one for one in context.layouts if one.name == MAIN), None)
        if of_main is not None and of_main.differences:
            return ""
    except UnsupportedError:
        return ""
    except MtpExportError:  # a field of it is unusable: graft says which
        pass
    source = context.options.source
    original = _original(context) if source is None else quote(str(source))
    in_gguf = is_gguf(quantization_of(main.config))
    here, target = quote(str(context.options.bundle)), " --target llama.cpp" if in_gguf else ""
    replacing = " --replace" if context.mtp is not None and context.options.mtp is None else ""
    if in_gguf and replacing and _in_one_file(context):
        return ""  # which no graft writes anew
    return (
        f"mtp-export graft --main {here} --mtp {original} --output-dir {Unknown.BUNDLE}"
        f"{replacing}{target}"
    )


def _in_one_file(context: Context) -> bool:
    """Return whether tensors of both parts are in one file."""
    main, mtp = (
        {tensor.path for tensor in part.written.values()} if part is not None else set()
        for part in (context.main, context.mtp)
    )
    return not main.isdisjoint(mtp)


def unlike_source(context: Context) -> str:
    """Return why a graft refuses the source's MTP layer for a checkpoint; "" without a source, and
    where it does not, or where either cannot be followed, as other checks say."""
    main, source = context.main, context.source
    if context.is_bundle or main is None or source is None:
        return ""
    try:
        source = with_head_like(source, main)
        check_same_model(main, with_mtp_layers(main.config, source.config), source)
    except InvalidInputError as error:
        return str(error)
    except MtpExportError:
        pass
    return ""


def _original(context: Context) -> str:
    """Return the address of the checkpoint that a model card names as the one it was made from."""
    if _CARD in context.files.names():
        try:
            named = _BASE_MODEL.search(context.files.read(_CARD))
        except MtpExportError:  # a card that cannot be read says nothing
            named = None
        if named is not None:
            return f"hf://{named[1].decode()}"
    return Unknown.ORIGINAL
