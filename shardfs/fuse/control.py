"""The directory `.shardfs` at the root of a mount, with files about the mount itself. Listings of the root omit it.

Each look-up of a name in `.shardfs` makes a new file with a number of its own, whose content is fixed at that moment.
So a reader sees one state from beginning to end, the size is right, and the kernel may cache the pages: the next
look-up gives another file.
"""

from __future__ import annotations

import errno
import itertools
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from shardfs.fuse import protocol
from shardfs.model.attributes import Attributes
from shardfs.model.listing import Batch
from shardfs.vfs.inodes import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from shardfs.fuse.device import Device

NAME = b".shardfs"
DIRECTORY = 1 << 63
"""The number of `.shardfs`. Its files have higher numbers; all other files have lower ones (`Datasets`)."""

NAMES = 16
"""More than there are files in `.shardfs`: two numbers that are equal modulo `NAMES` are states of the same file."""

KEPT = 64
"""At most so many files are kept for the kernel. Reading an older one fails with ESTALE."""


def inode(number: int) -> int:
    """The inode number that `stat` reports: equal for all states of a file, since `cp` compares two calls of `stat`."""
    return DIRECTORY + number % NAMES


def is_control_name(parent: int, name: bytes | memoryview) -> bool:
    """Return whether a name in the root or in `.shardfs` belongs to this module."""
    return parent == DIRECTORY or (parent == ROOT and name == NAME)


def not_permitted() -> PermissionError:
    """The error (EPERM), to be raised, for requests that would change `.shardfs` or its files."""
    return PermissionError(errno.EPERM, "files about the mount cannot be changed", NAME)


class Control:
    """The files of `.shardfs`: for each name, the function that makes the content at each look-up. Thread-safe."""

    def __init__(self, files: Mapping[bytes, Callable[[], bytes]]) -> None:
        self._makers = dict(files)
        self._files: OrderedDict[int, tuple[bytes, int]] = OrderedDict()  # content and time in ns, by number
        self._bases = itertools.count(DIRECTORY + NAMES, NAMES)
        self._lock = threading.Lock()
        self._began_ns = time.time_ns()

    def lookup(self, parent: int, name: bytes) -> Attributes:
        """Attributes of the directory `.shardfs`, if `parent` is the root, or of a new file in it.

        Raise FileNotFoundError for any other name, and the errors of the function that makes the content.
        """
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
        """Attributes of the directory or of one file. Raise OSError (ESTALE) for a file that is not kept any more."""
        if number == DIRECTORY:
            return Attributes(DIRECTORY, True, 0, self._began_ns)
        data, mtime_ns = self._file(number)
        return Attributes(number, False, len(data), mtime_ns)

    def read(self, number: int, offset: int, size: int) -> bytes:
        """At most `size` bytes of a file from `offset`. Raise OSError (ESTALE) as `attributes` does."""
        return self._file(number)[0][offset : offset + size]

    def _file(self, number: int) -> tuple[bytes, int]:
        file = self._files.get(number)
        if file is None:
            raise OSError(errno.ESTALE, "outdated file of .shardfs: open it again", str(number))
        return file

    def forget(self, number: int) -> None:
        """Drop a file that the kernel does not refer to any more, if it is still kept."""
        with self._lock:
            self._files.pop(number, None)

    def small_listing(self, number: int, limit: int) -> None:
        """Always None: `scan` lists the directory."""
        return None

    def scan(self, number: int, cookie: int = 0) -> Iterator[Batch]:
        """The names behind `cookie`, without sizes, so that the kernel looks each of them up."""
        names = list(self._makers)[cookie:]
        if names:
            yield Batch.from_entries([(name, Attributes(DIRECTORY, False, -1, 0)) for name in names], cookie)


class ControlReplies:
    """Replies about `.shardfs` and its files, for one thread.

    `encoder` must be one whose replies the kernel does not cache.
    """

    def __init__(self, files: Control, encoder: protocol.Encoder, device: Device) -> None:
        self.files = files
        self._encoder = encoder
        self._device = device

    def send_entry(self, unique: int, parent: int, name: bytes) -> None:
        """Reply to LOOKUP. Raise the errors of `Control.lookup` instead of a reply."""
        number, directory, length, mtime_ns, _, _ = self.files.lookup(parent, name)
        reply = self._encoder.entry_reply(unique, number, directory, length, mtime_ns)
        if not self._device.send(protocol.with_inode(reply, inode(number))):
            self.files.forget(number)

    def send_attributes(self, unique: int, number: int) -> None:
        """Reply to GETATTR. Raise OSError (ESTALE) instead of a reply as `Control.attributes` does."""
        attributes = self.files.attributes(number)
        reply = self._encoder.attributes_reply(
            unique, number, attributes.directory, attributes.size, attributes.mtime_ns
        )
        self._device.send(protocol.with_inode(reply, inode(number)))
