"""Opening files in a process that has no descriptor left: cached descriptors are closed, and the call is repeated."""

from __future__ import annotations

import errno
import os
import threading
import weakref
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

ATTEMPTS = 8
"""Calls until the error is raised. Other threads may take the descriptors that this thread has released."""


class DescriptorCache(Protocol):
    """Keeps files open for later use."""

    def release_descriptors(self) -> None:
        """Drop all references to open files that are only kept for later use. Thread-safe."""


_caches: weakref.WeakSet[DescriptorCache] = weakref.WeakSet()
_lock = threading.Lock()


def register(cache: DescriptorCache) -> None:
    """Have `cache` release its descriptors whenever the process has none left. Keeps no reference to `cache`."""
    with _lock:
        _caches.add(cache)


def obtain(call: Callable[[], T]) -> T:
    """Return `call()`, which needs a descriptor. While there is none left, release cached ones and call again.

    Raise the errors of `call`; OSError (EMFILE or ENFILE) if releasing does not help.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return call()
        except OSError as e:
            if e.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        with _lock:
            caches = list(_caches)
        for cache in caches:
            cache.release_descriptors()
    return call()


def dup(fd: int) -> int:
    """Return a duplicate of a descriptor. Child processes do not inherit it. Raise the errors of `obtain`."""
    return obtain(lambda: os.dup(fd))


def open(path: str, flags: int, mode: int = 0o777, at: int | None = None) -> int:
    """Open a file, in the directory `at` if `path` is relative, and return its descriptor. Raise OSError.

    Child processes do not inherit the descriptor.
    """
    return obtain(lambda: os.open(path, flags | os.O_CLOEXEC, mode, dir_fd=at))
