"""Nodes while other threads look them up, move and forget them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shardfs.vfs import nodes
from shardfs.vfs.directory_content import NOTHING_INHERITED
from shardfs.vfs.nodes import DirectoryNode, FileNode, NodeTable
from tests.interleaving import interleaved

if TYPE_CHECKING:
    from collections.abc import Callable

PATH = "a/b"
LOOKS: dict[str, Callable[[NodeTable, FileNode], object]] = {
    "get": lambda table, node: table.get(node.number),
    "known": lambda table, node: table.known(PATH),
    "intern": lambda table, node: table.intern(PATH, FileNode),
    "below": lambda table, node: next(n for n in table.below("a") if n is node),
}


def referenced(table: NodeTable, node: FileNode) -> None:
    table.remember(node.number)


def forgotten(table: NodeTable, node: FileNode) -> None:
    table.remember(node.number)
    table.forget(node.number, 1)


@pytest.mark.parametrize("change", [referenced, forgotten])
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("looks_meanwhile", [False, True])
def test_a_node_is_always_found(
    change: Callable[[NodeTable, FileNode], None], look: str, looks_meanwhile: bool
) -> None:
    """Whichever of the two calls is stopped in the middle."""
    table = NodeTable()
    node = table.intern(PATH, FileNode)

    def changes() -> None:
        change(table, node)

    def looks() -> None:
        assert LOOKS[look](table, node) is node

    steps = interleaved(changes, looks, "vfs/nodes") if looks_meanwhile else interleaved(looks, changes, "vfs/nodes")
    assert len(list(steps)) > 3


def test_two_threads_that_intern_a_path_get_the_same_node() -> None:
    table, got = NodeTable(), [list[FileNode]()]

    def intern() -> None:
        got[-1].append(table.intern(f"f{len(got)}", FileNode))

    for _ in interleaved(intern, intern, "vfs/nodes"):
        first, second = got[-1]
        assert first is second
        got.append([])
    assert len(got) > 10


def test_a_directory_that_is_renamed_has_one_node_at_each_path() -> None:
    tables = [NodeTable()]

    def move() -> None:
        tables.append(NodeTable())
        tables[-1].intern("d", DirectoryNode, NOTHING_INHERITED)
        tables[-1].intern("d/x", FileNode)
        tables[-1].move("d", "e")

    def look() -> None:
        table = tables[-1]
        assert sorted(node.path[:1] for node in table.below("")) in (["", "d", "d"], ["", "e", "e"], ["", "d"], [""])
        table.known("d/x")
        table.intern("e/x", FileNode)

    for _ in interleaved(move, look, "vfs/nodes"):
        assert tables[-1].known("e/x") is not None


def test_the_oldest_nodes_without_references_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "RECENT_NODES", 3)
    table = NodeTable()
    oldest = table.intern("kept", FileNode)
    table.remember(oldest.number)
    for i in range(5):
        table.intern(str(i), FileNode)
    assert [table.known(str(i)) is not None for i in range(5)] == [False, False, True, True, True]
    assert table.known("kept") is oldest
    table.forget(oldest.number, 1)
    assert {node.path for node in table.below("")} == {"", "3", "4", "kept"}
