"""What `pack` makes of an unsharded source: its arrays with their new shards, its documents, and its other files."""

from __future__ import annotations

import os
from array import array as typed_array
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardfs.formats.create_rules import PARAMETERS, Rule
from shardfs.formats.documents import MAX_DOCUMENT_BYTES
from shardfs.formats.layouts import join
from shardfs.formats.registry import creating_view, format_of
from shardfs.formats.zarr2 import ZARR2
from shardfs.jobs.target import JobTarget, job_state
from shardfs.model.dataset import Problem
from shardfs.model.errors import NotADatasetError, UnsupportedError
from shardfs.model.grid import ravel_many, unravel_many
from shardfs.shards import rewriting
from shardfs.shards.byte_layouts.unsharded import Unsharded
from shardfs.storage.local import LocalStore
from shardfs.vfs.discovery import NATIVE
from shardfs.vfs.nodes import is_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardfs.formats.format import Format
    from shardfs.jobs.shared_work import JobSource
    from shardfs.model.blobs import Blob
    from shardfs.model.collection import Collection
    from shardfs.model.values import U64, Coords
    from shardfs.storage.store import Store
    from shardfs.vfs.nodes import Content, DirectoryNode
    from shardfs.vfs.tree import Tree

ZARR3 = "zarr3"

RAW_CHUNKS: Mapping[str, str] = {"data_encoding": "raw"}
"""Words of the rule for precomputed: shards store the bytes of the chunk files unchanged."""


@dataclass(frozen=True, slots=True)
class PackJob:
    """What to pack, and how: hashable, and can be pickled.

    Args:
        chunks_per_shard: in the axis order of shapes in the source's documents; () lets `shard_bytes` decide.
        shard_bytes: the size of a shard before compression; None for the defaults of `--create`.
        arrays: the directories of the documents of the arrays to pack; () for all arrays.
    """

    source: JobSource
    target: JobSource
    chunks_per_shard: Coords = ()
    shard_bytes: int | None = None
    arrays: tuple[str, ...] = ()

    def opened(self) -> Packing:
        """The opened source, once per process. Raises the errors of `Packing`."""
        return _packing(self)

    def rule(self, format: str) -> Rule:
        """How arrays of a format are sharded."""
        words = RAW_CHUNKS if "data_encoding" in PARAMETERS[format] else {}
        return Rule(format, chunks_per_shard=self.chunks_per_shard, words=words, shard_bytes=self.shard_bytes)

    def state(self) -> bytes:
        """See `job_state`."""
        return job_state("pack", self.source, [self.chunks_per_shard, self.shard_bytes, sorted(self.arrays)])


@lru_cache(2)
def _packing(job: PackJob) -> Packing:
    return Packing(job)


class PackedArray(NamedTuple):
    """An array to pack. `path` is the directory of its chunks in the source, and of its shards in the target."""

    path: str
    source: Collection
    target: Collection

    def number(self, name: str) -> int | None:
        """The number of the chunk with this file name below `path`; None for other names."""
        return self.source.layers[0].format.shard_of(name)

    def is_directory(self, name: str) -> bool:
        """Whether chunk files or shards can be in the directory `name` below `path`."""
        parts = name.split("/")
        for format in (self.source.layers[0].format, self.target.layers[0].format):
            first = format.key(0).split("/")
            if len(parts) < len(first) and format.shard_of("/".join([*parts, *first[len(parts) :]])) is not None:
                return True
        return False

    def file(self, number: int) -> str:
        """The path of a chunk's file in the source."""
        return join(self.path, self.source.layers[0].format.key(number))

    def shard_key(self, shard: int) -> str:
        """The path of a shard in the target."""
        return join(self.path, rewriting.key(self.target, shard))

    def cells(self, numbers: U64) -> U64:
        """The coordinates of chunks in the target. A chunk has the same name there as in the source."""
        stored = unravel_many(numbers, self.source.layers[0].format.grid)
        return self.target.names.coords_many(self.source.names.values(stored))

    def numbers(self, cells: U64) -> U64:
        """The inverse of `cells`."""
        stored = self.source.names.coords_many(self.target.names.values(cells))
        return ravel_many(stored, self.source.layers[0].format.grid)

    def shards(self, numbers: U64) -> U64:
        """The shards of chunks."""
        return self.target.layers[0].format.place_many(self.cells(numbers)).shard


