"""What all layouts do alike with a dataset of another format: see `formats.View` and docs/layouts.md."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from shardfs.codecs.transcode import transcoder
from shardfs.model.arrays import BYTES, Codec
from shardfs.model.dataset import Dataset
from shardfs.model.errors import UnsupportedError
from shardfs.model.grid import MappedNames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from shardfs.model.arrays import Array, ChunkEncoding, Multiscale
    from shardfs.model.collection import ChunkNames, Collection, Filler
    from shardfs.model.dataset import Consolidation, Problem


def join(*parts: str) -> str:
    """A path of those that are not empty."""
    return "/".join(filter(None, parts))


def require_described(dataset: Dataset) -> None:
    """Raise UnsupportedError, with the reason, if a format could not say what the dataset means."""
    if why := "; ".join(p.why for p in dataset.problems) or dataset.indescribable:
        raise UnsupportedError(why)


def arrays_of(dataset: Dataset) -> tuple[bool, list[tuple[Collection, str]]]:
    """Whether a dataset is an array by itself; and its arrays, each with the path below it at which it is shown.

    Raise UnsupportedError, with the reason, if nobody can say what it is.
    """
    require_described(dataset)
    stored = (*dataset.collections, *dataset.unsharded)
    is_array = len(stored) == 1 and not dataset.multiscales
    if dataset.closed and not is_array:
        raise UnsupportedError(f"{dataset.format} is shown in its own layout only")
    return is_array, [(c, "" if is_array else c.path) for c in stored]


def array_of(stored: Collection) -> Array:
    """What the chunks are chunks of. Raise UnsupportedError if the source does not say."""
    if stored.array is None:
        what = f"{stored.facts.data_type or 'what is no array'} in codecs {', '.join(stored.codecs)}"
        raise UnsupportedError(f"{stored.path}: {what} has no description")
    return stored.array


def levels_below(dataset: Dataset) -> list[str]:
    """Paths of the levels of images that are datasets of their own, below this one."""
    own = {c.path for c in (*dataset.collections, *dataset.unsharded)}
    return [level.path for image in dataset.multiscales for level in image.levels if level.path not in own]


def images_of(dataset: Dataset, below: Mapping[str, Dataset]) -> dict[str, Multiscale]:
    """For `Dataset.images`: each level that is an array of as many axes, as an image of that level alone."""
    out = {}
    for image in reversed(dataset.multiscales):  # the first one counts
        for level in image.levels:
            found = below.get(level.path)
            stored = (*found.collections, *found.unsharded) if found is not None else ()
            array = stored[0].array if len(stored) == 1 and not stored[0].path else None
            if array is not None and len(array.shape) == len(image.axes):
                out[level.path] = replace(image, levels=(replace(level, path=""),))
    return out


def from_above(path: str, stored: Collection) -> Collection:
    """A collection of the dataset at `path`, as one of the dataset around it."""
    return replace(stored, shards=join(path, stored.stored_at))


CODECS: Mapping[str, tuple[Codec, ...]] = {
    "raw": (),
    "gzip": (Codec("gzip", {"level": 5}),),
    "zlib": (Codec("numcodecs.zlib", {"level": 1}),),
    "zstd": (Codec("zstd", {"level": 0, "checksum": False}),),
    "blosc": (Codec("blosc", {"cname": "lz4", "clevel": 5, "shuffle": "noshuffle", "typesize": 1, "blocksize": 0}),),
}
"""What the option `chunk_codec` names."""


def _in_codec(encoding: ChunkEncoding, name: str) -> ChunkEncoding:
    """The encoding with this codec of `CODECS`, and with the parameters that it has if it is in this codec already."""
    wanted = CODECS[name]
    if [c.name for c in encoding.codecs] == [c.name for c in wanted]:
        return encoding
    if encoding.serializer != BYTES:
        raise UnsupportedError(f"strings of any length are shown only in the codec that they are stored in, not {name}")
    return replace(encoding, codecs=wanted)


@dataclass(frozen=True)
class PlacedArray:
    """An array of any source, shown at a path below its dataset, in this encoding."""

    stored: Collection
    path: str
    array: Array
    encoding: ChunkEncoding

    @classmethod
    def of(cls, stored: Collection, path: str, encode: Callable[[Array], ChunkEncoding]) -> Self:
        """Raise UnsupportedError, with the reason, if the array is not described, or `encode` finds no encoding."""
        array = array_of(stored)
        encoding = encode(array)
        return cls(stored, path, array, encoding if array.codec is None else _in_codec(encoding, array.codec))


def shown(
    stored: Collection,
    path: str,
    encoding: ChunkEncoding,
    names: ChunkNames,
    axes: Sequence[int | None],
    codecs: Iterable[str],
    filler: Filler | None = None,
) -> Collection:
    """The collection with its chunks shown at `path`, in another encoding and under other names.

    `axes` are those of the grid that `names` name, as `grid.MappedNames` takes them.
    """
    rank = len(stored.layers[-1].format.grid)
    return replace(
        stored,
        path=path,
        # Without a detour where both grids are the same: this is asked for every chunk that is opened.
        names=names if tuple(axes) == tuple(range(rank)) else MappedNames(names, axes, rank),
        codecs=tuple(codecs),
        transform=transcoder(array_of(stored), encoding),
        shards=stored.stored_at,
        filler=filler,
    )


def laid_out(
    name: str,
    dataset: Dataset,
    collections: Iterable[Collection],
    documents: Mapping[str, bytes],
    *,
    problems: Iterable[Problem] = (),
    unwalked: Iterable[str] = (),
    hidden: Iterable[str] = (),
    consolidation: Consolidation | None = None,
) -> Dataset:
    """The dataset in the layout `name`: nothing of the source's form is left, what else lies there stays."""
    return Dataset(
        name,
        tuple(collections),
        documents,
        tuple(problems),
        closed=dataset.closed,
        unwalked=dataset.unwalked.union(unwalked),
        hidden=dataset.hidden.union(dataset.form, hidden),
        scope=dataset.scope,
        consolidation=consolidation,
    )


def with_offset(attributes: Mapping[str, Any], array: Array) -> dict[str, Any]:
    """The user's attributes, and where the array begins if not at 0, for formats that have no place for that."""
    if array.offset is None or not any(array.offset) or "offset" in attributes:
        return dict(attributes)
    return {**attributes, "offset": list(array.offset)}
