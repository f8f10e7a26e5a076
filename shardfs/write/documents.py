"""Documents that are written on a mount: what becomes of those in the store, and what new arrays are sharded by."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import posixpath
import re
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from shardfs.formats.create_rules import Rule, Rules, Sharding
from shardfs.formats.documents import MAX_DOCUMENT_BYTES, parse_written
from shardfs.formats.json_text import merged
from shardfs.formats.registry import format_of, formats
from shardfs.model.blobs import ByteRange
from shardfs.model.errors import CorruptShardError
from shardfs.model.kinds import NameKind, is_scratch
from shardfs.write.files import join
from shardfs.write.seen import Seen, nearest, same_document

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardfs.formats.format import Format
    from shardfs.formats.json_text import Path
    from shardfs.model.blobs import Blob, Plan
    from shardfs.storage.writers import Writer
    from shardfs.vfs.tree import Tree

log = logging.getLogger(__name__)

ALWAYS = ".json"
"""How documents end that are looked at wherever they are written: nobody may describe shards that he then writes as
chunks, nor repeat what others describe otherwise than it is stored. One called `info` may be of anything."""

_TO_COME = re.compile(r"\.?(?:zarr|attributes|.+\.array)\.", re.DOTALL)
"""How temporary files begin that will be renamed to such a document. Some are called as the locks of the writer are."""

FOREIGN = ".zarray"
"""Zarr v2's."""

MAX_ABOVE = 8
"""A chunk's name has at most so many components that are looked at before there is a document."""


COMPRESSED = "cbytes"
"""Of bcolz: bytes of all chunks, as they are compressed."""


MAX_LOOKED = 65_536
"""Documents of which is kept what the source had when it was last compared with what is shown."""


class Overlap(OSError):
    """ESTALE: another program has changed the same members of a document in the source.

    `ours` is the document as the writer wants it, with what the other program has changed besides.
    """

    def __init__(self, path: str, why: str, ours: bytes) -> None:
        super().__init__(errno.ESTALE, why, path)
        self.why, self.ours = why, ours


class Written(NamedTuple):
    """What became of a document: as it is shown now, and the directories about which documents say something else."""

    shown: bytes
    changed: set[str]


