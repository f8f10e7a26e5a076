"""Write local files: replace whole objects without losing another writer's change.

`replace` and `in_place` have the steps of an update.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from functools import partial
from itertools import chain, repeat
from typing import TYPE_CHECKING

from shardfs.model.changes import Begun
from shardfs.model.write_plan import is_same, pieces_of, size_of
from shardfs.storage import syscalls
from shardfs.storage.local import LocalBlob, stat_of
from shardfs.storage.regular_files import open_or_create
from shardfs.storage.writers import in_place
from shardfs.storage.writers.files import SourceDirectories, TemporaryFiles, fill, identity_at, open_old
from shardfs.storage.writers.local_directory import LocalDirectory
from shardfs.storage.writers.lock_file import locked
from shardfs.storage.writers.names import temporary_name
from shardfs.storage.writers.replace import finish_or_undo, switch, synced, written
from shardfs.storage.writers.writer import Changed, Writer, repeated

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardfs.model.blobs import Content, Plan, Stat
    from shardfs.model.changes import Change
    from shardfs.storage.local import LocalStore
    from shardfs.storage.writers.files import ObjectPlace
    from shardfs.storage.writers.in_place import Growth

LOCK_S = 120.0
"""Seconds to wait for the lock of another writer."""

RACE_S = 30.0
"""Seconds during which an update is retried because a writer without a lock was faster."""


class LocalWriter(LocalDirectory, Writer):
    """Changes the files below the root of `store`; see `Writer`.

    Args:
        replace_links: replace a symbolic link by a file. Otherwise an update of the link's name is refused.
        lock_s: seconds to wait for the lock of another writer.
        race_s: seconds during which an update is retried because another writer was faster.
    """

    local = True

    def __init__(
        self, store: LocalStore, *, replace_links: bool = False, lock_s: float = LOCK_S, race_s: float = RACE_S
    ) -> None:
        super().__init__(store, SourceDirectories(store))
        self._replace_links = replace_links
        self._lock_s = lock_s
        self._race_s = race_s
        self.temporary_files = TemporaryFiles(store)
        # Updates by key that failed after the switch, and whose cleanup failed, too.
        self._unfinished: dict[str, Begun] = {}

    @property
    def disk(self) -> LocalDirectory:
        return self

    def require_writable(self, key: str) -> None:
        with suppress(FileNotFoundError):  # `update` creates a missing directory
            place = self._directories.locate(key)
            try:
                if not os.access(f"/proc/self/fd/{place.at}", os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, "is in a directory that is write-protected", key)
                open_old(self._store, place, replace_links=self._replace_links)
            finally:
                os.close(place.at)

    # ---- objects: replaced by one update after the other

    def update(self, key: str, change: Change) -> Stat | None:
        return repeated(key, self._race_s, partial(self._update, key, change))

    def _update(self, key: str, change: Change) -> Stat | None:
        """Update an object in the directory that has its path now.

        Raise Changed if another directory has taken that path meanwhile.
        """
        planned = None
        try:
            place = self._directories.locate(key)
        except FileNotFoundError:
            self._directories.require_source()
            planned = change.plan(None)
            if planned is None:
                return None
            place = self._directories.locate(key, make=True)
        with self._directories.changing(place):
            self._directories.require_source()
            directory = key.rpartition("/")[0]
            self.temporary_files.sweep_once(directory)
            self._directories.make_durable(directory)
            with locked(place, self._lock_s):
                if key in self._unfinished:
                    finish_or_undo(place, self._unfinished[key])
                    del self._unfinished[key]
                plans = chain([planned], repeat(None))
                stat = repeated(key, self._race_s, lambda: self._attempt(place, change, next(plans)))
            if not self._directories.has_path(place):
                raise Changed
            return stat

    def recover(self, note: Begun) -> None:
        if note.temp or note.head:
            try:
                place = self._directories.locate(note.key)
            except FileNotFoundError:
                return
            with self._directories.changing(place), locked(place, self._lock_s):
                finish_or_undo(place, note)

    def recovered(self) -> None:
        self.temporary_files.allow()

    def _attempt(self, place: ObjectPlace, change: Change, planned: Plan | None) -> Stat | None:
        """Make one attempt. `planned` is the plan of the new object if `change` has just made it."""
        old, base, linked = open_old(self._store, place, replace_links=self._replace_links)
        plan = change.plan(old) if old is not None or planned is None else planned
        if is_same(plan, None if old is None else old.stat().size):
            return synced(place, old)
        if old is not None and plan is not None and not linked and (unit := change.in_place):
            growth = in_place.growth_of(plan, old, unit)
            if growth is not None:
                return self._changed(place, old, growth, change)
        note = Begun(place.key, base, temporary_name())
        if plan is None:
            self._switch(place, note, change)
            return None
        try:
            fd = written(place, note.temp, old, plan, verify=change.verify, alike=not linked)
        except OSError as e:
            if identity_at(place.name, place.at) != base:  # another writer may have truncated the old file
                raise Changed from e
            raise
        try:
            new = os.fstat(fd)
            self._switch(place, note._replace(temp_ino=new.st_ino), change)
            return stat_of(new)
        finally:
            os.close(fd)

    def _changed(self, place: ObjectPlace, old: LocalBlob, growth: Growth, change: Change) -> Stat:
        """Call `in_place.changed`. If it fails after `begun`, the update stays in `_unfinished`."""

        def noted(note: Begun) -> None:
            change.begun(note)
            self._unfinished[place.key] = note

        stat = in_place.changed(place, old, growth, change.verify, noted)
        self._unfinished.pop(place.key, None)
        if stat is None:
            raise Changed
        return stat

    def _switch(self, place: ObjectPlace, note: Begun, change: Change) -> None:
        """Switch to the new version. If another writer was faster, raise Changed; nothing of this update remains."""
        try:
            is_current = identity_at(place.name, place.at) == note.base
            if is_current:
                change.begun(note)
            switched = switch(place, note) if is_current else finish_or_undo(place, note)
        except BaseException:
            try:
                finish_or_undo(place, note)
            except OSError:
                self._unfinished[place.key] = note
            raise
        if not switched:
            raise Changed

    # ---- new objects

    def create(self, files: Sequence[tuple[str, Content]]) -> None:
        self._directories.require_source()
        super().create(files)
        for directory in {key.rpartition("/")[0] for key, _ in files}:
            self._directories.make_durable(directory)
            self.sync_directory(directory)

    def _create(self, file: tuple[str, Content]) -> None:
        key, content = file
        with self._directories.changing(self._directories.locate(key, make=True)) as place:
            # Not truncated first: another process may have written the same bytes, and may be killed after this.
            fd = open_or_create(place.name, os.O_WRONLY, 0o666, at=place.at)
            try:
                fill(fd, None, pieces_of(content))
                syscalls.ftruncate(fd, size_of(content))
                syscalls.fsync(fd)
            finally:
                os.close(fd)
