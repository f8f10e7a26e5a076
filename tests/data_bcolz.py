"""Superchunks put together from the byte facts of the RFC, and bcolz datasets of them; nothing here uses shardfs.

No program ever wrote superchunk files, so that there is no other writer: "RFC for a persistence layer for bcolz",
sections "The superchunk layout" and "The `meta` files". The header is also that of bloscpack, whose own files lie in
`tests/golden/bloscpack`.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import blosc
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

Array = npt.NDArray[Any]

SUMS: tuple[Callable[[bytes], bytes], ...] = (
    lambda _: b"",
    lambda data: struct.pack("<I", zlib.adler32(data)),
    lambda data: struct.pack("<I", zlib.crc32(data)),
    lambda data: hashlib.md5(data).digest(),
    lambda data: hashlib.sha1(data).digest(),
    lambda data: hashlib.sha224(data).digest(),
    lambda data: hashlib.sha256(data).digest(),
    lambda data: hashlib.sha384(data).digest(),
    lambda data: hashlib.sha512(data).digest(),
)

BLP = b"blpk\x01\0\0\0\x01\0\0\0\0\0\0\0"
"""What bcolz 1.x puts before each chunk."""


def stored(data: bytes, typesize: int = 1) -> bytes:
    """A Blosc chunk that is not compressed: flag 0x02."""
    return struct.pack("<BBBBIII", 2, 1, 0x02, typesize, len(data), len(data), 16 + len(data)) + data


def compressed(data: bytes, typesize: int = 1, cname: str = "blosclz") -> bytes:
    chunk: bytes = blosc.compress(data, typesize=typesize, clevel=5, shuffle=blosc.SHUFFLE, cname=cname)
    return chunk


@dataclass(frozen=True)
class Superchunk:
    """How a superchunk is written.

    Args:
        checksum: number of the kind.
        room: entries of the table of offsets without a chunk.
        slack: bytes left free behind each chunk and its checksum.
        unknown: entries of the table that are -1 although there is a chunk.
        told: how many chunks the header tells, if not as many as there are.
        entries: replaces entries of the table.
        spoilt: chunks whose checksum is wrong.
    """

    version: int = 2
    checksum: int = 1
    offsets: bool = True
    room: int = 0
    slack: int = 0
    backwards: bool = False
    unknown: frozenset[int] = frozenset()
    told: int | None = None
    metadata: bytes | None = None
    entries: tuple[tuple[int, int], ...] = ()
    spoilt: frozenset[int] = frozenset()

    def write(self, chunks: Sequence[bytes], sizes: tuple[int, int] = (-1, -1)) -> bytes:
        """The file; `sizes` are chunk-size and last-chunk."""
        head = struct.pack(
            "<4sBBBBiiqq",
            b"blpk",
            self.version,
            self.offsets | (self.metadata is not None) << 1,
            self.checksum,
            1,
            *sizes,
            len(chunks) if self.told is None else self.told,
            self.room,
        )
        if self.metadata is not None:
            head += metadata_section(self.metadata)
        body, offsets = bytearray(), {}
        begin = len(head) + (8 * (len(chunks) + self.room) if self.offsets else 0)
        for i in sorted(range(len(chunks)), reverse=self.backwards):
            offsets[i] = begin + len(body)
            digest = SUMS[self.checksum](chunks[i])
            if i in self.spoilt:
                digest = bytes(b ^ 1 for b in digest)
            body += chunks[i] + digest + b"~" * self.slack
        table = [-1 if i in self.unknown else offsets[i] for i in range(len(chunks))] + [-1] * self.room
        for i, entry in self.entries:
            table[i] = entry
        return head + (struct.pack(f"<{len(table)}q", *table) if self.offsets else b"") + bytes(body)


def metadata_section(data: bytes, *, room: int | None = None, checksum: int = 2, codec: int = 1) -> bytes:
    packed = zlib.compress(data) if codec else data
    room = 2 * len(packed) if room is None else room
    head = struct.pack("<8sBBBBIII8s", b"JSON", 0, checksum, codec, 6, len(data), room, len(packed), b"")
    return head + packed.ljust(room, b"\0") + SUMS[checksum](packed)


# ------------------------------------------------------------------------------------------------- datasets


def chunks_of(array: Array, chunklen: int, cname: str = "blosclz") -> list[bytes]:
    """Chunks along the first axis, C order; the last one has only the rows that are left."""
    return [
        compressed(array[i : i + chunklen].tobytes(), array.dtype.itemsize, cname)
        for i in range(0, len(array), chunklen)
    ]


def write_superchunks(directory: Path, chunks: Sequence[bytes], per_file: int, how: Superchunk) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for k, i in enumerate(range(0, len(chunks), per_file), 1):
        (directory / f"__{k}__.bin").write_bytes(how.write(chunks[i : i + per_file]))


def sizes_yaml(shape: Sequence[int], nbytes: int, cbytes: int) -> str:
    return f"shape: {tuple(shape)}\nnbytes: {nbytes}\ncbytes: {cbytes}\n"


def storage_yaml(dtype: str, chunkshape: Sequence[int], per_file: int, more: str = "") -> str:
    return (
        f"dtype: {dtype}\nchunkshape: {tuple(chunkshape)}\nsuperchunksize: {per_file}   # max. number of chunks\n"
        f"{more}compression:\n    library: blosclz\n    level: 5\n    filters: [shuffle, truncate]\n"
    )


def write_array(
    root: Path,
    array: Array,
    chunklen: int,
    per_file: int,
    how: Superchunk | None = None,
    *,
    attributes: str | None = None,
    as_json: bool = False,
    cname: str = "blosclz",
) -> None:
    """One array as the RFC has it."""
    chunks = chunks_of(array, chunklen, cname)
    (root / "data").mkdir(parents=True)
    (root / "meta").mkdir()
    write_superchunks(root / "data", chunks, per_file, how or Superchunk())
    cbytes = sum(map(len, chunks))
    chunkshape = (chunklen, *array.shape[1:])
    big = array.dtype.str.startswith(">")
    if as_json:
        sizes = json.dumps({"shape": list(array.shape), "nbytes": array.nbytes, "cbytes": cbytes})
        storage = json.dumps(
            {
                "dtype": array.dtype.str,
                "chunkshape": list(chunkshape),
                "superchunksize": per_file,
                "compression": {"library": cname, "level": 5, "filters": ["shuffle"]},
            }
        )
    else:
        sizes = sizes_yaml(array.shape, array.nbytes, cbytes)
        endianness = "endianness: big\norder: C\n" if big else ""
        storage = storage_yaml(array.dtype.name, chunkshape, per_file, endianness)
    (root / "meta/sizes").write_text(sizes)
    (root / "meta/storage").write_text(storage)
    if attributes is not None:
        (root / "meta/attributes").write_text(attributes)


def decoded(path: Path) -> bytes:
    """The elements in a superchunk, by the offsets behind its header, because no library reads these files."""
    raw = path.read_bytes()
    count = struct.unpack_from("<q", raw, 16)[0]
    offsets = struct.unpack_from(f"<{count}q", raw, 32)
    return b"".join(blosc.decompress(raw[o : o + struct.unpack_from("<I", raw, o + 12)[0]]) for o in offsets)


WRITE_1X = """
import sys, numpy as np, bcolz
array = bcolz.carray(np.load(sys.argv[1]), rootdir=sys.argv[2], mode="w", chunklen=int(sys.argv[3]), dflt=3,
                     cparams=bcolz.cparams(clevel=7, shuffle=1, cname="lz4"))
