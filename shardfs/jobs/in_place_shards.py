"""A local source in the middle of a job in place: what one task does there, in both directions."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import islice
from typing import TYPE_CHECKING

from shardfs.formats.documents import MAX_DOCUMENT_BYTES
from shardfs.formats.layouts import join
from shardfs.jobs.compact import chunks_in
from shardfs.jobs.copying import failure
from shardfs.jobs.opened_files import OpenedFile
from shardfs.jobs.pack_arrays import PackedArray
from shardfs.jobs.pack_job import Packing, PackJob
from shardfs.jobs.pack_plan import Planner
from shardfs.jobs.runs import PackReport
from shardfs.jobs.shared_work import CACHE, JobSource
from shardfs.model.blobs import ByteRange
from shardfs.model.changes import Change
from shardfs.model.errors import BusyError
from shardfs.model.kinds import LOCK_ENDING
from shardfs.model.shard_format import Put
from shardfs.model.write_plan import bytes_of, size_of, unchanged
from shardfs.shards.rewriting import StoredShard
from shardfs.shards.shard_sources import StoreShards
from shardfs.storage import syscalls
from shardfs.storage.cache import ByteLRU, nothing
from shardfs.storage.load_ahead import load_ahead
from shardfs.storage.local import LocalStore, pread
from shardfs.storage.pack_state import DIRECTORY, PLAIN, SHARDED
from shardfs.storage.regular_files import open_or_create, open_regular, require_file
from shardfs.storage.writers.files import identity_in
from shardfs.storage.writers.local import LocalWriter
from shardfs.storage.writers.lock_file import remove_left
from shardfs.storage.writers.names import is_temporary
from shardfs.storage.writers.writer import AT_A_TIME

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardfs.jobs.pack_plan import PlainDataset
    from shardfs.model.blobs import Blob, Bytes, Plan
    from shardfs.model.dataset import Problem
    from shardfs.model.values import U64, Coords
    from shardfs.shards.chunk_store import ChunkStore

LOCK = f"{DIRECTORY}/lock"
"""Contains the number of the latest run. Tasks hold it shared, and a new run takes it exclusively before it begins."""

LOCK_S = 120.0
"""Seconds to wait for tasks of an earlier run whose main process was killed."""


KEPT = {errno.ENOTEMPTY, errno.EEXIST, errno.EACCES, errno.EPERM}
"""Errors of `rmdir` for directories that stay: they have other files, or this user may not remove them."""


@dataclass
class _ChunkFile(Change):
    """Write a chunk file, unless it exists. Raise FileExistsError if it exists and differs."""

    key: str
    data: bytes

    def plan(self, old: Blob | None) -> Plan:
        if old is None:
            return [self.data]
        if bytes_of([ByteRange(0, old.stat().size)], old) != self.data:
            why = "differs from its shard: delete it to get back the packed chunk, or pack it with pack --in-place"
            raise FileExistsError(errno.EEXIST, why, self.key)
        return unchanged(len(self.data))


@dataclass
class _ShardChunks(Change):
    """Put chunks, by their coordinates, into a shard."""

    array: PackedArray
    shard: int
    puts: Mapping[Coords, Put]

    def plan(self, old: Blob | None) -> Plan | None:
        return StoredShard(self.array.target, self.shard, old).plan(self.puts, set())


class _BothForms(Planner):
    """Plans the arrays of which both forms are described."""

    @cached_property
    def _shards(self) -> LocalStore:
        return LocalStore(self._job.target.url)

    def _sharded(self, dataset: PlainDataset) -> Mapping[str, bytes]:
        """Return the stored documents with shards. Adds the arrays that have both forms."""
        path = dataset.path
        format = dataset.format
        documents = self._shards.documents(path, format.documents, MAX_DOCUMENT_BYTES)
        sharded = format.open(path, documents)
        for target in () if sharded is None else sharded.collections:
            place = join(path, target.path)
            self._described.add(place)
            if (chunks := dataset.chunks.get(place)) is not None:
                home = join(path, target.stored_at)
                self.plan.arrays[chunks.path] = PackedArray(chunks.path, home, chunks.collection, target)
        return documents


class MixedDataset(Packing):
    """The arrays of a source in the middle of a job in place. Both forms are described by the documents in `DIRECTORY`.

    Attributes:
        source: the source, with all chunk files.
        shards: the directory of finished shards.

    Args:
        root: the directory of the source.

    The constructor raises the errors of `Packing`.
    """

    def __init__(self, root: str) -> None:
        plain, sharded = os.path.join(root, PLAIN), os.path.join(root, SHARDED)
        self.shards = LocalStore(sharded)
        job = PackJob(JobSource.from_url(plain), JobSource.from_url(sharded), verbatim=True)
        super().__init__(job, _BothForms)
        self.store = self.source = LocalStore(root)
        self._shard_writer = LocalWriter(self.shards)
        self._shard_writer.recovered()
        self._chunk_writer = LocalWriter(self.source)

    # ---- packing ----

    def pack(self, array: PackedArray, shard: int, numbers: U64) -> PackReport:
        """Move the chunk files with these numbers (n,) into their shard, and return what was done.

        The files are deleted after each was found in the stored shard, byte by byte. If the shard exists already, these
        are the files that an interrupted run has not deleted.

        Files that were changed meanwhile are problems of the report, and stay. Raise OSError if a file cannot be
        deleted, or if the shard cannot be written.
        """
        files = [array.file(number) for number in numbers.tolist()]
        cells = dict(zip(files, map(tuple, array.cells(numbers).tolist()), strict=True))
        path = self.shards.path(array.shard_key(shard))
        existed = os.path.lexists(path)
        self._require_deletable(files)
        report = PackReport(1, len(files), 1)
        if existed:  # the run may have been killed before the name was synced
            sync_names(path, self.shards.root)
        else:
            report.nbytes = self._write_shard(array, shard, cells)
        verified, problems = self._verified(array, shard, cells)
        if existed and problems:  # files that were changed after their shard was finished
            report.nbytes = self._write_shard(array, shard, cells)
            verified, problems = self._verified(array, shard, cells)
        if not problems:
            problems = [problem for key in files if (problem := self._deleted(key, verified[key])) is not None]
        report.problems += problems
        return report

    def _verified(
        self, array: PackedArray, shard: int, cells: Mapping[str, Coords]
    ) -> tuple[dict[str, list[int]], list[Problem]]:
        """Return the identities of the files that are equal to their chunks in the stored shard, and the problems."""
        chunks = self._stored_chunks(array, shard)
        verified: dict[str, list[int]] = {}
        problems = []
        for key, cell in cells.items():
            try:
                verified[key] = self._compared(key, chunks.whole(cell))
            except OSError as e:
                problems.append(failure(key, e))
        return verified, problems

    def _require_deletable(self, files: Sequence[str]) -> None:
        """Raise OSError, before a shard takes space, if one of its files cannot be replaced by the shard."""
        for key in files:
            require_plain(self.source.path(key), key)
        for directory in {os.path.dirname(self.source.path(key)) for key in files}:
            if not os.access(directory, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "is write-protected, so its files cannot be deleted", directory)

    def _write_shard(self, array: PackedArray, shard: int, cells: Mapping[str, Coords]) -> int:
        """Put these files into a shard and sync it; return their size."""
        puts: dict[Coords, Put] = {}
        open_files: list[OpenedFile] = []
        nbytes = 0
        for key, file in load_ahead(self.source.read_ahead, partial(OpenedFile.from_key, self), cells, first=4):
            nbytes += size_of(file.content)
            puts[cells[key]] = Put(_stored(array, cells[key], file.content))
            if array.target.transform is None:
                open_files.append(file)  # open until the shard is written
        self._shard_writer.update(array.shard_key(shard), _ShardChunks(array, shard, puts))
        return nbytes

    def _stored_chunks(self, array: PackedArray, shard: int) -> ChunkStore:
        """The chunks of a stored shard, read from the disk as readers do."""
        key = array.shard_key(shard)
        self.shards.reopen(key)
        blob = self.shards.open(key)
        os.posix_fadvise(blob.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return chunks_in(array.target, shard, key, blob)

    def _compared(self, key: str, wanted: bytes | memoryview | None, *, written: bool = False) -> list[int]:
        """Return the identity of a chunk file that has these bytes, or raise OSError.

        A file that this job has `written` is read from the disk.
        """
        with self.source.open_descriptor(key, os.O_RDONLY | os.O_NOFOLLOW) as fd:
            info = os.fstat(fd)
            if written:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            data = pread(fd, info.st_size + 1, 0, nothing)
            if data != wanted or identity_in(os.fstat(fd)) != identity_in(info):
                raise _changed(key)
            return identity_in(info)

    def _deleted(self, key: str, identity: list[int]) -> Problem | None:
        """Delete a chunk file unless it was changed since it was compared; return the problem."""
        path = self.source.path(key)
        try:
            if identity_in(os.lstat(path)) != identity:
                raise _changed(key)
            syscalls.unlink(path)
        except FileNotFoundError:
            return None
        except OSError as e:
            return failure(key, e)
        return None

    # ---- unpacking ----

    def unpack(self, array: PackedArray, shard: int) -> PackReport:
        """Write the chunks of a finished shard as files, delete the shard, and return what was done.

        The shard is deleted after each chunk was found in its file. A file that exists with the same bytes stays.

        Raise OSError if a file cannot be written, or exists and differs from the shard; CorruptShardError if a chunk
        cannot be read.
        """
        key, chunks = array.shard_key(shard), self._stored_chunks(array, shard)
        report = PackReport(1, 1)
        files = self._chunk_files(array, chunks)
        with ThreadPoolExecutor(AT_A_TIME) as pool:  # each file is synced, and disks sync several at a time
            while batch := list(islice(files, AT_A_TIME)):
                for size in pool.map(self._write_chunk, batch):
                    report.objects += 1
                    report.nbytes += size
        for file, data in self._chunk_files(array, chunks):
            self._compared(file, data, written=True)
        path = self.shards.path(key)
        syscalls.unlink(path)
        self.shards.reopen(key)  # closes the file, so that the disk frees its space
        syscalls.fsync_directory(os.path.dirname(path))
        return report

    def _chunk_files(self, array: PackedArray, chunks: ChunkStore) -> Iterator[tuple[str, bytes]]:
        """Yield the path of each chunk's file and its bytes. Raise CorruptShardError if a chunk may be missing."""
        for batch in chunks.layer.scan(0):
            for cell, number in zip(batch.coords.tolist(), array.numbers(batch.coords).tolist(), strict=True):
                content = chunks.whole(tuple(cell))
                if content is None:
                    raise OSError(errno.EIO, f"chunk {cell} has vanished from its shard", array.path)
                yield array.file(number), bytes(content)

    def _write_chunk(self, file: tuple[str, bytes]) -> int:
        """Write a chunk file, unless it exists; return its size. Raise FileExistsError if it exists and differs."""
        key, data = file
        self._chunk_writer.update(key, _ChunkFile(key, data))
        return len(data)

    # ---- the whole source ----

    def existing_shards(self, array: PackedArray, store: LocalStore | None = None) -> list[str]:
        """Return the paths of an array's shards in a store, by default in `shards`, in the order of their numbers."""
        return [array.shard_key(shard) for shard in self.shard_numbers(array, store).tolist()]

    def shard_numbers(self, array: PackedArray, store: LocalStore | None = None) -> U64:
        """Return the numbers (n,) of `existing_shards`, ascending."""
        source = StoreShards(store or self.shards, array.home, array.target.layers[0], ByteLRU(CACHE))
        return source.survey()[0]

    def tidy(self) -> list[str]:
        """Remove empty directories of chunks, and what killed workers have left; sync the directories that stay.

        Return the paths of the chunk files that exist, at most ten of them. Raise OSError.
        """
        strays: list[str] = []
        for array in self.plan.arrays.values():
            with suppress(FileNotFoundError):
                self._tidy(array, "", strays)
                syscalls.fsync_directory(self.source.path(array.path))
        return strays

    def _tidy(self, array: PackedArray, below: str, strays: list[str]) -> None:
        with os.scandir(self.source.path(join(array.path, below))) as entries:
            for entry in entries:
                inner, is_directory = join(below, entry.name), entry.is_dir(follow_symlinks=False)
                if is_directory and array.is_directory(inner):
                    self._tidy(array, inner, strays)
                    try:
                        syscalls.rmdir(entry.path)
                    except OSError as e:
                        if e.errno not in KEPT:
                            raise
                        syscalls.fsync_directory(entry.path)
                elif is_temporary(entry.name) and not is_directory:
                    syscalls.unlink(entry.path)
                elif entry.name.endswith(LOCK_ENDING) and not is_directory:
                    remove_left(entry.path)
                elif len(strays) < 10 and array.number(inner) is not None:
                    strays.append(join(array.path, inner))


