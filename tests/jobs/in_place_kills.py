"""Kills, errors and power losses of jobs in place: `python -m tests.jobs.in_place_kills HOW COUNT [SEED]`.

A program, because it forks. It prints what was wrong and one JSON object with counts. HOW is one of:

- `kill`: COUNT runs end at a random call that changes the disk. A native reader looks after each, and another one
  beside each.
- `fail`: about COUNT calls fail with EIO, EACCES or ENOSPC.
- `power`: about COUNT states of the disk that a power loss may leave. In half of them, the job was killed before, and
  the power loss interrupts the next run.

Afterwards the job is continued, or aborted, and the tree must be the one that an undisturbed job makes.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import warnings
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import zarr

from shardfs.model.errors import NotADatasetError
from tests.jobs.packing import pack_in_place
from tests.write.faults import ERRORS, KILLED, NEVER_FAIL, Calls, FailAt, KillAt, hooked
from tests.write.powerloss import Recorder, State, walk_states

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardfs.jobs.runs import PackReport

SHM = Path("/dev/shm")

DATA = np.arange(1, 145, dtype="<u2").reshape(12, 12)


class Case(NamedTuple):
    """A job: what it begins with, and what it makes if it is not disturbed."""

    name: str
    given: Path
    made: Path
    how: Any

    @classmethod
    def make(cls, top: Path, name: str, version: Literal[2, 3], separator: str) -> Case:
        """A group with an array of 16 chunk files, one of which is missing, and a file beside."""
        plain = top / name / "plain"
        group = zarr.create_group(plain, zarr_format=version)
        keys: Any = {"name": "v2" if version == 2 else "default", "separator": separator}
        array = group.create_array("a", shape=(12, 12), chunks=(3, 3), dtype="<u2", chunk_key_encoding=keys)
        array[:] = np.where(DATA < 10, 0, DATA)
        zarr.consolidate_metadata(plain)
        (plain / "README").write_text("beside")
        case = cls(name, plain, top / name / "sharded", {"chunks_per_shard": (2, 2)})
        shutil.copytree(case.given, case.made)
        assert not work(case, case.made)
        return case


def cases(top: Path) -> list[Case]:
    """Datasets with a directory for each row of chunks, and one without directories."""
    return [Case.make(top, "zarr3", 3, "/"), Case.make(top, "zarr2", 2, "."), Case.make(top, "nested2", 2, "/")]


def tree(root: Path) -> dict[str, bytes]:
    """All files and directories."""
    return {str(p.relative_to(root)): b"" if p.is_dir() else p.read_bytes() for p in root.rglob("*")}


def forked(run: Callable[[], object]) -> int:
    """The number of a process that calls `run`, and exits with 0, or with 1 if it raises AssertionError."""
    pid = os.fork()
    if pid == 0:
        status = 2
        try:
            run()
            status = 0
        except AssertionError as e:
            print(e, file=sys.stderr, flush=True)
            status = 1
        except (OSError, NotADatasetError):  # the job has not begun, or is complete
            status = 3
        finally:
            os._exit(status)
    return pid


def status_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def begun(case: Case, root: Path, *, abort: bool = False) -> Iterator[PackReport]:
    return pack_in_place(str(root), abort=True) if abort else pack_in_place(str(root), **case.how)


def work(case: Case, root: Path, *, abort: bool = False) -> bool:
    """Run the job; return whether a report has a problem."""
    return any([report.problems for report in begun(case, root, abort=abort)])


def document(root: Path) -> int:
    """The inode number of the array's document; 0 if it is aside."""
    for name in ("a/zarr.json", "a/.zarray"):
        with suppress(FileNotFoundError):  # the job may move it at any time
            return (root / name).stat().st_ino
    return 0


def look(root: Path) -> None:
    """Raise AssertionError if a native reader finds wrong values instead of an error or the right ones."""
    before = document(root)
    try:
        array: Any = zarr.open_group(root, mode="r")["a"]
        values = array[:]
    except Exception:  # noqa: BLE001 - whatever the library raises
        return
    if before and document(root) == before:  # else the reader has opened the array before the job began
        assert np.array_equal(values, np.where(DATA < 10, 0, DATA)), f"a reader found {values}"


