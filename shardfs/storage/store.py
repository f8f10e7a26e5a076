"""Stores: map keys to bytes. Local files are read with `pread` on cached descriptors, all other stores through fsspec.

A key is the path of an object or directory below the source, with `/` and without a slash at either end; "" is the
source itself. A store opens objects as `Blob`s and lists directories. It calls its `waiting` hook before any call that
may wait for a disk or a network.
"""

from __future__ import annotations

import errno
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from shardfs.model.byte_ranges import coalesce
from shardfs.model.errors import NOT_FOUND

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from shardfs.model.blobs import Blob, ByteRange, Stat
    from shardfs.storage.read_ahead import ReadAhead

MAX_GAP = 1 << 20

MAX_MERGED = 16 << 20
"""Byte ranges of one object are fetched together if the gap is at most 1 MiB and the total at most 16 MiB.

zarr-python uses the same limits for object stores.
"""

LARGE = 256 << 10
"""Bytes from which a read calls the `waiting` hook first, even if the data may be in the page cache.

For so many bytes, handing over to another thread costs less than the copy.
"""


class DirEntry(NamedTuple):
    """One name in a directory of the store. `stat` is None if it would cost a request, or was refused.

    `page`: the name belongs to a web server's answer that may be a file or the generated listing of a directory.
    """

    name: str
    directory: bool
    stat: Stat | None
    page: bool = False


class Store(Protocol):
    """Read access to a source; keys are explained above. All methods raise OSError if the store fails."""

    @property
    def remote(self) -> bool:
        """Whether the source is not a local directory, so that calls may cost network requests; True for zip files."""

    @property
    def blind(self) -> bool:
        """Whether the store cannot distinguish directories from missing names."""

    @property
    def read_ahead(self) -> ReadAhead | None:
        """What is fetched before readers ask for it; None if nothing is."""

    @property
    def name(self) -> str:
        """The last component of the source's path. The source may be a file, which then has the key ""."""

    def open(self, key: str) -> Blob:
        """Return the current version of an object. The store may keep it and return it again, until `reopen`.

        Raise FileNotFoundError or NotADirectoryError if it does not exist, which remote stores may raise only at the
        first read; IsADirectoryError for a directory; PermissionError, DanglingLinkError for links as
        `LocalStore.descriptor`.
        """

    def reopen(self, key: str) -> None:
        """Drop cached state of `key`, so that the next `open` sees the current version.

        Blobs that are open keep theirs.
        """

    def reopen_below(self, key: str) -> None:
        """Drop cached state of all objects below a directory."""

    def entry(self, key: str) -> DirEntry:
        """Look up one name.

        Raise FileNotFoundError if there is none, or it is a link that leads nowhere; PermissionError if a symbolic link
        leads out of the source, or for a device, a pipe or a socket.
        """

    def scan(self, key: str) -> Iterator[DirEntry]:
        """Yield the entries of a directory, in the store's order; none if the directory does not exist."""

    def documents(self, directory: str, names: Sequence[str], limit: int) -> dict[str, bytes]:
        """Return name -> bytes of those files that exist, fetched together; see `absent_documents`.

        Args:
            names: relative to `directory`.
            limit: at most `limit` + 1 bytes of each file are returned, so a longer result is a file beyond the limit.

        Raise OSError for a file that exists and cannot be read.
        """

    def require_ranges(self, keys: Iterable[str]) -> None:
        """Raise OSError if the store ignores byte ranges. In case of doubt, request a range of the shards `keys`."""

    def statvfs(self) -> os.statvfs_result | None:
        """The figures of the file system that the source is on; None if the store has none."""


def read_merged(
    ranges: Sequence[ByteRange], fetch: Callable[[list[ByteRange]], Sequence[bytes | memoryview]]
) -> list[bytes]:
    """Return the bytes of each range, in the order of `ranges`; b"" for an empty range.

    Args:
        fetch: called at most once, with fewer, merged ranges in ascending order; returns the bytes of each. Fewer bytes
            than asked for make the ranges shorter that end there.
    """
    out = [b""] * len(ranges)
    filled = [i for i, r in enumerate(ranges) if r.stop > r.start]
    merged = coalesce([ranges[i] for i in filled], MAX_GAP, MAX_MERGED)
    for (whole, members), data in zip(merged, fetch([whole for whole, _ in merged]) if merged else (), strict=True):
        for i in (filled[member] for member in members):
            out[i] = bytes(data[ranges[i].start - whole.start : ranges[i].stop - whole.start])
    return out


@contextmanager
def absent_documents(name: str, path: str) -> Iterator[None]:
    """Ignore the error of a metadata document that certainly does not exist. Every other error is raised.

    An array whose document cannot be read must not look like a plain directory. So a directory with the name of a
    document raises OSError (EIO), unless it is a common name of directories, such as `info`.
    """
    try:
        yield
    except NOT_FOUND:
        pass
    except IsADirectoryError as e:
        if "." in name:  # not EISDIR, which zarr-python takes for a missing document or chunk
            raise OSError(errno.EIO, "is a directory; a metadata document was expected", path) from e


PACKAGES = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs",
    "adl": "adlfs", "http": "aiohttp", "https": "aiohttp",
}  # fmt: skip
"""Protocol -> the optional package that the protocol's fsspec file system needs."""


EXTRAS = {"s3fs": "s3", "gcsfs": "gcs", "adlfs": "azure", "aiohttp": "http"}
"""Optional package -> the extra of shardfs that contains it, with the other packages for the same stores."""


def package_for(source: str) -> str | None:
    """Return the optional package that the source's protocol needs, installed or not; None for other protocols."""
    return PACKAGES.get(source.rpartition("::")[2].partition("://")[0])


def install_command(source: str) -> str:
    """Return the command that installs what the source's protocol needs; "" if it needs no optional package."""
    package = package_for(source)
    return f"pip install '.[{EXTRAS[package]}]' in a checkout of the code" if package else ""
