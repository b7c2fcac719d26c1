"""Check 4: speculative greedy decoding puts out what plain decoding does, token by token: in the
deterministic mode exactly, in others but for near-ties, each of which is looked at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from mtp_export.verify.check import Item, Status
from mtp_export.verify.context import Context
from mtp_export.verify.evidence.decode import Build, Decoded, decode
from mtp_export.verify.evidence.noise import measured_noise
from mtp_export.verify.evidence.prompts import Prompt
from mtp_runtime.drafters import DRAFTERS
from mtp_runtime.drafters.known_answers import KnownAnswersDrafter
from mtp_runtime.models.load import LoadOptions
from mtp_runtime.models.model import Model
from mtp_runtime.sampling import SamplingParams
from mtp_runtime.teacher_forcing import Text, Texts, target_states

MOST_DRAFTS = 5
_PROMPTS = 6
_ALONE = 1
# From one token to one more than a block puts out.
_LIMITS = range(1, MOST_DRAFTS + 3)
# Prompts are cut to these lengths, so that blocks meet page boundaries at many offsets.
_LENGTHS = (1, 15, 16, 17, 7, 33)


@dataclass(frozen=True)
class Divergence:
    """Where an output first differs from plain decoding's: the prompt, the place in its output.

    wanted is None where plain decoding ended there, found where the other output did.
    """

    prompt: int
    place: int
    wanted: int | None
    found: int | None
    from_draft: bool


@dataclass
class Trial:
    """A model with prompts and what plain decoding makes of them; runs are held against it."""

    model: Model
    prompts: list[Prompt]
    params: SamplingParams
    plain: Decoded = field(init=False)

    def __post_init__(self) -> None:
        self.plain = decode(self.model, self.prompts, self.params)

    @property
    def answers(self) -> Mapping[Prompt, Sequence[int]]:
        return dict(zip(self.prompts, self.plain.outputs, strict=True))

    def planted(self, rate: float = 1.0, right_for: int | None = None) -> Build:
        """A drafter that knows what plain decoding puts out."""
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
        )

    def first(self, other: Decoded) -> Divergence | None:
        """The first divergence of a run."""
        return next(iter(divergences(self.plain, other)), None)


def run(context: Context) -> Iterator[Item]:
    """Equality of every drafter, limits inside a block, and other modes' divergences."""
    options = context.options
    model = context.loaded(LoadOptions(options.device, deterministic=True)).model
    new_tokens = tokens_a_prompt(options.max_new_tokens)
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    trial = Trial(model, mixed_prompts(context.prompts), params)
    for name, method, k, build in _drafters(trial):
        decoded = trial.run(method, k, build)
        yield _equal(trial, decoded, f"{name}, k={k}")
    yield _alone(trial)
    yield _limits(trial)
    yield _end_token(trial)
    yield _in_fp32(context)
    yield _in_bf16(context, new_tokens)


