"""The journal loses power at every call: what was synced is there, what was deleted stays deleted, no false alarm.

Twice in a row, so that what the first recovery has left behind is found by the second.
"""

from __future__ import annotations

import os
import random
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from shardfs.storage import syscalls
from shardfs.write.journal import Journal, RecordKind
from shardfs.write.pending import Backlog, Pending
from tests.write.faults import hooked
from tests.write.journals import kill, open_journal
from tests.write.powerloss import Recorder, walk_states
from tests.write.scale import times

if TYPE_CHECKING:
    from pathlib import Path

PATHS = "abcd"
OPTIONS: dict[str, Any] = {"segment_bytes": 16 << 10, "limit_bytes": 1 << 20}

Value = bytes | None | str
"""Of a path: what it holds, None if it was deleted, "published" if the journal has done with it."""


class Change(NamedTuple):
    lsn: int
    path: str
    value: Value


class History:
    """What was written to a journal by now, in order."""

    def __init__(self, journal: Journal, chance: random.Random) -> None:
        self.chance = chance
        self.recover(journal)
        self.changes = [Change(0, path, value) for path, value in found(journal, self.pending).items()]

    def recover(self, journal: Journal) -> None:
        self.journal = journal
        self.pending = Backlog(journal).pending

    def apply(self, kind: RecordKind, meta: dict[str, Any], data: bytes | None = None) -> int:
        record = self.journal.append(kind, meta, data, reserve=True)
        self.journal.release(self.pending.apply(record))
        return record.lsn

    def step(self) -> None:
        """Write a record, or two, at random."""
        path = self.chance.choice(PATHS)
        version = self.pending.versions.get(path)
        operation = self.chance.choice(("put", "put", "put", "del", "move", "done", "tidy"))
        if operation == "put":
            data = self.chance.randbytes(self.chance.choice((0, 1, 700, 5000)))
            self.changes.append(Change(self.apply(RecordKind.PUT, {"path": path}, data), path, data))
        elif operation == "del":
            self.changes.append(Change(self.apply(RecordKind.DEL, {"path": path}), path, None))
        elif operation == "tidy":
            with suppress(OSError):  # the disk is broken
                self.journal.tidy(hard=True)
        elif version and operation == "done":
            self.apply(RecordKind.BEGIN, {"key": path, "lsns": [version.lsn]})
            lsn = self.apply(RecordKind.DONE, {"key": path, "lsns": [version.lsn], "entries": {path: None}})
            self.changes.append(Change(lsn, path, "published"))
        elif version and version.data and operation == "move":
            value = next(c.value for c in reversed(self.changes) if c.path == path)
            lsn = self.apply(RecordKind.MOVE, {"from": path, "to": "e", "lsn": version.lsn})
            self.changes += [Change(lsn, "e", value), Change(lsn, path, "published")]


def found(journal: Journal, pending: Pending) -> dict[str, Value]:
    return {path: v.data and journal.read(v.data) for path, v in pending.versions.items()}


def allowed(changes: list[Change], synced: int, path: str) -> list[Value]:
    """What a path may hold: what it held when all was synced, or any time later."""
    values: list[Value] = ["published"]
    for change in changes:
        if change.path == path:
            values = [change.value] if change.lsn <= synced else [*values, change.value]
    return values


def run(directory: Path, seed: int, failing: float) -> tuple[Recorder, list[Change]]:
    """Some steps of a mount that is killed at the end, and maybe before."""
    chance = random.Random(seed)
    recorder = Recorder([directory], failing=lambda n, name: name == "fdatasync" and chance.random() < failing)
    with hooked(recorder):
        journal = open_again(directory)
        history = History(journal, chance)
        recorder.mark("synced 0")
        for _ in range(12):
            if journal.read_only:
                break
            history.step()
            if chance.random() < 0.1:  # kill -9: what was not synced is in the page cache, and no power is lost yet
                kill(journal)
                journal = open_again(directory)
                history.recover(journal)
            if chance.random() < 0.4:
                synced = journal._appender.sequence
                try:
                    journal.sync()
                except OSError:
                    assert journal.read_only
                    break
                recorder.mark(f"synced {synced}")
        kill(journal)
    return recorder, history.changes


def open_again(directory: Path) -> Journal:
    """Until the disk is willing."""
    while True:
        with suppress(OSError):
            return open_journal(directory, **OPTIONS)


def check(directory: Path, changes: list[Change], synced: int) -> None:
    last: dict[str, Value] | None = None
    for _ in range(2):  # the second recovery finds the same
        journal = open_journal(directory, **OPTIONS)
        pending = Backlog(journal).pending
        assert journal.damaged_paths == [], journal.problems
        now = found(journal, pending)
        for path in {*PATHS, "e", *now}:
            assert now.get(path, "published") in allowed(changes, synced, path), (path, journal.problems)
        assert last in (None, now)
        last = now
        kill(journal)


@pytest.mark.parametrize("failing", [0.0, 0.15])
@pytest.mark.parametrize("seed", range(3))
def test_power_goes_at_every_call(tmp_path: Path, seed: int, failing: float) -> None:
    directory, chance, count = tmp_path / "j", random.Random(seed), 0
    directory.mkdir(mode=0o700)
    for mount in range(2):
        recorder, changes = run(directory, 100 * seed + mount, failing)
        last_target = None
        every = 9 if times() == 1 else 1  # of the states
        for lines, state in islice(walk_states(recorder, more=2, seed=seed), seed % every, None, every):
            if not lines:
                continue
            target = tmp_path / f"{mount}-{count}"
            state.write({str(directory): target})
            os.chmod(target, 0o700)
            check(target, changes, int(lines[-1].split()[1]))
            count += 1
            if last_target is None or chance.random() < 0.05:
                last_target = target
        assert last_target is not None
        directory = last_target
    assert count > 5  # how many depends on what threads write together
    assert syscalls.hook is None