def _stored(array: PackedArray, cell: Coords, content: Bytes) -> Bytes:
    """The bytes in the shard, from a chunk's file."""
    transform = array.target.transform
    return content if transform is None else transform.store(cell, bytes_of(content))


def _changed(key: str) -> OSError:
    return OSError(errno.EBUSY, "was changed while it was packed, so it was not deleted; repeat the command", key)


def sync_names(path: str, root: str) -> None:
    """Sync the directories of a file, from its own one up to and with `root`. Raise OSError."""
    while path != root:
        path = os.path.dirname(path)
        syscalls.fsync_directory(path)


def require_plain(path: str, key: str) -> None:
    """Raise OSError unless a path is a regular file, and no symbolic link. `key` is its name for the message."""
    if os.path.islink(path):
        why = "is a symbolic link, which a job in place does not replace; put the file itself in its place"
        raise OSError(errno.EMLINK, why, key)
    require_file(os.lstat(path), key)


def is_litter(name: str) -> bool:
    """Return whether killed workers may have left a file of this name: a temporary file, or the lock of an object."""
    return is_temporary(name) or name.endswith(LOCK_ENDING)


# ---- runs and their workers ----


@lru_cache(2)
def mixed_dataset(root: str, run: int) -> MixedDataset:
    """Return the dataset of one run, opened once per process. Raise the errors of `MixedDataset`."""
    return MixedDataset(root)


def take_over(root: str, run: int) -> None:
    """Begin the run with this number: wait until tasks of earlier runs have ended, and let none of them begin any more.

    A process of an earlier run may have survived its main process. Raise BlockingIOError after `LOCK_S`.
    """
    fd = open_or_create(os.path.join(root, LOCK), os.O_RDWR, 0o600, inside=root)
    try:
        syscalls.lock(fd, wait=LOCK_S)
        syscalls.ftruncate(fd, 0)
        syscalls.pwrite_all(fd, b"%d" % run, 0)
    finally:
        os.close(fd)


@contextmanager
def working(root: str, run: int) -> Iterator[MixedDataset]:
    """Context manager for one task of a run: yields the dataset. Raise BusyError if another run has begun since."""
    fd = open_regular(os.path.join(root, LOCK), os.O_RDWR, inside=root)
    try:
        syscalls.lock(fd, exclusive=False, wait=LOCK_S)
        if os.pread(fd, 100, 0) != b"%d" % run:
            raise BusyError(errno.EBUSY, "another run of this job has begun", root)
        yield mixed_dataset(root, run)
    finally:
        os.close(fd)
