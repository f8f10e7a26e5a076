"""`ShardIndices`: where the chunks of one layer are, from index pages that are read once and cached."""

from __future__ import annotations

import itertools
import logging
import math
import weakref
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from shardfs.model.collection import MISSING
from shardfs.model.errors import CorruptShardError, DanglingLinkError, ShardfsError, StaleShardError, UnsupportedError
from shardfs.model.shard_format import ShardIndex
from shardfs.shards.index_reader import MAX_OBJECT, read_page, read_root
from shardfs.shards.stored_chunk import StoredChunk
from shardfs.storage.blob_views import BytesBlob
from shardfs.storage.cache import OVERHEAD
from shardfs.storage.load_ahead import load_ahead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from shardfs.model.blobs import Blob, Stat
    from shardfs.model.collection import ShardSource
    from shardfs.model.shard_format import Checksum, Index, Placement, ShardFormat
    from shardfs.model.values import U64, Coords, Version
    from shardfs.storage.cache import ByteLRU
    from shardfs.storage.read_ahead import ReadAhead

log = logging.getLogger(__name__)

T = TypeVar("T")

UNREADABLE = (ShardfsError, OSError, ValueError)
"""Exceptions of a shard that cannot be read now."""

PART = 4
"""Pages are loaded ahead into at most one part in so many of the cache, so that they stay until they are needed."""

PAGE_BYTES = 1 << 20
"""Assumed size of a page whose number of entries is unknown."""

LEAST_TTL_S = 5.0
"""Nothing is loaded ahead if cached pages expire sooner."""

REPLACED = "the array was removed, or created anew with other codecs or chunks; open the file again"
"""Why a chunk cannot be read under an inode number that it had before."""

DAMAGE_TTL_S = 5.0
"""Seconds for which an undecodable page stays cached, so that an `ls` of its chunks reads the page once."""


_new = tuple.__new__


class IndexPage:
    """A decoded index page, the version of its shard, and the type of the chunks' checksums.

    `expires` is a time of `time.monotonic`, not later than that of the page in the cache.
    """

    __slots__ = ("blob", "checksum", "expires", "index", "version")

    def __init__(
        self, index: Index, blob: Blob, version: Version, checksum: Checksum | None = None, expires: float = math.inf
    ) -> None:
        self.index = index
        self.version = version
        self.checksum = checksum
        self.expires = expires
        # A weak reference, because the store limits the number of open descriptors, not the size of the index cache.
        # A remote blob is kept: it reads the version of the page. It has no descriptor, and `version` is None.
        self.blob = (lambda: blob) if version is None else weakref.ref(blob)


class _Damaged(NamedTuple):
    error: CorruptShardError


def _entries(page: object) -> Index:
    """Return the entries of a cached page; none of an absent or damaged one."""
    return page.index if type(page) is IndexPage else ShardIndex.empty()


ABSENT = object()
"""The cached page of a shard that is empty or does not exist."""

BLOB_BYTES = 500
"""Approximate memory of a remote blob."""

_ids = itertools.count()


