"""Documents of the draft of 2022 as zarr-python 2.18 writes them on a mount, and what becomes of the source's."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfs.formats.create_rules import Rule
from shardfs.formats.zarr_transformer import META, ZARR_TRANSFORMER, ArrayDocuments
from tests.conftest import need_fuse, run_client
from tests.data_zarr_transformer import array_document, sharding
from tests.datasets import ROOT, client_python
from tests.write.mounts import writable

if TYPE_CHECKING:
    from pathlib import Path

NAME, SUFFIX = "a.array.json", ".json"
DUMMY = {
    "extension": "https://purl.org/zarr/spec/storage_transformers/dummy/1.0",
    "type": "dummy_type",
    "configuration": {},
}
SHARDED = array_document((7, 10), (2, 3), sharding(2, 2)) | {"data_type": "<u2"}
SOURCES: dict[str, dict[str, Any]] = {
    "plain": SHARDED,
    "nested": array_document((7, 10), (2, 3), sharding(2, 2), sharding(3, 2)) | {"data_type": "<u2"},
    "dummy": array_document((7, 10), (2, 3), DUMMY, sharding(2, 2)) | {"data_type": "<u2"},
}


def encoded(document: Any) -> bytes:
    return json.dumps(document).encode()


def shown(source: Any, name: str = NAME) -> dict[str, Any]:
    raw = ArrayDocuments(SUFFIX).rewrite("a", name, encoded(source))
    assert raw is not None
    document: dict[str, Any] = json.loads(raw)
    return document


def edited(source: Any, new: Any, rule: Rule | None = None) -> Any:
    source_documents = {} if source is None else {NAME: encoded(source)}
    return json.loads(ZARR_TRANSFORMER.edit(META, source_documents, NAME, encoded(new), rule)[NAME])


FREE = {
    "shape": st.lists(st.integers(0, 99), min_size=2, max_size=2),
    "attributes": st.dictionaries(st.text(max_size=2), st.integers()),
    "fill_value": st.integers(0, 9) | st.none(),
    "x": st.floats(allow_nan=False),
}


@given(st.sampled_from(list(SOURCES)), st.fixed_dictionaries({}, optional=FREE))
def test_what_is_edited_is_shown_so_and_the_source_stays_sharded(name: str, free: dict[str, Any]) -> None:
    source = SOURCES[name]
    assert edited(source, shown(source) | free) == source | free
    assert edited(source, source | free) == source | free


def test_what_is_written_back_as_it_was_is_the_source_to_the_byte() -> None:
    raw = b" " + encoded(SHARDED)
    assert ZARR_TRANSFORMER.references(META, NAME, b"") == (NAME,)
    assert ZARR_TRANSFORMER.edit(META, {NAME: raw}, NAME, encoded(shown(SHARDED))) == {NAME: raw}


@pytest.mark.parametrize("before", [[1], "x", 7, None])
def test_members_are_written_anew_where_the_source_repeats_no_arrays(before: Any) -> None:
    new = {"metadata": {f"{META}/{NAME}": shown(SHARDED)}}
    new_documents = ZARR_TRANSFORMER.edit("", {".zmetadata": encoded({"metadata": before})}, ".zmetadata", encoded(new))
    assert json.loads(new_documents[".zmetadata"]) == new


REFUSED: dict[str, tuple[str, Any]] = {
    "chunks": ("chunk_grid", {"chunk_grid": {"type": "regular", "chunk_shape": [2, 2], "separator": "/"}}),
    "separator": ("chunk_grid", {"chunk_grid": {"type": "regular", "chunk_shape": [2, 3], "separator": "."}}),
    "type": ("the data type", {"data_type": "<u4"}),
    "rank": ("the number of axes", {"shape": [7]}),
    "layout": ("chunk_memory_layout", {"chunk_memory_layout": "F"}),
    "compressor": ("the compressor", {"compressor": {"codec": "https://purl.org/zarr/spec/codec/gzip/1.0"}}),
    "a compressor of another kind": ("the compressor", {"compressor": ["gzip"]}),
    "another sharding": ("storage_transformers", {"storage_transformers": [sharding(2, 1)]}),
    "no shape": ("shape should", {"shape": [7, "x"]}),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", REFUSED)
def test_what_contradicts_the_chunks_is_refused(name: str) -> None:
    why, members = REFUSED[name]
    with pytest.raises(ValueError, match=why):
        edited(SHARDED, shown(SHARDED) | members)


def test_other_documents_are_their_writers() -> None:
    plain = shown(SHARDED)
    for source in (None, plain):
        assert edited(source, plain | {"x": 1}) == plain | {"x": 1}
    with pytest.raises(ValueError, match="--create"):
        edited(None, SHARDED)
    for name, like in (("a.array.json", True), ("g/a.array", True), ("a.group.json", False), ("zarr.json", False)):
        assert ZARR_TRANSFORMER.describes(name) is like


def test_new_arrays_are_sharded_by_a_rule() -> None:
    new_documents = edited(None, shown(SHARDED), Rule("zarr3-draft", chunks_per_shard=(2, 2)))
    assert new_documents == SHARDED | {"storage_transformers": [sharding(2, 2)]}
    assert shown(new_documents) == shown(SHARDED)
    new_documents = ZARR_TRANSFORMER.shard(META, NAME, encoded(shown(SOURCES["dummy"])), Rule("zarr3-draft"))
    assert new_documents is not None
    assert json.loads(new_documents[NAME])["storage_transformers"] == [DUMMY, sharding(4, 4)]
    assert ZARR_TRANSFORMER.shard(META, "zarr.json", b"{}", Rule("zarr3-draft")) is None
    with pytest.raises(ValueError, match="--create"):
        ZARR_TRANSFORMER.shard(META, NAME, encoded(SHARDED), Rule("zarr3-draft"))


@pytest.mark.parametrize("name", SOURCES)
def test_an_array_that_is_made_anew_is_sharded_as_before(name: str) -> None:
    raw = {NAME: encoded(SOURCES[name])}
    remembered = ZARR_TRANSFORMER.sharding({**raw, "b.array.json": encoded(shown(SHARDED))})
    assert remembered is not None
    assert ZARR_TRANSFORMER.shard(META, NAME, encoded(shown(SOURCES[name])), remembered) == raw
    assert ZARR_TRANSFORMER.shard(META, "b.array.json", encoded(shown(SHARDED)), remembered) is None
    grid = {"type": "regular", "chunk_shape": [5, 5], "separator": "."}
    new_documents = ZARR_TRANSFORMER.shard(META, NAME, encoded(shown(SOURCES[name]) | {"chunk_grid": grid}), remembered)
    assert new_documents is not None
    assert json.loads(new_documents[NAME]) == SOURCES[name] | {"chunk_grid": grid}
    with pytest.raises(ValueError, match="axes"):
        ZARR_TRANSFORMER.shard(META, NAME, encoded(shown(SHARDED) | {"shape": [1]}), remembered)


@pytest.mark.parametrize(
    ("path", "name", "directory"),
    [
        ("meta/root", NAME, "data/root/a"),
        ("x/meta/root/g", "b.array.doc", "x/data/root/g/b"),
        ("x/meta/root/g", "b.array", "x/data/root/g/b"),
        ("x/meta", "root.array.json", "x/data/root"),
        ("meta", "root.array.json", "data/root"),
        ("meta/root/meta/root", NAME, "meta/root/data/root/a"),
        ("meta/root/consolidated", ".zmetadata", "meta/root/consolidated"),
    ],
)
def test_what_a_document_describes_lies_elsewhere(path: str, name: str, directory: str) -> None:
    assert ZARR_TRANSFORMER.described_by(path, name) == directory


# ---- the tool itself ----


def zarr_python(action: str, root: Path) -> None:
    command = [str(client_python("zarr2")), "-m", "tests.clients.edit_zarr_draft", action, str(root)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=250)


@pytest.mark.fuse
@pytest.mark.interop
def test_zarr_python_writes_to_an_array_that_has_no_chunk_yet(tmp_path: Path) -> None:
    """There is not even a directory for its chunks, nor one for those of any array."""
    need_fuse()
    source, out = tmp_path / "source", tmp_path / "read.npy"
    zarr_python("create_sharded", source)
    shutil.rmtree(source / "data")
    with writable(source, tmp_path) as mount:
        mount.mount()
        zarr_python("fill", mount.path)
        subprocess.run(["rm", "-r", mount.path / "data/root/g"], check=True, timeout=250)
        assert not (mount.path / "data/root/g").exists()
        zarr_python("fill", mount.path)
        assert mount.umount().returncode == 0
    shards = {p.relative_to(source / "data/root").as_posix() for p in (source / "data").rglob("*") if p.is_file()}
    assert shards == {f"g/create_sharded/c{y}/{x}" for y in range(2) for x in range(2)}
    run_client(
        "read_zarr_draft", source, out, "--member", "g/create_sharded", "--sharding", python=client_python("zarr2")
    )
    np.testing.assert_array_equal(np.load(out), np.full((7, 10), 2, "u2"))


@pytest.mark.interop
def test_zarr_python_changes_arrays_and_consolidates_them(tmp_path: Path) -> None:
    source, mount = tmp_path / "source", tmp_path / "shown"
    zarr_python("create_sharded", source)
    shutil.copytree(source, mount)
    name = f"{META}/g/create_sharded.array.json"
    sharded = json.loads((source / name).read_bytes())
    (mount / name).write_bytes(encoded(shown(sharded)))
    for action in ("resize", "attributes"):
        zarr_python(action, mount)
    zarr_python("create", mount)
    at = f"x/{META}/g"
    for path in (mount / META / "g").iterdir():
        rule = Rule("zarr3-draft", chunks_per_shard=(2, 2))
        source_documents = {path.name: encoded(sharded)} if "sharded" in path.name else {}
        new_documents = ZARR_TRANSFORMER.edit(at, source_documents, path.name, path.read_bytes(), rule)
        (source / META / "g" / path.name).write_bytes(new_documents[path.name])
    document = json.loads((source / name).read_bytes())
    changed = {"shape": [9, 20], "attributes": {"b": {"c": [1.5, None]}}}
    assert document == sharded | changed  # zarr-python itself drops the transformer when it changes a sharded array
    new = json.loads((source / META / "g" / "create.array.json").read_bytes())
    assert new["storage_transformers"] == sharded["storage_transformers"]
    zarr_python("consolidate", mount)
    at, raw = f"x/{META}/consolidated", (mount / META / "consolidated" / ".zmetadata").read_bytes()
    wanted = ZARR_TRANSFORMER.references(at, ".zmetadata", raw)
    assert set(wanted) == {".zmetadata", "../g/create.array.json", "../g/create_sharded.array.json"}
    source_documents = {
        n: (source / META / "g" / n.rpartition("/")[2]).read_bytes() for n in wanted if n != ".zmetadata"
    }
    new_documents = ZARR_TRANSFORMER.edit(at, source_documents, ".zmetadata", raw)
    members = json.loads(new_documents[".zmetadata"])["metadata"]
    assert members[name] == document
    assert members[f"{META}/g/create.array.json"] == new
    assert shown(json.loads(new_documents[".zmetadata"]), ".zmetadata") == json.loads(raw)
    assert ZARR_TRANSFORMER.edit(at, {".zmetadata": new_documents[".zmetadata"]}, ".zmetadata", raw) == new_documents


@pytest.mark.parametrize(
    ("name", "like"),
    [(n, True) for n in ("c0", "c0/1", "c0.1", "c12")] + [(n, False) for n in ("c", "c/0", "c01", "0/1", "c0/1.2", "")],
)
def test_names_of_chunks(name: str, like: bool) -> None:
    assert ZARR_TRANSFORMER.chunk_like(name) is like
