"""Damaged, absurd and hostile input: an error that says what and where, soon, in little memory; all else is served."""

from __future__ import annotations

import bz2
import gzip
import json
import logging
import lzma
import os
import re
import socket
import subprocess
import sys
import zlib
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from numcodecs.blosc import Blosc
from numcodecs.lz4 import LZ4
from numcodecs.zstd import Zstd

from shardfs.codecs import decoders, zlib_streams
from shardfs.formats.documents import parse_json
from shardfs.formats.precomputed import PRECOMPUTED
from shardfs.formats.zarr3 import ZARR3
from shardfs.model.arrays import Codec
from shardfs.model.dataset import Dataset
from shardfs.model.errors import CorruptShardError
from shardfs.storage.cache import ByteLRU
from shardfs.storage.local import LocalStore
from shardfs.vfs.discovery import Datasets
from shardfs.vfs.tree import Tree, open_tree
from tests import handmade
from tests.data_n5 import lz4_blocks
from tests.datasets import ROOT as REPOSITORY
from tests.strategies import json_paths, json_values, replaced
from tests.suites.view import files
from tests.suites.walking import entries, read_all, walk

if TYPE_CHECKING:
    from pathlib import Path

    from shardfs.model.collection import Collection


def _tree(path: Path) -> Tree:
    """Mounted whatever is in it: some cases hold nothing sound."""
    return Tree(Datasets(LocalStore(str(path)), ByteLRU(1 << 20), ByteLRU(1 << 20)))


@pytest.mark.every_case
@pytest.mark.parametrize("name", sorted(handmade.CASES))
def test_damage_harms_nothing_beside_it(name: str, tmp_path: Path) -> None:
    case = handmade.CASES[name](tmp_path / "x")
    tree = _tree(case.path)
    for file in case.bad:
        with pytest.raises(CorruptShardError) as e:
            read_all(tree, tree.resolve(file))
        assert e.value.why
        assert e.value.key in str(e.value)
    for file in case.absent:
        with pytest.raises(FileNotFoundError):
            tree.resolve(file)
    assert {file: read_all(tree, tree.resolve(file)) for file in case.good} == dict(case.good)
    listed = set(files(tree))
    assert listed >= set(case.good)
    assert listed.isdisjoint(case.absent)


@pytest.mark.every_case
@pytest.mark.parametrize("name", sorted(handmade.CASES))
def test_damage_is_the_same_without_a_descriptor(name: str, tmp_path: Path) -> None:
    """As over a network, where an object's size is not known."""
    if name in ("zarr_shard_is_directory", "zarr_shard_is_fifo"):
        pytest.skip("object stores have neither")
    if name == "volume_legacy_data_without_index":
        pytest.skip("to look for it would cost a request for each shard that does not exist")
    import fsspec

    from shardfs.storage.remote import FsspecStore

    case = handmade.CASES[name](tmp_path / "x")
    store = FsspecStore(fsspec.filesystem("file"), str(case.path))
    tree = Tree(Datasets(store, ByteLRU(1 << 20), ByteLRU(1 << 20)))
    for file in case.bad:
        with pytest.raises(CorruptShardError):
            read_all(tree, tree.resolve(file))
    for file in case.absent:
        with pytest.raises(FileNotFoundError):
            tree.resolve(file)
    assert {file: read_all(tree, tree.resolve(file)) for file in case.good} == dict(case.good)


@pytest.mark.every_case
@pytest.mark.parametrize("name", sorted(handmade.HOSTILE))
def test_hostile_metadata_harms_nothing_beside_it(name: str, tmp_path: Path) -> None:
    case = handmade.HOSTILE[name](tmp_path)
    tree = _tree(case.path)
    tree.survey.require_dataset()
    assert {file: read_all(tree, tree.resolve(file)) for file in case.good} == dict(case.good)
    for file in islice(files(tree), 300):
        try:
            data = read_all(tree, tree.resolve(file))
        except (CorruptShardError, OSError):
            continue
        assert data != handmade.SECRET


# Cases of which each took gigabytes or minutes somewhere, in a process that is given neither.
_LIMITED = r"""
import resource, sys, time
from pathlib import Path
from tests import handmade
name, path = sys.argv[1], Path(sys.argv[2])
write = handmade.CASES.get(name) or handmade.HOSTILE[name]
case = write(path)
import numpy, shardfs.vfs.tree, google_crc32c, mmh3, numcodecs, blosc  # what a mount has loaded when it starts
from tests.limits import usual_seconds
from tests.vfs.test_bad_input import exercise
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.process_time()  # of this process: others may be busy
exercise(case)
spent, most = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(usual_seconds(spent), (most - before) >> 10)
"""


