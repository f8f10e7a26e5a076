"""Writes what is absurd, and onto what is absurd, in 1 GiB of address space; says as JSON what came of each.

`python -m tests.write.bombs zarr|volume|n5|shards DIRECTORY`, where DIRECTORY is an empty one. Beside the bombs is an
array that must go on working: a chunk of it is written, published and read again behind each.
"""

from __future__ import annotations

import errno
import json
import resource
import struct
import sys
import time
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardfs.fsspec_fs.filesystem import ShardFileSystem
from shardfs.model.errors import CorruptShardError
from tests import data_n5, handmade
from tests.limits import usual_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIMIT = 1 << 30
DEPTH, DIGITS = 10**5, 10**4

Json = Any

# ---- documents ----

ZARR = handmade.zarr_metadata((16, 16), (8, 8), (2, 2))
VOLUME = handmade.volume_info(
    (16, 16, 12), (4, 4, 2), handmade.sharding(preshift=1, minishard=2, shard=3, index="gzip")
)
N5 = data_n5.attributes(
    (12, 12), (6, 6), "uint16", codecs=[data_n5.sharding((3, 3), [{"name": "n5bytes"}], data_n5.Index())]
)
PLAIN: dict[str, tuple[str, Json]] = {
    "zarr": (
        "zarr.json",
        {
            **ZARR,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 2]}},
            "codecs": [{"name": "bytes"}],
        },
    ),
    "volume": ("info", {**VOLUME, "scales": [{k: v for k, v in VOLUME["scales"][0].items() if k != "sharding"}]}),
    "n5": (
        "attributes.json",
        {"dimensions": [12, 12], "blockSize": [3, 3], "dataType": "uint16", "compression": {"type": "raw"}},
    ),
}
SHARDED = {"zarr": ("zarr.json", ZARR), "volume": ("info", VOLUME), "n5": ("attributes.json", N5)}
SIZES: dict[str, tuple[str, ...]] = {"zarr": ("shape",), "volume": ("scales", "size"), "n5": ("dimensions",)}
CHUNKS = {"zarr": "c/0/0", "volume": "s/0-4_0-4_0-2", "n5": "0/0"}


def sized(kind: str, document: Json, size: Json) -> Json:
    """The document with another shape, or what stands where one should."""
    name = SIZES[kind][-1]
    if kind != "volume":
        return {**document, name: size}
    return {**document, "scales": [{**document["scales"][0], name: size}]}


def with_member(document: Json, text: str) -> bytes:
    """The document with one more member, of which the value is this text."""
    return (json.dumps(document)[:-1] + ', "x": ' + text + "}").encode()


