"""The page: one file that loads nothing, and driven in a browser where there is one."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from mtp_export.busy_machine import MOST_WAITING, Elapsed, beyond_line, busy_line, is_beyond
from mtp_export.serve import metrics
from serve.browser import FLAWS, PROGRAM, Browser
from serve.running import Client, Running, wait_for

BUSY = Elapsed(1.0, 0.2)
UNTIL_ENDED = """new Promise(done => setInterval(() => {
  if (/^(Ended|Stopped)/.test(document.getElementById("note").textContent)) done();
}, 20))"""


def test_it_loads_nothing_from_elsewhere(client: Client) -> None:
    reply = client.ask("GET", "/")
    page = reply.body.decode()
    assert reply.status == 200 and reply.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert '"words": "this machine is too busy to tell"' in page and "BUSY_RULE" not in page
    assert not re.search(r"""(?:src|href|url|import)\s*[=(]\s*["']?(?:https?:)?//""", page)
    named = set(re.findall(r'\b(?:at|show)\("([a-z-]+)"', page))
    assert named <= set(re.findall(r'\bid="([a-z-]+)"', page))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not PROGRAM:
        pytest.skip("there is no Chromium here")
    with Browser() as one:
        yield one


@pytest.mark.nightly
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("mode", ["text", "chat"])
def test_an_answer_streams_in_with_its_drafts_marked(
    mode: str, width: int, browser: Browser, client: Client, served: Running
) -> None:
    prompt = "Once upon a time"
    body = {"max_tokens": 60, "temperature": 0}
    if mode == "chat":
        messages = [{"role": "user", "content": prompt}]
        reply = client.post("/v1/chat/completions", messages=messages, **body)
        expected = reply.json["choices"][0]["message"]["content"]
    else:
        reply = client.post("/v1/completions", prompt=prompt, **body)
        expected = reply.json["choices"][0]["text"]
    browser.messages.clear()
    browser.size(width, 800, is_phone=width < 600)
    browser.open(served.url)
    values = {"prompt": prompt, "mode": mode, "tokens": "60", "temperature": "0"}
    for name, value in values.items():
        browser.run(f"document.getElementById({name!r}).value = {value!r}")
    browser.run("document.getElementById('send').click()")
    browser.run(UNTIL_ENDED)
    assert browser.run("document.getElementById('answer').textContent") == expected
    marked = browser.run("document.querySelectorAll('#answer .d1, #answer .d2').length")
    assert marked > 0
    browser.run("new Promise(done => setTimeout(done, 1200))")  # the figures come every second
    assert "draft 2" in browser.run("document.getElementById('positions').textContent")
    assert browser.run("document.getElementById('running').textContent") == "0"
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert browser.messages == []
    if folder := os.environ.get("PICTURES"):
        browser.picture(Path(folder) / f"page-{mode}-{width}.png")


@pytest.mark.nightly
def test_stop_hangs_up(browser: Browser, served: Running) -> None:
    browser.size(1280, 800, is_phone=False)
    browser.open(served.url)
    browser.run("document.getElementById('tokens').value = '3000'")
    browser.run("document.getElementById('send').click()")
    first = """new Promise(done => setInterval(() => {
      if (document.querySelectorAll('#answer span').length) done(); }, 20))"""
    browser.run(first)
    browser.run("document.getElementById('stop').click()")
    browser.run(UNTIL_ENDED)
    assert browser.run("document.getElementById('note').textContent") == "Stopped"
    wait_for(served.is_idle)


@pytest.mark.nightly
def test_a_refusal_is_shown(browser: Browser, served: Running) -> None:
    browser.open(served.url)
    browser.run("document.getElementById('tokens').value = '99999'")
    browser.run("document.getElementById('send').click()")
    browser.run("""new Promise(done => setInterval(() => {
      if (document.getElementById("note").className === "bad") done(); }, 20))""")
    assert "positions" in browser.run("document.getElementById('note').textContent")


@pytest.mark.nightly
def test_a_server_that_is_gone_is_said_to_be(browser: Browser, served: Running) -> None:
    """Beside the buttons, above a long answer."""
    browser.open(served.url)
    wait_until(browser, "document.getElementById('model').textContent === 'tiny'")
    browser.run("window.fetch = () => Promise.reject(new TypeError('Failed to fetch'))")
    browser.run("document.getElementById('send').click()")
    wait_until(browser, "document.getElementById('note').className === 'bad'")
    assert text_of(browser, "note") == "The server is not reached: its terminal says why."
    above = """document.getElementById('note').getBoundingClientRect().bottom
      <= document.getElementById('answer').getBoundingClientRect().top"""
    assert browser.run(above)


@pytest.mark.nightly
def test_a_wrong_key_is_told_from_none(browser: Browser, served: Running) -> None:
    browser.open(served.url)
    wait_until(browser, "document.getElementById('model').textContent === 'tiny'")
    browser.run("window.fetch = () => Promise.resolve(new Response('', { status: 401 }))")
    said = []
    for key in ("", "wrong"):
        browser.run(f"document.getElementById('key').value = {key!r}")
        browser.run("introduce()")
        said.append(text_of(browser, "note"))
    assert said == ["This server wants an API key.", "This is not the server's API key."]


def waiting_fifth(seconds: float) -> tuple[float, float]:
    """Seconds of computing, and of waiting for processors."""
    return 0.8 * seconds, 0.2 * seconds


def wait_until(browser: Browser, condition: str) -> None:
    """Wait until an expression of the page is true."""
    browser.run(f"new Promise(done => setInterval(() => {{ if ({condition}) done(); }}, 20))")


def text_of(browser: Browser, name: str) -> str:
    return str(browser.run(f"document.getElementById({name!r}).textContent"))


@pytest.mark.nightly
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_can_be_read(scheme: str, width: int, browser: Browser, served: Running) -> None:
    """An answer with its marks, a refusal, a command to copy: on a phone too, in the dark too."""
    browser.messages.clear()
    browser.size(width, 800, is_phone=width < 600)
    browser.scheme(scheme)
    browser.open(served.url)
    wait_until(browser, "document.querySelectorAll('#legend span').length")
    assert text_of(browser, "legend").endswith("draft 1draft 2")  # K of this server is 2
    browser.run("document.getElementById('copy').click()")
    browser.run("document.getElementById('send').click()")
    browser.run(UNTIL_ENDED)
    heights = """[...document.querySelectorAll('#legend span')]
      .map(mark => getComputedStyle(mark).borderBottomWidth)"""
    assert browser.run(heights) == ["1px", "2px"]
    assert browser.run(FLAWS) == []
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    if folder := os.environ.get("PICTURES"):
        browser.picture(Path(folder) / f"page-{scheme}-{width}.png")
    browser.run("note(unreached, true)")
    assert browser.run(FLAWS) == []
    browser.run("document.getElementById('note').style.color = '#777f89'")
    assert len(browser.run(FLAWS)) == 1  # it can fail
    assert browser.messages == []


@pytest.mark.nightly
def test_the_gain_is_measured_beside_plain_decoding(browser: Browser, served: Running) -> None:
    browser.size(1280, 800, is_phone=False)
    browser.open(served.url)
    wait_until(browser, "!document.getElementById('compare').hidden")
    browser.run("document.getElementById('compare').click()")
    note = "document.getElementById('note').textContent"
    wait_until(browser, f"/plain decoding|too busy/.test({note})")
    if "too busy" not in (said := text_of(browser, "note")):
        assert re.fullmatch(r"\d+\.\dx plain decoding \(\d+ tokens/s\), same text", said)
        assert text_of(browser, "own-gain") == said.split()[0]
    assert browser.run("document.querySelectorAll('#answer .d1').length") > 0
    if folder := os.environ.get("PICTURES"):
        browser.picture(Path(folder) / "page-compared.png")


@pytest.mark.nightly
def test_no_gain_is_told_of_a_busy_machine(
    browser: Browser, served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the server's threads waited for processors, in the words of generate."""
    scrapes = count(1.0)
    monkeypatch.setattr(metrics, "processor_seconds", lambda: waiting_fifth(next(scrapes)))
    browser.open(served.url)
    wait_until(browser, "!document.getElementById('compare').hidden")
    browser.run("document.getElementById('compare').click()")
    note = "document.getElementById('note').textContent"
    wait_until(browser, f"/plain decoding|too busy/.test({note})")
    assert text_of(browser, "note") == f"{busy_line(BUSY, 'rates and gain')}; same text"
    assert text_of(browser, "own-gain") == text_of(browser, "own-speed") == "–"


@pytest.mark.nightly
def test_the_page_has_the_rule_of_generate(browser: Browser, served: Running) -> None:
    browser.open(served.url)
    for waiting, gain, told in (
        (0.2, 1.5, busy_line(BUSY, "rates and gain")),
        (MOST_WAITING, 2.1, ""),
        (0.0, 2.3, beyond_line(2.3)),
    ):
        assert browser.run(f"untold({waiting}, {gain}, 2)") == told
        assert (Elapsed(1.0, waiting).is_busy or is_beyond(gain, 2.0)) is bool(told)


@pytest.mark.nightly
def test_acceptance_is_of_the_drafts_that_were_made(browser: Browser, served: Running) -> None:
    """Some blocks have fewer drafts than others."""
    counts = {
        "num_drafts_total": 4,
        "num_accepted_tokens_total": 4,
        'num_draft_tokens_per_pos_total{position="0"}': 4,
        'num_draft_tokens_per_pos_total{position="1"}': 2,
        'num_accepted_tokens_per_pos_total{position="0"}': 3,
        'num_accepted_tokens_per_pos_total{position="1"}': 1,
    }
    lines = [
        f"vllm:spec_decode_{name if '{' in name else name + '{}'} {count}"
        for name, count in counts.items()
    ]
    browser.open(served.url)
    body = json.dumps("\n".join(lines))
    browser.run(f"window.fetch = () => Promise.resolve(new Response({body}))")
    positions = "document.getElementById('positions').textContent"
    wait_until(browser, f"{positions}.endsWith('accepted per block1.00')")
    assert text_of(browser, "positions") == "draft 175.0 %draft 250.0 %accepted per block1.00"


@pytest.mark.nightly
def test_the_copied_command_asks_for_the_same(
    browser: Browser, client: Client, served: Running
) -> None:
    browser.open(served.url)
    wait_until(browser, "document.getElementById('model').textContent === 'tiny'")
    browser.run("document.getElementById('prompt').value = \"it's a\\nstory\"")
    browser.run("document.getElementById('key').value = 'secret'")
    browser.run("document.getElementById('copy').click()")
    command = browser.run("document.getElementById('curl').value")
    words = shlex.split(command.replace("\\\n", ""))
    assert words[:2] == ["curl", f"{served.url}/v1/completions"]
    assert words[5] == "Authorization: Bearer $MTP_EXPORT_API_KEY" and "secret" not in command
    body = json.loads(words[-1])
    assert body == {"model": "tiny", "prompt": "it's a\nstory", "max_tokens": 128, "temperature": 0}
    assert client.post("/v1/completions", **body).status == 200


@pytest.mark.nightly
def test_ctrl_enter_generates(browser: Browser, served: Running) -> None:
    browser.open(served.url)
    browser.run("document.getElementById('tokens').value = '4'")
    browser.run("""document.getElementById('prompt').dispatchEvent(
      new KeyboardEvent('keydown', { key: 'Enter', ctrlKey: true, bubbles: true }))""")
    browser.run(UNTIL_ENDED)
    assert text_of(browser, "own-tokens") == "4"
