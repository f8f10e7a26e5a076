"""The arrays and objects that `pack` packs: their files in the source, and their places in shards."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from shardfs.formats.layouts import join
from shardfs.formats.precomputed import PRECOMPUTED
from shardfs.model.blobs import FilePart
from shardfs.model.collection import Layer
from shardfs.model.dataset import Problem
from shardfs.model.grid import FlatNames, IdNames, cell_of, ravel_many, renamed, unravel_many
from shardfs.model.kinds import COMPRESSIONS
from shardfs.model.write_plan import bytes_of
from shardfs.shards import rewriting
from shardfs.shards.byte_layouts.unsharded import Unsharded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    from shardfs.model.blobs import Bytes
    from shardfs.model.collection import Collection
    from shardfs.model.values import U64, Coords

BLOCK = 1 << 14
"""Chunks whose shards are computed at a time, to limit memory. An even number, because some chunks are two files."""

GZIP = ".gz"
"""The only compression of chunk files that shards can have."""

ONLY_ONE = "has only one of its two files, the manifest and the fragments"


@dataclass(frozen=True)
class PackedArray:
    """An array to pack.

    A chunk has the same name in the source, as the layout of the target's format shows it, and in the target, as a
    mount shows it.

    Args:
        path: the directory of the chunk files in the source.
        home: the directory of the shards in the target.
        source: the chunks in the source. Its `transform` makes files of the target's format, without shards, of them.
        target: the chunks in the target. Its `transform` makes these files of stored chunks.
        suffix: the end of the names of all chunk files, which are stored in this compression; "" for none.
    """

    path: str
    home: str
    source: Collection
    target: Collection
    suffix: str = ""

    def number(self, name: str) -> int | None:
        """Return the number of the chunk whose file has this path below `path`; None for other files."""
        if self.suffix:
            if not name.endswith(self.suffix):
                return None
            name = name.removesuffix(self.suffix)
        return self.source.layers[0].format.shard_of(name)

    def is_directory(self, name: str) -> bool:
        """Return whether chunk files or shards can be in the directory `name` below `path`."""
        parts = name.split("/")
        for format in (self.source.layers[0].format, self.target.layers[0].format):
            first = format.key(0).split("/")
            if len(parts) < len(first) and format.shard_of("/".join([*parts, *first[len(parts) :]])) is not None:
                return True
        return False

    def file(self, number: int) -> str:
        """Return the path of a chunk's file in the source."""
        return join(self.path, self.source.layers[0].format.key(number) + self.suffix)

    def files(self, numbers: U64) -> list[str]:
        """Return the paths in the source of the files of chunks (n,), in their order."""
        return list(map(self.file, numbers.tolist()))

    def stored(self, numbers: U64) -> U64:
        """Return the coordinates (n, d), in the grid of the source, of chunks with these numbers (n,)."""
        return unravel_many(numbers, self.source.layers[0].format.grid)

    def cells(self, numbers: U64) -> U64:
        """Return the coordinates (n, d), in the grid of the target, of chunks with these numbers (n,)."""
        return renamed(self.source.names, self.target.names, self.stored(numbers))

    def numbers(self, cells: U64) -> U64:
        """Return the numbers (n,) of chunks at coordinates (n, d) in the target, the inverse of `cells`."""
        return ravel_many(renamed(self.target.names, self.source.names, cells), self.source.layers[0].format.grid)

    def shards(self, numbers: U64) -> U64:
        """Return the numbers (n,) of the outermost shards of chunks (n,)."""
        return rewriting.shards_of(self.target, self.cells(numbers))

    def shard_key(self, shard: int) -> str:
        """Return the path of a shard in the target."""
        return join(self.home, rewriting.key(self.target, shard))

    def incomplete(self, numbers: U64) -> U64:
        """Return those of these chunks, of numbers (n,), that cannot be packed: another file of theirs is missing."""
        return numbers[:0]

    # ---- bytes ----

    @property
    def converts(self) -> bool:
        """Whether `converted` may change bytes; otherwise contents go into shards without being read."""
        return self.source.transform is not None or self._encodes

    @property
    def _encodes(self) -> bool:
        # For precomputed, `source.transform` or a compressed file already has `data_encoding` applied.
        return self.target.transform is not None and self.target.format != PRECOMPUTED.name

    def converted(self, coords: Coords, cell: Coords, data: bytes) -> bytes:
        """Return the bytes for a shard, of the chunk at `coords` in the source and at `cell` in the target.

        Raise ValueError, with the reason, if `data` cannot be this chunk.
        """
        if self.source.transform is not None:
            data = bytes(self.source.transform.show(coords, data))
        if self._encodes and self.target.transform is not None:
            data = self.target.transform.store(cell, data)
        return data

    def packed(self, numbers: U64, contents: Iterable[Bytes]) -> tuple[dict[Coords, Bytes], list[Problem]]:
        """Turn the contents of chunk files (n,), one at a time, into those of their shard.

        Return them by coordinates in the target; and problems. Chunks that cannot be converted are `damaged`, and left
        out. Others that no reader can decode, as far as sizes and first bytes show, are packed nevertheless.
        """
        chunks: dict[Coords, Bytes] = {}
        problems: list[Problem] = []
        cells = self.cells(numbers)
        files = self.files(numbers) if self.converts else []
        rows = zip(self.stored(numbers).tolist(), map(tuple, cells.tolist()), contents, strict=True)
        for i, (coords, cell, content) in enumerate(rows):
            try:
                chunks[cell] = self.converted(tuple(coords), cell, bytes_of(content)) if self.converts else content
            except ValueError as e:
                problems.append(Problem(files[i], f"cannot be converted: {e}", damaged=True))
        if not problems:
            why = "is damaged, and was packed unchanged"
            reasons = dict(self.suspects(cells, list(chunks.values())))
            files = self.files(numbers) if reasons else []
            problems = [Problem(files[i], f"{why}: {reason}") for i, reason in reasons.items()]
        return chunks, problems

    def suspects(self, cells: U64, contents: Sequence[Bytes]) -> Iterator[tuple[int, str]]:
        """Yield the positions, among these cells (n, d), of chunks with a wrong size or wrong first bytes, and reasons.

        One that is wrong twice is yielded twice.
        """
        check = self.target.check
        if check is None:
            return
        sizes = np.array([content.size if isinstance(content, FilePart) else len(content) for content in contents])
        wanted = check.sizes(cells)
        if wanted is not None:
            for i in np.flatnonzero(wanted != sizes).tolist():
                yield i, f"{wanted[i]} bytes expected, {sizes[i]} found"
        for i, cell in enumerate(cells.tolist() if check.head else ()):
            try:
                check.quick(tuple(cell), int(sizes[i]), np.frombuffer(_head(contents[i], check.head or 0), np.uint8))
            except ValueError as e:
                yield i, str(e)


