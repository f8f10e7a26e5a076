"""What runs of all jobs that pack or unpack have in common. The tasks of a run may be done elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardfs.jobs.shared_work import WHOLE, run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Executor

    from shardfs.jobs.shared_work import JobPart, Task
    from shardfs.model.dataset import Problem


@dataclass
class PackReport:
    """What one task has done.

    Args:
        shards: the number of shards, also of those that were packed or unpacked already.
        files: the number of files of the source that the task packed, unpacked or copied.
        objects: the number of files that it made of them.
        nbytes: the size of these files; 0 for those that existed already.
        problems: files that were not packed; `damaged` ones prevent that the job is finished.
    """

    shards: int = 0
    files: int = 0
    objects: int = 0
    nbytes: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether a problem prevents that the job is finished."""
        return any(problem.damaged for problem in self.problems)


class Run(ABC):
    """A job that is ready to run.

    Attributes:
        part: the part of the job that this run does.
        problems: the problems of the source that were found while it was listed.
        finished: whether the target is complete.
        repeated: whether an earlier run of the same job has completed the target, so that nothing is left to do.
        files: the number of files of the source, apart from documents.
        shards: the number of shards of the sharded dataset.
        objects: the number of files, apart from documents, that the tasks have made so far, and of those that earlier
            runs had made; of all parts as soon as the target is complete.
    """

    part: JobPart = WHOLE
    problems: list[Problem]
    finished = False
    repeated = False
    files = 0
    shards = 0
    objects = 0

    def close(self) -> None:
        """Let other jobs use the source. `run` does so at its end."""
        return

    @abstractmethod
    def _tasks(self) -> Iterator[Task[PackReport]]:
        """Yield the tasks of the part."""

    def _left(self) -> list[Problem]:
        """Problems that show when all tasks are done. They prevent that the job ends."""
        return []

    @abstractmethod
    def _end(self) -> None:
        """End the job if all parts are done. Not called if anything has failed."""

    def run(self, executor: Executor | None = None, workers: int = 1) -> Iterator[PackReport]:
        """Do the work of the part, and yield the reports of its tasks. Complete the target if all parts are done.

        Repeat the job after an error, and after a report that has `failed`.

        Args:
            executor: runs the tasks. None runs them in this process if `workers` is 1, else in `workers` new processes.
            workers: the number of tasks that the executor can run at a time.

        Raise OSError if a disk is full, or if the executor gave up all tasks.
        """
        try:
            failed = any(problem.damaged for problem in self.problems)
            yield PackReport(problems=self.problems if self.part.number == 1 else [])
            for report in run(self._tasks(), executor, workers):
                failed = failed or report.failed
                self.objects += report.objects
                yield report
            if failed:
                return
            problems = self._left()
            yield PackReport(problems=problems)
            if not problems:
                self._end()
        finally:
            self.close()
