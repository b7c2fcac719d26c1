"""The server and its routes by which models are read; uploads.py has those that write."""

from __future__ import annotations

import gzip
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import yaml

from .storage import Repository, StoredFile
from .uploads import UPLOAD_FAULTS, Uploads

CHUNK_BYTES = 1 << 18
SLOW_SECONDS = 0.02
# Faults, each for a number of requests or for all: what a request meets is said in Handler.
FAULTS = (
    *("ignored range", "shifted range", "encoded", "cut", "wrong bytes", "slow", "stalled"),
    *("too many requests", "unavailable", "forbidden", "other size", "other checksum"),
    *("other commit", "malformed tree"),
    *UPLOAD_FAULTS,
)


@dataclass(frozen=True)
class Request:
    """A request as it was served: with the body's bytes that were sent."""

    method: str
    path: str
    byte_range: str | None
    authorization: str | None
    host: str
    status: int
    sent_bytes: int


class HubServer(ThreadingHTTPServer):
    """The server; tests plant faults in it and read its log."""

    request_queue_size = 128  # readers connect at the same time; a refused connection waits seconds

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        self.repositories: dict[str, Repository] = {}
        self.token = "hf_secret"  # opens private and gated repositories, and writes
        self.reader_token = "hf_reader"  # opens them, and may not write
        self.log: list[Request] = []
        self.under_way = 0  # requests that are not in the log yet
        self.page_entries = 1000
        self.generation = 0  # of signed links; older ones have expired
        self.part_bytes = 5 << 20  # larger files are uploaded in parts
        self.xet_store: Path | None = None  # takes Xet uploads if there is one
        self.released = threading.Event()  # ends the waiting of stalled uploads
        self.during_upload: Callable[[], object] = lambda: None  # runs as bytes arrive
        self._store = tempfile.TemporaryDirectory(prefix="hub-server-")
        self._faults: dict[str, list[int]] = {}
        self._lock = threading.Lock()
        super().__init__(("127.0.0.1", port), Handler)  # closes the server where it cannot listen

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def serve(self, name: str, folder: Path) -> str:
        """Add a folder as the next commit of a repository; return the commit's hash."""
        return self.repositories.setdefault(name, Repository()).commit(folder)

    @property
    def store(self) -> Path:
        """Folder of what is uploaded; it goes with the server."""
        return Path(self._store.name)

    def plant(self, fault: str, times: int = 1 << 30, *, after: int = 0) -> None:
        """Switch a fault on for some requests that can meet it, after some that do not."""
        assert fault in FAULTS, fault
        self._faults[fault] = [after, times]

    def mend(self) -> None:
        """Switch all faults off, and forget the log."""
        self._faults.clear()
        self.log.clear()

    def meets(self, fault: str) -> bool:
        """Return whether this request meets a fault."""
        with self._lock:
            left = self._faults.get(fault, [0, 0])
            if left[0] > 0:
                left[0] -= 1
                return False
            left[1] -= 1
            return left[1] >= 0

    def count(self, change: int) -> None:
        """Count requests under way."""
        with self._lock:
            self.under_way += change

    def settle(self) -> None:
        """Wait until every request is in the log; clients have their answers before."""
        while self.under_way:
            time.sleep(0.005)

    @property
    def sent_bytes(self) -> int:
        """Bytes of bodies that were sent."""
        return sum(request.sent_bytes for request in self.log)

    @contextmanager
    def running(self) -> Iterator[HubServer]:
        """Serve in a thread while the block runs."""
        thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            thread.join()
            self.server_close()

    def server_close(self) -> None:
        """Close the server; what was uploaded to it is gone."""
        self.released.set()
        super().server_close()
        self._store.cleanup()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Stay silent about clients that go away."""


class Handler(Uploads, BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # small answers would wait for 40 ms
    server: HubServer

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self._logged(self._get)

    def do_POST(self) -> None:
        self._logged(self._post)

    def do_PUT(self) -> None:
        self._logged(self._put)

    def _get(self, segments: list[str], query: Mapping[str, list[str]]) -> None:
        if segments[0] == "storage":
            self._storage(segments[1], query)
        elif self._is_refused():
            pass
        elif segments[:2] == ["api", "models"] and segments[4:5] == ["xet-write-token"]:
            self._xet_token("/".join(segments[2:4]))
        elif segments[:2] == ["api", "models"]:
            self._api("/".join(segments[2:4]), segments[4:], query)
        else:
            self._resolve("/".join(segments[:2]), segments[3], "/".join(segments[4:]))

    def _logged(self, serve: Callable[[list[str], Mapping[str, list[str]]], None]) -> None:
        self._sent_bytes, self._status = 0, 0
        self.server.count(1)
        parts = urlsplit(self.path)
        segments = [unquote(part) for part in parts.path.strip("/").split("/")]
        try:
            serve(segments, parse_qs(parts.query))
        finally:
            headers = self.headers
            self.server.log.append(
                Request(
                    method=self.command,
                    path=self.path,
                    byte_range=headers.get("Range"),
                    authorization=headers.get("Authorization"),
                    host=headers.get("Host", ""),
                    status=self._status,
                    sent_bytes=self._sent_bytes,
                )
            )
            self.server.count(-1)

    def _is_refused(self) -> bool:
        """Answer a request that meets a fault of the whole server."""
        if self.server.meets("too many requests"):
            self._error(429, "", {"RateLimit": '"api";r=0;t=0', "Retry-After": "0"})
        elif self.server.meets("unavailable"):
            self._error(503, "", {"Retry-After": "0"})
        else:
            return False
        return True

    def _api(self, name: str, rest: list[str], query: Mapping[str, list[str]]) -> None:
        revision = rest[1] if len(rest) > 1 else "main"
        files = self._files(name, revision, needs_access=False)
        if files is None:
            return
        if rest[:1] != ["tree"]:
            sha = self.server.repositories[name].resolve(revision)
            siblings = [{"rfilename": path} for path in files]
            repository = self.server.repositories[name]
            facts = {"id": name, "sha": sha, "siblings": siblings, "tags": []}
            self._json(facts | {"private": repository.private, "cardData": _card_data(files)})
            return
        if self.server.meets("malformed tree"):
            self._json([{"type": "file", "path": "config.json"}])
            return
        entries = self._entries(name, files)
        first = int(query.get("cursor", ["0"])[0])
        last = first + self.server.page_entries
        headers = {}
        if last < len(entries):
            url = f"{self.server.endpoint}{urlsplit(self.path).path}?recursive=true&cursor={last}"
            headers["Link"] = f'<{url}>; rel="next"'
        self._json(entries[first:last], headers)

    def _resolve(self, name: str, revision: str, path: str) -> None:
        files = self._files(name, revision)
        if files is None:
            return
        commit = str(self.server.repositories[name].resolve(revision))
        if self.server.meets("other commit"):
            commit = "0" * 40
        if path not in files:
            self._error(404, "EntryNotFound", {"X-Repo-Commit": commit})
            return
        file = files[path]
        headers = {"X-Repo-Commit": commit}
        if not file.is_large:
            data = file.read(0, file.size)
            headers |= {"ETag": f'"{file.oid}"'}
            if self.command == "GET" and "gzip" in self.headers.get("Accept-Encoding", ""):
                data = gzip.compress(data)
                headers |= {"Content-Encoding": "gzip"}
            self._answer(200, data, headers)
            return
        size = file.size + self.server.meets("other size")
        etag = "0" * 64 if self.server.meets("other checksum") else file.sha256
        port, query = self.server.server_address[1], f"generation={self.server.generation}"
        location = f"http://localhost:{port}/storage/{file.sha256}?{query}&name={quote(path)}"
        headers |= {"X-Linked-Size": str(size), "X-Linked-Etag": f'"{etag}"', "Location": location}
        if self.server.repositories[name].is_xet:
            route = f"{self.server.endpoint}/api/models/{name}/xet-read-token/{commit}"
            headers |= {"X-Xet-Hash": file.sha256, "Link": f'<{route}>; rel="xet-auth"'}
        self._answer(302, b"", headers)

    def _files(
        self, name: str, revision: str, *, needs_access: bool = True
    ) -> dict[str, StoredFile] | None:
        """Return the files of a revision, or answer why there are none."""
        repository = self.server.repositories.get(name)
        tokens = (self.server.token, self.server.reader_token)
        may_read = self.headers.get("Authorization") in [f"Bearer {token}" for token in tokens]
        hidden = self.server.meets("hidden")
        if repository is None or hidden or (repository.private and not may_read):
            self._error(404 if may_read else 401, "RepoNotFound")
        elif repository.gated and needs_access and not may_read:
            self._error(403 if self.headers.get("Authorization") else 401, "GatedRepo")
        elif (commit := repository.resolve(revision)) is None:
            self._error(404, "RevisionNotFound")
        else:
            return repository.commits[commit]
        return None

    def _storage(self, sha256: str, query: Mapping[str, list[str]]) -> None:
        """Serve bytes by a signed link."""
        server = self.server
        expired = query.get("generation") != [str(server.generation)]
        if expired or server.meets("forbidden"):
            self._error(403, "")
            return
        if self._is_refused():
            return
        files = (f for r in server.repositories.values() for c in r.commits.values()
                 for f in c.values() if f.sha256 == sha256)  # fmt: skip
        file = next(files)
        asked = self.headers.get("Range")
        if asked is None or server.meets("ignored range"):
            self._answer(200, file.read(0, file.size), {})
            return
        first, last = (int(end) for end in asked.removeprefix("bytes=").split("-"))
        shift = 1 if server.meets("shifted range") else 0
        body = file.read(first, last + 1)
        headers = {"Content-Range": f"bytes {first + shift}-{last + shift}/{file.size}"}
        # As some proxies do to whoever accepts it.
        if server.meets("encoded") or "gzip" in self.headers.get("Accept-Encoding", ""):
            headers["Content-Encoding"] = "gzip"
        if server.meets("wrong bytes"):
            body = bytes(byte ^ 1 for byte in body)
        self._answer(206, body, headers)

    def _entries(self, name: str, files: Mapping[str, StoredFile]) -> list[dict[str, Any]]:
        """Return files as trees list them."""
        is_xet = self.server.repositories[name].is_xet
        entries = [file.entry(is_xet=is_xet) for file in files.values()]
        for entry in entries:
            if "lfs" in entry and self.server.meets("other listing"):
                entry["lfs"]["oid"] = "0" * 64
        return entries

    def _json(self, value: Any, headers: Mapping[str, str] | None = None) -> None:
        kind = {"Content-Type": "application/json"}
        self._answer(200, json.dumps(value).encode(), kind | dict(headers or {}))

    def _error(self, status: int, code: str, headers: Mapping[str, str] | None = None) -> None:
        named = {"X-Error-Code": code} if code else {}
        self._answer(status, b'{"error": "planted"}', named | dict(headers or {}))

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self._status = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD" or not body:
            return
        self._send(body, may_fail=status == 206)

    def _send(self, body: bytes, *, may_fail: bool) -> None:
        """Send a body, as far and as fast as faults allow."""
        server = self.server
        end = len(body)
        if may_fail and server.meets("cut"):
            end, self.close_connection = len(body) // 2, True
        slow = may_fail and server.meets("slow")
        stalled = may_fail and server.meets("stalled")
        step = max(1, len(body) // 20) if slow or stalled else CHUNK_BYTES
        for start in range(0, end, step):
            with suppress(ConnectionError):
                self.wfile.write(body[start : min(start + step, end)])
                self._sent_bytes += min(start + step, end) - start
            if slow:
                time.sleep(SLOW_SECONDS)
            if stalled:
                time.sleep(2)
                self.close_connection = True
                return

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nowhere: tests read the list."""


def _card_data(files: Mapping[str, StoredFile]) -> Any:
    """Return the metadata of a repository's model card."""
    card = files.get("README.md")
    if card is None:
        return None
    text = card.read(0, card.size).decode()
    return yaml.safe_load(text.split("---")[1]) if text.startswith("---") else None
