"""Headless Chromium over its debugging pipe: pages opened, scripts run in them, pictures taken."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

PROGRAM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
_OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking"),
    "--remote-debugging-pipe",
)

# Texts of a page that have less contrast than 4.5 : 1 with what is behind them (WCAG 2, 1.4.3), and
# pictures that have no name.
FLAWS = """(() => {
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => {
    const [r, g, b] = parts(colour).map((c) => {
      c /= 255;
      return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor, own = parts(colour);
      if (own.length < 4 || own[3] > 0) return colour;
    }
    return getComputedStyle(document.body).backgroundColor;
  };
  const found = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode.textContent.trim(), owner = texts.currentNode.parentElement;
    const isShown = owner.getClientRects().length && !owner.closest(":disabled, script, style");
    if (!text || !isShown) continue;
    const style = getComputedStyle(owner), own = owner.ownerSVGElement ? style.fill : style.color;
    const [one, other] = [light(own), light(behind(owner))];
    const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    if (ratio < 4.5) found.push(ratio.toFixed(2) + ": " + text.slice(0, 40));
  }
  for (const picture of document.querySelectorAll("svg, img, canvas, [role=img]")) {
    const names = ["aria-label", "aria-labelledby", "alt", "aria-hidden"];
    const isNamed = names.some((name) => picture.getAttribute(name));
    if (!isNamed) found.push(picture.outerHTML.slice(0, 80));
  }
  return found;
})()"""


class Browser:
    """A browser with one page."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # The browser reads from 3 and writes to 4.
        start = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$@"'
        own = f"--user-data-dir={self._folder.name}"
        self._process = subprocess.Popen(
            ["bash", "-c", start, "browser", PROGRAM, *_OPTIONS, own, "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._received, self._number, self._session = b"", 0, ""
        self.messages: list[str] = []  # errors of the page
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        session = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = session["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    def size(self, width: int, height: int, *, is_phone: bool) -> None:
        """Give the page the size of a screen."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=is_phone,
        )

    def scheme(self, name: str) -> None:
        """Show pages as where light, or dark, is preferred."""
        feature = {"name": "prefers-color-scheme", "value": name}
        self._call("Emulation.setEmulatedMedia", features=[feature])

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.run("new Promise(r => document.readyState === 'complete' ? r() : onload = r)")

    def run(self, script: str) -> Any:
        """The value of an expression in the page, or what its promise comes to."""
        found = self._call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self, path: Path) -> None:
        """Write the whole page to a PNG file."""
        shot = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.messages.append(json.dumps(answer["params"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            chunk = os.read(self._in, 1 << 20)
            assert chunk, "the browser ended"
            self._received += chunk
        raw, _, self._received = self._received.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        return message
