"""What the records of a journal come to: for each path the version that is not in the store yet.

The one place that knows what records mean, for the live mount as for recovery. `apply` is called with the records in
the order of their LSNs. Meta of each kind, paths as shown:

    PUT       path, mtime_ns, mode, scratch, base; the data are the whole file. conflict: as `why` of CONFLICT.
              document: it is a metadata document, which goes to the source by itself if ours is to win
    DEL       path, base
    MOVE      from, to; lsn of the version at `from`, or the whole file as data; gone: `from` must become a tombstone;
              base of `to` and from_base, where nothing is pending there; mtime_ns, mode, scratch, if they change
    BEGIN     key, base, temp, temp_ino, lsns, entries: versions are about to be published; what recovery needs if it
              never ends. `entries` are their paths, and where each will lie then
    DONE      key, lsns, entries: they are published. `entries` has all their paths, and where each lies now; versions
              of these paths with an LSN above all of theirs are newer, and not published
    CONFLICT  path, lsn, why: somebody else has published another version. why "": ours is to win, whatever is there
    DROP      path, lsn: the version is given up
    CLEAN     everything is published

`base` is what the store had for the path: `[start, size]` and perhaps its crc32c, null for nothing, "?" if nobody has
looked. Other members of
PUT, DEL and MOVE are kept as `Version.extra`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from shardfs.write.journal import Position, Record, RecordKind

if TYPE_CHECKING:
    from collections.abc import Iterable

Base: TypeAlias = "tuple[int, ...] | str | None"
UNKNOWN = "?"

_KNOWN = frozenset(
    {"path", "from", "to", "lsn", "gone", "mtime_ns", "mode", "scratch", "base", "from_base", "conflict"}
)


class Version(NamedTuple):
    """What a path holds. Tombstones have no data. `conflict` says why it cannot be published, "" if it can.

    `lsn` is that of the record that brought it to its path; `records` are all that it takes to make it out.
    """

    lsn: int
    kind: RecordKind
    data: Position | None
    base: Base
    mtime_ns: int
    mode: int
    scratch: bool
    conflict: str
    records: tuple[int, ...]
    extra: dict[str, Any] | None

    @property
    def is_document(self) -> bool:
        """Whether it is a document that another program has changed, too; the mount shows the source's."""
        return self.extra is not None and bool(self.extra.get("document"))


