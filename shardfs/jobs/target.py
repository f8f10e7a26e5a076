"""Where a job writes: a new dataset that is complete when the job has ended, and the state of a job that has not."""

from __future__ import annotations

import errno
import json
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from shardfs.jobs.shared_work import WHOLE, JobPart, JobSource
from shardfs.model.blobs import ByteRange
from shardfs.model.errors import UnsupportedError
from shardfs.model.write_plan import bytes_of, unchanged
from shardfs.storage.open_store import open_store
from shardfs.storage.pack_state import STATE
from shardfs.storage.source_locks import canonical
from shardfs.storage.writers import open_writer
from shardfs.storage.writers.common import AT_A_TIME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Executor

    from shardfs.model.blobs import Blob, Plan
    from shardfs.storage.store import Store
    from shardfs.storage.writers import Writer

FULL = {errno.ENOSPC, errno.EDQUOT}
"""Errors of a full disk, which end the whole job."""

OZX = ".ozx"
"""The suffix of OME-Zarr in a zip file (RFC-9)."""

MARKS = 4096
"""Objects whose deletion is submitted at once."""


def is_zip(target: str) -> bool:
    """Whether a target is a zip file, by its suffix."""
    return target.lower().endswith((".zip", OZX))


def job_state(kind: str, source: JobSource, choices: Sequence[Any]) -> bytes:
    """Return the content of `STATE`, which is equal for jobs that make the same target."""
    return json.dumps({"job": kind, "source": canonical(source.url), "choices": choices}).encode()


def require_room(error: BaseException, where: str) -> None:
    """Raise the error again if a disk is full, because all other tasks would fail as well."""
    if isinstance(error, OSError) and error.errno in FULL:
        raise OSError(error.errno, f"{os.strerror(error.errno)}; free some space and repeat it", where) from error


def is_of(part: JobPart, key: str) -> bool:
    """Whether a part of the job makes this object. Every process decides alike, in any order."""
    return part == WHOLE or zlib.crc32(key.encode(errors="surrogateescape")) % part.of == part.number - 1


class JobTarget(NamedTuple):
    """The target of a job, open for writing."""

    store: Store
    writer: Writer

    @classmethod
    def begin(cls, target: JobSource, state: bytes, *, new: bool) -> Self:
        """Open the target, and continue the job there. If it has data and no job, another run may have ended the job.

        Args:
            new: begin the job if the target is empty. Workers do not: a target that is empty for them is another one.

        Raise FileExistsError if the target has another unfinished job; FileNotFoundError if no job may be begun.
        """
        if is_zip(target.url):
            raise UnsupportedError("only pack writes zip files; give the name of a directory, without .zip or .ozx")
        if new and "://" not in target.url:
            os.makedirs(target.url, exist_ok=True)
        store = open_store(target.url, json.loads(target.options))
        writer = open_writer(store, cas_none=True)  # an object written twice has the same bytes
        writer.recovered()

        def begin(old: Blob | None) -> Plan | None:
            if old is None:
                if next(store.scan(""), None) is not None:
                    return None
                if not new:
                    why = "is empty here; the target must have the same path or URL for all workers"
                    raise FileNotFoundError(errno.ENOENT, why, target.url)
                return [state]
            if old.stat().size != len(state) or bytes_of([ByteRange(0, len(state))], old) != state:
                why = "has an unfinished job of another source or with other options; repeat that one, or delete it"
                raise FileExistsError(errno.EEXIST, why, target.url)
            return unchanged(len(state))

        writer.update(STATE, begin)
        return cls(store, writer)

    @contextmanager
    def running(self, executor: Executor | None, workers: int) -> Iterator[Executor | None]:
        """While the tasks of a job run: yield what runs them, by default `executor`."""
        yield executor

    def is_stored(self, key: str) -> bool:
        """Whether the target has this object."""
        with suppress(FileNotFoundError, NotADirectoryError):
            self.store.entry(key)
            return True
        return False

    def finish(self, documents: Iterable[tuple[str, Callable[[], bytes]]], marks: Iterable[str] = ()) -> None:
        """Write the documents with these keys, those of groups last, delete the objects `marks`, and end the job."""
        for key, document in sorted(documents, key=lambda found: (-found[0].count("/"), found[0])):
            self.writer.update(key, lambda _, document=document: [document()])  # type: ignore[misc]
        rest = iter(marks)
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            while batch := list(islice(rest, MARKS)):
                for _ in pool.map(self._delete, batch):
                    pass
        self._delete(STATE)

    def _delete(self, key: str) -> None:
        """Delete an object, and directories of `OWN` names that it leaves empty."""
        with suppress(FileNotFoundError):
            self.writer.delete(key)
        while self.writer.local and (key := key.rpartition("/")[0]):
            try:
                self.writer.remove_directory(key)
            except OSError:  # not empty
                return
