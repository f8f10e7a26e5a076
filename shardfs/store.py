"""Stores: keys to bytes. Local files by `pread` on cached descriptors, everything else through fsspec.

A store hands out `Blob`s (one object, opened once) and lists directories. Whatever may wait for a disk or a network
calls the store's `waiting` hook first.
"""

from __future__ import annotations

import errno
import os
import resource
import stat as stat_module
import threading
from collections import OrderedDict
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import fsspec
from fsspec.core import url_to_fs

from shardfs.blobs import absolute
from shardfs.cache import nothing
from shardfs.errors import DanglingLinkError
from shardfs.masking import is_path
from shardfs.model import Blob, ByteRange, ByteRequest, Stat, Suffix
from shardfs.patience import NoAnswer, Patience, http_status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

MAX_GAP = 1 << 20
MAX_MERGED = 16 << 20
"""Byte ranges of one object are fetched together across gaps of up to 1 MiB, up to 16 MiB at a time: the limits
that zarr-python arrived at for object stores."""

MAX_DESCRIPTORS = 1024
DESCRIPTORS_SHARE = 4
"""Shards are kept open, up to so many, and at most a fourth of what the process may open: the rest is needed to write,
and where shardfs is a library in another program, is not its own to take."""

OWN = ".shardfs"
"""What begins so is how shardfs writes: locks, and new versions on their way. It is not listed."""

LARGE = 256 << 10
"""To let another thread lead costs less than the copy that it takes to ask the page cache alone for so many bytes."""


class DirEntry(NamedTuple):
    """One name in a directory of the store. `stat` is None where it would cost a request, or was refused.

    `page`: a web server's answer may be the listing of a directory as well as a file.
    """

    name: str
    directory: bool
    stat: Stat | None
    page: bool = False


class Store(Protocol):
    """What the tree needs of the source.

    `remote`: asking costs a request over a network. `blind`: it cannot tell directories from missing names.
    """

    @property
    def remote(self) -> bool: ...

    @property
    def blind(self) -> bool: ...

    @property
    def name(self) -> str:
        """What the source itself is called, without what is above it. It may be a file, of the key ""."""

    def open(self, key: str) -> Blob:
        """Raise FileNotFoundError; a remote object may show that it is missing only when it is read."""

    def reopen(self, key: str) -> None:
        """Forget what is remembered of `key`, so that `open` sees what is there now."""

    def reopen_below(self, key: str) -> None:
        """The same of everything in a directory."""

    def entry(self, key: str) -> DirEntry:
        """Raise FileNotFoundError, or PermissionError for what leaves the source."""

    def scan(self, key: str) -> Iterator[DirEntry]:
        """The names in a directory, in the store's own order. Nothing if there is no such directory."""

    def documents(self, directory: str, names: Sequence[str], limit: int) -> dict[str, bytes]:
        """The bytes of those files that exist, fetched together; `limit` + 1 bytes at most of each."""

    def require_ranges(self, keys: Iterable[str]) -> None:
        """Raise OSError if the store sends only whole objects. `keys` of shards are tried if this is in doubt."""

    def statvfs(self) -> os.statvfs_result | None: ...


def coalesce(ranges: Sequence[ByteRange], max_gap: int, max_merged: int) -> list[tuple[ByteRange, list[int]]]:
    """Merged ranges, each with the positions in `ranges` that it covers."""
    merged: list[tuple[ByteRange, list[int]]] = []
    for i in sorted(range(len(ranges)), key=lambda i: ranges[i]):
        r = ranges[i]
        if merged:
            last, members = merged[-1]
            stop = max(last.stop, r.stop)
            if r.start - last.stop <= max_gap and stop - last.start <= max_merged:
                members.append(i)
                merged[-1] = (ByteRange(last.start, stop), members)
                continue
        merged.append((r, [i]))
    return merged


class _Descriptor:
    """Closes a descriptor once nobody uses it.

    Apart from `LocalBlob`, to which there are weak references: while `__del__` runs, those still lead to the object,
    and another thread would read from a descriptor that is closed, or is another file's by now.
    """

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self.fd)


class LocalBlob:
    """An open file. Keeps the version it was opened with, also when the file is replaced by rename."""

    __slots__ = ("__weakref__", "_owner", "_stat", "_waiting", "base", "fd")

    def __init__(self, fd: int, info: os.stat_result, waiting: Callable[[], None]) -> None:
        self.fd, self.base, self._waiting = fd, 0, waiting
        self._owner = _Descriptor(fd)
        self._stat = stat_of(info)

    def stat(self) -> Stat:
        return self._stat

    def read(self, requests: Sequence[ByteRequest]) -> list[bytes]:
        out = []
        for request in requests:
            start, stop = absolute(request, self._stat.size)
            out.append(pread(self.fd, stop - start, start, self._waiting))
        return out


