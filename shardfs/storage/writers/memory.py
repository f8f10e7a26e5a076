"""Requests to fsspec's memory file system. It has no version tags, so this module numbers the versions."""

from __future__ import annotations

import threading
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from shardfs.storage import syscalls
from shardfs.storage.writers.objects import Changed, Known

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardfs.model.blobs import ByteRange
    from shardfs.storage.writers.common import PlannedBlob

# Module state, because all writers of this process share the same memory file system.
_lock = threading.Lock()
_count = count(1)
_numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_marks: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


class MemoryObjects:
    """Implements `Objects`. Each write creates a new Python object, which identifies the version."""

    conditional = removes = True

    def __init__(self, fs: Any) -> None:
        self._fs = fs

    def _find(self, path: str) -> Any:
        return self._fs.store.get(self._fs._strip_protocol(path))

    def _known(self, file: Any) -> Known:
        number = _numbers.get(file)
        if number is None:
            number = _numbers[file] = next(_count)
        mtime_ns = int(file.created.timestamp() * 1e9)
        return Known([number, file.size], file.size, mtime_ns, _marks.get(file, ""))

    def head(self, path: str) -> Known | None:
        with _lock:
            file = self._find(path)
            return None if file is None else self._known(file)

    def look(self, path: str, size: int) -> tuple[Known, bytes] | None:
        with _lock:
            file = self._find(path)
            return None if file is None else (self._known(file), bytes(file.getbuffer()[:size]))

    def read(self, path: str, known: Known, ranges: Sequence[ByteRange]) -> list[bytes]:
        with _lock:
            self._require(path, known)
            data = self._find(path).getbuffer()
            return [bytes(data[r.start : r.stop]) for r in ranges]

    def _require(self, path: str, base: Known | None) -> None:
        file = self._find(path)
        if (None if file is None else self._known(file).tag) != (None if base is None else base.tag):
            raise Changed

    def put(self, path: str, base: Known | None, new: PlannedBlob, mark: str, begun: Callable[[str], None]) -> Known:
        data = new.bytes(new.plan)
        begun("")
        known: Known = syscalls.call("put_object", self._put, path, base, data, mark)
        return known

    def _put(self, path: str, base: Known | None, data: bytes, mark: str) -> Known:
        with _lock:
            self._require(path, base)
            self._fs.pipe_file(path, data)
            file = self._find(path)
            _marks[file] = mark
            return self._known(file)

    def remove(self, path: str, base: Known) -> None:
        syscalls.call("delete_object", self._remove, path, base)

    def _remove(self, path: str, base: Known) -> None:
        with _lock:
            if self._find(path) is not None:
                self._require(path, base)
                self._fs.rm_file(path)

    def abandon(self, path: str, temp: str) -> None:
        """Nothing to do: this writer makes no multipart uploads."""
