"""The directory `.shardfs` at the root of a mount: files about the mount itself. It is not listed.

Each look-up of a name in it makes a new file, whose content is settled then. So a reader sees one state from beginning
to end, its size is right, and nothing that the kernel keeps of it can be out of date: the next one who opens the name
is given another file.
"""

from __future__ import annotations

import errno
import itertools
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from shardfs.chunk_tree import Attributes
from shardfs.model import Batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

NAME = b".shardfs"
DIRECTORY = 1 << 63
"""Its number. Those of its files are above; those of all else are below (`Datasets`)."""

NAMES = 16
"""More names than there are: numbers of files that differ by a multiple of it are states of the same one."""

KEPT = 64
"""Files that are kept while the kernel knows them. Who reads an older one is told that it is gone."""


def inode(number: int) -> int:
    """The inode number to show for a file: the same for all of its states, as `cp` wants it, which looks twice."""
    return DIRECTORY + number % NAMES


class Control:
    """What is in the directory: a name and what makes its content, for each file. Thread-safe."""

    def __init__(self, files: Mapping[bytes, Callable[[], bytes]]) -> None:
        self._makers = dict(files)
        self._files: OrderedDict[int, tuple[bytes, int]] = OrderedDict()
        self._bases = itertools.count(DIRECTORY + NAMES, NAMES)
        self._lock = threading.Lock()
        self._began_ns = time.time_ns()

    def lookup(self, parent: int, name: bytes) -> Attributes:
        """The directory, of the root; a new file, of the directory. Raise FileNotFoundError."""
        if parent < DIRECTORY and name == NAME:
            return self.attributes(DIRECTORY)
        make = self._makers.get(name)
        if parent != DIRECTORY or make is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)
        data = make()
        number, now = next(self._bases) + 1 + list(self._makers).index(name), time.time_ns()
        with self._lock:
            self._files[number] = data, now
            if len(self._files) > KEPT:
                self._files.popitem(last=False)
        return Attributes(number, False, len(data), now)

    def attributes(self, number: int) -> Attributes:
        """Raise OSError (ESTALE) for a file that is not kept any more."""
        if number == DIRECTORY:
            return Attributes(DIRECTORY, True, 0, self._began_ns)
        data, mtime_ns = self._file(number)
        return Attributes(number, False, len(data), mtime_ns)

    def read(self, number: int, offset: int, size: int) -> bytes:
        """Bytes of a file."""
        return self._file(number)[0][offset : offset + size]

    def _file(self, number: int) -> tuple[bytes, int]:
        found = self._files.get(number)
        if found is None:
            raise OSError(errno.ESTALE, "an old state of the mount", str(number))
        return found

    def forget(self, number: int) -> None:
        """The kernel does not know the file any more."""
        with self._lock:
            self._files.pop(number, None)

    def few(self, number: int, most: int) -> None:
        """As `Tree.few`."""
        return None

    def scan(self, number: int, cookie: int = 0) -> Iterator[Batch]:
        """As `Tree.scan`: the names, without sizes."""
        names = list(self._makers)[cookie:]
        if names:
            n = len(names)
            yield Batch(
                np.array(names),
                np.full(n, DIRECTORY, np.uint64),
                np.zeros(n, np.bool_),
                np.full(n, -1, np.int64),
                np.zeros(n, np.int64),
                np.arange(cookie + 1, cookie + 1 + n, dtype=np.uint64),
            )
