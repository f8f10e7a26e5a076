"""What the server and the kernel cache, and how changes invalidate it."""

from __future__ import annotations

import errno
import logging
import os
import queue
import threading
from collections import Counter
from typing import TYPE_CHECKING

from shardfs.fuse import protocol
from shardfs.model.errors import StaleShardError
from shardfs.storage.cache import nothing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shardfs.model.attributes import Attributes
    from shardfs.model.values import U64

log = logging.getLogger("shardfs.fuse")

CAPACITY = 512
"""At most so many attributes are kept between LOOKUP and READ. A full cache is cleared."""

MAX_RESIZED = 1 << 16
"""At most so many files are remembered as resized. Beyond, only their attributes are invalidated."""


ANY = 0
"""No file has this number."""


class AttributeCache:
    """Attributes of files between a LOOKUP and the READs that follow. An entry never outlives a change of its file.

    Each change increments `stamp` after the change was made and before it is answered. Attributes that were requested
    before that increment may be outdated, so `record` ignores them. `entries` may be read without the lock.

    Attributes:
        dropping: files whose pages the kernel is about to drop, because a notice is queued; `ANY` stands for many
            files. Until then, a program that opens such a file must not get the old pages.
    """

    def __init__(self) -> None:
        self.entries: dict[int, Attributes] = {}
        self.dropping = Counter[int]()
        self.stamp = 0
        self._lock = threading.Lock()

    def record(self, stamp: int, attributes: Attributes) -> None:
        """Record attributes that were requested when the stamp had this value. Ignored if the stamp has changed."""
        with self._lock:
            if stamp != self.stamp:
                return
            if len(self.entries) >= CAPACITY:
                self.entries.clear()
            self.entries[attributes.number] = attributes

    def invalidate(self, number: int | None = None) -> None:
        """Drop the attributes of a changed file; of all files if `number` is None."""
        with self._lock:
            self.stamp += 1
            if number is None:
                self.entries.clear()
            else:
                self.entries.pop(number, None)

    def evict(self) -> None:
        """Drop all attributes, and with them the files that they keep open. They stay valid."""
        with self._lock:
            self.entries.clear()

    def is_dropping(self, number: int) -> bool:
        """Return whether a notice that makes the kernel drop the pages of a file is queued."""
        return bool(self.dropping) and (number in self.dropping or ANY in self.dropping)

    def drop_pages(self, number: int) -> Callable[[], None]:
        """Note that a notice about a file, or `ANY`, is queued. Return the function to call once it is sent."""
        with self._lock:
            self.dropping[number] += 1

        def sent() -> None:
            with self._lock:
                self.dropping[number] -= 1
                if not self.dropping[number]:
                    del self.dropping[number]

        return sent


class Notices:
    """Sends invalidations to the kernel. Sending may block until the kernel has the answers to running requests.

    `fd` is the descriptor of the session, which must stay open.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._queue: queue.SimpleQueue[tuple[Iterable[bytes], Callable[[], None]]] = queue.SimpleQueue()

    def start(self) -> None:
        """Start the thread that sends queued messages until the mount ends. Raise RuntimeError if that fails."""
        threading.Thread(target=self._send_queued, name="shardfs-notices", daemon=True).start()

    def queue(self, messages: Iterable[bytes], sent: Callable[[], None] = nothing) -> None:
        """Have the thread of `start` send the messages in order, and then call `sent`, also if the mount has ended.

        Never blocks. Iterates over `messages` in that thread.
        """
        self._queue.put((messages, sent))

    def invalidate_names(self, parent: int, names: Iterable[bytes], sent: Callable[[], None] = nothing) -> None:
        """Have the kernel look up names in a directory again, and all names below them; never blocks."""
        self.queue((protocol.invalidate_entry(parent, name) for name in names), sent)

    def _send_queued(self) -> None:
        alive = True
        while alive:
            messages, sent = self._queue.get()
            alive = all(map(self.send, messages))
            sent()

    def send(self, message: bytes) -> bool:
        """Send the message now, in the calling thread; False if the mount has ended.

        May block until the kernel has the answers to running requests. Other errors are logged.
        """
        try:
            os.write(self._fd, message)
        except OSError as failure:
            if failure.errno == errno.ENODEV:
                return False
            if failure.errno != errno.ENOENT:  # ENOENT: the kernel does not cache it
                log.error("cannot invalidate a file or name in the kernel's caches: %s", failure)
        return True


class ResizedFiles:
    """The files of which the kernel may know a wrong size. Thread-safe.

    The kernel cuts what it reads at the size that it knows. So reading these files fails until the kernel has asked for
    their attributes again. On a read-only mount, another program may have made them longer or shorter. On all mounts,
    the size of a chunk may be unknown (`UnreadableChunks`).

    Attributes:
        numbers: these files; all are dropped when they would be more than `MAX_RESIZED`.
        send: sends a message to the kernel; the server sets it when it starts.
    """

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self.send: Callable[[bytes], object] = bool

    def add(self, number: int) -> None:
        """Note that the kernel gets a size for this file that may be wrong: it must ask again before READs succeed."""
        if len(self.numbers) >= MAX_RESIZED:
            self.numbers.clear()
        self.numbers.add(number)

    def invalidate(self, numbers: U64) -> None:
        """Add files (n,), and have the kernel ask for their attributes again. Call this before their bytes are sent."""
        if len(self.numbers) + len(numbers) > MAX_RESIZED:
            self.numbers.clear()
        self.numbers.update(numbers[:MAX_RESIZED].tolist())
        for number in numbers.tolist():
            self.send(protocol.invalidate_attributes(number))

    def remove(self, numbers: Iterable[int]) -> None:
        """Note that the kernel gets the present attributes of these files. Other numbers are ignored."""
        self.numbers.difference_update(numbers)

    def require_known(self, number: int) -> None:
        """Raise StaleShardError if the kernel may know a wrong size of this file, and have it ask again."""
        if number in self.numbers:
            self.send(protocol.invalidate_attributes(number))
            raise StaleShardError(f"file {number}: has another size since its shard was replaced; open it again")
