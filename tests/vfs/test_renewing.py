"""Metadata that changes while other threads open directories."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from shardfs.model.errors import CorruptShardError
from shardfs.vfs import chunk_trees
from shardfs.vfs.tree import Tree, open_tree
from tests import handmade
from tests.data_zarr_transformer import ROOT_DOCUMENT, array_document, named, pack_shards, sharding
from tests.scheduling import explore
from tests.suites.walking import read_all
from tests.virtual_threads import install

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.scheduling import Schedule

ARRAYS = [f"a{number}" for number in range(4)]


def document(length: int) -> bytes:
    return json.dumps(handmade.zarr_metadata((length,), (4,), (2,))).encode()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Arrays of four elements, in two chunks of one shard."""
    for array in ARRAYS:
        path = tmp_path / array
        (path / "c").mkdir(parents=True)
        (path / "zarr.json").write_bytes(document(4))
        (path / "c/0").write_bytes(handmade.zarr_shard([b"ab", b"cd"]))
        (path / "c/1").write_bytes(handmade.zarr_shard([b"ef", b"gh"]))
    return tmp_path


def unread(root: Path, **options: Any) -> Tree:
    """A tree that has not opened any directory yet."""
    tree = open_tree(str(root), **options)
    tree.renew("")
    return tree


def read(tree: Tree, path: str) -> bytes:
    return read_all(tree, tree.resolve(path))


class Changing:
    """Changes a document, and has the tree read it again, right after a thread has read the document."""

    def __init__(self, tree: Tree, monkeypatch: pytest.MonkeyPatch, path: Path, *versions: bytes) -> None:
        documents, changes = tree.store.documents, iter(versions)

        def changed_after(directory: str, *args: Any) -> dict[str, bytes]:
            files = documents(directory, *args)
            if directory == path.parent.name and (data := next(changes, None)) is not None:
                path.write_bytes(data)
                tree.renew(directory)
            return files

        monkeypatch.setattr(tree.store, "documents", changed_after)


