"""Check `stream`: acceptance of a model that does not fit into memory. Every text goes through one
layer before the next is read; hidden states are kept on disk, so that a run resumes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from mtp_export.kept_states import keep_state
from mtp_export.progress import ProgressCallback
from mtp_export.verify.check import LEFT_OUT, WHOLE_CHECK, Item, measured, not_tested
from mtp_export.verify.context import Context
from mtp_export.verify.decoding.acceptance import diagnosed
from mtp_export.verify.decoding.pass_folder import CANNOT_KEEP, STATE_NAME, pass_folder
from mtp_export.verify.decoding.stream_cost import Cost, cost_of
from mtp_export.verify.evidence.blocks import walked
from mtp_export.verify.evidence.corpus import Corpus, judge
from mtp_export.verify.evidence.prompts import encoded
from mtp_export.verify.evidence.statistics import Estimate, ratio
from mtp_runtime.loading.same_files import require_same_files
from mtp_runtime.parallel.group import Group
from mtp_runtime.streaming import StreamedModel, open_streamed, pass_through
from mtp_runtime.teacher_forcing import PagedTexts, Text, Texts, overlaps


def run(context: Context) -> Iterator[Item]:
    """The cost, then acceptance by depth and the causes of a low one."""
    if not context.options.stream:
        yield not_tested(WHOLE_CHECK, "--stream was not asked for", data={LEFT_OUT: True})
        return
    texts, generated = texts_of(context)
    if not any(len(text.tokens) > 2 for text in texts.texts):
        yield not_tested(WHOLE_CHECK, "the texts are too short to draft in")
        return
    streamed = open_streamed(context.folder, context.options.device, context.mtp_folder)
    streamed.config.check_positions(max(len(text.tokens) for text in texts.texts))
    cost = cost_of(context, streamed, texts)
    yield measured("cost estimate", cost.shown(), cost.as_json())
    with context.show_progress(f"stream: {cost.shown()}", cost.read_bytes) as progress:
        before = states_of(context, streamed=streamed, texts=texts, cost=cost, progress=progress)
    with torch.inference_mode():
        corpus = corpus_of(streamed, texts, before)
        yield from _acceptance(corpus, max(context.options.ks), generated)
    yield from diagnosed(corpus, generated=generated)


def texts_of(context: Context) -> tuple[Texts, bool]:
    """Texts of the prompts file, and True if the model generated their ends: a line's completion is
    the served model's greedy answer. Without completions the prompts themselves are the texts, and
    drafts are compared with the target's own best tokens."""
    main, path = context.main, context.options.prompts
    assert main is not None, "a streamed pass is not started without a main part"
    if pairs := [(p, c) for p, c in context.given or () if c is not None]:
        prompts = encoded(main, path, (prompt for prompt, _ in pairs))
        answers = encoded(main, path, (answer for _, answer in pairs))
        both = zip(prompts, answers, strict=True)
        return Texts(tuple(Text((*p, *a), len(p)) for p, a in both)), True
    return Texts(tuple(Text(tokens, 1) for tokens in context.prompts)), False


@dataclass(frozen=True)
class _Division:
    """Texts of every rank, and the identity of the pass that takes them; rank 0 has opened the
    model already, and shows progress."""

    bundle: Path
    mtp: Path | None
    device: str
    workdir: Path | None
    texts: tuple[Texts, ...]
    identities: tuple[str, ...]
    opened: StreamedModel | None = None
    progress: Callable[[int], object] = int

    def __reduce__(self) -> tuple[Any, ...]:
        places = self.bundle, self.mtp, self.device, self.workdir
        return _Division, (*places, self.texts, self.identities)


def states_of(
    context: Context, streamed: StreamedModel, texts: Texts, cost: Cost, progress: ProgressCallback
) -> torch.Tensor:
    """Hidden states [T, d] after the last layer; resumes after the last finished one. Of several
    ranks each passes some of the texts through."""
    parts = divided([len(text.tokens) for text in texts.texts], context.ranks.size)
    own = tuple(Texts(tuple(texts.texts[index] for index in part)) for part in parts)
    each = cost.read_bytes // (streamed.config.layers + 1)
    division = _Division(
        context.folder,
        mtp=context.mtp_folder,
        device=context.options.device,
        workdir=context.options.workdir,
        texts=own,
        identities=tuple(_identity(context, part) for part in own),
        opened=streamed,
        progress=lambda layers: progress(layers * each),
    )
    found = context.ranks.everywhere(_passed, division)
    starts, states = texts.starts, torch.empty_like(found)
    order = [i for part in parts for i in part]
    rows = [torch.arange(starts[i], starts[i] + len(texts.texts[i].tokens)) for i in order]
    states[torch.cat(rows)] = found
    return states


