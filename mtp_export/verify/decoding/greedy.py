"""Check `greedy`: speculative greedy decoding equals plain decoding token by token: exactly in the
deterministic mode, in others, and for layers that have none, but for near-ties, each of which is
examined."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from mtp_checkpoints.errors import UnsupportedError
from mtp_export.progress import CountCallback
from mtp_export.verify.check import Item, failed, judged, not_tested, passed
from mtp_export.verify.context import Context
from mtp_export.verify.diagnosis.causes import decoding as causes
from mtp_export.verify.evidence.corpus import Corpus
from mtp_export.verify.evidence.decode import Build, Decoded, decode
from mtp_export.verify.evidence.extra_drafts import ExtraDraft
from mtp_export.verify.evidence.noise import measured_noise
from mtp_export.verify.evidence.prompts import Prompt
from mtp_runtime.config import NO_DRAFTS
from mtp_runtime.drafters import DRAFTERS
from mtp_runtime.drafters.known_answers import KnownAnswersDrafter
from mtp_runtime.models.load import LoadOptions
from mtp_runtime.models.model import Model
from mtp_runtime.sampling import SamplingParams
from mtp_runtime.teacher_forcing import Text, Texts, target_states

_BATCHES = "plain decoding, batch 1 or all"
_LENGTH_LIMIT, _END_TOKEN = "length limit inside a block", "end token inside a block"
# Draft tokens per step: at most, and of every drafter that is run with one number alone.
MAX_K, SOME_K = 5, 3
_PROMPTS = 6
_ALONE = 1
# From one token to one more than the largest block.
_LIMITS = range(1, MAX_K + 3)
# Prompts are cut to these lengths, so that blocks meet page boundaries at many offsets.
_LENGTHS = (1, 15, 16, 17, 7, 33)


@dataclass(frozen=True)
class Divergence:
    """The first difference of an output from plain decoding's: the prompt, the place in its output.

    wanted is None if plain decoding ended there, found if the other output did.
    """

    prompt: int
    place: int
    wanted: int | None
    found: int | None
    from_draft: bool


@dataclass(frozen=True)
class Reference:
    """A model's plain decoding, which runs with near-ties are compared with."""

    model: Model
    plain: Decoded

    @cached_property
    def noise(self) -> float:
        """Rounding noise of the model's logits."""
        return measured_noise(self.model, self.plain)


@dataclass
class Trial:
    """A model with prompts and their plain decoding, which other runs are compared with.

    why_inexact: why a row's bits may depend on its batch; "" where they do not. advance takes the
    number of tokens just decoded.
    """

    model: Model
    prompts: list[Prompt]
    params: SamplingParams
    why_inexact: str = ""
    advance: CountCallback = int
    plain: Decoded = field(init=False)

    def __post_init__(self) -> None:
        self.plain = decode(self.model, self.prompts, self.params, advance=self.advance)

    @cached_property
    def reference(self) -> Reference:
        """The plain decoding with its noise."""
        return Reference(self.model, self.plain)

    @property
    def answers(self) -> Mapping[Prompt, Sequence[int]]:
        return dict(zip(self.prompts, self.plain.outputs, strict=True))

    def planted(self, rate: float = 1.0, right_for: int | None = None) -> Build:
        """Builder of a drafter that knows plain decoding's output and is right at a rate, or for so
        many tokens per block."""
        answers, vocab = self.answers, self.model.config.vocab
        return lambda parts: KnownAnswersDrafter(answers, vocab, rate, right_for)

    def run(self, method: str, k: int, build: Build | None = None) -> Decoded:
        return decode(
            self.model,
            self.prompts,
            self.params,
            method=method,
            k=k,
            build=build,
            draft_model=self.model if method == "draft_model" else None,
            advance=self.advance,
        )

    def first(self, other: Decoded) -> Divergence | None:
        """The first divergence of a run."""
        return next(iter(divergences(self.plain, other)), None)


def run(context: Context) -> Iterator[Item]:
    """Equality with every drafter, limits inside a block, and divergences in the other modes."""
    new_tokens = tokens_per_prompt(context.options.max_new_tokens)
    trial = _trial(context, SamplingParams(max_tokens=new_tokens, ignore_eos=True))
    own = [] if context.corpus.draft is None else [context.corpus.draft]
    runs = sum(1 for _ in _drafters(trial)) + len(own) * MAX_K + len(context.extra_drafts)
    tokens = runs * len(trial.prompts) * new_tokens
    with context.show_count("greedy, with every drafter", tokens, "tokens") as trial.advance:
        for name, decoded in _runs(trial, own, context.extra_drafts):
            if trial.why_inexact:
                yield _classified(trial.reference, decoded, name)
            else:
                yield _equal(trial, decoded, name)
    with context.show_count("greedy, alone and at limits", len(_EXACT), "runs") as advance:
        for name, check in _EXACT.items():
            yield not_tested(name, trial.why_inexact) if trial.why_inexact else check(trial)
            advance(1)
    yield _in_fp32(context)
    yield _in_bf16(context, new_tokens)


