"""Requests to fsspec's memory file system. It has no version tags, so this module numbers the versions."""

from __future__ import annotations

import errno
import os
import threading
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from shardfs.storage import syscalls
from shardfs.storage.writers.objects import Objects, ObjectVersion, Upload, require_version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardfs.model.blobs import ByteRange
    from shardfs.storage.remote import FsspecStore

# Module state, because all writers of this process share the same memory file system.
_lock = threading.RLock()
_numbers = count(1)
_versions: WeakKeyDictionary[Any, tuple[int, str]] = WeakKeyDictionary()
"""The number and the mark of each version. Each write creates a new Python object, which identifies the version."""


class MemoryObjects(Objects):
    """Implements `Objects`. A lock makes each comparison and the change after it atomic."""

    private = True

    def __init__(self, store: FsspecStore) -> None:
        self._fs = store.fs

    def _file(self, path: str) -> Any:
        return self._fs.store.get(self._fs._strip_protocol(path))

    def _head(self, path: str) -> ObjectVersion:
        with _lock:
            file = self._file(path)
            if file is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            number, mark = _versions.setdefault(file, (next(_numbers), ""))
            return ObjectVersion([number, file.size], file.size, int(file.created.timestamp() * 1e9), mark)

    def read(self, path: str, version: ObjectVersion, ranges: Sequence[ByteRange]) -> list[bytes]:
        with _lock:
            require_version(self, path, version)
            data = self._file(path).getbuffer()
            return [bytes(data[r.start : r.stop]) for r in ranges]

    def put(self, path: str, base: ObjectVersion | None, upload: Upload) -> ObjectVersion:
        version: ObjectVersion = syscalls.call("put_object", self._put, path, base, upload.whole(), upload.mark)
        return version

    def _put(self, path: str, base: ObjectVersion | None, data: bytes, mark: str) -> ObjectVersion:
        with _lock:
            require_version(self, path, base)
            self._fs.pipe_file(path, data)
            _versions[self._file(path)] = (next(_numbers), mark)
            return self._head(path)

    def remove(self, path: str, base: ObjectVersion) -> None:
        syscalls.call("delete_object", self._remove, path, base)

    def _remove(self, path: str, base: ObjectVersion) -> None:
        with _lock:
            if self._file(path) is not None:
                require_version(self, path, base)
                self._fs.rm_file(path)
