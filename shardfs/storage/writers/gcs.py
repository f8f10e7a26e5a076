"""Requests to Google Cloud Storage through gcsfs, conditional on object generations.

gcsfs's own functions do not support generations, so this module sends JSON API requests:
https://cloud.google.com/storage/docs/json_api/v1/objects. Each object is sent whole.
"""

from __future__ import annotations

import errno
import json
import secrets
from datetime import datetime
from typing import TYPE_CHECKING, Any

from shardfs.storage.remote import generation_tag
from shardfs.storage.writers.objects import MARK, Objects, ObjectVersion, Requests, Upload, age_s
from shardfs.storage.writers.writer import Changed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardfs.model.blobs import ByteRange
    from shardfs.storage.remote import FsspecStore

_KEPT = ("contentType", "contentLanguage", "contentDisposition", "cacheControl", "contentEncoding", "metadata")

_OBJECT = "b/{}/o/{}"


class GcsObjects(Objects):
    """Implements `Objects`. The file system of `store` is a GCSFileSystem."""

    def __init__(self, store: FsspecStore) -> None:
        from fsspec.asyn import sync_wrapper  # this import is slow, and local stores do not need it

        self._fs = store.fs
        self._requests = Requests(store)
        self._call = sync_wrapper(store.fs._call, obj=store.fs)

    def _head(self, path: str) -> ObjectVersion:
        bucket, key, _ = self._fs.split_path(path)
        headers, raw = self._requests.ask("stat", path, self._call, "GET", _OBJECT, bucket, key)
        return _version_of(raw, headers)

    def read(self, path: str, version: ObjectVersion, ranges: Sequence[ByteRange]) -> list[bytes]:
        if version.facts.get("contentEncoding"):
            why = "is stored compressed, and the store decompresses it when it is read; store it without an encoding"
            raise OSError(errno.EOPNOTSUPP, why, path)
        return [self._range(path, version, *r) for r in ranges]

    def _range(self, path: str, version: ObjectVersion, start: int, stop: int) -> bytes:
        bucket, key, _ = self._fs.split_path(path)
        url = f"{self._fs._location}/download/storage/v1/{_OBJECT}"
        words = {"alt": "media", "generation": version.tag, "headers": {"Range": f"bytes={start}-{stop - 1}"}}
        try:
            _, data = self._requests.ask("read", path, self._call, "GET", url, bucket, key, **words)
        except FileNotFoundError as e:  # this generation no longer exists
            raise Changed from e
        self._requests.reading.counters.received(len(data))
        return bytes(data)

    def put(self, path: str, base: ObjectVersion | None, upload: Upload) -> ObjectVersion:
        bucket, key, _ = self._fs.split_path(path)
        facts = {"contentType": "application/octet-stream", **(base.facts if base is not None else {})}
        resource = {**facts, "name": key, "metadata": {**facts.get("metadata", {}), MARK: upload.mark}}
        boundary = secrets.token_hex(16)
        head = f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(resource)}\r\n"
        middle = f"--{boundary}\r\nContent-Type: {facts['contentType']}\r\n\r\n"
        body = b"".join([head.encode(), middle.encode(), upload.whole(), f"\r\n--{boundary}--".encode()])
        url = f"{self._fs._location}/upload/storage/v1/b/{{}}/o"
        words = {"uploadType": "multipart", "ifGenerationMatch": "0" if base is None else base.tag}
        words |= {"headers": {"Content-Type": f'multipart/related; boundary="{boundary}"'}, "data": body}
        headers, raw = self._requests.change("put_object", path, self._call, "POST", url, bucket, **words)
        return _version_of(raw, headers)

    def remove(self, path: str, base: ObjectVersion) -> None:
        bucket, key, _ = self._fs.split_path(path)
        words = {"ifGenerationMatch": base.tag}
        self._requests.change("delete_object", path, self._call, "DELETE", _OBJECT, bucket, key, **words)


def _version_of(raw: bytes, headers: Mapping[str, str]) -> ObjectVersion:
    """Return the version that an object resource describes."""
    resource: dict[str, Any] = json.loads(raw)
    facts = {name: resource[name] for name in _KEPT if name in resource}
    updated = datetime.fromisoformat(resource["updated"])
    mark, age = facts.get("metadata", {}).get(MARK, ""), age_s(headers.get("Date"), updated)
    size, mtime_ns = int(resource["size"]), int(updated.timestamp() * 1e9)
    generation = str(resource["generation"])
    return ObjectVersion(generation, size, mtime_ns, mark, facts, age, generation_tag(generation))
