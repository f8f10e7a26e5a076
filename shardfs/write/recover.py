"""Journals that a mount has left: what is in them, and what can be done with them without a mount.

Nothing here needs the source; a journal may be another user's copy, or that of a source that is gone. What changes a
journal locks it first, and raises BusyError while somebody writes to it.
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
from shardfs.write.journal import Journal, Peek, RecordKind, directory_for, state_directory
from shardfs.write.journal.places import DISCARDED, LOST, Lock, is_locked, own_directory
from shardfs.write.journal.reading import NAME
from shardfs.write.pending import Pending, Version

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from shardfs.model.blobs import FilePart
    from shardfs.write.journal import Position

log = logging.getLogger("shardfs")

MAINTENANCE_BYTES = 1 << 40
"""Limit of a journal that is only looked after: what is in it was let in before."""

OURS = re.compile(r"[0-9a-f]{32}")
"""Names of the directories that `directory_for` gives."""

LOOK_S = 5.0
"""Where what waits in a journal is shown over the source, somebody may begin to publish it: for so long, at most, is
taken to be true what was seen of either."""


class PendingFile(NamedTuple):
    """A path in a journal. `state`: pending, deleted, scratch, conflict. `why` it is in conflict."""

    path: str
    state: str
    size: int
    lsn: int
    mtime_ns: int
    why: str


class Left(NamedTuple):
    """What a journal holds. `source` is without credentials; `owner` says who is writing to it (`places.describe`)."""

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
        """What is to be published; temporary files of programs are not."""
        return [entry for entry in self.entries if entry.state != "scratch"]

    @property
    def undecided(self) -> bool:
        """Whether something stays as it is unless the user does something: no mount publishes it, or it cannot."""
        if self.owner is None:
            return bool(self.waiting or self.unfinished or self.problems)
        return any(entry.state == "conflict" for entry in self.entries)


class Exported(NamedTuple):
    """How many files were written; the paths that were deleted, and why others could not be written."""

    files: int
    deleted: list[str]
    failed: dict[str, str]


class Readable(Protocol):
    """A journal, or one that is looked into."""

    def using(self, position: Position) -> AbstractContextManager[FilePart]: ...


def journals(base: str | Path | None = None) -> list[Path]:
    """The directories of all journals, below `base` or where they lie by default."""
    top = state_directory() if base is None else Path(base)
    return sorted(path for path in top.glob("*") if _is_journal(path))


def find(source: str, base: str | Path | None = None) -> Path:
    """The directory of a journal, given its source or itself. Raise FileNotFoundError if there is none."""
    for path in (Path(source), directory_for(source, base)):
        if "://" not in str(path) and _is_journal(path):
            return path
    raise FileNotFoundError(errno.ENOENT, "there is no journal of it", source)


def unpublished(source: str, base: str | Path | None = None, *, shown: bool = False) -> str | None:
    """What somebody who reads a source should be told: that it has a journal; is what waits there `shown`?

    None if nothing waits to be published, or a mount sees to it.
    """
    directory = directory_for(source, base)
    try:
        if not _is_journal(directory) or is_locked(str(directory / LOCK)):
            return None
        if shown:
            own_directory(directory)  # what others can write to is not shown
        left = look(directory)
    except FileNotFoundError:  # a mount has just published all and removed it
        return None
    except (OSError, UnsupportedError) as e:
        return unreadable_words(e)
    count = len(left.waiting)
    if not count and not left.problems:
        return None
    return unpublished_words(count, shown=shown, damaged=bool(left.problems))


def unpublished_words(count: int, *, shown: bool, damaged: bool) -> str:
    """Of so many files that wait in a journal."""
    damage = ", and some of it is damaged" if damaged else ""
    here = "are shown here all the same" if shown else "are not shown here"
    how = "shardfs recover --apply publishes them, and so does a writable mount"
    return f"{count} files were written to it and are not published{damage}; they {here}. {how}"


def unreadable_words(error: BaseException) -> str:
    """Of a journal."""
    return f"its journal cannot be read, and what waits in it is not shown: {message(error)}"


def sweep(base: str | Path | None = None) -> None:
    """Remove journals in which nothing waits and nothing is kept aside, and on which no process works."""
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
    """What is in a journal. All of it is read and verified; nothing is changed, also while a mount writes to it."""
    with Journal.peek(directory) as peek:
        pending, _ = Pending.of(peek.recovered)
        entries = [_entry(path, version) for path, version in sorted(pending.versions.items())]
        unfinished = [str(meta.get("key", "")) for meta in pending.begun.values()]
        return Left(
            peek.directory, peek.source, peek.owner, entries, unfinished, peek.problems + losses(pending),
            [*peek.damaged_paths, *pending.lost], peek.nbytes,
        )  # fmt: skip


def look_if_there(directory: str | Path) -> Left | None:
    """`look`; None if there is no journal, as a mount removes it when all is published."""
    try:
        return look(directory)
    except FileNotFoundError:
        return None


def losses(pending: Pending) -> list[str]:
    """What a user should be told of paths that cannot be made out."""
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
    """Write what is pending to plain files below `out`, which must not exist or be empty; scratch files are left out.

    Raise OSError if `out` is in use. What cannot be written is told at the end.
    """
    with Journal.peek(directory) as peek:
        return export_from(peek, Pending.of(peek.recovered)[0], Path(out))


def export_from(peek: Peek, pending: Pending, out: Path) -> Exported:
    """As `export`."""
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
    """The names in a journal are not trusted: nothing is written outside of `out`, or through a link."""
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
    """A journal to be changed, of whatever source. Raise FileNotFoundError if there is none."""
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
    """Decide conflicts: what was written here is published by the next mount, whatever is there, or given up.

    A directory stands for all conflicts in it, "." for all. Raise FileNotFoundError, and decide nothing, if there is no
    conflict at one of the paths; OSError (EINVAL) if one is to be decided both ways.
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
    """At a path or, if it is a directory's, below it."""
    at = os.path.normpath(given)
    conflicts = [path for path, version in pending.versions.items() if version.conflict]
    found = [path for path in conflicts if at == "." or path == at or path.startswith(f"{at}/")]
    if not found:
        raise FileNotFoundError(errno.ENOENT, "there is no conflict about it", given)
    return found


def salvage(directory: str | Path) -> list[str]:
    """Accept the loss of what is damaged: it is put aside, and the next mount goes on with the rest.

    What is lost is returned: the problems that there were.
    """
    with opened(directory) as (journal, pending):
        journal.renew()
        return journal.problems + losses(pending)


def discard(directory: str | Path) -> Path | None:
    """Put aside all that is in a journal. It is kept for seven days, in the directory that is returned.

    Raise UnsupportedError if a newer shardfs has written it.
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
        for name in sorted(names):  # oldest first: should this end early, what is left is noticed to be incomplete
            syscalls.rename(str(directory / name), str(aside / name))
        syscalls.fsync_directory(str(aside))
        syscalls.fsync_directory(str(directory))
        return aside
    finally:
        lock.free()


def park_scratch(journal: Journal, pending: Pending) -> list[str]:
    """After a crash: put files that programs had not finished aside, for seven days. Their paths."""
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
    with suppress(FileNotFoundError):  # of a recovery that ended early
        syscalls.unlink(str(lost / file))
    _write_file(journal, position, lost, file)