class ShardIndices:
    """The index pages, roots and attributes of one layer's shards. Thread-safe.

    Everything is cached in `cache`, which bounds the memory. Keys are (id of this object, shard, page) for pages, and
    (id, kind, number) for other values. Another id makes all of them unreachable.

    Args:
        path: the path of the collection, for messages.
        ttl_s: seconds for which a page, or the absence of a shard, stays cached.
        pool: loads pages of remote shards before a listing needs them.

    Attributes:
        on_reload: called with a shard, a page, and the page's entries before and now, if a page is read again. No
            thread sees the new page earlier.
        is_frozen: another array is stored here now, so chunks are not looked up any more.
    """

    def __init__(
        self,
        path: str,
        format: ShardFormat,
        source: ShardSource,
        cache: ByteLRU,
        ttl_s: float,
        pool: ReadAhead | None = None,
    ) -> None:
        self.path = path
        self.format = format
        self.source = source
        self.ttl_s = ttl_s
        self._cache = cache
        self._id = next(_ids)
        self._room = cache.limit // PART
        self.on_reload: Callable[[int, int, Index, Index], None] = lambda shard, page_number, before, after: None
        self.is_frozen = False
        self.pool = pool if ttl_s >= LEAST_TTL_S and self._room >= PAGE_BYTES else None

    # ---- lookups ----

    def at(self, placement: Placement, coords: Coords) -> StoredChunk | None:
        """Return the location of a chunk with this placement; None if the chunk is absent.

        Raise as `ChunkLayer.locate`. Costs no request if the page is cached.
        """
        shard, page_number, slot = placement
        page = self._cache.peek((self._id, shard, page_number))
        if type(page) is not IndexPage:
            page = self.page(shard, page_number)
            if page is None:
                return None
        try:
            extent = page.index.find(slot)
        except ValueError as e:
            raise CorruptShardError(self.path, self.source.key(shard), f"chunk {coords}: {e}", slot) from e
        if extent is None:
            return None
        start, size = extent
        blob = page.blob()
        if blob is None:
            blob = self._open_again(shard, page_number, page)
            if blob is None:
                return self.at(placement, coords)
        return _new(StoredChunk, (blob, start, size, page.checksum, page.expires))  # twice as fast as the constructor

    def _open_again(self, shard: int, page_number: int, page: IndexPage) -> Blob | None:
        """Return the shard's blob if it has the version of the page. Otherwise drop the page and return None."""
        try:
            blob = self.source.open(shard)
            if page.version is None or blob.stat().version == page.version:
                page.blob = weakref.ref(blob)
                return blob
        except (FileNotFoundError, ValueError):  # removed or undecodable; the page must be read again
            pass
        self._cache.expire((self._id, shard, page_number))
        return None

    def page(self, shard: int, page_number: int) -> IndexPage | None:
        """Return a page; None if the shard is absent or the page empty.

        Raise CorruptShardError if it is damaged, StaleShardError if the array was replaced, and OSError if the store
        fails.
        """
        key = (self._id, shard, page_number)  # taken first: no later reader uses what is loaded for it after a freeze
        if self.is_frozen:
            raise StaleShardError(f"{self.path or '/'}: {self.source.key(shard)}: {REPLACED}")
        page = self._cache.peek(key)
        if page is None:
            page = self._cache.get(key, lambda: self._load(shard, page_number))
        if page is ABSENT:
            return None
        if type(page) is _Damaged:
            # without its traceback: a cached error that is raised often would keep the frames of every raise alive
            raise page.error.with_traceback(None)
        return page  # type: ignore[no-any-return]

    def cached_page(self, shard: int, page_number: int) -> IndexPage | None:
        """Return a page if it is cached and can be read; else None. Sends no request."""
        page = self._cache.peek((self._id, shard, page_number))
        return page if type(page) is IndexPage else None

    def pages(self, shard: int, first: int) -> Iterator[int]:
        """Yield the numbers of a shard's nonempty pages, ascending, from `first` on; none for an absent shard.

        Raise CorruptShardError if the root cannot be read or decoded, and OSError if the store fails. For a format with
        one page, only `page` raises that CorruptShardError.
        """
        pages = [0]
        try:
            root = self._twice_if_replaced(shard, lambda: self._root(shard, self._open_shard(shard)))
            pages = self.format.nonempty_pages(root).tolist()
        except (IsADirectoryError, PermissionError, DanglingLinkError) as e:
            if self.format.page_bits:
                raise self._unreadable(shard, e) from e
        except (FileNotFoundError, NotADirectoryError):
            return
        except ValueError as e:
            if self.format.page_bits:
                raise self._damage(shard, str(e)) from e
        yield from (n for n in pages if n >= first)

    def stat(self, shard: int, blob: Blob | None = None) -> Stat:
        """Return the attributes of a shard object, with at most one request. `blob`: the shard, if it is open.

        Raise FileNotFoundError if it is absent, and CorruptShardError if it cannot be opened or decoded.
        """

        def load() -> tuple[Stat, int, float]:
            try:
                return (blob or self._open_shard(shard)).stat(), 100, self.ttl_s
            except (IsADirectoryError, PermissionError, DanglingLinkError) as e:
                raise self._unreadable(shard, e) from e
            except ValueError as e:
                raise self._damage(shard, str(e)) from e

        return self.cached("stat", shard, load)

    def is_absent(self, shard: int) -> bool:
        """Return whether a shard does not exist. Costs no request if its root or its only page is cached."""
        try:
            root = self._root(shard, self.source.open(shard))
            return root is None and self.page(shard, 0) is None
        except FileNotFoundError:
            return True
        except (CorruptShardError, StaleShardError, ValueError):
            return False

    def existing(self) -> tuple[U64, CorruptShardError | None]:
        """Return `ShardSource.existing`. It is cached, with 8 bytes for each shard."""

        def load() -> tuple[tuple[U64, CorruptShardError | None], int, float]:
            shards, damage = self.source.existing()
            return (shards, damage), shards.nbytes, self.ttl_s if damage is None else DAMAGE_TTL_S

        return self.cached("existing", 0, load)

    # ---- listings ----

    def each(self, homes: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Yield these pairs of a shard and a page, in order, when `page` and `stat` have loaded what they return.

        On a local store, nothing is loaded before the caller asks for it.
        """
        return iter(homes) if self.pool is None else self._ahead(self.load_quietly, homes, first=self.pool.connections)

    def along(self, place: Callable[[int], Placement], n: int) -> Iterator[tuple[int, int]]:
        """Return `each` of the pages in a row of `n` chunks; nothing on a local store, where they need no loading."""
        if self.pool is None:
            return iter(())
        return self.each(home for home, _ in itertools.groupby(place(last)[:2] for last in range(n)))

    def shards(self, shards: Iterable[int]) -> Iterator[int]:
        """Yield these shards, in order, when the first page of each is loaded."""
        return iter(shards) if self.pool is None else self._ahead(self._load_first, shards, first=2)

    def _ahead(self, load: Callable[[T], int], items: Iterable[T], first: int) -> Iterator[T]:
        entries = self.format.capacity(0) if all(self.format.grid) else None
        first = max(min(first, self._room // (16 * entries if entries else PAGE_BYTES)), 1)
        return (item for item, _ in load_ahead(self.pool, load, items, first=first, weigh=int, room=self._room))

    def _load_first(self, shard: int) -> int:
        with suppress(*UNREADABLE):
            return self.load_quietly((shard, next(self.pages(shard, 0), 0)))
        return 0

    def load_quietly(self, home: tuple[int, int]) -> int:
        """Cache a page, given as (shard, page), and the attributes of its shard. Return the bytes that they take.

        Errors are ignored: the caller of `page` gets them.
        """
        shard, page_number = home
        with suppress(*UNREADABLE):
            page = self.page(shard, page_number) if self.pool is not None else None
            if page is not None:
                self.stat(shard)
                if page.index.nbytes > self._room:  # the cache may not keep it until it is needed
                    self.pool = None
                return page.index.nbytes + OVERHEAD
        return OVERHEAD

    # ---- the cache ----

    def cached(self, kind: str, page_number: int, load: Callable[[], tuple[T, int, float]]) -> T:
        """Return the cached value of this kind for a shard or an object; if there is none, what `load` makes.

        `load` returns the value, its size in bytes and the seconds for which it is valid (see `ByteLRU.get`). Raise its
        errors.
        """
        return self._cache.get((self._id, kind, page_number), load)

    def loaded(self, chunk: StoredChunk) -> float:
        """Return when the page of a chunk was loaded, as a time of `time.monotonic`; -inf if pages do not expire."""
        return -math.inf if self.ttl_s == math.inf else chunk.expires - self.ttl_s

    def invalidate(self, kind: str, page_number: int) -> None:
        """Invalidate a value of `cached`."""
        self._cache.invalidate((self._id, kind, page_number))

    def invalidate_page(self, shard: int, page_number: int) -> None:
        """Drop everything cached for a page of a shard, so that the next lookup reads the current shard."""
        self._invalidate_shard(shard)
        # The page expires last. A thread that began to read it earlier has the old shard open, and its version check
        # fails.
        self._cache.expire((self._id, shard, page_number))

    def invalidate_all(self) -> None:
        """Drop everything that is cached."""
        self._id = next(_ids)

    def _invalidate_shard(self, shard: int) -> None:
        self.source.reopen(shard)
        self.invalidate("blob", shard)
        self.invalidate("stat", shard)
        self.invalidate("root", shard)

    # ---- reading ----

    def _load(self, shard: int, page_number: int) -> tuple[object, int, float]:
        if self.ttl_s != math.inf:
            self._invalidate_shard(shard)  # page, root and modification time must have the same version
        page: object
        try:
            page = self._twice_if_replaced(shard, lambda: self._read_page(shard, page_number)) or ABSENT
        except (IsADirectoryError, PermissionError, DanglingLinkError) as e:
            page = _Damaged(self._unreadable(shard, e))
        except (FileNotFoundError, NotADirectoryError):
            page = ABSENT if shard >= self.source.required else _Damaged(self._damage(shard, MISSING))
        except (ValueError, UnsupportedError) as e:
            page = _Damaged(self._damage(shard, str(e)))
        former, index = self._cache.former((self._id, shard, page_number)), _entries(page)
        if type(former) is IndexPage:
            self.on_reload(shard, page_number, former.index, index)
        return (page, 1000, DAMAGE_TTL_S) if type(page) is _Damaged else (page, index.nbytes, self.ttl_s)

    def _damage(self, shard: int, why: str) -> CorruptShardError:
        error = CorruptShardError(self.path, self.source.key(shard), why)
        log.warning("%s", error)
        return error

    def _unreadable(self, shard: int, error: OSError) -> CorruptShardError:
        """Return the error for an unreadable local shard.

        For a remote store, raise `error`: the refusal may be temporary.
        """
        if not self.source.is_local:
            raise error
        return self._damage(shard, f"should be a file that can be read, but {error.strerror}")

    def _open_shard(self, shard: int) -> Blob:
        """Return the shard. A remote one stays open, because everything read from one blob has the same version."""
        if self.source.is_local:
            return self.source.open(shard)

        def load() -> tuple[Blob, int, float]:
            blob = self.source.open(shard)
            return blob, BLOB_BYTES, 0 if isinstance(blob, BytesBlob) else self.ttl_s

        return self.cached("blob", shard, load)

    def _twice_if_replaced(self, shard: int, read: Callable[[], T]) -> T:
        """Return `read()`. Call it again if the shard was replaced meanwhile, or may have changed in place.

        A changed index of a local shard may refer to bytes beyond the end that the shard had when it was opened.
        """
        try:
            return read()
        except StaleShardError:
            pass
        except ValueError:
            if not self.source.is_local:
                raise
        self._invalidate_shard(shard)
        return read()

    def _read_page(self, shard: int, page_number: int) -> IndexPage | None:
        blob, walks = self._open_shard(shard), self.format.walk is not None
        root = self._root(shard, blob)
        local = blob.fd >= 0 or isinstance(blob, BytesBlob)
        index = read_page(self.format, shard, page_number, root, blob, blob.stat().size if local else MAX_OBJECT)
        if index is None:
            return None
        if walks:
            self.stat(shard, blob)  # caches the attributes, which are known now and needed soon
        size, _, version = blob.stat() if local or walks else (MAX_OBJECT, 0, None)
        checksum = index.checksum if isinstance(index, ShardIndex) else None
        return IndexPage(index.checked(size), blob, version if local else None, checksum, monotonic() + self.ttl_s)

    def _root(self, shard: int, blob: Blob) -> bytes | None:
        where = self.format.root_request()
        if where is None:
            return None
        # The root must have the version of the blob. A remote blob stands for its version.
        version: object = blob.stat().version if blob.fd >= 0 or isinstance(blob, BytesBlob) else blob

        def load() -> tuple[tuple[bytes | None, object], int, float]:
            try:
                data = read_root(self.format, blob) or b""
            except FileNotFoundError:
                return (None, version), 0, self.ttl_s
            whole = len(data) == where.stop - where.start
            return (data, version), len(data), self.ttl_s if whole else DAMAGE_TTL_S

        root, root_version = self.cached("root", shard, load)
        if root_version != version:  # another thread read the root before or after the shard was replaced
            self.invalidate("root", shard)
            root = load()[0][0]
        if root is None:
            raise FileNotFoundError(self.source.key(shard))
        return root
