"""Helpers that all layouts share to show a dataset of another format: see `format.View` and docs/layouts.md."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from shardfs.codecs.encoded_chunks import is_filled, without_checks
from shardfs.codecs.transcode import FillValue, transcoder
from shardfs.formats.zarr_metadata import CODEC_PARAMETERS
from shardfs.model.arrays import BYTES, Codec
from shardfs.model.dataset import Dataset
from shardfs.model.errors import UnsupportedError
from shardfs.model.grid import MappedNames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from shardfs.model.arrays import Array, ChunkEncoding, Multiscale
    from shardfs.model.collection import ChunkNames, Collection, Filler
    from shardfs.model.dataset import Problem


def join(*parts: str) -> str:
    """The non-empty parts, joined by slashes."""
    return "/".join(filter(None, parts))


def require_described(dataset: Dataset) -> None:
    """Raise UnsupportedError, with the reasons, if the dataset has any problem, or its format cannot describe arrays.

    Collections may still lack a description: see `array_of`.
    """
    if why := "; ".join(p.why for p in dataset.problems) or dataset.indescribable:
        raise UnsupportedError(why)


def arrays_of(dataset: Dataset) -> tuple[bool, list[tuple[Collection, str]]]:
    """Whether the dataset is a single array, and its arrays with their shown paths relative to the dataset.

    Raise UnsupportedError, with the reason, if the dataset has no description.
    """
    require_described(dataset)
    collections = dataset.all_collections
    is_array = len(collections) == 1 and not dataset.multiscales
    if dataset.closed and not is_array:
        raise UnsupportedError(f"{dataset.format} is shown in its own layout only")
    return is_array, [(c, "" if is_array else c.path) for c in collections]


def array_of(collection: Collection) -> Array:
    """The array of a collection. Raise UnsupportedError if the source does not describe an array."""
    if collection.array is None:
        data = f"{collection.facts.data_type or 'data without a type'} in codecs {', '.join(collection.codecs)}"
        raise UnsupportedError(f"{collection.path}: shardfs cannot describe {data} as an array")
    return collection.array


def levels_below(dataset: Dataset) -> list[str]:
    """The paths of image levels that are separate datasets below this one."""
    paths = {c.path for c in dataset.all_collections}
    return [level.path for image in dataset.multiscales for level in image.levels if level.path not in paths]


def images_of(dataset: Dataset, below: Mapping[str, Dataset]) -> dict[str, Multiscale]:
    """For each level in `below`, the value of its `Surroundings.level_of`: an image with only this level.

    Levels that are not one array with the axes of their image are omitted.
    """
    out = {}
    for image in reversed(dataset.multiscales):  # so that the first image of a level wins
        for level in image.levels:
            child = below.get(level.path)
            collections = child.all_collections if child is not None else ()
            array = collections[0].array if len(collections) == 1 and not collections[0].path else None
            if array is not None and len(array.shape) == len(image.axes):
                out[level.path] = replace(image, levels=(replace(level, path=""),))
    return out


def from_above(path: str, collection: Collection) -> Collection:
    """A collection of the dataset at `path`, with its stored path relative to the dataset above."""
    return replace(collection, shards=join(path, collection.stored_at))


CODECS: Mapping[str, tuple[Codec, ...]] = {
    "raw": (),
    "gzip": (Codec("gzip", CODEC_PARAMETERS["gzip"]),),
    "zlib": (Codec("numcodecs.zlib", {"level": 1}),),
    "zstd": (Codec("zstd", CODEC_PARAMETERS["zstd"]),),
    "blosc": (Codec("blosc", {**CODEC_PARAMETERS["blosc"], "shuffle": "noshuffle"}),),
}
"""The codecs for each value of the option `chunk_codec`."""

PACKED = "packed"
"""The value of `chunk_codec` for `pack`: chunks that must be decoded keep their codec, or get gzip if they cannot."""


def _in_codec(encoding: ChunkEncoding, name: str) -> ChunkEncoding:
    """The encoding with this codec of `CODECS`. An encoding that already has the codec keeps its parameters."""
    wanted = CODECS[name]
    if [c.name for c in encoding.codecs] == [c.name for c in wanted]:
        return encoding
    if encoding.serializer != BYTES:
        raise UnsupportedError(f"strings of any length are shown only in the codec that they are stored in, not {name}")
    if encoding.frame == "bcolz":
        raise UnsupportedError(f"chunks of bcolz are Blosc chunks: leave out chunk_codec={name}")
    return replace(encoding, codecs=wanted)


def is_compressed(array: Array) -> bool:
    """Whether the stored chunks are compressed."""
    return array.encoding.serializer != BYTES or bool(without_checks(array.encoding.codecs))


def _compressed(array: Array, encoding: ChunkEncoding) -> ChunkEncoding:
    """The encoding with compression instead of none, if the stored chunks are compressed."""
    if encoding.codecs or encoding.serializer != BYTES or not is_compressed(array):
        return encoding
    around = without_checks(array.encoding.codecs)
    supported = [[codec.name for codec in codecs] for codecs in CODECS.values() if codecs]
    return replace(encoding, codecs=around if [codec.name for codec in around] in supported else CODECS["gzip"])


@dataclass(frozen=True)
class PlacedArray:
    """A stored array, shown at `path` below its dataset, in `encoding`."""

    stored: Collection
    path: str
    array: Array
    encoding: ChunkEncoding

    @classmethod
    def from_collection(cls, collection: Collection, path: str, encode: Callable[[Array], ChunkEncoding]) -> Self:
        """The array of `collection` in the encoding from `encode`, unless the option `chunk_codec` sets the codec.

        Raise UnsupportedError, with the reason, if the array has no description, or no encoding is possible.
        """
        array = array_of(collection)
        encoding = encode(array)
        if array.codec == PACKED:
            encoding = _compressed(array, encoding)
        elif array.codec is not None:
            encoding = _in_codec(encoding, array.codec)
        return cls(collection, path, array, encoding)


def shown(
    collection: Collection,
    path: str,
    encoding: ChunkEncoding,
    names: ChunkNames,
    axes: Sequence[int | None],
    codecs: Iterable[str],
    filler: Filler | None = None,
    zeros: Filler | None = None,
) -> Collection:
    """The collection with its chunks shown at `path`, in another encoding and under other names.

    `axes` map the grid of `names` to the stored grid, as in `grid.MappedNames`.
    """
    rank = len(collection.layers[-1].format.grid)
    return replace(
        collection,
        path=path,
        # Equal grids need no mapping, which would slow down each opening of a chunk.
        names=names if tuple(axes) == tuple(range(rank)) else MappedNames(names, axes, rank),
        codecs=tuple(codecs),
        transform=transcoder(array_of(collection), encoding),
        shards=collection.stored_at,
        filler=filler,
        zeros=zeros,
        compressible=False,
    )


def zero_fillers(array: Array, encoding: ChunkEncoding) -> tuple[Filler | None, Filler | None]:
    """Return the `filler` and `zeros` of an array's collection, in a layout without fill values.

    None and None if the array's fill value is that of the layout, or its data type has none.
    """
    if not is_filled(array.fill_value, encoding.data_type):
        return None, None
    return FillValue(array, encoding), FillValue(replace(array, fill_value=0), encoding)


def laid_out(
    name: str,
    dataset: Dataset,
    collections: Iterable[Collection],
    documents: Mapping[str, bytes],
    *,
    problems: Iterable[Problem] = (),
    unwalked: Iterable[str] = (),
    hidden: Iterable[str] = (),
) -> Dataset:
    """The dataset in the layout `name`. The source's documents and chunk directories are hidden, other files remain."""
    return Dataset(
        name,
        tuple(collections),
        documents,
        tuple(problems),
        closed=dataset.closed,
        unwalked=dataset.unwalked.union(unwalked),
        hidden=dataset.hidden.union(dataset.format_names, hidden),
        scope=dataset.scope,
    )


def with_offset(attributes: Mapping[str, Any], array: Array) -> dict[str, Any]:
    """The attributes, with a non-zero offset of the array as the attribute `offset`, unless that attribute exists."""
    if array.offset is None or not any(array.offset) or "offset" in attributes:
        return dict(attributes)
    return {**attributes, "offset": list(array.offset)}
