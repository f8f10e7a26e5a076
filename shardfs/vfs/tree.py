"""The unsharded tree that the mount, fsspec and the command line show.

Every file and directory has an inode number. Directories and files of the store have numbers below `TABLE_END`,
computed from their paths; a table keeps them while the kernel refers to them. Chunks and their virtual directories have
numbers from `TABLE_END` on, computed from coordinates (`ChunkDirs`); nothing is stored for them.
"""

from __future__ import annotations

import errno
import itertools
import logging
import math
import os
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from shardfs.model.attributes import Attributes
from shardfs.model.blobs import ByteRange
from shardfs.model.errors import NOT_FOUND, CorruptShardError, ShardfsError, is_expected
from shardfs.model.listing import BATCH, REST, Batch
from shardfs.shards.shard_indices import REPLACED
from shardfs.storage import retry
from shardfs.storage.cache import ByteLRU, nothing
from shardfs.storage.load_ahead import load_ahead
from shardfs.storage.open_store import open_store
from shardfs.vfs.chunk_dirs import ChunkDirs, NameMeaning, Target
from shardfs.vfs.directories import StoreDirectories
from shardfs.vfs.discovery import NATIVE, Datasets
from shardfs.vfs.inodes import ROOT, TABLE_END, TOP
from shardfs.vfs.nodes import ChunkNode, DirectoryNode, DocumentNode, NodeTable
from shardfs.vfs.source_datasets import directory_mtime
from shardfs.vfs.stored_files import ForeignFiles, StoredFiles, listed_by_name
from shardfs.vfs.survey import Survey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from shardfs.config.options import Options
    from shardfs.model.collection import Located
    from shardfs.model.dataset import Problem
    from shardfs.model.listing import EntryRow

log = logging.getLogger(__name__)


