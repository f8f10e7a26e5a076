"""`shardfs pack`: copies an unsharded source to a new sharded one. Chunks are copied, not decoded.

The public function is `shardfs.pack`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from shardfs.jobs.copying import CopyRun, ShardUnit, Survey
from shardfs.jobs.opened_files import OpenedFile
from shardfs.jobs.runs import PackReport
from shardfs.jobs.target import note_of
from shardfs.model.changes import Removal, Whole
from shardfs.model.dataset import Problem
from shardfs.model.errors import message
from shardfs.model.shard_format import Put
from shardfs.model.write_plan import size_of
from shardfs.shards.rewriting import StoredShard
from shardfs.storage.load_ahead import load_ahead

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardfs.jobs.pack_arrays import ArrayPlan, PackedArray
    from shardfs.jobs.pack_job import Packing, PackJob
    from shardfs.model.blobs import Bytes
    from shardfs.model.values import U64

FIRST_LOADS = 16
"""Files of a remote source that are read at the same time at first; the number doubles up to all connections."""


@dataclass(frozen=True, slots=True)
class NewShard(ShardUnit["PackJob"]):
    """One shard to make.

    Args:
        array: the path of the array in `PackPlan.arrays`.
        shard: the number of the shard.
        chunks: the numbers of its chunks in the source, 8 bytes each in the byte order of the machine.
    """

    array: str
    shard: int
    chunks: bytes = field(repr=False)

    @property
    def note(self) -> str:
        return note_of(self.array, f"shards-{self.shard}")

    def do(self, job: PackJob) -> PackReport:
        report = PackReport(1, len(self.chunks) // 8, 1)
        packing: Packing = job.opened()
        target = packing.target
        if target.noted(self.note) is not None or target.is_ended():
            return report
        array = packing.plan.arrays[self.array]
        key = array.shard_key(self.shard)
        numbers = np.frombuffer(self.chunks, np.uint64)
        open_files: list[OpenedFile] = []
        contents, report.problems = array.packed(numbers, _contents(packing, array, numbers, open_files))
        if report.failed:
            return PackReport(problems=report.problems)
        puts = {cell: Put(content) for cell, content in contents.items()}
        report.nbytes = sum(size_of(put.data) for put in puts.values())
        plan = StoredShard(array.target, self.shard, None).plan(puts, set())
        target.writer.update(key, Removal() if plan is None else Whole(plan, first=None))
        target.note_task(self.note, 1, key)
        return report

    def problem(self, error: BaseException) -> Problem:
        return Problem(self.array, f"shard {self.shard}: {message(error)}", damaged=True)


def _contents(packing: Packing, array: PackedArray, numbers: U64, open_files: list[OpenedFile]) -> Iterator[Bytes]:
    """Yield the contents of chunk files. Those of files that stay open are valid while `open_files` exists."""
    load, names = partial(OpenedFile.from_key, packing), array.files(numbers)
    for _, file in load_ahead(packing.store.read_ahead, load, names, first=FIRST_LOADS):
        if file.blob is not None and not array.converts:
            open_files.append(file)
        yield file.content


class PackRun(CopyRun):
    """Packing that is ready to run. The constructor is that of `CopyRun`."""

    survey: Survey[ArrayPlan]

    def _units(self) -> Iterator[NewShard]:
        for plan in self.survey.plans:
            for shard, chunks in plan:
                yield NewShard(plan.array.path, shard, chunks.tobytes())
