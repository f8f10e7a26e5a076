"""The axes of the matrix, the combinations that cannot exist, and the cells that the quick run tries."""

from __future__ import annotations

import os
import random
from heapq import heapify, heappop, heappush
from itertools import combinations, product
from typing import TYPE_CHECKING, NamedTuple

from tests.promises.forms import ANEW, AROUND, FULL, KINDS, NATIVE, SHOWN, VOLUMES, ZARR
from tests.promises.scenarios import PROMISES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Cell(NamedTuple):
    """One combination.

    Args:
        store: where the source is.
        form: how chunks are stored (`tests/write/targets.py`).
        layout: as which the mount shows them.
        party: the other program (`parties.py`).
    """

    promise: str
    store: str
    form: str
    layout: str
    party: str


STORES = {
    "disk": "a local directory",
    "memory": "fsspec's `memory://`",
    "moto": "S3 by moto",
    "s3": "a server that enforces the conditions of S3, also those that moto ignores",
    "gs": "a server with the requests of Google Cloud Storage",
    "azure": "Azurite",
    "http": "a web server",
}
KINDS_OF_STORE = {"disk": "disk"} | dict.fromkeys(("s3", "gs", "azure"), "heeds conditions")
PARTIES = {
    "none": "",
    "replaces": "writes a shard beside the old one and renames it, or puts an object",
    "overwrites": "writes into the same file",
    "zarr-python": "replaces shards without locks and conditions",
    **{f"tensorstore-{mode}": f"with `file_io_locking` {mode}" for mode in ("os", "lockfile", "none", "non_atomic")},
    "creates": "deletes the array and creates it in another form",
    "mount": "another mount of the source",
}

RULES: dict[str, Callable[[Cell], bool]] = {
    "The layout can show the form.": lambda cell: (cell.form, cell.layout) in SHOWN,
    "A promise is about some kinds of other programs, or about none.": (
        lambda cell: cell.party in PROMISES[cell.promise].parties
    ),
    "A promise holds in some stores: web servers are only read, and the other program changes what they serve.": (
        lambda cell: cell.store in PROMISES[cell.promise].stores
    ),
    "Only a layout that shows other bytes than are stored can refuse a chunk.": (
        lambda cell: not PROMISES[cell.promise].converts or is_converted(cell)
    ),
    "tensorstore's locks are those of a local disk; it writes Zarr without codecs around shards, and volumes.": (
        lambda cell: (
            not cell.party.startswith("tensorstore")
            or (cell.store == "disk" and cell.form in {*ZARR, *VOLUMES} - AROUND)
        )
    ),
    "zarr-python writes Zarr; fsspec's clients of S3 and Google cannot close sessions of its event loop.": (
        lambda cell: cell.party != "zarr-python" or (cell.form in ZARR and cell.store in ("disk", "memory", "azure"))
    ),
    "A file can be overwritten, an object is replaced.": lambda cell: (
        cell.party != "overwrites" or cell.store == "disk"
    ),
    "In an array of superchunks and among meshes no chunk is absent.": (
        lambda cell: cell.form not in FULL or not PROMISES[cell.promise].needs_absence
    ),
    "Documents are changed in the native layout; superchunks have several.": (
        lambda cell: not PROMISES[cell.promise].document or (cell.layout == "native" and cell.form != "bcolz")
    ),
    "An array is created anew in another form of its format.": lambda cell: (
        cell.party != "creates" or (ANEW.get(cell.form), cell.layout) in SHOWN
    ),
}
"""What a combination must fulfil to be a cell."""


def is_converted(cell: Cell) -> bool:
    """Return whether the bytes of a chunk on the mount are others than its stored ones."""
    return SHOWN[cell.form, cell.layout].encode is not NATIVE[cell.form].encode


def every_cell() -> list[Cell]:
    """Return all combinations that can exist."""
    axes = (PROMISES, STORES, SHOWN, PARTIES)
    cells = (Cell(promise, store, *shown, party) for promise, store, shown, party in product(*axes))
    out = [cell for cell in cells if all(rule(cell) for rule in RULES.values())]
    random.Random(0).shuffle(out)  # so that of cells which are as good, `covering` takes different ones,
    return sorted(out, key=lambda cell: [*STORES].index(cell.store))  # and those that are quick


def pairs(cell: Cell) -> set[object]:
    """Return the pairs of values of a cell. For a promise, the kinds of store and of form count."""
    values = [*enumerate(cell)]
    out = set[object](combinations(values, 2))
    out -= {(values[0], values[1]), (values[0], values[2])}
    out |= {(cell.promise, KINDS_OF_STORE.get(cell.store)), (cell.promise, KINDS[cell.form])}
    return out


def covering(cells: Sequence[Cell]) -> list[Cell]:
    """Return few of the cells, with each of the pairs that any of the cells has.

    Each time the cell that adds the most pairs, the first one if there are several. What a cell adds only becomes less,
    so that a cell which still adds what it added when it was last looked at is the best one.
    """
    pairs_of_cells = [pairs(cell) for cell in cells]
    missing = set[object]().union(*pairs_of_cells)
    heap = [(-len(added), number) for number, added in enumerate(pairs_of_cells)]
    heapify(heap)
    chosen = []
    while missing:
        _, number = heappop(heap)
        added = len(pairs_of_cells[number] & missing)
        if heap and (-added, number) > heap[0]:
            heappush(heap, (-added, number))
            continue
        chosen.append(cells[number])
        missing -= pairs_of_cells[number]
    return chosen


def chosen_cells() -> list[Cell]:
    """Return the cells to try: pairwise, or all of them with SHARDFS_TORTURE."""
    return every_cell() if "SHARDFS_TORTURE" in os.environ else covering(every_cell())
