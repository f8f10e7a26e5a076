"""Replay journal records: compute for each path the version that is not yet in the store.

Only this module knows the meaning of records. Both the live mount and recovery use it. The caller passes the records to
`Pending.apply` in LSN order. Meta of each kind (paths are relative to the mount, as the mount shows them):

    PUT       path, mtime_ns, mode, scratch, base: a new version of a file; the data are the whole file.
              stored: the data are the bytes that a shard stores, not those that the mount shows (also in MOVE).
              form: the `Collection.form` of the chunk's array; absent or "" without one (also in DEL and MOVE).
              layout: the layout of the mount, as options; absent for the native layout (also in DEL and MOVE).
              conflict: like `why` of CONFLICT. document: the file is a metadata document; if the user decides the
              conflict for the local version, the document is written to the source directly
    DEL       path, base: the file was removed
    MOVE      from, to: the file was renamed. lsn: of the version at `from`; or the data are the whole file.
              gone: `from` becomes a tombstone. base: of `to`; from_base: of `from`, if nothing is pending there.
              mtime_ns, mode, scratch: if they change
    BEGIN     key, base, temp, temp_ino, lsns, entries: versions are about to be published. Recovery uses this record if
              the publish never ends. `entries` maps paths to digests of bytes that the shard may have from then on
    DONE      key, lsns, entries: versions are published. `entries` maps their paths to digests of their stored bytes,
              or to `SAME`. A version of such a path with an LSN above all `lsns` is newer and not published.
              before, after: the replaced and the new version of the shard. kept: other paths of chunks in the shard
    CONFLICT  path, lsn, why: another writer has published a different version. why "": the local version replaces it.
              obsolete: as in `Version`
    DROP      path, lsn: the version is discarded
    CLEAN     all versions are published

`base` is what the store had before the write: `Stored.to_json`; null if it had no such chunk.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from shardfs.model.changes import Begun
from shardfs.write.journal import Position, Record, RecordKind
from shardfs.write.stored import ANYTHING, NOT_NOTED, Stored, version_from_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardfs.model.blobs import Bytes
    from shardfs.model.values import Version as StoredVersion
    from shardfs.storage.writers import Writer
    from shardfs.write.journal import Journal


SAME = False
"""Stands for the digest of a chunk whose stored bytes a publish has not changed, because they were the same."""

HASHES = 1 << 10
"""Number of different hashes of the keys of shards. A shard counts as replaced if one with its hash was."""

Entries: TypeAlias = Mapping[str, "str | bool"]
"""Digests of chunks, or `SAME`, by path."""

NO_ENTRIES: Entries = MappingProxyType({})


class Version(NamedTuple):
    """The unpublished version of a path. A tombstone (a deleted file) has no data.

    `conflict` is why the version cannot be published; "" if it can. `lsn` is that of the record that gave the path this
    version. `records` are the LSNs of all records that a replay needs to compute this version. `is_document` marks a
    metadata document in conflict: another program has changed the document in the source, which the mount shows.
    `is_encoded`: `data` are the bytes that a shard stores, not those that the mount shows. `layout` is the one in which
    the path is a name of this file; "" is the native layout. `form` is that of the array for which the version was
    written, "" if unknown. `obsolete`: the version is in conflict because its array now has another form, which no
    choice of the user can change.
    """

    lsn: int
    data: Position | None
    base: Stored
    mtime_ns: int
    mode: int
    scratch: bool
    conflict: str
    records: tuple[int, ...]
    is_document: bool
    is_encoded: bool
    layout: str
    form: str
    obsolete: bool = False


class Pending:
    """All unpublished versions by path. Not thread-safe.

    Attributes:
        begun: the meta of each BEGIN without a DONE, by LSN.
        lost: the target path of each MOVE whose source version is missing, with the LSN of the MOVE.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        """Replay records, in LSN order."""
        self.versions: dict[str, Version] = {}
        self.begun: dict[int, dict[str, Any]] = {}
        self.lost: dict[str, int] = {}
        self._uses: dict[int, int] = {}  # LSN to the number of versions and BEGINs that need the record
        self._free: list[int] = []
        for record in records:
            self.apply(record)

    def apply(self, record: Record) -> list[int]:
        """Replay one record. Return the LSNs of the records that are not needed any more, for `Journal.release`."""
        self._free = []
        self._uses[record.lsn] = 1
        _APPLY[record.kind](self, record)
        self._let_go(record.lsn)
        return self._free

    def losses(self) -> list[str]:
        """Return a message for each path whose content is lost because its moved version is missing."""
        return [f"the file that was renamed to {path} is lost: the journal has no data for it" for path in self.lost]

    @property
    def layout(self) -> str | None:
        """The layout of the versions, as options; "" for the native one, and None without versions.

        Temporary files of programs have no layout: their names mean nothing to the next mount.
        """
        return next((version.layout for version in self.versions.values() if not version.scratch), None)

    def require_layout(self, layout: str) -> None:
        """Raise OSError (EBUSY) if the versions have names of another layout."""
        noted = self.layout
        if noted not in (None, layout):
            other = f"-o {noted}" if noted else "the native layout"
            text = f"the journal has files that were written with {other}: use it again, or run shardfs recover --apply"
            raise OSError(errno.EBUSY, text)

    # -------------------------------------------------------------------------------------- versions and records

    def _set(self, path: str, version: Version | None) -> None:
        """Replace the version of a path; None: remove it."""
        self.lost.pop(path, None)
        for lsn in version.records if version else ():
            self._uses[lsn] = self._uses.get(lsn, 0) + 1
        old = self.versions.pop(path, None)
        for lsn in old.records if old else ():
            self._let_go(lsn)
        if version:
            self.versions[path] = version

    def _let_go(self, lsn: int) -> None:
        uses = self._uses.get(lsn, 0) - 1
        if uses > 0:
            self._uses[lsn] = uses
        else:
            self._uses.pop(lsn, None)
            self._free.append(lsn)

    def _add_version(
        self, lsn: int, path: str, meta: dict[str, Any], data: Position | None, records: tuple[int, ...]
    ) -> None:
        """Add the version of a path that a record describes."""
        if "base" in meta:
            base = Stored.from_json(meta["base"])
        else:
            base = self.versions[path].base if path in self.versions else NOT_NOTED
        version = Version(
            lsn, data, base, meta.get("mtime_ns", 0), meta.get("mode", 0), bool(meta.get("scratch")),
            str(meta.get("conflict", "")), records, bool(meta.get("document")), bool(meta.get("stored")),
            str(meta.get("layout", "")), str(meta.get("form", "")),
        )  # fmt: skip
        self._set(path, version)

    # -------------------------------------------------------------------------------------------------- records

    def _put(self, record: Record) -> None:
        self._add_version(record.lsn, record.meta["path"], record.meta, record.data, (record.lsn,))

    def _move(self, record: Record) -> None:
        lsn = record.lsn
        data = record.data
        records: tuple[int, ...] = (lsn,)
        source, path = record.meta["from"], record.meta["to"]
        old = self.versions.get(source)
        meta = record.meta if old is None else {"mtime_ns": old.mtime_ns, "mode": old.mode, **record.meta}
        if data is None:
            if old is None or old.lsn != meta.get("lsn") or old.data is None:
                # The moved version is missing: it may have been published and its segment unlinked. A later DONE then
                # clears `lost`. Else data are lost, and the previous version of the target path stays.
                if source in self.lost:
                    self._set(source, None)
                self.lost[path] = lsn
                return
            data = old.data
            records = (*old.records, lsn)
            meta["stored"] = old.is_encoded
        self._add_version(lsn, path, meta, data, records)
        if source != path:
            tombstone = None
            if meta.get("gone"):
                base = old.base if old else Stored.from_json(meta.get("from_base", ()))
                layout, form = str(meta.get("layout", "")), old.form if old else ""
                tombstone = Version(lsn, None, base, 0, 0, False, "", (lsn,), False, False, layout, form)
            self._set(source, tombstone)

    def _begin(self, record: Record) -> None:
        self.begun[record.lsn] = record.meta
        self._uses[record.lsn] += 1
        for path, entry in record.meta.get("entries", {}).items():
            version, digest = self.versions.get(path), _digest(entry)
            if version is not None and digest is not None:
                self._set_base(path, version, version.base.including(digest), record)

    def _done(self, record: Record) -> None:
        key, last = record.meta["key"], max(record.meta.get("lsns", ()), default=0)
        before, after = (version_from_json(record.meta.get(name)) for name in ("before", "after"))
        for lsn in [lsn for lsn, meta in self.begun.items() if meta.get("key") == key]:
            del self.begun[lsn]
            self._let_go(lsn)
        for path, entry in record.meta.get("entries", {}).items():
            version = self.versions.get(path)
            if version is not None and version.lsn > last:  # a newer version, which replaces the published one
                digest = _digest(entry)
                base = version.base.kept(before, after) if digest is None else Stored(after, (digest,))
                self._set_base(path, version, base, record)
            elif version is not None or self.lost.get(path, last + 1) <= last:
                self._set(path, None)
        for path in record.meta.get("kept", ()):
            if (version := self.versions.get(path)) is not None:
                self._set_base(path, version, version.base.kept(before, after), record)

    def _set_base(self, path: str, version: Version, base: Stored, record: Record) -> None:
        if base != version.base:
            self._uses[record.lsn] += 1
            self.versions[path] = version._replace(base=base, records=(*version.records, record.lsn))

    def _conflict(self, record: Record) -> None:
        path, why = record.meta["path"], record.meta.get("why", "")
        version = self.versions.get(path)
        if version and version.lsn == record.meta.get("lsn"):
            base = version.base if why else ANYTHING
            records = (*version.records, record.lsn)
            obsolete = bool(record.meta.get("obsolete"))
            self._set(path, version._replace(conflict=why, base=base, records=records, obsolete=obsolete))

    def _drop(self, record: Record) -> None:
        path, lsn = record.meta["path"], record.meta.get("lsn")
        version = self.versions.get(path)
        if (version and version.lsn == lsn) or self.lost.get(path) == lsn:
            self._set(path, None)

    def _end(self, record: Record) -> None:
        for lsn in self.begun:
            self._let_go(lsn)
        self.begun = {}


