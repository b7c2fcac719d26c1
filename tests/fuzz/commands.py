"""Commands that read mutated inputs, each with the oracles of its result. A new one is one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from xml.etree import ElementTree

from cases import Outcome
from fuzz import network, oracle, resuming, serving
from fuzz.lab import FOREIGN, PAIRS, Lab, calibrate_arguments, tune_arguments
from fuzz.mutators.special_files import SECRET
from fuzz.sandbox import Finding, Sandbox
from fuzz.tensors import check_equal, read_tensors

_TARGETS = ("hf", "xllm", "lightllm", "paddlenlp")
_PAIRS = (
    ("bf16", "bf16"),
    ("a8w8_fp8", "a8w8_fp8"),
    ("weight_only_int8", "weight_only_int8"),
    ("weight_only_int4", "weight_only_int8"),
    ("a8w8_fp8_wint4", "a8w8_fp8"),
    ("weight_only_nvfp4", "weight_only_nvfp4"),
    ("a4w4_nvfp4", "bf16"),
    ("weight_only_nvfp4", "a8w8_fp8"),
    ("weight_only_mxfp4", "weight_only_mxfp4"),
    ("a8w8_mxfp8", "a8w8_mxfp8"),
)
_FOREIGN = tuple(f"foreign {method}" for method in FOREIGN)
_STACKED = ("foreign mlx", "foreign quark, fused experts")  # experts of a layer in one tensor
_COUNTED = tuple(one for one in _FOREIGN if one not in _STACKED)
_OF_A_VERIFICATION = (0, 3, 4, 6, 7)  # exit codes
_ITS_OWN_FAULT = "mtp-export itself failed here"  # as verify reports an internal error
# Items in which verify judges what travels along as it is, whatever it is worth.
_OF_THE_SOURCE = ("tokenizer", "yarn's attention scale")
_PLACED = ((), ("--tp", "4"), ("--tp", "16", "--nodes", "2", "--head", "10.0.0.1"))
_GENERATED = ("--max-new-tokens", "3", "--json")


@dataclass(frozen=True)
class Command:
    """A command: the subjects it reads, how often it is drawn, and what runs and judges it.

    writes: the folder of the input that it may change, if any. starts_threads: those of its clients
    do not live on in a fork, so that it only ever runs in children.
    """

    subjects: tuple[str, ...]
    weight: int
    run: Callable[[Sandbox, Random, Lab], None]
    writes: str = ""
    starts_threads: bool = False


def _inspect(sandbox: Sandbox, random: Random, lab: Lab) -> None:
    inside = random.choice(("main", "mtp")) if sandbox.bundle.exists() else ""
    folder = sandbox.bundle / inside if inside else sandbox.source
    outcome = sandbox.run("inspect", folder, "--json")
    if outcome.code == 0:
        facts = _json_of(outcome)
        stored = read_tensors(folder)
        found = (facts["tensors"], facts["size_bytes"])
        if found != (len(stored), sum(len(tensor.data) for tensor in stored.values())):
            raise Finding("wrong bytes", "inspect", str(found))


def _export(sandbox: Sandbox, random: Random, lab: Lab) -> None:
    target = random.choice(_TARGETS)
    parts = random.choice((("main", "mtp"), ("main", "mtp"), ("mtp",)))
    link = random.choice(("auto", "copy"))
    sums = random.choice(("all", "written"))
    options = ("--target", target, "--part", "both" if len(parts) == 2 else "mtp", "--quiet")
    arguments = ("--input-dir", sandbox.source, "--output-dir", sandbox.output, *options)
    outcome = sandbox.run(*arguments, "--link", link, "--checksums", sums, "--workers", "2")
    if outcome.code:
        oracle.check_nothing_whole(sandbox.output)
        return
    oracle.check_export(sandbox.source, sandbox.output, target, parts)
    if len(parts) == 2 and random.random() < 0.4:
        _check_as_good(sandbox, random, lab)


def _check_as_good(sandbox: Sandbox, random: Random, lab: Lab) -> None:
    """Check that verify passes an accepted export, and that generate runs it or says why not."""
    # Changed weights may well be worth a word; a file that contradicts another may not be left.
    same = read_tensors(sandbox.source) in lab.good_tensors
    level = ("--level", "weights" if same else "files", "--source", sandbox.source)
    _check_verified(sandbox, *level)
    method = random.choice(("mtp", "none"))
    prompts = ("--prompt", "ab", "--speculate-method", method)
    sandbox.run("generate", sandbox.output, *prompts, *_GENERATED)


def _check_verified(sandbox: Sandbox, *options: object) -> None:
    """Check that verify passes what a command accepted and wrote."""
    shown = ("--workers", "1", "--json", "--quiet")
    outcome = sandbox.run("verify", sandbox.output, *shown, *options)
    if outcome.code == 7:
        found = _failures(outcome.out)
        failed = [item for item in found if not any(word in item for word in _OF_THE_SOURCE)]
        if failed:
            item = failed[0].partition(":")[0]
            raise Finding("contradiction", f"verify: {item}", "\n".join(failed))
    elif outcome.code:
        raise Finding("contradiction", f"verify: {outcome.err[:80]}", outcome.err)


def _failures(report: str | bytes) -> list[str]:
    """Return the items of a JSON report that failed, with their causes."""
    checks = json.loads(report)["checks"]
    items = [item for check in checks for item in check["items"] if item["status"] == "fail"]
    causes = [f"{item['name']}: {item['cause']}" for item in items]
    own = [cause for cause in causes if _ITS_OWN_FAULT in cause]
    if own:
        raise Finding("internal error", f"in verify: {own[0][:120]}", "\n".join(own))
    return causes


def _quantize_options(random: Random) -> tuple[object, ...]:
    base, mtp = random.choice(_PAIRS)
    scope = random.choice(
        [
            *(("--int4-scope", name) for name in ("experts", "all", "linears")),
            *(("--int8-scope", name) for name in ("mlps", "linears")),
        ]
    )
    target = ("--target", random.choice(("hf", "vllm", "sglang")))
    head = ("--head-quant", random.choice(("keep", "weight_only_int8")))
    return ("--base-quant", base, "--mtp-quant", mtp, "--group-size", "32", *scope, *head, *target)


def _dry_run(sandbox: Sandbox, random: Random, lab: Lab) -> None:
    source = sandbox.bundle if sandbox.bundle.exists() else sandbox.source
    outcome = sandbox.run(
        *("quantize", "--input-dir", source, "--output-dir", sandbox.output, "--dry-run"),
        *(*_quantize_options(random), "--json"),
    )
    if outcome.code == 0:
        _json_of(outcome)
    if sandbox.output.exists():
        raise Finding("outside", "a dry run wrote", str(list(sandbox.output.rglob("*"))))


def _quantize(sandbox: Sandbox, random: Random, lab: Lab) -> None:
    source = sandbox.bundle if sandbox.bundle.exists() else sandbox.source
    options = (*_quantize_options(random), "--workers", "1", "--quiet")
    arguments = ("quantize", *options, "--input-dir")
    outcome = sandbox.run(*arguments, source, "--output-dir", sandbox.output)
    if outcome.code:
        oracle.check_nothing_whole(sandbox.output)
        return
    _check_verified(sandbox, "--level", "files")
    if source == sandbox.source:
        again, reference = sandbox.folder / "again", sandbox.folder / "reference"
        oracle.rewrite(source, again)
        outcome = sandbox.run(*arguments, again, "--output-dir", reference)
        if outcome.code:
            raise Finding("contradiction", "a rewriting is refused", outcome.err)
        oracle.check_quantized(source, sandbox.output, reference)


def _carried(sandbox: Sandbox, random: Random, lab: Lab) -> None:
    """Codes into blocks of GGUF files."""
    base = random.choice(("q4_0", "q4_0", "q8_0", "q5_0"))
    pair = ("--base-quant", base, "--mtp-quant", "q8_0", "--allow-untested-pair")
    target = ("--target", "llama.cpp", "--pre-tokenizer", "none", "--workers", "1", "--quiet")
    where = ("--input-dir", sandbox.bundle, "--output-dir", sandbox.output)
    outcome = sandbox.run("quantize", *pair, *target, *where)
    if outcome.code:
        oracle.check_nothing_whole(sandbox.output)
    else:
        _check_verified(sandbox, "--level", "files")


def _verify(level: str) -> Callable[[Sandbox, Random, Lab], None]:
    def run(sandbox: Sandbox, random: Random, lab: Lab) -> None:
        reports = {name: sandbox.folder / f"report.{name}" for name in ("json", "xml", "html")}
        wanted = ("--report", reports["json"], "--junit", reports["xml"], "--html", reports["html"])
        source = ("--source", sandbox.source) if random.random() < 0.4 else ()
        options = (*wanted, *source, "--level", level, "--quiet", "--workers", "1")
        outcome = sandbox.run("verify", sandbox.bundle, *options, "--max-new-tokens", "2")
        if outcome.code not in (0, 7):
            return
        missing = [name for name, path in reports.items() if not path.is_file()]
        if missing:
            raise Finding("report", "is not written", f"{missing}\n{outcome.err}")
        ElementTree.parse(reports["xml"])
        failed = _failures(reports["json"].read_bytes())
        if bool(failed) != (outcome.code == 7):
            raise Finding("report", "does not say what the exit code says", str(failed))
        if outcome.code == 0 and (claims := list(oracle.false_claims(sandbox.bundle))):
            raise Finding("missed damage", claims[0][0], "\n".join(map(str, claims[:10])))

    return run


def _foreign(sandbox: Sandbox, random: Random, lab: Lab) -> None:
    """Verify a checkpoint of somebody else's, which makes no claims but its headers and config."""
    level = random.choice(("files", "weights"))
    source = ("--source", lab.input("bf16") / "source") if random.random() < 0.2 else ()
    options = ("--level", level, *source, "--json", "--quiet", "--workers", "1")
    outcome = sandbox.run("verify", sandbox.source, *options)
    if outcome.code not in _OF_A_VERIFICATION:
        raise Finding("exit", f"verify {outcome.code}", outcome.err)
    if outcome.code in (0, 7) and bool(_failures(outcome.out)) != (outcome.code == 7):
        raise Finding("report", "does not say what the exit code says", outcome.out[:4000])
    if outcome.code == 0:
        read_tensors(sandbox.source)  # which safetensors' own reader must take


