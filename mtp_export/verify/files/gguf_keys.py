"""Keys of GGUF files, which is all that llama.cpp reads of a model: they describe the model of the
config.json beside them, and have its vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mtp_checkpoints.containers.base import CONFIG_NAME, ShardHeader
from mtp_checkpoints.containers.gguf_architectures.keys_read import TOKENS
from mtp_checkpoints.containers.gguf_file import NAME, read_header
from mtp_checkpoints.containers.gguf_vocabulary import unlike_tokens
from mtp_checkpoints.errors import MtpExportError
from mtp_checkpoints.sources.byte_source import ByteSource
from mtp_checkpoints.sources.tokenizer_file import TOKENIZER_NAME
from mtp_checkpoints.tensors.bundle_folder import MAIN
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_export.bundle.gguf_config import said_twice
from mtp_export.progress import counted
from mtp_export.verify.check import Item, Problem, not_tested, verdict
from mtp_export.verify.diagnosis.causes import files as causes

if TYPE_CHECKING:
    from mtp_export.verify.context import Context


def run(context: Context) -> Iterator[Item]:
    """The keys of the first file of each part, or of a checkpoint of both; nothing for files of
    another format."""
    seen: set[str] = set()
    for part in context.parts:
        if part.checkpoint is None or not part.checkpoint.shards:
            continue
        shard = part.checkpoint.shards[0]
        if shard.container != NAME or str(shard.path) in seen:
            continue
        seen.add(str(shard.path))
        yield from _config(part.name, part.checkpoint)
        yield _vocabulary(context, part.name, part.checkpoint, shard)


def _config(part: str, checkpoint: Checkpoint) -> Iterator[Item]:
    """The keys say what config.json says, where there is one."""
    if CONFIG_NAME not in checkpoint.files.names():
        return
    both = [*said_twice(checkpoint.shards, checkpoint.config, of_main=part == MAIN)]
    problems = [
        Problem(str(checkpoint.shards[0].path), causes.key_differs(*one))
        for one in both
        if not one.is_alike
    ]
    yield verdict(
        f"{part}: keys of the GGUF file", problems, counted(len(both), "value"), CONFIG_NAME
    )


def _vocabulary(context: Context, part: str, checkpoint: Checkpoint, shard: ShardHeader) -> Item:
    """The tokens are those of tokenizer.json beside the file, or of the source's."""
    name = f"{part}: vocabulary of the GGUF file"
    tokens = read_header(shard.file).keys.get(TOKENS)
    if tokens is None or not isinstance(tokens.data, tuple):
        return not_tested(name, causes.NO_VOCABULARY)
    files = _tokenizer_of(context, checkpoint)
    if files is None:
        return not_tested(name, causes.NO_TOKENIZER_BESIDE)
    try:
        unlike = unlike_tokens(tokens.data, files, checkpoint.config)
    except MtpExportError as error:
        return not_tested(name, str(error))
    problems = []
    if unlike:
        words = causes.another_vocabulary(len(unlike), *unlike[0])
        problems.append(Problem(str(shard.path), words))
    return verdict(name, problems, counted(len(tokens.data), "token"), TOKENIZER_NAME)


def _tokenizer_of(context: Context, checkpoint: Checkpoint) -> ByteSource | None:
    sources = [checkpoint.files, *([context.source.files] if context.source else [])]
    return next((files for files in sources if TOKENIZER_NAME in files.names()), None)
