"""Forms of the answers: what /v1/completions and /v1/chat/completions say of a choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mtp_runtime.logprobs import TokenLogprobs
from mtp_runtime.request import Request, TokenEvent
from mtp_runtime.tokenizer import Tokenizer

Facts = dict[str, Any]


class Form(Protocol):
    """Parts in which the two kinds of answers differ."""

    prefix: str  # of ids
    whole_object: str
    part_object: str

    def opening(self, choice: int, request: Request) -> Facts | None:
        """Return what stands before a choice's first token in a stream, if anything does."""

    def part(self, choice: int, text: str, logprobs: Sequence[TokenLogprobs]) -> Facts:
        """Return new text of a choice in a stream."""

    def whole(self, choice: int, request: Request) -> Facts:
        """Return a choice that has ended."""


@dataclass
class ChatForm:
    """Messages."""

    tokenizer: Tokenizer
    shows_logprobs: bool
    prefix: str = "chatcmpl"
    whole_object: str = "chat.completion"
    part_object: str = "chat.completion.chunk"

    def opening(self, choice: int, request: Request) -> Facts:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def part(self, choice: int, text: str, logprobs: Sequence[TokenLogprobs]) -> Facts:
        return {"delta": {"content": text} if text else {}, "logprobs": self._logprobs(logprobs)}

    def whole(self, choice: int, request: Request) -> Facts:
        return {
            "message": {"role": "assistant", "content": request.text},
            "logprobs": self._logprobs(request.logprobs),
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> Facts | None:
        if not self.shows_logprobs:
            return None
        return {
            "content": [
                {
                    **self._token(one.token, one.logprob),
                    "top_logprobs": [self._token(*other) for other in one.top],
                }
                for one in logprobs
            ],
            "refusal": None,
        }

    def _token(self, token: int, logprob: float) -> Facts:
        text = _text(self.tokenizer, token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


@dataclass
class CompletionForm:
    """Texts, behind their prompts where those are echoed.

    prompts are the texts of the prompts, for each choice; offsets the characters of a choice's
    text before its next token.
    """

    tokenizer: Tokenizer
    shows_logprobs: bool
    echoed: Sequence[str] | None
    offsets: dict[int, int] = field(default_factory=dict)
    prefix: str = "cmpl"
    whole_object: str = "text_completion"
    part_object: str = "text_completion"

    def opening(self, choice: int, request: Request) -> Facts | None:
        if self.echoed is None:
            return None
        return {"text": self.echoed[choice], "logprobs": self._of_prompt(choice, request)}

    def part(self, choice: int, text: str, logprobs: Sequence[TokenLogprobs]) -> Facts:
        return {"text": text, "logprobs": self._logprobs(choice, logprobs)}

    def whole(self, choice: int, request: Request) -> Facts:
        opening = self.opening(choice, request)
        own = self._logprobs(choice, request.logprobs)
        if opening is None:
            return {"text": request.text, "logprobs": own}
        before = opening["logprobs"]
        joined = own and before and {key: before[key] + own[key] for key in own}
        return {"text": opening["text"] + request.text, "logprobs": joined}

    def _of_prompt(self, choice: int, request: Request) -> Facts | None:
        """Return the log-probabilities of a prompt; its first token has none."""
        first = self._logprobs(choice, [TokenLogprobs(request.prompt[0], 0.0)])
        if first is None:
            return None
        first["token_logprobs"], first["top_logprobs"] = [None], [None]
        rest = self._logprobs(choice, request.prompt_logprobs)
        return rest and {key: first[key] + rest[key] for key in first}

    def _logprobs(self, choice: int, logprobs: Sequence[TokenLogprobs]) -> Facts | None:
        if not self.shows_logprobs:
            return None
        texts = [_text(self.tokenizer, one.token) for one in logprobs]
        offsets = []
        for text in texts:
            offsets.append(self.offsets.get(choice, 0))
            self.offsets[choice] = offsets[-1] + len(text)
        return {
            "tokens": texts,
            "token_logprobs": [one.logprob for one in logprobs],
            "top_logprobs": [self._top(one) for one in logprobs],
            "text_offset": offsets,
        }

    def _top(self, one: TokenLogprobs) -> dict[str, float]:
        """Return the best tokens by their texts, and the token itself; of equal texts the best."""
        found: dict[str, float] = {}
        for token, logprob in (*one.top, (one.token, one.logprob)):
            found.setdefault(_text(self.tokenizer, token), logprob)
        return found


def speculation(events: Sequence[TokenEvent]) -> list[Facts]:
    """Return what each token added to the text, and its place among the drafts, 0 for none."""
    return [{"text": event.text, "draft_position": event.draft_position} for event in events]


def usage(requests: Sequence[Request], choices: int, completion_tokens: int) -> Facts:
    """Return the number of tokens: those of a prompt once, however many choices it has."""
    prompts = requests[::choices]
    prompt_tokens = sum(len(request.prompt) for request in prompts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(r.metrics.cached_tokens for r in prompts)},
    }


def _text(tokenizer: Tokenizer, token: int) -> str:
    """Return a token's text, its number where there is no tokenizer."""
    return tokenizer.token_text(token) if tokenizer.found else f"token_id:{token}"