def tokens_a_prompt(max_new_tokens: int) -> int:
    """A part of what other checks decode, and enough for every limit inside a block."""
    return min(48, max(_LIMITS[-1], max_new_tokens // 4))


def mixed_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    """A few prompts of mixed lengths, no two the same."""
    cut = [prompt[:length] for prompt, length in zip(prompts, _LENGTHS, strict=False)]
    return list(dict.fromkeys(cut))[:_PROMPTS]


def _drafters(trial: Trial) -> Iterator[tuple[str, str, int, Build | None]]:
    """Every drafter of the registry, and planted ones that are right as often as is useful."""
    for k in range(1, MOST_DRAFTS + 1):
        yield "mtp", "mtp", k, None
    for method in DRAFTERS:
        if method not in ("none", "mtp"):
            yield method, method, 3, None
    for right_for in range(MOST_DRAFTS):
        name = "never right" if right_for == 0 else f"right for {right_for}"
        yield name, "planted", MOST_DRAFTS, trial.planted(right_for=right_for)
    yield "always right", "planted", MOST_DRAFTS, trial.planted()
    yield "right at rate 0.7", "planted", MOST_DRAFTS, trial.planted(rate=0.7)


def divergences(plain: Decoded, other: Decoded) -> Iterator[Divergence]:
    """The first divergence of each prompt."""
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
        yield Divergence(prompt, place, at[0], at[1], from_draft)


def _equal(trial: Trial, decoded: Decoded, name: str) -> Item:
    tokens = sum(len(output) for output in decoded.outputs)
    drafts = sum(len(proposal.tokens) for proposal in decoded.proposals)
    found = trial.first(decoded)
    figure, bound = f"{tokens} tokens, {drafts} drafts", "every token equal"
    if found is None:
        return Item(name, Status.PASS, figure, bound)
    return Item(name, Status.FAIL, figure, bound, _place(found), _why(trial, found))


def _place(found: Divergence) -> str:
    return f"prompt {found.prompt}, output token {found.place}"


def _why(trial: Trial, found: Divergence) -> str:
    """What went wrong, by where the wrong token came from."""
    if found.wanted is None or found.found is None:
        return "the request ended at another token: a limit inside a block is not respected"
    if found.from_draft:
        return (
            "a draft was accepted that is not the target's best token: the acceptance rule is wrong"
        )
    return (
        "the target's own token after a block differs: its logits depend on the drafts, so that"
        " rejected drafts stay in the cache or a row sees tokens after it"
    )


def _alone(trial: Trial) -> Item:
    """Prompts on their own, against the batch of all."""
    name, bound = "plain decoding, batch 1 or all", "every token equal"
    prompts = trial.prompts[-_ALONE:]
    outputs = [decode(trial.model, [prompt], trial.params).outputs[0] for prompt in prompts]
    wanted = [tuple(trial.answers[prompt]) for prompt in prompts]
    figure = f"{sum(map(len, outputs))} tokens"
    if outputs == wanted:
        return Item(name, Status.PASS, figure, bound)
    cause = "a row's result depends on what else is in the batch: requests' caches are mixed up"
    return Item(name, Status.FAIL, figure, bound, cause=cause)


def _limits(trial: Trial) -> Item:
    """Every max_tokens of _LIMITS, with drafts that are all right."""
    prompt = trial.prompts[-1]
    each = [replace(trial.params, max_tokens=limit) for limit in _LIMITS]
    found = decode(
        trial.model, [prompt] * len(each), each, k=MOST_DRAFTS, build=trial.planted()
    ).outputs
    wanted = [tuple(trial.answers[prompt][:limit]) for limit in _LIMITS]
    return _inside(found, wanted, "length limit inside a block", "max_tokens")


def _end_token(trial: Trial) -> Item:
    """Each token of an output as the end token in turn: it ends there, whatever was accepted."""
    prompt = trial.prompts[-1]
    answer = tuple(trial.answers[prompt])[: MOST_DRAFTS + 1]
    each = [replace(trial.params, stop_token_ids=(token,)) for token in answer]
    found = decode(
        trial.model, [prompt] * len(each), each, k=MOST_DRAFTS, build=trial.planted()
    ).outputs
    wanted = [answer[: answer.index(token) + 1] for token in answer]
    return _inside(found, wanted, "end token inside a block", "the end token")


def _inside(
    found: Sequence[tuple[int, ...]], wanted: Sequence[tuple[int, ...]], name: str, what: str
) -> Item:
    wrong = [i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b]
    figure, bound = f"{len(found) - len(wrong)} of {len(found)}", "output ends there"
    if not wrong:
        return Item(name, Status.PASS, figure, bound)
    cause = f"{what} inside a block is not respected: accepted drafts after it are put out"
    return Item(name, Status.FAIL, figure, bound, f"case {wrong[0] + 1}", cause)


def _in_fp32(context: Context) -> Item:
    """The fast mode on all prompts, from the runs that the acceptance check uses as well."""
    corpus, k = context.corpus, max(context.options.ks)
    return _classified(
        corpus.model, corpus.plain, corpus.speculative(k), f"fast fp32, mtp, k={k}", corpus.texts
    )


def _in_bf16(context: Context, new_tokens: int) -> Item:
    """Half of the prompts in bf16."""
    model = context.loaded(LoadOptions(context.options.device, "bfloat16")).model
    params = SamplingParams(max_tokens=new_tokens)
    prompts = list(context.corpus.prompts[:_PROMPTS])
    k = max(context.options.ks)
    plain = decode(model, prompts, params)
    other = decode(model, prompts, params, method="mtp", k=k)
    return _classified(model, plain, other, f"bf16, mtp, k={k}", None)


def _classified(
    model: Model, plain: Decoded, other: Decoded, name: str, texts: Texts | None
) -> Item:
    """Near-ties pass, by noise that is measured here; anything else is a fault."""
    noise = measured_noise(model, plain)
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
        return Item(name, Status.PASS, figure, bound)
    margin, first = max(faults, key=lambda fault: fault[0])
    cause = (
        f"the target prefers its token by {margin:.3g}, far above what rounding can change: a draft"
        " was accepted wrongly, or the cache holds what it should not"
    )
    return Item(name, Status.FAIL, figure, bound, _place(first), cause)


@torch.inference_mode()
def _margin(model: Model, plain: Decoded, found: Divergence) -> float:
    """By how much the target, after plain decoding's text, prefers its token to the other one."""
    if found.wanted is None or found.found is None:
        return float("inf")
    request = plain.requests[found.prompt]
    before = (*request.prompt, *request.output[: found.place])
    _, after = target_states(model, Texts((Text(before, len(request.prompt)),)))
    logits = model.head.logits(after[-1:])[0]
    return float(logits[found.wanted] - logits[found.found])
