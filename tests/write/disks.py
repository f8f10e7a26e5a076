"""Power losses under real file systems: a program, because it needs mounts that nobody else sees.

`unshare --mount --propagation=private python -m tests.write.disks FS TARGET --states N` prints one JSON object, as
`tests.write.crash` does. FS is ext4 or xfs. It lies on a disk that notes all writes and flushes (`recorded_disk`) while
the engine works on it. A power loss leaves what came before a flush, and of what came after it any part, by sectors.
All mounts are gone when this program and its children are, and loop devices with them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from shardfs.formats.registry import formats
from tests.datasets import ROOT
from tests.write.crash import Outcome, Place, Trial, forked, workplace
from tests.write.engines import ENGINES
from tests.write.history import Log
from tests.write.oracle import Oracle
from tests.write.recorded_disk import Event, events
from tests.write.scenarios import SCENARIOS, Scenario, Session, all_of_them
from tests.write.targets import TARGETS, Target

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SECTOR = 512
MIB = 1 << 20


class FileSystem(NamedTuple):
    """How to make one: the smallest that its tool makes."""

    size: int
    make: tuple[str, ...]


FILE_SYSTEMS = {
    "ext4": FileSystem(64 * MIB, ("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0")),
    "xfs": FileSystem(320 * MIB, ("mkfs.xfs", "-q", "-f")),
}

DAY = [
    "patched",
    "overwrite_twice",
    "two_shards",
    "renamed",
    "newest_wins",
    "delete_shard",
    "whole_shard",
    "come_and_go",
    "left_in_the_journal",
]
"""Scenarios that can follow each other."""


def day(session: Session) -> None:
    for name in DAY:
        SCENARIOS[name].run(session)


def run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, timeout=250, stdin=subprocess.DEVNULL)


@contextmanager
def mounted(kind: str, image: Path, top: Path) -> Iterator[None]:
    """The loop device goes with the mount."""
    run("mount", "-t", kind, "-o", "loop", image, top)
    try:
        yield
    finally:
        for _ in range(20):
            if (
                subprocess.run(["umount", str(top)], stderr=subprocess.DEVNULL, timeout=250, check=False).returncode
                == 0
            ):
                break
            time.sleep(0.1)
        else:
            run("umount", "-l", top)
            raise OSError(f"{top} stays busy")


@contextmanager
def recorded(image: Path, path: Path, record: Path) -> Iterator[None]:
    """`path` is the image then."""
    path.touch()
    command = [sys.executable, "-m", "tests.write.recorded_disk", *map(str, (path, image, record))]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
            yield
            run("umount", path)
            server.wait(10)
        finally:
            server.kill()


class State(NamedTuple):
    """What a power loss leaves: all of the first `flushed` events, and of those that follow what `kept` says: sectors,
    or None for all of them. `end`: how much had been noted then."""

    flushed: int
    kept: tuple[tuple[int, tuple[int, ...] | None], ...]
    end: int


def states(noted: list[Event], count: int, seed: int) -> list[State]:
    """So many of them, in the order of time. After each event: nothing since the last flush, all of it, some of it."""
    chance = random.Random(seed)
    flushed, disk_states = 0, dict[State, None]()
    for number, event in enumerate(noted):
        if event.data is None:
            flushed = number + 1
        since = range(flushed, number + 1)
        disk_states[State(flushed, (), event.end)] = None
        disk_states[State(flushed, tuple((n, None) for n in since), event.end)] = None
        for _ in range(2):
            sectors = tuple((n, _torn(noted[n], chance)) for n in since if chance.random() < 0.6)
            disk_states[State(flushed, sectors, event.end)] = None
    some = list(disk_states)
    return [some[n] for n in sorted(chance.sample(range(len(some)), min(count, len(some))))]


def _torn(event: Event, chance: random.Random) -> tuple[int, ...] | None:
    sectors = len(event.data or b"") // SECTOR
    if sectors < 2 or chance.random() < 0.7:
        return None
    return tuple(n for n in range(sectors) if chance.random() < 0.5)


def apply(fd: int, event: Event, sectors: tuple[int, ...] | None = None) -> None:
    """Write it, or these sectors of it."""
    if event.data is None:
        return
    if sectors is None:
        os.pwrite(fd, event.data, event.at)
        return
    for n in sectors:
        os.pwrite(fd, event.data[n * SECTOR : (n + 1) * SECTOR], event.at + n * SECTOR)


class DiskPlace(Place):
    """Only the store and the journal are on the disk."""

    def __init__(self, top: Path) -> None:
        super().__init__(top / "run")
        self.log, self.said = top / "log", top / "said"
        self.notes, self.record = top / "notes", top / "record"
        self.disk, self.base, self.work = top / "disk", top / "base.img", top / "work.img"


class DiskTrial(Trial):
    """T9b: one day, then the power losses."""

    place: DiskPlace

    def __init__(self, kind: str, target: Target, top: Path, oracle: Oracle) -> None:
        super().__init__(target, Scenario("day", day, all_of_them), ENGINES["whole"], top, oracle)
        self.kind, self.place = kind, DiskPlace(top)

    def prepare(self) -> None:
        """The file system, with the array as it is at first, all of it on the disk."""
        mkfs, base = FILE_SYSTEMS[self.kind], self.place.base
        with base.open("wb") as file:
            file.truncate(mkfs.size)
        run(*mkfs.make, base)
        run("fallocate", "--dig-holes", base)
        self.place.top.mkdir()
        with mounted(self.kind, base, self.place.top):
            shutil.copytree(self.template, self.place.store)
            self.place.journal.mkdir(mode=0o700)

    def record(self) -> None:
        """The day; every note of it comes with how much had reached the disk by then."""
        place = self.place
        shutil.copyfile(place.base, place.work)
        with recorded(place.work, place.disk, place.record), mounted(self.kind, place.disk, place.top):
            if status := forked(place, self._noting, 60):
                raise AssertionError(f"status {status}: {self.said()}")

    def _noting(self) -> None:
        place = self.place
        with place.notes.open("w", buffering=1) as notes:

            def note(line: str) -> None:
                notes.write(f"{place.record.stat().st_size} {line}\n")

            log = Log(place.log, note)
            with self.engine.open(self.target, place.store, place.journal) as files:
                self.scenario.run(Session(self.target, files, log, place.store))
            note("end")

    def losses(self, outcome: Outcome, count: int, seed: int) -> None:
        """Each state is mounted, looked at natively, recovered, and looked at again."""
        place = self.place
        noted = list(events(place.record))
        notes = [(int(at), line) for at, _, line in (n.partition(" ") for n in place.notes.read_text().splitlines())]
        last = notes[-1][0]
        noted = [event for event in noted if event.end <= last]
        base, applied = os.open(place.base, os.O_RDWR), 0
        for number, state in enumerate(states(noted, count, seed)):
            for event in noted[applied : state.flushed]:
                apply(base, event)
            applied = state.flushed
            run("cp", "--sparse=auto", place.base, place.work)
            work = os.open(place.work, os.O_RDWR)
            for n, sectors in state.kept:
                apply(work, noted[n], sectors)
            os.close(work)
            place.log.write_text("".join(f"{line}\n" for at, line in notes[:-1] if at <= state.end))
            description = (
                f"{self.kind}/{self.target.name}, state {number}: {state.flushed} events and {len(state.kept)} more"
            )
            outcome.add(description, self._found())
            if len(outcome.wrong) > 10:
                break
        os.close(base)

    def _found(self) -> list[str]:
        place = self.place
        place.said.unlink(missing_ok=True)
        try:
            with mounted(self.kind, place.work, place.top):
                out = [f"before recovery: {w}" for w in self.natively("published")]
                if status := forked(place, self._recover):
                    return [*out, f"recovery: status {status}: {self.said()}"]
                return out + [f"after recovery: {w}" for w in self.natively("synced")]
        except (OSError, subprocess.SubprocessError) as e:
            return [f"{e}"]

    def _recover(self) -> None:
        with self.engine.open(self.target, self.place.store, self.place.journal) as files:
            wrong = self.history().wrong(self.seen(files.read), "synced")
            files.publish()
        if wrong:
            raise AssertionError("; ".join(wrong))


def main(kind: str, target: str, count: int, seed: int) -> Outcome:
    outcome = Outcome()
    formats()  # imports them, or each child does
    with workplace() as top, Oracle() as oracle:
        trial = DiskTrial(kind, TARGETS[target], top, oracle)
        trial.prepare()
        trial.record()
        trial.losses(outcome, count, seed)
    return outcome


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fs", choices=sorted(FILE_SYSTEMS))
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--states", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    result = main(given.fs, given.target, given.states, given.seed)
    print(json.dumps({"points": result.points, "wrong": result.wrong[:20], "failures": len(result.wrong)}))
