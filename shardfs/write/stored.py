"""What was stored for a chunk when a program first wrote over it, and the one judge of whether that is still stored.

The judge is the same for every store and every stored form of a chunk. What is not known to be unchanged is a conflict.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import mmh3

from shardfs.model.blobs import ByteRange
from shardfs.model.errors import CorruptShardError
from shardfs.model.write_plan import chunks_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Set

    from shardfs.model.blobs import Blob
    from shardfs.model.values import Version
    from shardfs.vfs.chunk_dirs import Target

K = TypeVar("K")

ABSENT = ""
"""The digest of a chunk that is not stored."""

CHANGED = "the stored chunk was changed by another program after it was written here"

NOT_KNOWN = (
    "the stored chunk may have been changed by another program after it was written here: its shard has changed, and"
    " the chunk's earlier bytes are not known"
)


class Stored(NamedTuple):
    """The stored bytes of a chunk when a program first wrote over them.

    Args:
        version: the version of the shard object that has these bytes; None if it is not known.
        digests: the digest of these bytes, and those of later versions that this mount has published, or that it was
            publishing at a crash. Empty: none is known. None: the user has decided that any stored bytes are replaced.
    """

    version: Version = None
    digests: tuple[str, ...] | None = ()

    @classmethod
    def from_target(cls, target: Target, *, read: bool = True) -> Stored:
        """Return what is stored for a chunk now.

        `read`: note the digest, too. Raise CorruptShardError if bytes of the chunk are missing.
        """
        if target.tree.is_frozen:  # another array may be stored there now
            return cls()
        shards = target.tree.shards
        chunk = shards.stored_chunk(target.coords)
        if chunk is None:
            return NOTHING
        now = cls(chunk.stat().version)
        try:
            return now.including(digest_of(chunk)) if read else now
        except ValueError as e:
            key = shards.key(shards.number_of(target.coords))
            raise CorruptShardError(target.tree.path, key, f"chunk {target.coords}: {e}") from e

    def including(self, digest: str) -> Self:
        """Return the value with one more digest of bytes that count as unchanged."""
        if self.digests is None or digest in self.digests:
            return self
        return self._replace(digests=(*self.digests, digest))

    def is_in(self, version: Version) -> bool:
        """Return whether a shard object of this version has these bytes for certain, without a look at them."""
        return version is not None and self.version == version

    def followed(self, chunk: Blob | None) -> Stored:
        """Return what is stored now, with a digest if this value has one; this value if its version is still stored."""
        if chunk is None:
            return NOTHING
        version = chunk.stat().version
        if self.is_in(version):
            return self
        with suppress(ValueError):  # bytes are missing, so the chunk has changed, and reading it reports the damage
            return Stored(version, (digest_of(chunk),) if self.digests else ())
        return Stored(version)

    def is_same(self, now: Stored) -> bool:
        """Return whether the bytes that are stored now are known to be among those of this value.

        Only digests are compared: False if one side has none, even at equal versions (`is_in` compares these).
        """
        return not {*(now.digests or ())}.isdisjoint(self.digests or ())

    def relies_on(self, version: Version) -> bool:
        """Return whether nothing but this version tells that the bytes are unchanged."""
        return self.is_in(version) and self.digests == ()

    def kept(self, before: Version, after: Version) -> Self:
        """Return the value after this mount has replaced the version `before`, and the new one has the same bytes."""
        return self._replace(version=after) if self.is_in(before) else self

    def to_json(self) -> Any:
        """Return the value as JSON, for `from_json`."""
        if self == NOTHING:
            return None
        return {"version": self.version, "digests": None if self.digests is None else list(self.digests)}

    @classmethod
    def from_json(cls, value: Any) -> Stored:
        """Return the value of a journal record. Anything but a result of `to_json` counts as not known."""
        if value is None:
            return NOTHING
        digests = value.get("digests", ()) if isinstance(value, dict) else ()
        if digests is None:
            return ANYTHING
        if not isinstance(digests, list) or not all(isinstance(digest, str) for digest in digests):
            return NOT_NOTED
        return Stored(version_from_json(value.get("version")), tuple(digests))


NOT_NOTED = Stored()
ANYTHING = Stored(None, None)
NOTHING = Stored(None, (ABSENT,))


def version_from_json(value: Any) -> Version:
    """Return the version of an object from its JSON form, in which tuples are lists."""
    return tuple(map(version_from_json, value)) if isinstance(value, list) else value


def digest_of(chunk: Blob | None) -> str:
    """Return the digest of all bytes of a chunk; `ABSENT` for None. Raise ValueError if bytes are missing.

    The digest has 128 bits and is no CRC-32C: all bytes that end in their own CRC-32C, as the chunk codec writes them,
    have the same one.
    """
    return ABSENT if chunk is None else digest_of_pieces(chunks_of([ByteRange(0, chunk.stat().size)], chunk))


def digest_of_pieces(pieces: Iterable[bytes | memoryview]) -> str:
    """Return the digest of a chunk or document, given all its stored bytes in order, in any number of pieces.

    It is equal to that of `digest_of`. No bytes at all have a digest, too, which is not `ABSENT`.
    """
    digest = mmh3.mmh3_x64_128()
    for data in pieces:
        digest.update(data)
    return digest.digest().hex()


def conflicts(
    bases: Mapping[K, Stored], removed: Set[K], version: Version, digests: Callable[[Collection[K]], Mapping[K, str]]
) -> dict[K, str]:
    """Return the chunks that are not known to be stored unchanged, and why.

    Args:
        bases: what was stored when each chunk was first written over.
        removed: the chunks that are to be removed. Another program may have removed them already.
        version: the version of their present shard object; None if there is none.
        digests: returns the digests of the present bytes of some of the chunks.
    """
    unchanged = {key for key, base in bases.items() if base.is_in(version)}
    keys = [key for key, base in bases.items() if key not in unchanged and (base.digests or key in removed)]
    now = digests(keys)
    reasons = {}
    for key, base in bases.items():
        if key in unchanged or base.digests is None or now.get(key) in base.digests:
            continue
        if key not in removed or now[key] != ABSENT:
            reasons[key] = CHANGED if base.digests else NOT_KNOWN
    return reasons