def _head(content: Bytes, size: int) -> bytes:
    return os.pread(content.fd, size, content.start) if isinstance(content, FilePart) else content[:size]


@dataclass(frozen=True)
class PackedIds(PackedArray):
    """Objects with 64-bit ids: meshes, skeletons, annotations. Their numbers are their ids, once for each file."""

    @property
    def _id_names(self) -> IdNames:
        return cast("IdNames", self.target.names)

    @property
    def _parts(self) -> int:
        return 1 if self.target.lead is None else 2

    def number(self, name: str) -> int | None:
        cell = self._id_names.cell(name.removesuffix(self.suffix).encode(errors="replace"))
        return cell[0] if cell is not None and name.endswith(self.suffix) else None

    def files(self, numbers: U64) -> list[str]:
        names: npt.NDArray[np.bytes_] = self._id_names.names(self.cells(numbers))
        return [join(self.path, name.decode() + self.suffix) for name in names.tolist()]

    def stored(self, numbers: U64) -> U64:
        return self.cells(numbers)

    def cells(self, numbers: U64) -> U64:
        parts = np.arange(len(numbers), dtype=np.uint64) % np.uint64(2)
        return numbers[:, None] if self._parts == 1 else np.stack([numbers, parts], axis=1)

    def incomplete(self, numbers: U64) -> U64:
        ids, counts = np.unique(numbers, return_counts=True)
        bad: U64 = ids[counts != self._parts]
        return bad


