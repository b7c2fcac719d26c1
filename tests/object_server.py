"""A local server that speaks what object stores speak when a folder is listed and read: Amazon S3,
Google Cloud Storage (whose XML routes are the same) and Azure. The faults are those of the Hub's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from xml.sax.saxutils import escape

from hub_server import HubServer, StoredFile
from hub_server.server import Handler

_DATES = ("2026-01-01T00:00:00.000Z", "Thu, 01 Jan 2026 00:00:00 GMT")


class ObjectServer(HubServer):
    """The server; buckets have their objects by name."""

    def __init__(self, port: int = 0) -> None:
        super().__init__(port)
        self.RequestHandlerClass = ObjectHandler
        self.buckets: dict[str, dict[str, StoredFile]] = {}

    def fill(self, bucket: str, prefix: str, folder: Path) -> None:
        """Put the files of a folder into a bucket, in place of those of the same names."""
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = f"{prefix}/{path.relative_to(folder).as_posix()}"
            self.buckets.setdefault(bucket, {})[name] = StoredFile(path, name)

    def environment(self, scheme: str) -> dict[str, str]:
        """Return the variables with which obstore asks this server instead of a cloud."""
        return {
            "s3": {
                "AWS_ENDPOINT_URL": self.endpoint,
                "AWS_ALLOW_HTTP": "true",
                "AWS_ACCESS_KEY_ID": "AKIALOCAL",
                "AWS_SECRET_ACCESS_KEY": "s3-secret",
            },
            "gs": {
                "GOOGLE_BASE_URL": self.endpoint,
                "GOOGLE_ALLOW_HTTP": "true",
                "GOOGLE_SKIP_SIGNATURE": "true",
            },
            "az": {
                "AZURE_STORAGE_ENDPOINT": self.endpoint,
                "AZURE_ALLOW_HTTP": "true",
                "AZURE_STORAGE_ACCOUNT_NAME": "local",
                "AZURE_STORAGE_SAS_TOKEN": "sv=2026&sig=az-secret",
            },
        }[scheme]


class ObjectHandler(Handler):
    """One request."""

    server: ObjectServer

    def _get(self, segments: list[str], query: Mapping[str, list[str]]) -> None:
        objects, name = self.server.buckets.get(segments[0]), "/".join(segments[1:])
        if self._is_refused():
            pass
        elif self.server.meets("forbidden"):
            self._answer(403, b"<Error><Code>AccessDenied</Code></Error>", {})
        elif objects is None:
            self._answer(404, b"<Error><Code>NoSuchBucket</Code></Error>", {})
        elif not name:
            self._list(objects, {key: values[0] for key, values in query.items()})
        elif name not in objects:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>", {})
        else:
            self._object(objects[name])

    def _list(self, objects: Mapping[str, StoredFile], query: Mapping[str, str]) -> None:
        names = sorted(name for name in objects if name.startswith(query.get("prefix", "")))
        first = int(query.get("continuation-token") or query.get("marker") or 0)
        last = first + self.server.page_entries
        following = str(last) if last < len(names) else ""
        files = [objects[name] for name in names[first:last]]
        text = _blobs(files, following) if "comp" in query else _contents(files, following)
        self._answer(200, text.encode(), {"Content-Type": "application/xml"})

    def _object(self, file: StoredFile) -> None:
        server = self.server
        headers = {"ETag": f'"{file.oid}-1"', "Last-Modified": _DATES[1]}
        if self.headers.get("If-Match", headers["ETag"]) != headers["ETag"]:
            self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>", {})
            return
        asked = self.headers.get("Range")
        if asked is None or server.meets("ignored range"):
            self._answer(200, file.read(0, file.size), headers)
            return
        first, last = (int(end) for end in asked.removeprefix("bytes=").split("-"))
        size = file.size + server.meets("other size")
        shift = 1 if server.meets("shifted range") else 0
        headers["Content-Range"] = f"bytes {first + shift}-{last + shift}/{size}"
        self._answer(206, file.read(first, last + 1), headers)


def _contents(files: list[StoredFile], following: str) -> str:
    """Return a page of a listing as Amazon and Google write it."""
    entries = "".join(
        f"<Contents><Key>{escape(file.name)}</Key><LastModified>{_DATES[0]}</LastModified>"
        f"<ETag>&quot;{file.oid}-1&quot;</ETag><Size>{file.size}</Size></Contents>"
        for file in files
    )
    token = f"<NextContinuationToken>{following}</NextContinuationToken>" if following else ""
    return f"<ListBucketResult>{entries}{token}</ListBucketResult>"


def _blobs(files: list[StoredFile], following: str) -> str:
    """Return a page of a listing as Azure writes it."""
    entries = "".join(
        f"<Blob><Name>{escape(file.name)}</Name><Properties><Last-Modified>{_DATES[1]}"
        f"</Last-Modified><Etag>{file.oid}-1</Etag><Content-Length>{file.size}</Content-Length>"
        "<Content-Type>application/octet-stream</Content-Type></Properties></Blob>"
        for file in files
    )
    marker = f"<NextMarker>{following}</NextMarker>" if following else "<NextMarker />"
    return f"<EnumerationResults><Blobs>{entries}</Blobs>{marker}</EnumerationResults>"