class Documents:
    """Thread-safe, as far as no two threads write to the same directory.

    Args:
        rules: by which new arrays are sharded.
        remembers: an array of which the document is deleted is sharded as before when a fitting one is written.
        wins: members that another program has changed, too, become what is written here (`conflict=ours`).
    """

    def __init__(
        self, base: Tree, writer: Writer, rules: Rules | None = None, *, remembers: bool = True, wins: bool = False
    ) -> None:
        self._base, self._writer, self._rules, self._remembers = base, writer, rules or Rules(), remembers
        self.wins, self._formats = wins, formats()
        self._deleted: dict[str, Sharding] = {}
        self._looked: dict[str, tuple[int, float]] = {}  # by path: a hash of what the source had, and when
        self.seen = Seen()

    def is_document(self, name: str) -> bool:
        """Whether a file of this name may describe what is in its directory."""
        return any(f.describes(name) or name in f.documents for f in self._formats)

    def kind(self, directory: str, name: str) -> NameKind:
        """What a name stands for that is nothing of a sharded dataset's, as far as can be seen now."""
        if name.endswith(ALWAYS) and self._placed(directory, name) is not None:
            return NameKind.DOCUMENT
        if _TO_COME.match(name) and is_scratch(name):
            return NameKind.SCRATCH
        if not self._rules.rules and not self._deleted:
            return NameKind.PLAIN
        if self._candidates(directory, name):
            return NameKind.DOCUMENT
        if self._may_be_chunk(directory, name):
            return NameKind.ORPHAN
        here = self._is_deleted(directory) or any(r.matches(directory) for r in self._rules.rules)
        return NameKind.SCRATCH if here and is_scratch(name) else NameKind.PLAIN

    def _candidates(self, directory: str, name: str) -> list[tuple[Format, Sharding | Rule]]:
        """By what a new document may be sharded."""
        known = self._deleted.get(directory)
        found: list[tuple[Format, Sharding | Rule]] = [(format_of(known.format), known)] if known is not None else []
        rules = (rule for rule in self._rules.rules if self._rules.match(directory, rule.format) is rule)
        found += ((format_of(rule.format), rule) for rule in rules)
        fitting = [(f, sharding) for f, sharding in found if f.describes(name)]
        return fitting if fitting and not self._base.is_closed(directory) else []

    def _may_be_chunk(self, directory: str, name: str) -> bool:
        """Whether it may be a chunk of an array whose document is yet to come."""
        path, above = join(directory, name), directory
        for _ in range(MAX_ABOVE):
            below = path[len(above) :].lstrip("/")
            if any(f.chunk_like(below) for f in self._formats_to_come(above)) and not self._is_described(above):
                return not self._base.is_closed(above) and not self._is_in_foreign(directory)
            if not above:
                return False
            above = above.rpartition("/")[0]
        return False

    def _formats_to_come(self, directory: str) -> Iterator[Format]:
        """Of which a new document in a directory might be that of a sharded dataset."""
        known = self._deleted.get(directory)
        if known is not None:
            yield format_of(known.format)
        for rule in self._rules.rules:
            if self._rules.match(directory, rule.format) is not None:
                yield format_of(rule.format)

    def _is_deleted(self, directory: str) -> bool:
        """Whether it is that of a dataset whose document is deleted, or below."""
        while directory and directory not in self._deleted:
            directory = directory.rpartition("/")[0]
        return directory in self._deleted

    @staticmethod
    def is_foreign(name: str) -> bool:
        """Whether a file of this name describes an array that has no shards, whatever its chunks are called."""
        return name == FOREIGN

    def _is_in_foreign(self, directory: str) -> bool:
        above = [directory]
        while above[-1] and len(above) < MAX_ABOVE:
            above.append(above[-1].rpartition("/")[0])
        return any(self._base.store.documents(path, [FOREIGN], 1) for path in above)

    def _is_described(self, path: str) -> bool:
        try:
            return bool(self._base.stored_documents(path))
        except (OSError, CorruptShardError):
            return False

    def _placed(self, directory: str, name: str) -> tuple[Format, str, str] | None:
        """Which format a document may be of, the directory of its dataset, and its path below that; None if of none."""
        above, _, last = directory.rpartition("/")
        for path, below in ((directory, name), (above, join(last, name))):
            known = next((f for f in self._formats if f.describes(below)), None)
            if known is not None:
                return known, path, below
        return None

    def described_by(self, directory: str, name: str) -> str:
        """The directory that a document tells about; it may be another than its own."""
        placed = self._placed(directory, name)
        return directory if placed is None else placed[0].described_by(*placed[1:])

    def stored(self, form: Format, directory: str, name: str, data: bytes) -> Mapping[str, bytes]:
        """All documents of the source that `Format.edit` wants to see."""
        others = {posixpath.normpath(join(directory, n)): n for n in form.references(directory, name, data)}
        wanted = [path for path in others if path.split("/")[0] != ".."]
        found = self._base.store.documents("", wanted, MAX_DOCUMENT_BYTES) if wanted else {}
        return {**self._base.stored_documents(directory), **{others[path]: raw for path, raw in found.items()}}

    def write(self, directory: str, name: str, data: bytes, *, decided: bool = False) -> Written | None:
        """Put a document into the store that was written as it is shown; None if it is none.

        What another program has changed in the source since the writer read the document stays, member by member. If
        `decided`, all of it is as it was written, whatever is there. Raise Overlap if both have changed a member,
        OSError (EINVAL), with the reason in the log, if the document contradicts what is stored. Then nothing is
        changed.
        """
        placed = self._placed(directory, name)
        if placed is None:
            return None
        form, directory, name = placed
        if self._is_in_a_file(directory):
            self._require_alike(directory, name, data)
            return Written(data, set())
        path = join(directory, name)
        try:
            edit = _Edit(self, form, directory, name, data, decided=decided)
            self._put(edit)
        except ValueError as e:
            log.warning("%s: is refused: %s", path, e)
            raise OSError(errno.EINVAL, str(e), path) from e
        self.seen.wrote(path, edit.base, data)
        if not _says_something(edit.shown):
            return Written(edit.shown, set())
        self._forget(directory, name)
        described = form.described_by(directory, name)
        repeated = self._repeated(form, directory, name, edit.made.get(name))
        return Written(edit.shown, {directory, described, *repeated})

    def _put(self, edit: _Edit) -> None:
        """Replace what the edit changes; if something else is there by then, begin anew with that."""
        for below in edit.made:

            def make(old: Blob | None, below: str = below) -> Plan | None:
                edit.look(below, None if old is None else _whole(old))
                content = edit.made.get(below, edit.stored.get(below))
                return None if content is None else [content]

            if edit.made[below] != edit.stored.get(below):
                self._writer.update(join(edit.directory, below), make)

    def is_changed(self, directory: str, name: str, shown: bytes | None) -> bool:
        """Whether the source has another version of a document than is shown, by another program's doing.

        Said once for each version. A remote store is asked every `index_ttl` seconds at most.
        """
        placed, path = self._placed(directory, name), join(directory, name)
        now = time.monotonic()
        known, when = self._looked.get(path, (0, -math.inf))
        if placed is None or not self._base.may_be_old(now - when):
            return False
        form, directory, name = placed
        if self._is_in_a_file(directory):
            return False
        stored = self.stored(form, directory, name, b"")
        found = hash(frozenset(stored.items()))
        if len(self._looked) >= MAX_LOOKED:
            self._looked.clear()
        self._looked[path] = found, now
        return found != known and not same_document(form.shown(directory, stored, name), shown)

    def shown(self, path: str) -> bytes | None:
        """A document as the tree shows it by itself; None if there is none."""
        try:
            number = self._base.resolve(path).number
            return bytes(self._base.read(number, 0, MAX_DOCUMENT_BYTES))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def base(self, path: str, theirs: bytes | None, data: bytes | None = None) -> bytes | None:
        """The version of a document that `data` is an edit of, or that was read last; the source has `theirs` now."""
        known = self.seen.versions(path)
        if known:
            return known[-1] if data is None else nearest(known, data)
        try:
            return self.shown(path)
        except (OSError, CorruptShardError):  # it is damaged, and may be mended
            return theirs

    def _is_in_a_file(self, directory: str) -> bool:
        """Whether a dataset is one file, whose documents are made from its header."""
        name = directory.rpartition("/")[2]
        if not any(f.may_hold(name) for f in self._formats):
            return False
        with suppress(FileNotFoundError, NotADirectoryError):
            return not self._base.store.entry(directory).directory
        return False

    def _require_alike(self, directory: str, name: str, data: bytes) -> None:
        """Raise OSError (EINVAL) if a document says something else than before, but for how well it was compressed."""
        path = join(directory, name)
        try:
            before = json.loads(bytes(self._base.read(self._base.resolve(path).number, 0, MAX_DOCUMENT_BYTES)))
            if {**json.loads(data), COMPRESSED: 0} == {**before, COMPRESSED: 0}:
                return
        except (ValueError, TypeError, OSError) as e:
            raise OSError(errno.EINVAL, str(e), path) from e
        log.warning("%s: is refused: the file that holds the array has a shape and attributes of its own", path)
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)

    def _repeated(self, form: Format, directory: str, name: str, made: bytes | None) -> Iterator[str]:
        """Put it into documents of groups above, too, that repeated it before it was there to be sharded."""
        above = directory
        while above and made is not None:
            above = above.rpartition("/")[0]
            below = join(directory.removeprefix(above).lstrip("/"), name)
            raw = self._base.stored_documents(above).get(name)
            if raw is None or below not in form.references(above, name, raw):
                continue

            def repeat(old: Blob | None, above: str = above, below: str = below) -> Plan | None:
                now = None if old is None else _whole(old)
                return None if now is None else [form.edit(above, {name: now, below: made}, name, now)[name]]

            with suppress(ValueError):  # it was none to begin with
                if form.edit(above, {name: raw, below: made}, name, raw)[name] != raw:
                    self._writer.update(join(above, name), repeat)
                    yield above

    def made(
        self, form: Format, directory: str, stored: Mapping[str, bytes], name: str, data: bytes
    ) -> Mapping[str, bytes]:
        """The source's documents. Raise ValueError, with the reason."""
        if name in stored:
            rules = (r for f, r in self._candidates(directory, name) if f is form and isinstance(r, Rule))
            return form.edit(directory, stored, name, data, next(rules, None))
        return self._sharded(directory, name, data) or form.edit(directory, stored, name, data)

    def _sharded(self, directory: str, name: str, data: bytes) -> Mapping[str, bytes] | None:
        """What becomes of a document for which there is a rule, or shards from before; None if it stays as it is."""
        refused: list[ValueError] = []
        for form, sharding in self._candidates(directory, name):
            try:
                made = form.shard(directory, name, data, sharding)
            except ValueError as e:
                refused.append(e)
                continue
            if made is None:
                continue
            if isinstance(sharding, Rule) and self._has_chunks(form, form.described_by(directory, name)):
                log.warning("%s: is not sharded: chunks are stored there already", join(directory, name))
                return None
            return made
        for why in refused:
            log.warning("%s: is not sharded: %s", join(directory, name), why)
        return None

    def _has_chunks(self, form: Format, directory: str, below: str = "") -> bool:
        """Whether the store has files there that would be taken for shards."""
        for entry in self._base.store.scan(join(directory, below)):
            name = join(below, entry.name)
            if form.chunk_like(name) if not entry.directory else self._may_hold_chunks(form, directory, name):
                return True
        return False

    def _may_hold_chunks(self, form: Format, directory: str, below: str) -> bool:
        deep = below.count("/") >= MAX_ABOVE
        return not deep and form.chunk_like(f"{below}/0") and self._has_chunks(form, directory, below)

    def require_known(self, directory: str, name: str) -> None:
        """Raise OSError (ESTALE) if another program has changed a document since it was read here."""
        placed = self._placed(directory, name)
        if placed is not None and not self._is_in_a_file(placed[1]):
            form, directory, name = placed
            self._require_known(form, directory, name, self.stored(form, directory, name, b""))

    def _require_known(self, form: Format, directory: str, name: str, stored: Mapping[str, bytes]) -> None:
        path, theirs = join(directory, name), form.shown(directory, stored, name)
        known = self.base(path, theirs)
        if None not in (known, theirs) and not same_document(known, theirs):
            why = "another program has changed it in the source; read it again before you remove it"
            log.warning("%s: is not removed: %s", path, why)
            raise OSError(errno.ESTALE, why, path)

    def remove(self, directory: str, name: str) -> None:
        """Delete a document; how its array was sharded is remembered. Raise as `require_known`."""
        placed = self._placed(directory, name)
        if placed is None or self._is_in_a_file(placed[1]):
            with suppress(FileNotFoundError):  # it is shown, and made of other documents
                self._writer.delete(join(directory, name))
            return
        form, directory, name = placed

        def gone(old: Blob | None) -> None:
            stored = {n: raw for n, raw in self.stored(form, directory, name, b"").items() if n != name}
            stored |= {} if old is None else {name: _whole(old)}
            self._require_known(form, directory, name, stored)
            self._remember(form, directory, {name: stored[name]} if name in stored else {})

        self._writer.update(join(directory, name), gone)
        self.seen.note(join(directory, name), None)

    def _remember(self, form: Format, directory: str, documents: Mapping[str, bytes]) -> None:
        sharding = form.sharding(documents) if self._remembers else None
        if sharding is not None:
            before = self._deleted.get(directory)
            others = before.documents if before is not None and before.format == sharding.format else {}
            self._deleted[directory] = Sharding(sharding.format, {**others, **sharding.documents})

    def _forget(self, directory: str, name: str) -> None:
        before = self._deleted.pop(directory, None)
        if before is not None and (rest := {n: raw for n, raw in before.documents.items() if n != name}):
            self._deleted[directory] = Sharding(before.format, rest)

    def removed(self, path: str) -> None:
        """A directory is gone; what was deleted in it is remembered, as tools delete an array to write it anew."""
        self._base.store.reopen(path)
        self.seen.forget(path)


