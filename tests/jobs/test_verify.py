"""`verify`: every kind of damage provoked once, nothing found where nothing is, the same however the work is shared."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import google_crc32c
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st
from numcodecs.blosc import Blosc
from numcodecs.zstd import Zstd

from shardfs.jobs import shared_work
from shardfs.jobs.findings import Damage, Report, ShardTally
from shardfs.jobs.verify import ShardVerifier
from shardfs.model.byte_ranges import cover, groups
from shardfs.storage.cache import ByteLRU
from shardfs.storage.local import LocalStore
from shardfs.storage.remote import FsspecStore
from shardfs.vfs.discovery import Datasets
from shardfs.vfs.tree import Tree
from tests import data_n5, handmade, handmade_ids
from tests import data_zarr_transformer as draft
from tests.codecs.chunk_model import streamed_zstd
from tests.conftest import _run
from tests.datasets import sharding
from tests.handmade import Entry, uint64_shard, write_files, write_json, zarr_metadata, zarr_shard
from tests.waiting import read_terminal, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tests.conftest import WrittenOnce

CASES = {**handmade.CASES, **handmade_ids.CASES, **{f"n5_{name}": case for name, case in data_n5.DAMAGED.items()}}


def verified(tree: Tree, *, deep: bool = False) -> Report:
    """All that is found in a tree."""
    whole = Report("")
    for collection in tree.collections():
        verifier = ShardVerifier(collection, deep=deep)
        for shard in collection.shards.outermost.source.existing()[0].tolist():
            whole.add(verifier.verify(shard))
    return whole


def look(path: Path, *, deep: bool = False) -> Report:
    return verified(Tree(Datasets(LocalStore(str(path)), ByteLRU(1 << 20), ByteLRU(1 << 20))), deep=deep)


def kinds(report: Report) -> set[str]:
    return {f.kind for f in report.findings}


# What is found in each case: kinds, and after a | those that only a deep run finds.
FOUND = {
    "annotations_outside_the_grid": "grid",
    "annotations_zero_byte_shard": "index",
    "mesh_fragments_before_the_shard": "decode overlap",
    "mesh_fragments_deflated_with_the_manifest": "decode",
    "mesh_index_damaged": "index",
    "mesh_manifest_too_long": "decode",
    "mesh_manifest_too_short": "decode",
    "mesh_manifests_deflated": "decode",
    "mesh_of_very_many_levels": "decode",
    "mesh_offsets_of_all_ones": "decode overlap range",
    "n5_chunk_checksum_wrong": "checksum",
    "mesh_zero_byte_shard": "index",
    "n5_cut": "range",
    "n5_cut_end": "index",
    "n5_enormous_chunk": "range",
    "n5_headerless_of_wrong_size": "size",
    "n5_index_header_wrong": "index",
    "n5_zero_bytes": "index",
    "n5_headers_lie": "decode",
    "n5_index_checksum_wrong": "index",
    "n5_index_checksum_wrong_end": "index",
    "n5_nested_index_wrong": "index",
    "n5_range_past_end": "range",
    "n5_range_wraps": "range",
    "n5_seed": "entry range",
    "n5_shorter_than_index": "index",
    "skeletons_in_the_wrong_place": "placement",
    "skeletons_of_one_damaged_minishard": "index",
    "skeletons_zero_byte_shard": "index",
    "volume_chunk_past_end": "range",
    "volume_chunk_range_wraps": "range",
    "volume_data_gzip_damaged": "decode",
    "volume_data_is_a_bomb": "| decode",
    "volume_ids_in_the_wrong_minishard": "placement",
    "volume_ids_outside_the_grid": "grid",
    "volume_index_ends_before_it_starts": "index",
    "volume_index_enormous": "index",
    "volume_index_gzip_truncated": "index",
    "volume_index_is_a_bomb": "index",
    "volume_index_not_a_multiple_of_24": "index",
    "volume_index_not_gzip": "index",
    "volume_index_past_end": "index",
    "volume_legacy_data_of_zero_bytes": "index",
    "volume_legacy_data_without_index": "read",
    "volume_legacy_index_of_zero_bytes": "index",
    "volume_legacy_index_without_data": "read",
    "volume_shorter_than_shard_index": "index",
    "volume_zero_byte_shard": "index",
    "zarr_chunk_covers_index": "overlap size",
    "zarr_deflated_shard_is_a_bomb": "shard",
    "zarr_enormous_chunk": "range",
    "zarr_garbage_without_checksum": "range",
    "zarr_nested_inner_damage": "index",
    "zarr_nested_zero_byte_shard": "index",
    "zarr_only_nbytes_is_ones": "entry",
    "zarr_only_offset_is_ones": "entry",
    "zarr_range_past_end": "range",
    "zarr_range_past_end_start": "range",
    "zarr_range_wraps": "range",
    "zarr_shared_and_overlapping": "overlap",
    "zarr_shard_is_fifo": "read",
    "zarr_shorter_than_index": "index",
    "zarr_shorter_than_index_start": "index",
    "zarr_truncated": "index",
    "zarr_truncated_start": "range",
    "zarr_wrong_checksum": "index",
    "zarr_wrong_checksum_start": "index",
    "zarr_zero_byte_shard": "index",
    "zarr_zero_byte_shard_start": "index",
    "zarr_zero_byte_shard_with_a_checksum_behind": "shard index",
    "zarr_zero_byte_shard_with_codecs_around": "shard",
    "zarr_zero_length_chunk": "size",
}
# A directory in the place of a shard is found when shards are listed, see below.
NOT_FOUND = {"zarr_shard_is_directory"}


@pytest.mark.parametrize("name", sorted(CASES))
def test_what_is_found(name: str, tmp_path: Path) -> None:
    case = CASES[name](tmp_path / "x")
    shallow, _, deeper = FOUND.get(name, "").partition("|")
    assert kinds(look(case.path)) == set(shallow.split())
    report = look(case.path, deep=True)
    assert kinds(report) == {*shallow.split(), *deeper.split()}
    assert report.tally.findings >= len(report.findings) >= len(kinds(report))
    if not name.startswith("mesh"):  # of which each is two files
        assert {f for finding in report.findings for f in finding.files} <= {*case.bad, *case.good, *case.absent}
    if case.bad and name not in NOT_FOUND:
        assert report.findings


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_same_is_found_behind_fsspec(name: str, tmp_path: Path) -> None:
    if name in ("zarr_shard_is_directory", "zarr_shard_is_fifo"):
        pytest.skip("object stores have neither")
    if name == "volume_legacy_data_without_index":
        pytest.skip("which of its files is missing is told in other words")
    import fsspec

    case = CASES[name](tmp_path / "x")
    store = FsspecStore(fsspec.filesystem("file"), str(case.path))
    report = verified(Tree(Datasets(store, ByteLRU(1 << 20), ByteLRU(1 << 20))), deep=True)
    assert sorted(report.findings) == sorted(look(case.path, deep=True).findings)


# ---- arrays of which the chunks have codecs


def crc(data: bytes) -> bytes:
    return data + struct.pack("<I", google_crc32c.value(data))


CODECS: Mapping[str, tuple[Any, Callable[[bytes], bytes]]] = {
    "crc32c": ({"name": "crc32c"}, crc),
    "gzip": ({"name": "gzip", "configuration": {"level": 1}}, lambda d: gzip.compress(d, mtime=0)),
    "zstd": ({"name": "zstd", "configuration": {"level": 1}}, lambda d: bytes(Zstd(checksum=True).encode(d))),
    "streamed": ({"name": "zstd", "configuration": {"level": 1}}, streamed_zstd),
    "blosc": ({"name": "blosc", "configuration": {}}, lambda d: bytes(Blosc("lz4").encode(d))),
}
CHUNKS = [bytes(range(i, i + 100)) * 10 for i in (1, 20, 40, 60)]


def encoded_array(path: Path, chain: Sequence[str], damage: Callable[[bytes], bytes] | None = None) -> None:
    """Two shards of 2x2 chunks of 1000 bytes; the chunk c/0/1 is damaged."""
    source_bytes = []
    for data in CHUNKS:
        for name in chain:
            data = CODECS[name][1](data)
        source_bytes.append(data)
    damaged = [source_bytes[0], damage(source_bytes[1]) if damage else source_bytes[1], *source_bytes[2:]]
    codecs = [{"name": "bytes"}, *(CODECS[name][0] for name in chain)]
    write_json(path / "zarr.json", zarr_metadata((20, 400), (20, 200), (10, 100), codecs=codecs))
    write_files(path, {"c/0/0": zarr_shard(damaged), "c/0/1": zarr_shard(source_bytes)})


def flipped(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if at >= 0 else flipped(len(data) + at)(data)


@pytest.mark.parametrize(
    "chain",
    [
        (),
        *((c,) for c in CODECS),
        ("gzip", "crc32c"),
        ("crc32c", "zstd"),
        ("gzip", "streamed"),
        ("streamed", "streamed"),
    ],
)
def test_sound_chunks(chain: Sequence[str], tmp_path: Path) -> None:
    encoded_array(tmp_path, chain)
    for deep in (False, True):
        report = look(tmp_path, deep=deep)
        assert report.findings == []
        assert (report.tally.chunks, report.tally.dead_bytes, report.tally.unchecked_chunks) == (8, 0, 0)
        if deep or "crc32c" in chain[-1:]:
            assert report.tally.looked_bytes == report.tally.stored_bytes


@pytest.mark.parametrize(
    ("chain", "damage", "shallow", "deep"),
    [
        ("crc32c", flipped(50), "checksum", "checksum"),
        ("gzip crc32c", flipped(-1), "checksum", "checksum"),
        ("crc32c zstd", lambda _: bytes(Zstd().encode(crc(CHUNKS[1])[:-1] + b"!")), "", "decode"),
        ("gzip", flipped(0), "decode", "decode"),
        ("gzip", flipped(-8), "", "decode"),
        ("zstd", flipped(0), "decode", "decode"),
        ("zstd", flipped(-1), "", "decode"),
        ("streamed", lambda d: d[:-1], "", "decode"),
        ("streamed", lambda _: streamed_zstd(bytes(999)), "", "decode"),
        ("gzip streamed", lambda d: d + b"?", "", "decode"),
        ("zstd", lambda _: bytes(Zstd().encode(bytes(999))), "decode", "decode"),
        ("gzip", lambda _: gzip.compress(bytes(999)), "", "decode"),
        ("blosc", lambda d: d[:-1], "decode", "decode"),
        ("blosc", lambda d: d[:10], "decode", "decode"),
        ("blosc", lambda d: d + b"?", "decode", "decode"),
        ("blosc", lambda _: bytes(Blosc("lz4").encode(bytes(999))), "decode", "decode"),
        ("", lambda d: d[:-1], "size", "size"),
        ("crc32c", lambda d: crc(d[:-5]), "size", "size"),
    ],
)
def test_damaged_chunks(chain: str, damage: Callable[[bytes], bytes], shallow: str, deep: str, tmp_path: Path) -> None:
    encoded_array(tmp_path, chain.split(), damage)
    assert kinds(look(tmp_path)) == set(shallow.split())
    (finding,) = look(tmp_path, deep=True).findings
    assert (finding.kind, finding.files, finding.shard) == (deep, ("c/0/1",), "c/0/0")


def test_names_beside_shards_may_be_of_any_bytes(tmp_path: Path) -> None:
    handmade.zarr_sound(tmp_path / "x")
    (tmp_path / "x/c" / os.fsdecode(b"\xff\xfe")).write_bytes(b"note")
    (tmp_path / "x/c/0" / os.fsdecode(b"\xff")).write_bytes(b"note")
    report = look(tmp_path / "x", deep=True)
    assert (kinds(report), report.tally.shards > 0) == (set(), True)


def test_chunks_larger_than_what_is_read_at_a_time(tmp_path: Path) -> None:
    data = os.urandom(3 << 20)
    document = zarr_metadata((2, 3 << 20), (2, 3 << 20), (1, 3 << 20), codecs=[{"name": "bytes"}, {"name": "crc32c"}])
    write_json(tmp_path / "zarr.json", document)
    write_files(tmp_path, {"c/0/0": zarr_shard([crc(data), crc(data)[:-1] + b"?"])})
    report = look(tmp_path)
    assert [(f.kind, f.files) for f in report.findings] == [("checksum", ("c/1/0",))]
    assert report.tally.looked_bytes == 2 * len(data) + 8


def test_codecs_that_nothing_here_knows_are_counted(tmp_path: Path) -> None:
    document = zarr_metadata((4, 4), (4, 4), (2, 2), codecs=[{"name": "bytes"}, {"name": "lost_codec"}])
    write_json(tmp_path / "zarr.json", document)
    write_files(tmp_path, {"c/0/0": zarr_shard([b"?"] * 4)})
    assert look(tmp_path).tally.unchecked_chunks == 0
    report = look(tmp_path, deep=True)
    assert (report.findings, report.tally.unchecked_chunks, report.tally.looked_bytes) == ([], 4, 4)


def test_compressors_that_blosc_was_built_without_are_no_damage(tmp_path: Path) -> None:
    blosc = {"cname": "snappy", "clevel": 5, "shuffle": "noshuffle", "typesize": 1, "blocksize": 0}
    chain = [{"name": "bytes"}, {"name": "blosc", "configuration": blosc}]
    metadata = {
        "shape": [4000],
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4000]}},
        "codecs": [sharding((1000,), chain)],
    }
    store = {"driver": "file", "path": f"{tmp_path}/"}
    array = ts.open({"driver": "zarr3", "kvstore": store, "metadata": metadata}, create=True).result()
    array.write(np.ones(4000, "uint8")).result()
    report = look(tmp_path, deep=True)
    assert (report.findings, report.tally.unchecked_chunks) == ([], 4)


@pytest.mark.parametrize("checksums", [1, 2])
def test_checksums_behind_whole_shards(checksums: int, tmp_path: Path) -> None:
    document = zarr_metadata((4, 8), (4, 4), (2, 2))
    document["codecs"] += [{"name": "crc32c"}] * checksums
    write_json(tmp_path / "zarr.json", document)
    shard = zarr_shard([b"abcd"] * 4)
    for _ in range(checksums):
        shard = crc(shard)
    write_files(tmp_path, {"c/0/0": shard, "c/0/1": shard})
    assert look(tmp_path).findings == []
    for at in range(len(shard) - 4 * checksums, len(shard), 4):
        write_files(tmp_path, {"c/0/1": flipped(at)(shard)})
        (finding,) = look(tmp_path).findings
        assert (finding.kind, finding.shard) == ("shard", "c/0/1")
    write_files(tmp_path, {"c/0/1": b"abc"})
    assert kinds(look(tmp_path)) == {"shard"}


def test_images(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    import io

    def picture(kind: str, *size: int) -> bytes:
        out = io.BytesIO()
        image.fromarray(np.zeros(size, np.uint8)).save(out, kind)
        return out.getvalue()

    for kind in ("jpeg", "png"):
        info = handmade.volume_info((4, 4, 2), (2, 2, 1), handmade.sharding(minishard=0), encoding=kind)
        write_json(tmp_path / kind / "info", info)
        good, small, cut = picture(kind, 2, 2), picture(kind, 2, 3), picture(kind, 2, 2)[:-30]
        entries = [Entry(0, good), Entry(1, small), Entry(2, cut)]
        write_files(tmp_path / kind, {"s/0.shard": uint64_shard([entries])})
        assert look(tmp_path / kind).findings == []
        damage = look(tmp_path / kind, deep=True).findings
        assert [(f.kind, len(f.files)) for f in damage] == [("decode", 1)] * 2
        assert "elements expected" in damage[0].why


# ---- ids


def volume(path: Path, minishards: Sequence[Sequence[Entry]]) -> None:
    write_json(path / "info", handmade.volume_info((4, 4, 2), (2, 2, 1), handmade.sharding(minishard=1)))
    write_files(path, {"s/0.shard": uint64_shard(minishards)})


def test_ids_that_occur_twice(tmp_path: Path) -> None:
    volume(tmp_path, [[Entry(0, b"abcd"), Entry(2, b"efgh"), Entry(0, b"ijkl")], [Entry(1, b"mnop")]])
    report = look(tmp_path)
    assert [(f.kind, f.files) for f in report.findings] == [("duplicate", ("s/0-2_0-2_0-1",))]
    assert report.tally.dead_bytes == 4


def test_chunks_of_different_minishards_that_overlap(tmp_path: Path) -> None:
    volume(tmp_path, [[Entry(0, b"abcd"), Entry(2, b"efgh")], [Entry(1, b"mnop", at=2)]])
    (finding, *more) = look(tmp_path).findings
    assert finding.kind == "overlap"
    assert {name for f in (finding, *more) for name in f.files} == {"s/0-2_0-2_0-1", "s/0-2_2-4_0-1", "s/2-4_0-2_0-1"}


def test_raw_chunks_have_a_size(tmp_path: Path) -> None:
    volume(tmp_path, [[Entry(0, b"abcd")], [Entry(1, b"mno")]])
    (finding,) = look(tmp_path).findings
    assert (finding.kind, finding.why) == ("size", "4 bytes expected, 3 stored")


# ---- much damage, much data


def test_much_damage_of_one_kind_is_counted(tmp_path: Path) -> None:
    write_json(tmp_path / "zarr.json", zarr_metadata((100, 100), (100, 100), (1, 1)))
    write_files(tmp_path, {"c/0/0": zarr_shard([b"xy"] * 10_000)})
    report = look(tmp_path)
    assert report.tally.findings == 10_000
    assert len(report.findings) == 21
    assert report.findings[-1].times == 9_980
    assert sum(f.times for f in report.findings) == 10_000


_MEMORY = """
import resource, sys
from shardfs.jobs import shared_work
def used(shards):
    source = shared_work.JobSource.from_url(sys.argv[1])
    plans = [p._replace(shards=p.shards[:shards]) for p in shared_work.plan(source)]
    for report in shared_work.verify(source, plans, deep=True):
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
few = used(2)
print(used(200) - few)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_chunks(tmp_path: Path) -> None:
    write_json(tmp_path / "zarr.json", zarr_metadata((200, 16384), (1, 16384), (1, 1)))
    shard = zarr_shard([b"x"] * 16384)
    write_files(tmp_path, {f"c/{i}/0": shard for i in range(200)})
    command = [sys.executable, "-c", _MEMORY, str(tmp_path)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
    assert int(completed.stdout) < 8


@pytest.mark.parametrize("compressed", [False, True])
def test_the_draft_of_2022(compressed: bool, tmp_path: Path) -> None:
    codec = {"codec": "https://purl.org/zarr/spec/codec/gzip/1.0", "configuration": {"level": 1}}
    members = {"compressor": codec} if compressed else {}
    document = draft.array_document((4, 4), (2, 2), draft.sharding(2, 2), data_type="<u2", **members)
    chunks = [bytes([i] * 8) if i < 3 else bytes(7) for i in range(4)]
    source_bytes = [gzip.compress(data, mtime=0) for data in chunks] if compressed else chunks
    shard = zarr_shard(source_bytes, checksum="none")
    draft.write_hierarchy(tmp_path, {"a": document}, {"a/c0/0": shard})
    (finding,) = look(tmp_path, deep=True).findings
    assert (finding.kind, finding.files) == ("decode" if compressed else "size", ("data/root/a/c1/1",))


@pytest.mark.parametrize(
    ("name", "shard", "why"),
    [
        ("zarr_shard_is_directory", "c/0/0", "should be a file, but is a directory"),
        ("volume_legacy_index_without_data", "s/0.shard", "has no file of data beside that of its index"),
        ("volume_legacy_data_without_index", "s/0.shard", "has no file of its index beside that of data"),
    ],
)
def test_what_is_called_as_a_shard_is(name: str, shard: str, why: str, tmp_path: Path) -> None:
    job_source = shared_work.JobSource.from_url(str(handmade.CASES[name](tmp_path / "x").path))
    (finding,) = told(shared_work.verify(job_source))[0]
    assert (finding.shard, finding.kind, finding.why) == (shard, "read", why)
    assert not any(p.strays for p in shared_work.plan(job_source, shared_work.JobPart(2, 2)))


# ---- what other libraries write is sound


def written() -> dict[str, Callable[[Path], object]]:
    """What writes a dataset into an empty directory; by name."""
    from tests import data_bcolz, data_blosc2, data_precomputed_ids, datasets

    def bcolz(path: Path) -> None:
        for kind in range(9):
            how = data_bcolz.Superchunk(checksum=kind)
            data_bcolz.write_array(path / str(kind), np.arange(1000, dtype="<u4"), 64, 5, how)

    def n5(name: str) -> Callable[[Path], object]:
        return lambda path: data_n5.VARIANTS[name].write(path, name)

    def blosc2(path: Path) -> None:
        for name, write in data_blosc2.WRITERS.items():
            write(path / name, True)

    return {
        **{f"zarr3_{name}": write for name, write in datasets.ZARR3.items()},
        **{f"precomputed_{name}": write for name, write in datasets.PRECOMPUTED.items()},
        **{f"ids_{name}": write for name, write in data_precomputed_ids.DATASETS.items()},
        **{f"n5_{name}": n5(name) for name in data_n5.VARIANTS},
        "bcolz": bcolz,
        "blosc2": blosc2,
    }


@pytest.mark.interop
@pytest.mark.parametrize("name", sorted(written()))
def test_what_others_write_is_sound(name: str, written_once: WrittenOnce) -> None:
    if name == "blosc2":
        pytest.importorskip("blosc2")
    key = name.replace("_", "-", 1)  # as the fixtures `dataset` and `id_dataset` have it
    written_once.get(key, written()[name])
    report = look(written_once.directory / key, deep=True)
    assert report.findings == []
    if name.startswith(("n5", "zarr3")) and "all_fill" not in name and "empty" not in name:
        assert report.tally.looked_bytes > 0
        assert not report.tally.unchecked_chunks or any(part in name for part in ("lz4", "bzip2", "xz", "zlib"))


# ---- sharing the work out


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Collections of several kinds, with damage in some."""
    path = tmp_path_factory.mktemp("verify")
    names = ["zarr_sound", "zarr_range_past_end", "volume_data_gzip_damaged", "volume_gaps_and_junk"]
    for name in names:
        handmade.CASES[name](path / name)
    write_json(path / "many" / "zarr.json", zarr_metadata((40, 8), (4, 4), (2, 2)))
    sound, damaged = zarr_shard([b"abcd"] * 4), zarr_shard([b"abcd"] * 4, checksum="wrong")
    write_files(path / "many", {f"c/{i}/{j}": damaged if i == 3 else sound for i in range(10) for j in range(2)})
    return str(path)


def told(reports: Iterable[Report]) -> tuple[list[Damage], dict[str, ShardTally]]:
    """Findings, and the counts of each collection."""
    findings: list[Damage] = []
    tallies: dict[str, ShardTally] = {}
    for report in reports:
        findings += report.findings
        tallies.setdefault(report.collection, ShardTally()).add(report.tally)
    return findings, tallies


def test_however_it_is_done_the_same_is_found(source: str) -> None:
    job_source = shared_work.JobSource.from_url(source)
    alone = told(shared_work.verify(job_source, deep=True))
    assert {f.collection for f in alone[0]} == {"zarr_range_past_end", "volume_data_gzip_damaged/s", "many"}
    with ThreadPoolExecutor(3) as threads:
        assert told(shared_work.verify(job_source, deep=True, executor=threads, workers=3)) == alone
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert told(shared_work.verify(job_source, deep=True, executor=pool)) == alone
    assert told(shared_work.verify(job_source, deep=True, workers=2)) == alone


@pytest.mark.parametrize("n", [1, 2, 3, 7, 100])
def test_the_parts_make_the_whole(n: int, source: str) -> None:
    job_source = shared_work.JobSource.from_url(source)
    whole = [(p.collection, s) for p in shared_work.plan(job_source) for s in p.shards.tolist()]
    parts = [
        [(p.collection, s) for p in shared_work.plan(job_source, shared_work.JobPart(i, n)) for s in p.shards.tolist()]
        for i in range(1, n + 1)
    ]
    assert sorted(shard for part in parts for shard in part) == sorted(whole)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    reports = [
        told(shared_work.verify(job_source, shared_work.plan(job_source, shared_work.JobPart(i, n))))[0]
        for i in range(1, n + 1)
    ]
    assert sorted(f for part in reports for f in part) == sorted(told(shared_work.verify(job_source))[0])


def test_tasks_are_values_that_travel(source: str) -> None:
    import pickle

    job_source = shared_work.JobSource.from_url(source, {"auto_mkdir": True})
    work = list(shared_work.tasks(shared_work.VerifyJob(job_source, deep=True), shared_work.plan(job_source)))
    assert pickle.loads(pickle.dumps(work)) == work
    assert all(len(pickle.dumps(task)) < 1000 for task in work)


_DYING = """
import os, sys
from shardfs.jobs import shared_work, verify
original = verify.ShardVerifier.verify
def deadly(self, shard):
    if self.tree.path == "many" and shard in (4, 11):
        os._exit(1)
    return original(self, shard)
verify.ShardVerifier.verify = deadly
if __name__ == "__main__":
    found = [f for r in shared_work.verify(shared_work.JobSource.from_url(sys.argv[1]), workers=2) for f in r.findings]
    for f in found:
        print(f.collection, f.shard, f.kind, f.why)
"""


def test_a_dead_process_ends_only_its_own_shard(source: str, tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text(_DYING)
    command = [sys.executable, str(tmp_path / "dying.py"), source]
    path = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path}
    completed = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False, env=env)
    assert completed.returncode == 0, completed.stderr
    lines = completed.stdout.splitlines()
    died = "task could not be verified: the process that did it died"
    assert [line for line in lines if " task " in line] == [f"many many/c/{s} {died}" for s in ("2/0", "5/1")]
    assert len(lines) == len(told(shared_work.verify(shared_work.JobSource.from_url(source)))[0]) + 2


class Unlucky(Executor):
    """Fails every other task, and breaks at the end."""

    def __init__(self) -> None:
        self.submitted = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        from concurrent.futures.process import BrokenProcessPool

        self.submitted += 1
        if self.submitted > 8:
            raise BrokenProcessPool("it is broken")
        future: Future[Any] = Future()
        if self.submitted % 2:
            future.set_result(fn(*args, **kwargs))
        else:
            future.set_exception(MemoryError("no memory left"))
        return future


def test_an_executor_that_fails_ends_nothing(source: str) -> None:
    job_source = shared_work.JobSource.from_url(source)
    findings, tallies = told(shared_work.verify(job_source, executor=Unlucky()))
    failed = [f.why for f in findings if f.kind == "task"]
    assert failed[:4] == ["could not be verified: MemoryError: no memory left"] * 4
    assert set(failed[4:]) == {"could not be verified: the process that did it died"}
    assert {path: t.shards for path, t in tallies.items()} == {
        p.collection: len(p.shards) for p in shared_work.plan(job_source)
    }


def test_a_source_that_is_gone_meanwhile(tmp_path: Path) -> None:
    handmade.CASES["zarr_sound"](tmp_path / "x")
    job_source = shared_work.JobSource.from_url(str(tmp_path / "x"))
    plans = list(shared_work.plan(job_source))
    for shard in (tmp_path / "x" / "c").rglob("?"):
        if shard.is_file():
            shard.unlink()
    findings, _ = told(shared_work.verify(job_source, plans))
    assert [f.kind for f in findings] == ["read", "read"]


# ---- the command line


def shardfs(*args: str) -> subprocess.CompletedProcess[str]:
    return _run([sys.executable, "-m", "shardfs", *args], 250)


def test_exit_codes_and_words(source: str) -> None:
    completed = shardfs("verify", f"{source}/zarr_sound")
    assert (completed.returncode, completed.stderr) == (0, "")
    assert completed.stdout == "/: 2 shards (168 B), 8 chunks (32 B), sound\n"
    completed = shardfs("verify", f"{source}/zarr_range_past_end")
    assert completed.returncode == 7
    assert completed.stdout.splitlines() == [
        "c/0/0: range: its range [1000000, 1000004) leaves the object of 84 bytes (c/0/0)",
        "c/0/0: range: its range [0, 1000000) leaves the object of 84 bytes (c/1/1)",
        "/: 2 shards (168 B), 6 chunks (24 B), 8 B dead, 2 findings",
    ]
    assert shardfs("verify", f"{source}/nothing").returncode == 3
    assert shardfs("verify", f"{source}/many/c").returncode == 4
    for wrong in ("0/2", "3/2", "1", "a/b", "-1/2"):
        assert shardfs("verify", source, "--shards", wrong).returncode == 2


def test_ctrl_c_while_workers_start_shows_no_traceback(source: str) -> None:
    """The terminal sends the signal to all processes, also to those that still import."""
    command = [sys.executable, "-m", "shardfs", "verify", "--jobs", "3", source]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_until(lambda: len(children.read_text().split()) >= 3)  # the resource tracker and two workers
        os.killpg(process.pid, signal.SIGINT)
        _, told = process.communicate(timeout=250)
    assert (process.returncode, told.strip()) == (128 + signal.SIGINT, "")


def test_json_is_the_same_each_time(source: str) -> None:
    one, two = (
        shardfs("verify", "--json", "--deep", source),
        shardfs("verify", "--json", "--deep", "--jobs", "2", source),
    )
    assert one.stdout == two.stdout
    assert (one.returncode, two.returncode, one.stderr, two.stderr) == (7, 7, "", "")
    lines = [json.loads(line) for line in one.stdout.splitlines()]
    findings = [line for line in lines if line["type"] == "finding"]
    assert [line["type"] for line in lines] == [*["finding"] * len(findings), *["collection"] * 5, "end"]
    assert lines[-1] == {"type": "end", "deep": True, "findings": len(findings)}
    finding, counts = lines[0], lines[-2]
    assert list(finding) == ["type", "collection", "shard", "kind", "why", "files", "times"]
    assert counts["collection"] == "zarr_sound"
    assert set(counts) == {
        "type",
        "collection",
        "shards",
        "chunks",
        "shard_bytes",
        "stored_bytes",
        "dead_bytes",
        "shared_bytes",
        "outside_chunks",
        "looked_bytes",
        "unchecked_chunks",
        "findings",
    }


def test_metadata_that_cannot_be_read_is_damage(tmp_path: Path) -> None:
    handmade.CASES["zarr_sound"](tmp_path / "a")
    write_files(tmp_path, {"b/zarr.json": b"{not json"})
    completed = shardfs("verify", str(tmp_path))
    assert completed.returncode == 7
    assert completed.stdout.startswith("b: metadata: zarr.json: cannot be read")


def test_a_bar_on_a_terminal(source: str) -> None:
    import pty

    master, slave = pty.openpty()
    command = [sys.executable, "-m", "shardfs", "verify", source]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=env) as process:
        os.close(slave)
        screen = read_terminal(master)
        assert process.wait(60) == 7
    os.close(master)
    assert "━".encode() in screen
    assert b"/26" in screen
    assert b"many: 20 shards" in screen


def test_secrets_are_in_no_words_of_a_task() -> None:
    source = shared_work.JobSource.from_url("s3://user:word@host/x", {"secret": "a1b2c3"})
    task = shared_work.Task(shared_work.VerifyJob(source), shared_work.ShardsToVerify("x", (1,)))
    assert "a1b2c3" not in repr(task)
    assert "word" not in repr(task)


# ---- byte ranges


ranges = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12)


@given(ranges)
def test_coverage_is_that_of_a_set(listed: list[tuple[int, int]]) -> None:
    starts = np.array([a for a, _ in listed], np.uint64)
    stops = np.array([a + n for a, n in listed], np.uint64)
    coverage = cover(starts, stops)
    assert coverage.nbytes == len({b for a, n in listed for b in range(a, a + n)})
    assert all(b > a for a, b in zip(coverage.starts.tolist(), coverage.stops.tolist(), strict=True))
    assert all(a < b for a, b in pairwise(np.stack([coverage.starts, coverage.stops], axis=1).ravel().tolist()))
    distinct = {(a, a + n) for a, n in listed if n}
    clash = {b for x, y in pairwise_all(distinct) for b in range(max(x[0], y[0]), min(x[1], y[1]))}
    assert {b for a, stop in coverage.clashes for b in range(a, stop)} == clash
    assert coverage.shared == sum(n for _, n in listed) - sum(b - a for a, b in distinct)


def pairwise_all(values: set[tuple[int, int]]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    return [(x, y) for x in values for y in values if x < y]


@given(ranges, st.integers(1, 50))
def test_groups_cover_every_range_once(listed: list[tuple[int, int]], span: int) -> None:
    listed = sorted(listed)
    starts = np.array([a for a, _ in listed], np.uint64)
    stops = np.array([a + n for a, n in listed], np.uint64)
    runs = groups(starts, stops, span)
    assert [i for first, end, _ in runs for i in range(first, end)] == list(range(len(listed)))
    for first, end, stop in runs:
        assert stop == max(a + n for a, n in listed[first:end])
        assert end == first + 1 or stop - listed[first][0] <= span