class Pending:
    """All versions by path. Not thread-safe.

    `begun` are BEGINs without DONE, by LSN; `lost` paths to which something was moved that is not there, by which
    record; `clean` whether the last record is CLEAN.
    """

    def __init__(self) -> None:
        self.versions: dict[str, Version] = {}
        self.begun: dict[int, dict[str, Any]] = {}
        self.lost: dict[str, int] = {}
        self.clean = True
        self._uses: dict[int, int] = {}  # of records

    @classmethod
    def of(cls, records: Iterable[Record]) -> tuple[Pending, list[int]]:
        """What they come to, and which of them may be released."""
        pending = cls()
        free: dict[int, None] = {}
        for record in records:
            free.update(dict.fromkeys(pending.apply(record)))
        return pending, list(free)

    def apply(self, record: Record) -> list[int]:
        """Take a record into account. The records that are not needed any more are returned (`Journal.release`)."""
        self.clean = record.kind == RecordKind.CLEAN
        self._uses[record.lsn] = 1
        free = _APPLY[record.kind](self, record)
        self._let_go(record.lsn, free)
        return free

    # -------------------------------------------------------------------------------------- versions and records

    def _set(self, path: str, version: Version | None, free: list[int]) -> None:
        """The version takes the place of what was there."""
        self.lost.pop(path, None)
        for lsn in version.records if version else ():
            self._uses[lsn] = self._uses.get(lsn, 0) + 1
        old = self.versions.pop(path, None)
        for lsn in old.records if old else ():
            self._let_go(lsn, free)
        if version:
            self.versions[path] = version

    def _let_go(self, lsn: int, free: list[int]) -> None:
        left = self._uses.get(lsn, 0) - 1
        if left > 0:
            self._uses[lsn] = left
        else:
            self._uses.pop(lsn, None)
            free.append(lsn)

    def _base(self, path: str, meta: dict[str, Any]) -> Base:
        told = meta.get("base", UNKNOWN)
        if told == UNKNOWN and (old := self.versions.get(path)):
            return old.base
        return _as_base(told)

    # -------------------------------------------------------------------------------------------------- records

    def _put(self, record: Record) -> list[int]:
        meta, path = record.meta, record.meta["path"]
        version = Version(
            record.lsn, record.kind, record.data, self._base(path, meta), meta.get("mtime_ns", 0),
            meta.get("mode", 0), bool(meta.get("scratch")), str(meta.get("conflict", "")), (record.lsn,),
            _extra(meta),
        )  # fmt: skip
        free: list[int] = []
        self._set(path, version, free)
        return free

    def _move(self, record: Record) -> list[int]:
        meta, lsn, free = record.meta, record.lsn, list[int]()
        source, path = meta.get("from", ""), meta["to"]
        old = self.versions.get(source) if source else self._version(meta.get("lsn", 0))
        if record.data is None and (old is None or old.lsn != meta.get("lsn") or old.data is None):
            # It may have been done with since, and what it moved unlinked. Else what was there before is the best left.
            if source in self.lost:
                self._set(source, None, free)
            self.lost[path] = lsn
            return free
        records = (*old.records, lsn) if old and record.data is None else (lsn,)
        version = Version(
            lsn, RecordKind.PUT, record.data or (old.data if old else None), self._base(path, meta),
            meta.get("mtime_ns", old.mtime_ns if old else 0), meta.get("mode", old.mode if old else 0),
            bool(meta.get("scratch")), "", records, _extra(meta),
        )  # fmt: skip
        self._set(path, version, free)
        if source and source != path:
            gone = None
            if meta.get("gone"):
                base = old.base if old else UNKNOWN
                gone = Version(lsn, RecordKind.DEL, None, base, version.mtime_ns, 0, False, "", (lsn,), None)
            self._set(source, gone, free)
        return free

    def _version(self, lsn: int) -> Version | None:
        return next((version for version in self.versions.values() if version.lsn == lsn), None)

    def _begin(self, record: Record) -> list[int]:
        self.begun[record.lsn] = record.meta
        self._uses[record.lsn] += 1
        return []

    def _done(self, record: Record) -> list[int]:
        free: list[int] = []
        key, last = record.meta["key"], max(record.meta.get("lsns", ()), default=0)
        for lsn in [lsn for lsn, meta in self.begun.items() if meta.get("key") == key]:
            del self.begun[lsn]
            self._let_go(lsn, free)
        for path, entry in record.meta.get("entries", {}).items():
            version = self.versions.get(path)
            if version is not None and version.lsn > last:  # it replaces what was published here
                records = (*version.records, record.lsn)
                self._set(path, version._replace(base=_as_base(entry), records=records), free)
            elif version is not None or self.lost.get(path, last + 1) <= last:
                self._set(path, None, free)
        return free

    def _conflict(self, record: Record) -> list[int]:
        free: list[int] = []
        path, why = record.meta["path"], record.meta.get("why", "")
        version = self.versions.get(path)
        if version and version.lsn == record.meta.get("lsn"):
            base = version.base if why else UNKNOWN
            records = (*version.records, record.lsn)
            self._set(path, version._replace(conflict=why, base=base, records=records), free)
        return free

    def _drop(self, record: Record) -> list[int]:
        free: list[int] = []
        path, lsn = record.meta["path"], record.meta.get("lsn")
        version = self.versions.get(path)
        if (version and version.lsn == lsn) or self.lost.get(path) == lsn:
            self._set(path, None, free)
        return free

    def _end(self, record: Record) -> list[int]:
        free: list[int] = []
        for lsn in self.begun:
            self._let_go(lsn, free)
        self.begun = {}
        return free


def _as_base(told: Any) -> Base:
    return tuple(told) if isinstance(told, list) else told


def _extra(meta: dict[str, Any]) -> dict[str, Any] | None:
    if meta.keys() <= _KNOWN:
        return None
    return {name: value for name, value in meta.items() if name not in _KNOWN}


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
