"""Where a job writes: a new dataset that is complete when the job has ended, and the state of a job that has not."""

from __future__ import annotations

import errno
import json
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from shardfs.formats.layouts import join
from shardfs.jobs import finished_jobs
from shardfs.jobs.finished_jobs import fingerprint
from shardfs.jobs.shared_work import WHOLE, JobPart, JobSource
from shardfs.model.blobs import ByteRange
from shardfs.model.changes import Change
from shardfs.model.errors import NOT_FOUND, UnsupportedError
from shardfs.model.kinds import OWN_PREFIX
from shardfs.model.redact import public_name
from shardfs.model.write_plan import bytes_of, unchanged
from shardfs.storage.pack_state import DIRECTORY, MAX_STATE, STATE
from shardfs.storage.regular_files import parse_object
from shardfs.storage.source_locks import canonical
from shardfs.storage.writers import open_writer
from shardfs.storage.writers.writer import AT_A_TIME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from shardfs.model.blobs import Blob, Plan
    from shardfs.model.values import Version
    from shardfs.storage.store import Store
    from shardfs.storage.writers import Writer

FULL = {errno.ENOSPC, errno.EDQUOT}
"""Errors of a full disk, which end the whole job."""

MOST_CHANGES = 3
"""Changes of a plan that an error message lists."""

NOTES = f"{DIRECTORY}/done"
"""The directory in the target with an object for each finished task: see `JobTarget.note_task`."""

NOTES_AT_A_TIME = 4096
"""Notes whose deletion is submitted at once."""


