"""The fsspec file system with protocol `shardfs`. It shows the same files as a mount, without FUSE."""

from __future__ import annotations

import errno
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from fsspec import AbstractFileSystem
from fsspec.spec import AbstractBufferedFile
from fsspec.utils import tokenize

from shardfs.config import loading
from shardfs.daemon.opening import check, open_source, open_to_write
from shardfs.fsspec_fs.files import WrittenFile, make_directories, place, remove_tree
from shardfs.model.attributes import Attributes
from shardfs.model.errors import NOT_FOUND, ShardfsError
from shardfs.vfs.tree import Tree

if TYPE_CHECKING:
    from shardfs.write.tree import WriteTree

WHOLE = 1 << 62
"""A size larger than any file, to read whole files."""

_writing = threading.Lock()
_trees: dict[str, WriteTree] = {}
"""Writable trees of this process by the token of their arguments. A source has at most one writer."""


def _forget_trees() -> None:
    """Drop all writable trees in a forked process: they belong to the parent process."""
    global _writing
    _writing = threading.Lock()
    _trees.clear()


os.register_at_fork(after_in_child=_forget_trees)


class ShardFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """File system that shows each chunk of a sharded dataset as a file. Raises the same errors as `Tree`.

    The source is the argument `source`, or part of a chained URL: `shardfs://c/0/0::s3://bucket/x.zarr`. The
    constructor opens the source, and raises an error if the source is unreadable or contains no sharded dataset. A
    file system works in any thread and after a fork.

    Args:
        source: a path or an fsspec URL.
        layout: "native" shows the files that an unsharded dataset of the same format has. For other layouts, see
            docs/layouts.md.
        unsupported: "fail" refuses a source that the layout cannot express; "skip" omits the parts it cannot express.
        chunk_codec: codec of the shown chunks, such as "raw"; None keeps the codec of the source.
        storage_options: for the file system of `source`.
        index_cache: memory for shard indices, in bytes, or a text such as "256M".
        chunk_cache: memory for chunks, in the same units.
        index_ttl: seconds for which a cached index, or the absence of a shard, is valid, or a text such as "10m".
        symlinks: "inside" or "follow", for a local source.
        rw: allow writing. The journal holds written data until it is published: in the background, by `publish`, or by
            `close`. See docs/durability.md. While the file system is open, no other process can write to the source,
            not even a forked one. File systems with equal arguments in one process share a writer, in all threads;
            `close` of one of them closes it for all.
        write_options: mount options for writing, such as `{"create": "zarr3", "journal": "/scratch"}`.
        fo: set by fsspec: the path in the rest of a chained URL.
        target_protocol: set by fsspec: the protocol in the rest of a chained URL.
        target_options: set by fsspec: the storage options for the rest of a chained URL.

    Examples:
        >>> fs = fsspec.filesystem("shardfs", source="brain.zarr")
        >>> fs.ls("t1/c/0/0", detail=False)
        ['/t1/c/0/0/0', '/t1/c/0/0/1', '/t1/c/0/0/2', '/t1/c/0/0/3']
        >>> fs.cat_file("t1/c/0/0/0", end=2)  # a chunk has the bytes that are in its shard: here, gzip data
        b'\\x1f\\x8b'
    """

    protocol = "shardfs"
    # Names begin with a slash and the root is "", as in fsspec's memory file system. The FsspecStore of zarr-python
    # removes `prefix + "/"` from the results of `ls`, so it could not list a subdirectory without the slash.
    root_marker = "/"

    def __init__(
        self,
        source: str | os.PathLike[str] | None = None,
        layout: str = "native",
        *,
        storage_options: Mapping[str, Any] | None = None,
        index_cache: int | str = "256M",
        chunk_cache: int | str = "256M",
        index_ttl: float | str = math.inf,
        symlinks: str = "inside",
        unsupported: str = "fail",
        chunk_codec: str | None = None,
        rw: bool = False,
        write_options: Mapping[str, str] | None = None,
        fo: str | None = None,
        target_protocol: str | None = None,
        target_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        flags = {"layout": layout, "symlinks": symlinks, "unsupported": unsupported, "chunk_codec": chunk_codec}
        flags |= {"index_cache": str(index_cache), "chunk_cache": str(chunk_cache)}
        flags |= {"rw": str(rw), "index_ttl": _duration(index_ttl), **(write_options or {})}
        options = loading.merged(loading.from_flags(flags))
        check(options)
        self.source = _source(source, fo, target_protocol)
        for_source = storage_options if storage_options is not None else target_options
        self.options = replace(options, storage_options=for_source or {})
        self._arguments = tokenize(self.source, self.options)
        self._opened = self._open_tree()

    def _open_tree(self) -> tuple[int, Tree | WriteTree]:
        """The number of this process, and its tree."""
        if not self.options.rw:
            return os.getpid(), open_source(self.source, self.options)
        with _writing:
            if self._arguments not in _trees:
                tree = open_source(self.source, self.options)
                _trees[self._arguments] = open_to_write(tree, self.source, self.options)
            return os.getpid(), _trees[self._arguments]

    @property
    def tree(self) -> Tree | WriteTree:
        """The tree of this process, a `WriteTree` with `rw`.

        Opens a new tree after a fork: inherited locks and connections are unusable. This can raise BusyError with `rw`.
        """
        pid, tree = self._opened
        if pid != os.getpid():
            self._opened = pid, tree = self._open_tree()
        return tree

    @property
    def fsid(self) -> str:
        return f"shardfs-{self._fs_token}"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(p) for p in path]
        name = os.fspath(path).removeprefix("shardfs://").strip("/")
        return f"/{name}" if name else ""

    # ---- names ----

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        return _info(path, self.tree.resolve(path))

    def exists(self, path: str, **kwargs: Any) -> bool:
        with suppress(*NOT_FOUND):
            self.info(path)
            return True
        return False

    def modified(self, path: str) -> datetime:
        return datetime.fromtimestamp(self.info(path)["mtime"], UTC)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        path = self._strip_protocol(path)
        entry = self.tree.resolve(path)
        if not entry.directory:
            return [_info(path, entry) if detail else path]
        if detail:
            return list(self._details(path, entry.number))
        names = (name for batch in self.tree.scan(entry.number) for name in batch.names.tolist())
        return [f"{path}/{os.fsdecode(name)}" for name in names]

    def _details(self, path: str, number: int) -> Iterator[dict[str, Any]]:
        for batch in self.tree.scan(number):
            columns = (batch.names, batch.numbers, batch.directories, batch.sizes, batch.mtimes_ns)
            for name, *fields in zip(*(column.tolist() for column in columns), strict=True):
                yield self._detail(f"{path}/{os.fsdecode(name)}", number, name, Attributes(*fields))

    def _detail(self, path: str, parent: int, name: bytes, listed: Attributes) -> dict[str, Any]:
        """The details of one listed entry. Looks up a size that the listing lacks; the size is None if this fails."""
        if listed.size >= 0:
            return _info(path, listed)
        try:
            return _info(path, self.tree.lookup(parent, name))
        except (OSError, ShardfsError):  # one bad entry must not hide the others
            return {"name": path, "size": None, "type": "file", "mtime": listed.mtime_ns / 1e9}

    # ---- bytes ----

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        number, offset, size = self._request(path, start, end)
        return bytes(self.tree.read(number, offset, size))

    def cat_ranges(
        self,
        paths: list[str],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        on_error: str = "return",
        **kwargs: Any,
    ) -> list[bytes | Exception]:
        """Ignores `max_gap`: adjacent chunks of a shard are always fetched together."""
        out: list[bytes | Exception] = [b""] * len(paths)
        requests: dict[int, tuple[int, int, int]] = {}
        for i, wanted in enumerate(zip(paths, _each(starts, paths), _each(ends, paths), strict=True)):
            try:
                requests[i] = self._request(*wanted)
            except (OSError, ShardfsError) as e:
                out[i] = e
        for i, data in zip(requests, self.tree.read_many(list(requests.values())), strict=True):
            out[i] = data
        if on_error == "raise":
            for data in out:
                if isinstance(data, Exception):
                    raise data
        return out

    def _request(self, path: str, start: int | None, end: int | None) -> tuple[int, int, int]:
        """(number, offset, size) of a part of a file. `start` and `end` have the meaning of a slice."""
        path = self._strip_protocol(path)
        if not start and end is None:  # the whole file: its size may be expensive to determine
            return self.tree.number(path), 0, WHOLE
        entry = self.tree.resolve(path)
        if entry.directory:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        first, last, _ = slice(start, end).indices(entry.size)
        return entry.number, first, max(last - first, 0)

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | str | None = None,
        autocommit: bool = True,
        cache_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> ShardedFile | WrittenFile:
        if mode != "rb":
            return WrittenFile(self._to_write(path), path, mode, autocommit=autocommit)
        size = self.blocksize if block_size is None else block_size
        file = ShardedFile(self, path, mode, size, autocommit, cache_options=cache_options, **kwargs)
        if file.details["type"] == "directory":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return file

    # ---- changes ----

    def _write_tree(self, path: str) -> WriteTree:
        """The writable tree, even if it is closed. Raise OSError (EROFS), which names `path`, without `rw`."""
        tree = self.tree
        if isinstance(tree, Tree):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return tree

    def _to_write(self, path: str) -> WriteTree:
        """The writable tree. Raise OSError (EROFS), which names `path`, if it is closed, or without `rw`."""
        tree = self._write_tree(path)
        if tree.is_closed:
            raise OSError(errno.EROFS, "the journal is closed; a new file system can write again", path)
        return tree

    def _place(self, path: str) -> tuple[WriteTree, int, bytes]:
        """The writable tree, the number of a path's parent directory, and the name in it."""
        tree = self._to_write(path)
        return (tree, *place(tree, self._strip_protocol(path)))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        path = self._strip_protocol(path)
        with WrittenFile(self._to_write(path), path, "xb" if mode == "create" else "wb") as file:
            file.write(value)

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        if create_parents:
            make_directories(self._to_write(path), self._strip_protocol(path).rpartition("/")[0])
        tree, parent, name = self._place(path)
        tree.mkdir(parent, name, 0o755)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        path, tree = self._strip_protocol(path), self._to_write(path)
        if not exist_ok and self.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        make_directories(tree, path)

    def rmdir(self, path: str) -> None:
        tree, parent, name = self._place(path)
        tree.rmdir(parent, name)

    def rm_file(self, path: str) -> None:
        tree, parent, name = self._place(path)
        tree.unlink(parent, name)

    _rm = rm_file

    def rm(self, path: str | list[str], recursive: bool = False, maxdepth: int | None = None) -> None:
        for child in self.expand_path(path, recursive=False):
            if recursive:
                remove_tree(*self._place(child))
            elif self.isdir(child):
                self.rmdir(child)
            else:
                self.rm_file(child)

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        make_directories(self._to_write(path2), self._strip_protocol(path2).rpartition("/")[0])
        tree, parent, name = self._place(path1)
        tree.rename(parent, name, *place(tree, self._strip_protocol(path2)), noreplace=False)

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        if self.isdir(path1):
            self.makedirs(path2, exist_ok=True)
        else:
            self.pipe_file(path2, self.cat_file(path1))

    def touch(self, path: str, truncate: bool = True, **kwargs: Any) -> None:
        if truncate or not self.exists(path):
            self.pipe_file(path, b"")
        else:
            self._to_write(path).set_times(self.tree.resolve(self._strip_protocol(path)).number, None)

    def publish(self, path: str = "", timeout: float | None = None) -> None:
        """Wait until all data written at and below a path is in its shards, for at most `timeout` seconds.

        Raise the first OSError: TimeoutError if it takes longer, EROFS without `rw`, ESTALE for a conflict with another
        program, and errors of earlier closes, which the program may have ignored.
        """
        path = self._strip_protocol(path)
        self._to_write(path).pending.publish(path.strip("/"), timeout)

    def close(self, timeout: float = 3600.0) -> list[str]:
        """Publish the written data and release the source for other writers; return the paths left in the journal.

        The paths have no slash at the beginning. Publishing takes at most `timeout` seconds, and up to 10 s more for
        each thread that is busy then. Files that are still open for writing are closed first: their own `close` raises
        the error if they could not be saved. Afterwards this file system raises EROFS for changes, and can still read;
        a new one can write again. Another call returns the same paths. Raise OSError: EROFS without `rw`, or if the
        journal cannot be synced.
        """
        tree = self._write_tree("")
        with _writing:
            if _trees.get(self._arguments) is tree:
                del _trees[self._arguments]
        for token, other in list(self._cache.items()):  # fsspec caches one instance for each thread
            if other._opened[1] is tree:
                self._cache.pop(token, None)
        return tree.close(timeout)


