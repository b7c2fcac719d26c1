"""Faults of the runtime itself, each planted by replacing one of its functions: bugs of an engine
that runs a good bundle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from faults.run_faults import DRAFTER_FAULTS, KeepsOneProbability
from mtp_export.verify.evidence import noise
from mtp_kernels.batch_layout import BatchLayout, StateLayout
from mtp_kernels.gated_delta import DeltaState
from mtp_runtime import engine, teacher_forcing
from mtp_runtime.acceptance import ACCEPTANCE_RULES
from mtp_runtime.acceptance.base import Verdict
from mtp_runtime.acceptance.exact import accept_best
from mtp_runtime.cache import PageAllocator, lay_out
from mtp_runtime.drafters import DRAFTERS
from mtp_runtime.layers import gated_delta_net, operators
from mtp_runtime.models import compiled
from mtp_runtime.request import Request, TokenEvent
from mtp_runtime.sampling import SamplingParams, probabilities_of

Plant = pytest.MonkeyPatch
advance = PageAllocator.advance


@dataclass(frozen=True)
class RuntimeFault:
    """A fault, the check that must name it, and words that it must say."""

    name: str
    plant: Callable[[Plant], None]
    caught_by: str
    cause: str
    seen_as: str = ""


def accepts_one_too_many(drafts: Any, best: Any) -> Verdict:
    found = accept_best(drafts, best)
    accepted = min(found.accepted + 1, len(drafts))
    return Verdict(accepted, best[accepted])


def bonus_of_the_first_row(drafts: Any, best: Any) -> Verdict:
    return Verdict(accept_best(drafts, best).accepted, best[0])


def leaky(
    cache: Any, sequences: Any, spans: Any, device: torch.device, states: Any = None
) -> BatchLayout:
    """A layout without causality: every row sees all rows of its step."""
    layout = lay_out(cache, sequences, spans, device)
    counts = torch.tensor([end - start for start, end in spans])
    return BatchLayout(
        positions=layout.positions,
        slots=layout.slots,
        page_table=layout.page_table.repeat_interleave(counts, dim=0),
        kv_lens=layout.kv_lens.repeat_interleave(counts),
        cu_q=torch.arange(len(layout.positions) + 1, dtype=torch.int32),
    )


def never_ends_inside(request: Request, tokens: Any, from_draft: int, logprobs: Any) -> None:
    """Put out a whole block before looking for the request's end."""
    for index, token in enumerate(tokens):
        request.tokens.append(token)
        request.metrics.output_tokens += 1
        event = TokenEvent(request.request_id, token, "", False, int(index < from_draft))
        request.events.append(event)
    ends = [request._reason_to_finish(token) for token in tokens]
    request.finish_reason = next((end for end in ends if end is not None), None)


def blocks_without_end(plant: Plant) -> None:
    plant.setattr(Request, "commit", never_ends_inside)
    plant.setattr(
        engine.Engine,
        "_draft_count",
        lambda self, r, length: length * bool(r.output),
    )


def always_accepts(block: Any, choices: Any) -> Verdict:
    """Accept every draft, whatever the target's distribution."""
    count = len(block.draft.tokens)
    return Verdict(count, choices.draw(block.target_probs[count]))


def hot(logits: Any, params: SamplingParams) -> Any:
    """Probabilities at another temperature and without a nucleus."""
    return probabilities_of(logits, replace(params, top_p=1.0, temperature=3.0))


def later_chunks_are_off(cache: Any, sequences: Any, spans: Any, device: torch.device) -> Any:
    """Positions of a chunk that does not start a prompt are one too large."""
    layout = lay_out(cache, sequences, spans, device)
    late = torch.cat([torch.full((end - start,), start > 1) for start, end in spans])
    return replace(layout, positions=layout.positions + late.long())


def caches_mixed_up(cache: Any, sequences: Any, spans: Any, device: torch.device) -> Any:
    """Each request of a batch reads the pages of the next one."""
    layout = lay_out(cache, sequences, spans, device)
    return replace(layout, page_table=layout.page_table.roll(1, dims=0).contiguous())


