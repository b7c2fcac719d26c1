"""Identity of main, draft and tokenizer: configs agree and token ids fit, as of one model."""

from __future__ import annotations

import filecmp
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_checkpoints.containers.base import CONFIG_NAME
from mtp_checkpoints.errors import MtpExportError
from mtp_checkpoints.families.signs import flattened, text_fields
from mtp_checkpoints.quantization.native import DTYPE_KEYS, QUANTIZATION_FIELDS
from mtp_checkpoints.sources.strict_json import read_json_object
from mtp_checkpoints.tensors.bundle_folder import MAIN, MTP
from mtp_export.progress import counted
from mtp_export.schemes.scheme import GRAFTED
from mtp_export.verify.check import Item, Problem, not_tested, raise_trouble, verdict
from mtp_export.verify.diagnosis.causes import files as causes
from mtp_export.verify.files.listed_files import unlike_listed

if TYPE_CHECKING:
    from mtp_export.verify.context import Context
    from mtp_export.verify.evidence.parts import Part, PartLayout

_TOKENIZER_JSON = "tokenizer.json"
_TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("*.tiktoken", "*.model", "chat_template*", "generation_config.json"),
)
_VOCABULARIES = ("tokenizer.json", "*.model", "*.tiktoken", "vocab.json", "tekken.json")
_LEAST_USED = 0.9  # share of the vocabulary that a model's own tokenizer uses


def run(context: Context) -> Iterator[Item]:
    """The two configs compared with each other, and each part's tokenizer with its config."""
    unlike = _unlike_listed(context) if context.is_bundle else {}
    if context.is_bundle and context.main is not None and context.mtp is not None:
        is_main_changed = CONFIG_NAME in unlike[MAIN].keys() - unlike[MTP].keys()
        yield _configs(context, context.main.config, context.mtp.config, is_main_changed)
    for layout in context.layouts:
        yield _yarn(layout, context.is_bundle)
    if not isinstance(context.options.bundle, Path):
        yield not_tested("tokenizer", "nothing but headers is downloaded")
        return
    folders = {part.folder: part for part in context.parts}  # a checkpoint's parts are in one
    for part in folders.values():
        yield _tokenizer(context, part, unlike.get(part.name, {}))
    if len(folders) > 1:
        yield _same_tokenizer(context.parts, unlike, all_in_both=context.is_bundle)


def _unlike_listed(context: Context) -> dict[str, dict[str, str]]:
    """Return by part the files that are not as the manifest lists them, with a sentence each."""
    listed = (context.manifest or {}).get("parts", {})
    return {part.name: unlike_listed(part, listed.get(part.name, {})) for part in context.parts}


def _own_keys(context: Context) -> tuple[str, ...]:
    """Fields that a draft has of its own: the dtype, where the main model is another's."""
    return DTYPE_KEYS if context.recorded("base_quant") == GRAFTED else ()


def _configs(
    context: Context, main: Mapping[str, Any], mtp: Mapping[str, Any], is_main_changed: bool
) -> Item:
    """The draft's config equals the main one but for the fields that its target changes.
    is_main_changed: the main one was changed after the export, and the draft's was not."""
    name = "draft and main of one model: configs"
    try:
        wanted = flattened(context.target.mtp_config(main))
    except MtpExportError:
        return not_tested(name, "the main config cannot be used")
    problems, of_draft = [], flattened(mtp)
    for key in sorted({*wanted, *of_draft} - QUANTIZATION_FIELDS - {*_own_keys(context)}):
        by_main, own = wanted.get(key), of_draft.get(key)
        if by_main == own:
            continue
        if is_main_changed:
            words = causes.main_config_differs(key, found=by_main, wanted=own)
        else:
            words = causes.draft_config_differs(key, found=own, wanted=by_main)
        changed = MAIN if is_main_changed else MTP
        problems.append(Problem(f"{changed}/{CONFIG_NAME}", words))
    return verdict(name, problems, f"{len(wanted)} fields")


def _yarn(layout: PartLayout, is_bundle: bool) -> Item:
    """yarn's two factors come together in every released model: mscale on the rotary part, and
    mscale_all_dim on the whole attention score, which replaces it."""
    fields = text_fields(layout.checkpoint.config)
    scaling = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    figure = f"mscale {scaling.get('mscale')}, mscale_all_dim {scaling.get('mscale_all_dim')}"
    problems = []
    if scaling.get("mscale") and not scaling.get("mscale_all_dim"):
        file = f"{layout.name}/{CONFIG_NAME}" if is_bundle else CONFIG_NAME
        problems.append(Problem(file, causes.yarn_scale_dropped(file, scaling["mscale"])))
    return verdict(f"{layout.name}: yarn's attention scale", problems, figure)


