"""The interface of all writers, and updates that they repeat because another writer was faster."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol, cast

from shardfs.model.changes import Whole
from shardfs.model.errors import StaleShardError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardfs.model.blobs import Content, Stat
    from shardfs.model.changes import Begun, Change
    from shardfs.storage.writers.local_directory import LocalDirectory

AT_A_TIME = 16
"""Objects that `create` writes at the same time: disks and stores take much longer for one than for one of many."""


class Writer(Protocol):
    """Changes the objects of one store. Thread-safe. Keys are paths, as in `Store`. All methods raise OSError.

    The methods with a body here are those of a store whose objects are no files.

    Attributes:
        local: the objects are on a disk of this machine.
        disk: the directory of the objects, if they are files; None if there is none.
        pins: shardfs reads a chunk only from the version of the shard whose index it has read.
    """

    local: bool

    @property
    def disk(self) -> LocalDirectory | None:
        return None

    @property
    def pins(self) -> bool:
        return False

    def update(self, key: str, change: Change) -> Stat | None:
        """Replace the object `key` atomically; return its new `Stat`, None if it was removed.

        The change is durable then. Raise StaleShardError if other writers keep changing the object, OSError for errors
        of the store, and the errors of `change`. After an error the object is unchanged, unless the store failed after
        the switch. A repeated update detects that case.
        """

    def put(self, key: str, data: bytes) -> Stat:
        """Replace or create the object without regard to its current version; return its new `Stat`.

        Errors of `update`.
        """
        return cast("Stat", self.update(key, Whole(data)))

    def close(self) -> None:
        """Release the source for other writable mounts. Afterwards only `close` may be called again."""
        return

    def require_writable(self, key: str) -> None:
        """Raise OSError if every `update` of this object is certain to fail, such as for a write-protected file.

        Only an attempt shows whether a remote store permits a write.
        """
        return

    def recover(self, note: Begun) -> None:
        """Clean up after an interrupted update: finish or undo its switch, and remove its temporary data.

        Does nothing if that is done already.

        Args:
            note: one that `Change.begun` got. An update that was repeated has several for its object; each is passed.
        """

    def recovered(self) -> None:
        """Declare that `recover` was called for every begun update. Remaining temporary files may now be removed."""
        return

    def create(self, files: Sequence[tuple[str, Content]]) -> None:
        """Write objects that no other program uses yet, several at a time. All are on disk when this returns.

        Before that, an object may be incomplete. Objects that exist are overwritten; two writers of the same bytes do
        not disturb each other. Raise the error of the first file that failed; others may be written then.
        """
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            for _ in pool.map(self._create, files):
                pass

    def _create(self, file: tuple[str, Content]) -> None:
        key, content = file
        self.update(key, Whole(content, first=None))

    def delete(self, key: str) -> None:
        """Remove the object. On a local disk, the caller syncs the directory.

        Raise FileNotFoundError if it does not exist, and StaleShardError if other writers keep changing it.
        """

    def remove_directory(self, key: str) -> None:
        """Remove an empty directory. Raise OSError (ENOTEMPTY) if it has entries."""

    def rename(self, old: str, new: str) -> None:
        """Rename a file, or a directory with its contents; an existing file `new` is replaced.

        On a local disk, raise PermissionError for a symbolic link. On others, raise OSError (EXDEV) for a directory.
        """

    def require_own_name(self, key: str) -> None:
        """Raise OSError (EROFS) if `key` is below a symbolic link to a directory, so that its file has another name."""
        return


class Changed(Exception):
    """Another writer changed the object after it was read. The attempt to change it had no effect."""


def repeated(key: str, race_s: float, attempt: Callable[[], Stat | None], pause_s: float = 0.0) -> Stat | None:
    """Return the result of `attempt`, which is called again while it raises Changed.

    Raise StaleShardError, with the name `key`, after `race_s` seconds. A random pause of at most `pause_s` seconds
    follows each attempt, so that two writers do not collide again.
    """
    deadline = time.monotonic() + race_s
    while True:
        try:
            return attempt()
        except Changed:
            if time.monotonic() > deadline:
                why = f"other writers kept replacing it for {race_s:g} s; try again when they have ended"
                raise StaleShardError(f"{key}: {why}") from None
        time.sleep(random.uniform(0.0, pause_s))
