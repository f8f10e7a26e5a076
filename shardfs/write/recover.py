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
from typing import TYPE_CHECKING, Any, NamedTuple

from shardfs.model.errors import UnsupportedError, message
from shardfs.model.kinds import is_in
from shardfs.model.text import counted
from shardfs.storage import syscalls
from shardfs.storage.source_locks import LOCK, journal_directory, state_directory
from shardfs.write.journal import Journal
from shardfs.write.journal.places import DISCARDED, LOST, Lock, is_locked, own_directory
from shardfs.write.journal.scanning import NAME
from shardfs.write.pending import Backlog, Pending, Version

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardfs.write.journal import Position, Reading

log = logging.getLogger("shardfs")

MAINTENANCE_BYTES = 1 << 40
"""Size limit of a journal that is opened for maintenance: large enough for any existing journal."""

OURS = re.compile(r"[0-9a-f]{32}")
"""Matches the directory names that `journal_directory` returns."""


class PendingFile(NamedTuple):
    """A path in a journal.

    `state` is "pending", "deleted", "scratch" (a program's temporary file) or "conflict". `size` is that of its bytes
    in the journal, 0 for a deleted file. `why` is the reason of the conflict; "" without one.
    """

    path: str
    state: str
    size: int
    lsn: int
    mtime_ns: int
    why: str


class Left(NamedTuple):
    """The content of a journal.

    `source` has no credentials. `layout` are the mount options under which the entries have their names; "" is the
    native layout. `owner` describes the process that holds the lock (see `source_locks.describe`); None
    if no process does. `unfinished` are the shards whose publishing was interrupted.
    """

    directory: Path
    source: str
    layout: str
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


def journals(base: str | Path | None = None) -> list[Path]:
    """Return the directories of all journals below `base` (default: `state_directory()`)."""
    top = state_directory() if base is None else Path(base)
    return sorted(path for path in top.glob("*") if _is_journal(path))


def find(source: str, base: str | Path | None = None) -> Path:
    """Return a journal's directory, given the directory itself, which is tried first, or its source.

    `base`: where the journals of sources are; by default, in the state directory of the user.

    Raise FileNotFoundError if there is no journal.
    """
    for path in (Path(source), journal_directory(source, base)):
        if "://" not in str(path) and _is_journal(path):
            return path
    raise FileNotFoundError(errno.ENOENT, "there is no journal of this source or in this directory", source)


def unpublished_warning(source: str, base: str | Path | None = None) -> str | None:
    """Return a warning that the journal of a source has unpublished files, which a read-only mount does not show.

    None if there are none, or another process has locked the journal and publishes them.
    """
    directory = journal_directory(source, base)
    try:
        if not _is_journal(directory) or is_locked(str(directory / LOCK)):
            return None
        content = read(directory)
    except FileNotFoundError:  # a mount has just published all writes and removed the journal
        return None
    except (OSError, UnsupportedError) as e:
        return f"its journal cannot be read, so it is not known whether files are unpublished: {message(e)}"
    if not content.waiting and not content.problems:
        return None
    damage = ", and is damaged" if content.problems else ""
    mount = f"a writable mount{content.layout and f' with -o {content.layout}'}"
    return (
        f"its journal has {counted(len(content.waiting), 'unpublished file')}, not shown here{damage}; "
        f"`shardfs recover` lists them, and `shardfs recover --apply` or {mount} publishes them"
    )


def sweep(base: str | Path | None = None) -> None:
    """Remove journals that have no unpublished writes, no damage and no kept files, and that no process has locked."""
    top = state_directory() if base is None else Path(base)
    for path in top.glob("*"):
        if OURS.fullmatch(path.name) and not is_locked(str(path / LOCK)):
            with suppress(OSError, UnsupportedError):
                content = read(path)
                if not content.entries and not content.unfinished and not content.problems:
                    with opened(path):
                        pass


def _is_journal(path: Path) -> bool:
    try:
        return any(NAME.fullmatch(name) for name in os.listdir(path))
    except OSError:
        return False


def read(directory: str | Path) -> Left:
    """Read and verify a whole journal, and return its content. Works while a mount writes to it; changes nothing.

    Raise FileNotFoundError if there is no such directory, and the errors of `Journal.peek`.
    """
    directory = Path(directory)
    with Journal.peek(directory) as peek:
        pending = Pending(peek.recovered)
        entries = [_entry(path, version) for path, version in sorted(pending.versions.items())]
        unfinished = [str(meta.get("key", "")) for meta in pending.begun.values()]
        nbytes = sum(file.end for file in peek.files.values())
        problems, damaged = peek.problems + pending.losses(), [*peek.damaged_paths, *pending.lost]
        layout = pending.layout or ""
        return Left(directory, peek.source, layout, peek.owner, entries, unfinished, problems, damaged, nbytes)


def read_if_there(directory: str | Path) -> Left | None:
    """Return a journal's content; None if it does not exist. A mount removes its journal once all is published."""
    try:
        return read(directory)
    except FileNotFoundError:
        return None


def _entry(path: str, version: Version) -> PendingFile:
    state = "pending" if version.data else "deleted"
    if version.conflict or version.scratch:
        state = "conflict" if version.conflict else "scratch"
    size = version.data.size if version.data else 0
    return PendingFile(path, state, size, version.lsn, version.mtime_ns, version.conflict)


# ------------------------------------------------------------------------------------------------------- exporting