class Tree:
    """The unsharded tree of a source. Thread-safe.

    Every method may block on the store; before that, the tree calls the `waiting` hook.

    Attributes:
        nodes: the files and directories of the store that are known, with their inode numbers.
        datasets: opens directories and finds collections.
        directories: the directories of the store.
        survey: queries about the whole source.
        retry: the retry policy of a remote store; None for a local store.
        follows_documents: read documents again after `index_ttl_s`, at lookups. A writable tree does so itself.
    """

    def __init__(self, datasets: Datasets) -> None:
        self.datasets = datasets
        self.store = datasets.store
        self.retry: retry.RetryPolicy | None = getattr(datasets.store, "retry", None)
        self.hooks = datasets.trees.hooks
        self.hooks.names_changed = self._names_changed
        self.follows_documents = datasets.ttl_s != math.inf
        self.nodes = NodeTable()
        self._files = StoredFiles(self.nodes, datasets)
        self._foreign = ForeignFiles(self._files, datasets)
        self.directories = StoreDirectories(self.nodes, self._files, datasets)
        self.note_read = self._note_read if self.store.read_ahead is not None and not self.store.remote else None
        self.survey = Survey(self.directories, self._files, datasets)

    # ---- the calls of a file system ----

    def lookup(self, parent: int, name: bytes) -> Attributes:
        """Return the child of a directory. Raise FileNotFoundError, another OSError or CorruptShardError.

        With `follows_documents`, documents that have changed in the source are read again first.
        """
        if parent >= TABLE_END:
            chunks = self._chunks_of(parent)
            self._follow_array(chunks)
            if chunks.is_former:
                return self.lookup(self._present_number(chunks, parent), name)
            return chunks.lookup(parent, name) or self._foreign.lookup(chunks, parent, os.fsdecode(name))
        directory = self.nodes.directory(parent)
        self._follow(directory)
        if self.follows_documents and self.datasets.open(directory).is_consolidated(os.fsdecode(name)):
            for below in self.outdated_below(directory.path, self.datasets.ttl_s):
                self.renew(below, renumbers=True)
        return self.directories.lookup(directory, name, self.datasets.ttl_s if self.follows_documents else math.inf)

    def remember(self, number: int) -> None:
        """Count one more reference from the kernel or a handle to an inode number, until `forget`."""
        self.nodes.remember(number)

    def forget(self, number: int, count: int) -> None:
        """Drop `count` references to an inode number."""
        self.nodes.forget(number, count)

    def _chunks_of(self, number: int) -> ChunkDirs:
        return self.datasets.trees.owner(number)

    def _present_number(self, former: ChunkDirs, number: int) -> int:
        """Return the inode number that a directory of chunks has since another tree has replaced the former one."""
        place = former.numbers.position(number)
        if place.level >= former.depth:
            raise NotADirectoryError(errno.ENOTDIR, "is a chunk", str(number))
        present = self.resolve(former.directory_path(place, is_shown=True)).number
        if present == number:
            raise OSError(errno.ESTALE, REPLACED, former.path)
        return present

    def _names_changed(self, directory: str, names: Iterable[bytes]) -> None:
        """Have the kernel look up names in a directory again, and all names below them."""
        node = self.nodes.directory_at(directory)
        if node is not None:
            self.hooks.invalidate_all(node.number, names)

    def _follow(self, directory: DirectoryNode) -> None:
        """Renew a directory if its documents were to be read again, and have changed."""
        if self.follows_documents and self.datasets.is_outdated(directory, self.datasets.ttl_s):
            self.renew(directory.path, renumbers=True)

    def _follow_array(self, chunks: ChunkDirs) -> None:
        """Renew the directory of a local array. A program may use names of chunks, and none in this directory."""
        if not self.follows_documents or self.store.remote:
            return
        # Most arrays are shown where they are stored, and their node is at hand.
        node = self.nodes.known(chunks.stored_path) if chunks.stored_path else None
        node = node or self.nodes.directory_at(chunks.path)
        if isinstance(node, DirectoryNode):
            self._follow(node)
            with suppress(OSError, CorruptShardError):  # the next lookup in the directory raises the error
                self.datasets.open(node)

    def _follow_above(self, chunks: ChunkDirs) -> None:
        """Before a listing of remote chunks is answered, renew the directories on the way to them.

        Lookups of these directories follow a listing, such as those of `ls -l`. If they waited for documents, the names
        in the listing could expire in the kernel meanwhile, and each of them would cost a lookup and a shard index.
        """
        if self.store.remote:
            for directory in self.nodes.above(chunks.stored_path):
                self._follow(directory)

    def attributes(self, number: int) -> Attributes:
        """Return the attributes of a file or directory.

        Raise FileNotFoundError for a number that was forgotten or a chunk that does not exist, OSError (ESTALE) for a
        number of a collection that was freed, CorruptShardError, or another OSError.
        """
        if number >= TABLE_END:
            return self._chunks_of(number).attributes(number)
        node = self.nodes.get(number)
        if isinstance(node, DocumentNode):
            return self._files.document_attributes(node)
        if isinstance(node, DirectoryNode):
            return Attributes(number, True, 0, directory_mtime(self.store, node.path))
        if isinstance(node, ChunkNode):
            return node.chunks.chunk_attributes(number, node.coords)
        return self._files.attributes(node)

    def chunk_number(self, parent: int, name: bytes) -> int | None:
        """Return the inode number of the chunk with this name, whether it exists or not; None for any other name."""
        target = self.classify_name(parent, name).target
        return None if target is None else target.tree.numbers.of_chunk(target.tree.path, target.coords)

    def is_chunk(self, number: int) -> bool:
        """Return whether an inode number is that of a chunk, which need not exist."""
        return self.target_of(number) is not None

    def read(self, number: int, offset: int, size: int) -> bytes | memoryview:
        """Return `size` bytes of a file from `offset` on; fewer only at its end.

        Raise as `attributes`, or IsADirectoryError.
        """
        if number >= TABLE_END:
            return self._chunks_of(number).read(number, offset, size)
        node = self.nodes.get(number)
        if isinstance(node, DocumentNode):
            return memoryview(node.data)[offset : offset + size]
        if isinstance(node, DirectoryNode):
            raise IsADirectoryError(errno.EISDIR, "is a directory", node.path)
        if isinstance(node, ChunkNode):
            return node.chunks.read_chunk(node.coords, offset, size)
        return self._files.read(node.path, offset, size)

    def read_many(self, requests: Sequence[tuple[int, int, int]]) -> list[bytes | Exception]:
        """Return the bytes of several files, or the exception of each failed read, in the order of the requests.

        A request is (inode number, offset, size). Neighbouring chunks of a shard are fetched together.
        """
        out: list[bytes | Exception] = [b""] * len(requests)
        groups: dict[ChunkDirs, list[int]] = {}
        for i, (number, offset, size) in enumerate(requests):
            chunks = self._chunks_of(number) if number >= TABLE_END else None
            if chunks is not None and chunks.chunks.can_read_many:
                groups.setdefault(chunks, []).append(i)
                continue
            try:
                out[i] = bytes(self.read(number, offset, size))
            except Exception as e:
                if not is_expected(e):
                    log.exception("read of %d", number)
                out[i] = e
        for chunks, members in groups.items():
            coords = [chunks.numbers.coords(requests[i][0]) for i in members]
            parts = [ByteRange(offset, offset + size) for _, offset, size in (requests[i] for i in members)]
            for i, data in zip(members, chunks.chunks.read_many(coords, parts), strict=True):
                out[i] = data
        return out

    def small_listing(self, number: int, limit: int) -> list[EntryRow] | None:
        """Return the entries of a directory that has at most `limit` chunks and nothing else; None for any other."""
        if number < TABLE_END:
            return None
        chunks = self._chunks_of(number)
        self._follow_array(chunks)
        if chunks.is_former:
            return self.small_listing(self._present_number(chunks, number), limit)
        rows = chunks.small_listing(number, limit)
        if rows is None:
            return None
        try:
            alone = next(self._foreign.scan(chunks, chunks.numbers.position(number)), None) is None
        except OSError:  # `scan` yields the chunks first and then raises this error
            return None
        self._follow_above(chunks)
        return rows if alone else None

    def scan(self, number: int, cookie: int = 0) -> Iterator[Batch]:
        """Yield the entries of a directory that follow `cookie`, without `.` and `..`. Needs constant memory.

        A damaged index ends the chunks with an entry of size -1 whose lookup raises the error. Raise
        NotADirectoryError, or OSError if the store cannot list the directory.
        """
        chunks: ChunkDirs | None
        if number >= TABLE_END:
            chunks = self._chunks_of(number)
            self._follow_array(chunks)
            if chunks.is_former:
                yield from self.scan(self._present_number(chunks, number), cookie)
                return
            place = chunks.numbers.position(number)
            if place.level >= chunks.depth:
                raise NotADirectoryError(errno.ENOTDIR, "is a chunk", str(number))
            further = self._foreign.scan(chunks, place)
        else:
            node, place = self.nodes.directory(number), TOP
            if not cookie:
                self._follow(node)
            content, further = self.datasets.open(node), self.directories.scan(node)
            chunks = content.chunks if content.chunks is not None and content.chunks.root is None else None
        if chunks is not None and cookie < REST - 1:
            try:
                for batch in chunks.listing.scan(place, cookie):
                    self._follow_above(chunks)
                    yield batch
            except CorruptShardError as e:
                # Opening this entry fails, at best with this error. One of the listing would make `cp -r` skip it all.
                name = e.key.rsplit("/", 1)[-1].partition("[")[0]
                entry = listed_by_name(f"{chunks.directory_path(place)}/{name}")
                self.datasets.damage.put(entry.number, e, math.inf)
                yield Batch.from_entries([(os.fsencode(name), entry)], REST - 2)
        yield from _batches(further, cookie)

    def statvfs(self) -> os.statvfs_result | None:
        """Return the file system statistics of a local source; None for a remote one."""
        return self.store.statvfs()

    def xattrs(self, number: int) -> dict[str, bytes]:
        """Return the `user.shardfs.*` attributes with the location of a stored chunk; none for other files.

        Raise FileNotFoundError for a chunk that does not exist.
        """
        target = self.target_of(number)
        where = target.tree.shards.locate(target.coords) if target is not None else None
        if where is None:
            return {}
        return {
            "user.shardfs.shard": os.fsencode(where.shard),
            "user.shardfs.offset": b"%d" % where.offset,
            "user.shardfs.nbytes": b"%d" % where.size,
            "user.shardfs.codecs": ",".join(where.codecs).encode(),
        }

    def costly_xattrs(self, number: int) -> dict[str, bytes]:
        """Return the `user.shardfs.*` attributes with the live and dead bytes of an array; none for other files.

        Reads each of its indices.
        """
        chunks = self._array(number)
        if chunks is None:
            return {}
        live, dead = chunks.shards.usage()
        return {"user.shardfs.live": b"%d" % live, "user.shardfs.dead": b"%d" % dead}

    def _array(self, number: int) -> ChunkDirs | None:
        node = self.nodes.get(number) if number < TABLE_END else None
        return self.datasets.open(node).chunks if isinstance(node, DirectoryNode) else None

    # ---- paths and collections ----

    def resolve(self, path: str) -> Attributes:
        """Walk a path from the root and return its attributes.

        Raise FileNotFoundError or NotADirectoryError like `stat`.
        """
        attributes = Attributes(ROOT, True, 0, 0)
        parts = [p for p in path.split("/") if p and p != "."]
        if ".." in parts:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        for part in parts:
            try:
                attributes = self.lookup(attributes.number, os.fsencode(part))
            except FileNotFoundError as e:  # the error names the whole path instead of its last component
                raise FileNotFoundError(errno.ENOENT, e.strerror or os.strerror(errno.ENOENT), path) from e
        if path.endswith("/") and not attributes.directory:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return attributes if parts else self.attributes(ROOT)

    def number(self, path: str) -> int:
        """Return the inode number of a file to read. Raise as `resolve`.

        A chunk gets its number without a check that it exists; reading it raises the error. On a remote store, this
        saves a request for the modification time of the shard.
        """
        parent, _, name = path.rstrip("/").rpartition("/")
        directory = self.resolve(parent).number
        number = None
        if directory >= TABLE_END:
            number = self._chunks_of(directory).number(directory, os.fsencode(name))
        elif (chunks := self._array(directory)) is not None and chunks.root is None:
            number = chunks.number(None, os.fsencode(name))
        return self.resolve(path).number if number is None else number

    def shown_path(self, number: int) -> str:
        """Return the path of a known inode number; "" for a number that the tree has forgotten.

        Raise OSError (ESTALE) for a number of a collection that was freed.
        """
        try:
            if number < TABLE_END:
                return self.nodes.shown_path(number)
            chunks = self._chunks_of(number)
        except FileNotFoundError:
            return ""
        place = chunks.numbers.position(number)
        if place.level < chunks.depth:
            return chunks.directory_path(place, is_shown=True)
        return chunks.chunk_path(chunks.numbers.coords(number))

    def collection(self, path: str) -> ChunkDirs:
        """Return the collection shown in a directory.

        Raise FileNotFoundError if there is none, and the errors of `resolve`.
        """
        chunks = self._array(self.resolve(path).number)
        if chunks is None:
            raise FileNotFoundError(errno.ENOENT, "no sharded collection", path)
        return chunks

    def target_of(self, number: int) -> Target | None:
        """Return the chunk with this inode number, which need not exist; None if the number is not that of a chunk.

        Raise OSError (ESTALE) for a number of a collection that was freed.
        """
        if number >= TABLE_END:
            chunks = self._chunks_of(number)
            is_chunk = number - chunks.first >= chunks.directories
            return Target(chunks, chunks.numbers.coords(number)) if is_chunk else None
        with suppress(FileNotFoundError):
            node = self.nodes.get(number)
            return Target(node.chunks, node.coords) if isinstance(node, ChunkNode) else None
        return None

    def locate(self, path: str) -> Located:
        """Return the location of a stored chunk. Raise FileNotFoundError if there is no stored chunk at the path."""
        target = self.target_of(self.resolve(path).number)
        where = target.tree.shards.locate(target.coords) if target is not None else None
        if where is None:
            raise FileNotFoundError(errno.ENOENT, "is not a chunk", path)
        return where

    def collections(self) -> Iterator[ChunkDirs]:
        """Yield all sharded collections. Opens every directory that may hold one."""
        return self.directories.collections()

    def problems(self) -> list[Problem]:
        """Return the problems found so far: directories that were not expanded, with reasons."""
        return list(self.datasets.problems)

    def caches(self) -> dict[str, dict[str, int]]:
        """Return `hits`, `misses`, `bytes` and `limit` (in bytes) of the caches "index" and "chunk"."""
        return {
            name: {"hits": cache.hits, "misses": cache.misses, "bytes": cache.nbytes, "limit": cache.limit}
            for name, cache in (("index", self.datasets.index_cache), ("chunk", self.datasets.chunk_cache))
        }

    # ---- for the writable tree over this one ----

    def classify_name(self, directory: int, name: bytes) -> NameMeaning:
        """Return the kind of a name in a directory, whether the file exists or not.

        Raise CorruptShardError for bad documents.
        """
        if directory >= TABLE_END:
            return self._chunks_of(directory).classify_name(directory, name)
        return self.directories.classify_name(directory, name)

    def is_outdated(self, number: int) -> bool:
        """Return whether the path of a file has another inode number now: the document or the array has changed."""
        if number < TABLE_END:
            return self.directories.is_outdated(number)
        try:
            chunks = self._chunks_of(number)
        except OSError:
            return True
        # chunks outside of a smaller shape keep their numbers
        return chunks.is_frozen or (chunks.is_former and chunks.shapes[-1].contains(chunks.numbers.coords(number)))

    def outdated_below(self, path: str, age_s: float) -> list[str]:
        """Return the paths of opened directories, at `path` and below, whose documents have changed in the source.

        Documents that were read at most `age_s` seconds ago count as unchanged; the others are read again.
        """
        nodes = [node for node in self.nodes.below(path) if isinstance(node, DirectoryNode)]
        is_outdated = partial(self.datasets.is_outdated, age_s=age_s)
        return [node.path for node, outdated in load_ahead(self.store.read_ahead, is_outdated, nodes) if outdated]

    def is_reformed(self, path: str) -> bool:
        """Return whether an array at `path` or below has another form or fill value in the source."""
        return any(map(self.datasets.forms.is_changed, self.datasets.trees.below(path)))

    def is_virtual(self, number: int) -> bool:
        """Return whether an inode number is that of a directory or a chunk of a sharded collection."""
        return number >= TABLE_END

    def is_array(self, number: int) -> bool:
        """Return whether an inode number is that of a sharded array's directory."""
        return self._array(number) is not None

    def chunks_in(self, directory: int) -> ChunkDirs | None:
        """Return the collection of a sharded array's directory or of a directory of its chunks; None for another."""
        return self._chunks_of(directory) if directory >= TABLE_END else self.directories.content(directory).chunks

    def chunk_tree(self, number: int) -> ChunkDirs | None:
        """Return the collection that has a directory with this inode number; None for any other number."""
        chunks = self._chunks_of(number) if number >= TABLE_END else None
        return chunks if chunks is not None and number - chunks.first < chunks.directories else None

    def is_implied(self, directory: int, name: str) -> bool:
        """Return whether a directory is shown only because documents name it.

        Then the store has no such directory, or the directory contains no shard.
        """
        return directory < TABLE_END and self.directories.is_implied(directory, name)

    def is_closed(self, path: str) -> bool:
        """Return whether a path, which need not exist, is inside an array, where shardfs looks for no datasets."""
        while path:
            path = path.rpartition("/")[0]
            with suppress(*NOT_FOUND, CorruptShardError):
                return self.directories.content(self.resolve(path).number).passed.closed
        return False

    @property
    def expires(self) -> bool:
        """Whether the tree looks at shards again, to show what other programs have changed."""
        return math.isfinite(self.datasets.ttl_s)

    @property
    def documents_ttl_s(self) -> float:
        """The seconds after which a writable tree reads documents again. For a local store 0: this costs little."""
        return self.datasets.ttl_s if self.store.remote else 0

    def may_be_old(self, age_s: float) -> bool:
        """Return whether documents read `age_s` seconds ago may be outdated."""
        return math.isfinite(self.documents_ttl_s) and age_s >= self.documents_ttl_s

    def renew(self, path: str, *, renumbers: bool = False) -> list[str]:
        """Read the metadata of a directory and everything below again. Return the shown paths of the collections there.

        `renumbers`: documents get other inode numbers, because the kernel may know bytes of the present ones.
        """
        self.datasets.renewals.add(path)
        self.changed(path)
        nodes = self.nodes.below(path)
        paths = self.datasets.trees.detach(path)
        for node in nodes:
            if isinstance(node, DirectoryNode):
                self.datasets.damage.invalidate(node.number)
                node.content = None
        if renumbers:
            list(self.directories.generated(path))
        for node in nodes:
            parent, _, name = node.path.rpartition("/")
            with suppress(OSError, CorruptShardError):
                if node.number != ROOT:
                    self.directories.renew(self.nodes.directory(self.resolve(parent).number), node, name)
        return paths

    def changed(self, path: str) -> None:
        """Invalidate caches after a file or directory was created, removed or written in the store."""
        self._files.invalidate(path)
        while path:  # parent directories may be new, too
            path = path.rpartition("/")[0]
            with suppress(OSError, CorruptShardError):
                number = self.resolve(path).number
                if number >= TABLE_END:
                    self._foreign.invalidate(self._chunks_of(number), number)

    def moved(self, old: str, new: str) -> None:
        """Update all nodes of a directory that was renamed in the store. They keep their inode numbers."""
        for directory in (old, new):
            self.datasets.renewals.add(directory)
        for node in self.nodes.move(old, new):
            if isinstance(node, DirectoryNode):
                node.inside = node.path
                node.content = None
        self.datasets.trees.move(old, new)
        for directory in (old, new):  # other files with the same names may be created at both paths
            self.store.reopen_below(directory)
        self.renew(new)

    def _note_read(self, number: int) -> None:
        """Note that the server reads a chunk of a slow local source, so that the next ones are read ahead."""
        if number >= TABLE_END:
            tree = self._chunks_of(number)
            coords = tree.numbers.coords(number)
            with suppress(OSError, ShardfsError):  # the read itself raises the error
                chunk = tree.chunks.layer.locate(coords)
                if chunk is not None:
                    tree.chunks.fetched_ahead(coords, chunk)


