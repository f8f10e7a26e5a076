"""Requests to Google Cloud Storage through gcsfs, conditional on object generations.

gcsfs's own functions do not support generations, so this module sends JSON API requests:
https://cloud.google.com/storage/docs/json_api/v1/objects. Each object is sent whole.
"""

from __future__ import annotations

import errno
import json
import secrets
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from fsspec.asyn import sync_wrapper

from shardfs.storage import syscalls
from shardfs.storage.remote import store_errors
from shardfs.storage.retry import RetryPolicy, http_status
from shardfs.storage.store import MAX_GAP, MAX_MERGED, coalesce
from shardfs.storage.writers.objects import MARK, PUT_S, Changed, Known, cut

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardfs.model.blobs import ByteRange
    from shardfs.storage.writers.common import PlannedBlob

_KEPT = ("contentType", "contentLanguage", "contentDisposition", "cacheControl", "metadata")


class GcsObjects:
    """Implements `Objects`. `fs` is a GCSFileSystem."""

    conditional = removes = True

    def __init__(self, fs: Any, patience: RetryPolicy) -> None:
        self._fs = fs
        self._reading = patience
        self._writing = RetryPolicy(max(PUT_S, patience.timeout_s), patience.retries)
        self._writing.counters = patience.counters
        self._call = sync_wrapper(fs._call, obj=fs)

    def head(self, path: str) -> Known | None:
        bucket, key, _ = self._fs.split_path(path)
        try:
            headers, raw = self._read("stat", path, "b/{}/o/{}", bucket, key)
        except FileNotFoundError:
            return None
        return _known(json.loads(raw), headers)

    def look(self, path: str, size: int) -> tuple[Known, bytes] | None:
        known = self.head(path)
        if known is None:
            return None
        if known.facts.get("contentEncoding"):
            raise OSError(errno.EOPNOTSUPP, "is stored compressed, and the store decompresses it", path)
        return known, self._range(path, known, 0, min(size, known.size)) if known.size else b""

    def read(self, path: str, known: Known, ranges: Sequence[ByteRange]) -> list[bytes]:
        merged = coalesce([r for r in ranges if r.stop > r.start], MAX_GAP, MAX_MERGED)
        parts = [(whole, self._range(path, known, *whole)) for whole, _ in merged]
        return [cut(r, parts) for r in ranges]

    def _range(self, path: str, known: Known, start: int, stop: int) -> bytes:
        bucket, key, _ = self._fs.split_path(path)
        words = {"alt": "media", "generation": known.tag, "headers": {"Range": f"bytes={start}-{stop - 1}"}}
        try:
            _, data = self._read(
                "read", path, f"{self._fs._location}/download/storage/v1/b/{{}}/o/{{}}", bucket, key, **words
            )
        except FileNotFoundError as e:  # this generation no longer exists
            raise Changed from e
        self._reading.counters.received(len(data))
        return bytes(data)

    def _read(self, kind: str, path: str, *words: Any, **named: Any) -> tuple[Mapping[str, str], bytes]:
        with store_errors(path):
            answer: tuple[Mapping[str, str], bytes] = self._reading.run(kind, self._call, "GET", *words, **named)
            return answer

    def _change(self, name: str, path: str, *words: Any, **named: Any) -> tuple[Mapping[str, str], bytes]:
        try:
            with store_errors(path):
                answer: tuple[Mapping[str, str], bytes] = syscalls.call(
                    name, lambda w, n: self._writing.run("write", self._call, *w, **n), words, named
                )
                return answer
        except FileExistsError as e:  # gcsfs raises this for status 412
            raise Changed from e
        except OSError as e:
            if http_status(e.__cause__ or e) in (409, 412):
                raise Changed from e
            raise

    def put(self, path: str, base: Known | None, new: PlannedBlob, mark: str, begun: Callable[[str], None]) -> Known:
        bucket, key, _ = self._fs.split_path(path)
        facts = {"contentType": "application/octet-stream", **(base.facts if base is not None else {})}
        told = {**facts, "name": key, "metadata": {**facts.get("metadata", {}), MARK: mark}}
        data, boundary = new.bytes(new.plan), secrets.token_hex(16)
        head = f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(told)}\r\n"
        middle = f"--{boundary}\r\nContent-Type: {facts['contentType']}\r\n\r\n"
        body = b"".join([head.encode(), middle.encode(), data, f"\r\n--{boundary}--".encode()])
        begun("")
        headers, raw = self._change(
            "put_object",
            path,
            "POST",
            f"{self._fs._location}/upload/storage/v1/b/{{}}/o",
            bucket,
            uploadType="multipart",
            ifGenerationMatch="0" if base is None else base.tag,
            headers={"Content-Type": f'multipart/related; boundary="{boundary}"'},
            data=body,
        )
        return _known(json.loads(raw), headers)

    def remove(self, path: str, base: Known) -> None:
        bucket, key, _ = self._fs.split_path(path)
        try:
            self._change("delete_object", path, "DELETE", "b/{}/o/{}", bucket, key, ifGenerationMatch=base.tag)
        except FileNotFoundError:
            return

    def abandon(self, path: str, temp: str) -> None:
        """Nothing to do: this writer makes no multipart uploads."""


def _known(told: Mapping[str, Any], headers: Mapping[str, str]) -> Known:
    facts = {name: told[name] for name in (*_KEPT, "contentEncoding") if name in told}
    updated = datetime.fromisoformat(told["updated"])
    age_s = (parsedate_to_datetime(headers["Date"]) - updated).total_seconds() if "Date" in headers else 0.0
    mark = facts.get("metadata", {}).get(MARK, "")
    size, mtime_ns = int(told["size"]), int(updated.timestamp() * 1e9)
    return Known(str(told["generation"]), size, mtime_ns, mark, facts, age_s, told.get("etag"))