def exercise(case: handmade.Case) -> None:
    """Look at everything that a case holds, as a program would."""
    tree = _tree(case.path)
    tree.survey.require_dataset() if case.good else None
    for file in (*case.good, *case.bad, *case.absent):
        try:
            read_all(tree, tree.resolve(file))
        except (CorruptShardError, OSError):
            continue
    for _ in islice(files(tree), 1000):
        pass


LIMITED = [
    "huge_document",
    "volume_index_is_a_bomb",
    "volume_data_is_a_bomb",
    "zarr_deflated_shard_is_a_bomb",
    "zarr_enormous_chunk",
    "zarr_tera_slots_per_shard",
    "zarr_slots_overflow",
    "zarr_shape_2_63",
    "zarr_many_shards",
    "zarr_deep_attributes",
    "zarr_rank_1000",
    "zarr_rectilinear_run_2_62",
    "volume_minishard_bits_60",
    "volume_minishard_bits_32_shard_bits_32",
    "volume_many_scales",
    "volume_size_2_63",
    "volume_info_deep",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", LIMITED)
def test_within_two_seconds_and_256_mib(name: str, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _LIMITED, name, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=REPOSITORY,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    seconds, mib = map(float, run.stdout.split())
    assert seconds < 2
    assert mib < 256


def test_a_document_of_very_many_members(tmp_path: Path) -> None:
    raw = b'{"zarr_format": 3, "a": {' + b",".join(b'"%x":1' % i for i in range(3_000_000)) + b"}}"
    with pytest.raises(CorruptShardError, match="too many members"):
        parse_json("", "zarr.json", raw)


def test_indentation_does_not_multiply_a_deep_document(tmp_path: Path) -> None:
    inner = "[" * 700 + ",".join("1" * 30_000) + "]" * 700
    document = json.dumps(handmade.zarr_metadata((4, 8), (4, 4), (2, 2))).replace("{}", f'{{"a": {inner}}}')
    handmade.write_files(tmp_path, {"zarr.json": document.encode()})
    tree = _tree(tmp_path)
    assert tree.resolve("zarr.json").size < 4 * len(document)


PACKED: dict[str, Any] = {
    "gzip": gzip.compress,
    "zstd": lambda d: bytes(Zstd().encode(d)),
    "blosc": lambda d: bytes(Blosc().encode(d)),
    "numcodecs.bz2": bz2.compress,
    "numcodecs.lzma": lzma.compress,
    "numcodecs.zlib": zlib.compress,
    "numcodecs.lz4": lambda d: bytes(LZ4().encode(d)),
    "n5.lz4": lz4_blocks,
}


@pytest.mark.parametrize("name", sorted(PACKED))
def test_bombs_of_every_codec(name: str) -> None:
    block = bytes(zlib_streams.MAX_DECODED + 1)
    with pytest.raises(ValueError, match=r"grows beyond|at most|too large"):
        decoders.decode([Codec(name, {})], PACKED[name](block))
    assert decoders.decode([Codec(name, {})], PACKED[name](b"x" * 500)) == b"x" * 500


@given(st.sampled_from(sorted(decoders.DECODERS)), st.binary(max_size=200), st.data())
def test_any_bytes_for_a_codec(name: str, noise: bytes, data: st.DataObject) -> None:
    whole = PACKED[name](noise or b"x") if name in PACKED else noise
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(0, 3))):
        if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    del damaged[data.draw(st.integers(0, len(damaged))) :]
    for raw in (noise, bytes(damaged)):
        with suppress(ValueError):
            decoders.decode([Codec(name, {})], raw)


# ---------------------------------------------------------------------------------------------- wrong types

_ARRAY = handmade.zarr_metadata(
    (4, 8), (4, 4), (2, 2), codecs=[{"name": "transpose", "configuration": {"order": [1, 0]}}, {"name": "bytes"}]
)
_NESTED = handmade.zarr_metadata(
    (8, 8), (4, 4), (2, 2), codecs=handmade.zarr_metadata((4, 4), (2, 2), (1, 1))["codecs"]
)
_NESTED["codecs"].append({"name": "gzip", "configuration": {"level": 1}})
_RECTILINEAR = handmade.zarr_metadata(
    (10, 12),
    (1, 1),
    (2, 3),
    chunk_grid={"name": "rectilinear", "configuration": {"kind": "inline", "chunk_shapes": [[[4, 1], 2, 4], 6]}},
)
_GROUP = {
    **handmade.group_document(a=1),
    "consolidated_metadata": {
        "kind": "inline",
        "must_understand": False,
        "metadata": {
            "a": _ARRAY,
            "g": {**handmade.group_document(), "consolidated_metadata": {"metadata": {"b": _NESTED}}},
        },
    },
}
_VOLUME = handmade.volume_info(
    (9, 7, 5), (4, 4, 4), handmade.sharding(preshift=1, minishard=2, shard=3, index="gzip", data="gzip")
)
_DOCUMENTS = {
    "array": ("zarr.json", _ARRAY),
    "nested": ("zarr.json", _NESTED),
    "rectilinear": ("zarr.json", _RECTILINEAR),
    "group": ("zarr.json", _GROUP),
    "volume": ("info", _VOLUME),
}


