"""Requests to any store that fsspec can write to, without conditions: compare, write, and read back."""

from __future__ import annotations

import errno
from contextlib import suppress
from typing import TYPE_CHECKING

from fsspec import AbstractFileSystem

from shardfs.model.blobs import ByteRange
from shardfs.model.errors import UnsupportedError, errno_of, message
from shardfs.storage import syscalls
from shardfs.storage.remote import FsspecStore, stat_of_info, store_errors
from shardfs.storage.retry import RetryPolicy, is_transient
from shardfs.storage.writers.objects import PUT_S, Changed, Known, is_abandoned, temporary_path

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardfs.storage.writers.common import PlannedBlob


class PlainObjects:
    """Implements `Objects`. A change that another writer makes between the comparison and the write is lost."""

    conditional = removes = False

    def __init__(self, store: FsspecStore) -> None:
        self._fs, self._reading = store.fs, store.patience
        self._writing = RetryPolicy(max(PUT_S, store.patience.timeout_s), store.patience.retries)
        self._writing.counters = store.patience.counters
        # If the file system's `mv` only copies, a copy is visible while it is incomplete. Such stores get no temporary
        # object.
        self._moves = getattr(type(self._fs), "mv", None) is not AbstractFileSystem.mv

    def try_writing(self, directory: str) -> None:
        """Check that the store can be written, with a temporary object in `directory`.

        Raise UnsupportedError if the store is read-only, such as an archive or a web server. Raise OSError if a fault
        of the store leaves this open.
        """
        path = temporary_path(directory)
        try:
            with store_errors(path):
                self._write(path, b"")
                self._clean(directory, path)
                self._remove(path)
        except OSError as e:
            if is_transient(e) or is_transient(e.__cause__ or e):
                raise OSError(errno_of(e), f"cannot try out writing: {message(e)}. Try again later") from e
            raise UnsupportedError(f"this store cannot be written: {message(e)}") from e

    def _clean(self, directory: str, probe: str) -> None:
        """Remove temporary objects that earlier mounts left in a directory.

        The new object `probe` gives the store's current time.
        """
        with suppress(OSError), store_errors(directory):
            self._fs.invalidate_cache(directory)
            infos = self._reading.run("list", self._fs.ls, directory, detail=True)
            times = {info["name"]: stat_of_info(info).mtime_ns for info in infos if info.get("type") == "file"}
            now_ns = next((t for path, t in times.items() if path.endswith(probe.rpartition("/")[2])), 0)
            for path, mtime_ns in times.items():
                if mtime_ns and is_abandoned(path, (now_ns - mtime_ns) / 1e9):
                    self._remove(path)

    def head(self, path: str) -> Known | None:
        with store_errors(path):
            self._fs.invalidate_cache(self._fs._parent(path))
            try:
                info = self._reading.run("stat", self._fs.info, path)
            except FileNotFoundError:
                return None
        if info.get("type") == "directory":
            raise IsADirectoryError(errno.EISDIR, "is a directory", path)
        stat = stat_of_info(info)
        return Known([str(part) for part in stat.version], stat.size, stat.mtime_ns)  # type: ignore[attr-defined]

    def look(self, path: str, size: int) -> tuple[Known, bytes] | None:
        known = self.head(path)
        return None if known is None else (known, self.read(path, known, [ByteRange(0, min(size, known.size))])[0])

    def read(self, path: str, known: Known, ranges: Sequence[ByteRange]) -> list[bytes]:
        out = []
        for r in ranges:
            with store_errors(path):
                data = self._reading.run("read", self._fs.cat_file, path, start=r.start, end=r.stop) if r.stop else b""
            out.append(bytes(data))
            self._reading.counters.received(len(data))
        return out

    def put(self, path: str, base: Known | None, new: PlannedBlob, mark: str, begun: Callable[[str], None]) -> Known:
        data = new.bytes(new.plan)
        self._require(path, base)
        directory = path.rpartition("/")[0]
        temp = temporary_path(directory) if self._moves else path
        begun(temp if self._moves else "")
        with store_errors(path):
            if base is None:
                with suppress(FileExistsError, NotImplementedError):
                    self._writing.run("write", self._fs.makedirs, directory, exist_ok=True)
            syscalls.call("put_object", self._write, temp, data)
            if self._reading.run("read", self._fs.cat_file, temp) != data:
                raise OSError(errno.EIO, "was written, but something else is there", path)
            if self._moves:
                syscalls.call("rename_object", self._move, temp, path, data)
        found = self.head(path)
        if found is None:
            raise Changed
        return found

    def _write(self, path: str, data: bytes) -> None:
        self._writing.run("write", self._fs.pipe_file, path, data)

    def _move(self, old: str, new: str, data: bytes) -> None:
        try:
            self._writing.run("write", self._fs.mv, old, new)
        except FileNotFoundError:  # an earlier attempt may have succeeded without its answer arriving
            if self._reading.run("read", self._fs.cat_file, new) != data:
                raise

    def remove(self, path: str, base: Known) -> None:
        self._require(path, base)
        with store_errors(path):
            syscalls.call("delete_object", self._remove, path)

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError):  # an earlier attempt may have removed it
            self._writing.run("write", self._fs.rm_file, path)

    def _require(self, path: str, base: Known | None) -> None:
        found = self.head(path)
        if (None if found is None else found.tag) != (None if base is None else base.tag):
            raise Changed

    def abandon(self, path: str, temp: str) -> None:
        """Remove the temporary object to which the new version was written."""
        with store_errors(temp):
            self._remove(temp)
