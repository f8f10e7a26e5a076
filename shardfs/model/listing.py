"""Directory entries in batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from shardfs.model.attributes import Attributes
    from shardfs.model.values import U64, Bool, Sizes

BATCH = 4096
"""Number of entries in a full batch."""

REST = 1 << 61
"""Cookies from here on stand for the names in a directory that are not chunks."""

EntryRow: TypeAlias = tuple[bytes, int, bool, int, int, int]
"""One entry of a directory: name, number, whether it is a directory, size, mtime in ns, cookie. Cheaper than a `Batch`
for small directories."""


class Batch(NamedTuple):
    """Consecutive entries of a directory, as parallel arrays of length n (at most 4,096 by convention).

    Args:
        sizes: -1 where the size is unknown without further I/O; such an entry is listed by name only.
        cookies: positions; `scan(cookie)` continues after that entry. Strictly ascending, below 2**62.
        by_name: whether to send the kernel only names, because it would otherwise keep too many inodes.
    """

    names: npt.NDArray[np.bytes_]
    numbers: U64
    directories: Bool
    sizes: npt.NDArray[np.int64]
    mtimes_ns: npt.NDArray[np.int64]
    cookies: U64
    by_name: bool = False

    @classmethod
    def from_columns(
        cls,
        names: npt.NDArray[np.bytes_],
        numbers: U64,
        sizes: Sizes | int,
        mtimes_ns: Sizes | int,
        cookies: U64,
        *,
        directories: bool = False,
    ) -> Batch:
        """A batch of files, or of directories. A single size or time applies to all entries."""
        n = len(names)
        sizes, mtimes_ns = np.full(n, sizes, np.int64), np.full(n, mtimes_ns, np.int64)
        return cls(names, numbers, np.full(n, directories, np.bool_), sizes, mtimes_ns, cookies)

    @classmethod
    def from_entries(cls, entries: Sequence[tuple[bytes, Attributes]], position: int) -> Batch:
        """A batch of names with their attributes. The first entry has the cookie `position + 1`, the next ones follow.

        The size of an entry with a mode is -1, because a listing carries no mode: the kernel then asks for its
        attributes.
        """
        rows = [a for _, a in entries]
        return cls(
            np.array([name for name, _ in entries], "S"),
            np.array([a.number for a in rows], np.uint64),
            np.array([a.directory for a in rows], np.bool_),
            np.array([-1 if a.mode else a.size for a in rows], np.int64),  # a listing has no mode: ask for each
            np.array([a.mtime_ns for a in rows], np.int64),
            np.arange(position + 1, position + 1 + len(rows), dtype=np.uint64),
        )

    def only(self, selection: Bool | slice | npt.NDArray[np.intp]) -> Batch:
        """The entries that a mask, a slice or an array of positions selects."""
        return self._replace(
            names=self.names[selection],
            numbers=self.numbers[selection],
            directories=self.directories[selection],
            sizes=self.sizes[selection],
            mtimes_ns=self.mtimes_ns[selection],
            cookies=self.cookies[selection],
        )
