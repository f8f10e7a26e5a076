"""Stores: keys to bytes. Local files by `pread` on cached descriptors, everything else through fsspec.

A store hands out `Blob`s (one object, opened once) and lists directories. Whatever may wait for a disk or a network
calls the store's `waiting` hook first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from shardfs.model.blobs import Blob, ByteRange, Stat

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Sequence

MAX_GAP = 1 << 20

MAX_MERGED = 16 << 20
"""Byte ranges of one object are fetched together across gaps of up to 1 MiB, up to 16 MiB at a time: the limits
that zarr-python arrived at for object stores."""

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


PACKAGES = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs",
    "adl": "adlfs", "http": "aiohttp", "https": "aiohttp",
}  # fmt: skip
"""Protocol -> the optional package that it needs."""


def package_for(source: str) -> str | None:
    """The optional package that the file system of this source needs; None if it is not known."""
    return PACKAGES.get(source.rpartition("::")[2].partition("://")[0])