@dataclass
class ArrayPlan:
    """The stored chunks of one array, grouped by their shards: 8 bytes of memory for each chunk."""

    array: PackedArray
    chunks: U64
    shards: U64
    starts: Sequence[int]

    @classmethod
    def of(cls, array: PackedArray, chunks: U64) -> ArrayPlan:
        """The plan for all these chunks."""
        homes = array.shards(chunks) if len(chunks) else np.empty(0, np.uint64)
        order = np.lexsort((chunks, homes))
        shards, starts = np.unique(homes[order], return_index=True)
        return cls(array, chunks[order], shards, starts.tolist())

    def __iter__(self) -> Iterator[tuple[int, U64]]:
        """Yield each shard with its chunks."""
        for shard, start, stop in zip(self.shards.tolist(), self.starts, [*self.starts[1:], None], strict=False):
            yield shard, self.chunks[start:stop]


@dataclass
class SourceSurvey:
    """All files of a source.

    Args:
        files: the number of other files, which are copied.
        problems: files that are not packed; `damaged` ones prevent that the job is finished.
    """

    plans: list[ArrayPlan] = field(default_factory=list)
    files: int = 0
    problems: list[Problem] = field(default_factory=list)


class Packing:
    """An opened job.

    Attributes:
        arrays: the arrays to pack, by path.
        documents: the documents of all datasets in the target, by path.

    Raise UnsupportedError, with all arrays and reasons, if an array cannot be packed; NotADatasetError if the source
    has no unsharded array.
    """

    target: JobTarget
    """Set by `begin`."""

    def __init__(self, job: PackJob) -> None:
        self.job = job
        self.arrays: dict[str, PackedArray] = {}
        self.documents: dict[str, bytes] = {}
        self._hidden: set[str] = set()
        self._refused: list[str] = []
        self._mixed: list[str] = []
        tree = self._tree(NATIVE)
        is_zarr2 = not tree.datasets.documents("") and _has_zarr2(tree.store, "")
        if is_zarr2 or not self._describe(tree):
            tree = self._tree(ZARR3)
            self._describe(tree)
        self.store: Store = tree.store
        self._require_complete()
        self._correct_copies()

    def begin(self) -> None:
        """Open the target for writing: see `JobTarget.begin`."""
        self.target = JobTarget.begin(self.job.target, self.job.state())

    # ---- documents and arrays ----

    def _tree(self, layout: str) -> Tree:
        tree = self.job.source.open(layout=layout, skip_unsupported=True, may_be_empty=True)
        if layout == ZARR3:
            tree.datasets.view = creating_view(ZARR3)  # unlike the view of a mount, it keeps all codecs
        return tree

    def _describe(self, tree: Tree) -> bool:
        """Collect the arrays and documents of all directories; return whether there is an array to pack."""
        for directory in tree.directories.walk():
            content = directory.content
            if content is None or content.dataset is None:
                continue
            if tree.datasets.view is None:
                self._add_native(tree, directory, content)
            else:
                self._add_translated(directory, content)
        self._refused += [f"{p.path or '/'}: {p.why}" for p in tree.problems() if p.skipped or p.damaged]
        return bool(self.arrays or self._refused)

    def _add_native(self, tree: Tree, directory: DirectoryNode, content: Content) -> None:
        dataset, path = content.dataset, directory.inside
        if dataset is None or dataset.format not in (ZARR3, "n5", "precomputed"):
            return
        format, stored = format_of(dataset.format), tree.datasets.documents(path)
        documents = {name: stored[name] for name in format.documents if name in stored}
        if dataset.unsharded and self._is_selected(path):
            if _has_zarr2(tree.store, path):
                self._refused.append(f"{path or '/'}: has documents of Zarr v2, too; delete those of one format")
            documents = self._sharded(path, format, documents, dataset.unsharded)
        self.documents |= {join(path, name): raw for name, raw in documents.items()}

    def _add_translated(self, directory: DirectoryNode, content: Content) -> None:
        path, documents = directory.inside, dict(content.documents)
        if content.chunks is not None:
            collection = content.chunks.collection
            if collection.format != ZARR2.name:
                self._mixed.append(f"{path}: {collection.format} below Zarr v2; pack it alone")
                return
            documents = self._sharded(path, format_of(ZARR3), documents, [collection])
        self.documents |= {join(path, name): raw for name, raw in documents.items()}
        if content.dataset is not None:
            self._hidden |= {join(path, name) for name in content.dataset.hidden}

    def _is_selected(self, path: str) -> bool:
        return not self.job.arrays or path in self.job.arrays

    def _sharded(
        self, path: str, format: Format, documents: Mapping[str, bytes], stored: Sequence[Collection]
    ) -> dict[str, bytes]:
        """The documents with shards. Adds the arrays, or the reason why an array cannot be packed."""
        made = dict(documents)
        try:
            for name, raw in documents.items():
                made |= format.shard(path, name, raw, self.job.rule(format.dataset_formats[0])) or {}
            target = format.open(path, made)
            by_path = {c.path: c for c in target.collections} if target is not None else {}
            for source in stored:
                array = PackedArray(join(path, source.path), source, by_path[source.path])
                self._require_packable(array)
                self.arrays[array.path] = array
        except (ValueError, UnsupportedError) as e:
            self._refused.append(f"{path or '/'}: {e}")
        return made

    def _require_packable(self, array: PackedArray) -> None:
        if not isinstance(array.source.layers[0].format, Unsharded):
            raise ValueError("its chunks are not plain files")
        if why := rewriting.unwritable(array.target):
            raise ValueError(why)
        if array.source.transform is not None or array.target.transform is not None:
            raise ValueError("its chunks would have to be decoded, which pack does not do")

    def _require_complete(self) -> None:
        if not (self.arrays or self._refused or self.job.arrays):
            raise NotADatasetError("no unsharded array found (looked for Zarr v2, Zarr v3, N5, precomputed)")
        refused = [*self._refused, *self._mixed]
        if self.job.arrays and any(a.source.format == ZARR2.name for a in self.arrays.values()):
            refused.append("all arrays of Zarr v2 become Zarr v3 together; omit --array")
        elif missing := [a for a in self.job.arrays if not any(is_in(path, a) for path in self.arrays)]:
            refused.append(f"{', '.join(missing)}: no unsharded array has its document there")
        if refused:
            raise UnsupportedError("nothing was packed: " + "; ".join(refused))

    def _correct_copies(self) -> None:
        """Let consolidated metadata of Zarr v3 groups describe the arrays with shards."""
        format = format_of(ZARR3)
        for key, raw in list(self.documents.items()):
            path, _, name = key.rpartition("/")
            if name in format.documents and (below := format.references(path, name, raw)):
                stored = {at: made for at in below if (made := self.documents.get(join(path, at))) is not None}
                self.documents[key] = format.edit(path, stored, name, raw)[name]

    # ---- files ----

    def document_names(self) -> set[str]:
        """The paths of documents in the source and in the target. A document need not exist in both."""
        return self._hidden.union(self.documents)

    def survey(self) -> SourceSurvey:
        """List the source."""
        found, chunks = SourceSurvey(), {path: typed_array("Q") for path in self.arrays}
        for array, key in self._walk("", None):
            name = key if array is None else key.removeprefix(array.path).lstrip("/")
            if array is not None and (number := array.number(name)) is not None:
                chunks[array.path].append(number)
            elif array is None or (problem := _stray(array, name, key)) is None:
                found.files += 1
            else:
                found.problems.append(problem)
        for path, numbers in chunks.items():
            found.plans.append(ArrayPlan.of(self.arrays[path], np.frombuffer(numbers, np.uint64)))
        return found

    def other_files(self) -> Iterator[str]:
        """Yield the paths of all files that are neither documents of datasets nor chunks of packed arrays."""
        for array, key in self._walk("", None):
            name = key if array is None else key.removeprefix(array.path).lstrip("/")
            if array is None or (array.number(name) is None and _stray(array, name, key) is None):
                yield key

    def _walk(self, path: str, array: PackedArray | None) -> Iterator[tuple[PackedArray | None, str]]:
        """Yield all files but documents, each with the array of whose directory it is."""
        array = self.arrays.get(path, array)
        for entry in self.store.scan(path):
            key = join(path, entry.name)
            if entry.directory and not self._is_link(key):
                yield from self._walk(key, array)
            elif key not in self.documents and key not in self._hidden:
                yield array, key

    def _is_link(self, key: str) -> bool:
        """Whether a directory is a symbolic link. Following it could lead around in circles."""
        return isinstance(self.store, LocalStore) and os.path.islink(self.store.path(key))

    def blob(self, key: str) -> Blob:
        """Open a file of the source. It does not stay open in the store."""
        blob = self.store.open(key)
        self.store.reopen(key)
        return blob

    def finish(self) -> None:
        """Write all documents, and end the job."""
        self.target.finish((key, partial(self.documents.__getitem__, key)) for key in self.documents)


def _has_zarr2(store: Store, path: str) -> bool:
    """Whether a directory has documents of Zarr v2."""
    return ZARR2.open(path, store.documents(path, ZARR2.documents, MAX_DOCUMENT_BYTES)) is not None


def _stray(array: PackedArray, name: str, key: str) -> Problem | None:
    """The problem of a file that has the name of a chunk, but is none of the array; None for other files."""
    if array.source.compressible and array.number(name.rpartition(".")[0]) is not None:
        return Problem(key, "is a compressed chunk file; decompress the chunk files first", damaged=True)
    names, (*above, last) = array.target.names, os.fsencode(name).split(b"/")
    parts = [*(above[1:] if names.prefix and above[:1] == [names.prefix] else above), last]
    if len(parts) == len(names.dims) and all(names.reserved(i, part) for i, part in enumerate(parts)):
        return Problem(key, "was left out: it has the name of a chunk beyond the edge of the array")
    return None
