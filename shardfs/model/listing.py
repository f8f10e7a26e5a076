"""Directory entries in batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from shardfs.model.values import U64, Bool

    pass


EntryRow: TypeAlias = tuple[bytes, int, bool, int, int, int]
"""One entry of a directory: name, number, whether it is a directory, size, mtime in ns, cookie. Cheaper than a `Batch`
for small directories."""


class Batch(NamedTuple):
    """Consecutive entries of a directory, as parallel arrays of length n (at most 4,096 by convention).

    Args:
        sizes: -1 where the size is unknown without further I/O; such an entry is listed by name only.
        cookies: positions; `scan(cookie)` continues after that entry. Strictly ascending, below 2**62.
        by_name: whether to send the kernel only names, because it would otherwise keep too many inodes.
        links: which entries are symbolic links, with `directories` not set; None if there are none.
    """

    names: npt.NDArray[np.bytes_]
    numbers: U64
    directories: Bool
    sizes: npt.NDArray[np.int64]
    mtimes_ns: npt.NDArray[np.int64]
    cookies: U64
    by_name: bool = False
    links: Bool | None = None

    def only(self, which: Bool | slice | npt.NDArray[np.intp]) -> Batch:
        """The entries that a mask, a slice or an array of positions selects."""
        return self._replace(
            names=self.names[which],
            numbers=self.numbers[which],
            directories=self.directories[which],
            sizes=self.sizes[which],
            mtimes_ns=self.mtimes_ns[which],
            cookies=self.cookies[which],
            links=None if self.links is None else self.links[which],
        )
