"""The journal of one source: an append-only log of acknowledged writes that are not yet in the store.

`Contents` is the account of its files and live records, `Appender` writes and syncs records, and frees space.

Threads: the lock of `Contents` guards all state. No thread holds it while it waits for the disk. Of the threads that
wait for the disk, one is the leader and syncs for all.
"""

from __future__ import annotations

import errno
import logging
import math
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from google_crc32c import value as crc32c

from shardfs.model.blobs import FilePart
from shardfs.model.redact import public_name
from shardfs.storage import source_locks, syscalls
from shardfs.write.journal import overlaps, places
from shardfs.write.journal.appender import FULL, HELPFUL, REMOVED, Appender
from shardfs.write.journal.reading import Reading, read, read_part
from shardfs.write.journal.records import HAS_DATA, Position, Record, RecordKind, encode_meta
from shardfs.write.journal.segments import AROUND, SPARE, Contents, keep_spare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from shardfs.model.blobs import Bytes

log = logging.getLogger("shardfs")

SEGMENT_BYTES = 64 << 20
RESERVE_BYTES = 64 << 20

AFTER_DAMAGE = 1 << 32
"""Numbers skipped after damage, so that a new record never gets the number of a lost one."""


class _Limits(NamedTuple):
    """Sizes in bytes, and the interval between two syncs in seconds."""

    journal: int
    reserve: int
    segment: int
    commit_s: float


