"""The exceptions of shardfs, and their errno, exit code and message."""

from __future__ import annotations

import errno
import os
import traceback
from typing import TYPE_CHECKING, Any

from shardfs.model.exit_codes import ExitCode
from shardfs.model.redact import redacted
from shardfs.model.text import counted, printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class ShardfsError(Exception):
    """Base class of shardfs's own exceptions. Errors about paths are the builtin `OSError` subclasses."""


class OptionError(ShardfsError, ValueError):
    """An unknown option, or an invalid value. The message is for the user."""


class CorruptShardError(ShardfsError):
    """Stored bytes contradict the format: a bad index, checksum, range or document.

    Args:
        where: the collection (array, scale, ...) with the damage.
        key: the damaged shard object or document.
        why: what shardfs expected and what it found.
        slot: the damaged chunk's number in the shard's index, if the error is about one chunk.
    """

    def __init__(self, where: str, key: str, why: str, slot: int | None = None) -> None:
        self.where = where
        self.key = key
        self.why = why
        self.slot = slot
        entry = "" if slot is None else f", slot {slot}"
        super().__init__(f"{where or '/'}: {key}{entry}: {why}")


class DanglingLinkError(OSError):
    """A symbolic link on the way to a file leads nowhere, as in a git-annex repository without the file's content.

    Its errno is EIO. It is no FileNotFoundError: the file is not absent, its content is elsewhere.
    """


NOT_FOUND = (FileNotFoundError, NotADirectoryError)
"""The errors which say that a file certainly does not exist. After any other OSError, that is unknown."""


class MayAppearError(FileNotFoundError):
    """A file that does not exist now and may exist at any time, without a call that creates this name."""


class UnfitChunkError(ShardfsError, ValueError):
    """Written bytes that cannot be the chunk at these coordinates, or that contradict neighbouring chunks."""

    def __init__(self, coords: tuple[int, ...], why: str) -> None:
        self.coords = coords
        super().__init__(f"chunk {coords}: {why}")


class StaleShardError(ShardfsError):
    """A shard kept changing under the reader: another writer replaced it more than once."""


class UnsupportedError(ShardfsError):
    """A layout cannot show this array, or shardfs cannot show this source."""

    source = ""
    """The source or target that the message begins with; empty if the message names neither."""


class NotADatasetError(UnsupportedError):
    """The source has no sharded data in a format that shardfs knows."""


class UnfinishedJobError(ShardfsError):
    """Some files could not be packed or unpacked. Solve their problems, and start the same job again.

    Args:
        failed: the number of these files or shards.
        problems: the first of them, each with `path` and `why`.
    """

    def __init__(self, failed: int, problems: Sequence[Any]) -> None:
        self.failed = failed
        self.problems = problems
        first = "; ".join(f"{p.path or '/'}: {p.why}" for p in problems[:3])
        super().__init__(f"not finished: {counted(failed, 'problem')}; solve them, and repeat the job. {first}")


class MountError(OSError):
    """The mountpoint is unusable, or the kernel, fusermount3 or libfuse refused the mount; see the message."""


class BusyError(OSError):
    """Another process writes to the source, or works on its journal; the message names it. Its errno is EBUSY."""

    owner: Mapping[str, Any] = {}
    """The content of that process's lock."""


_ERRNOS: tuple[tuple[type[BaseException], int], ...] = (
    (UnfitChunkError, errno.EINVAL),
    (StaleShardError, errno.ESTALE),
    (UnsupportedError, errno.ENOTSUP),
    (FileNotFoundError, errno.ENOENT),  # fsspec raises it without an errno
    (NotADirectoryError, errno.ENOTDIR),
    (IsADirectoryError, errno.EISDIR),
    (TimeoutError, errno.ETIMEDOUT),
)


def errno_of(error: BaseException) -> int:
    """The errno that a program on the mount gets for this exception. No other code decides that.

    Damage and bugs are `EIO`. A bug is never `EINVAL`, because programs relate `EINVAL` to their own arguments. The
    caller must log the traceback of a bug.
    """
    for kind, number in _ERRNOS:
        if isinstance(error, kind):
            return number
    if isinstance(error, PermissionError):
        return error.errno or errno.EACCES
    return (error.errno if isinstance(error, OSError) else None) or errno.EIO


def is_expected(error: BaseException) -> bool:
    """Whether `error` is about the data, the store or the request. Any other exception is a bug in shardfs."""
    return isinstance(error, ShardfsError | OSError)


def is_bug(error: BaseException) -> bool:
    """Whether `error` needs a traceback. Errors of unknown packages count as errors of a store."""
    return not is_expected(error) and type(error).__module__.split(".")[0] in ("builtins", "shardfs", "numpy")


def exit_code(error: BaseException) -> ExitCode:
    """The exit code of a program that this error ended."""
    if isinstance(error, OptionError):
        return ExitCode.USAGE
    if isinstance(error, MountError):
        return ExitCode.NOT_MOUNTED
    if isinstance(error, UnsupportedError):
        return ExitCode.UNSUPPORTED
    if isinstance(error, BusyError):
        return ExitCode.BUSY
    return ExitCode.UNREADABLE if isinstance(error, OSError) else ExitCode.PROBLEM


def redacted_traceback(error: BaseException) -> list[str]:
    """The lines of the traceback of an error, without secrets."""
    return redacted("".join(traceback.format_exception(error))).splitlines()


def message(error: BaseException) -> str:
    """One line about the error for the user, without secrets."""
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    elif isinstance(error, FileNotFoundError):  # fsspec's consist of a path only
        text = ": ".join(filter(None, [str(error), os.strerror(errno.ENOENT)]))
    elif is_expected(error):
        text = str(error) or type(error).__name__  # clients of stores raise errors without any text
    else:
        text = f"{type(error).__name__}: {error}"
    return printable(redacted(" ".join(text.split())))