def _digest(entry: Any) -> str | None:
    """Return the digest in a record; None for `SAME`."""
    return entry if isinstance(entry, str) else None


_APPLY = {
    RecordKind.PUT: Pending._put,
    RecordKind.DEL: Pending._put,
    RecordKind.MOVE: Pending._move,
    RecordKind.BEGIN: Pending._begin,
    RecordKind.DONE: Pending._done,
    RecordKind.CONFLICT: Pending._conflict,
    RecordKind.DROP: Pending._drop,
    RecordKind.CLEAN: Pending._end,
}


class Backlog:
    """An open journal and its unpublished versions. Thread-safe: each method takes the lock itself.

    `layout` are the options that say how the mount shows the source; they are recorded with each version.

    Attributes:
        versions: the pending versions by path, those of `pending`. One entry can be read without the lock.
        lock: the only slow operation under it is a copy to the page cache.
        changed: the condition of this lock. Its threads are notified when versions or the state of their shards change.
        replaced: the number of shards that were replaced.
        written_bytes: the bytes of all versions that were added.
        took_s: the seconds that adding the last version took.
    """

    def __init__(self, journal: Journal, layout: str = "") -> None:
        self.journal = journal
        self.pending = Pending()
        self.versions = self.pending.versions
        self.replaced = 0
        self._last_replaced = [0] * HASHES  # by a hash of the key: `replaced` when such a shard was replaced last
        self.written_bytes = 0
        self.took_s = 0.0
        self.lock = threading.RLock()  # `with` a condition costs two Python calls
        self.changed = threading.Condition(self.lock)
        self._noted = {"layout": layout} if layout else {}
        for record in journal.recovered:
            journal.release(self.pending.apply(record))

    def has_replaced(self, key: str, since: int) -> bool:
        """Return whether a shard was perhaps replaced after `replaced` was `since`."""
        return self._last_replaced[hash(key) % HASHES] > since

    def fullness(self, more: int) -> float:
        """Return how full the journal is with so many bytes more: 1 is its limit."""
        return (self.journal.nbytes + more) / self.journal.limit_bytes

    # ---- versions

    def add(self, kind: RecordKind, path: str, meta: dict[str, Any], data: Bytes | None = None) -> Version:
        """Add a version of a path by a PUT, DEL or MOVE record, and return it. Raise the errors of `Journal.append`."""
        with self.lock:
            start = time.monotonic()
            record = self._append(kind, meta | self._noted, data)
            self.took_s = time.monotonic() - start
            self.written_bytes += 0 if record.data is None else record.data.size
            return self.versions[path]

    def drop(self, path: str) -> None:
        """Discard the version of a path, if there is one."""
        with self.lock:
            if (version := self.versions.get(path)) is not None:
                self._append(RecordKind.DROP, {"path": path, "lsn": version.lsn})

    def decide(self, path: str, lsn: int, why: str, *, obsolete: bool = False) -> None:
        """Note that a version is in conflict. `why` "": the user has decided that it replaces whatever is stored."""
        with self.lock:
            more = {"obsolete": True} if obsolete else {}
            self._append(RecordKind.CONFLICT, {"path": path, "lsn": lsn, "why": why, **more})

    def _append(self, kind: RecordKind, meta: dict[str, Any], data: Bytes | None = None) -> Record:
        """Append a record to the journal, and apply it. Release the records that are not needed any more."""
        record = self.journal.append(kind, meta, data, reserve=data is None)
        if unneeded := self.pending.apply(record):
            self.journal.release(unneeded)
        return record

    # ---- publishing

    def finish_begun(self, writer: Writer) -> None:
        """Finish or undo the replacements of shards that a crash has interrupted."""
        for meta in self.pending.begun.values():
            writer.recover(Begun.from_json(meta))
        writer.recovered()

    def begin(self, note: Begun, lsns: Sequence[int] = (), entries: Entries = NO_ENTRIES) -> None:
        """Record on disk that a shard is about to be replaced. See BEGIN for the arguments."""
        with self.lock:
            self._append(RecordKind.BEGIN, {**note._asdict(), "lsns": list(lsns), "entries": dict(entries)})
        self.journal.sync()

    def done(
        self, key: str, lsns: Sequence[int] = (), entries: Entries = NO_ENTRIES, waiting: Iterable[str] = (),
        before: StoredVersion = None, after: StoredVersion = None,
    ) -> None:  # fmt: skip
        """Record that a shard was replaced: its version was `before`, and is `after` now; None: no such object.

        `waiting`: the paths of its pending chunks that were not published. See DONE for the other arguments.
        """
        with self.lock:
            self.replaced += 1
            self._last_replaced[hash(key) % HASHES] = self.replaced
            relying = [path for path in waiting if self.versions[path].base.relies_on(before)]
            meta = {"key": key, "lsns": list(lsns), "entries": dict(entries)}
            self._append(RecordKind.DONE, {**meta, "before": before, "after": after, "kept": relying})
