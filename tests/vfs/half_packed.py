"""Sources in the middle of an in-place job, made by hand from a dataset in both forms."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardfs.fsspec_fs.filesystem import ShardFileSystem
from shardfs.storage.pack_state import DIRECTORY, PACK, PLAIN, SHARDED, STATE, UNPACK, PackState, Stage
from shardfs.vfs.tree import open_tree
from tests.jobs.packing import pack

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DOCUMENTS = {"zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata", "attributes.json", "info"}


def files(root: Path) -> dict[str, bytes]:
    """All files below a directory."""
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def shown(root: Path, layout: str = "native") -> dict[str, bytes]:
    """All files that a mount shows."""
    return all_files(ShardFileSystem(str(root), layout, skip_instance_cache=True))


def all_files(fs: ShardFileSystem) -> dict[str, bytes]:
    """All files of an opened source."""
    return {name.lstrip("/"): fs.cat_file(name) for name in fs.find("")}


@dataclass
class Job:
    """Packing or unpacking `root`, step by step. At the end, its files are those of `sharded` or of `plain`."""

    plain: Path
    sharded: Path
    root: Path

    @classmethod
    def of(cls, plain: Path, directory: Path, **how: Any) -> Job:
        """A job on a new source in `directory`."""
        sharded = directory / "sharded"
        assert [problem for report in pack(str(plain), str(sharded), **how) for problem in report.problems] == []
        return cls(plain, sharded, directory / "source")

    def shards(self) -> dict[str, list[str]]:
        """The chunk files in each shard."""
        found: dict[str, list[str]] = {}
        names = {numbers: path for path in files(self.plain) for numbers in [numbers_in(path)]}
        for chunks in open_tree(str(self.sharded)).collections():
            for batch in chunks.chunks.scan(0):
                for coords in map(tuple, batch.coords.tolist()):
                    file = names[numbers_in(chunks.chunk_path(coords))]
                    found.setdefault(chunks.chunks.key_of(coords), []).append(file)
        return found

    def packing(self) -> Iterator[str]:
        """Pack the source. Yields a description of each state."""
        shutil.copytree(self.plain, self.root)
        self.reach(PACK, Stage.PLAIN)
        _copy_documents(self.sharded, self.root / SHARDED)
        yield "begun"
        for path in _documents(self.plain):
            _move(path, self.root, self.root / PLAIN)
        yield "the documents are aside"
        self.reach(PACK, Stage.MIXED)
        for shard, chunks in self.shards().items():
            _copy(self.sharded, shard, self.root / SHARDED)
            yield f"{shard} is made"
            for i, chunk in enumerate(chunks):
                (self.root / chunk).unlink()
                if i == len(chunks) // 2:
                    yield f"half of the files of {shard} are deleted"
        self._remove_empty()
        self.reach(PACK, Stage.SHARDED)
        for shard in self.shards():
            _move(shard, self.root / SHARDED, self.root)
            yield f"{shard} is at its place"
        yield from self._end(PACK, self.sharded, SHARDED)

    def unpacking(self) -> Iterator[str]:
        """Unpack the source. Yields a description of each state."""
        shutil.copytree(self.sharded, self.root)
        self.reach(UNPACK, Stage.SHARDED)
        _copy_documents(self.plain, self.root / PLAIN)
        yield "begun"
        for path in _documents(self.sharded):
            _move(path, self.root, self.root / SHARDED)
        yield "the documents are aside"
        for shard in self.shards():
            _move(shard, self.root, self.root / SHARDED)
            yield f"{shard} is aside"
        self.reach(UNPACK, Stage.MIXED)
        for shard, chunks in self.shards().items():
            for i, chunk in enumerate(chunks):
                _copy(self.plain, chunk, self.root)
                if i == len(chunks) // 2:
                    yield f"half of the files of {shard} are written"
            (self.root / SHARDED / shard).unlink()
            yield f"{shard} is deleted"
        self._remove_empty()
        self.reach(UNPACK, Stage.PLAIN)
        yield from self._end(UNPACK, self.plain, PLAIN)

    def finish(self, shard: str, chunks: Sequence[str]) -> None:
        """Make a shard and delete its chunk files."""
        _copy(self.sharded, shard, self.root / SHARDED)
        for chunk in chunks:
            (self.root / chunk).unlink()

    def reach(self, direction: str, stage: Stage) -> None:
        state = PackState(direction, direction, stage, _documents(self.plain), _documents(self.sharded), {})
        (self.root / ".shardfs-new").write_bytes(state.raw())
        (self.root / ".shardfs-new").rename(self.root / STATE)

    def _remove_empty(self) -> None:
        for top, _, _ in os.walk(self.root, topdown=False):
            if DIRECTORY not in top and top != str(self.root) and not os.listdir(top):
                os.rmdir(top)

    def _end(self, direction: str, after: Path, place: str) -> Iterator[str]:
        for path in sorted(_documents(after), key=lambda path: -path.count("/")):
            _move(path, self.root / place, self.root)
            yield f"{path} is back"
        self.reach(direction, Stage.DONE)
        yield "done"
        shutil.rmtree(self.root / DIRECTORY)
        yield "only the state is left"
        (self.root / STATE).unlink()
        yield "ended"


def numbers_in(path: str) -> tuple[str, ...]:
    """What the paths of a chunk in both forms have in common."""
    return tuple(part for part in re.split("[./]", path) if part != "c")


def _documents(tree: Path) -> list[str]:
    return [path for path in files(tree) if Path(path).name in DOCUMENTS]


def _copy_documents(tree: Path, to: Path) -> None:
    for path in _documents(tree):
        _copy(tree, path, to)


def _copy(tree: Path, path: str, to: Path) -> None:
    (to / path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(tree / path, to / ".shardfs-new")
    (to / ".shardfs-new").rename(to / path)


def _move(path: str, tree: Path, to: Path) -> None:
    (to / path).parent.mkdir(parents=True, exist_ok=True)
    (tree / path).rename(to / path)