def watch(root: Path) -> None:
    """Look again and again until SIGTERM."""
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
    while not ended:
        look(root)


def calls_of(case: Case, root: Path) -> list[str]:
    """The names of the calls that a job makes."""
    shutil.copytree(case.given, root)
    with hooked(Calls()) as calls:
        work(case, root)
    shutil.rmtree(root)
    return calls.names


class Outcome:
    """Counts, and what was wrong."""

    def __init__(self) -> None:
        self.points = 0
        self.wrong: list[str] = []

    def check(self, where: str, ok: object) -> None:
        if not ok:
            self.wrong.append(where)
            print(where, file=sys.stderr, flush=True)


def finish(outcome: Outcome, case: Case, root: Path, where: str, *, abort: bool) -> None:
    """Complete a job in the direction; compare all files and directories."""
    try:
        problems = work(case, root, abort=abort)
    except NotADatasetError:  # the job is complete
        problems = False
    except FileNotFoundError as e:  # the job has not begun, or is complete
        problems = "unfinished" not in str(e)
    except Exception as e:  # noqa: BLE001 - the caller counts it
        problems = True
        print(where, repr(e), file=sys.stderr)
    tree_files = tree(root)
    wanted = [tree(case.given), tree(case.made)] if abort else [tree(case.made)]
    difference = sorted(name for name in {*tree_files, *wanted[0]} if tree_files.get(name) != wanted[0].get(name))
    outcome.check(f"{where}, {abort=}, {problems=}: {difference} differ", not problems and tree_files in wanted)


def kills(top: Path, count: int, chance: random.Random) -> Outcome:
    """Random kills. Each job is killed several times, changes its direction now and then, and is completed."""
    outcome, case_list, number = Outcome(), cases(top), 0
    root = top / "run"
    lengths = {case.name: len(calls_of(case, root)) for case in case_list}
    while outcome.points < count:
        case = chance.choice(case_list)
        shutil.copytree(case.given, root)
        where = f"{number} {case.name}"
        for _ in range(chance.randrange(1, 6)):
            abort = chance.random() < 0.3
            hook = KillAt(chance.randrange(lengths[case.name]), after=chance.random() < 0.5)
            where += f" {'abort' if abort else 'go'}@{hook.at}{'+' if hook.after else ''}"
            beside = forked(lambda: watch(root))
            status = status_of(forked(partial(killed, case, root, hook, abort=abort)))
            os.kill(beside, signal.SIGTERM)
            watched = status_of(beside)
            outcome.check(f"{where}: the reader beside it: {watched}", watched in (0, -signal.SIGTERM))
            outcome.check(f"{where}: status {status}", status in (0, 3, KILLED))
            outcome.check(f"{where}: a reader afterwards", status_of(forked(lambda: look(root))) == 0)
            outcome.points += status == KILLED
        finish(outcome, case, root, where, abort=chance.random() < 0.5)
        shutil.rmtree(root)
        number += 1
    return outcome


def killed(case: Case, root: Path, hook: KillAt, *, abort: bool) -> None:
    with hooked(hook):
        work(case, root, abort=abort)