@dataclass(frozen=True)
class JobState:
    """The content of `STATE` in the target of an unfinished job: equal for jobs that make the same target.

    Args:
        job: PACK or UNPACK.
        source: the canonical path or URL of the source.
        choices: the options that decide what the job makes, by name.
        plan: what the job makes: the documents with the digests of their bytes, and, with a slash at the end and an
            empty digest, the directories of the arrays that it packs or unpacks. None: it is unknown, as in workers.
    """

    job: str
    source: str
    choices: Mapping[str, Any]
    plan: Mapping[str, str] | None = None

    @classmethod
    def from_choices(cls, job: str, source: JobSource, choices: Mapping[str, Any]) -> Self:
        """Return the state of a job whose plan is unknown."""
        return cls(job, canonical(source.url), json.loads(json.dumps(choices)))  # with lists instead of tuples

    def planned(self, arrays: Iterable[str], documents: Iterable[tuple[str, bytes]]) -> Self:
        """Return the state of the job if it makes these arrays and documents."""
        return replace(
            self, plan={key: fingerprint(raw) for key, raw in documents} | {f"{path}/": "" for path in arrays}
        )

    @classmethod
    def parse(cls, raw: bytes) -> Self | None:
        """Return the state whose `raw` these bytes are; None for that of another version, or of a job in place."""
        try:
            state = cls(**parse_object(raw, MAX_STATE))
        except (ValueError, TypeError):
            return None
        return state if isinstance(state.choices, dict) and isinstance(state.plan, dict) else None

    def raw(self) -> bytes:
        """Return the state as the bytes of the file `STATE`: JSON, equal for equal states."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    def difference(self, other: JobState | None) -> str:
        """Return how the unfinished job `other` differs from this one; "" if both make the same target.

        `other` is None if its state cannot be parsed. The text follows "has an unfinished job". A plan that is unknown
        does not differ.
        """
        if other is None or self.job != other.job:
            return "of another kind, or of another version of shardfs"
        if self.source != other.source:
            return "of another source"
        if self.choices != other.choices:
            names = (name for name in self.choices if self.choices[name] != other.choices.get(name))
            return f"with other options ({', '.join(names)})"
        changes, plan, other_plan = [], self.plan or {}, other.plan or {}
        for key in sorted({*plan, *other_plan}) if self.plan is not None else ():
            before, now = other_plan.get(key), plan.get(key)
            if before != now:
                how = "is new" if before is None else "is missing now" if now is None else "has changed"
                changes.append(f"{key} {how}")
        more = f", and {len(changes) - MOST_CHANGES} more" if len(changes) > MOST_CHANGES else ""
        return f"with another plan: {', '.join(changes[:MOST_CHANGES])}{more}" if changes else ""


def note_of(path: str, task: str) -> str:
    """Return the key of the note that a task on an array is finished: see `JobTarget.note_task`.

    `path` is that of the array, and `task` distinguishes the task from others on the array.
    """
    return join(NOTES, join(path, f"{OWN_PREFIX}-{task}"))


def require_room(error: BaseException, place: str, advice: str = "free some space and repeat it") -> None:
    """Raise OSError, with the advice, for the error of a full disk, because all other tasks would fail as well."""
    if isinstance(error, OSError) and error.errno in FULL:
        raise OSError(error.errno, f"{os.strerror(error.errno)}; {advice}", place) from error


def is_of(part: JobPart, key: str) -> bool:
    """Return whether a part of the job makes the object `key`. Every process decides alike, in any order."""
    return part == WHOLE or zlib.crc32(key.encode(errors="surrogateescape")) % part.of == part.number - 1


@dataclass
class _Begin(Change):
    """Write the state of a job into an empty target, or continue the job: see `JobTarget.open`."""

    url: str
    store: Store
    state: JobState
    new: bool

    def plan(self, old: Blob | None) -> Plan | None:
        if old is None:
            if next(self.store.scan(""), None) is not None:
                return None
            if not self.new:
                why = "is empty here; the target must have the same path or URL for all workers"
                raise FileNotFoundError(errno.ENOENT, why, self.url)
            return [self.state.raw()]
        size = old.stat().size
        raw = b"" if size > MAX_STATE else bytes_of([ByteRange(0, size)], old)
        if difference := self.state.difference(JobState.parse(raw)):
            advice = "repeat that job with its own source and options, or delete the target and start anew"
            why = f"has an unfinished job {difference}; {advice}"
            raise FileExistsError(errno.EEXIST, why, public_name(self.url))
        return unchanged(size)


class JobTarget(NamedTuple):
    """The target of a job, open for writing: its path or URL, its store, and the job that makes it."""

    url: str
    store: Store
    writer: Writer
    state: JobState

    @classmethod
    def open(cls, target: JobSource, state: JobState, *, new: bool) -> Self:
        """Return the opened target, and continue its job. If it has data and no job (`is_ended`), nothing is changed.

        Args:
            new: begin the job if the target is empty, and make a missing directory. Workers do not: a target that is
                empty for them is another one.

        Raise FileExistsError if the target has another unfinished job; FileNotFoundError if no job may be begun;
        UnsupportedError for a zip file, and if the store cannot be written.
        """
        if target.url.lower().endswith((".zip", ".ozx")):
            why = "no zip file is written; give a directory, and put its files into a zip file with `zip -0`"
            raise UnsupportedError(f"{why} (docs/pack.md)")
        if new and "://" not in target.url:
            os.makedirs(target.url, exist_ok=True)
        store = target.target_store()
        writer = open_writer(store, alone=True)  # an object written twice has the same bytes
        writer.recovered()

        writer.update(STATE, _Begin(target.url, store, state, new))
        return cls(target.url, store, writer, state)

    def is_stored(self, key: str) -> bool:
        """Return whether the target has an object of this key. Asks the store. Raise OSError if it does not answer."""
        with suppress(*NOT_FOUND):
            self.store.entry(key)
            return True
        return False

    def is_ended(self) -> bool:
        """Return whether the target has no unfinished job: a run has ended it, or there was never one."""
        return not self.is_stored(STATE)

    def is_finished(self) -> bool:
        """Return whether an earlier run of this user has completed the target for the same job and plan."""
        version = self._version()
        return version is not None and finished_jobs.is_noted(self.url, self.state.raw(), version)

    def require_own(self) -> None:
        """Raise FileExistsError if the target has data that are not of this job, as far as its plan is known."""
        if self.state.plan is not None and self.is_ended() and not self.is_finished():
            why = "is not empty, and has no unfinished job (another job may have completed it); give a new directory"
            raise FileExistsError(errno.EEXIST, why, public_name(self.url))

    def _version(self) -> Version | None:
        """The version of one document of the job; None if the target does not have it."""
        key = min((key for key in self.state.plan or {} if not key.endswith("/")), default="")
        with suppress(*NOT_FOUND):
            self.store.reopen(key)
            stat = self.store.entry(key).stat
            return None if stat is None else stat.version
        return None

    def _content(self, key: str) -> bytes | None:
        """The bytes of a small object; None if it does not exist."""
        try:
            blob = self.store.open(key)
            return bytes(bytes_of([ByteRange(0, blob.stat().size)], blob))
        except NOT_FOUND:
            return None

    def note_task(self, task: str, objects: int, last: str) -> None:
        """Note that a task is finished, unless another run has ended the job.

        Args:
            task: the key of the note, inside `NOTES`.
            objects: the number of objects that the task has made.
            last: the key of one of them; "" if there is none.
        """
        with suppress(FileNotFoundError):  # the run that ends the job removes the directories of notes
            if not self.is_ended():
                self.writer.create([(task, json.dumps([objects, last]).encode())])

    def noted(self, task: str) -> int | None:
        """Return the number of objects that a finished task has made; None if no such task is finished.

        A note does not count if an object of the task was deleted since, as by `rm -r TARGET/*`, which keeps the notes.
        """
        try:
            objects, last = json.loads(self._content(task) or b"null")
        except (ValueError, TypeError):  # none, or one that a power failure has torn
            return None
        return int(objects) if not last or self.is_stored(last) else None

    def finish(self, documents: Iterable[tuple[str, Callable[[], bytes]]], tasks: Iterable[str] = ()) -> None:
        """Write documents, each given by its key and a function for its bytes, and end the job.

        Deeper documents are written first, so those of groups follow their arrays. Then the notes of `tasks` are
        deleted. If another run has ended the job, only these are: the documents may have been edited since.
        """
        if not self.is_finished():
            for key, document in sorted(documents, key=lambda pair: (-pair[0].count("/"), pair[0])):
                self.writer.put(key, document())
            if (version := self._version()) is not None:
                finished_jobs.note(self.url, self.state.raw(), version)
        notes = iter(tasks)
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            while batch := list(islice(notes, NOTES_AT_A_TIME)):
                for _ in pool.map(self._delete, batch):
                    pass
        self._delete(STATE)

    def _delete(self, key: str) -> None:
        """Delete an object, and directories of `OWN_PREFIX` names that it leaves empty."""
        with suppress(FileNotFoundError):
            self.writer.delete(key)
        while self.writer.local and (key := key.rpartition("/")[0]):
            try:
                self.writer.remove_directory(key)
            except OSError:  # not empty
                return
