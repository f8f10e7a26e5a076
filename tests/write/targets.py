"""Small sharded arrays of every format that can be written, their native writers, and readers that are not shardfs.

Chunks hold tokens (`tokens.py`).
"""

from __future__ import annotations

import itertools
import json
import warnings
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numcodecs
import numpy as np

from tests import data_n5, handmade
from tests.write import tokens
from tests.write.tokens import DTYPE, Array, Coords

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

Json = Any

LITTLE: Json = {"name": "bytes", "configuration": {"endian": "little"}}
CRC: Json = {"name": "crc32c"}
ZSTD: Json = {"name": "zstd", "configuration": {"level": 1, "checksum": False}}


@dataclass(frozen=True)
class Target:
    """An array of uint32.

    Args:
        per_shard: chunks per shard along each axis; None if another rule says where a chunk lies.
        document: the metadata document.
        create: writes the document alone.
        fill: writes an array natively; chunks of zeros are left out.
        readers: read all of it natively; zeros where there is no chunk. The first one is the quickest.
        layout: of the mount, on which `key` and `encode` are those of the layout.
    """

    name: str
    grid: Coords
    chunk: Coords
    document: str
    key: Callable[[Coords], str]
    encode: Callable[[Array], bytes]
    shard_key: Callable[[Coords], str]
    create: Callable[[Path], None]
    fill: Callable[[Path, Array], None]
    readers: Mapping[str, Callable[[Path], Array]] = field(repr=False)
    layout: str = "native"

    @property
    def described_as(self) -> int:
        """Stands for the document where chunks are told by their numbers."""
        return len(self.chunks)

    @property
    def chunks(self) -> list[Coords]:
        """All of the grid, in C order; a chunk's number is its position here."""
        return tokens.grid_of(self.grid)

    def path(self, number: int) -> str:
        """What the chunk is called on a mount of the array."""
        return self.key(self.chunks[number])

    def shards(self) -> dict[str, list[int]]:
        """The shard objects' keys, and the numbers of the chunks that belong there."""
        out: dict[str, list[int]] = {}
        for number, coords in enumerate(self.chunks):
            out.setdefault(self.shard_key(coords), []).append(number)
        return out

    def shown(self, token: int) -> bytes:
        """The chunk file's bytes."""
        return self.encode(tokens.content(token, self.chunk))

    def array(self, expected_tokens: Mapping[int, int]) -> Array:
        """The whole array, made of chunks of these tokens and zeros."""
        out = np.zeros([g * c for g, c in zip(self.grid, self.chunk, strict=True)], DTYPE)
        for number, token in expected_tokens.items():
            out[tokens.where(self.chunks[number], self.chunk)] = tokens.content(token, self.chunk)
        return out

    def split(self, array: Array) -> Iterator[tuple[int, Array]]:
        """The chunks of a whole array."""
        return tokens.split(array, self.grid, self.chunk)


def _times(a: Sequence[int], b: Sequence[int]) -> Coords:
    return tuple(x * y for x, y in zip(a, b, strict=True))


def _raw(array: Array) -> bytes:
    return array.tobytes()


# --------------------------------------------------------------------------------------------------------- Zarr


def _zstd(array: Array) -> bytes:
    return bytes(numcodecs.Zstd(level=1).encode(array.tobytes()))


def _with_crc(array: Array) -> bytes:
    """All of these have the same CRC-32C."""
    return array.tobytes() + data_n5.crc32c(array.tobytes())


def _zarr_document(grid: Coords, chunk: Coords, shard: Coords, codecs: Sequence[Json]) -> Json:
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": _times(grid, chunk),
        "data_type": "uint32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shard}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": list(codecs),
        "attributes": {},
    }


def _sharding(inner: Sequence[int], codecs: Sequence[Json] = (LITTLE,), location: str = "end") -> Json:
    configuration = {"chunk_shape": list(inner), "codecs": list(codecs), "index_codecs": [LITTLE, CRC]}
    return {"name": "sharding_indexed", "configuration": {**configuration, "index_location": location}}


def read_tensorstore(driver: str, path: Path) -> Array:
    import tensorstore as ts

    spec = {"driver": driver, "kvstore": {"driver": "file", "path": f"{path}/"}}
    return np.asarray(ts.open(spec, context=ts.Context()).result().read().result())


def write_tensorstore(driver: str, path: Path, array: Array) -> None:
    import tensorstore as ts

    store = {"driver": "file", "path": f"{path}/", "file_io_sync": False}
    ts.open({"driver": driver, "kvstore": store}, context=ts.Context()).result().write(array).result()


def read_zarr(path: Path) -> Array:
    import zarr

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of codecs behind shards
        return np.asarray(zarr.open_array(path, mode="r")[...])


