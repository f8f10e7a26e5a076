"""Opens and reads files that other programs may have put there, without waiting for or touching anything else.

The files of shardfs itself in a source, a cache or a journal are such files: state, locks, segments, entries.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Any

from shardfs.model.blobs import read_file
from shardfs.model.bounded_json import load_json
from shardfs.storage import descriptors, syscalls


def open_regular(
    path: str, flags: int = os.O_RDONLY, *, at: int | None = None, inside: str = "", follow: bool = False
) -> int:
    """Open an existing regular file and return its descriptor, which the caller closes.

    Anything else is not opened: a FIFO could block, and opening a device can have effects.

    Args:
        at: the directory to which `path` is relative.
        inside: the real path of a directory; the file must be below it.
        follow: `path` may be a symbolic link.

    Raise PermissionError for a FIFO, a device, a socket, a symbolic link, or a file that is not `inside`;
    IsADirectoryError for a directory; FileNotFoundError.
    """
    named = descriptors.open(path, os.O_PATH | (0 if follow else os.O_NOFOLLOW), at=at)
    try:
        if inside:
            require_below(named, inside, path)
        return reopened(named, flags, path)
    finally:
        os.close(named)


def open_or_create(path: str, flags: int, mode: int, *, at: int | None = None, inside: str = "") -> int:
    """Open a regular file like `open_regular`, or create it. Its directory must be `inside`."""
    while True:
        try:
            return open_regular(path, flags, at=at, inside=inside)
        except FileNotFoundError:
            pass
        if inside:
            _require_directory_below(os.path.dirname(path), inside)
        try:
            return syscalls.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode, at)
        except FileExistsError:  # another process has just created the file
            continue


def reopened(named: int, flags: int, path: str) -> int:
    """Open the regular file that `named` (O_PATH, open(2)) leads to. `path` is for errors: see `open_regular`."""
    require_file(os.fstat(named), path)
    link = f"/proc/self/fd/{named}"
    try:
        if flags & os.O_ACCMODE == os.O_RDONLY:
            return descriptors.open(link, flags)
        return syscalls.open(link, flags)
    except OSError as e:
        raise OSError(e.errno, e.strerror, path) from e


def require_below(named: int, directory: str, path: str) -> None:
    """Raise PermissionError if an open file is not below a directory, whose real path is given."""
    # Check the path of the open descriptor, not the name: no link can be swapped between the check and the use.
    real = os.readlink(f"/proc/self/fd/{named}")
    if not real.startswith(directory.rstrip("/") + "/"):
        why = f"a symbolic link leads out of {directory} to {real}; remove the link"
        raise PermissionError(errno.EACCES, why, path)


def _require_directory_below(path: str, directory: str) -> None:
    if not os.path.join(os.path.realpath(path), "").startswith(directory.rstrip("/") + "/"):
        raise PermissionError(errno.EACCES, f"is a symbolic link that leads out of {directory}; remove the link", path)


def read_regular(path: str, limit: int) -> bytes:
    """Return the content of a regular file.

    Raise ValueError if it has more than `limit` bytes, else as `open_regular`.
    """
    fd = open_regular(path)
    try:
        return read_all(fd, limit)
    finally:
        os.close(fd)


def read_all(fd: int, limit: int, start: int = 0) -> bytes:
    """Return the content of an open file from `start` on. Raise ValueError if the file has more than `limit` bytes."""
    size = os.fstat(fd).st_size
    if size > limit:
        raise ValueError(f"has {size} bytes, but at most {limit} were expected")
    return read_file(fd, max(size - start, 0), start)


def parse_object(raw: bytes, limit: int) -> dict[str, Any]:
    """Return a JSON object. Raise ValueError for anything else, for more than `limit` bytes, and as `load_json`."""
    document = load_json(raw, limit)
    if not isinstance(document, dict):
        raise ValueError(f"should be a JSON object, not {type(document).__name__}")
    return document


def is_directory(info: os.stat_result, path: str) -> bool:
    """Return whether it is a directory, not a file. Raise PermissionError for a device, a socket, a pipe or a link."""
    if not stat.S_ISDIR(info.st_mode) and not stat.S_ISREG(info.st_mode):
        raise PermissionError(errno.EACCES, "is neither a file nor a directory", path)
    return stat.S_ISDIR(info.st_mode)


def require_file(info: os.stat_result, path: str) -> None:
    """Raise IsADirectoryError for a directory, PermissionError for anything else that is no regular file.

    `path`: for errors.
    """
    if is_directory(info, path):
        raise IsADirectoryError(errno.EISDIR, "is a directory", path)