array.attrs["unit"] = "nm"
array.flush()
"""


def pack_1x(root: Path, per_file: int, how: Superchunk) -> None:
    """Put the chunks that bcolz 1.x wrote into superchunks, and say so in its own documents by one more member."""
    files = sorted((root / "data").glob("__*.blp"), key=lambda path: int(path.stem[2:]))
    chunks = [path.read_bytes()[len(BLP) :] for path in files]
    chunks = [chunk[: int.from_bytes(chunk[12:16], "little")] for chunk in chunks]
    for path in files:
        path.unlink()
    write_superchunks(root / "data", chunks, per_file, how)
    storage = json.loads((root / "meta/storage").read_text())
    (root / "meta/storage").write_text(json.dumps({**storage, "superchunksize": per_file}) + "\n")


def write_columns(
    root: Path, columns: Mapping[str, Array | Mapping[str, Array]], chunklen: int, per_file: int, how: Superchunk
) -> None:
    """A structured dtype in column-wise order: a directory below `data` for each column, and below it for each part."""
    dtype, flat = "", {}
    for name, column in columns.items():
        if isinstance(column, np.ndarray):
            flat[f"{name}"] = column
            dtype += f"\n    {name}: {column.dtype.name}"
            continue
        dtype += f"\n    {name}:"
        for part, values in column.items():
            flat[f"{name}/{part}"] = values
            dtype += f"\n        {part}: {values.dtype.name}"
    nbytes = cbytes = 0
    for path, values in flat.items():
        chunks = chunks_of(values, chunklen)
        write_superchunks(root / "data" / path, chunks, per_file, how)
        nbytes, cbytes = nbytes + values.nbytes, cbytes + sum(map(len, chunks))
    first = next(iter(flat.values()))
    (root / "meta").mkdir(parents=True)
    (root / "meta/sizes").write_text(sizes_yaml(first.shape, nbytes, cbytes))
    (root / "meta/storage").write_text(storage_yaml(dtype, (chunklen, *first.shape[1:]), per_file))
