"""The errors of shardfs, and the table that maps errors to errno and exit codes."""

from __future__ import annotations

import errno
import logging
import os
from typing import TYPE_CHECKING, Any

from shardfs.masking import scrubbed

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger("shardfs")


class ShardfsError(Exception):
    """Base of the errors that are shardfs's own; path errors are the builtin `OSError` subclasses."""


class CorruptShardError(ShardfsError):
    """Stored bytes contradict the format: a bad index, checksum, range or document.

    Args:
        where: the collection (array, scale, ...) the bytes belong to.
        key: the shard object or document that holds them.
        why: what was expected and what was found.
        slot: the chunk's number inside the shard's index, when one chunk is concerned.
    """

    def __init__(self, where: str, key: str, why: str, slot: int | None = None) -> None:
        self.where, self.key, self.why, self.slot = where, key, why, slot
        entry = "" if slot is None else f", slot {slot}"
        super().__init__(f"{where or '/'}: {key}{entry}: {why}")


class DanglingLinkError(FileNotFoundError):
    """A symbolic link on the way to a file leads nowhere, as in a git-annex repository without the file's content."""


class UnfitChunkError(ShardfsError, ValueError):
    """Bytes that the array cannot hold at these coordinates, or that contradict the chunks beside them."""

    def __init__(self, coords: tuple[int, ...], why: str) -> None:
        self.coords = coords
        super().__init__(f"chunk {coords}: {why}")


class StaleShardError(ShardfsError):
    """A shard kept changing under the reader: another writer replaced it more than once."""


class UnsupportedError(ShardfsError):
    """A layout cannot show this array, or shardfs cannot show this source."""


class NotADatasetError(UnsupportedError):
    """The source holds no sharded data that shardfs knows."""


class MountError(OSError):
    """The mountpoint is unusable, or the kernel, fusermount3 or libfuse refused; the message says which."""


class BusyError(OSError):
    """Another process writes to the source, or works on its journal; the message names it. Its errno is EBUSY.

    Args:
        owner: the content of that process's lock.
    """

    owner: Mapping[str, Any] = {}


def errno_of(error: BaseException) -> int:
    """The errno a program on the mount sees; the only such table.

    A bug is `EIO` (and a traceback in the log, which is the caller's duty), never `EINVAL`: programs take
    `EINVAL` for a statement about their own arguments.
    """
    if isinstance(error, CorruptShardError):
        return errno.EIO
    if isinstance(error, UnfitChunkError):
        return errno.EINVAL
    if isinstance(error, StaleShardError):
        return errno.ESTALE
    if isinstance(error, UnsupportedError):
        return errno.ENOTSUP
    if isinstance(error, FileNotFoundError):  # fsspec raises these without an errno
        return errno.ENOENT
    if isinstance(error, NotADirectoryError):
        return errno.ENOTDIR
    if isinstance(error, IsADirectoryError):
        return errno.EISDIR
    if isinstance(error, PermissionError):
        return error.errno or errno.EACCES
    if isinstance(error, TimeoutError):
        return errno.ETIMEDOUT
    if isinstance(error, OSError):
        return error.errno or errno.EIO
    return errno.EIO


def is_expected(error: BaseException) -> bool:
    """Whether `error` describes the data, the store or the request, and so is no bug of shardfs."""
    return isinstance(error, ShardfsError | OSError)


def exit_code(error: BaseException) -> int:
    """The exit code for an error that ended the program.

    1 unexpected, 3 source not found or unreadable, 4 not a supported sharded dataset, or in use by another writer, 5
    mount failed.
    """
    if isinstance(error, MountError):
        return 5
    if isinstance(error, UnsupportedError | BusyError):
        return 4
    return 3 if isinstance(error, OSError) else 1


def message(error: BaseException) -> str:
    """One line for the user, without secrets."""
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    elif isinstance(error, FileNotFoundError):  # fsspec's are a path, without words
        text = ": ".join(filter(None, [str(error), os.strerror(errno.ENOENT)]))
    elif is_expected(error):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}"
    return scrubbed(" ".join(text.split()))
