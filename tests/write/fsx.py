"""Random operations on one file, each followed by a look at what all of it should be; after the fsx of Apple and XFS.

`python -m tests.write.fsx FILE --seed N --operations N [--fresh COMMAND]` prints what went wrong, with the operations
that led there, and exits with 1. The file may lie anywhere; `--fresh` is run now and then with everything closed, for
example to publish or to mount again.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import subprocess
import sys
from collections import deque
from typing import TYPE_CHECKING, ClassVar, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = mmap.PAGESIZE


class Mismatch(Exception):
    """The file is not what it should be."""


class Options(NamedTuple):
    """`size` bounds the file, `piece` one operation, both in bytes."""

    seed: int
    operations: int
    size: int = 256 << 10
    piece: int = 64 << 10
    truncates: bool = True
    maps: bool = True
    replaces: bool = True
    fresh: str | None = None


class Fsx:
    """One file and what it should hold."""

    KEPT: ClassVar[int] = 100

    def __init__(self, path: str, options: Options) -> None:
        self._path, self._options = path, options
        self._random = random.Random(options.seed)
        self._wanted = bytearray()
        self._done: deque[str] = deque(maxlen=self.KEPT)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)

    def run(self) -> None:
        """Raise Mismatch, or OSError."""
        operations = self._operations()
        kinds, weights = [kind for kind, _ in operations], [weight for _, weight in operations]
        for i in range(self._options.operations):
            operation = self._random.choices(kinds, weights)[0]
            try:
                operation()
                if i % 50 == 0:
                    self._check_all()
            except (OSError, Mismatch) as e:
                raise Mismatch(f"operation {i}: {e}\n" + "\n".join(self._done)) from e
        self._check_all()
        os.close(self._fd)

    def _operations(self) -> list[tuple[Callable[[], None], int]]:
        operations = [(self._write, 20), (self._read, 20), (self._append, 3), (self._sync, 2), (self._reopen, 6)]
        if self._options.truncates:
            operations += [(self._truncate, 8), (self._truncate_by_name, 3), (self._empty, 1)]
        if self._options.maps:
            operations += [(self._map_read, 10), (self._map_write, 10), (self._map_closed, 3)]
        if self._options.replaces:
            operations += [(self._replace, 2), (self._rename_around, 1)]
        if self._options.fresh:
            operations += [(self._fresh, 1)]
        return operations

    # ---- choosing

    def _log(self, text: str) -> None:
        self._done.append(text)

    def _place(self, *, inside: bool) -> tuple[int, int]:
        """Offset and size; both are on a page's edge more often than chance has it."""
        limit = len(self._wanted) if inside else self._options.size
        offset = self._random.randrange(max(limit, 1))
        size = self._random.randint(1, self._options.piece)
        if self._random.random() < 0.3:
            offset -= offset % PAGE
        if self._random.random() < 0.3:
            size += -(offset + size) % PAGE
        return offset, max(min(size, limit - offset), 0)

    def _bytes(self, size: int) -> bytes:
        return self._random.randbytes(size)

    # ---- operations

    def _put(self, offset: int, data: bytes) -> None:
        self._wanted.extend(bytes(max(0, offset + len(data) - len(self._wanted))))
        self._wanted[offset : offset + len(data)] = data

    def _write(self) -> None:
        offset, size = self._place(inside=False)
        self._log(f"write {offset} {size}")
        data = self._bytes(size)
        if os.pwrite(self._fd, data, offset) != size:
            raise Mismatch(f"a short write at {offset} of {size}")
        self._put(offset, data)

    def _append(self) -> None:
        size = min(self._random.randint(1, 5000), self._options.size - len(self._wanted))
        self._log(f"append {size}")
        if size <= 0:
            return
        data, fd = self._bytes(size), os.open(self._path, os.O_WRONLY | os.O_APPEND)
        os.write(fd, data)
        os.close(fd)
        self._put(len(self._wanted), data)

    def _read(self) -> None:
        offset, size = self._place(inside=True)
        self._log(f"read {offset} {size}")
        self._compare(offset, os.pread(self._fd, size, offset), self._wanted[offset : offset + size])

    def _truncate(self) -> None:
        size = self._random.randrange(self._options.size)
        self._log(f"truncate {size}")
        os.ftruncate(self._fd, size)
        self._resize(size)

    def _truncate_by_name(self) -> None:
        size = self._random.randrange(self._options.size)
        self._log(f"truncate by name {size}")
        os.truncate(self._path, size)
        self._resize(size)

    def _empty(self) -> None:
        self._log("open with O_TRUNC")
        os.close(os.open(self._path, os.O_WRONLY | os.O_TRUNC))
        self._resize(0)

    def _resize(self, size: int) -> None:
        del self._wanted[size:]
        self._wanted.extend(bytes(size - len(self._wanted)))
        if os.fstat(self._fd).st_size != size:
            raise Mismatch(f"the size is {os.fstat(self._fd).st_size}, not {size}")

    def _map_read(self) -> None:
        offset, size = self._place(inside=True)
        if size:
            self._log(f"map and read {offset} {size}")
            with self._mapped(offset, size, mmap.PROT_READ) as view:
                start = offset % PAGE
                self._compare(offset, view[start : start + size], self._wanted[offset : offset + size])

    def _map_write(self) -> None:
        offset, size = self._place(inside=True)
        if size:
            self._log(f"map and write {offset} {size}")
            with self._mapped(offset, size, mmap.PROT_READ | mmap.PROT_WRITE) as view:
                view[offset % PAGE : offset % PAGE + size] = data = self._bytes(size)
                if self._random.random() < 0.5:
                    view.flush()
            self._put(offset, data)

    def _map_closed(self) -> None:
        """Stores that come when no descriptor is open any more."""
        offset, size = self._place(inside=True)
        if size:
            self._log(f"map, close and write {offset} {size}")
            with self._mapped(offset, size, mmap.PROT_READ | mmap.PROT_WRITE) as view:
                os.close(self._fd)
                view[offset % PAGE : offset % PAGE + size] = data = self._bytes(size)
            self._put(offset, data)
            self._fd = os.open(self._path, os.O_RDWR)

    def _mapped(self, offset: int, size: int, access: int) -> mmap.mmap:
        start = offset % PAGE
        return mmap.mmap(self._fd, start + size, mmap.MAP_SHARED, access, offset=offset - start)

    def _sync(self) -> None:
        self._log("fsync")
        os.fsync(self._fd)

    def _reopen(self) -> None:
        self._log("close and open")
        os.close(self._fd)
        self._fd = os.open(self._path, os.O_RDWR)
        self._check_all()

    def _replace(self) -> None:
        """As programs do that write a new file and rename it."""
        self._log("replace")
        data = self._bytes(self._random.randrange(self._options.size))
        with open(f"{self._path}.partial", "wb") as file:
            file.write(data)
        os.rename(f"{self._path}.partial", self._path)
        self._compare(0, os.pread(self._fd, self._options.size + 1, 0), self._wanted)  # the old one, as it was
        os.close(self._fd)
        self._fd, self._wanted = os.open(self._path, os.O_RDWR), bytearray(data)

    def _rename_around(self) -> None:
        self._log("rename away and back")
        os.rename(self._path, f"{self._path}.partial")
        data = self._bytes(10)
        os.pwrite(self._fd, data, 0)
        self._put(0, data)
        os.rename(f"{self._path}.partial", self._path)

    def _fresh(self) -> None:
        self._log("fresh")
        os.close(self._fd)
        subprocess.run(self._options.fresh or "", shell=True, check=True, timeout=250)
        self._fd = os.open(self._path, os.O_RDWR)
        self._check_all()

    # ---- looking

    def _check_all(self) -> None:
        values = os.pread(self._fd, self._options.size + PAGE, 0)
        if len(values) != len(self._wanted) or os.fstat(self._fd).st_size != len(self._wanted):
            raise Mismatch(f"{os.fstat(self._fd).st_size} bytes, {len(values)} of them read, not {len(self._wanted)}")
        self._compare(0, values, self._wanted)

    def _compare(self, offset: int, actual: bytes, wanted: bytes | bytearray) -> None:
        if actual != wanted:
            pairs = zip(actual, wanted, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(actual), len(wanted)))
            raise Mismatch(f"bytes differ from {offset + at} on: {actual[at : at + 8]!r}, not {wanted[at : at + 8]!r}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--operations", type=int, default=5000)
    parser.add_argument("--size", type=int, default=256 << 10)
    parser.add_argument("--no-truncates", action="store_true")
    parser.add_argument("--no-maps", action="store_true")
    parser.add_argument("--no-replaces", action="store_true")
    parser.add_argument("--fresh")
    parsed = parser.parse_args(arguments)
    options = Options(
        seed=parsed.seed,
        operations=parsed.operations,
        size=parsed.size,
        piece=parsed.size // 4,
        truncates=not parsed.no_truncates,
        maps=not parsed.no_maps,
        replaces=not parsed.no_replaces,
        fresh=parsed.fresh,
    )
    try:
        Fsx(parsed.file, options).run()
    except Mismatch as e:
        print(f"seed {parsed.seed}: {e}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
