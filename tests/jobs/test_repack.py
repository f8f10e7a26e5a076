"""`pack --regions`: a pipeline finds damage, computes these chunks again, and puts them into the shards."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tensorstore as ts
import zarr
from click.testing import CliRunner
from zarr.codecs import BytesCodec, GzipCodec

import shardfs
from shardfs.cli import commands
from shardfs.fsspec_fs.filesystem import ShardFileSystem
from shardfs.model.changes import FIRST
from shardfs.model.errors import BusyError, UnsupportedError
from shardfs.storage.source_locks import journal_directory
from shardfs.write.journal import Journal
from tests.handmade import split_legacy
from tests.jobs.interrupting import calls_until_end
from tests.jobs.packing import pack
from tests.jobs.test_pack_scale import plain
from tests.mount.distant import serving

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CHUNK, SHAPE = (8, 8), (60, 44)
DATA = np.arange(1, 1 + 60 * 44, dtype="<u2").reshape(SHAPE)


def write_plain(root: Path, name: str = "a", **how: Any) -> Path:
    """A group with an array of one file per chunk."""
    zarr.create_group(root, overwrite=True)
    how = {"shape": SHAPE, "chunks": CHUNK, "dtype": "<u2", "compressors": None, **how}
    zarr.create_array(root / name, **how)[:] = DATA[tuple(map(slice, how["shape"]))]
    return root


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The array in shards of 3 x 3 chunks, and a copy of it without damage."""
    list(pack(str(write_plain(tmp_path / "plain")), str(tmp_path / "sharded"), chunks_per_shard=(3, 3)))
    shutil.copytree(tmp_path / "sharded", tmp_path / "sound")
    return tmp_path / "sharded"


def run(*command: object) -> tuple[int, str, str]:
    found = CliRunner().invoke(commands, [str(word) for word in command], standalone_mode=False)
    if found.exception is not None:
        raise found.exception
    return found.return_value, found.stdout, found.stderr


def verify(path: Path, *more: str) -> tuple[int, str]:
    code, out, _ = run("verify", "--regions", path, *more)
    return code, out


def shown(root: Path) -> dict[str, bytes]:
    fs = ShardFileSystem(str(root), skip_instance_cache=True)
    return {name.lstrip("/"): fs.cat_file(name) for name in fs.find("")}