def not_replayed(pages: Any, sequences: Any, spans: Any, certain: Any) -> StateLayout | None:
    """States go on without the drafts that were accepted."""
    layout = advance(pages, sequences, spans, certain)
    return layout and replace(layout, replayed=torch.zeros_like(layout.replayed))


def begun_with_anothers(plant: Plant) -> None:
    """States of sequences that begin are what others left there, and at first zeros."""
    made = DeltaState.empty

    def zeros(*arguments: Any) -> DeltaState:
        state = made(*arguments)
        for tensor in (state.states, state.inputs, state.gates):
            tensor.zero_()
        return state

    plant.setattr(DeltaState, "empty", zeros)
    for module in (compiled, gated_delta_net):
        plant.setattr(module, "clear_new", lambda *arguments: None)


def attention_off(plant: Plant) -> None:
    """Attention of torch layers is a hundredth too large."""
    real = operators.verify_attention

    def off(*arguments: Any, **options: Any) -> Any:
        out, *rest = real(*arguments, **options)
        return (out * 1.01, *rest)

    plant.setattr(operators, "verify_attention", off)


def exchanged(module: Any, name: str, value: object) -> Callable[[Plant], None]:
    """Planting of one function in place of another."""
    return lambda plant: plant.setattr(module, name, value)


def as_drafter(build: Any) -> Callable[[Plant], None]:
    drafter = replace(DRAFTERS["mtp"], build=build)
    return lambda plant: plant.setitem(DRAFTERS, "mtp", drafter)


def exact_but(**changes: Any) -> Callable[[Plant], None]:
    """Planting of parts of the exact acceptance rule."""
    rule = replace(ACCEPTANCE_RULES["exact"], **changes)
    return lambda plant: plant.setitem(ACCEPTANCE_RULES, "exact", rule)


RUNTIME_FAULTS: tuple[RuntimeFault, ...] = (
    *(RuntimeFault(f"drafter: {f.name}", as_drafter(f.build), "acceptance", f.cause, f.seen_as)
      for f in DRAFTER_FAULTS),
    RuntimeFault("drafter: wrong proposal distribution", as_drafter(KeepsOneProbability),
                 "sampling", "kept the drawn token's probability alone", "xLLM 2175"),
    RuntimeFault("one draft too many is accepted",
                 exact_but(accept_greedy=accepts_one_too_many), "greedy",
                 "a draft was accepted that is not the target's best token"),
    RuntimeFault("the token after a block is another row's",
                 exact_but(accept_greedy=bonus_of_the_first_row), "greedy",
                 "the target's own token after a block differs"),
    RuntimeFault("rows of a block see later drafts", exchanged(engine, "lay_out", leaky), "greedy",
                 "its logits depend on the drafts"),
    RuntimeFault("length limit and end token passed over", blocks_without_end, "greedy",
                 "the end token inside a block is not respected"),
    RuntimeFault("every sampled draft is accepted",
                 exact_but(accept=always_accepts),
                 "sampling", "acceptance is not exact"),
    RuntimeFault("nucleus cut wrongly", exact_but(distribution=hot), "sampling",
                 "the nucleus is cut wrongly"),
    RuntimeFault("a mask that leaks", exchanged(teacher_forcing, "lay_out_whole", leaky),
                 "controls",
                 "a later token changes earlier logits"),
    RuntimeFault("later chunks of a prompt at wrong positions",
                 exchanged(noise, "lay_out_whole", later_chunks_are_off), "paths",
                 "positions or cache of a later chunk are off"),
    RuntimeFault("requests of a batch read each other's cache",
                 exchanged(noise, "lay_out_whole", caches_mixed_up), "paths",
                 "caches are mixed up"),
    RuntimeFault("attention backend off by a hundredth", attention_off, "paths",
                 "does not compute what its float64 reference does"),
)  # fmt: skip
# Of a model whose layers keep a state per sequence.
STATE_FAULTS: tuple[RuntimeFault, ...] = (
    RuntimeFault("accepted drafts are not in the state",
                 exchanged(PageAllocator, "advance", not_replayed), "greedy",
                 "rejected drafts stay in the cache or in a state"),
    RuntimeFault("a state begins with another request's", begun_with_anothers, "paths",
                 "caches are mixed up"),
)  # fmt: skip
