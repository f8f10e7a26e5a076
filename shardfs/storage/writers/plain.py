"""Requests to any store that fsspec can write to, without conditions: compare, write, and read back."""

from __future__ import annotations

import errno
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from shardfs.model.errors import UnsupportedError, errno_of, message
from shardfs.storage import syscalls
from shardfs.storage.remote import stat_of_info, store_errors
from shardfs.storage.retry import is_transient
from shardfs.storage.writers.names import temporary_name
from shardfs.storage.writers.objects import (
    Objects,
    ObjectVersion,
    Requests,
    Upload,
    is_abandoned,
    require_version,
)
from shardfs.storage.writers.writer import Changed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardfs.model.blobs import ByteRange
    from shardfs.storage.remote import FsspecStore


class PlainObjects(Objects):
    """Implements `Objects`. A change that another writer makes between the comparison and the write is lost."""

    conditional = removes = False

    def __init__(self, store: FsspecStore) -> None:
        from fsspec import AbstractFileSystem  # this import is slow, and local stores do not need it

        self._fs = store.fs
        self._requests = Requests(store, store_errors)
        # If the file system's `mv` only copies, a copy is visible while it is incomplete. Such stores get no temporary
        # object.
        self._moves = getattr(type(self._fs), "mv", None) is not AbstractFileSystem.mv

    def prepare(self, root: str, *, alone: bool) -> None:
        """Check that the store can be written, with a temporary object. An archive or a web server is read-only."""
        if alone:  # else the store is refused in any case
            self._try_writing(root)

    def _write(self, method: Callable[..., Any], *args: Any, **words: Any) -> Any:
        return self._requests.writing.run("write", method, *args, **words)

    def _try_writing(self, directory: str) -> None:
        path = f"{directory}/{temporary_name()}"
        try:
            with store_errors(path):
                self._write(self._fs.pipe_file, path, b"")
                self._clean(directory, path)
                self._remove(path)
        except OSError as e:
            if is_transient(e) or is_transient(e.__cause__ or e):
                raise OSError(errno_of(e), f"cannot try out writing: {message(e)}. Try again later") from e
            raise UnsupportedError(f"this store cannot be written: {message(e)}; mount it read-only") from e

    def _clean(self, directory: str, probe: str) -> None:
        """Remove temporary objects that interrupted `pack` commands left in a directory.

        The new object `probe` gives the store's current time.
        """
        with suppress(OSError), store_errors(directory):
            self._fs.invalidate_cache(directory)
            infos = self._requests.ask("list", directory, self._fs.ls, directory, detail=True)
            times = {info["name"]: stat_of_info(info).mtime_ns for info in infos if info.get("type") == "file"}
            now_ns = next((t for path, t in times.items() if path.endswith(probe.rpartition("/")[2])), 0)
            for path, mtime_ns in times.items():
                if mtime_ns and is_abandoned(path, (now_ns - mtime_ns) / 1e9):
                    self._remove(path)

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
        data = upload.content.bytes(upload.content.plan)
        require_version(self, path, base)
        directory = path.rpartition("/")[0]
        temp = f"{directory}/{temporary_name()}" if self._moves else path
        upload.on_switch(temp if self._moves else "")
        with store_errors(path):
            if base is None:
                with suppress(FileExistsError, NotImplementedError):
                    self._write(self._fs.makedirs, directory, exist_ok=True)
            syscalls.call("put_object", self._write, self._fs.pipe_file, temp, data)
            if self._requests.ask("read", temp, self._fs.cat_file, temp) != data:
                raise OSError(errno.EIO, "was written, but something else is there; look for other writers", path)
            if self._moves:
                syscalls.call("rename_object", self._move, temp, path, data)
        version = self.head(path)
        if version is None:
            raise Changed
        return version

    def _move(self, old: str, new: str, data: bytes) -> None:
        try:
            self._write(self._fs.mv, old, new)
        except FileNotFoundError:  # an earlier attempt may have succeeded without its answer arriving
            if self._requests.ask("read", new, self._fs.cat_file, new) != data:
                raise

    def remove(self, path: str, base: ObjectVersion) -> None:
        require_version(self, path, base)
        with store_errors(path):
            syscalls.call("delete_object", self._remove, path)

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError):  # an earlier attempt may have removed it
            self._write(self._fs.rm_file, path)

    def abandon(self, path: str, temp: str) -> None:
        """Remove the temporary object to which the new version was written."""
        with store_errors(temp):
            self._remove(temp)