def _gguf(sandbox: Sandbox, random: Random, lab: Lab) -> None:
    """Look at a GGUF file of others, or at a bundle of such files, in one of several ways."""
    place = sandbox.bundle if sandbox.bundle.exists() else sandbox.source
    files = sorted(place.glob("*.gguf"))
    if files and random.random() < 0.5:
        place = files[0]
    what = random.choice(("inspect", "verify", "verify", "generate"))
    if what == "inspect" and not sandbox.bundle.exists():
        outcome = sandbox.run("inspect", place, "--json")
        if outcome.code == 0:
            _json_of(outcome)
    elif what == "generate":
        sandbox.run("generate", place, "--prompt", "ab", *_GENERATED)
    else:
        level = random.choice(("files", "weights"))
        source = ("--source", lab.input("bf16") / "source") if random.random() < 0.5 else ()
        options = ("--level", level, *source, "--json", "--quiet", "--workers", "1")
        outcome = sandbox.run("verify", place, *options)
        if outcome.code not in _OF_A_VERIFICATION:
            raise Finding("exit", f"verify {outcome.code}", outcome.err)
        if outcome.code in (0, 7) and bool(_failures(outcome.out)) != (outcome.code == 7):
            raise Finding("report", "does not say what the exit code says", outcome.out[:4000])


