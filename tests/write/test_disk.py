"""Calls that change a disk: what they do, and that a hook sees each of them."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfs.model.blobs import FilePart
from shardfs.storage import syscalls
from shardfs.storage.writers.files import fill

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _no_hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(syscalls, "hook", None)
    yield
    syscalls.hook = None


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    fd = syscalls.open(str(tmp_path / "file"), os.O_RDWR | os.O_CREAT | os.O_EXCL)
    yield fd
    os.close(fd)


class Only:
    """A hook that does something to the calls of one name, and counts them."""

    def __init__(self, name: str, do: Callable[[Callable[..., Any], tuple[Any, ...]], Any]) -> None:
        self.name, self.do, self.count = name, do, 0

    def __call__(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if name != self.name:
            return function(*args)
        self.count += 1
        return self.do(function, args)


def refuse(number: int) -> Callable[[Callable[..., Any], tuple[Any, ...]], Any]:
    def fail(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_hook_shortens_writes_and_all_is_written(file: int) -> None:
    hook = Only("pwrite", lambda function, args: function(args[0], args[1][:3], args[2]))
    syscalls.hook = hook
    syscalls.pwrite_all(file, b"0123456789", 5)
    assert os.pread(file, 99, 0) == bytes(5) + b"0123456789"
    assert hook.count == 4


@pytest.mark.parametrize("refused", [None, "clone", "copy_file_range"])
@given(start=st.integers(0, 9000), size=st.integers(0, 300_000), shift=st.sampled_from([-4096, -1, 0, 1, 4096, 8192]))
def test_copies_are_exact(
    refused: str | None, start: int, size: int, shift: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("copy")
    data = os.urandom(400_000)
    (directory / "a").write_bytes(data)
    source = syscalls.open(str(directory / "a"), os.O_RDONLY)
    target = syscalls.open(str(directory / "b"), os.O_RDWR | os.O_CREAT)
    at = max(start + shift, 0)
    syscalls.hook = Only(refused, refuse(errno.EXDEV)) if refused else None
    try:
        syscalls.copy_range(source, target, start, size, at)
    finally:
        syscalls.hook = None
        os.close(source)
        os.close(target)
    assert (directory / "b").read_bytes() == (bytes(at) + data[start : start + size] if size else b"")


def test_a_clone_is_the_same_bytes(tmp_path: Path, file: int) -> None:
    """As disks with clones do it; a disk without any is helped along here."""

    def clone(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        target, source, start, size, at = args
        assert start % syscalls.BLOCK == size % syscalls.BLOCK == at % syscalls.BLOCK == 0
        os.pwrite(target, os.pread(source, size, start), at)

    data = os.urandom(200_000)
    syscalls.pwrite_all(file, data, 0)
    hook = Only("clone", clone)
    syscalls.hook = hook
    target = syscalls.open(str(tmp_path / "to"), os.O_RDWR | os.O_CREAT)
    syscalls.copy_range(file, target, 1000, 150_000, 1000 + 4096)
    os.close(target)
    assert (tmp_path / "to").read_bytes() == bytes(1000 + 4096) + data[1000:151_000]
    assert hook.count == 1


def test_a_source_that_ends_is_an_error(tmp_path: Path, file: int) -> None:
    syscalls.pwrite_all(file, b"short", 0)
    target = syscalls.open(str(tmp_path / "to"), os.O_RDWR | os.O_CREAT)
    with pytest.raises(OSError, match="the file ends at 5, where 95 further bytes") as caught:
        syscalls.copy_range(file, target, 0, 100, 0)
    os.close(target)
    assert caught.value.errno == errno.EIO


def test_a_disk_that_cannot_share_bytes_is_asked_once_for_each_new_file(tmp_path: Path, file: int) -> None:
    size = syscalls.MIN_CLONE
    data = os.urandom(4 * size)
    syscalls.pwrite_all(file, data, 0)
    syscalls.hook = hook = Only("clone", refuse(errno.EOPNOTSUPP))
    for number in range(2):
        new = syscalls.open(str(tmp_path / f"new{number}"), os.O_RDWR | os.O_CREAT)
        fill(new, None, [FilePart(file, start, size) for start in range(0, 4 * size, size)])
        os.close(new)
        assert (tmp_path / f"new{number}").read_bytes() == data
        assert hook.count == number + 1
