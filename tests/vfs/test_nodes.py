"""Nodes while other threads look them up, move and forget them."""

from __future__ import annotations

from functools import partial
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING

import pytest

from shardfs.vfs import nodes
from shardfs.vfs.directory_content import NOTHING_INHERITED
from shardfs.vfs.inodes import number_of
from shardfs.vfs.nodes import DirectoryNode, FileNode, NodeTable
from tests.scheduling import explore, explore_outcomes
from tests.virtual_threads import install
from tests.write import bugs
from tests.write.scale import times

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from tests.scheduling import Schedule


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


PATH, ELSEWHERE = "a/b", "c/b"

CALLS: dict[str, list[Callable[[NodeTable], object]]] = {
    "look up": [lambda table: table.intern(PATH, FileNode).number, lambda table: table.remember(number_of(PATH))],
    "look up again": [lambda table: table.intern(PATH, FileNode).number],
    "look up elsewhere": [lambda table: table.intern(ELSEWHERE, FileNode).path],
    "look up another kind": [lambda table: type(table.intern(PATH, DirectoryNode, NOTHING_INHERITED))],
    "forget": [lambda table: table.forget(number_of(PATH), 1)],
    "move": [lambda table: len(table.move("a", "c"))],
    "list": [lambda table: [node.path for node in table.below("")]],
    "find": [lambda table: table.known(PATH) is not None],
}
"""What threads do with the node of `PATH`, to which the kernel refers once."""

PREEMPTIONS = 1 + (times() > 1)


def try_calls(names: Sequence[str]) -> int:
    def scenario(schedule: Schedule) -> Hashable:
        table, answers = NodeTable(), list[tuple[str, str]]()
        table.intern("a", DirectoryNode, NOTHING_INHERITED)
        table.intern(PATH, FileNode)
        table.remember(number_of(PATH))

        def answer(name: str, call: Callable[[NodeTable], object]) -> None:
            answers.append((name, repr(call(table))))

        schedule.together(*([partial(answer, name, call) for call in CALLS[name]] for name in names))
        nodes = [(n.number, n.path, type(n), n.lookups, n.number in table._recent) for n in table.below("")]
        assert all(lookups or is_recent or not number for number, _, _, lookups, is_recent in nodes[1:]), "leaked"
        return tuple(sorted(answers)), tuple(nodes), tuple(map(table.known, (PATH, ELSEWHERE))) == (None, None)

    return explore_outcomes(scenario, preemptions=PREEMPTIONS, steps=("vfs/nodes",))


def test_calls_on_a_node_leave_what_one_after_the_other_leaves() -> None:
    assert min(map(try_calls, combinations_with_replacement(CALLS, 2))) > 10


@pytest.mark.every_case
@pytest.mark.parametrize("names", [("look up", "forget", "move"), ("look up again", "look up elsewhere", "move")])
def test_three_threads_find_one_node(names: Sequence[str]) -> None:
    assert try_calls(names) > 60


def test_two_threads_that_intern_a_path_get_the_same_node() -> None:
    assert try_new() > 20


def try_new() -> int:
    def scenario(schedule: Schedule) -> None:
        table, nodes = NodeTable(), list[FileNode]()
        schedule.together(*[lambda: nodes.append(table.intern("f", FileNode))] * 2)
        assert nodes[0] is nodes[1]

    return explore(scenario, preemptions=2, steps=("vfs/nodes",))


@pytest.mark.every_case
@pytest.mark.parametrize(("bug", "find"), [
    ("two threads that look a path up get two nodes", try_new),
    ("a lookup during a forget is not counted", lambda: try_calls(["look up", "forget"])),
    ("names are looked up in a directory that is half renamed", lambda: try_calls(["move", "list"])),
])  # fmt: skip
def test_a_race_on_a_node_is_found(bug: str, find: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    bugs.seed(monkeypatch, bug)
    with pytest.raises((AssertionError, RuntimeError)):
        find()


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
