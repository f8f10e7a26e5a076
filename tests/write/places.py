"""An array to write to, with its journal."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import numpy as np

from tests.write.engines import TreeFiles, Whole
from tests.write.oracle import found_by

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from shardfs.write.publish_shard import Publishing
    from tests.write.targets import Target

OLD, NEW, THEIRS = 100, 9000, 8000
"""Tokens of the chunks that are there at first, and of those that a test and another program write."""


class Place:
    """An array of which every chunk is there, or every `step`th, and an empty journal."""

    def __init__(self, target: Target, top: Path, step: int = 1) -> None:
        self.target, self.store, self.journal = target, top / "store", top / "journal"
        self.store.mkdir()
        self.journal.mkdir(mode=0o700)
        target.create(self.store)
        self.held = {n: OLD + n for n in range(0, len(target.chunks), step)}
        target.fill(self.store, target.array(self.held))

    def mount(self, publishing: Publishing | None = None) -> AbstractContextManager[TreeFiles]:
        return Whole(publishing).open(self.target, self.store, self.journal)

    # ---- what is written ----

    def write(self, files: TreeFiles, number: int) -> None:
        files.write(self.target.path(number), self.target.shown(NEW + number))

    def put(self, files: TreeFiles, *numbers: int) -> None:
        """Write chunks that nothing keeps from being stored."""
        for number in numbers:
            self.held[number] = NEW + number
            self.write(files, number)

    def write_theirs(self, number: int) -> None:
        """As a program does that writes the whole shard anew, the other chunks staying where they are."""
        self.held[number] = THEIRS + number
        beside = self.store.parent / "beside"
        shutil.copytree(self.store, beside)
        self.target.fill(beside, self.target.array(self.held))
        key = next(key for key, members in self.target.shards().items() if number in members)
        (beside / key).rename(self.store / key)
        shutil.rmtree(beside)

    # ---- what is there ----

    def shown(self, files: TreeFiles) -> None:
        """Every chunk is read as it was written, with its size."""
        for n, token in self.held.items():
            path, data = self.target.path(n), self.target.shown(token)
            assert files.read(path) == data, path
            assert files.tree.resolve(path).size == len(data)

    def natively(self) -> None:
        """The array has the tokens that it should have."""
        read = next(iter(self.target.readers.values()))
        np.testing.assert_array_equal(read(self.store), self.target.array(self.held))

    def tokens(self) -> dict[int, int | None]:
        """The tokens in the source."""
        tokens, torn = found_by(self.target, next(iter(self.target.readers)), self.store)
        assert torn == []
        return {number: value for number, value in tokens.items() if number in self.held}