def write_zarr(path: Path, array: Array) -> None:
    import zarr

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of codecs behind shards
        zarr.open_array(path, mode="r+")[...] = array


def read_z5(path: Path) -> Array:
    import z5py

    return np.asarray(z5py.File(str(path.parent), mode="r", use_zarr_format=True, zarr_format=3)[path.name][...])


def _zarr(
    name: str,
    codecs: Callable[[Coords], Sequence[Json]],
    encode: Callable[[Array], bytes] = _raw,
    *,
    tensorstore: bool = True,
    per_shard: Coords = (2, 2),
    grid: Coords = (4, 4),
) -> Target:
    chunk = (16, 24)
    shard = _times(per_shard, chunk)
    document = _zarr_document(grid, chunk, shard, codecs(chunk))
    readers = {"tensorstore": partial(read_tensorstore, "zarr3")} if tensorstore else {}
    return Target(
        name,
        grid,
        chunk,
        "zarr.json",
        lambda c: "c/" + "/".join(map(str, c)),
        encode,
        lambda c: "c/" + "/".join(str(i // p) for i, p in zip(c, per_shard, strict=True)),
        lambda root: handmade.write_json(root / "zarr.json", document),
        partial(write_tensorstore, "zarr3") if tensorstore else write_zarr,
        {**readers, "zarr": read_zarr},
    )


# -------------------------------------------------------------------------------------------------- precomputed

_SCALE = "8_8_40"


def _read_cloudvolume(path: Path) -> Array:
    from cloudvolume import CloudVolume

    volume = CloudVolume(f"file://{path}", progress=False, fill_missing=True, cache=False)
    return np.asarray(volume[:])[..., 0]


def _read_volume(path: Path) -> Array:
    return read_tensorstore("neuroglancer_precomputed", path)[..., 0]


def _precomputed(name: str, spec: Json) -> Target:
    grid, chunk = (4, 2, 2), (8, 8, 6)
    size = _times(grid, chunk)
    scale = {"key": _SCALE, "size": size, "chunk_sizes": [chunk], "voxel_offset": [0, 0, 0]}
    scale |= {"encoding": "raw", "resolution": [8, 8, 40], "sharding": spec}
    info = {"@type": "neuroglancer_multiscale_volume", "type": "image", "data_type": "uint32", "num_channels": 1}

    def key(coords: Coords) -> str:
        spans = [f"{i * c}-{min((i + 1) * c, s)}" for i, c, s in zip(coords, chunk, size, strict=True)]
        return f"{_SCALE}/{'_'.join(spans)}"

    def shard_key(coords: Coords) -> str:
        shard, _ = handmade.uint64_hash(handmade.morton(coords, grid), spec)
        return f"{_SCALE}/{handmade.shard_name(shard, spec['shard_bits'])}"

    return Target(
        name,
        grid,
        chunk,
        "info",
        key,
        lambda array: array.tobytes("F"),
        shard_key,
        lambda root: handmade.write_json(root / "info", {**info, "scales": [scale]}),
        lambda root, array: write_tensorstore("neuroglancer_precomputed", root, array[..., None]),
        {"tensorstore": _read_volume, "cloudvolume": _read_cloudvolume},
    )


# ----------------------------------------------------------------------------------------------------------- N5


def _n5(name: str, location: Any) -> Target:
    """No Python library reads shards in N5: they are taken apart here."""
    grid, chunk, per = (4, 4), (24, 16), (2, 2)
    index = data_n5.Index(location=location)
    codecs = [data_n5.sharding(chunk, [{"name": "n5bytes"}], index)]
    shape = _times(grid, chunk)
    document = data_n5.attributes(shape, _times(per, chunk), "uint32", codecs=codecs)

    def encode(array: Array) -> bytes:
        return data_n5.header(chunk) + array.astype(">u4").tobytes("F")

    def fill(root: Path, array: Array) -> None:
        blocks = {c: encode(block) for c, (_, block) in zip(target.chunks, target.split(array), strict=True)}
        blocks = {c: b for c, b in blocks.items() if any(b[data_n5.header_size(b) :])}
        files = data_n5.shards(blocks, per, index)
        handmade.write_files(root, {data_n5.key(position): data for position, data in files.items()})

    def read(root: Path) -> Array:
        out = np.zeros(shape, DTYPE)
        for place in itertools.product(*(range(g // p) for g, p in zip(grid, per, strict=True))):
            path = root / data_n5.key(place)
            if not path.exists():
                continue
            for local, block in n5_blocks(path.read_bytes(), per, index).items():
                assert data_n5.header(chunk) == block[: data_n5.header_size(block)], "header of a block"
                payload = np.frombuffer(block[data_n5.header_size(block) :], ">u4").reshape(chunk, order="F")
                at = [p * n + i for p, n, i in zip(place, per, local, strict=True)]
                out[tuple(slice(i * c, (i + 1) * c) for i, c in zip(at, chunk, strict=True))] = payload
        return out

    target = Target(
        name,
        grid,
        chunk,
        "attributes.json",
        data_n5.key,
        encode,
        lambda c: data_n5.key(i // p for i, p in zip(c, per, strict=True)),
        lambda root: handmade.write_json(root / "attributes.json", document),
        fill,
        {"golden": read},
    )
    return target


def n5_blocks(data: bytes, per: Coords, index: data_n5.Index) -> dict[Coords, bytes]:
    """The blocks of a shard by their position in it; AssertionError if its index is not sound."""
    size = index.size(per)
    assert len(data) >= size, f"a shard of {len(data)} bytes"
    raw = data[:size] if index.location == "start" else data[-size:]
    if index.checksum:
        raw, told = raw[:-4], raw[-4:]
        assert data_n5.crc32c(raw) == told, "the index's checksum"
    entries = np.frombuffer(raw, "<u8" if index.endian == "little" else ">u8").reshape(-1, 2).tolist()
    out = {}
    for local in itertools.product(*map(range, per)):
        start, n = entries[data_n5.slot_of(local, per, index.fastest)]
        if start != data_n5.EMPTY:
            assert start + n <= len(data), "an entry beyond the shard"
            out[local] = data[start : start + n]
    return out


# ------------------------------------------------------------------------------------------------------- all of them


def _nested(chunk: Coords) -> list[Json]:
    return [_sharding((chunk[0] * 2, chunk[1] * 2), [_sharding(chunk, location="start")])]


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        _zarr("zarr_end", lambda chunk: [_sharding(chunk)]),
        _zarr("zarr_start", lambda chunk: [_sharding(chunk, location="start")]),
        _zarr("zarr_zstd", lambda chunk: [_sharding(chunk, [LITTLE, ZSTD])], _zstd),
        _zarr("zarr_crc", lambda chunk: [_sharding(chunk, [LITTLE, CRC])], _with_crc),
        _zarr("zarr_nested", _nested, per_shard=(2, 4)),
        _zarr(
            "zarr_gzip_after",
            lambda chunk: [_sharding(chunk), {"name": "gzip", "configuration": {"level": 1}}],
            tensorstore=False,
        ),
        _zarr("zarr_crc_after", lambda chunk: [_sharding(chunk), CRC], tensorstore=False),
        _zarr("zarr_one_shard", lambda chunk: [_sharding(chunk)], per_shard=(8, 8), grid=(8, 8)),
        _precomputed("precomputed", handmade.sharding(minishard=1, shard=1)),
        _precomputed(
            "precomputed_gzip",
            handmade.sharding(hash="murmurhash3_x86_128", minishard=1, shard=1, index="gzip", data="gzip"),
        ),
        _n5("n5", "end"),
        _n5("n5_start", "start"),
    )
}


def _as_n5(array: Array) -> bytes:
    return data_n5.header(array.shape[::-1]) + array.astype(">u4").tobytes()


_TURNED: Json = {"name": "transpose", "configuration": {"order": [1, 0]}}
_BIG: Json = {"name": "bytes", "configuration": {"endian": "big"}}

LAYOUTS: dict[str, Target] = {
    target.name: target
    for target in (
        replace(
            _zarr(
                "one_shard_as_zarr2",
                lambda chunk: [_sharding(chunk, [LITTLE, ZSTD, CRC])],
                _zstd,
                per_shard=(8, 8),
                grid=(8, 8),
            ),
            layout="zarr2",
            key=data_n5.key,
        ),
        replace(TARGETS["zarr_zstd"], name="zstd_as_zarr2", layout="zarr2", key=data_n5.key),
        replace(
            _zarr("big_as_n5", lambda chunk: [_sharding(chunk, [_BIG])], _as_n5),
            layout="n5",
            key=lambda c: data_n5.key(c[::-1]),
        ),
        replace(
            _zarr("turned_as_n5", lambda chunk: [_sharding(chunk, [_TURNED, LITTLE, ZSTD])], _as_n5),
            layout="n5",
            key=lambda c: data_n5.key(c[::-1]),
        ),
    )
}
"""Arrays that are written through other layouts: chunks pass unchanged, get a header, or are decoded."""


def described(document: bytes, target: Target, token: int) -> bytes:
    """A metadata document with one member more or changed, which is the user's own."""
    parsed = json.loads(document)
    (parsed["attributes"] if target.document == "zarr.json" else parsed)["token"] = token
    return json.dumps(parsed).encode()


def token_in(document: bytes, target: Target) -> int | None:
    """The inverse; None if it has no such member. Raise ValueError for what is no document."""
    parsed = json.loads(document)
    found: int | None = (parsed["attributes"] if target.document == "zarr.json" else parsed).get("token")
    return found