def pread(fd: int, size: int, position: int, waiting: Callable[[], None]) -> bytes:
    """`size` bytes, fewer at the end of the file. Calls `waiting` if they are many, or not in the page cache."""
    if size >= LARGE:
        waiting()
        whole = os.pread(fd, size, position)
        if len(whole) == size:
            return whole
    data = bytearray(size)
    view, done = memoryview(data), 0
    flags = os.RWF_NOWAIT
    while done < size:
        try:
            n = os.preadv(fd, [view[done:]], position + done, flags)
        except OSError as e:
            if not flags or e.errno not in (errno.EAGAIN, errno.EOPNOTSUPP):
                raise
            flags = 0
            waiting()
            continue
        if n == 0:
            break
        done += n
    return bytes(view[:done]) if done < size else bytes(data)


class LocalStore:
    """A directory or a file of this machine. Symbolic links that lead out are refused unless `follow_symlinks`."""

    remote = blind = False

    def __init__(self, root: str, waiting: Callable[[], None] = nothing, *, follow_symlinks: bool = False) -> None:
        self.root, self.name = os.path.realpath(root), os.path.basename(os.path.abspath(root))
        self._inside = self.root.rstrip("/") + "/"
        self.follow_symlinks, self._waiting = follow_symlinks, waiting
        self._blobs: OrderedDict[str, LocalBlob] = OrderedDict()
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        unlimited = soft == resource.RLIM_INFINITY
        self._most_open = MAX_DESCRIPTORS if unlimited else min(MAX_DESCRIPTORS, soft // DESCRIPTORS_SHARE)
        self._reopened = 0  # how often something was forgotten
        self._lock = threading.Lock()

    def path(self, key: str) -> str:
        """Of the file, as the system knows it; `confined` has not been asked."""
        return self._inside + key if key else self.root

    def confined(self, fd: int, key: str) -> None:
        """Raise PermissionError if what is open lies outside the source."""
        # Asking the kernel where the open descriptor lies leaves no moment in which a link could be swapped.
        if self.follow_symlinks:
            return
        real = os.readlink(f"/proc/self/fd/{fd}")
        if real != self.root and not real.startswith(self._inside):
            why = f"a symbolic link leads out of the source to {real}, and -o symlinks=follow was not given"
            raise PermissionError(errno.EACCES, why, key)

    def open(self, key: str) -> LocalBlob:
        blob = self._blobs.get(key)
        if blob is not None:
            with suppress(KeyError):
                self._blobs.move_to_end(key)
            return blob
        before = self._reopened
        try:
            blob = self._open(key)
        except FileNotFoundError as e:
            if (link := self._dangling(key)) is not None:
                why = f"the symbolic link {link} leads nowhere (git-annex: git annex get)"
                raise DanglingLinkError(errno.ENOENT, why, key) from e
            raise
        with self._lock:
            if self._reopened != before:
                return blob  # it may be what had to be forgotten meanwhile
            self._blobs[key] = blob
            while len(self._blobs) > self._most_open:
                self._blobs.popitem(last=False)
        return blob

    def _open(self, key: str) -> LocalBlob:
        fd = os.open(self.path(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a fifo must not block us
        try:
            self.confined(fd, key)
            info = os.fstat(fd)
            if stat_module.S_ISDIR(info.st_mode):
                raise IsADirectoryError(errno.EISDIR, "is a directory", key)
            if not stat_module.S_ISREG(info.st_mode):
                raise PermissionError(errno.EACCES, "is neither a file nor a directory", key)
            return LocalBlob(fd, info, self._waiting)
        except BaseException:
            os.close(fd)
            raise

    def _dangling(self, key: str) -> str | None:
        """Return the key of a symbolic link to nothing because of which `key` does not exist; None if there is none."""
        while key:
            path = self.path(key)
            if os.path.lexists(path):
                return None if os.path.exists(path) else key
            key = key.rpartition("/")[0]
        return None

    def reopen(self, key: str) -> None:
        """Forget the descriptor of `key`, so that the next `open` sees what is there now."""
        with self._lock:
            self._reopened += 1
            self._blobs.pop(key, None)

    def reopen_below(self, key: str) -> None:
        """Forget the descriptors of all files in a directory."""
        with self._lock:
            self._reopened += 1
            for known in [k for k in self._blobs if k.startswith(f"{key}/")]:
                self._blobs.pop(known, None)

    def entry(self, key: str) -> DirEntry:
        fd = os.open(self.path(key), os.O_PATH | os.O_CLOEXEC)
        try:
            self.confined(fd, key)
            info = os.fstat(fd)
        finally:
            os.close(fd)
        directory = stat_module.S_ISDIR(info.st_mode)
        if not directory and not stat_module.S_ISREG(info.st_mode):
            raise PermissionError(errno.EACCES, "is neither a file nor a directory", key)
        return DirEntry(key.rsplit("/", 1)[-1], directory, stat_of(info))

    def scan(self, key: str) -> Iterator[DirEntry]:
        try:
            fd = os.open(self.path(key), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            self.confined(fd, key)
            self._waiting()
            with os.scandir(fd) as entries:
                for e in entries:
                    if not e.name.startswith(OWN):
                        yield self._listed(key, e)
        finally:
            os.close(fd)

    def _listed(self, parent: str, e: os.DirEntry[str]) -> DirEntry:
        if e.is_symlink():
            try:
                return self.entry(f"{parent}/{e.name}" if parent else e.name)
            except OSError:
                return DirEntry(e.name, False, None)  # listed; whoever opens it learns why not
        directory = e.is_dir(follow_symlinks=False)
        with suppress(OSError):
            info = e.stat(follow_symlinks=False)
            if directory or stat_module.S_ISREG(info.st_mode):
                return DirEntry(e.name, directory, stat_of(info))
        return DirEntry(e.name, directory, None)

    def documents(self, directory: str, names: Sequence[str], limit: int) -> dict[str, bytes]:
        out = {}
        for name in names:
            key = f"{directory}/{name}" if directory else name
            with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                out[name] = self._open(key).read([ByteRange(0, limit + 1)])[0]
        return out

    def require_ranges(self, keys: Iterable[str]) -> None:
        pass

    def statvfs(self) -> os.statvfs_result:
        return os.statvfs(self.root)


def stat_of(info: os.stat_result) -> Stat:
    """What the system says of a file, as a store says it."""
    return Stat(info.st_size, info.st_mtime_ns, (info.st_dev, info.st_ino, info.st_mtime_ns, info.st_size))


class FsspecBlob:
    """One object of an fsspec file system; nothing is asked before it is needed."""

    __slots__ = ("__weakref__", "_known", "_store", "base", "fd", "key")

    def __init__(self, store: FsspecStore, key: str) -> None:
        self.fd, self.base = -1, 0
        self._store, self.key = store, key
        self._known: Stat | None = None

    def stat(self) -> Stat:
        if self._known is None:
            self._known = self._store.stat(self.key)
        return self._known

    def read(self, requests: Sequence[ByteRequest]) -> list[bytes]:
        return self._store.read(self.key, requests)


class FsspecStore:
    """Any fsspec file system. fsspec's event loop stays behind this class: every call here blocks, but not for ever."""

    remote, blind = True, False

    def __init__(
        self, fs: Any, root: str, waiting: Callable[[], None] = nothing, patience: Patience | None = None
    ) -> None:
        self.fs, self.root, self._waiting = fs, root.rstrip("/"), waiting
        self.name = self.root.rsplit("/", 1)[-1]
        self.patience = patience or Patience()

    def path(self, key: str) -> str:
        """Of the object, as its file system knows it."""
        return f"{self.root}/{key}" if key and self.root else key or self.root

    def open(self, key: str) -> FsspecBlob:
        return FsspecBlob(self, key)

    def reopen(self, key: str) -> None:
        """Forget what fsspec remembers of `key`."""
        self.fs.invalidate_cache(self.fs._parent(self.path(key)))

    def reopen_below(self, key: str) -> None:
        """Forget what fsspec remembers, which is by directory."""
        self.fs.invalidate_cache()

    def stat(self, key: str) -> Stat:
        info = self._info(key)
        if info.get("type") == "directory":
            raise IsADirectoryError(errno.EISDIR, "is a directory", key)
        return stat_of_info(info)

    def _info(self, key: str) -> Mapping[str, Any]:
        self._waiting()
        path = self.path(key)
        with store_errors(path):
            return cast("Mapping[str, Any]", self.patience.run("stat", self.fs.info, path))

    def read(self, key: str, requests: Sequence[ByteRequest]) -> list[bytes]:
        self._waiting()
        path = self.path(key)
        if len(requests) == 1:
            return [self._read_one(path, requests[0])]
        out: list[bytes] = [b""] * len(requests)
        ranges = []
        for i, r in enumerate(requests):
            if isinstance(r, Suffix):
                out[i] = self._read_one(path, r)
            elif r.stop > r.start:
                ranges.append((i, r))
        merged = coalesce([r for _, r in ranges], MAX_GAP, MAX_MERGED)
        if not merged:
            return out
        with store_errors(path):
            got = self._ask_for_ranges(path, [r for r, _ in merged])
            parts = [_bytes_or_raise(data) for data in got]
        self.patience.counters.received(sum(map(len, parts)))
        for (whole, members), data in zip(merged, parts, strict=True):
            _require_part(data, whole.stop - whole.start, path)
            for m in members:
                i, r = ranges[m]
                out[i] = bytes(data[r.start - whole.start : r.stop - whole.start])
        return out

    def _read_one(self, path: str, request: ByteRequest) -> bytes:
        wanted = request.size if isinstance(request, Suffix) else request.stop - request.start
        if wanted <= 0:
            return b""
        with store_errors(path):
            try:
                data = self._ask_for(path, request)
            except Exception as e:  # noqa: BLE001 - raised again, but for one
                data = _bytes_or_raise(e)
        self.patience.counters.received(len(data))
        _require_part(data, wanted, path)
        return data

    def _ask_for(self, path: str, request: ByteRequest) -> bytes:
        start, stop = (-request.size, None) if isinstance(request, Suffix) else request
        return cast("bytes", self.patience.run("read", self.fs.cat_file, path, start=start, end=stop))

    def _ask_for_ranges(self, path: str, ranges: Sequence[ByteRange]) -> list[bytes | Exception]:
        starts, stops = [r.start for r in ranges], [r.stop for r in ranges]
        paths = [path] * len(ranges)
        found = self.patience.run("read", self.fs.cat_ranges, paths, starts, stops, on_error="return")
        return cast("list[bytes | Exception]", found)

    def _ask_for_documents(self, directory: str, paths: Sequence[str], limit: int) -> list[bytes | Exception]:
        """The beginning of each object, of more than `limit` bytes if it is longer; or why there is none."""
        nothing: list[int | None] = [None] * len(paths)  # `cat` would take brackets in a path for a pattern
        found = self.patience.run("documents", self.fs.cat_ranges, list(paths), nothing, nothing, on_error="return")
        return cast("list[bytes | Exception]", found)

    def entry(self, key: str) -> DirEntry:
        info = self._info(key)
        directory = info.get("type") == "directory"
        return DirEntry(key.rsplit("/", 1)[-1], directory, None if directory else stat_of_info(info))

    def scan(self, key: str) -> Iterator[DirEntry]:
        self._waiting()
        path = self.path(key)
        try:
            with store_errors(path):
                listed = self.patience.run("list", self.fs.ls, path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return
        directories = {info["name"].rstrip("/") for info in listed if info.get("type") == "directory"}
        for info in listed:
            name = info["name"].rstrip("/").rsplit("/", 1)[-1]
            if info["name"].rstrip("/") == path or not name:
                continue  # some stores list the directory's own marker object
            if info.get("type") != "directory" and info["name"] in directories:
                continue  # in object stores there may be both, of which the directory is found
            if name.startswith(OWN):
                continue
            if name in (".", "..") or "/" in name or "\0" in name:
                continue
            directory = info.get("type") == "directory"
            yield DirEntry(name, directory, None if directory or info.get("size") is None else stat_of_info(info))

    def documents(self, directory: str, names: Sequence[str], limit: int) -> dict[str, bytes]:
        self._waiting()
        paths = [self.path(f"{directory}/{n}" if directory else n) for n in names]
        with store_errors(self.path(directory)):
            got = self._ask_for_documents(self.path(directory), paths, limit)
        self.patience.counters.received(sum(len(data) for data in got if isinstance(data, bytes)))
        out: dict[str, bytes] = {}
        refused: PermissionError | None = None
        for name, path, data in zip(names, paths, got, strict=True):
            try:
                with store_errors(path):
                    out[name] = _bytes_or_raise(data)[: limit + 1]
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                continue
            except PermissionError as e:  # what a store also says of missing names to those who may not list
                refused = refused if "/" in name else e
        if refused is not None and not out and not directory:
            raise refused
        return out

    def require_ranges(self, keys: Iterable[str]) -> None:
        pass

    def statvfs(self) -> None:
        return None


@contextmanager
def store_errors(path: str) -> Iterator[None]:
    """Whatever a store's client raises leaves as an OSError: clients have exceptions of their own."""
    try:
        yield
    except OSError as e:
        if isinstance(e, NoAnswer) and e.filename is None:
            e.filename = path
        raise
    except Exception as e:
        number = errno.EACCES if http_status(e) in (401, 403) else errno.EIO
        raise OSError(number, f"{type(e).__name__}: {e}", path) from e


def _bytes_or_raise(data: bytes | Exception) -> bytes:
    if isinstance(data, Exception):
        if http_status(data) == 416:  # the range begins behind the end of the object
            return b""
        raise data
    return data


def _require_part(data: bytes, wanted: int, path: str) -> None:
    if len(data) > wanted:
        why = f"the store ignores byte ranges: {wanted} bytes were asked for, and {len(data)} came"
        raise OSError(errno.EIO, f"{why}; use a store that honours ranges, or a copy of the source", path)


def _mtime_ns(info: Mapping[str, Any]) -> int:
    """As fsspec's file systems tell it: seconds, a datetime, a header of HTTP, or the fields of a zip's directory."""
    when = info.get("mtime") or info.get("LastModified") or info.get("last_modified") or info.get("created")
    with suppress(ValueError, TypeError):
        if when is None and "Last-Modified" in info:
            from email.utils import parsedate_to_datetime  # takes a while to import

            when = parsedate_to_datetime(info["Last-Modified"])
        elif when is None and "date_time" in info:
            when = datetime(*info["date_time"])
    seconds = when.timestamp() if isinstance(when, datetime) else when
    return int(seconds * 1e9) if isinstance(seconds, int | float) else 0


def stat_of_info(info: Mapping[str, Any]) -> Stat:
    """What one of fsspec's file systems says of an object, as a store says it."""
    ns = _mtime_ns(info)
    size = info.get("size")
    if size is None:
        raise OSError(errno.EIO, "the store does not tell the size", info.get("name"))
    return tagged(info.get("ETag") or info.get("etag") or info.get("generation"), int(size), ns)


def tagged(tag: Any, size: int, mtime_ns: int) -> Stat:
    """Of an object that its store tells versions apart of by a tag, if by anything.

    Then the time says no more, and a store may tell it otherwise from request to request (a weak tag says less).
    """
    weak = tag is None or str(tag).startswith("W/")
    return Stat(size, mtime_ns, (tag, mtime_ns if weak else None, size))


PACKAGES = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs",
    "adl": "adlfs", "http": "aiohttp", "https": "aiohttp",
}  # fmt: skip
"""Protocol -> the optional package that it needs."""


def package_for(source: str) -> str | None:
    """The optional package that the file system of this source needs; None if it is not known."""
    return PACKAGES.get(source.rpartition("::")[2].partition("://")[0])


def open_store(
    source: str,
    storage_options: Mapping[str, Any] | None = None,
    waiting: Callable[[], None] = nothing,
    *,
    follow_symlinks: bool = False,
    patience: Patience | None = None,
) -> Store:
    """The store behind a path or an fsspec URL (chained ones too). `patience` is for what is not local.

    Raise FileNotFoundError if there is nothing at a local path.
    """
    first, separator, _ = source.partition("://" if "://" in source else "::")
    if is_path(source) or (separator == "::" and first not in fsspec.available_protocols()):
        return _open_local(source, waiting, follow_symlinks=follow_symlinks)
    patience = patience or Patience()
    try:
        # Some file systems read when they are made: the directory of an archive, for instance.
        fs, path = patience.run("open", lambda: url_to_fs(source, **(storage_options or {})))
    except TypeError as e:  # so they say that an option is missing or unknown
        raise ValueError(str(e)) from e
    except ValueError as e:  # "The HTTP server doesn't appear to support range requests", "Cannot seek streaming HTTP"
        archive, separator, url = source.partition("::http")
        if not separator or "HTTP" not in str(e):
            raise
        why = "the web server does not send byte ranges, which archives are read by"
        told = f"{why}; to download the archive first, mount {archive}::simplecache::http{url}"
        raise OSError(errno.EOPNOTSUPP, told) from e
    if isinstance(fs, fsspec.implementations.local.LocalFileSystem):
        return _open_local(path, waiting, follow_symlinks=follow_symlinks)
    if "http" in fs.protocol:
        from shardfs.web import WebStore

        return WebStore(fs, path, waiting, patience)
    return FsspecStore(fs, path, waiting, patience)


def _open_local(path: str, waiting: Callable[[], None], *, follow_symlinks: bool) -> LocalStore:
    os.stat(path)  # says why, if it is not there
    return LocalStore(path, waiting, follow_symlinks=follow_symlinks)
