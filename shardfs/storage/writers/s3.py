"""Requests to S3 and S3-compatible stores through s3fs, after testing which conditions the store enforces.

s3fs's own functions drop conditions when they upload large objects in parts, so this module calls the S3 API directly.
The store itself copies the old bytes of a large object.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from shardfs.model.blobs import ByteRange, Piece, Plan
from shardfs.model.errors import errno_of, message
from shardfs.model.write_plan import joined, piece_size
from shardfs.storage.remote import range_header
from shardfs.storage.retry import http_status, is_transient
from shardfs.storage.writers import objects
from shardfs.storage.writers.names import temporary_name
from shardfs.storage.writers.objects import MARK, Objects, ObjectVersion, Requests, Upload
from shardfs.storage.writers.planned_blob import PlannedBlob, part_of
from shardfs.storage.writers.writer import Changed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from shardfs.model.blobs import ByteRequest
    from shardfs.storage.remote import FsspecStore

log = logging.getLogger(__name__)

MAX_PARTS = 10_000

AT_ONCE = 4
"""Parts uploaded in parallel. The memory of an update is about `AT_ONCE` times `max_part`."""

_KEPT = ("ContentType", "ContentEncoding", "ContentLanguage", "ContentDisposition", "CacheControl", "Metadata")


class MultipartLimits(NamedTuple):
    """Sizes in bytes that decide how an object is uploaded. Tests use smaller ones.

    Args:
        min_part: the smallest part but the last one. S3 accepts no smaller ones.
        max_part: the largest part that is uploaded.
        max_copy: the largest part that the store copies.
        max_whole: the largest object that is uploaded in one request, which holds up to two copies in memory.
    """

    min_part: int = 5 << 20
    max_part: int = 8 << 20
    max_copy: int = 256 << 20
    max_whole: int = 32 << 20

    def to_hold(self, size: int) -> MultipartLimits:
        """Return the limits for an object of `size` bytes.

        Larger objects need larger parts, because `MAX_PARTS` limits their number.
        """
        return self._replace(max_part=max(self.max_part, -(-size // (MAX_PARTS // 2))))


class S3Objects(Objects):
    """Implements `Objects`.

    The file system of `store` is an S3FileSystem. Probe objects are created in the store's root.
    """

    pins = True

    def __init__(self, store: FsspecStore, limits: MultipartLimits = MultipartLimits()) -> None:  # noqa: B008 - a tuple
        self._fs = store.fs
        self._requests = Requests(store)
        self._limits = limits
        self._root = store.path("")
        self.loop = store.fs.loop  # where `RetryPolicy` runs `_get`, and cancels it when it times out
        self._parts_hold: bool | None = None
        self._trying = threading.Lock()

    def prepare(self, root: str, *, alone: bool) -> None:
        try:
            self.try_conditions()
        except (PermissionError, FileNotFoundError):
            raise
        except (Changed, OSError) as e:
            why = "the store refuses to create a new object" if isinstance(e, Changed) else message(e)
            if not alone:
                problem = f"cannot find out whether the store heeds conditional requests: {why}"
                raise OSError(errno_of(e), f"{problem}. Try again later") from e
            log.warning("it is not known whether the store heeds conditional requests, so none are sent: %s", why)
            self.conditional = False
            self.removes = False

    def try_conditions(self) -> None:
        """Test which conditions the store enforces. Many stores accept conditions and ignore them.

        Takes seven requests. Only a definite answer decides: a refusal with the object unchanged, or a condition that
        is ignored or rejected as unknown. Raise OSError or Changed if the store gives no definite answer. A later mount
        then removes the probe object.
        """
        path = f"{self._root}/{temporary_name()}"
        probe = self._probe(path)
        self.conditional = self.conditional and all(
            self._refuses("put_object", path, Body=b"2", **condition)
            for condition in ({"IfNoneMatch": "*"}, {"IfMatch": '"0"'})
        )
        self.removes = self._refuses("delete_object", path, IfMatch='"0"')
        current = self.head(path)
        if current is None:
            self.removes = False
        else:
            self.conditional = self.conditional and current.tag == probe.tag
            try:
                objects.remove_once(self, path, current)
            except Changed:  # although the version matches
                self.removes = False
                self._change("delete_object", path)
        self._clean()

    def _probe(self, path: str) -> ObjectVersion:
        """Create a probe object, on condition that it does not exist. If the store rejects conditions, send none."""
        try:
            return objects.put_once(self, path, None, PlannedBlob([b"1"], None))
        except OSError as e:
            if not self.conditional or not _is_unknown(e):
                raise
            self.conditional = False
            return self._probe(path)

    def _refuses(self, method: str, path: str, **words: Any) -> bool:
        """Return whether the store refuses a request whose condition does not hold, rather than ignore or reject it."""
        try:
            self._change(method, path, **words)
        except Changed:
            return True
        except FileNotFoundError:  # an earlier attempt succeeded without its answer arriving
            return False
        except OSError as e:
            if not _is_unknown(e):
                raise
        return False

    def _clean(self) -> None:
        """Remove probe objects that earlier mounts left behind. Takes one request if there are none."""
        try:
            listed = self._ask("list_objects_v2", f"{self._root}/.shardfs-", "Prefix", Delimiter="/")
            for entry in listed.get("Contents", ()):
                path = f"{self._root}/{entry['Key'].rpartition('/')[2]}"
                if objects.is_abandoned(path, objects.age_s(_date(listed), entry["LastModified"])):
                    self._change("delete_object", path)
        except (Changed, OSError) as e:
            log.debug("%s: probe objects of earlier mounts cannot be removed: %s", self._root, e)

    def _may_send_parts(self) -> bool:
        """Return whether multipart uploads need no conditions, or the store enforces these.

        The first large upload tests this.
        """
        with self._trying:
            if self._parts_hold is None:
                self._parts_hold = not self.conditional or self._parts_are_refused()
            return self._parts_hold

    def _parts_are_refused(self) -> bool:
        path = f"{self._root}/{temporary_name()}"
        probe = self._probe(path)
        upload = {"UploadId": self._change("create_multipart_upload", path)["UploadId"]}
        part = self._change("upload_part", path, PartNumber=1, Body=b"2", **upload)["ETag"]
        parts = {"Parts": [{"PartNumber": 1, "ETag": part}]}
        refused = self._refuses("complete_multipart_upload", path, IfMatch='"0"', MultipartUpload=parts, **upload)
        self.abandon(path, upload["UploadId"])
        current = self.head(path)
        if current is not None:
            objects.remove_once(self, path, current)
        if refused and current is not None and current.tag == probe.tag:
            return True
        log.warning(
            "this store does not heed conditions of multipart uploads: large shards are sent whole, from memory"
        )
        return False

    # ---- reading

    def _head(self, path: str) -> ObjectVersion:
        return _version_of(self._ask("head_object", path))

    def look(self, path: str, part: ByteRequest) -> tuple[ObjectVersion, bytes] | None:
        try:
            [(answer, data)] = self._fetch(path, [part])
        except FileNotFoundError:
            return None
        except OSError as e:
            if http_status(e) != 416:  # 416: the object is empty
                raise
            version = self.head(path)
            return None if version is None else (version, b"")
        return _version_of(answer), data

    def read(self, path: str, version: ObjectVersion, ranges: Sequence[ByteRange]) -> list[bytes]:
        return [data for _, data in self._fetch(path, ranges, IfMatch=version.tag)]

    def _fetch(self, path: str, ranges: Sequence[ByteRequest], **condition: str) -> list[tuple[Any, bytes]]:
        answers: list[tuple[Any, bytes]] = self._requests.ask("read", path, self._get, path, ranges, condition)
        self._requests.reading.counters.received(sum(len(data) for _, data in answers))
        return answers

    async def _get(
        self, path: str, ranges: Sequence[ByteRequest], condition: Mapping[str, str]
    ) -> list[tuple[Any, bytes]]:
        async def get(r: ByteRequest) -> tuple[Any, bytes]:
            where = {**self._place(path), "Range": range_header(r), **condition}
            answer = await self._fs._call_s3("get_object", **where)
            try:
                return answer, await answer["Body"].read()
            finally:
                answer["Body"].close()

        from asyncio import gather  # this import is slow, and local stores do not need it

        return list(await gather(*map(get, ranges)))

    def _place(self, path: str, key_name: str = "Key") -> dict[str, str]:
        bucket, key, _ = self._fs.split_path(path)
        return {"Bucket": bucket, key_name: key}

    def _ask(self, method: str, path: str, key_name: str = "Key", **words: Any) -> Any:
        return self._requests.ask("stat", path, self._fs.call_s3, method, **self._place(path, key_name), **words)

    # ---- changing

    def _change(self, method: str, path: str, **words: Any) -> Any:
        return self._requests.change(method, path, self._fs.call_s3, method, **self._place(path), **words)

    def put(self, path: str, base: ObjectVersion | None, upload: Upload) -> ObjectVersion:
        condition = {"IfNoneMatch": "*"} if base is None else {"IfMatch": base.tag}
        if not self.conditional:
            objects.require_version(self, path, base)
            condition = {}
        size = upload.content.size
        before = base.facts if base is not None else {}
        facts = {**before, "Metadata": {**before.get("Metadata", {}), MARK: upload.mark}}
        try:
            if size <= self._limits.max_whole or not self._may_send_parts():
                answer = self._change("put_object", path, Body=upload.whole(), **facts, **condition)
            else:
                answer = self._put_in_parts(path, base, upload, facts, condition)
        except FileNotFoundError as e:
            if base is None:
                raise
            raise Changed from e  # another writer removed the object
        # The answer has no modification time, so its date is used. A `head` request would return the exact time.
        date = _date(answer)
        mtime_ns = int(parsedate_to_datetime(date).timestamp() * 1e9) if date else time.time_ns()
        return ObjectVersion(answer["ETag"], size, mtime_ns, upload.mark, facts, shown=answer["ETag"])

    def held(self, size: int) -> int:
        in_parts = AT_ONCE * self._limits.to_hold(size).max_part
        return 2 * (size if size <= self._limits.max_whole or self._parts_hold is False else in_parts)

    def _put_in_parts(
        self,
        path: str,
        base: ObjectVersion | None,
        upload: Upload,
        facts: Mapping[str, Any],
        condition: Mapping[str, str],
    ) -> Any:
        parts = list(in_parts(upload.content.plan, self._limits.to_hold(upload.content.size)))
        if len(parts) > MAX_PARTS:
            why = f"would be sent in {len(parts)} parts, but a store takes at most {MAX_PARTS}; use smaller shards"
            raise OSError(errno.EFBIG, why, path)
        upload_id = self._change("create_multipart_upload", path, **facts)["UploadId"]
        send = partial(self._part, path, base, upload.content, upload_id)
        try:
            with ThreadPoolExecutor(AT_ONCE, "shardfs-part") as pool:
                sent = list(pool.map(send, range(1, len(parts) + 1), parts))  # cancels the others if one fails
            upload.on_switch(upload_id)
            words = {"UploadId": upload_id, "MultipartUpload": {"Parts": sent}}
            return self._change("complete_multipart_upload", path, **words, **condition)
        except BaseException:
            with suppress(OSError, Changed):
                self.abandon(path, upload_id)
            raise

    def _part(
        self, path: str, base: ObjectVersion | None, new: PlannedBlob, upload_id: str, number: int, part: Plan
    ) -> dict[str, Any]:
        """Send one part of an upload, or have the store copy it; return what completes the upload."""
        words = {"UploadId": upload_id, "PartNumber": number}
        if base is None or len(part) > 1 or not isinstance(part[0], ByteRange):
            answer = self._change("upload_part", path, Body=new.bytes(part), **words)
        else:
            words |= {"CopySource": self._place(path), "CopySourceIfMatch": base.tag}
            words["CopySourceRange"] = f"bytes={part[0].start}-{part[0].stop - 1}"
            answer = self._change("upload_part_copy", path, **words)["CopyPartResult"]
        return {"PartNumber": number, "ETag": answer["ETag"]}

    def remove(self, path: str, base: ObjectVersion) -> None:
        if not self.removes:
            objects.require_version(self, path, base)
        self._change("delete_object", path, **({"IfMatch": base.tag} if self.removes else {}))

    def abandon(self, path: str, temp: str) -> None:
        with suppress(FileNotFoundError):
            self._change("abort_multipart_upload", path, UploadId=temp)


def _is_unknown(error: OSError) -> bool:
    """Return whether the store answers that it does not know the condition of a request."""
    return http_status(error) in (400, 501) and not is_transient(error)


def _date(answer: Mapping[str, Any]) -> str | None:
    date: str | None = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    return date


def _version_of(answer: Mapping[str, Any]) -> ObjectVersion:
    size = answer["ContentRange"].rpartition("/")[2] if "ContentRange" in answer else answer["ContentLength"]
    facts = {name: answer[name] for name in _KEPT if name in answer}
    mark, modified, tag = facts.get("Metadata", {}).get(MARK, ""), answer["LastModified"], answer["ETag"]
    age = objects.age_s(_date(answer), modified)
    return ObjectVersion(tag, int(size), int(modified.timestamp() * 1e9), mark, facts, age, tag)


def in_parts(plan: Iterable[Piece], limits: MultipartLimits) -> Iterator[Plan]:
    """Yield the parts of a multipart upload.

    A part that consists of one range of the old object is copied by the store. Every part except the last has at least
    `min_part` bytes. If fewer new bytes precede a range of the old object, the beginning of that range is uploaded with
    them.
    """
    waiting: Plan = []
    size = 0
    for piece in joined(plan):
        length = piece_size(piece)
        missing = max(limits.min_part - size, 0) if waiting else 0
        if isinstance(piece, ByteRange) and length - missing >= limits.min_part:
            if missing:
                waiting.append(part_of(piece, 0, missing))
            if waiting:
                yield waiting
            yield from _copies(ByteRange(piece.start + missing, piece.stop), limits.max_copy)
            waiting, size = [], 0
            continue
        begin = 0
        while begin < length:
            end = min(begin + limits.max_part - size, length)
            waiting.append(part_of(piece, begin, end))
            size += end - begin
            begin = end
            if size == limits.max_part:
                yield waiting
                waiting, size = [], 0
    if waiting:
        yield waiting


def _copies(old: ByteRange, max_copy: int) -> Iterator[Plan]:
    count = -(-piece_size(old) // max_copy)
    step = -(-piece_size(old) // count)
    for start in range(old.start, old.stop, step):
        yield [ByteRange(start, min(start + step, old.stop))]
