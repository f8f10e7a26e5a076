"""The parts of info documents that may be sharded, for volumes, meshes, skeletons and annotations alike."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Any, TypeAlias

from shardfs.codecs.encoders import Gunzip
from shardfs.formats.documents import UNFIT, is_inner_path, print_json, reason
from shardfs.model.arrays import Codec
from shardfs.model.collection import Collection, Layer, Pair
from shardfs.model.dataset import Dataset, Problem
from shardfs.model.errors import CorruptShardError
from shardfs.model.grid import MortonCode
from shardfs.shards.byte_layouts.uint64_sharded import Uint64Sharded
from shardfs.shards.byte_layouts.uint64_spec import ENTRY, Ids, ShardingSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.model.values import U64, Coords

    Describe: TypeAlias = Callable[[dict[str, Any], ShardingSpec], Collection]

INFO = "info"
FORM = frozenset((INFO,))

MAX_PARTS = 1000
"""Documents with more scales, relationships or spatial levels count as damaged. Real documents have about ten."""


class Parts:
    """Collects the collections and problems of an info document's parts, each of which may have a member `sharding`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._collections: list[Collection] = []
        self._problems: list[Problem] = []
        self._unwalked: set[str] = set()

    def unshard(self, part: Any, called: str, describe: Describe) -> Any:
        """The part to show: without `sharding` if its chunks are shown as single files, else unchanged.

        `called` is the name of the part for messages; "" is the whole document.
        """
        if not isinstance(part, dict):
            return part
        key = part.get("key") if called and is_inner_path(part.get("key")) else None
        if key is not None and "/" not in key:  # directories of a longer path may contain other datasets
            self._unwalked.add(key)
        if part.get("sharding") is None:
            return part
        try:
            self._collections.append(describe(part, ShardingSpec.parse(part["sharding"])))
        except UNFIT as e:
            where = f"{self.path}/{called if key is None else key}".strip("/")
            self._problems.append(Problem(where, f"info{called and ', '}{called}: {reason(e)}"))
            return part
        # The member is removed, since Neuroglancer refuses `sharding: null`.
        return {k: v for k, v in part.items() if k != "sharding"}

    def unshard_all(self, listed: Any, member: str, called: str, describe: Describe) -> list[Any]:
        """The parts to show, from `unshard` of each. Raise CorruptShardError for no list, or more than `MAX_PARTS`."""
        if not isinstance(listed, list):
            raise CorruptShardError(self.path, "info", f"{member} should be a list, not {type(listed).__name__}")
        if len(listed) > MAX_PARTS:
            raise CorruptShardError(self.path, "info", f"{len(listed)} {member}; {MAX_PARTS} is the limit")
        return [self.unshard(part, f"{called} {i}", describe) for i, part in enumerate(listed)]

    def dataset(self, document: dict[str, Any], *, closed: bool = False) -> Dataset:
        """The dataset of all parts, with this document. Raise CorruptShardError if it is nested too deeply."""
        documents = {}
        if self._collections:
            try:
                documents["info"] = print_json(document)
            except ValueError as e:
                raise CorruptShardError(self.path, "info", str(e)) from e
        return Dataset(
            "precomputed",
            tuple(self._collections),
            documents,
            tuple(self._problems),
            closed=closed,
            format_names=FORM,
            unwalked=frozenset(self._unwalked),
        )


def layers(spec: ShardingSpec, ids: Ids | MortonCode) -> tuple[Layer, ...]:
    """The layers of a part with this member `sharding`."""
    return (Layer(Uint64Sharded(spec, ids), pair=Pair(".index", ".data", ENTRY << spec.minishard_bits)),)


def codes(grid: Coords) -> list[list[int]]:
    """How the grid's chunks are numbered, for `Collection.form`: for each axis, the places of its bits in an id."""
    code = MortonCode(grid)
    units = ([tuple(int(i == axis) << bit for i in range(len(grid))) for bit in range((max(n, 1) - 1).bit_length())]
             for axis, n in enumerate(grid))  # fmt: skip
    return [[code.encode(cell) for cell in cells] for cells in units]


def around(spec: ShardingSpec) -> tuple[Codec, ...]:
    """The codecs around each chunk, from `data_encoding`."""
    return (Codec("gzip", {}),) if spec.data_encoding == "gzip" else ()


def gunzip(spec: ShardingSpec, sizes: Callable[[U64], U64] | None = None) -> Gunzip | None:
    """The transform of each chunk, from `data_encoding`; None if chunks are raw.

    `sizes` returns the decoded sizes of chunks (n,), if known.
    """
    return Gunzip(sizes) if spec.data_encoding == "gzip" else None


def key_path(key: Any) -> str:
    """The directory of a part, from its member `key`. Raise ValueError, with the reason, for an invalid key."""
    if not isinstance(key, str) or not key:
        raise ValueError(f"key should be a relative path, not {key!r}")
    path = posixpath.normpath(key)
    if path == "." or path.startswith("/") or not is_inner_path(path):
        raise ValueError(f"key {key!r} cannot be a path below the directory of the info document")
    return path
