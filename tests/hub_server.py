"""A local server that speaks the routes of the Hugging Face Hub by which models are downloaded.

Its storage is another origin, reached by links that are signed and expire, as the real one's. Tests
switch faults on one by one; the program and huggingface_hub on the other side are the real ones.

    python -m tests.hub_server FOLDER ... [--port PORT]

serves each folder as hf://local/<name of the folder>.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

CHUNK_BYTES = 1 << 18
SLOW_SECONDS = 0.02
# Faults, each for a number of requests or for all: what a request meets is said in Handler.
FAULTS = (
    *("ignored range", "shifted range", "encoded", "cut", "wrong bytes", "slow", "stalled"),
    *("too many requests", "unavailable", "forbidden", "other size", "other checksum"),
    *("other commit", "malformed tree"),
)


@dataclass(frozen=True)
class StoredFile:
    """A file of a commit."""

    path: Path
    name: str

    @cached_property
    def size(self) -> int:
        return self.path.stat().st_size

    @cached_property
    def sha256(self) -> str:
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    @cached_property
    def oid(self) -> str:
        digest = hashlib.sha1(b"blob %d\0" % self.size)
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, lambda: digest).hexdigest()

    def read(self, start: int, end: int) -> bytes:
        """Return bytes [start, end)."""
        with self.path.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), end - start, start)

    @property
    def is_large(self) -> bool:
        """True for what the Hub keeps in its storage instead of git."""
        return self.name.endswith((".safetensors", "tokenizer.json"))

    def entry(self) -> dict[str, Any]:
        """Return the file as a tree lists it."""
        size = self.size
        entry = {"type": "file", "path": self.name, "size": size, "oid": self.oid}
        if self.is_large:
            entry["lfs"] = {"oid": self.sha256, "size": size, "pointerSize": 134}
        return entry


@dataclass
class Repository:
    """Commits by hash, each with its files by name; revisions by name."""

    commits: dict[str, dict[str, StoredFile]] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False

    def commit(self, folder: Path, revision: str = "main") -> str:
        """Add a folder as a commit, and move a branch to it."""
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        names = [path.relative_to(folder).as_posix() for path in paths]
        files = {name: StoredFile(path, name) for name, path in zip(names, paths, strict=True)}
        listing = "".join(f"{file.oid} {name}\n" for name, file in files.items())
        sha = hashlib.sha1(listing.encode()).hexdigest()
        self.commits[sha] = files
        self.revisions[revision] = sha
        return sha

    def resolve(self, revision: str) -> str | None:
        """Return the commit of a branch, a tag or a commit's hash."""
        return revision if revision in self.commits else self.revisions.get(revision)


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

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.repositories: dict[str, Repository] = {}
        self.token = "hf_secret"  # the one that opens private and gated repositories
        self.log: list[Request] = []
        self.page_entries = 1000
        self.generation = 0  # of signed links; older ones have expired
        self._faults: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def serve(self, name: str, folder: Path) -> str:
        """Add a folder as the next commit of a repository; return the commit's hash."""
        return self.repositories.setdefault(name, Repository()).commit(folder)

    def plant(self, fault: str, times: int = 1 << 30) -> None:
        """Switch a fault on for the next requests that can meet it."""
        assert fault in FAULTS, fault
        self._faults[fault] = times

    def mend(self) -> None:
        """Switch all faults off, and forget the log."""
        self._faults.clear()
        self.log.clear()

    def meets(self, fault: str) -> bool:
        """Return whether this request meets a fault."""
        with self._lock:
            self._faults[fault] -= 1
            if self._faults[fault] >= 0:
                return True
            del self._faults[fault]
            return False

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

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Stay silent about clients that go away."""


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # small answers would wait for 40 ms
    server: HubServer

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self._sent_bytes, self._status = 0, 0
        parts = urlsplit(self.path)
        segments = [unquote(part) for part in parts.path.strip("/").split("/")]
        try:
            if segments[0] == "storage":
                self._storage(segments[1], parse_qs(parts.query))
            elif self._is_refused():
                pass
            elif segments[:2] == ["api", "models"]:
                self._api("/".join(segments[2:4]), segments[4:], parse_qs(parts.query))
            else:
                self._resolve("/".join(segments[:2]), segments[3], "/".join(segments[4:]))
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

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        form = parse_qs(self.rfile.read(length).decode())
        segments = [unquote(part) for part in self.path.strip("/").split("/")]
        files = self._files("/".join(segments[2:4]), segments[5])
        if files is not None:
            self._json([files[name].entry() for name in form.get("paths", []) if name in files])

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
            self._json({"id": name, "sha": sha, "siblings": siblings, "tags": []})
            return
        if self.server.meets("malformed tree"):
            self._json([{"type": "file", "path": "config.json"}])
            return
        entries = [file.entry() for file in files.values()]
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
            self._answer(200, data, headers | {"ETag": f'"{file.oid}"'})
            return
        size = file.size + self.server.meets("other size")
        etag = "0" * 64 if self.server.meets("other checksum") else file.sha256
        port, query = self.server.server_address[1], f"generation={self.server.generation}"
        location = f"http://localhost:{port}/storage/{file.sha256}?{query}&name={quote(path)}"
        headers |= {"X-Linked-Size": str(size), "X-Linked-Etag": f'"{etag}"', "Location": location}
        self._answer(302, b"", headers)

    def _files(
        self, name: str, revision: str, *, needs_access: bool = True
    ) -> dict[str, StoredFile] | None:
        """Return the files of a revision, or answer why there are none."""
        repository = self.server.repositories.get(name)
        may_read = self.headers.get("Authorization") == f"Bearer {self.server.token}"
        if repository is None or (repository.private and not may_read):
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
        if server.meets("encoded"):
            headers["Content-Encoding"] = "gzip"
        if server.meets("wrong bytes"):
            body = bytes(byte ^ 1 for byte in body)
        self._answer(206, body, headers)

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


def main() -> None:
    """Serve folders until interrupted."""
    parser = argparse.ArgumentParser(description="A local server with the Hub's routes.")
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--port", type=int, default=8017)
    arguments = parser.parse_args()
    server = HubServer(arguments.port)
    for folder in arguments.folders:
        name = f"local/{folder.resolve().name}"
        print(f"hf://{name}@{server.serve(name, folder)}")
    print(f"export HF_ENDPOINT={server.endpoint}", flush=True)
    with suppress(KeyboardInterrupt):
        server.serve_forever()


if __name__ == "__main__":
    main()