def failures(top: Path, count: int, chance: random.Random) -> Outcome:
    """Calls of packing and of going back fail; then the job is continued or aborted."""
    outcome, root, case_list = Outcome(), top / "run", cases(top)
    for case in case_list:
        names = calls_of(case, root)
        points = [i for i, name in enumerate(names) if name not in NEVER_FAIL]
        for at in sorted(chance.sample(points, min(len(points), count // len(case_list)))):
            number = chance.choice(ERRORS.get(names[at], (errno.EIO,)))
            hook = FailAt(at, number, for_ever=chance.random() < 0.3, after_call=chance.random() < 0.2)
            shutil.copytree(case.given, root)
            where = f"{case.name}: {names[at]} {at} fails with {errno.errorcode[number]}"
            with hooked(hook):
                for abort in (False, chance.random() < 0.5):
                    try:
                        work(case, root, abort=abort)
                    except (OSError, NotADatasetError):
                        continue
            outcome.points += 1
            look_in_fork(outcome, root, where)
            finish(outcome, case, root, where, abort=chance.random() < 0.5)
            shutil.rmtree(root)
    return outcome


def look_in_fork(outcome: Outcome, root: Path, where: str) -> None:
    outcome.check(f"{where}: a reader", status_of(forked(lambda: look(root))) == 0)


def losses(top: Path, count: int, chance: random.Random) -> Outcome:
    """States of the disk after a power loss while a job goes to its end, or goes back from the middle."""
    outcome, case_list = Outcome(), [case for case in cases(top) if not case.name.startswith("nested2")]
    kinds = [(case, abort, killed) for case in case_list for abort in (False, True) for killed in (False, True)]
    for case, abort, killed in kinds:
        states = list(lost_states(top, case, chance, abort=abort, killed=killed))
        for where, write in chance.sample(states, min(len(states), -(-count // len(kinds)))):
            root = top / "lost"
            write(root)
            outcome.points += 1
            look_in_fork(outcome, root, where)
            finish(outcome, case, root, where, abort=chance.random() < 0.5)
            shutil.rmtree(root)
    return outcome


class DyingRecorder(Recorder):
    """A recorder that lets nothing reach the disk from call `dies_at` to `revive`, as if the process were killed."""

    dies_at = -1
    dead = False

    def do(self, number: int, name: str, function: Any, args: Any) -> Any:
        self.dead = self.dead or number == self.dies_at
        if self.dead and name not in NEVER_FAIL:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().do(number, name, function, args)

    def revive(self) -> None:
        self.dies_at, self.dead = -1, False
        self.mark("revived")


def before_sync(calls: list[str]) -> list[int]:
    """The calls that sync the name of a new file. If a run ends before, the next run finds a name that may be lost."""
    return [i + 1 for i, pair in enumerate(pairwise(calls)) if pair == ("rename_new", "fsync_directory")]


def lost_states(
    top: Path, case: Case, chance: random.Random, *, abort: bool, killed: bool
) -> Iterator[tuple[str, Callable[[Path], object]]]:
    """What may be left of a job at any time, with a function that writes it to a directory."""
    root = top / "run"

    def start() -> None:
        shutil.copytree(case.given, root)
        if abort:
            job: Any = begun(case, root)
            for _ in range(3):
                next(job)
            job.close()

    where = f"{case.name} {'abort' if abort else 'go'}"
    start()
    if killed:
        with hooked(Calls()) as calls:
            work(case, root, abort=abort)
        shutil.rmtree(root)
        start()
    recorder = DyingRecorder([root])
    with hooked(recorder):
        if killed:
            recorder.dies_at = chance.choice(before_sync(calls.names))
            where += f", killed at {recorder.dies_at}"
            with suppress(OSError):
                work(case, root, abort=abort)
            recorder.revive()
        with suppress(NotADatasetError, FileNotFoundError):  # the job has not begun, or is complete
            work(case, root, abort=abort)
    shutil.rmtree(root)
    for n, (marks, state) in enumerate(walk_states(recorder, more=1, seed=chance.randrange(1 << 30))):
        if marks or not killed:
            yield f"{where}: state {n}, {state.what}", partial(written, state, root)


def written(state: State, root: Path, target: Path) -> None:
    state.write({str(root): target})


def main() -> int:
    how, count, *seed = sys.argv[1:]
    warnings.simplefilter("ignore")
    top = Path(tempfile.mkdtemp(dir=SHM if SHM.is_dir() else None))
    try:
        run = {"kill": kills, "fail": failures, "power": losses}[how]
        outcome = run(top, int(count), random.Random(int(seed[0]) if seed else 0))
    finally:
        shutil.rmtree(top)
    print(json.dumps({"points": outcome.points, "wrong": outcome.wrong}))
    return bool(outcome.wrong)


if __name__ == "__main__":
    sys.exit(main())
