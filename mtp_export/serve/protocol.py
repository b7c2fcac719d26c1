"""Bodies of requests: the fields of OpenAI's protocol, and vLLM's beside them.

What is not known is refused, and so is a value that would be ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from mtp_checkpoints.sources.strict_json import parse
from mtp_export.serve.errors import ApiError
from mtp_export.serve.limits import (
    MAX_CHOICES,
    MAX_MESSAGES,
    MAX_NAME,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MAX_VALUES,
    check_structure,
)
from mtp_runtime.sampling import MAX_LOGPROBS, SamplingParams, random_seed

_MAX_SEED = (1 << 63) - 1
_TAG = "="  # begins the tags of types, which are no part of a field's name


def _text_or_list(value: object) -> str:
    """Return the tag of a value that may be a text or a list."""
    return "=list" if isinstance(value, list) else "=text"


def _kind_of_prompt(value: object) -> str:
    """Return the tag of a prompt, or of a list of prompts by the first of them."""
    if not isinstance(value, list):
        return "=text"
    first = value[0] if value else None
    return "=texts" if isinstance(first, str) else "=lists" if isinstance(first, list) else "=ids"


def _zero(penalty: float) -> float:
    if penalty:
        raise ValueError("Only 0 is supported")
    return penalty


# The type of a value that may have several is chosen before it is validated, and its first error
# ends that: validation by each of the types in turn lists the errors of every element.
TextOrList = Discriminator(_text_or_list)
Name = Annotated[str, Field(max_length=MAX_NAME)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(fail_fast=True)]
Prompt = Annotated[TokenIds, Field(min_length=1, max_length=MAX_VALUES)]
Prompts = Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Zero = Annotated[float, AfterValidator(_zero)]
Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Kind = TypeVar("Kind", bound=BaseModel)


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, value: Any) -> Any:
        """Take null for a field that is not there, as clients write it, and leave one of those that
        are unknown: pydantic tells of each."""
        if not isinstance(value, dict):
            return value
        known = {name: value[name] for name in cls.model_fields if value.get(name) is not None}
        names = (name for name in value if name not in cls.model_fields)
        unknown = next((name for name in names if value[name] is not None), None)
        return known if unknown is None else {**known, unknown: None}


class StreamOptions(_Body):
    """Options of a stream: usage at its end, or with every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class _Asked(_Body):
    """Fields that both kinds of requests have.

    speculation and use_drafts are ours: with the first each choice says which of its tokens were
    drafted; the second, where it is false, decodes plainly. user is ignored; penalties are there
    for clients that always send them, as 0.
    """

    default_tokens: ClassVar[int | None] = None

    model: Name | None = None
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=-1, le=1 << 30)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=1, le=1 << 30)
    min_tokens: int = Field(0, ge=0, le=1 << 30)
    seed: int | None = Field(None, ge=0, le=_MAX_SEED)
    stop: (
        Annotated[
            Annotated[Stop, Tag("=text")]
            | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True), Tag("=list")],
            TextOrList,
        ]
        | None
    ) = None
    stop_token_ids: TokenIds = Field([], max_length=MAX_STOPS)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    speculation: bool = False
    use_drafts: bool = True
    user: Name | None = None
    frequency_penalty: Zero = 0
    presence_penalty: Zero = 0

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream")
        return self

    @property
    def tokens(self) -> int | None:
        """Maximum number of new tokens; None for as many as there is room for."""
        return self.max_tokens or self.default_tokens

    @property
    def shown_logprobs(self) -> int | None:
        """Number of tokens to show beside each; None for no log-probabilities."""
        raise NotImplementedError

    @property
    def echoes(self) -> bool:
        return False

    @property
    def count(self) -> int:
        """Number of choices in all."""
        return self.n

    def sampling(self, room: int) -> list[SamplingParams]:
        """Return the parameters of each choice, whose seeds follow each other, given how many
        tokens there is room for."""
        first = random_seed() if self.seed is None else self.seed
        shown = self.shown_logprobs
        return [
            SamplingParams(
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=max(0, self.top_k),
                max_tokens=self.tokens or max(1, room),
                seed=first + choice,
                stop=self.stop or None,
                stop_token_ids=tuple(self.stop_token_ids),
                ignore_eos=self.ignore_eos,
                min_tokens=self.min_tokens,
                logprobs=shown,
                prompt_logprobs=shown if self.echoes else None,
                use_drafts=self.use_drafts,
            )
            for choice in range(self.n)
        ]


class CompletionBody(_Asked):
    """Body of /v1/completions."""

    default_tokens: ClassVar[int | None] = 16  # OpenAI's

    prompt: Annotated[
        Annotated[str, Tag("=text")]
        | Annotated[list[str], Prompts, Tag("=texts")]
        | Annotated[Prompt, Tag("=ids")]
        | Annotated[list[Prompt], Prompts, Tag("=lists")],
        Discriminator(_kind_of_prompt),
    ]
    echo: bool = False
    logprobs: Logprobs | None = None

    @property
    def shown_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return self.echo

    @property
    def count(self) -> int:
        return self.n * len(self.prompts)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one, texts or token ids."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class TextPart(_Body):
    """Part of a message; texts alone are understood."""

    type: Literal["text"]
    text: str


class MessageBody(_Body):
    """Message of a chat."""

    role: Annotated[Name, Field(min_length=1)]
    content: (
        Annotated[
            Annotated[str, Tag("=text")]
            | Annotated[
                list[TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True), Tag("=list")
            ],
            TextOrList,
        ]
        | None
    ) = None
    name: Name | None = None

    def as_message(self) -> dict[str, Any]:
        """Return the message as templates expect it, its parts joined."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": content or "", **named}


class ResponseFormat(_Body):
    """Format of the answer: text, whatever it is."""

    type: Literal["text"]


class ChatBody(_Asked):
    """Body of /v1/chat/completions."""

    messages: list[MessageBody] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1, le=1 << 30)
    logprobs: bool = False
    top_logprobs: Logprobs | None = None
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _logprobs_fit(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs")
        return self

    @property
    def tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def shown_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def body_of(kind: type[Kind], raw: bytes) -> Kind:
    """Return the body of a request (ApiError for one that is none)."""
    check_structure(raw)
    try:
        value = parse(raw)
    except ValueError as error:
        raise ApiError(400, f"The body is no JSON: {error}") from None
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        names = [str(part) for part in first["loc"] if not str(part).startswith(_TAG)]
        param, words = ".".join(names) or None, first["msg"].removeprefix("Value error, ")
        raise ApiError(400, f"{param}: {words}" if param else words, param=param) from None
