"""Inspect, export, decide, salvage and discard the journals that mounts have left behind.

No function needs the source: a journal may be a copy of another user's journal, or its source may be gone. Functions
that change a journal lock it first, and raise BusyError if another process has locked it.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from shardfs.model.errors import UnsupportedError, message
from shardfs.storage import syscalls
from shardfs.storage.source_locks import LOCK
from shardfs.write.journal import Journal, Reading, RecordKind, directory_for, state_directory
from shardfs.write.journal.places import DISCARDED, LOST, Lock, is_locked, own_directory
from shardfs.write.journal.scanning import NAME
from shardfs.write.pending import Pending, Version

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from shardfs.model.blobs import FilePart
    from shardfs.write.journal import Position

log = logging.getLogger("shardfs")

MAINTENANCE_BYTES = 1 << 40
"""Size limit of a journal that is opened for maintenance: large enough for any existing journal."""

OURS = re.compile(r"[0-9a-f]{32}")
"""Matches the directory names that `directory_for` returns."""

LOOK_S = 5.0
"""Seconds between two checks whether another process has begun to publish a journal that a read-only mount shows."""


class PendingFile(NamedTuple):
    """A path in a journal.

    `state` is "pending", "deleted", "scratch" (a program's temporary file) or "conflict". `why` is the reason of the
    conflict; "" without one.
    """

    path: str
    state: str
    size: int
    lsn: int
    mtime_ns: int
    why: str


class Left(NamedTuple):
    """The content of a journal.

    `source` has no credentials. `owner` describes the process that holds the lock (see `source_locks.describe`); None
    if no process does. `unfinished` are the shards whose publishing was interrupted.
    """

    directory: Path
    source: str
    owner: dict[str, Any] | None
    entries: list[PendingFile]
    unfinished: list[str]
    problems: list[str]
    damaged_paths: list[str]
    nbytes: int

    @property
    def waiting(self) -> list[PendingFile]:
        """The entries to publish: all but the temporary files of programs."""
        return [entry for entry in self.entries if entry.state != "scratch"]

    @property
    def undecided(self) -> bool:
        """Whether the user must act: no mount publishes the entries, or there is a conflict."""
        if self.owner is None:
            return bool(self.waiting or self.unfinished or self.problems)
        return any(entry.state == "conflict" for entry in self.entries)


class Exported(NamedTuple):
    """The result of an export: the number of files written, the deleted paths, and the errors by path."""

    files: int
    deleted: list[str]
    failed: dict[str, str]


class Readable(Protocol):
    """A `Journal` or a `Reading`."""

    def using(self, position: Position) -> AbstractContextManager[FilePart]: ...


def journals(base: str | Path | None = None) -> list[Path]:
    """Return the directories of all journals below `base` (default: `state_directory()`)."""
    top = state_directory() if base is None else Path(base)
    return sorted(path for path in top.glob("*") if _is_journal(path))


def find(source: str, base: str | Path | None = None) -> Path:
    """Return a journal's directory, given its source or the directory itself.

    Raise FileNotFoundError if there is no journal.
    """
    for path in (Path(source), directory_for(source, base)):
        if "://" not in str(path) and _is_journal(path):
            return path
    raise FileNotFoundError(errno.ENOENT, "there is no journal of it", source)


def unpublished(source: str, base: str | Path | None = None, *, shown: bool = False) -> str | None:
    """Return a warning for the user of a read-only mount that the source has unpublished writes, or None.

    `shown`: the mount shows the unpublished writes. None if nothing is unpublished, or another process has the lock and
    publishes.
    """
    directory = directory_for(source, base)
    try:
        if not _is_journal(directory) or is_locked(str(directory / LOCK)):
            return None
        if shown:
            own_directory(directory)  # a journal that other users can change is not shown
        left = look(directory)
    except FileNotFoundError:  # a mount has just published all writes and removed the journal
        return None
    except (OSError, UnsupportedError) as e:
        return unreadable_words(e)
    count = len(left.waiting)
    if not count and not left.problems:
        return None
    return unpublished_words(count, shown=shown, damaged=bool(left.problems))


def unpublished_words(count: int, *, shown: bool, damaged: bool) -> str:
    """Return the warning about `count` unpublished files."""
    damage = ", and some of it is damaged" if damaged else ""
    here = "are shown here all the same" if shown else "are not shown here"
    how = "shardfs recover --apply publishes them, and so does a writable mount"
    return f"{count} files were written to it and are not published{damage}; they {here}. {how}"


def unreadable_words(error: BaseException) -> str:
    """Return the warning about a journal that cannot be read."""
    return f"its journal cannot be read, and what waits in it is not shown: {message(error)}"


def sweep(base: str | Path | None = None) -> None:
    """Remove journals that have no unpublished writes, no damage and no kept files, and that no process has locked."""
    top = state_directory() if base is None else Path(base)
    for path in top.glob("*"):
        if OURS.fullmatch(path.name) and not is_locked(str(path / LOCK)):
            with suppress(OSError, UnsupportedError):
                left = look(path)
                if not left.entries and not left.unfinished and not left.problems:
                    with _held(path):
                        pass


def _is_journal(path: Path) -> bool:
    try:
        return any(NAME.fullmatch(name) for name in os.listdir(path))
    except OSError:
        return False


def look(directory: str | Path) -> Left:
    """Read and verify a whole journal, and return its content. Works while a mount writes to it; changes nothing."""
    with Journal.peek(directory) as peek:
        pending, _ = Pending.of(peek.recovered)
        entries = [_entry(path, version) for path, version in sorted(pending.versions.items())]
        unfinished = [str(meta.get("key", "")) for meta in pending.begun.values()]
        return Left(
            peek.directory, peek.source, peek.owner, entries, unfinished, peek.problems + losses(pending),
            [*peek.damaged_paths, *pending.lost], sum(file.end for file in peek.files.values()),
        )  # fmt: skip


def look_if_there(directory: str | Path) -> Left | None:
    """Return a journal's content; None if it does not exist. A mount removes its journal once all is published."""
    try:
        return look(directory)
    except FileNotFoundError:
        return None


def losses(pending: Pending) -> list[str]:
    """Return a message for each path whose content is lost because its moved version is missing."""
    return [f"what was moved to {path} is lost" for path in pending.lost]


def _entry(path: str, version: Version) -> PendingFile:
    state = "pending"
    if version.conflict:
        state = "conflict"
    elif version.scratch:
        state = "scratch"
    elif version.data is None:
        state = "deleted"
    size = version.data.size if version.data else 0
    return PendingFile(path, state, size, version.lsn, version.mtime_ns, version.conflict)


# ------------------------------------------------------------------------------------------------------- exporting


def export(directory: str | Path, out: str | Path) -> Exported:
    """Write the pending versions to plain files below `out`, except temporary files of programs.

    Raise OSError if `out` exists and is not empty. Errors of single files are collected in the result.
    """
    with Journal.peek(directory) as peek:
        return export_from(peek, Pending.of(peek.recovered)[0], Path(out))


def export_from(peek: Reading, pending: Pending, out: Path) -> Exported:
    """Export an open journal; see `export`."""
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(out))
    done = Exported(0, [], {})
    for path, version in sorted(pending.versions.items()):
        if version.scratch:
            continue
        if version.data is None:
            done.deleted.append(path)
            continue
        try:
            _write_file(peek, version.data, out, path)
            os.utime(out / path, ns=(version.mtime_ns, version.mtime_ns))
            done = done._replace(files=done.files + 1)
        except (OSError, ValueError, OverflowError) as e:
            done.failed[path] = (e.strerror if isinstance(e, OSError) else None) or str(e)
    return done