def _generate(sandbox: Sandbox, random: Random, lab: Lab) -> None:
    prompts = sandbox.input / "prompts.jsonl"
    method = random.choice(("mtp", "none", "inference_with_reference"))
    given = ("--prompts", prompts) if prompts.exists() else ("--prompt", "ab")
    folder = sandbox.bundle if sandbox.bundle.exists() else sandbox.source
    outcome = sandbox.run("generate", folder, *given, "--speculate-method", method, *_GENERATED)
    if outcome.code == 0:
        _json_of(outcome)


def _graft(sandbox: Sandbox, random: Random, lab: Lab) -> None:
    main = sandbox.input / "quantized"
    if files := [*main.glob("*.gguf")]:
        scheme, target = random.choice(("bf16", "q8_0")), "llama.cpp"
    else:
        scheme = random.choice(("bf16", "bf16", "bf16", "a8w8_fp8", "weight_only_int8"))
        target = "sglang" if scheme != "bf16" else random.choice(("hf", "vllm", "sglang"))
    options = ("--mtp-quant", scheme, "--target", target, "--link", "copy", "--workers", "1")
    folders = ("--main", main, "--mtp", sandbox.source, "--output-dir", sandbox.output)
    outcome = sandbox.run("graft", *folders, *options, "--quiet")
    if outcome.code:
        oracle.check_nothing_whole(sandbox.output)
        return
    check_equal(read_tensors(sandbox.output / "main"), read_tensors(main), "grafted main")
    for path in files:
        if (sandbox.output / "main" / path.name).read_bytes() != path.read_bytes():
            raise Finding("wrong bytes", "a GGUF file that a graft leaves as it is", path.name)
    oracle.check_claims(sandbox.output)
    _check_verified(sandbox, "--level", "files")
    if not files and random.random() < 0.3:  # those have a tensor that is not decoded
        prompts = ("--prompt", "ab", "--speculate-method", "mtp")
        sandbox.run("generate", sandbox.output, *prompts, *_GENERATED)


