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

from shardfs.model.errors import BusyError, message
from shardfs.storage.source_locks import LOCK, SOURCE_LOCK, busy, describe, read_owner
from shardfs.storage.writers.common import PlannedBlob
from shardfs.storage.writers.objects import PAUSE_S, Changed, Known, put_once, remove_once

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


class Lease:
    """The lock object of one source, at `path` of `objects`.

    `journal` is the mount's journal directory, which the caller has locked.
    """

    def __init__(self, objects: Objects, path: str, journal: Path) -> None:
        self._objects, self._path = objects, path
        self._lock = journal / LOCK
        self._about = self._told()
        self._known: Known | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew_for_ever, name="lease", daemon=True)

    @classmethod
    def take(cls, objects: Objects, directory: str, journal: Path) -> Lease:
        """Take the lease of `directory` and start renewing it.

        Raise BusyError if another mount holds the lease, or the lease of a directory above.
        """
        lease = cls(objects, f"{directory}/{SOURCE_LOCK}" if directory else SOURCE_LOCK, journal)
        for above in PurePosixPath(directory).parents[:-1]:
            with suppress(PermissionError):  # the credentials may permit the source alone
                lease._expired(f"{above}/{SOURCE_LOCK}", directory, str(above))
        for _ in range(ATTEMPTS):
            with suppress(Changed):  # another mount takes the lease at this moment
                lease._renew(lease._expired(lease._path))
                lease._thread.start()
                return lease
            time.sleep(random.uniform(0.0, PAUSE_S))
        raise BusyError(errno.EBUSY, f"{lease._path}: the store refuses to write the lock object, again and again")

    def _expired(self, path: str, source: str = "", other: str = "") -> Known | None:
        """Return an expired lock object that may be taken over; None if there is none.

        Raise BusyError, with the message of `busy`, if the lock object has not expired.
        """
        found = self._objects.look(path, 1 << 16)
        if found is None:
            return None
        known, raw = found
        owner = _owner(raw)
        if not self._was_ours(owner):
            if known.age_s < EXPIRED_S:
                raise busy(owner, source, other)
            log.warning("the source was %s, but that mount says nothing any more", describe(owner))
        return known

    def _was_ours(self, owner: dict[str, Any]) -> bool:
        # A journal has one owner at a time, and this mount has locked it. So an earlier owner of the lease that used
        # the same journal has ended.
        return all(owner.get(name) == self._about.get(name) for name in ("boot", "journal"))

    def _told(self) -> dict[str, Any]:
        """Return this mount's entry for the lock object: its owner record, and the identity of the journal's lock file.

        The identity changes if another program removes the lock file and the journal creates a new one.
        """
        info = os.stat(self._lock)
        return read_owner(str(self._lock)) | {"journal": [info.st_dev, info.st_ino]}

    def _renew(self, base: Known | None) -> None:
        with suppress(OSError):
            told = self._told()
            if told.get("pid") == self._about.get("pid"):
                self._about = told
        self._known = put_once(self._objects, self._path, base, PlannedBlob([json.dumps(self._about).encode()], None))

    def _renew_for_ever(self) -> None:
        while not self._ended.wait(RENEW_S):
            try:
                self._renew_ours()
            except Changed:
                log.error("another mount has taken over the source: what both change is compared, chunk by chunk")
                return
            except OSError as e:
                log.warning("the lock of the source cannot be renewed: %s", message(e))

    def _renew_ours(self) -> None:
        try:
            self._renew(self._known)
        except Changed:  # an earlier renewal may have succeeded without its answer arriving
            known = self._ours()
            if known is None:
                raise
            self._renew(known)

    def _ours(self) -> Known | None:
        """Return the lock object if this mount wrote it."""
        found = self._objects.look(self._path, 1 << 16)
        return found[0] if found is not None and self._was_ours(_owner(found[1])) else None

    @property
    def lost(self) -> bool:
        """Return whether another mount has taken over the lease because it was not renewed in time."""
        return not self._thread.is_alive() and not self._ended.is_set()

    def free(self) -> None:
        """Release the lease: stop the renewals and remove the lock object, unless another mount has taken it over."""
        lost = self.lost
        self._ended.set()
        self._thread.join()
        if self._known is not None and not lost:
            with suppress(Changed, OSError):
                known = self._ours()
                if known is not None:
                    remove_once(self._objects, self._path, known)


def _owner(raw: bytes) -> dict[str, Any]:
    try:
        told = json.loads(raw)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}