def _tokenizer(context: Context, part: Part, unlike: Mapping[str, str]) -> Item:
    """The part has a tokenizer whose ids are those of the model; a bundle's must have one. unlike:
    sentences on files that are not as the manifest lists them."""
    name = f"{part.name}: tokenizer"
    files = [path.name for path in part.folder.iterdir()]
    if not any(_is_vocabulary(file) for file in files):
        return _without_tokenizer(context, name, part, unlike)
    if part.checkpoint is None:
        return not_tested(name, "the checkpoint cannot be opened: headers and index says why")
    config = {**part.checkpoint.config, **text_fields(part.checkpoint.config)}
    vocab = config.get("vocab_size")
    if _TOKENIZER_JSON not in files or type(vocab) is not int:
        return not_tested(name, f"it has no {_TOKENIZER_JSON} to look into")
    path = part.folder / _TOKENIZER_JSON
    try:
        entries = list(_entries(read_json_object(path)))
    except MtpExportError as error:
        raise_trouble(error, part.folder)
        return verdict(name, [Problem(str(path), str(error))])
    ids = {token: number for token, number in entries if _is_id(token, number)}
    odd = [pair for pair in entries if not _is_id(*pair)]
    problems = [Problem(str(path), causes.no_token_id(*pair)) for pair in odd]
    top = max(ids.values(), default=-1) + 1
    if not vocab * _LEAST_USED <= top <= vocab:
        words = causes.ids_do_not_fit(_TOKENIZER_JSON, top - 1, vocab)
        problems.append(Problem(str(path), words))
    problems += [Problem(str(path), words) for words in _special_tokens(part, config, ids)]
    return verdict(name, problems, f"{top:,} of {vocab:,} ids")


def _without_tokenizer(context: Context, name: str, part: Part, unlike: Mapping[str, str]) -> Item:
    """The item of a part without a tokenizer: of a bundle it fails."""
    files = ", ".join(_VOCABULARIES)
    if not context.is_bundle:
        return not_tested(name, causes.no_tokenizer(str(part.folder), files))
    missing = [
        Problem(str(part.folder / file), words)
        for file, words in unlike.items()
        if _is_vocabulary(file)
    ]
    is_listed = context.manifest is not None  # with all that the export found
    tell = causes.source_without_tokenizer if is_listed else causes.no_tokenizer
    return verdict(name, missing or [Problem(str(part.folder), tell(f"{part.name}/", files))])


def _is_vocabulary(file: str) -> bool:
    return any(fnmatch(file, pattern) for pattern in _VOCABULARIES)


def _entries(tokenizer: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Tokens of a tokenizer.json with their ids, as they stand there."""
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        yield from vocab.items()
    elif isinstance(vocab, list):
        yield from ((_first(entry), number) for number, entry in enumerate(vocab))
    for token in added if isinstance(added, list) else []:
        facts = token if isinstance(token, dict) else {}
        yield facts.get("content"), facts.get("id")


def _first(entry: Any) -> Any:
    """The token of an entry [token, score]."""
    return entry[0] if isinstance(entry, list) and entry else None


def _is_id(token: Any, number: Any) -> bool:
    return isinstance(token, str) and type(number) is int and number >= 0


def _special_tokens(part: Part, config: Mapping[str, Any], ids: Mapping[str, int]) -> Iterator[str]:
    """Problems of the begin and end of text whose ids are not those of config.json."""
    path = part.folder / "tokenizer_config.json"
    if not path.is_file():
        return
    try:
        settings = read_json_object(path)
    except MtpExportError as error:
        raise_trouble(error, part.folder)
        yield str(error)
        return
    for key in ("bos_token", "eos_token"):
        token = settings.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        wanted = config.get(f"{key}_id")
        wanted = wanted if isinstance(wanted, list) else [wanted]
        if isinstance(token, str) and wanted != [None] and ids.get(token) not in wanted:
            yield causes.another_special_token(
                key, token=token, found=ids.get(token), wanted=wanted
            )


def _same_tokenizer(
    parts: tuple[Part, ...], unlike: Mapping[str, Mapping[str, str]], *, all_in_both: bool
) -> Item:
    """Main and draft read the same ids: their tokenizer files are equal, byte by byte. unlike: by
    part, sentences on files that are not as the manifest lists them. all_in_both: one that a part
    lacks is a difference; engines take the main model's for a draft without."""
    folders = [
        {
            path.name: path
            for path in part.folder.iterdir()
            if path.is_file() and any(fnmatch(path.name, p) for p in _TOKENIZER_FILES)
        }
        for part in parts
    ]
    first = folders[0]
    problems = []
    for part, files in zip(parts[1:], folders[1:], strict=True):
        for name in sorted(first.keys() ^ files.keys() if all_in_both else ()):
            lacking = part.name if name in first else MAIN
            words = causes.file_in_one_part(name, MAIN, part.name)
            told = unlike.get(lacking, {}).get(name, words)
            problems.append(Problem(f"{lacking}/{name}", told))
        for name in sorted(first.keys() & files.keys()):
            if not filecmp.cmp(first[name], files[name], shallow=False):  # sizes first
                changed = [p for p in (MAIN, part.name) if name in unlike.get(p, {})]
                place = "/".join([*changed[:1], name])
                problems.append(Problem(place, causes.tokenizers_differ(name, MAIN, part.name)))
    return verdict("one tokenizer", problems, counted(len(first), "file"))