def export(directory: str | Path, out: str | Path) -> Exported:
    """Write the pending versions to plain files below `out`, except temporary files of programs.

    Raise OSError if `out` exists and is not empty. Errors of single files are collected in the result.
    """
    out, outcome = Path(out), Exported(0, [], {})
    with Journal.peek(directory) as peek:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(out))
        for path, version in sorted(Pending(peek.recovered).versions.items()):
            if version.scratch:
                continue
            if version.data is None:
                outcome.deleted.append(path)
                continue
            try:
                _write_file(peek, version.data, out, path)
                os.utime(out / path, ns=(version.mtime_ns, version.mtime_ns))
                outcome = outcome._replace(files=outcome.files + 1)
            except (OSError, ValueError, OverflowError) as e:
                outcome.failed[path] = (e.strerror if isinstance(e, OSError) else None) or str(e)
    return outcome


def _write_file(journal: Journal | Reading, position: Position, out: Path, path: str) -> None:
    """Write one new file below `out`, which had no files before. Names in a journal are not trusted: no ".."."""
    if {"", ".", ".."} & set(path.split("/")) or "\0" in path:
        raise ValueError("this path cannot be the name of an exported file")
    (out / path).parent.mkdir(parents=True, exist_ok=True)
    with journal.using([position]) as (data,), open(out / path, "xb") as file:
        syscalls.copy_range(data.fd, file.fileno(), data.start, data.size, 0)


# -------------------------------------------------------------------------------------------------------- changing


@contextmanager
def opened(directory: str | Path) -> Iterator[Backlog]:
    """Lock and open the journal of any source for changes. Closing it removes it if it is empty."""
    journal = Journal.open(directory, None, limit_bytes=MAINTENANCE_BYTES, commit_s=0)
    clean = False
    try:
        backlog = Backlog(journal)
        yield backlog
        pending = backlog.pending
        clean = not (pending.versions or pending.begun or pending.lost)
    finally:
        journal.close(clean=clean)


def _require_journal(directory: str | Path) -> None:
    if not _is_journal(Path(directory)):
        raise FileNotFoundError(errno.ENOENT, "there is no journal", str(directory))


def decide(directory: str | Path, ours: Sequence[str] = (), theirs: Sequence[str] = ()) -> None:
    """Decide conflicts: the next mount publishes `ours` over any other version, and `theirs` are discarded here.

    A directory stands for all conflicts in it, "." for all conflicts. Decide nothing and raise FileNotFoundError if a
    path has no conflict, or OSError (EINVAL) if a conflict is in both lists, or if the array of a path in `ours` now
    stores its chunks in another form.
    """
    _require_journal(directory)
    with opened(directory) as backlog:
        chosen, discarded = (
            {p for place in paths for p in _conflicts(backlog.pending, place)} for paths in (ours, theirs)
        )
        for path in chosen & discarded:
            raise OSError(errno.EINVAL, "this conflict cannot be decided both for --ours and for --theirs", path)
        versions = dict(backlog.versions)
        for path in chosen:
            if versions[path].obsolete:
                text = (
                    "another program has created the array anew, with other codecs or chunks, which --ours would "
                    "damage; use --export to keep this version, then --theirs"
                )
                raise OSError(errno.EINVAL, text, path)
        for path in chosen:
            backlog.decide(path, versions[path].lsn, "")
        for path in discarded:
            backlog.drop(path)


def _conflicts(pending: Pending, place: str) -> list[str]:
    """Return the paths of the conflicts at or below a path. Raise FileNotFoundError if there are none."""
    top = os.path.normpath(place)
    at = "" if top == "." else top
    conflicting = [path for path, version in pending.versions.items() if version.conflict and is_in(path, at)]
    if not conflicting:
        why = "there is no conflict at or below this path; shardfs recover lists the conflicts"
        raise FileNotFoundError(errno.ENOENT, why, place)
    return conflicting


def salvage(directory: str | Path) -> list[str]:
    """Accept the loss of damaged records: keep damaged files for a week, and let the next mount use all other records.

    Return a description of each loss. Raise FileNotFoundError if there is no journal.
    """
    _require_journal(directory)
    with opened(directory) as backlog:
        backlog.journal.rewrite()
        return backlog.journal.problems + backlog.pending.losses()


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
        for name in sorted(names):  # oldest first: after a crash, the next reader notices that segments are missing
            syscalls.rename(str(directory / name), str(aside / name))
        syscalls.fsync_directory(str(aside))
        syscalls.fsync_directory(str(directory))
        return aside
    finally:
        lock.free()


def park_scratch(backlog: Backlog) -> list[str]:
    """After a crash, move unfinished temporary files of programs out of the journal. Return their paths.

    The files are kept for seven days in the `LOST` directory of the journal.
    """
    parked, lost = [], backlog.journal.directory / LOST
    for path, version in list(backlog.versions.items()):
        if not version.scratch:
            continue
        try:
            if version.data is not None:
                lost.mkdir(mode=0o700, exist_ok=True)
                name = f"{version.lsn}-{path}".replace("%", "%25").replace("/", "%2f")
                name = os.fsdecode(os.fsencode(name)[:255])
                with suppress(FileNotFoundError):  # left by an interrupted recovery
                    syscalls.unlink(str(lost / name))
                _write_file(backlog.journal, version.data, lost, name)
            backlog.drop(path)
        except OSError as e:
            log.warning("%s: %s; unfinished files stay in the journal", backlog.journal.directory, e.strerror)
            break
        parked.append(path)
    return parked