def _trial(context: Context, params: SamplingParams) -> Trial:
    """The model in its deterministic mode, or as it is run if that is refused."""
    device, prompts, why = context.options.device, mixed_prompts(context.prompts), ""
    try:
        model = context.loaded(LoadOptions(device, deterministic=True)).model
    except UnsupportedError as error:
        model, why = context.loaded(LoadOptions(device)).model, str(error)
    tokens = len(prompts) * params.max_tokens
    with context.show_count("greedy, without drafts", tokens, "tokens") as advance:
        return Trial(model, prompts, params, why, advance)


def tokens_per_prompt(max_new_tokens: int) -> int:
    """A quarter of what other checks decode, and enough for every limit inside a block."""
    return min(48, max(_LIMITS[-1], max_new_tokens // 4))


def mixed_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    """A few prompts of mixed lengths, no two the same."""
    cut = [prompt[:length] for prompt, length in zip(prompts, _LENGTHS, strict=False)]
    return list(dict.fromkeys(cut))[:_PROMPTS]


def _runs(
    trial: Trial, own: Sequence[ExtraDraft], extra_drafts: Sequence[ExtraDraft]
) -> Iterator[tuple[str, Decoded]]:
    """Decodings with every drafter, with what drafts in the place of an MTP module, and with the
    bundle's extra drafts, by name."""
    for name, method, k, build in _drafters(trial):
        yield f"{name}, k={k}", trial.run(method, k, build)
    for draft in own:
        yield from (_of_extra(trial, draft, k) for k in range(1, MAX_K + 1))
    for extra in extra_drafts:
        yield _of_extra(trial, extra)


def _of_extra(trial: Trial, extra: ExtraDraft, k: int = SOME_K) -> tuple[str, Decoded]:
    on_model = extra.on(trial.model)
    decoded = on_model.decode(trial.prompts, trial.params, k, trial.advance)
    return f"{extra.method}, k={k}", decoded


def _drafters(trial: Trial) -> Iterator[tuple[str, str, int, Build | None]]:
    """Name, method, k and builder of every drafter in the registry that the model has what it needs
    for, and of planted ones."""
    has_mtp = trial.model.mtp is not None
    for k in range(1, MAX_K + 1) if has_mtp else ():
        yield "mtp", "mtp", k, None
    for method, kind in DRAFTERS.items():
        is_other = method not in (NO_DRAFTS, "mtp") and kind.read is None
        if is_other and (has_mtp or not kind.needs_mtp):
            yield method, method, SOME_K, None
    for right_for in range(MAX_K):
        name = "never right" if right_for == 0 else f"right for {right_for}"
        yield name, "planted", MAX_K, trial.planted(right_for=right_for)
    yield "always right", "planted", MAX_K, trial.planted()
    yield "right at rate 0.7", "planted", MAX_K, trial.planted(rate=0.7)


def divergences(plain: Decoded, other: Decoded) -> Iterator[Divergence]:
    """The first divergence of each prompt that has one."""
    drafted: dict[int, list[bool]] = {}
    for event in other.events:
        drafted.setdefault(event.request_id, []).append(event.from_draft)
    for prompt, (wanted, found) in enumerate(zip(plain.outputs, other.outputs, strict=True)):
        if wanted == found:
            continue
        pairs = zip(wanted, found, strict=False)
        shorter = min(len(wanted), len(found))
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
        at = [tokens[place] if place < len(tokens) else None for tokens in (wanted, found)]
        from_draft = at[1] is not None and drafted[prompt][place]
        yield Divergence(
            prompt=prompt, place=place, wanted=at[0], found=at[1], from_draft=from_draft
        )


def _equal(trial: Trial, decoded: Decoded, name: str) -> Item:
    tokens = sum(len(output) for output in decoded.outputs)
    drafts = sum(len(proposal.tokens) for proposal in decoded.proposals)
    found = trial.first(decoded)
    figure, bound = f"{tokens} tokens, {drafts} drafts", "every token equal"
    cause, subject = ("", "") if found is None else (_cause(found), _place(found))
    return judged(name, found is None, cause, figure=figure, bound=bound, subject=subject)


def _place(found: Divergence) -> str:
    return f"prompt {found.prompt}, output token {found.place}"


def _cause(found: Divergence) -> str:
    """The likely cause, by the origin of the wrong token."""
    if found.wanted is None or found.found is None:
        return causes.LIMIT_PASSED
    return causes.WRONG_DRAFT_ACCEPTED if found.from_draft else causes.LOGITS_DEPEND_ON_DRAFTS


def _alone(trial: Trial) -> Item:
    """Prompts decoded alone equal the batch of all."""
    name, bound = _BATCHES, "every token equal"
    prompts = trial.prompts[-_ALONE:]
    outputs = [decode(trial.model, [prompt], trial.params).outputs[0] for prompt in prompts]
    wanted = [tuple(trial.answers[prompt]) for prompt in prompts]
    figure = f"{sum(map(len, outputs))} tokens"
    return judged(name, outputs == wanted, causes.ROWS_DEPEND_ON_BATCH, figure=figure, bound=bound)


def _limits(trial: Trial) -> Item:
    """Output ends at every max_tokens of _LIMITS, with drafts that are all right."""
    prompt = trial.prompts[-1]
    each = [replace(trial.params, max_tokens=limit) for limit in _LIMITS]
    found = decode(trial.model, [prompt] * len(each), each, k=MAX_K, build=trial.planted()).outputs
    wanted = [tuple(trial.answers[prompt][:limit]) for limit in _LIMITS]
    return _inside(found, wanted, name=_LENGTH_LIMIT, limit="max_tokens")


def _end_token(trial: Trial) -> Item:
    """Output ends at the end token, each token of an output in turn, whatever was accepted."""
    prompt = trial.prompts[-1]
    answer = tuple(trial.answers[prompt])[: MAX_K + 1]
    each = [replace(trial.params, stop_token_ids=(token,)) for token in answer]
    found = decode(trial.model, [prompt] * len(each), each, k=MAX_K, build=trial.planted()).outputs
    wanted = [answer[: answer.index(token) + 1] for token in answer]
    return _inside(found, wanted, name=_END_TOKEN, limit="the end token")


# What one near-tie would change, and no margin can excuse.
_EXACT: dict[str, Callable[[Trial], Item]] = {
    _BATCHES: _alone,
    _LENGTH_LIMIT: _limits,
    _END_TOKEN: _end_token,
}


def _inside(
    found: Sequence[tuple[int, ...]], wanted: Sequence[tuple[int, ...]], name: str, limit: str
) -> Item:
    wrong = [i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b]
    return judged(
        name,
        not wrong,
        causes.limit_inside_block(limit),
        figure=f"{len(found) - len(wrong)} of {len(found)}",
        bound="output ends there",
        subject=f"case {wrong[0] + 1}" if wrong else "",
    )


def _in_fp32(context: Context) -> Item:
    """The fast mode on all prompts, from the runs that check `acceptance` uses as well."""
    corpus, k = context.corpus, max(context.options.ks)
    name = f"fast fp32, {corpus.method}, k={k}"
    return _classified(corpus, corpus.speculative(k), name)


def _in_bf16(context: Context, new_tokens: int) -> Item:
    """Some of the prompts in bf16."""
    k = max(context.options.ks)
    name = f"bf16, {context.corpus.method}, k={k}"
    options = LoadOptions(context.options.device, "bfloat16")
    if reason := context.why_not_loaded(options):
        return not_tested(name, reason)
    corpus = context.corpus_with(options)
    params = SamplingParams(max_tokens=new_tokens)
    prompts = list(context.corpus.prompts[:_PROMPTS])
    tokens = 2 * len(prompts) * new_tokens
    with context.show_count("greedy, in bf16", tokens, "tokens") as advance:
        plain = decode(corpus.model, prompts, params, advance=advance)
        other = corpus.drafted(prompts, params, k, advance)
    return _classified(Reference(corpus.model, plain), other, name)


def _classified(reference: Reference | Corpus, other: Decoded, name: str) -> Item:
    """Divergences at near-ties pass, by the measured noise; any other fails."""
    model, plain, noise = reference.model, reference.plain, reference.noise
    bound = f"margins under 2 x the measured noise {noise:.2g}"
    found = list(divergences(plain, other))
    faults = []
    worst = 0.0
    for divergence in found:
        margin = _margin(model, plain, divergence)
        worst = max(worst, margin)
        if margin > 2 * noise:
            faults.append((margin, divergence))
    figure = f"{len(found)} of {len(plain.outputs)} texts diverge"
    if found:
        figure += f", largest margin {worst:.2g}"
    if not faults:
        return passed(name, figure=figure, bound=bound)
    margin, first = max(faults, key=lambda fault: fault[0])
    subject = _place(first)
    return failed(name, causes.no_near_tie(margin), figure=figure, bound=bound, subject=subject)


@torch.inference_mode()
def _margin(model: Model, plain: Decoded, found: Divergence) -> float:
    """The target's logit of plain decoding's token minus that of the other, after the same text."""
    if found.wanted is None or found.found is None:
        return float("inf")
    request = plain.requests[found.prompt]
    before = (*request.prompt, *request.output[: found.place])
    _, after = target_states(model, Texts((Text(before, len(request.prompt)),)))
    logits = model.head.logits(after[-1:])[0]
    return float(logits[found.wanted] - logits[found.found])