def divided(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Divide texts over ranks, the longest first and each to the rank with the fewest tokens."""
    parts: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        rank = tokens.index(min(tokens))
        parts[rank].append(index)
        tokens[rank] += lengths[index]
    return [sorted(part) for part in parts]


@torch.inference_mode()
def _passed(group: Group, division: _Division) -> torch.Tensor:
    """Pass the own texts through all layers; return the states of every rank's on rank 0."""
    device = group.device(division.device)
    streamed = division.opened or open_streamed(division.bundle, device, division.mtp)
    require_same_files(streamed.opened.checkpoints, group)
    texts = division.texts[group.rank]
    counts = [len(part.tokens) for part in division.texts]
    if not texts.texts:
        return group.rows_to_first(torch.empty(0, streamed.config.hidden), counts)
    with pass_folder(division.workdir, division.identities[group.rank]) as folder:
        place = folder / STATE_NAME
        done, resumed = _resumed(place, (len(texts.tokens), streamed.config.hidden))
        x = streamed.embedded(texts.tokens) if resumed is None else resumed
        paged = PagedTexts.of(texts)
        chunks = paged.chunks(streamed.device)
        division.progress(done)
        layers = streamed.layers(done)
        for index in range(done, streamed.config.layers):
            pass_through(next(layers), x, paged, chunks)
            # Whole or not at all: a killed run leaves the state of this layer or of the one before.
            keep_state(place, {"layer": index + 1, "hidden": x}, CANNOT_KEEP)
            division.progress(1)
        return group.rows_to_first(x, counts)


def _identity(context: Context, texts: Texts) -> str:
    """Mark of a pass over this bundle, as it is now, and these texts."""
    identity = hashlib.sha256(repr(texts.texts).encode())
    for checkpoint in context.checkpoints.values():
        identity.update(checkpoint.config_sha256.encode())
        for shard in checkpoint.shards:
            identity.update(f"{shard.header_sha256} {shard.version}".encode())
    return identity.hexdigest()[:16]


def _resumed(place: Path, shape: tuple[int, int]) -> tuple[int, torch.Tensor | None]:
    """Return the last finished layer and the states after it; 0 and None without a whole state of
    this pass."""
    if not place.is_file():
        return 0, None
    try:
        state = torch.load(place, weights_only=True)
        layer, x = int(state["layer"]), state["hidden"]
    except (EOFError, KeyError, OSError, RuntimeError, TypeError, ValueError, UnpicklingError):
        return 0, None
    whole = isinstance(x, torch.Tensor) and x.shape == shape
    return (layer, x) if whole else (0, None)


def corpus_of(streamed: StreamedModel, texts: Texts, before: torch.Tensor) -> Corpus:
    """A corpus of texts and their hidden states, as if the whole model had computed them."""
    model = streamed.rest()
    prompts = tuple(text.tokens[: text.prompt_size] for text in texts.texts)
    return Corpus(
        model=model,
        prompts=prompts,
        new_tokens=0,
        given=texts,
        given_states=(before, model.head.normed(before)),
    )


def _acceptance(corpus: Corpus, depths: int, generated: bool) -> Iterator[Item]:
    following = None if generated else corpus.choices
    outputs = corpus.draft_outputs(depths)
    drafts = judge(
        corpus.modules(),
        texts=corpus.texts,
        anchors=corpus.anchors,
        states=outputs,
        following=following,
    )
    kind = "of generated text" if generated else "the target's own best token, on given text"
    blocks = walked(corpus.texts, corpus.anchors, drafts=drafts, k=depths)
    counts = blocks.conditional if generated else [None] * depths
    for depth in range(1, depths + 1):
        reached = drafts.reached(depth - 1) & drafts.room[depth - 1]
        hits = drafts.hit[depth - 1].double()
        every = ratio(corpus.by_text(hits, reached), corpus.by_text(torch.ones_like(hits), reached))
        name = f"draft {depth}, every position"
        if every is None:
            yield not_tested(name, "no draft reaches this depth")
            continue
        data = {"depth": depth, "conditional": every.as_json(), "against": kind}
        figure = f"{every.shown()} of {every.count}"
        block = counts[depth - 1]
        if block is not None:
            figure += f"; in blocks of k={depths} {block.shown()}"
            data["in_blocks"] = block.as_json()
        yield measured(name, figure, data)
        shared = _overlap(corpus, outputs[depth - 1], depth)
        yield measured(
            f"draft {depth}, sampling",
            f"sum of min(target, draft) {shared.shown()}",
            {"depth": depth, "overlap": shared.as_json()},
        )


def _overlap(corpus: Corpus, states: torch.Tensor, depth: int) -> Estimate:
    room = corpus.texts.room(corpus.anchors, depth)
    rows = corpus.states[1][(corpus.anchors.rows + depth)[room]]
    head = corpus.module_at(depth - 1).head
    values = torch.zeros(len(room), dtype=torch.float64)
    values[room] = overlaps(corpus.model.head, rows, head, head.normed(states[room])).cpu()
    found = ratio(corpus.by_text(values, room), corpus.by_text(torch.ones_like(values), room))
    assert found is not None, "there is room at this depth"
    return found