def _push(sandbox: Sandbox, random: Random, lab: Lab) -> None:
    part = random.choice(("both", "mtp"))
    server, environment = network.hub(sandbox.folder / "again")
    sandbox.asks_servers = True
    with network.serving(server, sandbox.input / "answers.json", environment):
        arguments = ("push", sandbox.bundle, network.NAME, "--unverified", "--part", part)
        outcome = sandbox.run(*arguments, "--quiet")
        found = network.pushed(server)
    if any(SECRET.read_bytes().strip() in data for data in found.values()):
        raise Finding("leak", "a file from outside the bundle", "pushed")
    if outcome.code == 0:
        folder = sandbox.bundle if part == "both" else sandbox.bundle / part
        files = [path for path in folder.rglob("*") if path.is_file() and path.name != "LICENSE"]
        wanted = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
        wrong = [name for name, data in wanted.items() if found.get(name) != data]
        if wrong:
            raise Finding("wrong bytes", "pushed", ", ".join(wrong[:10]))


def _remote(sandbox: Sandbox, random: Random, lab: Lab) -> None:
    part = random.choice(("main", "mtp", "both"))
    if random.random() < 0.5:
        server, environment = network.hub(sandbox.folder / "again")
        server.serve(network.NAME, sandbox.source)
        address = f"hf://{network.NAME}"
    else:
        server, environment = network.store(sandbox.folder / "again", sandbox.source)
        address = f"s3://{network.BUCKET}/source"
    sandbox.asks_servers = True
    with network.serving(server, sandbox.input / "answers.json", environment):
        arguments = ("--input-dir", address, "--output-dir", sandbox.output, "--part", part)
        outcome = sandbox.run(*arguments, "--quiet", "--workers", "1")
    if outcome.code:
        oracle.check_nothing_whole(sandbox.output)
    else:
        oracle.check_parts(sandbox.source, sandbox.output)


def _drafts(sandbox: Sandbox, random: Random, lab: Lab) -> None:
    method = random.choice(("eagle", "eagle3", "parallel_heads", "medusa"))
    if random.random() < 0.2:
        sandbox.run("verify", sandbox.bundle, "--level", "weights", "--quiet")
        return
    draft: tuple[object, ...] = ()
    if method == "medusa":
        method, draft = "parallel_heads", ("--draft-model", sandbox.input / "medusa")
    asked = ("--prompt", "ab", "--speculate-method", method, *draft, *_GENERATED)
    outcome = sandbox.run("generate", sandbox.bundle, *asked)
    if outcome.code == 0:
        _json_of(outcome)