class Leader:
    """Group commit: of the threads that wait for the disk, one is the leader and works for all.

    `lock` guards the state that the leader's work changes.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._changed = threading.Condition(lock)
        self._leading = False

    @contextmanager
    def lead(self, is_done: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        """Wait for the present leader, then lead for the length of a `with` block, which runs without the lock.

        `is_done` is called with the lock held. As soon as it returns True, give False and do not lead.
        """
        with self._changed:
            while not (is_finished := is_done()) and self._leading:
                self._changed.wait()
            self._leading = self._leading or not is_finished
        try:
            yield not is_finished
        finally:
            if not is_finished:
                with self._changed:
                    self._leading = False
                    self._changed.notify_all()


class Journal:
    """A locked, writable journal. All methods are thread-safe.

    Attributes:
        recovered: the records found at opening, in LSN order.
        problems: messages for the user, about damage and about limits of the directory.
        damaged_paths: paths of lost records that had been on disk; contains "" if a lost record's path is unknown.
        limit_bytes: size limit of `nbytes` for records without `reserve`.
    """

    def __init__(self, contents: Contents, source: tuple[bytes, str], reading: Reading, limits: _Limits) -> None:
        self.directory = contents.directory
        self.recovered = reading.recovered
        self.problems = reading.problems
        self.damaged_paths = reading.damaged_paths
        self.limit_bytes = limits.journal - limits.reserve
        self._contents = contents
        self._lock = contents.lock
        self._limits = limits
        self._leader = Leader(contents.lock)
        last = reading.last + (AFTER_DAMAGE if reading.damaged_paths else 0)
        number = max(max(reading.files, default=0), reading.oldest - 1, 0)
        self._appender = Appender(contents, source, last, number, limits.segment)
        self._stop = threading.Event()
        self._committer = threading.Thread(target=self._commit_for_ever, name="journal", daemon=True)
        self._was_removed = False

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
        warnings, locks = places.take(directory, source or "", mountpoint)
        contents = Contents(directory, locks)
        try:
            if source is not None:
                contents.locks += places.lock_source(source, mountpoint)
                overlaps.refuse(source)
            waiting()
            reading = read(directory, None if source is None else source_locks.source_id(source), write=True)
            places.purge(directory)
            reading.problems[:0] = warnings
            segment = min(segment_bytes, max(limit_bytes // 8, 64 << 10))
            limits = _Limits(limit_bytes, min(reserve_bytes, limit_bytes // 4), segment, commit_s)
            identity = reading.identity() if source is None else (source_locks.source_id(source), public_name(source))
            journal = cls(contents, identity, reading, limits)
            journal._appender.adopt(contents.adopt(reading))
        except BaseException:
            contents.close()
            raise
        if commit_s:
            journal._committer.start()
        return journal

    @classmethod
    def rehearse(cls, directory: Path, source: str) -> list[Record]:
        """Return the records that `open` would find, or raise its errors. Lock and change nothing."""
        places.rehearse(directory, source)
        overlaps.refuse(source)
        if not directory.exists():
            return []
        with cls.peek(directory, source) as reading:
            return reading.recovered

    @staticmethod
    def peek(directory: str | Path, source: str | None = None) -> Reading:
        """Read and verify a whole journal, even while a mount writes to it. Lock and change nothing.

        The directory may be a copy of another user's journal. If a mount writes meanwhile, the result misses later
        records, and its last record may be incomplete.

        Raise OSError if `source` is given and the journal belongs to another source, or if a segment is no regular
        file; UnsupportedError if a newer shardfs wrote the journal.
        """
        directory = Path(directory)
        lock = str(directory / source_locks.LOCK)
        owner = source_locks.read_owner(lock) if places.is_locked(lock) else None
        reading = read(directory, None if source is None else source_locks.source_id(source), write=False)
        reading.owner = owner
        return reading

    # ------------------------------------------------------------------------------------------------ appending

    @property
    def read_only(self) -> str | None:
        """Why the journal cannot be written any more; None if it can."""
        return self._appender.read_only

    @property
    def nbytes(self) -> int:
        """Bytes of the segments from the oldest one with a live record on; 0 if no record is live."""
        with self._lock:
            total = self._contents.used
            for segment in self._contents.segments.values():
                if segment.live:
                    return total
                total -= segment.end
            return 0

    def append(
        self, kind: RecordKind, meta: dict[str, Any], data: Bytes | None = None, *, reserve: bool = False
    ) -> Record:
        """Write a record to the page cache. The record survives a crash of this process, but no power failure.

        A PUT without data gets empty data. With `reserve`, the record may use the reserved part of the limit.

        Raise OSError: ENOSPC at the limit, or if the disk is full; EROFS if the journal is read-only; EIO if another
        program has removed the journal (see `_require_in_place`).
        """
        text = encode_meta(meta)
        flags = 0 if data is None and kind is not RecordKind.PUT else HAS_DATA
        content = data or b""
        size, crc = (content.size, None) if isinstance(content, FilePart) else (len(content), crc32c(content))
        limit = self._limits.journal if reserve else self.limit_bytes
        room = math.inf if reserve and kind in HELPFUL else limit - size - len(text) - AROUND
        if self._contents.used > room:
            self.tidy(hard=True)
        with self._lock:
            if self._contents.used > room:
                limit = self._limits.journal
                raise OSError(errno.ENOSPC, f"the journal has reached its limit of {limit} bytes (-o journal_limit)")
            try:
                lsn, position = self._appender.write(kind, flags, text, content, crc)
            except FileNotFoundError:  # parts of the journal were removed before a new segment was created
                pass
            else:
                if (segment := self._appender.current) is not None and places.is_at(segment.fd, segment.path):
                    return Record(lsn, kind, meta, position if flags else None)
                self._contents.release(lsn)  # another program has removed its segment or the directory
        with self._leader.lead():
            self._require_in_place()
        raise OSError(errno.EIO, REMOVED)  # another thread has restored the journal meanwhile

    # ------------------------------------------------------------------------------------------------- reading

    def release(self, lsns: Iterable[int]) -> None:
        """Mark records as not needed any more. `tidy` unlinks segments without live records later."""
        with self._lock:
            for lsn in lsns:
                self._contents.release(lsn)

    @contextmanager
    def using(self, positions: Iterable[Position]) -> Iterator[list[FilePart]]:
        """Give where data of records are, and keep them for the length of a `with` block, even after a release.

        Raise OSError (ESTALE) if a record was released and its segment is gone.
        """
        with self._lock:
            places = [self._contents.part(position) for position in positions]
            for segment, _ in places:
                segment.pins += 1
        try:
            yield [part for _, part in places]
        finally:
            with self._lock:
                for segment, _ in places:
                    segment.pins -= 1

    def read(self, position: Position, start: int = 0, size: int | None = None) -> bytes:
        """Return up to `size` bytes of a record's data from `start`; None: up to the end.

        A read of all data verifies their crc32c and raises OSError (EIO) if it differs. A partial read is not verified.
        """
        with self.using([position]) as (part,):
            return read_part(part, position.crc, start, size)

    # --------------------------------------------------------------------------------------------------- syncing

    def sync(self) -> None:
        """Return when all records are on disk. Concurrent calls share one fdatasync.

        Raise OSError (EIO) if the records cannot be written to disk; the journal is read-only then. Also raise EIO,
        once, if another program has removed the journal (see `_require_in_place`).
        """
        last = self._appender.sequence
        with self._leader.lead(lambda: self._appender.durable >= last and self._contents.is_in_place()) as leads:
            if leads:
                self._commit()

    def _commit(self) -> None:
        """Sync all records, and make sure that the next mount will find their files. Only the leader calls this."""
        self._appender.sync()
        self._require_in_place()

    def tidy(self, *, hard: bool = False) -> None:
        """Sync, and unlink segments without live records. A background thread calls this every `commit_s` seconds.

        `hard`: copy live records even if that frees less space.
        """
        appender = self._appender
        with self._leader.lead():
            self._commit()
            if appender.read_only or appender.current is None:
                return
            appender.free()
            if appender.is_mostly_dead(hard=hard):
                try:
                    appender.rewrite()
                except OSError as e:
                    if e.errno not in FULL:
                        raise  # a full disk is no error here: the copy is omitted, and the old segments stay
            with suppress(OSError):  # a full disk
                keep_spare(self.directory, min(self._limits.reserve, self._limits.segment))

    def rewrite(self) -> None:
        """Copy all live records to a new segment, and remove the old segments. Damaged files are kept for a week."""
        with self._leader.lead():
            self._appender.rewrite()

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

    # -------------------------------------------------------------------------- a journal that was removed

    def _require_in_place(self) -> None:
        """Restore the journal if another program has removed it, or parts of it. Only the leader calls this.

        A missing lock file is created again. If segments are missing, all live records are copied to a new segment,
        because an unlinked file stays readable through its open descriptor. After such a copy, raise OSError (EIO) even
        if the copy succeeded, because for some time a crash of this process would have lost records. If the journal
        cannot be restored, raise OSError (EIO); the next call tries again.
        """
        with self._lock:
            if self._contents.is_in_place():
                return
            if self.read_only:
                raise OSError(errno.EIO, self.read_only)
            missing, count = self._contents.missing(), len(self._contents.live)
            try:
                self._contents.take_place()
            except OSError as e:
                self._report_removal(f"and a new one cannot be begun: {e.strerror}", e)
            if not missing:
                log.warning("%s: the lock file was removed, and is there again", self.directory)
                return
        try:
            self._appender.rewrite()
        except OSError as e:
            self._appender.current = None  # no append before all live records have been written anew
            self._report_removal(f"and its records cannot be written to a new one: {e.strerror}", e)
        self._was_removed = True
        self._report_removal(f"the {count} records that are needed are in a new one")

    def _report_removal(self, outcome: str, cause: OSError | None = None) -> NoReturn:
        why = f"{REMOVED}; {outcome}"
        log.error("%s: %s", self.directory, why)
        if why not in self.problems:
            self.problems.append(why)
        raise OSError(errno.EIO, why) from cause

    # -------------------------------------------------------------------------------------------------- the end

    def close(self, *, clean: bool) -> None:
        """Sync and unlock the journal. Remove its directory if it has no live records and no files to keep.

        `clean`: all writes are in the store. Raise OSError if not all records could be synced; the journal is closed
        even then.
        """
        contents = self._contents
        appender = self._appender
        self._stop.set()
        if self._committer.is_alive():
            self._committer.join()
        try:
            if clean and (appender.current or contents.live or len(contents.segments) > 1) and not self.read_only:
                self.sync()  # else a power failure could leave CLEAN on disk without the records before it
                self.release([self.append(RecordKind.CLEAN, {}, reserve=True).lsn])
            self.tidy()
            if appender.current is not None:
                syscalls.ftruncate(appender.current.fd, appender.current.end)
            with suppress(FileNotFoundError):
                syscalls.unlink(str(self.directory / SPARE))
            with self._lock:
                if not self.read_only and not self._was_removed:
                    contents.remove_if_not_needed()
        finally:
            self._close_files()

    def _close_files(self) -> None:
        """Close all files and refuse further writes, because the kernel may reuse the descriptors' numbers."""
        with self._lock:
            self._appender.close()
            self._contents.close()
