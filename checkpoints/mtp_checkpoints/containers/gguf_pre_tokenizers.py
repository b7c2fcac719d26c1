"""Pre-tokenizers of llama.cpp, and how one is told from a tokenizer.json: by what a text becomes.

Source: llama.cpp's `get_vocab_base_pre` in `conversion/base.py`, and `src/llama-vocab.cpp`, as
llama-cpp-python 0.3.36 has them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from mtp_checkpoints.errors import UnsupportedError, UsageError
from mtp_checkpoints.sources.byte_source import Place
from mtp_checkpoints.sources.tokenizer_file import tokenizer_failures
from mtp_checkpoints.suggestions import did_you_mean

NONE = "none"  # in place of a name: a file without a vocabulary
# Given by the converter too; another text, or one character less, has other hashes.
_TEXT = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n🚀 (normal) 😶\u200d🌫️ (multiple emojis"
    " concatenated) ✅ 🦙🦙 3 33 333 3333 33333 333333 3333333 33333333 3.3 3..3 3...3"
    " កាន់តែពិសេសអាច😁 ?我想在apple工作1314151天～ ------======= нещо на Български"
    " ''''''```````\"\"\"\"......!!!!!!?????? I've been 'told he's there, 'RE you sure?"
    " 'M not sure I'll make it, 'D you like some tea? We'Ve a'lL"
)
_OF_HASH = {
    "877081d19cf6996e2c4ff0e1236341e9b7bde288f5311a56a937f0afbbb3aeb5": "deepseek-v3",
    "a1336059768a55c99a734006ffb02203cd450fed003e9a71886c88acf24fdbc2": "glm4",
    "9ca2dd618e8afaf09731a7cf6e2105b373ba6a1821559f258b272fe83e6eb902": "glm4",
    "cdf5f35325780597efd76153d4d1c16778f766173908894c04afc20108536267": "glm4",
    "b6e8e1518dc4305be2fe39c313ed643381c4da5db34a98f6a04c093f8afbe99b": "chatglm-bpe",
    "81d72c7348a9f0ebe86f23298d37debe0a5e71149e29bd283904c02262b27516": "chatglm-bpe",
    "81212dc7cdb7e0c1074ca62c5aeab0d43c9f52b8a737be7b12a777c953027890": "kimi-k2",
    "3ce83efda5659b07b1ad37ca97ca5797ea4285d9b9ab0dc679e4a720c9da7454": "gpt-2",
}
_NAMES = (
    *("a.x-4.0", "afmoe", "bailingmoe", "bailingmoe2", "bloom", "chameleon", "chatglm-bpe"),
    *("codeshell", "cohere2moe", "command-r", "dbrx", "deepseek-coder", "deepseek-llm"),
    *("deepseek-r1-qwen", "deepseek-v3", "default", "exaone", "exaone-moe", "exaone4", "f2llmv2"),
    *("falcon", "falcon-h1", "falcon3", "gemma4", "gigachat", "glm4", "glm5", "gpt-2", "gpt-4o"),
    *("gpt3-finnish", "granite-docling", "granite-embed-multi-311m", "granite-embed-multi-97m"),
    *("grok-2", "hunyuan", "hunyuan-dense", "hy_v4", "jais", "jais-2", "jina-de", "jina-es"),
    *("jina-v1-en", "jina-v2-code", "jina-v2-de", "jina-v2-es", "jina-v5-nano", "joyai-llm"),
    *("kanana2", "kimi-k2", "kormo", "laguna", "lfm2", "llada-moe", "llama-bpe", "llama-v3"),
    *("llama3", "llama4", "megrez", "mellum", "mellum2", "midm-2.0", "minerva-7b", "minicpm5"),
    *("minimax-m2", "modern-bert", "mpt", "olmo", "phi-2", "pixtral", "poro-chat", "qwen2"),
    *("qwen35", "refact", "roberta-bpe", "sarvam-moe", "seed-coder", "smaug-bpe", "smollm"),
    *("solar-open", "spark2_5", "stablelm2", "starcoder", "superbpe", "talkie", "tekken"),
    *("tiny_aya", "trillion", "ufakzeka", "viking", "whitespace", "youtu"),
)


def checked(name: str) -> str:
    """Return the name of a pre-tokenizer, or none (UsageError for another name)."""
    if name not in (*_NAMES, NONE):
        raise UsageError(
            "llama.cpp has no pre-tokenizer of this name",
            expected=f"{NONE}, or one of {len(_NAMES)} such as deepseek-v3, glm4 and gpt-2",
            found=name[:100],
            todo=did_you_mean(name, (*_NAMES, NONE)) or "See llama.cpp's src/llama-vocab.cpp",
        )
    return name


def pre_tokenizer_of(path: Place, raw: bytes, bos: int | None) -> str:
    """Return the name of a tokenizer.json's pre-tokenizer; bos: the id that its class in
    transformers puts before every text, if it does.

    Raises UnsupportedError with the hash of one that llama.cpp's converter does not know,
    InvalidInputError for what is no tokenizer, UsageError without the package that reads it.
    """
    plain, usual = _encoded(path, raw)
    with_bos = usual if bos is None or usual[:1] == [bos] else [bos, *usual]
    hashes = [_hash(ids) for ids in (with_bos, usual, plain)]
    known = next((_OF_HASH[one] for one in hashes if one in _OF_HASH), None)
    if known is None:
        raise UnsupportedError(
            "llama.cpp's converter does not know this tokenizer",
            where=path,
            expected="a tokenizer that cuts its test text as that of a known model does",
            found=f"hash {hashes[0]}",
            todo="Name what its pre-tokenizer equals, such as --pre-tokenizer gpt-2;"
            f" --pre-tokenizer {NONE} leaves the vocabulary out",
        )
    return known


def _encoded(path: Place, raw: bytes) -> tuple[list[int], list[int]]:
    """Return the ids of the test text, without special tokens and with them."""
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise UsageError(
            "A vocabulary for llama.cpp needs the tokenizers package",
            todo="Install tokenizers, or name the pre-tokenizer with --pre-tokenizer NAME",
        ) from None
    with tokenizer_failures(path, "The tokenizer cannot be read"):
        backend: Any = Tokenizer.from_buffer(raw)
        plain, usual = (
            list(backend.encode(_TEXT, add_special_tokens=special).ids) for special in (False, True)
        )
    return plain, usual


def _hash(ids: Sequence[int]) -> str:
    return hashlib.sha256(str([*ids]).encode()).hexdigest()
