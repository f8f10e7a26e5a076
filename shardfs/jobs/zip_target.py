"""A zip file as the target of `pack`: OME-Zarr's single-file form (RFC-9), also for datasets without OME metadata.

https://ngff.openmicroscopy.org/rfc/9/
"""

from __future__ import annotations

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from shardfs.formats import ome
from shardfs.jobs import finished
from shardfs.jobs.target import OZX, JobState
from shardfs.model import redact
from shardfs.model.errors import UnsupportedError
from shardfs.storage.writers.zip_file import ZipWriter

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from concurrent.futures import Executor

    from shardfs.model.values import Version

DOCUMENT = "zarr.json"


class ZipTarget(NamedTuple):
    """The counterpart of `JobTarget` for a zip file, which only this process writes.

    Attributes:
        new: the new zip file; None if an earlier run of the same job has completed the file.
        version: that of OME-Zarr.
    """

    path: str
    state: JobState
    new: ZipWriter | None
    version: str | None

    @classmethod
    def begin(cls, target: str, state: JobState, documents: Mapping[str, bytes]) -> Self:
        """Begin a zip file with all documents of datasets, unless an earlier run of the same job has completed it.

        Raise UnsupportedError if the target is remote, or if its name promises OME-Zarr; and the errors of `ZipWriter`.
        """
        if not redact.is_path(target):
            raise UnsupportedError("a zip file is written to a local path only; pack to a local file, and upload it")
        if os.path.isfile(target) and finished.is_noted(target, state.raw(), _version(os.stat(target))):
            return cls(target, state, None, None)
        root: Any = json.loads(documents.get(DOCUMENT, b"{}"))
        attributes = root.get("attributes")
        version = ome.version_05(attributes) if isinstance(attributes, dict) else None
        if target.lower().endswith(OZX) and version is None:
            raise UnsupportedError(f"{OZX} is for OME-Zarr 0.5, but the source has no OME metadata; name the file .zip")
        writer = ZipWriter(target)
        for key in sorted(documents, key=_order):
            writer.put(key, documents[key])
        return cls(target, state, writer, version)

    @contextmanager
    def running(self, executor: Executor | None, workers: int) -> Iterator[Executor]:
        """While the tasks of a job run: yield threads, if not given. At the end, close the file.

        Raise UnsupportedError for another executor, because its processes cannot write to the file.
        """
        with ExitStack() as stack:
            stack.callback(self.writer.close)
            if not isinstance(executor, ThreadPoolExecutor | None):
                raise UnsupportedError("a zip file is written by threads of one process; give a ThreadPoolExecutor")
            if executor is None:
                executor = ThreadPoolExecutor(workers)
                stack.callback(executor.shutdown, cancel_futures=True)
            yield executor

    @property
    def writer(self) -> ZipWriter:
        """The writer of the new zip file. Raise FileExistsError if there is none."""
        if self.new is None:
            raise FileExistsError(errno.EEXIST, "was completed by an earlier run of this job", self.path)
        return self.new

    def is_stored(self, key: str) -> bool:
        """False: each run starts over."""
        return False

    def is_finished(self) -> bool:
        """Whether an earlier run has completed the zip file for the same job."""
        return self.new is None

    def is_ended(self) -> bool:
        """Same as `is_finished`: while this run writes the file, no other run does."""
        return self.is_finished()

    def noted(self, task: str) -> None:
        """None: each run starts over."""

    def note_task(self, task: str, objects: int, last: str) -> None:
        """Do nothing: each run starts over."""

    def finish(self, documents: Iterable[object], tasks: Iterable[str] = ()) -> None:
        """Complete the zip file, which has its documents, note that it is finished, and give it its name.

        A run that is killed after the note and before the name starts over: the note is about another version.
        """
        comment = {"ome": {"version": self.version, "zipFile": {"centralDirectory": {"jsonFirst": True}}}}

        def complete(info: os.stat_result) -> None:
            finished.note(self.path, self.state.raw(), _version(info))

        self.writer.commit(b"" if self.version is None else json.dumps(comment).encode(), _order, complete)


def _version(info: os.stat_result) -> Version:
    """The version of a file in a local directory."""
    return info.st_ino, info.st_size, info.st_mtime_ns


def _order(key: str) -> tuple[bool, int, str]:
    """Sort key: documents of Zarr v3 come first, breadth-first."""
    if key.rpartition("/")[2] == DOCUMENT:
        return False, key.count("/"), key
    return True, 0, key