@pytest.mark.parametrize("kind", sorted(_DOCUMENTS))
@given(st.data())
def test_wrong_types_anywhere_in_metadata(kind: str, data: st.DataObject) -> None:
    name, document = _DOCUMENTS[kind]
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(json_paths(document)))
        document = replaced(document, path, data.draw(json_values))
    raw = json.dumps(document).encode()
    try:
        dataset = (ZARR3 if name == "zarr.json" else PRECOMPUTED).open("x", {name: raw})
    except CorruptShardError:
        return
    if dataset is None:
        return
    assert isinstance(dataset, Dataset)
    for content in dataset.documents.values():
        assert parse_json("x", name, content) is not None
    for collection in dataset.collections:
        _use(collection)


def _use(collection: Collection) -> None:
    """What was accepted can be asked."""
    names = collection.names
    grid = collection.layers[-1].format.grid
    if all(grid):
        first = (0,) * len(grid)
        last = tuple(n - 1 for n in grid)
        for cell in (first, last):
            shard, page, _ = collection.layers[-1].format.place(cell)
            assert collection.layers[-1].format.shard_of(collection.layers[-1].format.key(shard)) == shard
            assert page < 1 << max(collection.layers[-1].format.page_bits, 1)
        for level, n in enumerate(names.dims):
            names.parse(level, b"0")
            assert n >= 1


@given(st.binary(max_size=80) | st.text(max_size=40).map(str.encode))
def test_any_bytes_for_a_document(raw: bytes) -> None:
    for fmt in (ZARR3, PRECOMPUTED):
        for data in (raw, b"{" + raw):
            with suppress(CorruptShardError):
                fmt.open("x", {name: data for name in fmt.documents})


# ------------------------------------------------------------------------------------------ files of all kinds


def test_links_out_of_the_source_give_nothing_away(tmp_path: Path) -> None:
    handmade.write_files(tmp_path, {"secret": handmade.SECRET, "outside/zarr.json": b"{}"})
    root = tmp_path / "root"
    case = handmade.zarr_sound(root / "good")
    handmade.zarr_sound(root / "evil")
    (root / "evil/c/0/0").unlink()
    (root / "evil/c/0/0").symlink_to("../../../../secret")
    (root / "evil/note").symlink_to("../../secret")
    (root / "evil/c/0/note").symlink_to("../../../../secret")
    (root / "up").symlink_to("..")
    (root / "doc").mkdir()
    (root / "doc/zarr.json").symlink_to("../../secret")
    tree = _tree(root)
    tree.survey.require_dataset()
    for name in ("evil/c/0/0", "evil/note", "evil/c/0/note", "up/secret", "up/outside/zarr.json", "doc/zarr.json"):
        with pytest.raises((CorruptShardError, PermissionError)):
            read_all(tree, tree.resolve(name))
    assert {n: read_all(tree, tree.resolve(f"good/{n}")) for n in case.good} == dict(case.good)
    assert [e.name for e in entries(tree, tree.resolve("evil/c/0").number)] == [b"0", b"1", b"2", b"3", b"note"]


def test_what_is_no_file_is_served_by_name_alone(tmp_path: Path) -> None:
    case = handmade.zarr_sound(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    os.mkfifo(tmp_path / "c/fifo")
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(tmp_path / "socket"))
    (tmp_path / "null").symlink_to("/dev/null")
    tree = _tree(tmp_path)
    assert set(files(tree)) >= set(case.good)
    for name in ("fifo", "c/fifo", "socket", "null"):
        with pytest.raises(OSError, match=r"neither a file nor|leads out"):
            read_all(tree, tree.resolve(name))
    assert {n: read_all(tree, tree.resolve(n)) for n in case.good} == dict(case.good)


VOLUME = {"@type": "neuroglancer_multiscale_volume", "type": "image", "data_type": "uint8", "num_channels": 1}
SHARDING = {"@type": "neuroglancer_uint64_sharded_v1", "preshift_bits": 0, "hash": "identity", "minishard_bits": 0}
SCALE = {"size": [8] * 3, "chunk_sizes": [[4] * 3], "resolution": [1] * 3, "encoding": "raw"}
STEP = {"type": "scale", "scale": [1, 1]}
AXES = [{"name": name, "type": "space"} for name in "yx"]


