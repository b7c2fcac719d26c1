"""The page: one file that loads nothing, and driven in a browser where there is one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve.browser import PROGRAM, Browser
from serve.running import Client, Running, wait_for

UNTIL_ENDED = """new Promise(done => setInterval(() => {
  if (/^(Ended|Stopped)/.test(document.getElementById("note").textContent)) done();
}, 20))"""


def test_it_loads_nothing_from_elsewhere(client: Client) -> None:
    reply = client.ask("GET", "/")
    page = reply.body.decode()
    assert reply.status == 200 and reply.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in reply.headers["content-security-policy"]
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
