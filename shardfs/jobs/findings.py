"""Findings and counts of verified shards."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardfs.model.values import Coords
    from shardfs.vfs.chunk_dirs import ChunkDirs

MOST = 20
"""At most this many findings of one kind are listed for each shard; the others are only counted."""

NAMES = 3


ALL_PAGES = -1
"""In `ShardPart.page`: the whole shard."""


class ShardPart(NamedTuple):
    """A shard of a layer (0 is the outermost) by its number, or one page of its index: all its chunks are affected."""

    layer: int
    shard: int
    page: int = ALL_PAGES


class Affected(NamedTuple):
    """The chunks that a finding is about: chunks by their coordinates, and all chunks of parts of shards."""

    chunks: tuple[Coords, ...] = ()
    parts: tuple[ShardPart, ...] = ()


class Damage(NamedTuple):
    """One finding.

    Args:
        collection: the path of the collection on a mount.
        shard: path of the shard in the source; "" if there is none. A shard in a shard has its position in brackets.
        kind: one of the words in docs/verify.md.
        why: the reason, for users.
        files: paths of the first few affected chunks on a mount; empty if unknown.
        times: number of findings of this kind that this entry represents.
        affected: empty if unknown. Complete only if the verification was asked for regions.
    """

    collection: str
    shard: str
    kind: str
    why: str
    files: tuple[str, ...] = ()
    times: int = 1
    affected: Affected = Affected()


@dataclass(slots=True)
class ShardTally:
    """Numbers of items and bytes in verified shards.

    Args:
        shard_bytes: size of the shards.
        stored_bytes: size of the chunks, as the index states.
        dead_bytes: bytes that no index entry refers to.
        shared_bytes: bytes that several index entries refer to, without the first reference.
        outside_chunks: index entries beyond the edge of the array. These remain after an array was shrunk, and are no
            damage.
        looked_bytes: bytes of chunks that were read.
        unchecked_chunks: chunks that a deep run did not decode, because their decoder is missing or they are too large.
    """

    shards: int = 0
    chunks: int = 0
    shard_bytes: int = 0
    stored_bytes: int = 0
    dead_bytes: int = 0
    shared_bytes: int = 0
    outside_chunks: int = 0
    looked_bytes: int = 0
    unchecked_chunks: int = 0
    findings: int = 0

    def add(self, other: ShardTally) -> None:
        """Add the numbers of `other` to these."""
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))


@dataclass(slots=True)
class Report:
    """Counts and findings of some shards of a collection, which is named by its path on a mount."""

    collection: str
    tally: ShardTally = field(default_factory=ShardTally)
    findings: list[Damage] = field(default_factory=list)

    def add(self, other: Report) -> None:
        """Add the counts and findings of `other` to these."""
        self.tally.add(other.tally)
        self.findings += other.findings


class ShardFindings:
    """Collects the report of one outermost shard and of the shards inside it.

    Args:
        tree: the collection of the shard.
        regions: keep all affected chunks, also those of findings that are only counted.
    """

    def __init__(self, tree: ChunkDirs, *, regions: bool = False) -> None:
        self._tree = tree
        self._counts = Counter[tuple[str, str]]()  # by kind and shard, like the next one
        self.regions = regions
        self._unlisted: dict[tuple[str, str], tuple[list[Coords], list[ShardPart]]] = {}
        self.report = Report(tree.path, ShardTally(shards=1))

    @property
    def tally(self) -> ShardTally:
        """The counts, which the caller may increase."""
        return self.report.tally

    def add(self, shard: str, kind: str, why: str, *coords: Coords, parts: tuple[ShardPart, ...] = ()) -> None:
        """Add a finding about the chunks at `coords`, or about all chunks of `parts`, of which `coords` are the first.

        After the first `MOST` of a kind, findings are only counted.
        """
        affected = Affected(() if parts else coords, parts)
        if self._counts[kind, shard] >= MOST:
            self.count(shard, kind, 1, *affected)
            return
        self.count(shard, kind, 1)
        files = tuple(self._tree.chunk_path(c) for c in coords[:NAMES])
        self.report.findings.append(Damage(self._tree.path, shard, kind, why, files, 1, affected))

    def count(
        self, shard: str, kind: str, n: int, chunks: Iterable[Coords] = (), parts: Iterable[ShardPart] = ()
    ) -> None:
        """Count `n` findings about these chunks and parts without listing them."""
        self.tally.findings += n
        self._counts[kind, shard] += n
        if self.regions:
            unlisted = self._unlisted.setdefault((kind, shard), ([], []))
            unlisted[0].extend(chunks)
            unlisted[1].extend(parts)

    def complete(self) -> Report:
        """Return the report, with an entry for the findings of each kind that are not listed. To be called once."""
        for (kind, shard), n in self._counts.items():
            if n > MOST:
                why = f"and {n - MOST} more like these"
                chunks, parts = self._unlisted.get((kind, shard), ((), ()))
                affected = Affected(tuple(chunks), tuple(parts))
                self.report.findings.append(Damage(self._tree.path, shard, kind, why, (), n - MOST, affected))
        return self.report
