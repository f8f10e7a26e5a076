"""Faults that tests put into the calls of `shardfs.storage.syscalls`: errors, short or slow calls, hangs, kills.

Set one with `with hooked(FailAt(...)):`. All of them count: call number 0 is the first.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from shardfs.storage import syscalls

KILLED = 99
"""Exit status of a process that ended itself at a call."""

Function = Callable[..., Any]
Args = tuple[Any, ...]

Hook = TypeVar("Hook", bound="Calls")

NEVER_FAIL = frozenset({"close", "unlock"})
"""Calls of which an error tells nothing that could be acted upon."""

ERRORS = {
    "open": (errno.ENOSPC, errno.EACCES, errno.EDQUOT),
    "write": (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EINTR),
    "pwrite": (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EINTR),
    "fallocate": (errno.ENOSPC, errno.EDQUOT),
    "ftruncate": (errno.ENOSPC, errno.EIO),
    "fsync": (errno.EIO, errno.ENOSPC),
    "fdatasync": (errno.EIO, errno.ENOSPC),
    "fsync_directory": (errno.EIO,),
    "rename": (errno.EACCES, errno.EIO, errno.ENOSPC),
    "rename_new": (errno.EACCES, errno.EIO, errno.ENOSPC),
    "exchange": (errno.EACCES, errno.EIO, errno.ESTALE),
    "link": (errno.EACCES, errno.ENOSPC),
    "unlink": (errno.EACCES, errno.EIO),
    "mkdir": (errno.EACCES, errno.ENOSPC),
    "clone": (errno.EIO, errno.ENOSPC),
    "copy_file_range": (errno.EIO, errno.ENOSPC),
    "lock": (errno.EIO, errno.ENOLCK),
}
"""What each call may meet; others get EIO."""


class Calls:
    """Counts calls by name, and does them."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._lock = threading.Lock()

    def __call__(self, name: str, function: Function, args: Args) -> Any:
        with self._lock:
            number = len(self.names)
            self.names.append(name)
        return self.do(number, name, function, args)

    def do(self, number: int, name: str, function: Function, args: Args) -> Any:
        """The call of this number."""
        return function(*args)


class KillAt(Calls):
    """Ends the process right before or after call `at`, as kill -9 does."""

    def __init__(self, at: int, *, after: bool) -> None:
        super().__init__()
        self.at, self.after = at, after

    def do(self, number: int, name: str, function: Function, args: Args) -> Any:
        if number == self.at and not self.after:
            os._exit(KILLED)
        out = function(*args)
        if number == self.at:
            os._exit(KILLED)
        return out


class FailAt(Calls):
    """Call `at` fails; with `for_ever` all later ones of its name, too, until `heal`.

    Args:
        done: whether what was asked for is done all the same, as a disk may have it.
    """

    def __init__(self, at: int, number: int, *, for_ever: bool = False, after_call: bool = False) -> None:
        super().__init__()
        self.at, self.errno, self.for_ever, self.done = at, number, for_ever, after_call
        self.name: str | None = None
        self.healed = False

    def heal(self) -> None:
        self.healed = True

    @property
    def happened(self) -> bool:
        return self.name is not None

    def do(self, number: int, name: str, function: Function, args: Args) -> Any:
        if number == self.at:
            self.name = name
        if not self.healed and (number == self.at or (self.for_ever and name == self.name)):
            if self.done:
                function(*args)
            raise OSError(self.errno, os.strerror(self.errno))
        return function(*args)


class ShortenAt(Calls):
    """A write or copy does a part of what it is asked for, the first half, as it may."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def do(self, number: int, name: str, function: Function, args: Args) -> Any:
        if number >= self.at:
            args = shortened(name, args)
        return function(*args)


def shortened(name: str, args: Args) -> Args:
    """The same call for half of the bytes, if it is one that may do less."""
    if name in ("write", "pwrite") and len(args[1]) > 1:
        return (args[0], args[1][: len(args[1]) // 2], *args[2:])
    if name == "copy_file_range" and args[2] > 1:
        return (args[0], args[1], args[2] // 2, *args[3:])
    return args


class Frozen(Calls):
    """Nothing reaches the disk any more, as if the process had been killed; locks go with their descriptors."""

    def do(self, number: int, name: str, function: Function, args: Args) -> Any:
        if name in NEVER_FAIL:
            return function(*args)
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@contextmanager
def hooked(hook: Hook) -> Iterator[Hook]:
    """All calls go to `hook` meanwhile."""
    before, syscalls.hook = syscalls.hook, cheap(hook)
    try:
        yield hook
    finally:
        syscalls.hook = before


def cheap(hook: Calls) -> syscalls.Hook:
    """The same hook, without the cost of allocating 64 MiB for a journal of 4 KiB: a hole does as well here."""

    def call(name: str, function: Function, args: Args) -> Any:
        return hook(name, hole if name == "fallocate" else function, args)

    return call


def hole(fd: int, start: int, size: int) -> None:
    """What fallocate does, but for having the room."""
    if os.fstat(fd).st_size < start + size:
        os.ftruncate(fd, start + size)
