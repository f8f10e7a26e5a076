"""The journal of one source: what was acknowledged and is not yet in the store. The only thread-safe part of writing.

`_lock` guards everything. It is held while a record is copied to the page cache and while a segment is made, but not
while waiting for fdatasync. Of the threads that wait for the disk one is the leader and syncs for all.

Segments are unlinked oldest first, and only when all that is in the journal is on disk: whatever supersedes a record
was written after it and so outlives it. If few records keep many segments alive, all that is needed is copied to the
end.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import threading
import time
from collections import deque
from contextlib import suppress
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from shardfs.model.blobs import FilePart
from shardfs.model.redact import public_name
from shardfs.storage import source_locks, syscalls
from shardfs.write.journal import overlaps, places
from shardfs.write.journal.contents import Contents
from shardfs.write.journal.peek import Peek
from shardfs.write.journal.reading import Reading, RecordPlace, read
from shardfs.write.journal.records import (
    BLOCK,
    HAS_DATA,
    HEAD_SIZE,
    HEADER_SIZE,
    OWN,
    Position,
    Record,
    RecordHead,
    RecordKind,
    SegmentHeader,
    aligned,
    decode_head,
    decode_meta,
    encode_meta,
)
from shardfs.write.journal.segments import AROUND, SPARE, Content, Data, Segment, content_of, crc_of, keep_spare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

log = logging.getLogger("shardfs")

SEGMENT_BYTES = 64 << 20
RESERVE_BYTES = 64 << 20
MAX_COPIED = 256 << 20
"""Bytes. More are not copied to make room, for appending waits meanwhile."""

AFTER_DAMAGE = 1 << 32
"""Numbers that are skipped after damage, so that lost records are never taken for later ones."""

HELPFUL = frozenset({RecordKind.BEGIN, RecordKind.DONE, RecordKind.CONFLICT, RecordKind.CLEAN, RecordKind.DROP}) | OWN
"""Kinds of small records that help to empty the journal: no limit keeps them out if they may use the reserve."""

REMOVED = "another program has removed the journal"

FULL = (errno.ENOSPC, errno.EDQUOT)

ON_FULL_DISK = HELPFUL | {RecordKind.DEL}
"""Kinds of records that may use the spare file."""


class _Limits(NamedTuple):
    """In bytes and seconds."""

    journal: int
    reserve: int
    segment: int
    commit_s: float


class _Fresh(NamedTuple):
    """A record that is not known to be on disk."""

    sequence: int
    lsn: int
    place: RecordPlace


class Journal(Contents):
    """Records in segments. Everything may be called from any thread.

    `recovered` are the records that were there when it was opened, by LSN. `problems` is what a user should be told:
    damage, and what not to expect of the place. `damaged_paths` are those whose records are lost although they were on
    disk; "" is among them if nobody can tell which. `read_only` is why nothing can be written any more, if so.
    """

    def __init__(
        self,
        directory: Path,
        source: tuple[bytes, str],
        reading: Reading,
        locks: Sequence[places.Lock],
        limits: _Limits,
    ) -> None:
        super().__init__(directory)
        self.recovered, self.problems, self.damaged_paths = reading.records, reading.problems, reading.damaged_paths
        self.read_only: str | None = None
        self._source, self._locks, self._limits = source, list(locks), limits
        self._epoch = int.from_bytes(secrets.token_bytes(8), "little")
        self._led = threading.Condition(self._lock)
        self._leading = False
        self._current: Segment | None = None
        self._fresh: deque[_Fresh] = deque()
        last = max(reading.sequence, reading.lsn) + (AFTER_DAMAGE if reading.damaged_paths else 0)
        self._sequence = self._durable = last
        self._number = max(max(reading.files, default=0), reading.oldest - 1, 0)
        self._oldest = reading.oldest or min((n for n in reading.files if n > 0), default=1)
        self._stop = threading.Event()
        self._committer: threading.Thread | None = None
        self._was_removed = False

    # -------------------------------------------------------------------------------------------------- opening

    @classmethod
    def open(
        cls,
        directory: str | Path,
        source: str | None,
        *,
        limit_bytes: int,
        reserve_bytes: int = RESERVE_BYTES,
        segment_bytes: int = SEGMENT_BYTES,
        commit_s: float = 5.0,
        mountpoint: str = "",
        waiting: Callable[[], None] = lambda: None,
    ) -> Journal:
        """Take the locks, read what is there and make sure that it is on disk.

        The last `reserve_bytes` of `limit_bytes`, a quarter at most, are for records that are appended with `reserve`.
        With `commit_s` of 0 nothing is synced unless somebody asks. `waiting` is called before what takes long. Without
        a `source` it may be the journal of any; that is not locked then.

        Raise BusyError if another process writes to a source that overlaps; OSError if this is no place for a journal,
        or not ours; UnsupportedError, before anything is touched, if a newer shardfs has written it.
        """
        directory = Path(directory)
        id_, name = (None, "") if source is None else (places.source_id(source), public_name(source))
        warnings, locks = places.take(directory, source or "", mountpoint)
        try:
            if source is not None:
                locks += places.lock_source(source, mountpoint)
                overlaps.refuse(source)
            waiting()
            reading = read(directory, id_, write=True)
            places.purge(directory)
        except BaseException:
            for lock in locks:
                lock.free()
            raise
        segment = min(segment_bytes, max(limit_bytes // 8, 64 << 10))
        limits = _Limits(limit_bytes, min(reserve_bytes, limit_bytes // 4), segment, commit_s)
        told = next((file.header for file in reading.files.values() if file.header), None)
        if id_ is None:
            id_, name = (told.source_id, told.source) if told else (bytes(16), "")
        journal = cls(directory, (id_, name), reading, locks, limits)
        journal.problems[:0] = warnings
        try:
            journal._take_over(reading)
        except BaseException:
            journal._close_files()
            raise
        if commit_s:
            journal._committer = threading.Thread(target=journal._commit_for_ever, name="journal", daemon=True)
            journal._committer.start()
        return journal

    @staticmethod
    def peek(directory: str | Path, source: str | None = None) -> Peek:
        """What is in it, also if somebody else writes to it; nothing is locked or changed (`Peek.open`)."""
        return Peek.open(directory, source)

    def _take_over(self, reading: Reading) -> None:
        for file in sorted(reading.files.values(), key=lambda file: (file.number < 0, abs(file.number))):
            self._add(Segment(file.number, file.name, file.fd, file.end, file.end, damaged=file.damaged))
        for file in reading.torn:
            self._segments[file.number].cut(self.directory, file.size)
        for file in reading.files.values():
            if file.size > file.end and not file.damaged:
                syscalls.ftruncate(file.fd, file.end)
        for file in reading.stale:
            self._unlink(self._segments[file.number])
        for record in reading.records:
            self._note(record.lsn, reading.places[record.lsn])
        for segment in self._segments.values():  # after kill -9 it may be in the page cache only
            self._dirty[segment.number] = segment
            for head, _ in reading.files[segment.number].found:
                place = RecordPlace(segment.number, head.offset, head.stop - head.offset)
                self._fresh.append(_Fresh(head.sequence, head.lsn, place))
            self._durable = self._sequence - 1

    # ------------------------------------------------------------------------------------------------ appending

    def append(
        self, kind: RecordKind, meta: dict[str, Any], data: Data | None = None, *, reserve: bool = False
    ) -> Record:
        """Write a record to the page cache: it survives the end of this process from now on.

        PUT has data, be they empty. With `reserve` it may use what is kept for records that make room.

        Raise OSError: ENOSPC at the limit, or if the disk is full; EROFS if the journal is read-only; EIO if another
        program has removed the journal (see `_require_in_place`).
        """
        text = encode_meta(meta)
        if data is None and kind is RecordKind.PUT:
            data = b""
        content, size = content_of(data)
        crc = None if isinstance(content, FilePart) else crc_of(content)
        flags = 0 if data is None else HAS_DATA
        if not self._fits(kind, size + len(text), reserve=reserve):
            self.tidy(hard=True)
        with self._lock:
            if not self._fits(kind, size + len(text), reserve=reserve):
                raise OSError(errno.ENOSPC, f"the journal has reached its limit of {self._limits.journal} bytes")
            head = RecordHead(kind, flags, len(text), size, 0, 0, 0, 0, 0, 0, 0, crc or 0)
            written = self._write_in_place(head, text, content, crc)
        if written is None:
            self._lead()
            try:
                self._require_in_place()
            finally:
                self._end_leading()
            raise OSError(errno.EIO, REMOVED)  # another thread has restored the journal meanwhile
        position = Position(written.segment, written.data_start, size, written.data_crc) if flags else None
        return Record(written.lsn, kind, meta, position)

    def _write_in_place(self, head: RecordHead, meta: bytes, content: Content, crc: int | None) -> RecordHead | None:
        """`_write` a new record. None if its segment is not in the journal's directory any more: it does not count."""
        try:
            head = self._write(head, meta, content, crc)
        except FileNotFoundError:  # there was no directory for a new segment
            return None
        if self._current is not None and self._current.is_in(self.directory):
            return head
        self._forget(head.lsn)
        return None

    def _fits(self, kind: RecordKind, size: int, *, reserve: bool) -> bool:
        if reserve and kind in HELPFUL:
            return True
        limit = self._limits.journal - (0 if reserve else self._limits.reserve)
        return self._used + size + AROUND <= limit

    def _write(self, head: RecordHead, meta: bytes, content: Content, crc: int | None) -> RecordHead:
        """Write a record behind the others; the lock is held. LSN 0: a new one. Raise EIO if the data are not of `crc`.

        Whatever fails, the next record takes the same place.
        """
        if self.read_only:
            raise OSError(errno.EROFS, self.read_only)
        segment, need = self._current, head.meta_size + head.data_size + AROUND
        helpful = head.kind in ON_FULL_DISK
        if segment is None or segment.end + need > segment.size or (segment.spare and not helpful):
            if not self._is_in_place():
                raise FileNotFoundError(errno.ENOENT, REMOVED, str(self.directory))
            segment = self._roll(need, helpful=helpful)
        number = self._sequence + 1
        head = head._replace(
            sequence=number, lsn=head.lsn or number, epoch=self._epoch, segment=segment.number, offset=segment.end,
            durable=self._durable, oldest=self._oldest,
        )  # fmt: skip
        head = segment.write(head, meta, content, crc)
        stop = aligned(head.stop)
        self._used += stop - segment.end
        self._sequence, segment.end = number, stop
        self._dirty[segment.number] = segment
        place = RecordPlace(segment.number, head.offset, head.stop - head.offset)
        self._fresh.append(_Fresh(number, head.lsn, place))
        if head.kind not in OWN:
            self._forget(head.lsn)
            self._note(head.lsn, place)
        return head

    # ------------------------------------------------------------------------------------------------- segments

    def _roll(self, need: int, *, helpful: bool) -> Segment:
        """Begin a segment with room for `need` bytes behind its header; on a full disk only for helpful records."""
        id_, name = self._source
        header = SegmentHeader(id_, self._epoch, self._number + 1, self._sequence + 1, time.time_ns(), name)
        try:
            segment = Segment.create(self.directory, header, max(self._limits.segment, HEADER_SIZE + need))
        except OSError as e:
            if e.errno not in FULL or not helpful:
                raise
            segment = Segment.from_spare(self.directory, header, HEADER_SIZE + need)
        self._number = header.number
        self._add(segment)
        self._current = segment
        return segment

    # --------------------------------------------------------------------------------------------------- syncing

    def sync(self, lsn: int | None = None) -> None:
        """Return when everything up to `lsn`, or all, is on disk. Who waits meanwhile is served by the same call.

        Raise OSError (EIO) if that is impossible; then the journal is read-only. EIO is also raised, once, if another
        program has removed the journal (see `_require_in_place`).
        """
        with self._lock:
            target = self._sequence if lsn is None else lsn
            while self._leading and self._durable < target:
                self._led.wait()
            if self._durable >= target and self._is_in_place():
                return
            while self._leading:
                self._led.wait()
            self._leading = True
        try:
            self._commit()
        finally:
            self._end_leading()

    def _lead(self) -> None:
        with self._lock:
            while self._leading:
                self._led.wait()
            self._leading = True

    def _end_leading(self) -> None:
        with self._lock:
            self._leading = False
            self._led.notify_all()

    def _commit(self) -> None:
        """Have everything on disk, in files that the next mount will find; only by the leader."""
        self._commit_segments()
        self._require_in_place()

    def _commit_segments(self) -> None:
        with self._lock:
            if self.read_only and self._fresh:
                raise OSError(errno.EIO, self.read_only)
            sequence, dirty = self._sequence, list(self._dirty.values())
            self._dirty.clear()
        broken = self._sync_segments(dirty)
        with self._lock:
            if broken:
                self._current = None
                if not self._is_in_place():  # then all of it is written anew
                    raise OSError(errno.EIO, REMOVED)
                self._rescue(broken)
                return
            self._durable = max(self._durable, sequence)
            while self._fresh and self._fresh[0].sequence <= sequence:
                self._fresh.popleft()

    def _sync_segments(self, segments: Iterable[Segment]) -> list[Segment]:
        """Those that could not be synced."""
        broken = []
        for segment in segments:
            try:
                syscalls.fdatasync(segment.fd)
            except OSError as e:
                log.error("%s: %s; its last records are written anew", self.directory / segment.name, e.strerror)
                broken.append(segment)
        return broken

    def _rescue(self, broken: Sequence[Segment]) -> None:
        """Write anew what may be missing on disk; the lock is held.

        After an error the kernel takes the pages for clean, so another fdatasync of the same file would prove nothing.
        They are still in the page cache, mostly; each record is verified. From the first one on that may be missing all
        are written, in their order, so that still everything lies before what supersedes it.
        """
        numbers = {segment.number for segment in broken}
        doubtful = list(dropwhile(lambda fresh: fresh.place.number not in numbers, self._fresh))
        first, last = doubtful[0].sequence if doubtful else self._sequence, self._sequence
        try:
            for fresh in doubtful:
                self._copy_record(fresh.lsn, fresh.place)
            meta = encode_meta({"first": first, "last": last})
            self._write(_own(RecordKind.REWRITTEN, meta), meta, (), 0)
            for segment in self._dirty.values():
                if segment not in broken:
                    syscalls.fdatasync(segment.fd)
        except OSError as e:
            self._give_up(e)
        self._dirty.clear()
        self._fresh.clear()
        self._durable = self._sequence

    # ------------------------------------------------------------------------------------------ removed by others

    def _is_in_place(self) -> bool:
        """Whether the next mount would find the journal: every segment that it needs, and the lock; `_lock` is held."""
        return all(lock.is_at_its_path() for lock in self._locks[:1]) and not self._missing()

    def _missing(self) -> list[Segment]:
        needed = (segment for segment in self._segments.values() if segment.number >= self._oldest)
        return [segment for segment in needed if not segment.is_in(self.directory)]

    def _require_in_place(self) -> None:
        """Restore the journal if another program has removed it, or parts of it; only by the leader.

        A lock file that is missing is made again. If segments are missing, all that is needed is written to a new one:
        the bytes of a file without a name are readable as long as it is open. Then raise OSError (EIO) all the same, as
        for some time nothing would have survived the end of this process. If the journal cannot be restored, the next
        call tries it again.
        """
        with self._lock:
            if self._is_in_place():
                return
            if self.read_only:
                raise OSError(errno.EIO, self.read_only)
            missing, count = self._missing(), len(self._live)
            try:
                self._take_place()
            except OSError as e:
                self._say_removed(f"and a new one cannot be begun: {e.strerror}", e)
            if not missing:
                log.warning("%s: the lock file was removed, and is there again", self.directory)
                return
        try:
            self._renew()
        except OSError as e:
            self._current = None  # nothing is appended before all of it has been written anew
            self._say_removed(f"and its records cannot be written to a new one: {e.strerror}", e)
        self._was_removed = True
        self._say_removed(f"the {count} records that are needed are in a new one")

    def _take_place(self) -> None:
        """Have the directory and its lock. Raise OSError if another process has it, or another journal is there."""
        if not self._locks[0].is_at_its_path():
            places.prepare(self.directory, "", "")  # a look at the mount would wait for this thread to answer
            old = self._locks[0]
            self._locks[0] = places.Lock.take(str(self.directory / source_locks.LOCK), old.mountpoint, old.source)
            old.free()
        ours = {segment.name for segment in self._segments.values() if segment.is_in(self.directory)}
        if others := {path.name for path in self.directory.glob("*.wal")} - ours:
            raise OSError(errno.EEXIST, f"there is another journal at its place ({min(others)}): move it away")

    def _say_removed(self, what: str, cause: OSError | None = None) -> NoReturn:
        told = f"{REMOVED}; {what}"
        log.error("%s: %s", self.directory, told)
        if told not in self.problems:
            self.problems.append(told)
        raise OSError(errno.EIO, told) from cause

    def _give_up(self, error: OSError) -> NoReturn:
        self.read_only = f"the journal cannot be written to disk: {error.strerror}"
        log.critical("%s: %s; nothing more is written", self.directory, self.read_only)
        raise OSError(errno.EIO, self.read_only) from error

    def _copy_record(self, lsn: int, place: RecordPlace) -> None:
        """Write a record again, behind the others, as the same version. Raise EIO if it is damaged."""
        fd, live = self._segments[place.number].fd, lsn in self._live
        text = os.pread(fd, HEAD_SIZE, place.offset)
        head = decode_head(text)
        meta = os.pread(fd, head.meta_size, place.offset + HEAD_SIZE) if head else b""
        if head is None or head.lsn != lsn or decode_meta(text + meta) is None:
            raise OSError(errno.EIO, f"record {lsn} of the journal cannot be read any more")
        data = FilePart(fd, head.data_start, head.data_size)
        new = self._write(head, meta, data, head.data_crc)
        old = place.number, head.data_start
        origin = self._origins.pop(old, old)
        self._moved[origin] = Position(new.segment, new.data_start, new.data_size, new.data_crc)
        self._origins[new.segment, new.data_start] = origin
        if not live:
            self._forget(lsn)

    # ------------------------------------------------------------------------------------------------- releasing

    @property
    def limit_bytes(self) -> int:
        """What `nbytes` is to be compared with."""
        return self._limits.journal - self._limits.reserve

    def tidy(self, *, hard: bool = False) -> None:
        """Sync, and unlink segments that are not needed any more. The journal does so itself every `commit_s`.

        `hard`: copy more of what is needed, for the sake of room.
        """
        self._lead()
        try:
            self._commit()
            if self.read_only or self._current is None:
                return
            self._free_all()
            if self._is_mostly_dead(hard=hard):
                self._renew_if_there_is_room()
            with suppress(OSError):  # a full disk
                keep_spare(self.directory, min(self._limits.reserve, self._limits.segment))
        finally:
            self._end_leading()

    def renew(self) -> None:
        """Copy what is needed to new segments and leave the old ones, with their damage, behind."""
        self._lead()
        try:
            self._renew()
        finally:
            self._end_leading()

    def _renew_if_there_is_room(self) -> None:
        try:
            self._renew()
        except OSError as e:
            if e.errno not in FULL:
                raise  # on a full disk nothing has changed: what is not needed stays, and costs nobody an error

    def _renew(self) -> None:
        with self._lock:  # lest something is superseded in between
            self._roll(self._live_bytes + (len(self._live) + 1) * AROUND, helpful=not self._live)
            failed = None
            for lsn in sorted(self._live):
                try:
                    self._copy_record(lsn, self._live[lsn])
                except OSError as e:
                    failed = e
            if failed is not None and failed.errno in FULL and self._missing():
                raise failed  # it is all written anew once there is room
            if failed is not None:  # half of it would not be in order
                self._give_up(failed)
        self._free_all()

    def _is_mostly_dead(self, *, hard: bool) -> bool:
        """Whether a few records that are needed keep many from being unlinked that are not."""
        with self._lock:
            if not self._live and self._current is not None:
                return self._current.end > (HEADER_SIZE + BLOCK if hard else self._current.size // 2)
            needed = (1 if hard else 2) * (self._live_bytes + self._limits.segment)
            pinned = any(segment.pins for segment in self._segments.values())
            return self._used > needed and self._live_bytes <= MAX_COPIED and not pinned

    def _free_all(self) -> None:
        while self._free():
            pass

    def _free(self) -> bool:
        """Unlink the oldest segments if nothing in them is needed; only by the leader."""
        with self._lock:
            segments = self._segments.values()
            dead = list(takewhile(lambda segment: not segment.live and segment is not self._current, segments))
            if all(segment.pins and segment.number < self._oldest for segment in dead):
                return False
        self._commit_segments()  # what supersedes them: the record that frees them may be on disk before others
        with self._lock:
            self._oldest = min((n for n in self._segments if n > 0 and self._segments[n] not in dead), default=0)
            self._write(_own(RecordKind.FREE, b"{}"), b"{}", (), 0)
        self._commit_segments()
        with self._lock:
            for segment in dead:
                if not segment.pins:
                    self._unlink(segment)
        return True

    # -------------------------------------------------------------------------------------------------- the end

    def _commit_for_ever(self) -> None:
        failed = False
        while not self._stop.wait(self._limits.commit_s):
            try:
                self.tidy()
                failed = False
            except OSError as e:
                if not failed:
                    log.error("%s: %s", self.directory, e.strerror)
                failed = True

    def close(self, *, clean: bool) -> None:
        """Sync, and let others have the journal; remove it if nothing in it is needed. `clean`: all is in the store.

        Raise OSError if not all could be written; the journal is closed nevertheless.
        """
        self._stop.set()
        if self._committer is not None:
            self._committer.join()
        try:
            if clean and (self._current or self._live or len(self._segments) > 1) and not self.read_only:
                self.sync()  # or the power fails with CLEAN on disk, and not what came before it
                self.release([self.append(RecordKind.CLEAN, {}, reserve=True).lsn])
            self.tidy()
            if self._current is not None:
                syscalls.ftruncate(self._current.fd, self._current.end)
            with suppress(FileNotFoundError):
                syscalls.unlink(str(self.directory / SPARE))
            self._remove_if_not_needed()
        finally:
            self._close_files()

    def _remove_if_not_needed(self) -> None:
        """Remove the directory, unless something is needed or kept aside in it, or it is to show what has happened."""
        with self._lock:
            segments = list(self._segments.values())
            needed = self._live or len(segments) > 1 or any(s.pins or s.damaged for s in segments)
            if not needed and not self.read_only and not self._was_removed and self._is_in_place():
                places.remove(self.directory, [segment.name for segment in segments])

    def _close_files(self) -> None:
        """Nothing is written any more: a descriptor's number may be that of another file soon."""
        with self._lock:
            self.read_only = self.read_only or "the journal is closed"
            self._current = None
            self._dirty.clear()
            self._fresh.clear()
            for segment in self._segments.values():
                with suppress(OSError):
                    syscalls.close(segment.fd)
            self._segments = {}
            locks, self._locks = self._locks, []
        for lock in locks:
            lock.free()


def _own(kind: RecordKind, meta: bytes) -> RecordHead:
    return RecordHead(kind, 0, len(meta), 0, 0, 0, 0, 0, 0, 0, 0, 0)
