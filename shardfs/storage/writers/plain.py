"""Requests to any store that fsspec can write to, without conditions. `pack` writes new datasets with them."""

from __future__ import annotations

import errno
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from shardfs.model.errors import UnsupportedError, errno_of, message
from shardfs.storage import syscalls
from shardfs.storage.remote import stat_of_info, store_errors
from shardfs.storage.retry import is_transient
from shardfs.storage.writers.names import temporary_name
from shardfs.storage.writers.objects import Objects, ObjectVersion, Requests, Upload, require_version
from shardfs.storage.writers.writer import Changed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardfs.model.blobs import ByteRange
    from shardfs.storage.remote import FsspecStore


class PlainObjects(Objects):
    """Implements `Objects`. A change that another writer makes between the comparison and the write is lost."""

    conditional = removes = False

    def __init__(self, store: FsspecStore) -> None:
        self._fs = store.fs
        self._requests = Requests(store, store_errors)

    def prepare(self, root: str, *, alone: bool) -> None:
        """Check that the store can be written, with a temporary object. An archive or a web server is read-only."""
        if not alone:  # the store is refused in any case
            return
        path = f"{root}/{temporary_name()}"
        try:
            with store_errors(path):
                self._write(self._fs.pipe_file, path, b"")
                self._remove(path)
        except OSError as e:
            if is_transient(e) or is_transient(e.__cause__ or e):
                raise OSError(errno_of(e), f"cannot try out writing: {message(e)}. Try again later") from e
            raise UnsupportedError(f"this store cannot be written: {message(e)}; mount it read-only") from e

    def _write(self, method: Callable[..., Any], *args: Any, **words: Any) -> Any:
        return self._requests.writing.run("write", method, *args, **words)

    def _head(self, path: str) -> ObjectVersion:
        self._fs.invalidate_cache(self._fs._parent(path))
        info = self._requests.ask("stat", path, self._fs.info, path)
        if info.get("type") == "directory":
            raise IsADirectoryError(errno.EISDIR, "is a directory", path)
        stat = stat_of_info(info)
        return ObjectVersion([str(part) for part in stat.version], stat.size, stat.mtime_ns)  # type: ignore[attr-defined]

    def read(self, path: str, version: ObjectVersion, ranges: Sequence[ByteRange]) -> list[bytes]:
        out = [
            bytes(self._requests.ask("read", path, self._fs.cat_file, path, start=r.start, end=r.stop)) for r in ranges
        ]
        self._requests.reading.counters.received(sum(map(len, out)))
        return out

    def put(self, path: str, base: ObjectVersion | None, upload: Upload) -> ObjectVersion:
        require_version(self, path, base)
        data = upload.whole()
        with store_errors(path):
            if base is None:
                with suppress(FileExistsError, NotImplementedError):
                    self._write(self._fs.makedirs, path.rpartition("/")[0], exist_ok=True)
            syscalls.call("put_object", self._write, self._fs.pipe_file, path, data)
            if self._requests.ask("read", path, self._fs.cat_file, path) != data:
                raise OSError(errno.EIO, "was written, but something else is there; look for other writers", path)
        version = self.head(path)
        if version is None:
            raise Changed
        return version

    def remove(self, path: str, base: ObjectVersion) -> None:
        require_version(self, path, base)
        with store_errors(path):
            syscalls.call("delete_object", self._remove, path)

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError):  # an earlier attempt may have removed it
            self._write(self._fs.rm_file, path)
