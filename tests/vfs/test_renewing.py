"""Metadata that changes while other threads open directories."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest

from shardfs.model.errors import CorruptShardError
from shardfs.vfs.tree import Tree, open_tree
from tests import handmade
from tests.interleaving import interleaved
from tests.suites.walking import read_all

if TYPE_CHECKING:
    from pathlib import Path

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
            stored = documents(directory, *args)
            if directory == path.parent.name and (data := next(changes, None)) is not None:
                path.write_bytes(data)
                tree.renew(directory)
            return stored

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


def test_arrays_are_opened_while_others_are_read_again(root: Path) -> None:
    """Such as listing a group while a program closes `zarr.json` of other arrays."""
    trees, unopened = [unread(root)], itertools.cycle(ARRAYS[1:])

    def prepare() -> None:
        trees.append(unread(root))
        assert read(trees[-1], "a0/c/0") == b"ab"

    def open_another() -> None:
        assert read(trees[-1], f"{next(unopened)}/c/1") == b"cd"

    for _ in interleaved(lambda: trees[-1].renew(""), open_another, "vfs/chunk_trees", prepare=prepare):
        assert read(trees[-1], "a0/c/1") == b"cd"


def test_arrays_are_opened_while_a_directory_is_renamed(root: Path) -> None:
    trees, unopened = [unread(root)], itertools.cycle(ARRAYS[1:])

    def prepare() -> None:
        trees.append(unread(root))
        assert read(trees[-1], "a0/c/0") == b"ab"

    def move() -> None:
        trees[-1].datasets.trees.move("a0", "b0")

    def open_another() -> None:
        assert read(trees[-1], f"{next(unopened)}/c/1") == b"cd"

    list(interleaved(move, open_another, "vfs/chunk_trees", prepare=prepare))