def documents(kind: str, document: Json) -> Iterator[tuple[str, bytes]]:
    """Documents of all kinds that are no good, as files."""
    rank = 3 if kind == "volume" else 2

    def of_size(size: Json) -> bytes:
        return json.dumps(sized(kind, document, size)).encode()

    yield "15 MB of numbers", with_member(document, "[0" + ",1234567" * (15_000_000 // 8) + "]")
    yield "15 MB of brackets", with_member(document, "[" + "[]," * (15_000_000 // 3) + "[]]")
    yield "a million members", with_member(document, "{" + ",".join(f'"{n:x}":1' for n in range(10**6)) + "}")
    yield "deep lists", with_member(document, "[" * DEPTH + "]" * DEPTH)
    yield "deep objects", with_member(document, '{"a":' * DEPTH + "1" + "}" * DEPTH)
    yield "never closed", with_member(document, "[" * DEPTH)
    yield "digits", with_member(document, "1" * DIGITS)
    yield "digits of a size", json.dumps(sized(kind, document, "?")).replace('"?"', f"[{'1' * DIGITS}]").encode()
    yield "a float beyond all", with_member(document, "1" + "0" * DIGITS + ".0e" + "9" * 9)
    for bits in (40, 62, 63, 64):
        yield f"2^{bits}", of_size([2**bits] * rank)
    yield "10^40", of_size([10**40] * rank)
    yield "negative", of_size([-(2**63)] * rank)
    yield "no rank", of_size([])
    yield "rank 1000", of_size([2] * 1000)
    yield "fractions", of_size([0.5] * rank)
    yield "no list", of_size({"a": 1})
    yield "100 MB", with_member(document, "[0" + ",1234567" * (100_000_000 // 8) + "]")


def use(fs: ShardFileSystem, directory: str, kind: str) -> None:
    """As a program would that believes in the document: list it, write a chunk, read it, have it published."""
    for change in (
        lambda: list(islice(fs.ls(directory), 100)),
        lambda: fs.pipe_file(f"{directory}/{CHUNKS[kind]}", b"\1" * 4),
        lambda: fs.cat_file(f"{directory}/{CHUNKS[kind]}"),
        lambda: fs.publish(directory, timeout=5),
    ):
        with suppress(OSError):
            change()


def bombed_documents(fs: ShardFileSystem, told: Told, kind: str) -> None:
    name, plain = PLAIN[kind]
    before = fs.cat_file(f"/{kind}/{name}")
    for what, raw in documents(kind, plain):
        told.of(f"edited: {what}", partial(write, fs, kind, f"/{kind}", raw))
        fs.pipe_file(f"/{kind}/{name}", before)
    for number, (what, raw) in enumerate(documents(kind, plain)):
        told.of(f"new: {what}", partial(write, fs, kind, f"/new/{kind}{number}", raw))


def write(fs: ShardFileSystem, kind: str, directory: str, raw: bytes) -> None:
    try:
        fs.pipe_file(f"{directory}/{PLAIN[kind][0]}", raw)
    finally:
        use(fs, directory, kind)


# ---- shards ----


def overlapping(entries: list[tuple[int, int]]) -> Callable[[Path], handmade.Case]:
    """An array with a shard that says of its four chunks that they lie there."""

    def make(path: Path) -> handmade.Case:
        handmade.zarr_sound(path)
        shard = bytes(range(1, 17)) + handmade.zarr_index(entries)
        handmade.write_files(path, {"c/0/0": shard})
        return handmade.Case(path, {})

    return make


def zstd_bomb(path: Path) -> handmade.Case:
    """A shard in a frame of zstd that tells no size, and is 16 GiB of zeros: blocks of one byte and its count."""
    document = handmade.zarr_metadata((4, 8), (4, 4), (2, 2))
    document["codecs"].append({"name": "zstd", "configuration": {"level": 1, "checksum": False}})
    block = struct.pack("<I", (128 << 10) << 3 | 1 << 1)[:3] + b"\0"
    frame = b"\x28\xb5\x2f\xfd\x00\x58" + block * (1 << 17) + struct.pack("<I", 1)[:3]
    handmade.write_json(path / "zarr.json", document)
    handmade.write_files(path, {"c/0/0": frame})
    return handmade.Case(path, {})


TERA: Json = handmade.zarr_metadata((2**20, 2**20), (2**20, 2**20), (1, 1))
MANY: Json = handmade.volume_info((4, 4, 2), (2, 2, 1), handmade.sharding(minishard=24, shard=32))
SHARDS: dict[str, tuple[Callable[[Path], Any], str]] = {
    **{
        name: (handmade.CASES[name], "s/0-2_0-2_0-1" if name.startswith("volume") else "c/0/0")
        for name in (
            "zarr_enormous_chunk",
            "zarr_range_wraps",
            "zarr_shared_and_overlapping",
            "zarr_chunk_covers_index",
            "zarr_deflated_shard_is_a_bomb",
            "volume_index_is_a_bomb",
            "volume_data_is_a_bomb",
            "volume_index_enormous",
            "volume_chunk_range_wraps",
            "volume_index_past_end",
            "volume_shared_bytes",
        )
    },
    "zarr_all_overlap": (overlapping([(0, 16)] * 4), "c/0/1"),
    "zarr_sum_overflows": (overlapping([(2**64 - 2, 2**64 - 2)] * 4), "c/0/1"),
    "zarr_zstd_bomb": (zstd_bomb, "c/0/0"),
    "zarr_tera_slots": (lambda path: handmade.write_json(path / "zarr.json", TERA), "c/0/0"),
    "volume_2_24_minishards": (lambda path: handmade.write_json(path / "info", MANY), "s/0-2_0-2_0-1"),
}


def bombed_shards(fs: ShardFileSystem, told: Told, source: Path) -> None:
    for name, (make, chunk) in SHARDS.items():
        (source / name).mkdir()
        case = make(source / name)
        good = {} if case is None else {file: data for file, data in case.good.items() if file != chunk}
        told.of(f"{name}: write", partial(publish, fs, f"/{name}", chunk))
        assert {file: fs.cat_file(f"/{name}/{file}") for file in good} == good
        told.of(f"{name}: read", partial(fs.cat_file, f"/{name}/{chunk}"))
        told.of(f"{name}: delete", partial(delete, fs, f"/{name}", chunk))
        found = ShardFileSystem(str(source / name), unsupported="skip", skip_instance_cache=True)
        assert {file: found.cat_file(file) for file in good} == good


def publish(fs: ShardFileSystem, directory: str, chunk: str) -> None:
    fs.pipe_file(f"{directory}/{chunk}", b"\x55" * 4)
    assert fs.cat_file(f"{directory}/{chunk}") == b"\x55" * 4
    fs.publish(directory, timeout=1.5)


def delete(fs: ShardFileSystem, directory: str, chunk: str) -> None:
    fs.rm_file(f"{directory}/{chunk}")
    fs.publish(directory, timeout=1.5)


# ---- what came of it ----


class Told:
    """Seconds of the processor (others may be busy), MiB more than before, and the name of an errno, for each step."""

    def __init__(self, fs: ShardFileSystem) -> None:
        self.fs, self.steps = fs, dict[str, tuple[str, float, int]]()
        self._rounds = 0

    def of(self, what: str, step: Callable[[], object]) -> None:
        before, began = _peak_mib(), time.process_time()
        came = "done"
        try:
            step()
        except OSError as e:
            came = errno.errorcode.get(e.errno or 0, repr(e))
        except CorruptShardError:  # which a mount tells as EIO
            came = "EIO"
        spent, mib = time.process_time() - began, _peak_mib() - before
        self.steps[what] = came, usual_seconds(spent), mib
        self._beside()

    def _beside(self) -> None:
        """The sound array works."""
        self._rounds += 1
        new = struct.pack("<I", self._rounds)
        self.fs.pipe_file("/sound/c/0/1", new)
        self.fs.publish("/sound", timeout=20)
        assert self.fs.cat_file("/sound/c/0/1") == new
        assert self.fs.cat_file("/sound/c/1/2") == bytes([121, 122, 123, 124])


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def main(what: str, top: Path) -> dict[str, Any]:
    source = top / "source"
    handmade.zarr_sound(source / "sound")
    (source / "new").mkdir()
    if what in SHARDED:
        handmade.write_json(source / what / SHARDED[what][0], SHARDED[what][1])
    options = {"journal": str(top / "journals"), "create": "zarr3;precomputed;n5"}
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
    fs = ShardFileSystem(str(source), rw=True, write_options=options, skip_instance_cache=True)
    fs.cat_file("/sound/c/0/0")
    told = Told(fs)
    bombed_documents(fs, told, what) if what in SHARDED else bombed_shards(fs, told, source)
    return {"steps": told.steps, "left": fs.close(1)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
