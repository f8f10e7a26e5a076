"""One writable mount per source on object stores: a lock object that its owner renews until it expires.

The lease reports a second writer early. Data safety does not depend on it: if a former owner resumes, its conditional
requests fail.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import threading
import time
from contextlib import suppress
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from shardfs.model.blobs import ByteRange
from shardfs.model.errors import BusyError, message
from shardfs.storage.source_locks import LOCK, MAX_RECORD, SOURCE_LOCK, boot_id, busy, describe, owner_in, read_owner
from shardfs.storage.writers.objects import PAUSE_S, ObjectVersion, put_once, remove_once
from shardfs.storage.writers.planned_blob import PlannedBlob
from shardfs.storage.writers.writer import Changed

if TYPE_CHECKING:
    from pathlib import Path

    from shardfs.storage.writers.objects import Objects

log = logging.getLogger(__name__)

LEASE_S = 60.0
"""Lease duration in seconds. Other mounts wait twice as long before they take over: see `EXPIRED_S`."""

RENEW_S = 20.0

ATTEMPTS = 100
"""Attempts to take the lock object while other mounts change it at the same moment."""

EXPIRED_S = 2 * LEASE_S
"""Seconds after the last renewal at which another mount may take over the lock object.

The store's clock gives both times, so clocks of different machines are never compared.
"""


def _path_in(directory: str) -> str:
    """Return the path of the lock object of a directory."""
    return f"{directory}/{SOURCE_LOCK}" if directory else SOURCE_LOCK


class Lease:
    """The lock object of one source, at `path` of `objects`.

    `journal` is the mount's journal directory, which the caller has locked.
    """

    def __init__(self, objects: Objects, path: str, journal: Path) -> None:
        self._objects = objects
        self._path = path
        self._lock = journal / LOCK
        self._record = self._read_record()
        self._version: ObjectVersion | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew_for_ever, name="lease", daemon=True)

    @classmethod
    def take(cls, objects: Objects, directory: str, journal: Path) -> Lease:
        """Take the lease of `directory` and start a thread that renews it until `free`.

        Raise BusyError if another mount holds the lease, or the lease of a directory above; OSError if the store fails.
        """
        lease = cls(objects, _path_in(directory), journal)
        lease._require_free_above(directory)
        for _ in range(ATTEMPTS):
            with suppress(Changed):  # another mount takes the lease at this moment
                lease._write(lease._expired(lease._path))
                lease._thread.start()
                return lease
            time.sleep(random.uniform(0.0, PAUSE_S))
        why = f"the store refuses to write the lock object, {ATTEMPTS} times in a row; try again later"
        raise BusyError(errno.EBUSY, why, lease._path)

    @classmethod
    def rehearse(cls, objects: Objects, directory: str, journal: Path) -> None:
        """Raise BusyError if `take` would raise it. Writes nothing. `journal` need not exist or be locked."""
        lease = cls(objects, _path_in(directory), journal)
        lease._require_free_above(directory)
        lease._expired(lease._path)

    def _require_free_above(self, directory: str) -> None:
        """Raise BusyError if another mount holds the lease of a directory above."""
        for above in PurePosixPath(directory).parents[:-1]:
            with suppress(PermissionError):  # the credentials may permit the source alone
                self._expired(_path_in(str(above)), directory, str(above))

    def _read_record(self) -> dict[str, Any]:
        """Return the content of the lock object: the journal's owner record, and the identity of its lock file.

        The identity changes if another program removes the lock file and the journal creates a new one. It is empty if
        there is no lock file.
        """
        identity: list[int] = []
        with suppress(FileNotFoundError):
            info = os.stat(self._lock)
            identity = [info.st_dev, info.st_ino]
        return read_owner(str(self._lock)) | {"boot": boot_id(), "journal": identity}

    def _look(self, path: str) -> tuple[ObjectVersion | None, dict[str, Any], bool]:
        """Return the version of a lock object, its record, and whether this journal wrote it.

        A journal has one owner at a time, and this mount has locked the journal. So an earlier owner of the lease that
        used the same journal has ended.
        """
        version, raw = self._objects.look(path, ByteRange(0, MAX_RECORD)) or (None, b"")
        owner = owner_in(raw)
        return version, owner, all(owner.get(name) == self._record.get(name) for name in ("boot", "journal"))

    def _expired(self, path: str, source: str = "", other: str = "") -> ObjectVersion | None:
        """Return an expired lock object that may be taken over; None if there is none.

        Raise BusyError, with the message of `busy`, if the lock object has not expired.
        """
        version, owner, is_ours = self._look(path)
        if version is not None and not is_ours:
            if version.age_s < EXPIRED_S:
                raise busy(owner, source, other)
            log.warning("%s was %s; that mount has not renewed its lock and is replaced", path, describe(owner))
        return version

    def _write(self, base: ObjectVersion | None) -> None:
        with suppress(OSError):
            record = self._read_record()  # without a process number if the lock file was removed
            if record.get("pid") == self._record.get("pid"):
                self._record = record
        new = PlannedBlob([json.dumps(self._record).encode()], None)
        self._version = put_once(self._objects, self._path, base, new)

    def _renew(self) -> None:
        try:
            self._write(self._version)
        except Changed:  # an earlier renewal may have succeeded without its answer arriving
            version, _, is_ours = self._look(self._path)
            if version is None or not is_ours:
                raise
            self._write(version)

    def _renew_for_ever(self) -> None:
        while not self._ended.wait(RENEW_S):
            try:
                self._renew()
            except Changed:
                why = "both mounts now write, and each compares its changes with the store, chunk by chunk"
                log.error("%s: another mount has taken over the source: %s; unmount one", self._path, why)
                return
            except OSError as e:
                log.warning("%s: the lock of the source cannot be renewed: %s", self._path, message(e))

    @property
    def lost(self) -> bool:
        """Whether another mount has taken over the lease because it was not renewed in time."""
        return not self._thread.is_alive() and not self._ended.is_set()

    def free(self) -> None:
        """Release the lease: stop the renewals and remove the lock object, unless another mount has taken it over.

        Raises nothing.
        """
        lost = self.lost
        self._ended.set()
        self._thread.join()
        if not lost:
            with suppress(Changed, OSError):
                version, _, is_ours = self._look(self._path)
                if version is not None and is_ours:
                    remove_once(self._objects, self._path, version)
