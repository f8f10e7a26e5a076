"""An object store of the kind of S3 that does as it is told: which conditions it heeds, and what goes wrong when."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

ALL = frozenset({"put", "delete", "complete", "copy"})

ANSWERS = {
    "busy": (503, "ServiceUnavailable", "busy"),
    "error": (500, "InternalError", "InternalError"),
    "refuse": (412, "PreconditionFailed", "refused"),
    "forbid": (403, "AccessDenied", "forbidden"),
}
"""Status, code and message of faults."""


@dataclass
class Object:
    data: bytes
    headers: dict[str, str]
    tag: str = ""
    written: float = field(default_factory=time.time)
    number: int = field(default_factory=count(1).__next__)

    def __post_init__(self) -> None:
        self.tag = self.tag or f'"{hashlib.md5(self.data).hexdigest()}"'


@dataclass
class Upload:
    path: str
    headers: dict[str, str]
    parts: dict[int, bytes] = field(default_factory=dict)


@dataclass
class Server:
    """Args:
    heeds: the requests whose conditions are heeded; those of others are taken and forgotten.
    rejects: the status of requests with a condition, by kind: the store does not know conditions of these.
    paths, bodies: of each of `requests`, its path with the bucket, and the bytes that came with it and were answered.
    missing: the status of a request on the condition that an object is there, when it is not.
    fault: told of every request by number and name, says what goes wrong with it: "lost" (done, but no answer),
        "late error" (done, but the answer is 500), "reset" (not done, no answer), "cut" (half of the answer), "hang"
        (until `released`), one of `ANSWERS` (not done), or "".
    retry_after: the header of answers 503.
    """

    heeds: frozenset[str] = ALL
    rejects: Mapping[str, int] = field(default_factory=dict)
    missing: int = 404
    min_part: int = 1
    fault: Callable[[int, str], str] = lambda number, name: ""
    retry_after: str = ""
    objects: dict[str, Object] = field(default_factory=dict)
    uploads: dict[str, Upload] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    applied: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    bodies: list[tuple[int, int]] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    lock: threading.RLock = field(default_factory=threading.RLock)
    url: str = ""
    clock: Callable[[], float] = time.time

    def reset(self) -> None:
        """As it was in the beginning; who hangs is let go."""
        self.released.set()
        with self.lock:
            for collection in (self.objects, self.uploads, self.requests, self.applied, self.paths, self.bodies):
                collection.clear()
            self.heeds, self.min_part, self.fault = ALL, 1, lambda number, name: ""
            self.rejects, self.missing = {}, 404
            self.clock = time.time
            self.released = threading.Event()

    def options(self) -> dict[str, Any]:
        """What s3fs needs to come here; its own retries are off, since requests are counted."""
        return {
            "key": "not-a-real-key-id",
            "secret": "not-a-real-secret",
            "client_kwargs": {"endpoint_url": self.url, "region_name": "us-east-1"},
            "config_kwargs": {"retries": {"max_attempts": 1, "mode": "standard"}},
            "skip_instance_cache": True,
        }

    def put(self, path: str, data: bytes) -> None:
        """As somebody else does it."""
        with self.lock:
            self.objects[path] = Object(data, {})


def listed(seconds: float) -> str:
    """A time, more exact than in the headers, as some stores have it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Refused(Exception):
    def __init__(self, status: int, code: str, said: str = "") -> None:
        self.status, self.code, self.said = status, code, said or code


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, format: str, *args: object) -> None:
        pass

    def answer(self) -> None:
        state: Server = self.server.state
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size)
        parts = urlsplit(self.path)
        query = {k: v[0] for k, v in parse_qs(parts.query, keep_blank_values=True).items()}
        path, name = self.path_of(), self.called(query)
        with state.lock:
            number = len(state.requests)
            state.requests.append(name)
            state.paths.append(path)
            state.bodies.append((size, 0))
        fault = state.fault(number, name)
        if fault == "hang":
            state.released.wait(30)
        if fault in ("reset", "hang"):
            self.close_connection = True
            return
        try:
            if fault in ANSWERS:
                raise Refused(*ANSWERS[fault])
            with state.lock:
                status, headers, data = getattr(self, name)(state, path, query, body)
                state.applied.append(name)
            if fault == "late error":
                raise Refused(*ANSWERS["error"])
        except Refused as e:
            status = e.status
            headers = {"Retry-After": state.retry_after} if status == 503 and state.retry_after else {}
            data = f"<Error><Code>{e.code}</Code><Message>{e.said}</Message></Error>".encode()
        if fault == "lost":
            self.close_connection = True
            return
        with state.lock:
            if self.command != "HEAD" and number < len(state.bodies):
                state.bodies[number] = size, len(data)
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if fault == "cut" else data)
        if fault == "cut":
            self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

    def date_time_string(self, timestamp: float | None = None) -> str:
        return formatdate(self.server.state.clock(), usegmt=True)

    def path_of(self) -> str:
        """Of the object, with its bucket."""
        return unquote(urlsplit(self.path).path).lstrip("/")

    def called(self, query: Mapping[str, str]) -> str:
        """What S3 calls this request."""
        if self.command == "PUT" and "uploadId" in query:
            return "upload_part_copy" if "x-amz-copy-source" in self.headers else "upload_part"
        if self.command == "PUT":
            return "copy_object" if "x-amz-copy-source" in self.headers else "put_object"
        if self.command == "POST":
            return "create_multipart_upload" if "uploads" in query else "complete_multipart_upload"
        if self.command == "DELETE":
            return "abort_multipart_upload" if "uploadId" in query else "delete_object"
        if self.command == "GET" and "list-type" in query:
            return "list_objects"
        return "head_object" if self.command == "HEAD" else "get_object"

    def heed(self, state: Server, kind: str, stored_object: Object | None) -> None:
        if kind in state.rejects and ("If-Match" in self.headers or "If-None-Match" in self.headers):
            raise Refused(state.rejects[kind], "NotImplemented" if state.rejects[kind] == 501 else "InvalidArgument")
        if kind not in state.heeds:
            return
        match, none_match = self.headers.get("If-Match"), self.headers.get("If-None-Match")
        if match is not None and stored_object is None:
            raise Refused(state.missing, "NoSuchKey" if state.missing == 404 else "PreconditionFailed")
        if stored_object is not None and (
            (match is not None and match.strip('"') != stored_object.tag.strip('"')) or none_match
        ):
            raise Refused(412, "PreconditionFailed")

    def metadata(self) -> dict[str, str]:
        metadata = {k: v for k, v in self.headers.items() if k.lower().startswith("x-amz-meta-")}
        return metadata | {k: v for k, v in self.headers.items() if k.lower() in ("content-type", "cache-control")}

    def get_object(self, state: Server, path: str, query: Any, body: bytes) -> tuple[int, dict[str, str], bytes]:
        stored_object = state.objects.get(path)
        if stored_object is None:
            raise Refused(404, "NoSuchKey")
        if self.headers.get("If-Match", stored_object.tag).strip('"') != stored_object.tag.strip('"'):
            raise Refused(412, "PreconditionFailed")
        headers = {"ETag": stored_object.tag, "Last-Modified": formatdate(stored_object.written, usegmt=True)}
        headers |= {k: v for k, v in stored_object.headers.items() if k != "told"}
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        size = len(stored_object.data)
        if wanted is None:
            return 200, headers | {"Content-Length": str(size)}, stored_object.data
        start = int(wanted[1]) if wanted[1] else max(size - int(wanted[2]), 0)
        stop = min(int(wanted[2]) + 1, size) if wanted[1] and wanted[2] else size
        if start >= size:
            raise Refused(416, "InvalidRange")
        return 206, headers | {"Content-Range": f"bytes {start}-{stop - 1}/{size}"}, stored_object.data[start:stop]

    head_object = get_object

    def put_object(self, state: Server, path: str, query: Any, body: bytes) -> tuple[int, dict[str, str], bytes]:
        self.heed(state, "put", state.objects.get(path))
        new = state.objects[path] = Object(body, self.metadata())
        return 200, {"ETag": new.tag}, b""

    def copy_object(self, state: Server, path: str, query: Any, body: bytes) -> tuple[int, dict[str, str], bytes]:
        source = state.objects[unquote(self.headers["x-amz-copy-source"]).lstrip("/")]
        state.objects[path] = Object(source.data, dict(source.headers))
        return 200, {}, f"<CopyObjectResult><ETag>{source.tag}</ETag></CopyObjectResult>".encode()

    def delete_object(self, state: Server, path: str, query: Any, body: bytes) -> tuple[int, dict[str, str], bytes]:
        self.heed(state, "delete", state.objects.get(path))
        state.objects.pop(path, None)
        return 204, {}, b""

    def list_objects(self, state: Server, path: str, query: Any, body: bytes) -> tuple[int, dict[str, str], bytes]:
        prefix = query.get("prefix", "")
        keys = sorted(p.partition("/")[2] for p in state.objects if p.startswith(f"{path.strip('/')}/{prefix}"))
        below = {k: k[len(prefix) :].partition("/")[0] for k in keys}
        files = [k for k in keys if "/" not in k[len(prefix) :] or "delimiter" not in query]
        groups = sorted({f"{prefix}{below[k]}/" for k in keys if k not in files})
        told = "".join(
            f"<Contents><Key>{escape(k)}</Key><Size>{len(state.objects[f'{path}/{k}'].data)}</Size>"
            f"<ETag>{escape(state.objects[f'{path}/{k}'].tag)}</ETag>"
            f"<LastModified>{listed(state.objects[f'{path}/{k}'].written)}</LastModified></Contents>"
            for k in files
        ) + "".join(f"<CommonPrefixes><Prefix>{escape(g)}</Prefix></CommonPrefixes>" for g in groups)
        return 200, {}, f"<ListBucketResult>{told}<IsTruncated>false</IsTruncated></ListBucketResult>".encode()

    # ---- in parts

    def upload(self, state: Server, query: Mapping[str, str]) -> Upload:
        if query["uploadId"] not in state.uploads:
            raise Refused(404, "NoSuchUpload")
        return state.uploads[query["uploadId"]]

    def create_multipart_upload(
        self, state: Server, path: str, query: Any, body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        number = f"upload-{len(state.requests)}"
        state.uploads[number] = Upload(path, self.metadata())
        told = f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId></InitiateMultipartUploadResult>"
        return 200, {}, told.encode()

    def upload_part(self, state: Server, path: str, query: Any, body: bytes) -> tuple[int, dict[str, str], bytes]:
        self.upload(state, query).parts[int(query["partNumber"])] = body
        return 200, {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}, b""

    def upload_part_copy(self, state: Server, path: str, query: Any, body: bytes) -> tuple[int, dict[str, str], bytes]:
        upload = self.upload(state, query)
        source = state.objects.get(unquote(self.headers["x-amz-copy-source"]).lstrip("/"))
        if source is None:
            raise Refused(404, "NoSuchKey")
        wanted = self.headers.get("x-amz-copy-source-if-match", source.tag)
        if "copy" in state.heeds and wanted.strip('"') != source.tag.strip('"'):
            raise Refused(412, "PreconditionFailed")
        start, last = map(int, self.headers["x-amz-copy-source-range"].removeprefix("bytes=").split("-"))
        data = upload.parts[int(query["partNumber"])] = source.data[start : last + 1]
        told = f'<CopyPartResult><ETag>"{hashlib.md5(data).hexdigest()}"</ETag></CopyPartResult>'
        return 200, {}, told.encode()

    def complete_multipart_upload(
        self, state: Server, path: str, query: Any, body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        upload = self.upload(state, query)
        self.heed(state, "complete", state.objects.get(path))
        numbers = [int(n) for n in re.findall(rb"<PartNumber>(\d+)</PartNumber>", body)]
        parts = [upload.parts[n] for n in numbers]
        if numbers != sorted(numbers) or any(len(part) < state.min_part for part in parts[:-1]):
            raise Refused(400, "EntityTooSmall")
        data = b"".join(parts)
        tag = f'"{hashlib.md5(data).hexdigest()}-{len(parts)}"'
        state.objects[path] = Object(data, upload.headers, tag)
        del state.uploads[query["uploadId"]]
        told = f"<CompleteMultipartUploadResult><ETag>{escape(tag)}</ETag></CompleteMultipartUploadResult>"
        return 200, {}, told.encode()

    def abort_multipart_upload(
        self, state: Server, path: str, query: Any, body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        self.upload(state, query)
        del state.uploads[query["uploadId"]]
        return 204, {}, b""


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128  # a client that opens many connections at once would wait a second for the sixth

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are part of the tests."""


@contextmanager
def object_store(handler: type[Handler] = Handler, **settings: Any) -> Iterator[Server]:
    state = Server(**settings)
    server = QuietServer(("127.0.0.1", 0), handler)
    server.state = state  # type: ignore[attr-defined]
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.released.set()
        server.shutdown()
        server.server_close()
        thread.join(10)