def _batches(entries: Iterator[tuple[str, Attributes]], cookie: int) -> Iterator[Batch]:
    """Yield the entries of a directory that are not chunks and follow `cookie`."""
    position = max(cookie, REST)
    following = itertools.islice(entries, position - REST, None)
    while part := [(os.fsencode(name), attributes) for name, attributes in itertools.islice(following, BATCH)]:
        yield Batch.from_entries(part, position)
        position += len(part)


def open_tree(
    source: str,
    *,
    index_cache_bytes: int = 256 << 20,
    chunk_cache_bytes: int = 256 << 20,
    spent_bytes: int | None = None,
    index_ttl_s: float = math.inf,
    layout: str = NATIVE,
    skip_unsupported: bool = False,
    chunk_codec: str | None = None,
    store_timeout_s: float = retry.TIMEOUT_S,
    store_retries: int = retry.RETRIES,
    prefetch_bytes: int = 0,
    may_be_empty: bool = False,
    waiting: Callable[[], None] = nothing,
    make: Callable[[Datasets], Tree] = Tree,
    **store_options: Any,
) -> Tree:
    """Return the unsharded tree of a path or fsspec URL. `store_options` are further arguments of `open_store`.

    `make` is `Tree`, or makes a tree of a subclass.

    `spent_bytes` of the chunk cache are for chunks that were read to their end, if the reader caches them itself.

    Raise FileNotFoundError or another OSError if the source cannot be read. Raise NotADatasetError if the source holds
    nothing sharded, unless `may_be_empty` is set. Raise UnsupportedError if the layout cannot express a dataset, unless
    `skip_unsupported` is set.
    """
    policy = retry.RetryPolicy(store_timeout_s, store_retries)
    store = open_store(source, waiting=waiting, retry=policy, prefetch=prefetch_bytes, **store_options)
    caches = ByteLRU(index_cache_bytes, waiting), ByteLRU(chunk_cache_bytes, waiting, spent_bytes)
    datasets = Datasets(store, *caches, index_ttl_s, layout, skip_unsupported=skip_unsupported, chunk_codec=chunk_codec)
    tree = make(datasets)
    if not may_be_empty:
        tree.survey.require_dataset()
    elif not store.remote:  # a directory of an object store does not exist before it holds an object
        store.entry("")
    return tree


def open_with_options(source: str, options: Options, **hooks: Any) -> Tree:
    """Return the tree of a source, opened as these options say. `hooks` are further arguments of `open_tree`.

    The source of a writable tree may be empty if new arrays are sharded by a rule.
    """
    return open_tree(
        source,
        storage_options=options.storage_options,
        index_cache_bytes=options.index_cache,
        chunk_cache_bytes=options.chunk_cache,
        index_ttl_s=options.index_ttl,
        follow_symlinks=options.symlinks == "follow",
        layout=options.layout,
        skip_unsupported=options.unsupported == "skip",
        chunk_codec=options.chunk_codec,
        store_timeout_s=options.store_timeout,
        store_retries=options.store_retries,
        prefetch_bytes=options.prefetch,
        connections=options.connections,
        cache_dir=options.cache_dir,
        cache_size=options.cache_size,
        offline=options.offline,
        may_be_empty=options.rw and options.create is not None,
        **hooks,
    )
