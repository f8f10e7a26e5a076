"""What the info documents of volumes, meshes, skeletons and annotations have in common: parts that may be sharded."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Any, TypeAlias

from shardfs.formats.documents import print_json
from shardfs.model.arrays import Codec
from shardfs.model.collection import Collection, Layer, Pair
from shardfs.model.dataset import Dataset, Problem
from shardfs.model.errors import CorruptShardError
from shardfs.shards.byte_layouts.uint64_sharded import Uint64Sharded
from shardfs.shards.byte_layouts.uint64_spec import ENTRY, Ids, ShardingSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.model.grid import MortonCode

    Describe: TypeAlias = Callable[[dict[str, Any], ShardingSpec], Collection]

INFO = "info"
FORM = frozenset((INFO,))

MAX_PARTS = 1000
"""A document of more scales, relationships or spatial levels is taken for damaged: real ones have some ten."""


class Parts:
    """The parts of an info document that may each have a member `sharding`, and what they describe."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._collections: list[Collection] = []
        self._problems: list[Problem] = []
        self._unwalked: set[str] = set()

    def unshard(self, part: Any, called: str, describe: Describe) -> Any:
        """What is shown of a part: the same without `sharding` if its chunks are shown one by one, else as it is.

        `called` is what messages call the part; "" is the whole document.
        """
        if not isinstance(part, dict):
            return part
        key = part.get("key") if called else None
        if isinstance(key, str) and "/" not in key:  # of a longer path other parts may hold datasets
            self._unwalked.add(key)
        if part.get("sharding") is None:
            return part
        try:
            self._collections.append(describe(part, ShardingSpec.parse(part["sharding"])))
        except (ValueError, TypeError, KeyError) as e:
            why = f"no member {e}" if isinstance(e, KeyError) else str(e)
            where = f"{self.path}/{key if isinstance(key, str) else called}".strip("/")
            self._problems.append(Problem(where, f"info{called and ', '}{called}: {why}"))
            return part
        # `sharding: null` would not do: Neuroglancer itself refuses that.
        return {k: v for k, v in part.items() if k != "sharding"}

    def unshard_all(self, listed: Any, member: str, called: str, describe: Describe) -> list[Any]:
        """`unshard` of each item of a list. Raise CorruptShardError if it is none, or absurdly long."""
        if not isinstance(listed, list):
            raise CorruptShardError(self.path, "info", f"{member} should be a list, not {type(listed).__name__}")
        if len(listed) > MAX_PARTS:
            raise CorruptShardError(self.path, "info", f"{len(listed)} {member}; {MAX_PARTS} is the limit")
        return [self.unshard(part, f"{called} {i}", describe) for i, part in enumerate(listed)]

    def dataset(self, shown: dict[str, Any], *, closed: bool = False) -> Dataset:
        """All of it. Raise CorruptShardError if `shown` is nested too deeply."""
        documents = {}
        if self._collections:
            try:
                documents["info"] = print_json(shown)
            except ValueError as e:
                raise CorruptShardError(self.path, "info", str(e)) from e
        return Dataset(
            "precomputed",
            tuple(self._collections),
            documents,
            tuple(self._problems),
            closed=closed,
            form=FORM,
            unwalked=frozenset(self._unwalked),
        )


def layers(spec: ShardingSpec, ids: Ids | MortonCode) -> tuple[Layer, ...]:
    """Of the chunks of a part with this member `sharding`."""
    return (Layer(Uint64Sharded(spec, ids), pair=Pair(".index", ".data", ENTRY << spec.minishard_bits)),)


def around(spec: ShardingSpec) -> tuple[Codec, ...]:
    """The container around each chunk."""
    return (Codec("gzip", {}),) if spec.data_encoding == "gzip" else ()


def key_path(key: Any) -> str:
    """The directory of a part, by its member `key`. Raise ValueError, with the reason, if it cannot be one."""
    if not isinstance(key, str) or not key:
        raise ValueError(f"key should be a relative path, not {key!r}")
    path = posixpath.normpath(key)
    if path.startswith(("/", "../")) or path in (".", "..") or "\0" in path:
        raise ValueError(f"key {key!r} leads out of the directory of the info document")
    return path
