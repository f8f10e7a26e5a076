"""`shardfs pack`: copies an unsharded source to a new sharded one. Chunks are copied, not decoded.

The public function is `shardfs.pack`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from shardfs.jobs.copying import CopyRun, CopyUnit, opened_target
from shardfs.jobs.opened_files import OpenedFile
from shardfs.jobs.pack_job import note_of
from shardfs.jobs.runs import PackReport, reason
from shardfs.jobs.target import is_of
from shardfs.model.changes import Removal, Whole
from shardfs.model.dataset import Problem
from shardfs.model.shard_format import Put
from shardfs.model.write_plan import size_of
from shardfs.shards.rewriting import StoredShard
from shardfs.storage.load_ahead import load_ahead

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardfs.jobs.pack_arrays import PackedArray
    from shardfs.jobs.pack_job import Packing, PackJob, SourceSurvey
    from shardfs.model.blobs import Bytes
    from shardfs.model.values import U64

FIRST_LOADS = 16
"""Files of a remote source that are read at the same time at first; the number doubles up to all connections."""


@dataclass(frozen=True, slots=True)
class NewShard(CopyUnit["PackJob"]):
    """One shard to make. `chunks` are the numbers of its chunks in the source, 8 bytes each."""

    array: str
    shard: int
    chunks: bytes = field(repr=False)

    def do(self, job: PackJob) -> PackReport:
        report = PackReport(1, len(self.chunks) // 8, 1)
        packing: Packing = opened_target(job)
        note = note_of(self.array, self.shard)
        if packing.target.noted(note) is not None or packing.target.is_ended():
            return report
        array = packing.arrays[self.array]
        key = array.shard_key(self.shard)
        numbers = np.frombuffer(self.chunks, np.uint64)
        open_files: list[OpenedFile] = []
        contents, report.problems = array.packed(numbers, _contents(packing, array, numbers, open_files))
        if report.failed:
            return PackReport(problems=report.problems)
        puts = {cell: Put(content) for cell, content in contents.items()}
        report.nbytes = sum(size_of(put.data) for put in puts.values())
        plan = StoredShard(array.target, self.shard, None).plan(puts, set())
        packing.target.writer.update(key, Removal() if plan is None else Whole(plan, first=None))
        packing.target.note_task(note, 1, key)
        return report

    def problem(self, error: BaseException) -> Problem:
        return Problem(self.array, f"shard {self.shard}: {reason(error)}", damaged=True)


def _contents(packing: Packing, array: PackedArray, numbers: U64, open_files: list[OpenedFile]) -> Iterator[Bytes]:
    """Yield the contents of chunk files. Those of files that stay open are valid while `open_files` exists."""
    load, names = partial(OpenedFile.of, packing), array.files(numbers)
    for _, file in load_ahead(packing.store.read_ahead, load, names, first=FIRST_LOADS):
        if file.blob is not None and not array.converts:
            open_files.append(file)
        yield file.content


class PackRun(CopyRun):
    """Packing that is ready to run."""

    job: PackJob
    _opened: Packing
    survey: SourceSurvey

    def _begin(self) -> list[Problem]:
        self._opened = opened_target(self.job, new=True)
        self.job = self._opened.job
        self.survey = self._opened.survey()
        self.files = self.survey.files + sum(len(plan.chunks) for plan in self.survey.plans)
        self.shards = sum(len(plan.shards) for plan in self.survey.plans)
        self.objects = self.survey.files + self.shards
        return self.survey.problems

    def _add(self, report: PackReport) -> None:
        """Count nothing: the number of objects is known."""

    def _units(self) -> Iterator[NewShard]:
        for plan in self.survey.plans:
            for shard, chunks in plan:
                if is_of(self.part, plan.array.shard_key(shard)):
                    yield NewShard(plan.array.path, shard, chunks.tobytes())

    def _is_complete(self) -> bool:
        target = self._opened.target
        notes = (note_of(plan.array.path, shard) for plan in self.survey.plans for shard in plan.shards.tolist())
        return all(target.noted(note) is not None for note in notes) and all(map(target.is_stored, self._other_files()))

    def _other_files(self) -> Iterator[str]:
        return self._opened.other_files()
