"""Views of blobs: a slice, decoded bytes, two files joined, a fallback."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from shardfs.model.blobs import Blob, ByteRange, ByteRequest, Stat, absolute

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

WITHOUT_DATA = "has no file of data beside that of its index"

READ_ONLY_PAIR = (
    "the shard is stored in the obsolete form of two files (.index and .data), which shardfs only reads; "
    "`shardfs unpack` and then `shardfs pack` make a volume that can be written"
)


class SliceBlob:
    """Bytes `[start, start + size)` of another blob, such as a shard inside a shard.

    Has the other blob's time and version.
    """

    __slots__ = ("__weakref__", "_outer", "_size", "_start", "fd", "file_offset")

    def __init__(self, outer: Blob, start: int, size: int) -> None:
        self._outer = outer
        self._start = start
        self._size = size
        self.fd = outer.fd
        self.file_offset = outer.file_offset + start

    def stat(self) -> Stat:
        _, mtime_ns, version = self._outer.stat()
        return Stat(self._size, mtime_ns, version)

    def read(self, requests: Sequence[ByteRequest]) -> list[bytes]:
        inner = [absolute(r, self._size) for r in requests]
        return self._outer.read([ByteRange(self._start + r.start, self._start + r.stop) for r in inner])


class BytesBlob:
    """The decoded form of another blob, in memory, with the other blob's time and version."""

    __slots__ = ("__weakref__", "_data", "_origin", "fd", "file_offset")

    def __init__(self, data: bytes, origin: Blob) -> None:
        self._data = data
        self._origin = origin
        self.fd = -1
        self.file_offset = 0

    def stat(self) -> Stat:
        return self._origin.stat()._replace(size=len(self._data))

    def read(self, requests: Sequence[ByteRequest]) -> list[bytes]:
        return [self._data[slice(*absolute(r, len(self._data)))] for r in requests]


class PairBlob:
    """The concatenation of the index file and the data file of a precomputed shard in its obsolete form.

    Neuroglancer sharded format, note on the earlier version: `.shard` = `.index` + `.data`. Its methods raise
    ValueError if the data file is missing.

    Args:
        head: the size of the index file in bytes.
    """

    __slots__ = ("__weakref__", "_data", "_head", "_index", "fd", "file_offset")

    def __init__(self, index: Blob, data: Blob, head: int) -> None:
        self._index = index
        self._data = data
        self._head = head
        # All chunks are in the data file, so `fd` is that file; position 0 of the pair is `head` bytes before it.
        self.fd = data.fd
        self.file_offset = data.file_offset - head

    def stat(self) -> Stat:
        a, b = self._index.stat(), self._of_data(lambda data: data.stat())
        return Stat(self._head + b.size, max(a.mtime_ns, b.mtime_ns), (a.version, b.version))

    def read(self, requests: Sequence[ByteRequest]) -> list[bytes]:
        in_index = [isinstance(r, ByteRange) and r.stop <= self._head for r in requests]
        heads = [r for r, inside in zip(requests, in_index, strict=True) if inside]
        bodies = [self._moved(r) for r, inside in zip(requests, in_index, strict=True) if not inside]
        head = iter(self._index.read(heads) if heads else ())
        body = iter(self._of_data(lambda data: data.read(bodies)) if bodies else ())
        return [next(head if inside else body) for inside in in_index]

    def _moved(self, request: ByteRequest) -> ByteRequest:
        """Return the request as one for the data file."""
        if not isinstance(request, ByteRange):
            return request
        return ByteRange(max(request.start - self._head, 0), request.stop - self._head)

    def _of_data(self, ask: Callable[[Blob], T]) -> T:
        """Return `ask` of the data file.

        Raise ValueError if the data file is missing, because the caller has already read the index file.
        """
        try:
            return ask(self._data)
        except FileNotFoundError:
            raise ValueError(WITHOUT_DATA) from None


class EitherBlob:
    """A blob with a fallback for the case that it does not exist, which remote stores report only at a request.

    Args:
        other: returns the fallback. Called at the first FileNotFoundError; its own errors are raised.
    """

    __slots__ = ("__weakref__", "_blob", "_other", "fd", "file_offset")

    def __init__(self, blob: Blob, other: Callable[[], Blob]) -> None:
        self._blob = blob
        self._other = other
        self.fd = blob.fd
        self.file_offset = blob.file_offset

    def _with_fallback(self, ask: Callable[[Blob], T]) -> T:
        try:
            return ask(self._blob)
        except FileNotFoundError:
            other = self._other()
            answer = ask(other)
            self._blob = other
            return answer

    def stat(self) -> Stat:
        return self._with_fallback(lambda blob: blob.stat())

    def read(self, requests: Sequence[ByteRequest]) -> list[bytes]:
        return self._with_fallback(lambda blob: blob.read(requests))