@pytest.mark.parametrize("layout", ["native", "zarr2"])
def test_what_was_read_before_a_change_is_not_kept(root: Path, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = unread(root, layout=layout, chunk_codec=None if layout == "native" else "raw")
    Changing(tree, monkeypatch, root / "a1/zarr.json", document(6), document(8))
    assert read(tree, "a1/c/3" if layout == "native" else "a1/3") == b"gh"
    assert tree.collection("a1").collection.facts.shape == (8,)


def test_damage_that_was_repaired_meanwhile_is_not_reported_for_long(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "a1/zarr.json").write_bytes(b'{"zarr_format": 3, "node_type": "array", "shape": [')
    tree = unread(root)
    Changing(tree, monkeypatch, root / "a1/zarr.json", document(4))
    assert read(tree, "a1/c/1") == b"cd"


def test_damage_is_reported_after_a_change(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = unread(root)
    Changing(tree, monkeypatch, root / "a1/zarr.json", b'{"zarr_format": 3, "node_type": "array", "shape": [')
    with pytest.raises(CorruptShardError):
        read(tree, "a1/c/1")


def try_opening(root: Path, change: Callable[[Tree], object], path: str) -> int:
    """Open an array while something else changes. The array at `path` is as before."""

    def scenario(schedule: Schedule) -> None:
        tree = unread(root)
        assert read(tree, "a0/c/0") == b"ab"
        bytes_read: list[bytes] = []
        schedule.together(lambda: change(tree), lambda: bytes_read.append(read(tree, "a1/c/1")))
        assert bytes_read == [b"cd"]
        if path:
            assert read(tree, path) == b"cd"

    return explore(scenario, preemptions=1, steps=("vfs/chunk_trees", "vfs/renewals"))


def test_arrays_are_opened_while_others_are_read_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as listing a group while a program closes `zarr.json` of other arrays."""
    install(monkeypatch)
    assert try_opening(root, lambda tree: tree.renew(""), "a0/c/1") > 60


def test_arrays_are_opened_while_a_directory_is_renamed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert try_opening(root, lambda tree: tree.datasets.trees.move("a0", "b0"), "") > 60


@pytest.mark.parametrize(("layout", "array", "wanted"), [
    ("native", "a1", ("a1", [b"c"])), ("native", "", ("", [b"c"])), ("zarr2", "a1", ("", [b"a1"])),
])  # fmt: skip
def test_the_kernel_is_notified_once_of_a_huge_array(
    root: Path, layout: str, array: str, wanted: tuple[str, list[bytes]]
) -> None:
    tree = open_tree(str(root / "a1") if not array else str(root), layout=layout, index_ttl_s=0)
    chunk = f"{array}/c/0" if layout == "native" else f"{array}/0"
    former, told = tree.resolve(chunk).number, []
    tree.hooks.invalidate_all = lambda parent, names: told.append((tree.shown_path(parent), list(names)))
    for length in (1 << 40, 1 << 41):
        (root / "a1/zarr.json").write_bytes(document(length))
        assert read(tree, chunk) == b"ab"
        assert told == [wanted]
        told.clear()
    assert tree.resolve(chunk).number != former
    assert bytes(tree.read(former, 0, 9)) == b"ab"


@pytest.mark.parametrize("array", ["a", "g/a"])
def test_the_kernel_is_notified_of_an_array_that_is_stored_elsewhere(tmp_path: Path, array: str) -> None:
    """Such as in the data directory of a hierarchy of the draft of 2022, which a layout shows as the root."""
    document = tmp_path / f"meta/root/{array}.array.json"

    def write(length: int) -> None:
        document.write_text(json.dumps(array_document((length, 2), (1, 1), sharding(2, 2))))

    document.parent.mkdir(parents=True)
    (tmp_path / "zarr.json").write_text(json.dumps(ROOT_DOCUMENT))
    write(2)
    cells: dict[tuple[int, ...], bytes] = {(i, j): bytes([i, j]) for i in range(2) for j in range(2)}
    handmade.write_files(tmp_path / f"data/root/{array}", named(pack_shards(cells, (2, 2))))
    tree = open_tree(str(tmp_path), layout="zarr2", chunk_codec="raw", index_ttl_s=0)
    former = tree.resolve(f"{array}/0/1").number
    told: list[tuple[str, list[bytes]]] = []
    tree.hooks.invalidate_all = lambda parent, names: told.append((tree.shown_path(parent), list(names)))
    write(4)
    assert tree.resolve(f"{array}/0/1").number != former
    assert told == [(array.rpartition("/")[0], [b"a"])]


def test_names_in_the_root_that_are_looked_up_again_are_bounded(root: Path) -> None:
    tree = open_tree(str(root / "a1"), layout="zarr2", index_ttl_s=0)
    tree.resolve("0")
    told: list[int] = []
    tree.hooks.invalidate_all = lambda parent, names: told.append(sum(1 for _ in names))
    (root / "a1/zarr.json").write_bytes(document(1 << 40))
    tree.resolve("0")
    assert told == [chunk_trees.MAX_NAMES]


@pytest.mark.parametrize(("size", "wanted"), [(8, [b"2", b"3"]), (6, [b"2"])])
def test_a_listing_and_a_working_directory_are_those_of_the_present_array(
    root: Path, size: int, wanted: list[bytes]
) -> None:
    tree = open_tree(str(root), index_ttl_s=0)
    (root / "a1/zarr.json").write_bytes(document(7))
    directory = tree.resolve("a1/c").number
    first, _ = tree.scan(directory)
    assert first.names.tolist() == [b"0", b"1"]
    (root / "a1/zarr.json").write_bytes(document(size))
    assert [name for batch in tree.scan(directory, int(first.cookies[-1])) for name in batch.names.tolist()] == wanted
    assert tree.lookup(directory, b"1").number == tree.resolve("a1/c/1").number
    assert tree.attributes(directory).directory


def test_a_document_that_describes_the_same_array_changes_no_file(root: Path) -> None:
    tree = open_tree(str(root), index_ttl_s=0)
    former = tree.resolve("a1/c/0").number
    tree.hooks.invalidate_all = lambda parent, names: pytest.fail("the kernel is notified")
    changed = {**json.loads(document(4)), "attributes": {"x": 1}}
    (root / "a1/zarr.json").write_text(json.dumps(changed, indent=5))
    assert json.loads(read(tree, "a1/zarr.json"))["attributes"] == {"x": 1}
    assert tree.resolve("a1/c/0").number == former
