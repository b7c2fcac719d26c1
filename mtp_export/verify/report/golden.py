"""Golden file: what a bundle generates, and what its MTP module drafts after every token of it, so
that an engine can be compared with it token by token.

JSON lines in ASCII: a header, then one line per prompt, as documented in docs/engines.md.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.tensors.bundle_folder import MAIN
from mtp_checkpoints.tensors.model_identity import model_identity
from mtp_export import __version__
from mtp_export.verify.context import Context
from mtp_export.verify.evidence.decode import Decoded, Proposal
from mtp_export.verify.evidence.statistics import ratio
from mtp_runtime.request import Request

FORMAT, FORMAT_VERSION = "mtp-export golden", 1
_DECIMALS = 6  # of log-probabilities: as many as float32 has of them
_UNITS = {
    "logprobs": "nats, natural logarithm of the probability at temperature 1",
    "margins": "nats, log-probability of the token less that of the best other one",
    "acceptance": "share of the steps in which the draft at a position was accepted",
}


@dataclass(frozen=True)
class Drafts:
    """Drafts after one token of an output, as far as the output goes, and how many of them are
    accepted."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    accepted: int

    @classmethod
    def of(cls, proposal: Proposal | None, following: Sequence[int]) -> Drafts:
        """Drafts of a proposal for the tokens that follow; none where nothing was proposed."""
        if proposal is None:
            return cls((), (), 0)
        tokens = proposal.tokens[: len(following)]
        pairs = list(zip(tokens, following, strict=False))
        accepted = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        return cls(tokens, proposal.logprobs[: len(tokens)], accepted)

    def as_json(self) -> dict[str, Any]:
        return {
            "token_ids": list(self.tokens),
            "logprobs": _rounded(self.logprobs),
            "accepted": self.accepted,
        }


@dataclass(frozen=True)
class Output:
    """Greedy output of one prompt, with the drafts after each of its tokens."""

    request: Request
    drafts: tuple[Drafts, ...]

    def counts(self, k: int) -> list[tuple[int, int]]:
        """Steps of decoding with k drafts in which there was a draft at each position, and in which
        it was accepted."""
        drafted, accepted, at = [0] * k, [0] * k, 0
        while at < len(self.drafts):
            here = self.drafts[at]
            taken = min(here.accepted, k)
            for position in range(min(k, len(here.tokens))):
                drafted[position] += 1
                accepted[position] += position < taken
            at += taken + 1
        return list(zip(drafted, accepted, strict=True))

    def as_json(self, number: int, text: str | None, k: int) -> dict[str, Any]:
        """The prompt's line; text: None where the prompt was given as token ids."""
        request = self.request
        return {
            "prompt": number,
            "text": text,
            "prompt_token_ids": list(request.prompt),
            "token_ids": request.output,
            "logprobs": _rounded([own.logprob for own in request.logprobs]),
            "margins": _rounded([own.top[0][1] - own.top[1][1] for own in request.logprobs]),
            "finish_reason": request.finish_reason,
            "drafts": [drafts.as_json() for drafts in self.drafts],
            "acceptance": [{"drafted": n, "accepted": m} for n, m in self.counts(k)],
        }


def golden_text(context: Context) -> str:
    """Return the golden file of a bundle, for its prompts and the largest of its ks.

    Raises UnsupportedError for a bundle that is not run as a whole, and what loading raises.
    """
    if found := context.why_not_run or context.why_no_module:
        raise UnsupportedError(
            "No golden file can be written",
            where=context.options.bundle,
            expected="a model that is run as a whole, with its MTP module",
            found=found,
        )
    corpus, k = context.corpus, max(context.options.ks)
    outputs = outputs_of(corpus.one_by_one(k))
    lines = [_header(context, outputs, k)]
    for number, output in enumerate(outputs):
        text = context.prompt_texts.get(output.request.prompt)
        lines.append(output.as_json(number, text, k))
    return "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)


def outputs_of(decoded: Decoded) -> list[Output]:
    """Outputs of a run that made drafts after every token."""
    proposals = {(own.request, own.last): own for own in decoded.proposals}
    return [Output(request, tuple(_drafts(request, proposals))) for request in decoded.requests]


def _drafts(request: Request, proposals: Mapping[tuple[int, int], Proposal]) -> Iterator[Drafts]:
    for last in range(len(request.prompt), len(request.tokens)):
        proposal = proposals.get((request.request_id, last))
        yield Drafts.of(proposal, request.tokens[last + 1 :])


def _header(context: Context, outputs: Sequence[Output], k: int) -> dict[str, Any]:
    model, parts = context.corpus.model, context.checkpoints
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "versions": {
            "mtp_export": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "model": {
            "model_type": parts[MAIN].config.get("model_type"),
            "manifest_sha256": context.manifest_sha256,
            "config_sha256": {name: own.config_sha256 for name, own in parts.items()},
            "identity": {name: model_identity(own.tensors.values()) for name, own in parts.items()},
        },
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": context.options.device,
        "method": "mtp",
        "k": k,
        "contract": asdict(context.corpus.module.contract),
        "temperature": 0,
        "max_new_tokens": context.options.max_new_tokens,
        "eos_token_ids": list(model.config.eos_token_ids),
        "units": _UNITS,
        "prompts": len(outputs),
        "acceptance": {str(each): _acceptance(outputs, each) for each in range(1, k + 1)},
    }


def _acceptance(outputs: Sequence[Output], k: int) -> list[dict[str, Any] | None]:
    """Acceptance at each position of steps with k drafts, None where nothing was drafted."""
    counts = [output.counts(k) for output in outputs]
    shares = [
        ratio([own[position][1] for own in counts], [own[position][0] for own in counts])
        for position in range(k)
    ]
    return [None if share is None else share.as_json() for share in shares]


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, _DECIMALS) for value in values]
