"""Routes of the local server that write: repositories, the storage of large files, commits."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import yaml

from .storage import Repository, StoredFile, XetFile

if TYPE_CHECKING:
    from .server import HubServer

LARGE_BYTES = 10 << 20  # what the Hub keeps in its storage, whatever its name
_LARGE = b"filter=lfs diff=lfs merge=lfs -text\n"
ATTRIBUTES = b"*.safetensors " + _LARGE + b"*.gguf " + _LARGE
# upload: of bytes to the storage; commit lost: it is made, and the answer is an error; other
# listing: trees list another checksum for a large file.
UPLOAD_FAULTS = (
    *("upload refused", "upload unavailable", "upload cut", "upload stalled", "wrong upload"),
    *("commit unavailable", "commit lost", "commit conflict", "no copies", "other listing"),
    *("preupload refused", "odd answer", "hidden", "account full"),
)


class Uploads(BaseHTTPRequestHandler):
    """Handlers of POST and PUT."""

    server: HubServer

    def _post(self, segments: list[str], query: Mapping[str, list[str]]) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self._is_refused():
            return
        name, rest = "/".join(segments[2:4]), segments[4:]
        if rest[:1] == ["paths-info"]:
            self._paths_info(name, rest[1], parse_qs(body.decode()))
        elif segments[0] == "completed":
            self._complete("/".join(segments[1:3]), segments[3], json.loads(body))
        elif not self._may_write():
            pass
        elif segments[:2] == ["api", "validate-yaml"]:
            self._validate(json.loads(body)["content"])
        elif segments[:3] == ["api", "repos", "create"]:
            self._create(json.loads(body))
        elif segments[1].endswith(".git"):
            lfs = f"{segments[0]}/{segments[1].removesuffix('.git')}"
            (self._verify if segments[-1] == "verify" else self._batch)(lfs, json.loads(body))
        elif rest[:1] == ["preupload"]:
            self._preupload(name, json.loads(body))
        elif rest[:1] == ["commit"]:
            self._commit(name, [json.loads(line) for line in body.splitlines()])
        elif rest == ["lfs-files", "duplicate"]:
            self._duplicate(name, json.loads(body))
        else:
            self._error(404, "")

    def _paths_info(self, name: str, revision: str, form: Mapping[str, list[str]]) -> None:
        files = self._files(name, revision)
        if files is not None:
            wanted = {path: files[path] for path in form.get("paths", []) if path in files}
            self._json(self._entries(name, wanted))

    def _may_write(self) -> bool:
        """Answer a request whose token may not write."""
        given = self.headers.get("Authorization")
        if given == f"Bearer {self.server.token}":
            return True
        if given == f"Bearer {self.server.reader_token}":
            self._error(403, "", {"X-Error-Message": "this token has no write access"})
        else:
            words = "Invalid credentials in Authorization header"
            self._error(401, "", {"X-Error-Message": words})
        return False

    def _validate(self, content: str) -> None:
        try:
            yaml.safe_load(content.split("---")[1])
        except (IndexError, yaml.YAMLError) as error:
            self._answer(400, json.dumps({"errors": [{"message": str(error)}]}).encode(), {})
            return
        self._json({"errors": [], "warnings": []})

    def _create(self, asked: Mapping[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.server.repositories:
            self._error(409, "", {"X-Error-Message": "You already created this model repo"})
            return
        private = asked.get("visibility") == "private" or asked.get("private") is True
        repository = self.server.repositories[name] = Repository(private=private)
        attributes = self._stored(ATTRIBUTES, ".gitattributes")
        repository.commit_files({".gitattributes": attributes})
        self._json({"url": f"{self.server.endpoint}/{name}", "id": name})

    def _preupload(self, name: str, asked: Mapping[str, Any]) -> None:
        files = self._files(name, "main")
        if files is None:
            return
        if self.server.meets("preupload refused"):
            self._error(403, "")
            return
        if self.server.meets("account full"):
            words = "Private repository storage limit reached, please upgrade your plan"
            self._error(403, "", {"X-Error-Message": words})
            return
        if self.server.meets("odd answer"):
            self._json({"files": "none"})
            return
        answers = []
        for file in asked["files"]:
            path, there = file["path"], files.get(file["path"])
            is_large = StoredFile(Path(), path).is_large or file["size"] > LARGE_BYTES
            oid = None if there is None else there.sha256 if there.is_large else there.oid
            mode = "lfs" if is_large else "regular"
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._json({"files": answers})

    def _batch(self, name: str, asked: Mapping[str, Any]) -> None:
        """Say where the bytes of large files go; nowhere if they are in the storage."""
        objects = []
        for entry in asked["objects"]:
            answer = {"oid": entry["oid"], "size": entry["size"]}
            if entry["oid"] not in self.server.repositories[name].objects:
                answer["actions"] = self._actions(name, entry["oid"], entry["size"])
            objects.append(answer)
        self._json({"transfer": "multipart", "objects": objects})

    def _actions(self, name: str, oid: str, size: int) -> dict[str, Any]:
        server = self.server
        port = server.server_address[1]
        signed = f"http://localhost:{port}/upload/{oid}?generation={server.generation}"
        verify = {"href": f"{server.endpoint}/{name}.git/info/lfs/verify", "header": {}}
        if size <= server.part_bytes:
            return {"upload": {"href": signed, "header": {}}, "verify": verify}
        parts = range(1, -(-size // server.part_bytes) + 1)
        header = {f"{part:05d}": f"{signed}&part={part}" for part in parts}
        href = f"{server.endpoint}/completed/{name}/{oid}"
        chunks = {"chunk_size": str(server.part_bytes)}
        return {"upload": {"href": href, "header": chunks | header}, "verify": verify}

    def _put(self, segments: list[str], query: Mapping[str, list[str]]) -> None:
        """Take bytes into the storage, by a signed link."""
        server, length = self.server, int(self.headers["Content-Length"])
        if server.meets("upload cut"):
            self.rfile.read(length // 2)
            self.close_connection = True
            return
        body = self.rfile.read(length)
        server.during_upload()
        if server.meets("upload stalled"):
            server.released.wait()
        if len(body) < length:
            return  # the client is gone
        if query["generation"] != [str(server.generation)] or server.meets("upload refused"):
            self._error(403, "")
        elif server.meets("upload unavailable"):
            self._error(503, "", {"Retry-After": "0"})
        else:
            part = query.get("part", [""])[0]
            if server.meets("wrong upload"):
                body = body[:-1] + bytes([body[-1] ^ 1])
            (server.store / f"{segments[1]}.{part}").write_bytes(body)
            self._answer(200, b"", {"ETag": f'"{hashlib.md5(body).hexdigest()}"'})

    def _complete(self, name: str, oid: str, asked: Mapping[str, Any]) -> None:
        parts = [self.server.store / f"{oid}.{part['partNumber']}" for part in asked["parts"]]
        (self.server.store / f"{oid}.").write_bytes(b"".join(p.read_bytes() for p in parts))
        self._json({})

    def _verify(self, name: str, asked: Mapping[str, Any]) -> None:
        """Compare what arrived with what was announced, and keep it."""
        path = self.server.store / f"{asked['oid']}."
        data = path.read_bytes()
        if (hashlib.sha256(data).hexdigest(), len(data)) != (asked["oid"], asked["size"]):
            self._error(422, "")
            return
        kept = self.server.store / asked["oid"]
        path.rename(kept)
        self.server.repositories[name].objects[asked["oid"]] = kept
        self._json({})

    def _duplicate(self, name: str, asked: Mapping[str, Any]) -> None:
        files, target = self._files(name, "main"), asked["target"]["name"]
        if files is None:
            return
        paths = {file.sha256: file.path for file in files.values() if file.is_large}
        failed = []
        for file in asked["files"]:
            if self.server.meets("no copies"):
                failed.append({"sha256": file["sha256"], "error": "another region"})
            else:
                self.server.repositories[target].objects[file["sha256"]] = paths[file["sha256"]]
        self._json({"failed": failed})

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        server, repository = self.server, self.server.repositories[name]
        if server.meets("commit unavailable"):
            self._error(503, "", {"Retry-After": "0"})
            return
        now, header = repository.revisions["main"], lines[0]["value"]
        if server.meets("commit conflict"):
            extra = self._stored(b"theirs", "theirs.txt")
            now = repository.commit_files({**repository.commits[now], "theirs.txt": extra})
        if header.get("parentCommit", now) != now:
            self._error(412, "")
            return
        files = dict(repository.commits[now])
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "deletedFile":
                del files[value["path"]]
            elif line["key"] == "file":
                data = base64.b64decode(value["content"])
                files[value["path"]] = self._stored(data, value["path"])
            elif (file := self._large(repository, value)) is not None:
                files[value["path"]] = file
            else:
                self._error(400, "")
                return
        commit = repository.commit_files(files)
        if server.meets("commit lost"):
            self._error(503, "", {"Retry-After": "0"})
            return
        url = f"{server.endpoint}/{name}/commit/{commit}"
        self._json({"commitUrl": url, "commitOid": commit, "pullRequestUrl": None})

    def _large(self, repository: Repository, value: Mapping[str, Any]) -> StoredFile | None:
        """Return a large file that is in the storage."""
        path = repository.objects.get(value["oid"])
        if path is not None:
            return StoredFile(path, value["path"])
        committed = (f for c in repository.commits.values() for f in c.values() if f.is_large)
        known = next((file for file in committed if file.sha256 == value["oid"]), None)
        if known is not None:
            return StoredFile(known.path, value["path"])
        if self.server.xet_store is None:
            return None
        return XetFile(
            self.server.xet_store,
            value["path"],
            listed_size=value["size"],
            listed_sha256=value["oid"],
        )

    def _stored(self, data: bytes, name: str) -> StoredFile:
        """Keep bytes that came with a commit."""
        path = self.server.store / hashlib.sha1(data).hexdigest()
        path.write_bytes(data)
        return StoredFile(path, name)

    def _xet_token(self, name: str) -> None:
        """Give a token to upload by Xet, if this server has such a storage."""
        if self.server.xet_store is None:
            self._error(404, "")
        elif self._may_write():
            url = f"local://{self.server.xet_store}"
            names = {
                "X-Xet-Cas-Url": url,
                "X-Xet-Access-Token": "xet",
                "X-Xet-Token-Expiration": f"{1 << 40}",
            }
            self._json({"casUrl": url, "accessToken": "xet", "exp": 1 << 40}, names)
