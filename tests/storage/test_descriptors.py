"""Calls that need a descriptor when the process has none left."""

from __future__ import annotations

import errno
import os

import pytest

from shardfs.storage import descriptors


class Cache:
    """Has `cached` descriptors, of which another thread takes all but the last as soon as they are released."""

    def __init__(self, cached: int) -> None:
        self.cached = cached
        descriptors.register(self)

    def release_descriptors(self) -> None:
        self.cached -= 1

    def opened(self, number: int) -> str:
        if self.cached:
            raise OSError(number, os.strerror(number))
        return "opened"


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
@pytest.mark.parametrize("cached", [0, 1, 3])
def test_cached_descriptors_are_released_and_the_call_is_repeated(number: int, cached: int) -> None:
    cache = Cache(cached)
    assert descriptors.obtain(lambda: cache.opened(number)) == "opened"


def test_other_errors_release_nothing() -> None:
    cache = Cache(1)
    with pytest.raises(FileNotFoundError):
        descriptors.obtain(lambda: cache.opened(errno.ENOENT))
    assert cache.cached == 1


def test_the_error_is_raised_if_releasing_does_not_help() -> None:
    cache = Cache(1000)
    with pytest.raises(OSError, match="Too many open files"):
        descriptors.obtain(lambda: cache.opened(errno.EMFILE))