def _named_in_documents(name: str) -> dict[str, Any]:
    """Documents that say that a part of their dataset is in the directory `name`."""
    scale = {**SCALE, "key": name}
    where = [{"path": name, "coordinateTransformations": [STEP]}]
    transform = {"axes": ["y", "x"], "scale": [1, 1], "translate": [0, 0], "units": ["nm", "nm"]}
    images = [{"version": "0.5", "axes": AXES, "datasets": where}]
    return {
        "sharded/info": {**VOLUME, "scales": [{**scale, "sharding": {**SHARDING, "shard_bits": 0}}]},
        "plain/info": {**VOLUME, "scales": [scale]},
        "mesh/info": {**VOLUME, "scales": [], "mesh": name},
        "ome/zarr.json": {
            "zarr_format": 3, "node_type": "group",
            "attributes": {"ome": {"version": "0.5", "multiscales": images}},
        },
        "n5/attributes.json": {"multiscales": [{"datasets": [{"path": name, "transform": transform}]}]},
    }  # fmt: skip


@pytest.mark.parametrize("layout", ["native", "zarr2", "zarr3", "n5", "precomputed"])
@pytest.mark.parametrize("name", ["\ud800", "a/\udfff", "a\0b", "x" * 300, "x/" * 3000, "../../up"])
def test_names_in_documents_that_no_file_can_have(name: str, layout: str, tmp_path: Path) -> None:
    """The other datasets of the group are shown, and only those that a layout cannot express are omitted."""
    for key, document in _named_in_documents(name).items():
        (tmp_path / key).parent.mkdir()
        (tmp_path / key).write_text(json.dumps(document))
    good = zarr.create_array(tmp_path / "good", shape=(4, 4, 4), chunks=(2, 2, 2), shards=(4, 4, 4), dtype="u1")
    good[:] = 7
    tree = open_tree(str(tmp_path), layout=layout, skip_unsupported=True)
    assert len([path for path in walk(tree) if path.startswith("good/")]) > 8
    assert [summary.path for summary in tree.survey.summaries() if "good" in summary.path]
    for problem in tree.problems():
        f"{problem.path}: {problem.why}".encode()


def test_one_directory_that_cannot_be_read_does_not_stop_the_search(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/zarr.json").symlink_to("/etc/passwd")
    handmade.zarr_sound(tmp_path / "b")
    tree = _tree(tmp_path)
    with caplog.at_level(logging.WARNING, "shardfs"):
        list(tree.survey.summaries())
    assert any(re.search(r"^a: .*leads out of the source", r.getMessage()) for r in caplog.records)
    assert read_all(tree, tree.resolve("b/c/0/0"))


def test_problems_are_logged_once_with_place_and_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    handmade.zarr_sound(tmp_path / "good")
    handmade.write_json(tmp_path / "evil/zarr.json", handmade.zarr_metadata([4, 4], [4, 4], [3, 2]))
    tree = _tree(tmp_path)
    with caplog.at_level(logging.WARNING, "shardfs"):
        for _ in range(3):
            list(tree.survey.summaries())
            tree.resolve("evil/zarr.json")
    (line,) = [r.getMessage() for r in caplog.records]
    assert line.startswith("evil: shown as it is stored: zarr.json: a shard of 4 elements along axis 0")
    assert [p.path for p in tree.problems()] == ["evil"]


@pytest.mark.parametrize("layout", ["native", "zarr2"])
def test_a_document_that_cannot_be_read_is_not_said_to_be_shown(
    layout: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handmade.zarr_sound(tmp_path / "good")
    handmade.write_files(tmp_path, {"evil/zarr.json": b'{"zarr_format": 3, oops'})
    with caplog.at_level(logging.WARNING, "shardfs"):
        tree = open_tree(str(tmp_path), layout=layout)
        list(tree.survey.summaries())
    (line,) = [r.getMessage() for r in caplog.records]
    assert line.startswith("evil: cannot be opened: zarr.json: cannot be read: ")
    assert [(p.path, p.damaged) for p in tree.problems()] == [("evil", True)]
    with pytest.raises(CorruptShardError):
        tree.resolve("evil/zarr.json")


def test_one_collection_cannot_use_up_the_numbers(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        document = handmade.zarr_metadata([2**62], [2**10], [1])
        handmade.write_json(tmp_path / name / "zarr.json", document)
    handmade.zarr_sound(tmp_path / "z")
    tree = _tree(tmp_path)
    for name in ("a", "b", "c"):
        with pytest.raises(CorruptShardError, match="beyond any real array"):
            list(tree.scan(tree.resolve(name).number))
    assert read_all(tree, tree.resolve("z/c/0/0"))