def has_ids(collection: Collection) -> bool:
    """Return whether these are objects with ids, or cells of annotations."""
    return isinstance(collection.names, IdNames | FlatNames)


def with_ids(path: str, target: Collection, suffix: str) -> PackedArray:
    """Return the plain files of a collection that `has_ids`, in the directory `path`, and their shards there."""
    source = replace(target, transform=None, lead=None)
    if isinstance(target.names, IdNames):
        return PackedIds(path, path, source, target, suffix)
    grid = target.layers[0].format.grid
    layer = Layer(
        Unsharded(grid, lambda cell: "_".join(map(str, cell)), partial(cell_of, separator="_", rank=len(grid)))
    )
    return PackedArray(path, path, replace(source, layers=(layer,)), target, suffix)


def require_packable(file: str, *, verbatim: bool) -> None:
    """Raise ValueError, with the reason, if the name of a volume's chunk file has a compression that shards lack.

    `verbatim`: the job changes no bytes, so it packs no compressed files at all.
    """
    if file.endswith(COMPRESSIONS) and (verbatim or not file.endswith(GZIP)):
        only = "a job in place packs uncompressed ones" if verbatim else "shards can have gzip"
        raise ValueError(f"the chunk file {file} is compressed, and {only} only; decompress all chunk files first")


def stray(array: PackedArray, name: str, key: str) -> Problem | None:
    """Return the problem of a file that has the name of a chunk, but is none of the array; None for other files."""
    format = array.source.layers[0].format
    plain = next((name.removesuffix(end) for end in COMPRESSIONS if name.endswith(end)), name)
    if array.source.compressible and replace(array, suffix="").number(plain) is not None:
        how = "not compressed with gzip" if array.suffix else "compressed"
        return Problem(
            key, f"is {how}, unlike other chunk files; compress all of them with gzip, or none", damaged=True
        )
    if isinstance(format, Unsharded) and format.is_beyond(name):
        return Problem(key, "was left out: it has the name of a chunk beyond the edge of the array")
    return None


@dataclass
class ArrayPlan:
    """The stored chunks of one array, grouped by their shards: 8 bytes of memory for each file.

    Args:
        chunks: the numbers of the chunks (n,): those of the first shard, of the next one and so on, each ascending.
        shards: the numbers of the shards (m,), ascending.
        starts: for each shard, the position of its first chunk in `chunks`.
    """

    array: PackedArray
    chunks: U64
    shards: U64
    starts: Sequence[int]

    @property
    def files(self) -> int:
        """The number of files of the source: one for each number of a chunk."""
        return len(self.chunks)

    @classmethod
    def from_chunks(cls, array: PackedArray, chunks: U64) -> ArrayPlan:
        """Return the plan for these chunks (n,). Sorts `chunks` in place, so that little more memory is needed."""
        blocks = [chunks[i : i + BLOCK] for i in range(0, len(chunks), BLOCK)]
        bits = max((int(block.max()).bit_length() for block in blocks), default=0)
        if any(int(array.shards(block).max()).bit_length() + bits > 64 for block in blocks):
            homes = array.shards(chunks)
            order = np.lexsort((chunks, homes))
            shards, first = np.unique(homes[order], return_index=True)
            return cls(array, chunks[order], shards, first.tolist())
        shift, mask = np.uint64(bits), np.uint64((1 << bits) - 1)
        for block in blocks if bits < 64 else ():
            block |= array.shards(block) << shift
        chunks.sort()
        starts: list[int] = []
        at = 0
        while at < len(chunks):
            starts.append(at)
            at = int(chunks.searchsorted(chunks[at] | mask, side="right"))
        shards = chunks[starts] >> shift if bits < 64 else np.zeros(len(starts), np.uint64)
        chunks &= mask
        return cls(array, chunks, shards, starts)

    def __iter__(self) -> Iterator[tuple[int, U64]]:
        """Yield the number of each shard, and the numbers of its chunks (k,)."""
        for shard, start, stop in zip(self.shards.tolist(), self.starts, [*self.starts[1:], None], strict=False):
            yield shard, self.chunks[start:stop]
