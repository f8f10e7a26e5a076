"""What every view of a dataset must do, whatever its format."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from shardfs.model.errors import CorruptShardError, StaleShardError
from shardfs.storage.cache import ByteLRU
from shardfs.storage.local import LocalStore
from shardfs.vfs.discovery import Datasets
from shardfs.vfs.inodes import ROOT, TABLE_END
from shardfs.vfs.tree import Tree, open_tree
from tests import handmade
from tests.suites.walking import entries, read_all, walk

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pytest

DOCUMENTS = ("zarr.json", "info", "attributes.json")
DOCUMENT_ENDINGS = (".array.json", "meta/sizes", "meta/storage", "__attrs__")
INDEX_FILE = "chunks.b2frame"


@dataclass(frozen=True)
class Sparse:
    """Stored files of a dataset, and what a view of them must show: chunk names and bytes."""

    stored: Mapping[str, bytes]
    shown: Mapping[str, bytes]
    names: st.SearchStrategy[str]
    """Paths like those of chunks, of which some are."""
    raw: Mapping[str, bytes] = field(default_factory=dict)
    """What lies in the shard for a chunk, where that is not what is shown."""


class ViewSuite:
    """Subclass it with a strategy for `Sparse` datasets."""

    def samples(self) -> st.SearchStrategy[Sparse]:
        raise NotImplementedError

    @given(data=st.data())
    def test_a_view_is_as_a_dictionary_has_it(
        self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
    ) -> None:
        path, sparse = tmp_path_factory.mktemp("view"), data.draw(self.samples())
        handmade.write_files(path, sparse.stored)
        tree = open_tree(str(path))
        assert _without_documents(walk(tree)) == sparse.shown
        for name in data.draw(st.lists(sparse.names | st.sampled_from(sorted(sparse.shown) or ["x"]), max_size=8)):
            wanted = sparse.shown.get(name)
            try:
                attributes = tree.resolve(name)
            except (FileNotFoundError, NotADirectoryError):
                assert wanted is None
                continue
            if wanted is None:
                assert attributes.directory or attributes.number < TABLE_END
                continue
            offset, size = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))
            assert bytes(tree.read(attributes.number, offset, size)) == wanted[offset : offset + size]
            _check_located(tree, sparse, name)
        _check_resumed(tree, ROOT, data)

    @given(limit=st.integers(0, 3000), data=st.data())
    def test_small_caches_change_nothing(
        self, tmp_path_factory: pytest.TempPathFactory, limit: int, data: st.DataObject
    ) -> None:
        path, sparse = tmp_path_factory.mktemp("view"), data.draw(self.samples())
        handmade.write_files(path, sparse.stored)
        tree = Tree(
            Datasets(LocalStore(str(path)), ByteLRU(limit), ByteLRU(limit), data.draw(st.sampled_from((0.0, math.inf))))
        )
        assert _without_documents(walk(tree)) == sparse.shown

    @given(data=st.data())
    def test_any_damage_to_shards_escapes_as_an_error_that_is_told(
        self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
    ) -> None:
        path, sparse = tmp_path_factory.mktemp("damaged"), data.draw(self.samples())
        shards = _without_documents(sparse.stored)
        damaged = {name: _damaged(shards[name], data) for name in sorted(shards)}
        handmade.write_files(path, {**sparse.stored, **damaged})
        tree = Tree(Datasets(LocalStore(str(path)), ByteLRU(1 << 20), ByteLRU(1 << 20)))
        for name in {*sparse.shown, *files(tree)}:
            with suppress(CorruptShardError, StaleShardError, OSError):
                read_all(tree, tree.resolve(name))
        list(tree.survey.summaries())


def _without_documents(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """What is shown of a document is its format's own; that it can be read is all that a view owes."""
    documents = {name for name in files if name in DOCUMENTS or name.endswith(DOCUMENT_ENDINGS)}
    for name in documents:
        json.loads(files[name])
    documents |= {name for name in files if name.endswith(INDEX_FILE)}
    return {name: data for name, data in files.items() if name not in documents}


def _check_located(tree: Tree, sparse: Sparse, name: str) -> None:
    located = tree.locate(name)
    raw = sparse.raw.get(name, sparse.shown[name])
    assert tree.xattrs(tree.resolve(name).number)["user.shardfs.nbytes"] == b"%d" % len(raw)
    assert located.size == len(raw)
    if "[" in located.shard:  # in a shard of a shard; offsets are that one's
        return
    shard = sparse.stored[located.shard]
    assert shard[located.offset : located.offset + located.size] == raw
    if raw and b"gap" not in shard:
        assert tree.survey.chunk_at(located.shard, located.offset) == name


def _check_resumed(tree: Tree, number: int, data: st.DataObject) -> None:
    """Listings begun behind a random entry go on as the whole one does."""
    whole = list(entries(tree, number))
    if whole:
        at = data.draw(st.integers(0, len(whole) - 1))
        assert list(entries(tree, number, whole[at].cookie)) == whole[at + 1 :]
    for e in whole:
        assert 0 < e.cookie < 2**62
        if e.directory:
            _check_resumed(tree, e.number, data)


def _damaged(shard: bytes, data: st.DataObject) -> bytes:
    damaged = bytearray(shard)
    kind = data.draw(st.sampled_from(("bytes", "cut", "noise", "none")))
    if kind == "bytes" and damaged:
        for _ in range(data.draw(st.integers(1, 4))):
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.sampled_from((0, 1, 127, 128, 255)))
    elif kind == "cut":
        del damaged[data.draw(st.integers(0, len(damaged))) :]
    elif kind == "noise":
        damaged = bytearray(data.draw(st.binary(max_size=200)))
    return bytes(damaged)


def files(tree: Tree) -> Iterator[str]:
    """Names of files that can be listed, in a bounded number of directories; what cannot be listed is passed over."""
    queue = [(ROOT, "")]
    for _ in range(300):
        if not queue:
            return
        number, path = queue.pop(0)
        with suppress(CorruptShardError, OSError):
            for e in islice(entries(tree, number), 1000):
                name = f"{path}/{e.name.decode()}" if path else e.name.decode()
                if e.directory:
                    queue.append((e.number, name))
                else:
                    yield name


__all__ = ["Sparse", "ViewSuite", "files"]
