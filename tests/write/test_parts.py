"""The parts of a writable tree, each built without the parts that come after it."""

from __future__ import annotations

import ast
import os
import sys
from collections import Counter
from typing import TYPE_CHECKING, NoReturn, cast

from shardfs.vfs.inodes import ROOT
from shardfs.vfs.tree import open_tree
from shardfs.write.files import WritableFile, split
from shardfs.write.journal import Journal
from shardfs.write.open_files import Handle
from shardfs.write.tree import open_write_tree
from tests.datasets import ROOT as TOP
from tests.write.targets import TARGETS

if TYPE_CHECKING:
    from pathlib import Path
    from types import FrameType, MethodType

    from shardfs.write.file_calls import FileCalls

TARGET = TARGETS["zarr_end"]

MOST_CALLS = 80
"""Python calls of a FLUSH. It ran 146 when this was first counted."""


def test_only_a_file_changes_its_own_state() -> None:
    """Each attribute of an open file is assigned by methods of its class, so that a search finds every transition."""
    state, wrong = {name for name in WritableFile.__slots__ if name != "_lock"}, []
    for path in sorted((TOP / "shardfs/write").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del) and node.attr in state:
                owner = ast.unparse(node.value)
                if owner != "self":
                    wrong.append(f"{path.name}:{node.lineno}: {owner}.{node.attr}")
    assert wrong == []


def test_a_close_takes_few_steps(tmp_path: Path) -> None:
    """In calls of Python functions: those of the second chunk of a shard, whose index is known and journal is open."""
    source = tmp_path / "source"
    source.mkdir()
    TARGET.create(source)
    journal = Journal.open(tmp_path / "journal", str(source), limit_bytes=64 << 20)
    tree = open_write_tree(open_tree(str(source)), journal)
    calls = Counter[str]()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            calls[f"{frame.f_code.co_filename}: {frame.f_code.co_name}"] += 1

    directory, _ = split(TARGET.path(0))
    parent = ROOT
    for part in directory.split("/"):
        parent = tree.mkdir(parent, part.encode(), 0o755).number
    for number in range(2):
        _, handle = tree.create(parent, split(TARGET.path(number))[1], os.O_WRONLY | os.O_CREAT, 0o644)
        tree.write(handle, 0, TARGET.shown(number + 1))
        calls.clear()
        sys.setprofile(count)
        try:
            tree.flush(handle)
        finally:
            sys.setprofile(None)
        tree.release(handle)
    assert tree.close(20) == []
    assert calls.total() <= MOST_CALLS, calls


class Unlisted(dict[int, Handle]):
    """Handles that are found by their number only."""

    def values(self) -> NoReturn:
        raise AssertionError("all handles are looked at")

    items = values


def test_a_removal_looks_at_no_handles_of_other_files(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    TARGET.create(source)
    TARGET.fill(source, TARGET.array({0: 1, 1: 2}))
    journal = Journal.open(tmp_path / "journal", str(source), limit_bytes=64 << 20)
    tree = open_write_tree(open_tree(str(source)), journal)
    opened = cast("FileCalls", cast("MethodType", tree.open).__self__)._open_files
    directory, name = split(TARGET.path(0))
    parent, number = tree.resolve(directory).number, tree.resolve(TARGET.path(0)).number
    handles = [tree.open(number, os.O_RDONLY) for _ in range(3)]
    tree.release(handles.pop())
    listed, opened.handles = opened.handles, Unlisted(opened.handles)
    tree.unlink(parent, split(TARGET.path(1))[1])
    opened.handles = listed
    tree.unlink(parent, name)
    for handle in handles:
        assert bytes(tree.read(number, 0, 1 << 20)) == TARGET.shown(1)
        tree.release(handle)
    assert tree.close(20) == []
