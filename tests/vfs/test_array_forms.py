"""The form of an array while other threads remove its document, or read others."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from shardfs.vfs.tree import Tree, open_tree
from tests import handmade
from tests.scheduling import explore
from tests.virtual_threads import install

if TYPE_CHECKING:
    from pathlib import Path

    from shardfs.vfs.array_forms import Forms
    from shardfs.vfs.chunk_dirs import ChunkDirs
    from tests.scheduling import Schedule


def document(**members: Any) -> bytes:
    return json.dumps({**handmade.zarr_metadata((4,), (4,), (2,)), **members}).encode()


class Place:
    """An array at `a`. `change` writes its document, as another program; `remove` removes it, as this mount."""

    def __init__(self, root: Path) -> None:
        self.path = root / "a/zarr.json"
        self.path.parent.mkdir()
        self.versions = 0
        self.change()
        self.base: Tree = open_tree(str(root))
        self.base.renew("")
        self.base.resolve("a/zarr.json")

    @property
    def forms(self) -> Forms:
        return self.base.datasets.forms

    @property
    def tree(self) -> ChunkDirs:
        return self.base.datasets.trees.below("a")[0]

    def change(self) -> None:
        self.versions += 1
        new = self.path.with_name("new")  # on a busy machine, another thread may read while this one writes
        new.write_bytes(document(attributes={"version": self.versions}))
        new.replace(self.path)

    def remove(self) -> None:
        with self.forms.removing("a/zarr.json"):
            self.path.unlink()

    def now(self) -> None:
        assert self.forms.now(self.tree) == self.tree.collection.form


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    install(monkeypatch)
    return Place(tmp_path)


@pytest.mark.parametrize("changed", [True, False])
def test_an_array_keeps_its_form_at_every_moment_of_the_removal(place: Place, changed: bool) -> None:
    def scenario(schedule: Schedule) -> None:
        place.change()
        place.now()
        if changed:
            place.change()
        schedule.together(place.remove, place.now)
        place.now()

    assert explore(scenario, preemptions=1, steps=("vfs/array_forms",)) > 20


def test_documents_read_earlier_do_not_replace_those_read_later(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def change_and_look() -> None:
        place.change()
        place.now()

    reads, documents = [], place.base.store.documents

    def counted(*args: Any) -> dict[str, bytes]:
        reads.append(args)
        return documents(*args)

    def scenario(schedule: Schedule) -> None:
        place.change()
        schedule.together(place.now, change_and_look)
        with monkeypatch.context() as patched:
            patched.setattr(place.base.store, "documents", counted)
            place.now()
        assert len(reads) == 1, "the documents known are not those read last"
        reads.clear()

    assert explore(scenario, preemptions=1, steps=("vfs/array_forms",)) > 20


def test_an_array_without_a_document_has_no_form(place: Place) -> None:
    place.path.unlink()
    assert place.forms.now(place.tree) is None


def test_a_failed_removal_changes_nothing(place: Place) -> None:
    with pytest.raises(PermissionError), place.forms.removing("a/zarr.json"):
        raise PermissionError
    place.now()
    place.path.unlink()
    assert place.forms.now(place.tree) is None


def test_an_array_whose_directory_is_read_during_the_removal_keeps_its_form(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, documents = place.tree, place.base.store.documents

    def removed_after(directory: str, *args: Any) -> dict[str, bytes]:
        files = documents(directory, *args)
        if directory == "a" and place.path.exists():
            place.remove()
        return files

    monkeypatch.setattr(place.base.store, "documents", removed_after)
    for _ in range(2):  # the second time after the removal, as a writable mount does
        place.base.renew("a")
    assert not place.base.datasets.trees.below("")
    assert place.forms.now(tree) == tree.collection.form