class _Edit:
    """A document that is written, on top of what the source has: `look` has it made anew if that is something else.

    `base` is the version that the writer has read, `shown` the document as it will be shown, `made` the documents of
    the source that come of it, by path below the directory.
    """

    def __init__(
        self, documents: Documents, form: Format, directory: str, name: str, data: bytes, *, decided: bool
    ) -> None:
        """Raise as `Documents.write`."""
        self._documents, self._form, self.directory, self._name = documents, form, directory, name
        self._data, self._decided, self._path = data, decided, join(directory, name)
        self.base: bytes | None = None
        self.stored = documents.stored(form, directory, name, data)
        self._make()

    def look(self, below: str, found: bytes | None) -> None:
        """The source has this document now. Raise as `Documents.write`."""
        if found != self.stored.get(below):
            self.stored = {n: raw for n, raw in self.stored.items() if n != below}
            self.stored |= {} if found is None else {below: found}
            self._make()

    def _make(self) -> None:
        theirs = self._form.shown(self.directory, self.stored, self._name)
        self.base = theirs if self._decided else self._documents.base(self._path, theirs, self._data)
        self.shown = self._data
        overlaps = [] if same_document(self.base, theirs) else self._merge(theirs)
        self.made = self._documents.made(self._form, self.directory, self.stored, self._name, self.shown)
        if overlaps:
            self._require_wins(overlaps)

    def _merge(self, theirs: bytes | None) -> list[Path]:
        """Have `shown` say what both programs have changed; the members about which they disagree."""
        if theirs is None:
            return [()]
        try:
            self.shown, overlaps = merged(self.base or b"{}", self._data, theirs)
        except ValueError:
            return [()]
        if not overlaps:
            log.warning("%s: another program has changed it, too; the changes of both are kept", self._path)
        return overlaps

    def _require_wins(self, overlaps: Sequence[Path]) -> None:
        what = ", ".join(".".join(map(str, path)) for path in overlaps)
        why = f"another program has changed {what or 'all of it'}, too"
        if not self._documents.wins:
            raise Overlap(self._path, why, self.shown)
        log.warning("%s: %s; what was written here replaces that", self._path, why)


def _whole(blob: Blob) -> bytes:
    return bytes(blob.read([ByteRange(0, blob.stat().size)])[0])


def _says_something(data: bytes) -> bool:
    """Whether it is a document, and not what some program tries names with."""
    try:
        return bool(parse_written("", data))
    except ValueError:
        return False