def _launch(sandbox: Sandbox, random: Random, lab: Lab) -> None:
    # That of another layout is refused, which is as good an answer for a damaged bundle.
    engine = "paddlenlp" if _names_paddle(sandbox.bundle) else random.choice(("vllm", "sglang"))
    placed = random.choice(_PLACED)
    outcome = sandbox.run("launch", sandbox.bundle, "--engine", engine, *placed, "--json")
    if outcome.code == 0:
        _json_of(outcome)


def _names_paddle(bundle: Path) -> bool:
    manifest = bundle / oracle.MANIFEST
    return manifest.is_file() and b'"paddlenlp"' in manifest.read_bytes()


def _tune(sandbox: Sandbox, random: Random, lab: Lab) -> None:
    arguments = tune_arguments(sandbox.input, sandbox.output)
    dry = random.random() < 0.3
    outcome = sandbox.run(*arguments, *(("--dry-run",) if dry else ("--quiet",)))
    if outcome.code or dry:
        oracle.check_nothing_whole(sandbox.output)
        return
    main = read_tensors(sandbox.bundle / "main")
    check_equal(read_tensors(sandbox.output / "main"), main, "tuned main")
    oracle.check_claims(sandbox.output)
    _check_verified(sandbox, "--level", "files")


def _calibrate(sandbox: Sandbox, random: Random, lab: Lab) -> None:
    arguments = calibrate_arguments(sandbox.input, sandbox.output)
    dry, main = random.random() < 0.3, random.random() < 0.5
    options = (*(("--dry-run",) if dry else ("--quiet",)), *(("--calibrate-main",) if main else ()))
    options += ("--method", "awq") if random.random() < 0.3 else ()
    outcome = sandbox.run(*arguments, *options)
    if outcome.code or dry:
        oracle.check_nothing_whole(sandbox.output)
        return
    oracle.check_claims(sandbox.output)
    _check_verified(sandbox, "--level", "files")


def _serve(sandbox: Sandbox, random: Random, lab: Lab) -> None:
    statuses = serving.ask(sandbox.input, lab.input("served") / "source")
    sandbox.codes += [("serve", 0 if status == 200 else status) for status in statuses]


def _json_of(outcome: Outcome) -> dict[str, object]:
    try:
        value = json.loads(outcome.out)
    except ValueError:
        raise Finding("message", "--json is no JSON", outcome.out[:2000]) from None
    assert isinstance(value, dict)
    return value


COMMANDS: dict[str, Command] = {
    "inspect": Command(("fp8", "bf16", "qwen", "bundle", *PAIRS, *_COUNTED), 25, _inspect),
    "export": Command(("fp8", "bf16", "qwen"), 30, _export),
    "dry run": Command(("fp8", "bf16", "qwen", "bundle", "drafts"), 15, _dry_run),
    "quantize": Command(("fp8", "bf16", "qwen", "bundle", "drafts"), 5, _quantize),
    "carried": Command(("carried",), 5, _carried),
    "verify files": Command(("bundle", *PAIRS, "paddlenlp"), 10, _verify("files")),
    "verify weights": Command(("bundle", "paddlenlp"), 5, _verify("weights")),
    "verify foreign": Command((*_FOREIGN, "fp8", "bf16", "qwen"), 25, _foreign),
    "gguf": Command(("gguf", "gguf", "gguf bundle", "gguf in one"), 20, _gguf),
    "resume": Command(("unfinished",), 10, resuming.resume, writes="bundle"),
    "finish": Command(("shares",), 8, resuming.finish, writes="bundle"),
    "graft": Command(("awq", "gptq", "compressed", "modelopt", "gguf main"), 12, _graft),
    "push": Command(("hub",), 8, _push, starts_threads=True),
    "remote": Command(("hub",), 8, _remote, starts_threads=True),
    "generate": Command(("prompts", "prompts", "prompts", "bundle", *PAIRS), 5, _generate),
    "drafts": Command(("drafts",), 8, _drafts),
    "launch": Command(("bundle", *PAIRS, "paddlenlp", "drafts"), 6, _launch),
    "tune": Command(("tuning",), 6, _tune, writes="work", starts_threads=True),
    "calibrate": Command(("calibration",), 4, _calibrate, writes="work", starts_threads=True),
    "serve": Command(("bodies",), 8, _serve, starts_threads=True),
}