def stored(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def break_entries(shard: Path, *slots: int) -> None:
    """Let chunks of a shard of 9 begin beyond its end. The checksum of the index stays right."""
    import google_crc32c

    raw = bytearray(shard.read_bytes())
    index = memoryview(raw)[-16 * 9 - 4 : -4]
    for slot in slots:
        index[16 * slot : 16 * slot + 8] = (1 << 40).to_bytes(8, "little")
    crc = google_crc32c.value(bytes(index)).to_bytes(4, "little")
    index.release()
    raw[-4:] = crc
    shard.write_bytes(raw)


def recompute(plain: Path, rows: str) -> int:
    """Write the chunks of these rows as plain files, as a pipeline would; return their number."""
    write_plain(plain)
    wanted = set()
    for row in rows.splitlines()[1:]:
        start, stop = (tuple(map(int, field.split())) for field in row.split(",")[3:5])
        axes = (range(a // c, -(-b // c)) for a, b, c in zip(start, stop, CHUNK, strict=True))
        wanted |= {os.path.join("c", *map(str, cell)) for cell in product(*axes)}
    for file in (plain / "a" / "c").rglob("*"):
        if file.is_file() and str(file.relative_to(plain / "a")) not in wanted:
            file.unlink()
    return len(wanted)


# ---- pipelines


def test_damaged_chunks_are_computed_again(sharded: Path, tmp_path: Path) -> None:
    before = stored(sharded)
    break_entries(sharded / "a/c/0/1", 4)
    break_entries(sharded / "a/c/2/0", 0)
    code, rows = verify(sharded)
    assert (code, len(rows.splitlines())) == (7, 3)
    (tmp_path / "rows.csv").write_text(rows)
    damaged = stored(sharded)
    assert recompute(tmp_path / "new", rows) == 2
    command = ("pack", tmp_path / "new", sharded, "--array", "a", "--regions", tmp_path / "rows.csv")
    assert run(*command) == (0, "2 chunks replaced in 2 shards (256 B)\n", "")
    assert verify(sharded, "--deep", "--expect", str(tmp_path / "rows.csv"))[0] == 0
    assert shown(sharded) == shown(tmp_path / "sound")
    after = stored(sharded)
    assert {name for name in after if after[name] != before[name]} == {"a/c/0/1", "a/c/2/0"}
    for name in ("a/c/0/1", "a/c/2/0"):  # only new chunks and a new index were appended
        assert after[name].startswith(damaged[name][: -16 * 9 - 4])
    for read in (zarr.open_array(sharded / "a", mode="r")[:], read_by_tensorstore(sharded / "a")):
        assert np.array_equal(read, DATA)
    assert run(*command)[0] == 0
    assert stored(sharded) == after  # the chunks are there already


def read_by_tensorstore(path: Path) -> Any:
    return ts.open({"driver": "zarr3", "kvstore": f"file://{path}/"}).result().read().result()


def test_a_shard_with_a_damaged_index_and_a_missing_one_are_made_again(sharded: Path, tmp_path: Path) -> None:
    raw = bytearray((sharded / "a/c/1/1").read_bytes())
    raw[-1] ^= 1
    (sharded / "a/c/1/1").write_bytes(raw)
    (sharded / "a/c/2/1").unlink()
    code, rows = verify(sharded, "--expect", "all")
    (tmp_path / "rows.csv").write_text(rows)
    assert code == 7
    assert recompute(tmp_path / "new", rows) == 9 + 6
    command = ("pack", tmp_path / "new", sharded, "--regions", tmp_path / "rows.csv")
    assert run(*command)[:2] == (0, "15 chunks replaced in 2 shards (1.9 KiB)\n")
    assert verify(sharded, "--deep", "--expect", "all")[0] == 0
    assert shown(sharded) == shown(tmp_path / "sound")


def test_rows_as_json_and_of_other_arrays(sharded: Path, tmp_path: Path) -> None:
    list(pack(str(write_plain(tmp_path / "more", "b")), str(tmp_path / "b"), chunks_per_shard=(3, 3)))
    shutil.copytree(tmp_path / "b" / "b", sharded / "b")
    for name in ("a", "b"):
        break_entries(sharded / name / "c/0/0", 1, 2)
    code, rows = verify(sharded, "--json")
    assert code == 7
    (tmp_path / "rows.json").write_text(rows)
    found = stored(sharded)
    code, out, _ = run(
        "pack", tmp_path / "plain", sharded, "--array", "a", "--regions", tmp_path / "rows.json", "--json"
    )
    assert (code, json.loads(out)) == (0, {"type": "end", "chunks": 2, "shards": 1, "bytes": 256, "problems": 0})
    assert {name for name, raw in stored(sharded).items() if raw != found[name]} == {"a/c/0/0"}
    code, out, err = run("pack", tmp_path / "plain", sharded, "--regions", tmp_path / "rows.json")
    assert (code, err) == (3, "b: was left unchanged, because the source has no such array\n")


def write_volumes(tmp_path: Path) -> None:
    """A volume of one file per chunk, and the same in shards of compressed chunks."""
    spec: Any = {
        "driver": "neuroglancer_precomputed",
        "multiscale_metadata": {"type": "image", "data_type": "uint8", "num_channels": 1},
        "scale_metadata": {
            "key": "s", "size": [30, 20, 10], "encoding": "raw", "chunk_size": [8, 8, 8], "resolution": [1, 1, 1],
        },
    }  # fmt: skip
    data = np.arange(30 * 20 * 10, dtype=np.uint8).reshape(30, 20, 10, 1)
    sharding = {
        "@type": "neuroglancer_uint64_sharded_v1", "preshift_bits": 1, "minishard_bits": 1, "shard_bits": 2,
        "hash": "identity", "data_encoding": "gzip", "minishard_index_encoding": "gzip",
    }  # fmt: skip
    for name, more in (("plain", {}), ("sharded", {"sharding": sharding})):
        scale = {**spec["scale_metadata"], **more}
        store = ts.open(
            {**spec, "scale_metadata": scale, "kvstore": f"file://{tmp_path / name}/"}, create=True
        ).result()
        store[...].write(data).result()


def test_chunks_of_a_volume_with_gzip(tmp_path: Path) -> None:
    """A volume numbers its chunks in another way, and its shards have them compressed."""
    write_volumes(tmp_path)
    expected = shown(tmp_path / "sharded")
    (tmp_path / "sharded" / "s" / "1.shard").unlink()
    code, rows = verify(tmp_path / "sharded", "--expect", "all")
    (tmp_path / "rows.csv").write_text(rows)
    assert code == 7
    command = ("pack", tmp_path / "plain", tmp_path / "sharded", "--regions", tmp_path / "rows.csv")
    assert run(*command)[0] == 0
    assert verify(tmp_path / "sharded", "--deep", "--expect", "all")[0] == 0
    assert shown(tmp_path / "sharded") == expected


def test_shards_in_shards(tmp_path: Path) -> None:
    serializer: Any = [{"name": "bytes", "configuration": {"endian": "little"}}]
    codecs = serializer
    for shape in (CHUNK, (16, 16)):
        index = [*serializer, {"name": "crc32c"}]
        configuration = {"chunk_shape": shape, "codecs": codecs, "index_codecs": index}
        codecs = [{"name": "sharding_indexed", "configuration": configuration}]
    grid = {"name": "regular", "configuration": {"chunk_shape": (32, 32)}}
    metadata = {"shape": SHAPE, "data_type": "uint16", "chunk_grid": grid, "codecs": codecs}
    spec = {"driver": "zarr3", "kvstore": f"file://{tmp_path}/sharded/a/", "metadata": metadata}
    zarr.create_group(tmp_path / "sharded")
    ts.open(spec, create=True).result()[...].write(np.zeros_like(DATA)).result()
    (tmp_path / "rows.csv").write_text("chunk\na/c/1/5\na/c/7/5\n")
    command = ("pack", write_plain(tmp_path / "plain"), tmp_path / "sharded", "--regions", tmp_path / "rows.csv")
    assert run(*command) == (0, "2 chunks replaced in 2 shards (256 B)\n", "")
    expected = np.zeros_like(DATA)
    expected[8:16, 40:] = DATA[8:16, 40:]
    expected[56:, 40:] = DATA[56:, 40:]
    assert np.array_equal(read_by_tensorstore(tmp_path / "sharded" / "a"), expected)


def test_a_killed_command_leaves_each_shard_old_or_new(sharded: Path, tmp_path: Path) -> None:
    for name in ("0/1", "1/0", "2/1"):
        break_entries(sharded / "a/c" / name, 0, 1)
    (tmp_path / "rows.csv").write_text(verify(sharded)[1])
    command = ["pack", str(tmp_path / "plain"), str(sharded), "--regions", str(tmp_path / "rows.csv")]
    shutil.copytree(sharded, tmp_path / "damaged")
    total = calls_until_end(10_000, *command)
    assert total is not None
    old, new = stored(tmp_path / "damaged"), stored(sharded)
    for call in range(total // 5, total, total // 4):
        shutil.rmtree(sharded)
        shutil.copytree(tmp_path / "damaged", sharded)
        assert calls_until_end(call, *command) is None
        for name, raw in stored(sharded).items():
            assert ".shardfs" in name or name.endswith("__lock") or raw in (old[name], new[name])
        assert run(*command)[0] == 0
        assert stored(sharded) == new


def test_in_python(sharded: Path, tmp_path: Path) -> None:
    break_entries(sharded / "a/c/0/1", 4, 5)
    (tmp_path / "rows.csv").write_text(verify(sharded)[1])
    seen: list[object] = []
    how: Any = {"arrays": ["a"], "regions": tmp_path / "rows.csv", "progress": seen.append}
    result = shardfs.pack(tmp_path / "plain", sharded, **how)
    assert (result.files, result.shards, result.nbytes, result.finished) == (2, 1, 256, True)
    assert seen[-1] == (2, 2, 256)
    (tmp_path / "plain/a/c/1/4").unlink()
    with pytest.raises(shardfs.UnfinishedJobError, match="1 problem;"):
        shardfs.pack(tmp_path / "plain", sharded, **how)
    with pytest.raises(ValueError, match="in one process"):
        shardfs.pack(tmp_path / "plain", sharded, jobs=2, **how)


# ---- what is left unchanged


def test_chunks_without_a_file_are_reported(sharded: Path, tmp_path: Path) -> None:
    break_entries(sharded / "a/c/0/0", 1, 2)
    (sharded / "a/c/2/1").unlink()
    _, rows = verify(sharded, "--expect", "all")
    (tmp_path / "rows.csv").write_text(rows)
    (tmp_path / "plain/a/c/0/2").unlink()
    (tmp_path / "plain/a/c/7/3").unlink()
    before = stored(sharded)
    code, out, err = run("pack", tmp_path / "plain", sharded, "--regions", tmp_path / "rows.csv")
    assert (code, out) == (3, "6 chunks replaced in 2 shards (768 B)\n")
    assert err.splitlines() == [
        "a/c/0/2: was left unchanged, because the source has no file for it",
        "a: the source has files for 5 of the 6 chunks from (48, 24) to (60, 44); the others were left unchanged",
    ]
    assert {name for name, raw in stored(sharded).items() if raw != before.get(name)} == {"a/c/0/0", "a/c/2/1"}
    assert len(verify(sharded, "--expect", "all")[1].splitlines()) == 3


def test_a_shard_in_two_files_is_only_read(tmp_path: Path) -> None:
    """A new shard would hide its two files."""
    write_volumes(tmp_path)
    shard = tmp_path / "sharded/s/1.shard"
    shard.rename(tmp_path / "1.shard")
    (tmp_path / "rows.csv").write_text(verify(tmp_path / "sharded", "--expect", "all")[1])
    split_legacy((tmp_path / "1.shard").rename(shard), minishard_bits=1)
    before = stored(tmp_path / "sharded")
    code, _, err = run("pack", tmp_path / "plain", tmp_path / "sharded", "--regions", tmp_path / "rows.csv")
    assert (code, "two files (.index and .data), which shardfs only reads" in err) == (3, True), err
    assert stored(tmp_path / "sharded") == before


def test_a_damaged_index_needs_files_for_all_chunks(sharded: Path, tmp_path: Path) -> None:
    """Otherwise, the other chunks would read as fill values."""
    (sharded / "a/c/0/0").write_bytes(b"")
    (tmp_path / "rows.csv").write_text(verify(sharded)[1])
    (tmp_path / "plain/a/c/0/0").unlink()
    before = stored(sharded)
    code, _, err = run("pack", tmp_path / "plain", sharded, "--regions", tmp_path / "rows.csv")
    assert code == 3
    assert "files for all of its chunks are needed" in err
    assert stored(sharded) == before


@pytest.mark.parametrize("remote", [False, True])
def test_a_large_file_is_not_held_in_memory(remote: bool, tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    size, target, rows = 6 * FIRST.stop, tmp_path / "sharded", tmp_path / "rows.csv"
    source = plain(tmp_path / "source" / "a", 1, 2, size)
    list(pack(source, str(target), chunks_per_shard=(1, 2)))
    file = tmp_path / "source/a/c/0/1"
    file.write_bytes(b"again" + file.read_bytes()[5:])
    rows.write_text("chunk\nc/0/1\n")
    with serving(tmp_path / "source") as server:
        tracemalloc.start()
        shardfs.pack(f"{server.url}/a" if remote else source, target, regions=rows)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 4 * FIRST.stop
    array: Any = zarr.open_array(target, mode="r")
    assert bytes(array[0, size:]) == file.read_bytes()


# ---- what is refused


def grid_of_4(root: Path) -> str:
    list(pack(str(write_plain(root / "plain4", chunks=(4, 4))), str(root / "other"), chunks_per_shard=(3, 3)))
    (root / "other/a/c/0/0").write_bytes(b"")
    return verify(root / "other")[1]


REGIONS: dict[str, tuple[Callable[[Path], str], str]] = {
    "another grid": (grid_of_4, r"row 1: the region from \(0, 0\) to \(12, 12\) is not that of whole chunks"),
    "beyond the edge": (lambda _: "chunk\na/c/99/0\n", "row 1: no array of the source has a chunk 'a/c/99/0'"),
    "another region": (lambda _: "chunk,start,stop\na/c/0/0,8 0,16 8\n", "is not that of whole chunks"),
    "another rank": (lambda _: "start,stop\n0 0 0,8 8 8\n", "3 numbers in start"),
    "another array": (lambda _: "collection,start,stop\nb,0 0,8 8\n", "no collection 'b'"),
    "huge": (lambda _: "start,stop\n0 0,99999999999999999999999 8\n", "is not that of whole chunks"),
    "reversed": (lambda _: "start,stop\n8 8,0 0\n", "is not that of whole chunks"),
    "no numbers": (lambda _: "start,stop\na b,c d\n", "row 1: invalid literal"),
    "infinite": (lambda _: '{"start": [0, 0], "stop": [Infinity, 8]}\n', "row 1: cannot convert float infinity"),
    "no header": (lambda _: "a/c/0/0\n", "the first line should name the columns"),
    "empty": (lambda _: "", "the first line should name the columns"),
    "no JSON": (lambda _: '{"chunk": \n', "is not JSON"),
    "deep JSON": (lambda _: '{"chunk": ' + "[" * 100_000 + "\n", "is not JSON"),
    "a list": (lambda _: '{"chunk": "a/c/0/0"}\n[]\n', "row 2"),
    "long": (lambda _: "chunk\n" + "x" * 200_000, "field larger than field limit"),
    "binary": (lambda _: "chunk\n\udcff\udcfe\n", "row 1: no array of the source has a chunk"),
}


@pytest.mark.parametrize("name", REGIONS)
def test_files_of_regions_that_are_refused(name: str, sharded: Path, tmp_path: Path) -> None:
    text, why = REGIONS[name]
    (tmp_path / "rows.csv").write_text(text(tmp_path), errors="surrogateescape")
    before = stored(sharded)
    with pytest.raises(Exception, match=why) as error:
        run("pack", tmp_path / "plain", sharded, "--regions", tmp_path / "rows.csv")
    assert type(error.value).__name__ == "UsageError"
    assert stored(sharded) == before


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"chunks": (8, 4)}, r"chunks: \(8, 4\), not \(8, 8\)"),
        ({"shape": (60, 40)}, r"shape: \(60, 40\), not \(60, 44\)"),
        ({"serializer": BytesCodec(endian="big")}, "encoding: "),
        ({"compressors": GzipCodec()}, "encoding: "),
    ],
)
def test_a_source_with_other_chunks_is_refused(how: Any, why: str, sharded: Path, tmp_path: Path) -> None:
    write_plain(tmp_path / "new", **how)
    (tmp_path / "rows.csv").write_text("chunk\na/c/0/0\n")
    with pytest.raises(UnsupportedError, match=f"a: its chunks are not those of the target .*{why}"):
        run("pack", tmp_path / "new", sharded, "--regions", tmp_path / "rows.csv")


def test_arrays_and_options_that_are_refused(sharded: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("chunk\na/c/0/0\n")
    more = ("--regions", tmp_path / "rows.csv")
    with pytest.raises(UnsupportedError, match="b: the target has no sharded array there"):
        run("pack", write_plain(tmp_path / "b", "b"), sharded, *more)
    for words in (("--jobs", 2), ("--part", "1/2"), ("--shard-size", "1M"), ("--chunks-per-shard", "2,2")):
        with pytest.raises(Exception, match="--regions needs none of"):
            run("pack", tmp_path / "plain", sharded, *more, *words)
    with pytest.raises(Exception, match="No such file"):
        run("pack", tmp_path / "plain", sharded, "--regions", tmp_path / "nothing")


def test_a_writable_mount_of_the_target_is_refused(sharded: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("chunk\na/c/0/0\n")
    journal = Journal.open(journal_directory(str(sharded)), str(sharded), limit_bytes=64 << 20)
    try:
        with pytest.raises(BusyError, match="already mounted rw"):
            run("pack", tmp_path / "plain", sharded, "--regions", tmp_path / "rows.csv")
    finally:
        journal.close(clean=True)


@pytest.mark.parametrize(
    ("how", "damage", "why"),
    [
        ({}, lambda raw: raw[:-1], "128 bytes expected, 127 found"),
        ({}, lambda _: b"", "128 bytes expected, 0 found"),
        ({"compressors": GzipCodec()}, lambda raw: b"\0" + raw[1:], "gzip"),
    ],
)
def test_a_damaged_file_does_not_replace_a_chunk(
    how: dict[str, Any], damage: Callable[[bytes], bytes], why: str, tmp_path: Path
) -> None:
    source, target, rows = write_plain(tmp_path / "plain", **how), tmp_path / "sharded", tmp_path / "rows.csv"
    list(pack(str(source), str(target), chunks_per_shard=(3, 3)))
    before = shown(target)
    array: Any = zarr.open_array(source / "a", mode="r+")
    array[:16, :8] = 7
    file = source / "a/c/0/0"
    file.write_bytes(damage(file.read_bytes()))
    rows.write_text("collection,chunk\na,a/c/0/0\na,a/c/1/0\n")
    code, _, errors = run("pack", source, target, "--array", "a", "--regions", rows)
    assert code == 3
    assert "a/c/0/0: is damaged, so its chunk was left unchanged" in errors
    assert why in errors
    after = shown(target)
    assert after["a/c/0/0"] == before["a/c/0/0"]
    assert after["a/c/1/0"] == (source / "a/c/1/0").read_bytes() != before["a/c/1/0"]
