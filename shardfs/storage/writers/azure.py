"""Requests to Azure Blob Storage through the client of adlfs, conditional on ETags.

adlfs's own functions do not support conditions, so this module calls the client below them:
https://learn.microsoft.com/rest/api/storageservices/specifying-conditional-headers-for-blob-service-operations.
Each object is sent whole.
"""

from __future__ import annotations

import errno
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shardfs.storage.remote import store_errors
from shardfs.storage.writers.objects import Objects, ObjectVersion, Requests, Upload
from shardfs.storage.writers.writer import Changed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import datetime

    from shardfs.model.blobs import ByteRange
    from shardfs.storage.remote import FsspecStore

MARK = "shardfs_put"
"""As `objects.MARK`: names of metadata are identifiers in Azure."""

_ABSENT = "BlobNotFound"

_CHANGED = ("ConditionNotMet", "BlobAlreadyExists", "TargetConditionNotMet", "UnauthorizedBlobOverwrite")


class AzureObjects(Objects):
    """Implements `Objects`. The file system of `store` is an AzureBlobFileSystem."""

    def __init__(self, store: FsspecStore) -> None:
        self.loop = store.fs.loop  # `RetryPolicy` runs the coroutines below there
        self._fs = store.fs
        self._requests = Requests(store, _errors)

    def _head(self, path: str) -> ObjectVersion:
        return _version_of(self._requests.ask("stat", path, self._properties, path))

    def read(self, path: str, version: ObjectVersion, ranges: Sequence[ByteRange]) -> list[bytes]:
        try:
            parts = [bytes(self._requests.ask("read", path, self._range, path, version, part)) for part in ranges]
        except FileNotFoundError as e:
            raise Changed from e
        self._requests.reading.counters.received(sum(map(len, parts)))
        return parts

    def put(self, path: str, base: ObjectVersion | None, upload: Upload) -> ObjectVersion:
        data = upload.whole()
        answer = self._requests.change("put_object", path, self._upload, path, base, data, upload.mark)
        facts = {**(base.facts if base is not None else {}), "metadata": _metadata(base, upload.mark)}
        return _version(answer["etag"], len(data), answer["last_modified"], facts, answer.get("date"))

    def remove(self, path: str, base: ObjectVersion) -> None:
        self._requests.change("delete_object", path, self._delete, path, base)

    # ---- the requests, as coroutines of the client ----

    def _blob(self, path: str) -> Any:
        container, key, _ = self._fs.split_path(path)
        return self._fs.service_client.get_blob_client(container, key)

    async def _properties(self, path: str) -> Any:
        return await self._blob(path).get_blob_properties()

    async def _range(self, path: str, version: ObjectVersion, part: ByteRange) -> bytes:
        settings = version.facts.get("content_settings")
        # The client would decompress the stored bytes. Older clients do not know the argument, so others do not get it.
        raw = {"decompress": False} if settings is not None and settings.content_encoding else {}
        stream = await self._blob(path).download_blob(part.start, part.stop - part.start, **_only(version), **raw)
        data: bytes = await stream.readall()
        return data

    async def _upload(self, path: str, base: ObjectVersion | None, data: bytes, mark: str) -> Mapping[str, Any]:
        condition = {"overwrite": False} if base is None else {"overwrite": True, **_only(base)}
        settings = base.facts.get("content_settings") if base is not None else None
        answer: Mapping[str, Any] = await self._blob(path).upload_blob(
            data, metadata=_metadata(base, mark), content_settings=settings, **condition
        )
        return answer

    async def _delete(self, path: str, base: ObjectVersion) -> None:
        await self._blob(path).delete_blob(**_only(base))


def _only(version: ObjectVersion) -> dict[str, Any]:
    """Return the arguments that make a request fail unless `version` is the current one."""
    from azure.core import MatchConditions

    return {"etag": version.tag, "match_condition": MatchConditions.IfNotModified}


def _metadata(base: ObjectVersion | None, mark: str) -> dict[str, str]:
    return {**(base.facts["metadata"] if base is not None else {}), MARK: mark}


def _version_of(properties: Any) -> ObjectVersion:
    settings = properties.content_settings
    settings.content_md5 = None  # that of the next version differs
    facts = {"content_settings": settings, "metadata": dict(properties.metadata or {})}
    return _version(properties.etag, properties.size, properties.last_modified, facts, None)


def _version(
    tag: str, size: int, modified: datetime, facts: Mapping[str, Any], answered: datetime | None
) -> ObjectVersion:
    age_s = 0.0 if answered is None else (answered - modified).total_seconds()
    mark = facts["metadata"].get(MARK, "")
    return ObjectVersion(tag, size, int(modified.timestamp() * 1e9), mark, facts, age_s, tag)


@contextmanager
def _errors(path: str) -> Iterator[None]:
    """Convert the exceptions of the client to OSError, and refused conditions to Changed."""
    try:
        with store_errors(path):
            yield
    except OSError as e:
        code = getattr(e.__cause__, "error_code", None)
        if code in _CHANGED:
            raise Changed from e
        if code == _ABSENT:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", path) from e
        raise
