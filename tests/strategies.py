"""Hypothesis strategies that build valid things by construction."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, Literal

from hypothesis import strategies as st

from shardfs.model.grid import MortonCode
from shardfs.shards.byte_layouts.sharding_indexed import IndexEncoding, ShardedAxis, ShardingIndexed
from shardfs.shards.byte_layouts.uint64_sharded import Uint64Sharded
from shardfs.shards.byte_layouts.uint64_spec import Ids, ShardingSpec
from tests import handmade, handmade_ids
from tests.suites.shard_format import Extents, Sample
from tests.suites.view import Sparse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardfs.model.values import Coords
    from shardfs.shards.byte_layouts.uint64_spec import ChunkIds

U64 = st.integers(0, 2**64 - 1)


def cells(grid: Sequence[int]) -> st.SearchStrategy[Coords]:
    return st.tuples(*(st.integers(0, n - 1) for n in grid))


@st.composite
def grids(draw: st.DrawFn, rank: int | None = None, bits: int = 64) -> Coords:
    """Grids whose compressed Morton codes fit in 64 bits; axes of one cell and of millions."""
    n = draw(st.integers(1, 5)) if rank is None else rank
    spare_bits, out = bits, []
    for _ in range(n):
        b = draw(st.integers(0, min(spare_bits, 40)))
        spare_bits -= b
        out.append(1 if b == 0 else draw(st.integers(2 ** (b - 1) + 1, 2**b)))
    return tuple(draw(st.permutations(out)))


# ------------------------------------------------------------------------------------------ sharding_indexed


@st.composite
def _axes(draw: st.DrawFn) -> tuple[ShardedAxis, list[int]]:
    """An axis, and the number of chunks in each of its shards (a regular one may end behind the array)."""
    if draw(st.booleans()):
        per, shards = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        chunks = draw(st.integers((shards - 1) * per + 1, shards * per))
        return ShardedAxis(chunks, per), [per] * shards
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return ShardedAxis(draw(st.integers(bounds[-2] + 1, bounds[-1])), 0, tuple(bounds)), sizes


@st.composite
def sharding_indexed_samples(draw: st.DrawFn) -> Sample:
    """Any rank, any order of axes, regular and rectilinear, both ends, both byte orders, with and without checksum."""
    drawn = draw(st.lists(_axes(), max_size=4))
    axes, sizes = [a for a, _ in drawn], [s for _, s in drawn]
    order = draw(st.permutations(range(len(axes))))
    encoding = IndexEncoding(
        draw(st.sampled_from(("little", "big"))), draw(st.booleans()), draw(st.sampled_from(("end", "start")))
    )

    def key(g: Coords) -> str:
        return "/".join(("c", *map(str, g)))

    def coords_of_key(text: str) -> Coords | None:
        head, *parts = text.split("/")
        if head != "c" or len(parts) != len(axes) or not all(p.isdecimal() and str(int(p)) == p for p in parts):
            return None
        return tuple(map(int, parts))

    def split(cell: Coords) -> tuple[Coords, Coords]:
        """Shard and position inside it, by walking along the edges."""
        g, local = [], []
        for c, lengths in zip(cell, sizes, strict=True):
            edges = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
            at = next(i for i, (a, b) in enumerate(pairwise(edges)) if a <= c < b)
            g.append(at)
            local.append(c - edges[at])
        return tuple(g), tuple(local)

    def shard(extents: Extents) -> bytes:
        g = split(next(iter(extents)))[0] if extents else (0,) * len(axes)
        inside = [sizes[a][g[a]] for a in order]
        placed = {split(cell)[1]: extent for cell, extent in extents.items()}
        entries = [
            placed.get(tuple(local[order.index(a)] for a in range(len(axes))), (handmade.ABSENT, handmade.ABSENT))
            for local in product(*map(range, inside))
        ]
        checksum: handmade.Checksum = "good" if encoding.crc32c else "none"
        index = handmade.zarr_index(entries, endian=encoding.endian, checksum=checksum)
        body = bytes(sum(size for _, size in extents.values()))
        # Offsets count from the start of the object; chunks may share bytes with an index that is at the start.
        return index + body if encoding.location == "start" else body + index

    return Sample(
        ShardingIndexed(axes, order, encoding, key, coords_of_key),
        cells([a.chunks for a in axes]),
        lambda cell: key(split(cell)[0]),
        shard,
    )


# -------------------------------------------------------------------------------------------- uint64_sharded


@st.composite
def sharding_specs(draw: st.DrawFn) -> ShardingSpec:
    minishard_bits = draw(st.integers(0, 6))
    return ShardingSpec(
        preshift_bits=draw(st.integers(0, 64)),
        hash=draw(st.sampled_from(("identity", "murmurhash3_x86_128"))),
        minishard_bits=minishard_bits,
        shard_bits=draw(st.integers(0, 64 - minishard_bits)),
        minishard_index_encoding=draw(st.sampled_from(("raw", "gzip"))),
    )


def spec_json(spec: ShardingSpec) -> dict[str, Any]:
    return handmade.sharding(
        preshift=spec.preshift_bits,
        hash=spec.hash,
        minishard=spec.minishard_bits,
        shard=spec.shard_bits,
        index=spec.minishard_index_encoding,
        data=spec.data_encoding,
    )


def _uint64_sharded_sample(
    spec: ShardingSpec, ids: ChunkIds, cells: st.SearchStrategy[Coords], encode: Callable[[Coords], int]
) -> Sample:
    """Ids in the index in any order, offsets that run backwards and wrap."""
    document = spec_json(spec)
    head = 16 << spec.minishard_bits

    def shard(extents: Extents) -> bytes:
        minishards: list[list[handmade.Entry]] = [[] for _ in range(1 << spec.minishard_bits)]
        for cell, (start, size) in list(extents.items())[::-1]:
            chunk_id = encode(cell)
            # `at` counts from the end of the shard index; chunks here may lie in it, which makes it wrap
            entry = handmade.Entry(chunk_id, b"", at=(start - head) % 2**64, size=size)
            minishards[handmade.uint64_hash(chunk_id, document)[1]].append(entry)
        total = sum(size for _, size in extents.values())
        deflate = spec.minishard_index_encoding == "gzip"
        return handmade.uint64_shard(minishards, deflate_index=deflate, junk=bytes(total))

    def home(cell: Coords) -> str:
        return handmade.shard_name(handmade.uint64_hash(encode(cell), document)[0], spec.shard_bits)

    return Sample(Uint64Sharded(spec, ids), cells, home, shard)


@st.composite
def uint64_sharded_samples(draw: st.DrawFn) -> Sample:
    """Any grid of 64 bits of ids."""
    grid = draw(grids())
    return _uint64_sharded_sample(
        draw(sharding_specs()), MortonCode(grid), cells(grid), lambda cell: handmade.morton(cell, grid)
    )


@st.composite
def uint64_sharded_id_samples(draw: st.DrawFn) -> Sample:
    """Ids of objects, near each other and anywhere; some with a second coordinate, which is 0 for the first file."""
    files = draw(st.integers(1, 2))
    ids = st.integers(0, 40) | U64 | st.integers(2**64 - 9, 2**64 - 1)
    cells = ids.map(lambda number: (number,) if files == 1 else (number, 0))
    return _uint64_sharded_sample(draw(sharding_specs()), Ids(files), cells, lambda cell: cell[0])


# ------------------------------------------------------------------------------------------------- datasets


def _chunk(draw: st.DrawFn) -> bytes | None:
    return draw(st.none() | st.binary(max_size=6))


_locations: st.SearchStrategy[handmade.Location] = st.sampled_from(("start", "end"))


@st.composite
def sparse_arrays(draw: st.DrawFn) -> Sparse:
    """Sparse sharded Zarr arrays of opaque chunks, some shards missing, of every key encoding."""
    rank = draw(st.integers(0, 3))
    inner = tuple(draw(st.integers(1, 2)) for _ in range(rank))
    per = tuple(draw(st.integers(1, 3)) for _ in range(rank))
    shape = tuple(draw(st.integers(1, 9)) for _ in range(rank))
    separator, encoding = draw(st.sampled_from("/.")), draw(st.sampled_from(("default", "v2")))
    order = draw(st.permutations(range(rank)))
    location = draw(_locations)
    shard = tuple(i * p for i, p in zip(inner, per, strict=True))
    document = handmade.zarr_metadata(shape, shard, tuple(inner[a] for a in order), location=location)
    document["chunk_key_encoding"] = {"name": encoding, "configuration": {"separator": separator}}
    if rank:
        document["codecs"].insert(0, {"name": "transpose", "configuration": {"order": list(order)}})

    def key(coords: Sequence[int]) -> str:
        if not coords:
            return "c" if encoding == "default" else "0"
        return separator.join((*(["c"] if encoding == "default" else []), *map(str, coords)))

    grid = tuple(-(-n // i) for n, i in zip(shape, inner, strict=True))
    files, chunk_files = {"zarr.json": json.dumps(document).encode()}, {}
    for g in product(*(range(-(-n // s)) for n, s in zip(shape, shard, strict=True))):
        if draw(st.integers(0, 3)) == 0:
            continue
        chunks = []
        for slot in product(*(range(per[a]) for a in order)):
            data = _chunk(draw)
            chunks.append(data)
            local = tuple(slot[order.index(a)] for a in range(rank))
            cell = tuple(gi * p + li for gi, p, li in zip(g, per, local, strict=True))
            if data is not None and all(c < n for c, n in zip(cell, grid, strict=True)):
                chunk_files[key(cell)] = data
        files[key(g)] = handmade.zarr_shard(chunks, location=location, gap=draw(st.sampled_from((b"", b"gap"))))
    near = st.tuples(*(st.integers(0, n + 1) for n in grid)).map(key)
    odd = st.sampled_from(("c", "c/0", "c/00", "c.0", "0", "zarr.json", "c/+1", "c/0/ 1", "c/0/x", "x/y", "info"))
    return Sparse(files, chunk_files, near | odd)


@st.composite
def sparse_volumes(draw: st.DrawFn) -> Sparse:
    """Sparse sharded volumes of opaque chunks, some shards missing, with any offset."""
    size = tuple(draw(st.integers(1, 9)) for _ in range(3))
    chunk = tuple(draw(st.integers(1, 4)) for _ in range(3))
    offset = tuple(draw(st.integers(-(10**12), 10**12) | st.integers(-5, 5)) for _ in range(3))
    spec = draw(sharding_specs())
    grid = tuple(-(-n // c) for n, c in zip(size, chunk, strict=True))
    info = handmade.volume_info(size, chunk, spec_json(spec), encoding="opaque", voxel_offset=list(offset))

    def name(cell: Sequence[int], stretch: int = 0) -> str:
        return "s/" + "_".join(
            f"{o + g * c}-{o + min((g + 1) * c, n) + stretch}"
            for g, c, n, o in zip(cell, chunk, size, offset, strict=True)
        )

    shards: dict[int, list[list[handmade.Entry]]] = {}
    chunk_files = {}
    for cell in draw(st.permutations(list(product(*map(range, grid))))):
        data = _chunk(draw)
        if data is None:
            continue
        chunk_id = handmade.morton(cell, grid)
        home, minishard = handmade.uint64_hash(chunk_id, spec_json(spec))
        table = shards.setdefault(home, [[] for _ in range(1 << spec.minishard_bits)])
        table[minishard].append(handmade.Entry(chunk_id, data))
        chunk_files[name(cell)] = data
    files = {"info": json.dumps(info).encode()}
    for home, minishards in shards.items():
        deflate = spec.minishard_index_encoding == "gzip"
        files[f"s/{handmade.shard_name(home, spec.shard_bits)}"] = handmade.uint64_shard(
            minishards, deflate_index=deflate
        )
    near = st.tuples(*(st.integers(-1, n) for n in grid)).map(name)
    odd = st.sampled_from(("s", "info", "s/0.shard", "s/x", "x", "s/0-1_0-1", "s/0-1_0-1_0-1", "s/0-1_0-1_00-1"))
    return Sparse(files, chunk_files, near | cells(grid).map(lambda cell: name(cell, 1)) | odd)


def _id_shards(spec: ShardingSpec, meshes: Mapping[int, tuple[bytes, bytes]], directory: str = "") -> dict[str, bytes]:
    """Shards with what is stored for each id, and what lies before that without a name."""
    document, shards = spec_json(spec), dict[str, list[dict[int, tuple[bytes, bytes]]]]()
    for number, parts in meshes.items():
        home, minishard = handmade.uint64_hash(number, document)
        name = directory + handmade.shard_name(home, spec.shard_bits)
        shards.setdefault(name, [{} for _ in range(1 << spec.minishard_bits)])[minishard][number] = parts
    deflate = spec.minishard_index_encoding == "gzip"
    return {name: handmade_ids.mesh_shard(rows, deflate_index=deflate) for name, rows in shards.items()}


_encodings: st.SearchStrategy[Literal["raw", "gzip"]] = st.sampled_from(("raw", "gzip"))
_object_ids = st.integers(0, 30) | U64 | st.sampled_from((2**44 - 1, 2**44, 2**63 - 1, 2**63, 2**64 - 1))
_odd_ids = st.sampled_from(("info", "0.shard", "x", "00", "+1", "-1", str(2**64), "1.index", ".index", "9.data"))


@st.composite
def sparse_skeletons(draw: st.DrawFn) -> Sparse:
    """Opaque chunks by id, some of them empty."""
    spec = replace(draw(sharding_specs()), data_encoding=draw(_encodings))
    skeletons = draw(st.dictionaries(_object_ids, st.binary(max_size=6), max_size=12))
    contents = {n: gzip.compress(d, mtime=0) if spec.data_encoding == "gzip" else d for n, d in skeletons.items()}
    info = {**handmade_ids.SKELETONS, "sharding": spec_json(spec)}
    files = {"info": json.dumps(info).encode(), **_id_shards(spec, {n: (b"", d) for n, d in contents.items()})}
    chunk_files = {str(number): data for number, data in skeletons.items()}
    return Sparse(
        files, chunk_files, _object_ids.map(str) | _odd_ids, {str(number): data for number, data in contents.items()}
    )


@st.composite
def sparse_meshes(draw: st.DrawFn) -> Sparse:
    """Meshes of any number of levels and fragments, some of no bytes."""
    spec = replace(draw(sharding_specs()), data_encoding=draw(_encodings))
    levels = st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=3)
    meshes, chunk_files, raw = {}, dict[str, bytes](), dict[str, bytes]()
    for number, sizes in draw(st.dictionaries(_object_ids, levels, max_size=9)).items():
        manifest, size = handmade_ids.manifest(sizes), sum(map(sum, sizes))
        fragments = draw(st.binary(min_size=size, max_size=size))
        container = gzip.compress(manifest, mtime=0) if spec.data_encoding == "gzip" else manifest
        meshes[number] = fragments, container
        chunk_files |= {str(number): fragments, f"{number}.index": manifest}
        raw[f"{number}.index"] = container
    info = {**handmade_ids.MESHES, "sharding": spec_json(spec)}
    files = {"info": json.dumps(info).encode(), **_id_shards(spec, meshes)}
    names = _object_ids.map(str) | _object_ids.map("{}.index".format) | _odd_ids
    return Sparse(files, chunk_files, names, raw)


@st.composite
def sparse_annotations(draw: st.DrawFn) -> Sparse:
    """An index by id and a level of cells of any rank, each with a sharding of its own."""
    info: dict[str, Any] = {"@type": "neuroglancer_annotations_v1"}
    files, chunk_files, raw = dict[str, bytes](), dict[str, bytes](), dict[str, bytes]()

    def index(key: str, members: dict[str, Any], values: Mapping[str, tuple[int, bytes]]) -> dict[str, Any]:
        """`values`: the id and the bytes of each name."""
        told = {f"{key}/{name}": data for name, (_, data) in values.items()}
        chunk_files.update(told)
        spec = replace(draw(sharding_specs()), data_encoding=draw(_encodings))
        contain = partial(gzip.compress, mtime=0) if spec.data_encoding == "gzip" else bytes
        raw.update({name: contain(data) for name, data in told.items()})
        entries = {number: (b"", contain(data)) for number, data in values.values()}
        files.update(_id_shards(spec, entries, f"{key}/"))
        return {"key": key, **members, "sharding": spec_json(spec)}

    by_id = draw(st.dictionaries(_object_ids, st.binary(max_size=6), max_size=6))
    info["by_id"] = index("by_id", {}, {str(number): (number, data) for number, data in by_id.items()})
    grid = draw(grids(bits=50))
    cell_of = st.tuples(*(st.integers(0, min(n - 1, 3)) | st.integers(max(n - 3, 0), n - 1) for n in grid))
    by_cell = draw(st.dictionaries(cell_of, st.binary(max_size=6), max_size=6))
    values = {"_".join(map(str, cell)): (handmade.morton(cell, grid), data) for cell, data in by_cell.items()}
    info["spatial"] = [index("spatial0", {"grid_shape": list(grid)}, values)]
    files["info"] = json.dumps(info).encode()
    near = st.tuples(*(st.integers(0, n) for n in grid)).map(lambda cell: "spatial0/" + "_".join(map(str, cell)))
    return Sparse(files, chunk_files, near | _object_ids.map("by_id/{}".format) | _odd_ids, raw)


# ----------------------------------------------------------------------------------------------------- JSON

json_values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-2, 9)
    | st.sampled_from((2**31, 2**40, 2**53, 2**62, 2**63, 2**64, 10**30))
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.sampled_from(
        ("sharding_indexed", "bytes", "crc32c", "transpose", "regular", "rectilinear", "raw", "../x", "/")
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def json_paths(document: Any) -> list[tuple[Any, ...]]:
    """The paths of all members and items of a document."""
    out: list[tuple[Any, ...]] = []
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in items:
        out.append((key,))
        out.extend((key, *below) for below in json_paths(value))
    return out


def replaced(document: Any, path: Sequence[Any], value: Any) -> Any:
    """A copy of the document with another value at `path`."""
    if not path:
        return value
    out = dict(document) if isinstance(document, dict) else list(document)
    out[path[0]] = replaced(document[path[0]], path[1:], value)
    return out