class ShardedFile(AbstractBufferedFile):  # type: ignore[misc]
    """A file of the tree that is open for reading, with the buffer and the methods of fsspec's files."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        data: bytes = self.fs.cat_file(self.path, start, end)
        return data


def _source(source: str | os.PathLike[str] | None, fo: str | None, protocol: str | None) -> str:
    if source is not None:
        return os.fspath(source)
    if protocol is None and not fo:
        raise ValueError("shardfs needs a source: shardfs::s3://bucket/path, or source='/path'")
    # Some file systems, such as http, keep the protocol in `fo`; most remove it.
    return fo if fo and (protocol is None or "://" in fo) else f"{protocol}://{fo or ''}"


def _duration(seconds: float | str) -> str:
    """A time in the notation of the options, which has no exponents."""
    if isinstance(seconds, str):
        return seconds
    return "forever" if seconds == math.inf else f"{seconds:.9f}"


def _info(path: str, attributes: Attributes) -> dict[str, Any]:
    return {
        "name": path,
        "size": attributes.size,
        "type": "directory" if attributes.directory else "file",
        "mtime": attributes.mtime_ns / 1e9,
    }


def _each(value: Any, like: list[str]) -> Iterable[int | None]:
    """One bound per path. fsspec accepts a single bound for all paths, or a list."""
    return value if isinstance(value, Iterable) else [value] * len(like)