def _write_file(journal: Readable, position: Position, out: Path, path: str) -> None:
    """Write one file below `out`. Names in a journal are not trusted: symbolic links and ".." are refused."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in path:
        raise ValueError("this cannot be the name of a file")
    at = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parts[:-1]:
            with suppress(FileExistsError):
                os.mkdir(part, dir_fd=at)
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = below
        fd = os.open(parts[-1], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666, dir_fd=at)
    finally:
        os.close(at)
    try:
        with journal.using(position) as held:
            syscalls.copy_range(held.fd, fd, held.start, held.size, 0)
    finally:
        os.close(fd)


# -------------------------------------------------------------------------------------------------------- changing


@contextmanager
def opened(directory: str | Path) -> Iterator[tuple[Journal, Pending]]:
    """Lock and open the journal of any source for changes. Raise FileNotFoundError if there is no journal."""
    if not _is_journal(Path(directory)):
        raise FileNotFoundError(errno.ENOENT, "there is no journal", str(directory))
    with _held(directory) as held:
        yield held


@contextmanager
def _held(directory: str | Path) -> Iterator[tuple[Journal, Pending]]:
    journal = Journal.open(directory, None, limit_bytes=MAINTENANCE_BYTES, commit_s=0)
    clean = False
    try:
        pending, free = Pending.of(journal.recovered)
        journal.release(free)
        yield journal, pending
        clean = not (pending.versions or pending.begun or pending.lost)
    finally:
        journal.close(clean=clean)


def decide(directory: str | Path, ours: Sequence[str] = (), theirs: Sequence[str] = ()) -> None:
    """Decide conflicts: the next mount publishes `ours` over any other version, and `theirs` are discarded here.

    A directory stands for all conflicts in it, "." for all conflicts. Decide nothing and raise FileNotFoundError if a
    path has no conflict, or OSError (EINVAL) if a conflict is in both lists.
    """
    with opened(directory) as (journal, pending):
        kinds: dict[str, RecordKind] = {}
        for kind, paths in ((RecordKind.CONFLICT, ours), (RecordKind.DROP, theirs)):
            for path in (found for given in paths for found in _conflicts(pending, given)):
                if kinds.setdefault(path, kind) is not kind:
                    raise OSError(errno.EINVAL, "cannot be ours and theirs", path)
        for path, kind in kinds.items():
            meta = {"path": path, "lsn": pending.versions[path].lsn, "why": ""}
            journal.release(pending.apply(journal.append(kind, meta, reserve=True)))


def _conflicts(pending: Pending, given: str) -> list[str]:
    """Return the paths of the conflicts at or below a path. Raise FileNotFoundError if there are none."""
    at = os.path.normpath(given)
    conflicts = [path for path, version in pending.versions.items() if version.conflict]
    found = [path for path in conflicts if at == "." or path == at or path.startswith(f"{at}/")]
    if not found:
        raise FileNotFoundError(errno.ENOENT, "there is no conflict about it", given)
    return found


def salvage(directory: str | Path) -> list[str]:
    """Accept the loss of damaged records: keep damaged files for a week, and let the next mount use all other records.

    Return a description of each loss.
    """
    with opened(directory) as (journal, pending):
        journal.renew()
        return journal.problems + losses(pending)


def discard(directory: str | Path) -> Path | None:
    """Discard a journal's content: move all segments to a directory inside, where they are kept for seven days.

    Return that directory; None if there are no segments. Raise BusyError if another process has locked the journal;
    UnsupportedError if a newer shardfs wrote it.
    """
    directory = Path(directory)
    own_directory(directory)
    lock = Lock.take(str(directory / LOCK), "")
    try:
        Journal.peek(directory).close()
        names = [name for name in os.listdir(directory) if NAME.fullmatch(name)]
        if not names:
            return None
        aside = directory / f"{DISCARDED}{time.time_ns()}"
        syscalls.mkdir(str(aside), 0o700)
        for name in sorted(
            names
        ):  # oldest first: after a crash here, the next reader notices that segments are missing
            syscalls.rename(str(directory / name), str(aside / name))
        syscalls.fsync_directory(str(aside))
        syscalls.fsync_directory(str(directory))
        return aside
    finally:
        lock.free()


def park_scratch(journal: Journal, pending: Pending) -> list[str]:
    """After a crash, move unfinished temporary files of programs out of the journal. Return their paths.

    The files are kept for seven days in the `LOST` directory of the journal.
    """
    parked = []
    for path in [path for path, version in pending.versions.items() if version.scratch]:
        version = pending.versions[path]
        try:
            if version.data is not None:
                _park(journal, version.data, f"{version.lsn}-{path}")
            record = journal.append(RecordKind.DROP, {"path": path, "lsn": version.lsn}, reserve=True)
        except OSError as e:
            log.warning("%s: %s; unfinished files stay in the journal", journal.directory, e.strerror)
            break
        journal.release(pending.apply(record))
        parked.append(path)
    return parked


def _park(journal: Journal, position: Position, name: str) -> None:
    lost = journal.directory / LOST
    lost.mkdir(mode=0o700, exist_ok=True)
    file = os.fsdecode(os.fsencode(name.replace("%", "%25").replace("/", "%2f"))[:255])
    with suppress(FileNotFoundError):  # left by an interrupted recovery
        syscalls.unlink(str(lost / file))
    _write_file(journal, position, lost, file)
