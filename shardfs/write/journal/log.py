"""The journal of one source: an append-only log of acknowledged writes that are not yet in the store.

Threads: `_lock` guards all state. A thread holds `_lock` while it copies a record to the page cache and while it
creates a segment, but not while it waits for fdatasync. Of the threads that wait for the disk, one is the leader and
syncs for all.

Space: the journal unlinks segments oldest first, and only after it has synced all records. A record that supersedes
another one is younger and therefore outlives it. If a few live records keep many segments alive, the journal copies
all live records to a new segment.
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
"""Bytes. If live records are larger, they are not copied to free space, because appending waits for the copy."""

AFTER_DAMAGE = 1 << 32
"""Numbers skipped after damage, so that a new record never gets the number of a lost one."""

HELPFUL = frozenset({RecordKind.BEGIN, RecordKind.DONE, RecordKind.CONFLICT, RecordKind.CLEAN, RecordKind.DROP}) | OWN
"""Kinds of small records that help to empty the journal. With `reserve`, no size limit applies to them."""

REMOVED = "another program has removed the journal"

FULL = (errno.ENOSPC, errno.EDQUOT)

ON_FULL_DISK = HELPFUL | {RecordKind.DEL}
"""Kinds of records that may use the spare file when the disk is full."""


class _Limits(NamedTuple):
    """Sizes in bytes, and the interval between two syncs in seconds."""

    journal: int
    reserve: int
    segment: int
    commit_s: float


class _Fresh(NamedTuple):
    """A record that may not be on disk yet."""

    sequence: int
    lsn: int
    place: RecordPlace


class Journal(Contents):
    """A locked, writable journal. All methods are thread-safe.

    Attributes:
        recovered: the records found at opening, in LSN order.
        problems: messages for the user, about damage and about limits of the directory.
        damaged_paths: paths of lost records that had been on disk; contains "" if a lost record's path is unknown.
        read_only: why the journal cannot be written any more; None if it can.
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
        """Lock the journal and the source, and read the records. The first sync also covers the recovered records.

        Args:
            directory: created if missing.
            source: None opens the journal of any source, and locks no source.
            limit_bytes: size limit of the journal.
            reserve_bytes: the part of `limit_bytes`, at most a quarter, that only records with `reserve` may use.
            segment_bytes: upper limit of a segment's size; larger records get a larger segment.
            commit_s: interval in seconds between two syncs by a background thread; 0: no such thread.
            mountpoint: named in the lock files; must not contain the journal.
            waiting: called before the journal is read, which may take long.

        Raise BusyError if another process writes to the same or an overlapping source; OSError if the directory cannot
        hold a journal, or holds that of another source or user; UnsupportedError, before any segment is changed, if a
        newer shardfs wrote the journal.
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
        """Open a read-only snapshot of a journal, even while a mount writes to it. See `Peek.open` for the errors."""
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
        for segment in self._segments.values():  # if the last mount was killed, records may be in the page cache only
            self._dirty[segment.number] = segment
            for head, _ in reading.files[segment.number].found:
                place = RecordPlace(segment.number, head.offset, head.stop - head.offset)
                self._fresh.append(_Fresh(head.sequence, head.lsn, place))
            self._durable = self._sequence - 1

    # ------------------------------------------------------------------------------------------------ appending

    def append(
        self, kind: RecordKind, meta: dict[str, Any], data: Data | None = None, *, reserve: bool = False
    ) -> Record:
        """Write a record to the page cache. The record survives a crash of this process, but no power failure.

        A PUT without data gets empty data. With `reserve`, the record may use the reserved part of the limit.

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
        """Write a new record. Return None and forget it if another program has removed its segment or the directory."""
        try:
            head = self._write(head, meta, content, crc)
        except FileNotFoundError:  # parts of the journal were removed before a new segment was created
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
        """Append a record and return its final head; `_lock` is held. An LSN of 0 is replaced by a new one.

        After an error, the next record overwrites the failed one. Raise OSError (EIO) if data from a file do not have
        the given `crc`.
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
        """Begin a segment with room for `need` bytes behind its header.

        On a full disk, raise OSError unless the record is `helpful` and the spare file is large enough.
        """
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
        """Return when all records up to `lsn` are on disk; None: all records. Concurrent calls share one fdatasync.

        Raise OSError (EIO) if the records cannot be written to disk; the journal is read-only then. Also raise EIO,
        once, if another program has removed the journal (see `_require_in_place`).
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
        """Sync all records, and make sure that the next mount will find their files. Only the leader calls this."""
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
                if not self._is_in_place():  # `_require_in_place` then writes all live records anew
                    raise OSError(errno.EIO, REMOVED)
                self._rescue(broken)
                return
            self._durable = max(self._durable, sequence)
            while self._fresh and self._fresh[0].sequence <= sequence:
                self._fresh.popleft()

    def _sync_segments(self, segments: Iterable[Segment]) -> list[Segment]:
        """Sync segments; return those for which fdatasync failed."""
        broken = []
        for segment in segments:
            try:
                syscalls.fdatasync(segment.fd)
            except OSError as e:
                log.error("%s: %s; its last records are written anew", self.directory / segment.name, e.strerror)
                broken.append(segment)
        return broken

    def _rescue(self, broken: Sequence[Segment]) -> None:
        """After a failed fdatasync, write the records again that may be missing on disk; `_lock` is held.

        After the error, the kernel marks the pages as clean, so a second fdatasync of the file would prove nothing. The
        page cache usually still has the pages; each copied record is verified. All records from the first doubtful one
        on are copied in order, so that every record still precedes the records that supersede it.
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

    # -------------------------------------------------------------------------- a journal that was removed

    def _is_in_place(self) -> bool:
        """Return whether the lock file and all needed segments are still in the directory; `_lock` is held."""
        return all(lock.is_at_its_path() for lock in self._locks[:1]) and not self._missing()

    def _missing(self) -> list[Segment]:
        needed = (segment for segment in self._segments.values() if segment.number >= self._oldest)
        return [segment for segment in needed if not segment.is_in(self.directory)]

    def _require_in_place(self) -> None:
        """Restore the journal if another program has removed it, or parts of it. Only the leader calls this.

        A missing lock file is created again. If segments are missing, all live records are copied to a new segment,
        because an unlinked file stays readable through its open descriptor. After such a copy, raise OSError (EIO) even
        if the copy succeeded, because for some time a crash of this process would have lost records. If the journal
        cannot be restored, raise OSError (EIO); the next call tries again.
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
            self._current = None  # no append before all live records have been written anew
            self._say_removed(f"and its records cannot be written to a new one: {e.strerror}", e)
        self._was_removed = True
        self._say_removed(f"the {count} records that are needed are in a new one")

    def _take_place(self) -> None:
        """Recreate the directory and the lock file if they are missing.

        Raise OSError if another process holds the lock, or the directory has segments of another journal.
        """
        if not self._locks[0].is_at_its_path():
            places.prepare(self.directory, "", "")  # no mount point: a look at our own mount would wait for this thread
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
        """Append a copy of a record, with the same LSN. Raise OSError (EIO) if the record is damaged."""
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
        """Size limit of `nbytes` for records without `reserve`."""
        return self._limits.journal - self._limits.reserve

    def tidy(self, *, hard: bool = False) -> None:
        """Sync, and unlink segments without live records. A background thread calls this every `commit_s` seconds.

        `hard`: copy live records even if that frees less space.
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
        """Copy all live records to a new segment, and remove the old segments. Damaged files are kept for a week."""
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
                raise  # a full disk is no error here: the copy is omitted, and the old segments stay

    def _renew(self) -> None:
        with self._lock:  # no record may be superseded between two copies
            self._roll(self._live_bytes + (len(self._live) + 1) * AROUND, helpful=not self._live)
            failed = None
            for lsn in sorted(self._live):
                try:
                    self._copy_record(lsn, self._live[lsn])
                except OSError as e:
                    failed = e
            if failed is not None and failed.errno in FULL and self._missing():
                raise failed  # all is written anew once the disk has room
            if failed is not None:  # a partial copy would break the order of the records
                self._give_up(failed)
        self._free_all()

    def _is_mostly_dead(self, *, hard: bool) -> bool:
        """Return whether copying the live records would free enough space to be worth the copy."""
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
        """Unlink the oldest segments without live records. Only the leader calls this.

        Return whether there were any; a segment that a reader pins is unlinked later.
        """
        with self._lock:
            segments = self._segments.values()
            dead = list(takewhile(lambda segment: not segment.live and segment is not self._current, segments))
            if all(segment.pins and segment.number < self._oldest for segment in dead):
                return False
        self._commit_segments()  # superseding records first: the kernel may write the FREE record before them
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
        """Sync and unlock the journal. Remove its directory if it has no live records and no files to keep.

        `clean`: all writes are in the store. Raise OSError if not all records could be synced; the journal is closed
        even then.
        """
        self._stop.set()
        if self._committer is not None:
            self._committer.join()
        try:
            if clean and (self._current or self._live or len(self._segments) > 1) and not self.read_only:
                self.sync()  # else a power failure could leave CLEAN on disk without the records before it
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
        """Remove the directory, unless it has live records, damage, kept files, or was restored after a removal."""
        with self._lock:
            segments = list(self._segments.values())
            needed = self._live or len(segments) > 1 or any(s.pins or s.damaged for s in segments)
            if not needed and not self.read_only and not self._was_removed and self._is_in_place():
                places.remove(self.directory, [segment.name for segment in segments])

    def _close_files(self) -> None:
        """Close all files and refuse further writes, because the kernel may reuse the descriptors' numbers."""
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
