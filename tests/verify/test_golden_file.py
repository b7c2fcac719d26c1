"""Golden files: as documented, equal to transformers' layers and to the counters of the engine,
only of bundles that pass; and the comparison on docs/engines.md notices drafts that are wrong."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from transformers import DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
)

from benchmarks.common.dequantized import write_dequantized
from cases import Outcome, export, read_json, read_tensors, run_program, tree
from faults.run_faults import concatenation_reversed
from mtp_export.verify.check import Check, Item, Level, failed, passed
from mtp_export.verify.evidence.decode import Proposal
from mtp_export.verify.report.golden import Drafts, Output
from mtp_runtime import LLM, SamplingParams
from mtp_runtime.models.load import Loaded, LoadOptions, load_model
from mtp_runtime.request import Request
from pages import python_of, rows_of, sections_of

ROOT = Path(__file__).resolve().parents[2]
FIXTURE = ROOT / "fixtures/deepseek-v3-tiny"
PAGE = ROOT / "docs/engines.md"
K, TOKENS = 3, 12
PROMPTS: list[dict[str, Any]] = [
    {"prompt": "def read(path):\n    "},
    {"prompt_token_ids": [0, 318, 823, 12, 508]},
    {"prompt": "0, 1, 2, 3, é 4,"},
]
CLOSE = 2e-4  # nats between two implementations in float32


@dataclass(frozen=True)
class Golden:
    """A golden file that was read, and the run that wrote it."""

    path: Path
    header: dict[str, Any]
    lines: list[dict[str, Any]]
    outcome: Outcome

    @classmethod
    def read(cls, path: Path, outcome: Outcome) -> Golden:
        header, *lines = map(json.loads, path.read_bytes().decode("ascii").splitlines())
        return cls(path, header, lines, outcome)


def one_check(patch: pytest.MonkeyPatch, status: str = "pass") -> None:
    """Leave one check, which passes or fails at once: these tests are of what comes after it."""
    check = Check("Planted", Level.FILES, (status,))
    patch.setattr("mtp_export.verify.CHECKS", {"planted": check})
    patch.setattr("mtp_export.verify.function_at", lambda place: _PLANTED[place])


def _passing(_: object) -> Iterator[Item]:
    yield passed("planted")


def _failing(_: object) -> Iterator[Item]:
    yield failed("planted", "a fault")


_PLANTED = {"pass": _passing, "fail": _failing}


def verify(bundle: Path, golden: Path, *options: object) -> Outcome:
    tokens = ("--max-new-tokens", TOKENS, "--k", f"1,{K}")
    return run_program("verify", bundle, "--golden", golden, *tokens, *options)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("asked") / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in PROMPTS))
    return path


@pytest.fixture(scope="module")
def golden(
    trained_bundle: Path, asked: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Golden]:
    path = tmp_path_factory.mktemp("golden") / "golden.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        one_check(patch)
        outcome = verify(trained_bundle, path, "--prompts", asked)
    assert outcome.code == 0, outcome.err
    yield Golden.read(path, outcome)


def documented(first: str) -> set[str]:
    """Keys in the table of the page whose first column has this head."""
    table = PAGE.read_text().split(f"| {first} | value |\n")[1].split("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines()]
    return {key for cell in cells for key in re.findall(r"`(\w+)`", cell)}


def test_it_is_as_documented(golden: Golden) -> None:
    assert set(golden.header) == documented("key of the header")
    for line in golden.lines:
        assert set(line) == documented("key of a prompt")
        assert {tuple(drafts) for drafts in line["drafts"]} == {
            ("token_ids", "logprobs", "accepted")
        }
        assert {tuple(own) for own in line["acceptance"]} == {("drafted", "accepted")}
    words = " ".join(cell for row in rows_of(sections_of(PAGE)["Golden files"]) for cell in row)
    for key in ("versions", "model", "contract", "units"):
        assert set(golden.header[key]) <= set(re.findall(r"`(\w+)`", words)), key
    assert "golden file: written" in golden.outcome.err


def test_the_header_says_whose_it_is(golden: Golden, trained_bundle: Path) -> None:
    header = golden.header
    assert (header["format"], header["format_version"]) == ("mtp-export golden", 1)
    assert (header["method"], header["k"], header["temperature"]) == ("mtp", K, 0)
    assert (header["dtype"], header["device"]) == ("float32", "cpu")
    assert header["max_new_tokens"] == TOKENS and header["prompts"] == len(golden.lines) == 3
    report = run_program("verify", trained_bundle, "--level", "files", "--json", "--quiet").out
    assert header["model"]["manifest_sha256"] == json.loads(report)["bundle"]["manifest_sha256"]
    config = read_json(trained_bundle / "main/config.json")
    assert header["model"]["model_type"] == config["model_type"]
    assert header["eos_token_ids"] == [config["eos_token_id"]]
    assert set(header["model"]["config_sha256"]) == {"main", "mtp"}
    manifest = read_json(trained_bundle / "mtp_export.json")
    assert header["model"]["identity"]["main"] == manifest["main_identity"]
    assert set(header["model"]["identity"]) == {"main", "mtp"}


def test_lists_are_as_long_as_the_text(golden: Golden) -> None:
    for number, (line, given) in enumerate(zip(golden.lines, PROMPTS, strict=True)):
        assert line["prompt"] == number and line["text"] == given.get("prompt")
        ids = line["token_ids"]
        assert len(line["logprobs"]) == len(line["margins"]) == len(line["drafts"]) == len(ids)
        assert line["finish_reason"] == ("length" if len(ids) == TOKENS else "stop")
        for at, drafts in enumerate(line["drafts"]):
            room = min(K, len(ids) - 2 - at) if line["finish_reason"] == "length" else None
            if room is not None:
                assert len(drafts["token_ids"]) == max(0, room)
            accepted = drafts["accepted"]
            assert drafts["token_ids"][:accepted] == ids[at + 1 : at + 1 + accepted]
            if accepted < len(drafts["token_ids"]):
                assert drafts["token_ids"][accepted] != ids[at + 1 + accepted]
    assert golden.lines[1]["prompt_token_ids"] == PROMPTS[1]["prompt_token_ids"]


class Transformers:
    """transformers' model of the fixture, and its decoder layer as the MTP module."""

    def __init__(self, folder: Path) -> None:
        self.main = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        config, number = self.main.config, self.main.config.num_hidden_layers
        tensors = {
            name.removeprefix(f"model.layers.{number}."): tensor.float()
            for name, tensor in read_tensors(folder).items()
            if name.startswith(f"model.layers.{number}.")
        }
        self.projection = tensors["eh_proj.weight"]
        self.norms = {}
        for name in ("enorm", "hnorm", "shared_head.norm"):
            self.norms[name] = DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.norms[name].load_state_dict({"weight": tensors[f"{name}.weight"]})
        self.layer = DeepseekV3DecoderLayer(config, number).eval()
        self.layer.load_state_dict(_of_layer(self.layer, tensors))

    @torch.inference_mode()
    def target(self, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [s, d] after the norm, and log-probabilities [s, vocab]."""
        hidden = self.main.model(torch.tensor([tokens])).last_hidden_state[0]
        return hidden, self.main.lm_head(hidden).log_softmax(-1)

    @torch.inference_mode()
    def drafts(self, tokens: Sequence[int], hidden: torch.Tensor, count: int) -> Any:
        """Best tokens after the last one, each fed with the one before, and log-probabilities."""
        fed, states, found = list(tokens[1:]), hidden[: len(tokens) - 1], []
        for _ in range(count):
            embedded = self.norms["enorm"](self.main.model.embed_tokens(torch.tensor(fed)))
            x = torch.cat([embedded, self.norms["hnorm"](states)], -1) @ self.projection.T
            out = self.norms["shared_head.norm"](self._through_layer(x))
            scores = self.main.lm_head(out[-1]).log_softmax(-1)
            best = int(scores.argmax())
            found.append((best, float(scores[best])))
            fed, states = [*fed, best], torch.cat([states, out[-1:]])
        return found

    def _through_layer(self, x: torch.Tensor) -> torch.Tensor:
        size = len(x)
        places = torch.arange(size)[None]
        mask = torch.full((size, size), -torch.inf).triu(1)[None, None]
        rotary = self.main.model.rotary_emb(x[None], places)
        out = self.layer(
            x[None], attention_mask=mask, position_ids=places, position_embeddings=rotary
        )
        return (out[0] if isinstance(out, tuple) else out)[0]


def _of_layer(layer: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors under the layer's names; transformers holds experts in one tensor per matrix."""
    state = {}
    for name, wanted in layer.state_dict().items():
        if name in tensors:
            state[name] = tensors[name]
            continue
        kind = name.removeprefix("mlp.experts.").removesuffix(".weight")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
        experts = [
            torch.cat([tensors[f"mlp.experts.{number}.{part}.weight"] for part in parts])
            for number in range(len(wanted))
        ]
        state[name] = torch.stack(experts)
    return state


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Transformers:
    return Transformers(write_dequantized(FIXTURE, tmp_path_factory.mktemp("dense")))


def test_tokens_and_drafts_are_those_of_transformers(
    golden: Golden, reference: Transformers
) -> None:
    """Every token, draft and log-probability, the drafts by recursion of a layer of transformers'
    own; drafts after a rejected one too."""
    rejected = 0
    for line in golden.lines:
        prompt, ids = line["prompt_token_ids"], line["token_ids"]
        hidden, scores = reference.target(prompt + ids)
        rows = scores[len(prompt) - 1 : -1]
        assert rows.argmax(-1).tolist() == ids
        best = rows.topk(2).values
        assert line["logprobs"] == pytest.approx(best[:, 0].tolist(), abs=CLOSE)
        assert line["margins"] == pytest.approx((best[:, 0] - best[:, 1]).tolist(), abs=CLOSE)
        for at, drafts in enumerate(line["drafts"]):
            end = len(prompt) + at + 1
            found = reference.drafts((prompt + ids)[:end], hidden, len(drafts["token_ids"]))
            assert drafts["token_ids"] == [token for token, _ in found]
            assert drafts["logprobs"] == pytest.approx([s for _, s in found], abs=CLOSE)
            rejected += drafts["accepted"] < len(drafts["token_ids"]) - 1
    assert rejected, "some drafts after a rejected one are compared too"


@pytest.fixture(scope="module")
def loaded(trained_bundle: Path) -> Loaded:
    """The good bundle's models."""
    return load_model(trained_bundle, LoadOptions(dtype="float32"))


def test_acceptance_is_what_the_engine_counts(
    golden: Golden, trained_bundle: Path, loaded: Loaded
) -> None:
    """With every number of drafts, though the file was made with one of them."""
    prompts = [line["prompt_token_ids"] for line in golden.lines]
    for k in range(1, K + 1):
        llm = LLM(
            trained_bundle,
            loaded=loaded,
            dtype="float32",
            speculate_method="mtp",
            speculate_max_draft_token_num=k,
        )
        outputs = llm.generate(prompts, SamplingParams(max_tokens=TOKENS))
        assert [list(o.token_ids) for o in outputs] == [line["token_ids"] for line in golden.lines]
        for position, share in enumerate(golden.header["acceptance"][str(k)]):
            drafted = sum(output.metrics.drafted[position] for output in outputs)
            accepted = sum(output.metrics.accepted[position] for output in outputs)
            assert (share["count"], share["value"]) == (drafted, pytest.approx(accepted / drafted))
        if k == K:
            for line, output in zip(golden.lines, outputs, strict=True):
                drafted = [own["drafted"] for own in line["acceptance"]]
                accepted = [own["accepted"] for own in line["acceptance"]]
                assert (drafted, accepted) == (output.metrics.drafted, output.metrics.accepted)


def test_the_same_again(
    golden: Golden, trained_bundle: Path, asked: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """The same bytes, and none of the bundle's have changed."""
    one_check(monkeypatch)
    before, again = tree(trained_bundle), tmp_path / "again.jsonl"
    outcome = verify(trained_bundle, again, "--prompts", asked, "--quiet")
    assert outcome.code == 0 and outcome.err == ""
    assert again.read_bytes() == golden.path.read_bytes()
    assert tree(trained_bundle) == before


def test_a_checkpoint_that_nobody_exported(
    golden: Golden, asked: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """It has the same lines; no manifest tells whose it is, but its tensors do."""
    one_check(monkeypatch)
    outcome = verify(FIXTURE, tmp_path / "golden.jsonl", "--prompts", asked)
    found = Golden.read(tmp_path / "golden.jsonl", outcome)
    assert found.lines == golden.lines
    assert found.header["model"]["manifest_sha256"] is None
    differing = {key for key in golden.header if golden.header[key] != found.header[key]}
    assert differing == {"model"}
    assert found.header["model"]["identity"] == golden.header["model"]["identity"]


def output_of(tokens: Sequence[int], drafts: Sequence[Drafts]) -> Output:
    request = Request(0, (1, 2), SamplingParams())
    request.commit(tokens, 0)
    return Output(request, tuple(drafts))


def test_a_draft_counts_up_to_the_end_of_the_text() -> None:
    proposal = Proposal(0, last=2, tokens=(7, 8, 9), logprobs=(-0.1, -0.2, -0.3))
    assert Drafts.of(proposal, [7, 8, 9, 4]) == Drafts((7, 8, 9), (-0.1, -0.2, -0.3), 3)
    assert Drafts.of(proposal, [7, 5, 9, 4]) == Drafts((7, 8, 9), (-0.1, -0.2, -0.3), 1)
    assert Drafts.of(proposal, [7, 8]) == Drafts((7, 8), (-0.1, -0.2), 2)
    assert Drafts.of(proposal, []) == Drafts.of(None, [7]) == Drafts((), (), 0)


def test_steps_are_counted_from_one_to_the_next() -> None:
    """Tokens 5 6 7 8 9: drafts after 5 are right twice, so that the step after that begins at 8."""
    scores = (0.0,) * 3
    after = [
        Drafts((6, 7, 1), scores, 2),
        Drafts((1, 1, 1), scores, 0),
        Drafts((1, 1, 1), scores, 0),
        Drafts((9,), scores[:1], 1),
        Drafts((), (), 0),
    ]
    output = output_of([5, 6, 7, 8, 9], after)
    assert output.counts(3) == [(2, 2), (1, 1), (1, 0)]
    assert output.counts(1) == [(3, 2)]  # after 5, 7 and 8


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (("--level", "files"), "--level files"),
        (("--level", "weights"), "--level weights"),
        (("--stream",), "--stream"),
        (("--share", "1/2", "--level", "weights", "--workdir", "w"), "--level weights"),
    ],
)
def test_other_levels_are_refused(
    options: Sequence[str], found: str, trained_bundle: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = verify(trained_bundle, tmp_path / "golden.jsonl", *options)
    assert outcome.code == 2
    assert outcome.err == (
        "mtp-export: error: A golden file holds what the whole model generates. Expected --golden"
        f" at level run, without --stream. Found --golden with {found}. Leave {found} out, or"
        " --golden.\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_no_input_is_overwritten(
    trained_bundle: Path, asked: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    one_check(monkeypatch)
    before, prompts = tree(trained_bundle), asked.read_bytes()
    link = tmp_path / "link.jsonl"
    link.symlink_to(asked)
    for place in (
        asked,
        link,
        trained_bundle / "golden.jsonl",
        trained_bundle / "main/config.json",
    ):
        outcome = verify(trained_bundle, place, "--prompts", asked)
        assert outcome.code == 2 and "must lie apart" in outcome.err, place
    same = ("--report", tmp_path / "x", "--quiet")
    assert verify(trained_bundle, tmp_path / "x", *same).code == 2
    assert verify(trained_bundle, tmp_path / "nowhere/golden.jsonl").code == 2
    assert (tree(trained_bundle), asked.read_bytes()) == (before, prompts)


def test_a_bundle_that_fails_has_none(
    trained_bundle: Path, asked: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """The file of an earlier run stays, and what is written beside it is nothing."""
    one_check(monkeypatch, "fail")
    path = tmp_path / "golden.jsonl"
    path.write_text("earlier")
    outcome = verify(trained_bundle, path, "--prompts", asked, "--quiet")
    assert outcome.code == 7
    assert "was not written: a golden file is of a model that passes" in " ".join(
        outcome.err.split()
    )
    assert path.read_text() == "earlier" and list(tmp_path.iterdir()) == [path]


def test_a_model_that_is_not_run_has_none(
    asked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_check(monkeypatch)
    bundle, path = tmp_path / "bundle", tmp_path / "golden.jsonl"
    assert export(FIXTURE, bundle, "--part", "main", "--quiet").code == 0
    outcome = verify(bundle, path, "--prompts", asked, "--quiet")
    assert outcome.code == 4
    assert "No golden file can be written" in outcome.err
    assert "there is no mtp part" in outcome.err
    assert not path.exists()


def test_random_prompts_without_a_tokenizer(
    trained_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their text is null; those of a bundle with one are the built-in texts."""
    from mtp_export.progress import silent
    from mtp_export.verify.context import Context
    from mtp_export.verify.evidence.prompts import BUILT_IN
    from mtp_export.verify.options import VerifyOptions
    from mtp_runtime.tokenizer import Tokenizer

    context = Context.open(VerifyOptions(trained_bundle), silent)
    assert tuple(context.prompt_texts.values()) == BUILT_IN
    monkeypatch.setattr(Tokenizer, "find", classmethod(lambda cls, folder: cls(folder, None)))
    context = Context.open(VerifyOptions(trained_bundle), silent)
    assert set(context.prompt_texts) == set(context.prompts)
    assert set(context.prompt_texts.values()) == {None}


# The comparison with llama.cpp's server that the page shows, with our runtime behind its protocol.


class Completions(BaseHTTPRequestHandler):
    """llama.cpp's /completion, answered by a runtime of ours."""

    llm: LLM

    def do_POST(self) -> None:
        assert self.path == "/completion"
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["temperature"] < 0 and asked["repeat_penalty"] == 1 and asked["return_tokens"]
        params = SamplingParams(max_tokens=asked["n_predict"], logprobs=asked["n_probs"])
        (output,) = self.llm.generate([asked["prompt"]], params)
        assert output.logprobs is not None
        answer = {
            "tokens": list(output.token_ids),
            "completion_probabilities": [
                {"id": own.token, "logprob": own.logprob} for own in output.logprobs
            ],
            "timings": {
                "draft_n": sum(output.metrics.drafted),
                "draft_n_accepted": sum(output.metrics.accepted),
            },
        }
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def compared(bundle: Path, golden: Path, **options: Any) -> list[str]:
    """Lines that the page's comparison prints of a bundle served so, for a golden file."""
    options = {"dtype": "float32", "speculate_max_draft_token_num": K} | options
    llm = LLM(bundle, speculate_method="mtp", **options)
    handler = type("Handler", (Completions,), {"llm": llm})
    server, printed = ThreadingHTTPServer(("127.0.0.1", 0), handler), io.StringIO()
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        text = python_of(PAGE, "/completion").replace(":8080", f":{server.server_port}")
        assert '"golden.jsonl"' in text
        text = text.replace('"golden.jsonl"', repr(str(golden)))
        with contextlib.redirect_stdout(printed):
            exec(compile(text, str(PAGE), "exec"), {})
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    return printed.getvalue().splitlines()


ACCEPTED = re.compile(r"accepted (\d+) of (\d+) drafts; golden (\d+) of (\d+)")


def test_the_pages_comparison_agrees_with_our_runtime(
    golden: Golden, trained_bundle: Path, loaded: Loaded
) -> None:
    printed = compared(trained_bundle, golden.path, loaded=loaded)
    for number in range(len(PROMPTS)):
        text, counts = printed[2 * number : 2 * number + 2]
        assert text == f"prompt {number}: equal up to its end, log-probabilities off by 0.00"
        match = ACCEPTED.fullmatch(counts)
        assert match is not None and match.group(1, 2) == match.group(3, 4)


def test_the_pages_comparison_notices_wrong_drafts(
    golden: Golden, trained_bundle: Path, tmp_path: Path
) -> None:
    """The halves of eh_proj exchanged: the text is the same, and next to no draft is accepted."""
    bundle = Path(shutil.copytree(trained_bundle, tmp_path / "bundle"))
    concatenation_reversed(bundle)
    printed = compared(bundle, golden.path)
    assert all("equal up to its end" in line for line in printed[::2])
    counts = [tuple(map(int, ACCEPTED.fullmatch(line).groups())) for line in printed[1::2]]  # type: ignore[union-attr]
    accepted, golden_accepted = sum(own[0] for own in counts), sum(own[2] for own in counts)
    assert accepted < 0.3 * golden_accepted


def test_the_pages_comparison_notices_another_text(
    golden: Golden, trained_bundle: Path, loaded: Loaded, tmp_path: Path
) -> None:
    lines = golden.path.read_text().splitlines()
    changed = json.loads(lines[1])
    changed["token_ids"][4] += 1
    path = tmp_path / "changed.jsonl"
    path.write_text("\n".join([lines[0], json.dumps(changed), *lines[2:]]))
    assert compared(trained_bundle, path, loaded=loaded)[0].startswith(
        "prompt 0: equal up to [4], "
    )
