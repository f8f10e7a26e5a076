"""Kills, errors and power losses at every call of a scenario: a program, because it forks.

`python -m tests.write.crash HOW TARGET ENGINE SCENARIO...` prints one JSON object: how many points were tried, and what
was wrong. HOW is `kill` (T7), `fail` (T10), `power` (T9a) or `sync` (T11).
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from shardfs.formats.registry import formats
from shardfs.storage.writers import files, in_place, local, replace
from tests.write.engines import ENGINES, TreeFiles, Whole
from tests.write.faults import ERRORS, KILLED, NEVER_FAIL, Calls, FailAt, KillAt, ShortenAt, hooked
from tests.write.history import History, Log
from tests.write.oracle import Oracle
from tests.write.powerloss import SYNCS, Recorder, walk_states
from tests.write.scenarios import SCENARIOS, Scenario, Session
from tests.write.targets import LAYOUTS, TARGETS, Target, token_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

CHILD_SECONDS = 20
SHM = Path("/dev/shm")


@dataclass
class Outcome:
    """How it went."""

    points: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, where: str, failures: list[str]) -> None:
        self.points += 1
        for failure in failures:
            print(f"{where}: {failure}", file=sys.stderr, flush=True)
        self.wrong += [f"{where}: {failure}" for failure in failures]


class Place:
    """Directories of one run: the store, the journal, the log."""

    def __init__(self, top: Path) -> None:
        self.top, self.store, self.journal = top, top / "store", top / "journal"
        self.log, self.said = top / "log", top / "said"

    def make(self, template: Path) -> None:
        shutil.rmtree(self.top, ignore_errors=True)
        self.top.mkdir()
        shutil.copytree(template, self.store)
        self.journal.mkdir(mode=0o700)


def forked(place: Place, run: Callable[[], None], seconds: float = CHILD_SECONDS) -> int:
    """The exit status of `run` in a process of its own: 0, KILLED, or another if it failed or took too long."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            faulthandler.dump_traceback_later(seconds - 3, exit=False)
            run()
            status = 0
        except BaseException:  # noqa: BLE001 - whatever it is, the parent must hear of it
            with place.said.open("a") as file:
                traceback.print_exc(file=file)
        finally:
            os._exit(status)
    ended = os.pidfd_open(pid)
    if not select.select([ended], [], [], seconds)[0]:
        os.kill(pid, signal.SIGKILL)
        with place.said.open("a") as file:
            file.write(f"no end within {seconds:g} s\n")
    os.close(ended)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Trial:
    """One scenario on one target with one engine."""

    def __init__(self, target: Target, scenario: Scenario, engine: Whole, top: Path, oracle: Oracle) -> None:
        self.target, self.scenario, self.engine, self.oracle = target, scenario, engine, oracle
        self.initial = scenario.initial(target)
        self.template = top / "template"
        shutil.rmtree(self.template, ignore_errors=True)
        self.template.mkdir()
        target.create(self.template)
        if self.initial:
            target.fill(self.template, target.array(self.initial))
        self.place = Place(top / "run")
        self.readers = [name for name in target.readers if name != "cloudvolume"]
        self.turn = 0

    # ---- what runs in processes of its own ----

    def write(self, hook: Calls) -> None:
        log = Log(self.place.log)
        with hooked(hook), self.engine.open(self.target, self.place.store, self.place.journal) as files:
            self.scenario.run(Session(self.target, files, log, self.place.store))

    def recover(self) -> None:
        """What is seen after it must be what was acknowledged, before and after it is published."""
        history = self.history()
        with self.engine.open(self.target, self.place.store, self.place.journal) as files:
            wrong = history.wrong(self.seen(files.read), "closed")
            files.publish()
            wrong += [f"after publishing: {w}" for w in history.wrong(self.seen(files.read), "closed")]
        if wrong:
            raise AssertionError("; ".join(wrong))

    def seen(self, read: Callable[[str], bytes | None]) -> dict[int, int | None]:
        """The tokens of chunks as they are read through the engine; -1 for what is no whole chunk."""
        numbers_by_bytes = {self.target.shown(t): t for t in self.tokens()}
        out: dict[int, int | None] = {}
        for number in range(len(self.target.chunks)):
            data = read(self.target.path(number))
            out[number] = None if data is None else numbers_by_bytes.get(data, -1)
        document = read(self.target.document)
        out[self.target.described_as] = None if document is None else token_in(document, self.target)
        return out

    def tokens(self) -> set[int]:
        lines = self.place.log.read_text().splitlines() if self.place.log.exists() else []
        issued = {int(line.split()[2]) for line in lines if line.startswith("issue")}
        return (issued | set(self.initial.values())) - {0}

    def history(self) -> History:
        history = History(self.initial, len(self.target.chunks) + 1)
        return history.read(self.place.log.read_text().splitlines() if self.place.log.exists() else [])

    # ---- judgement ----

    def natively(self, level: str | None, *, every: bool = False) -> list[str]:
        readers = self.readers if every else [self.readers[self.turn % len(self.readers)]]
        self.turn += 1
        return self.oracle.wrong(self.target, self.place.store, self.place.log, self.initial, level, readers)

    def said(self) -> str:
        return self.place.said.read_text()[-3000:] if self.place.said.exists() else ""

    def fingerprint(self) -> dict[str, tuple[int, int, int]]:
        """Of what is in the store: unchanged if nobody wrote to it."""
        paths = sorted(p for p in self.place.store.rglob("*") if p.is_file() and not p.name.endswith(".__lock"))
        stats = ((p, p.stat()) for p in paths)
        return {str(p.relative_to(self.place.store)): (s.st_ino, s.st_size, s.st_mtime_ns) for p, s in stats}

    def litter(self) -> list[str]:
        """Files that are neither shards nor documents. A stale lock is cleared by whoever writes next, and so is what
        was to become a document, of which the journal knows nothing."""
        expected_names = {*self.target.shards(), self.target.document, ".shardfs.lock"}
        unexpected_names = [name for name in self.fingerprint() if name not in expected_names and "/" in name]
        return [f"left behind: {name}" for name in unexpected_names]

    def check_recovery(self) -> list[str]:
        """After a crash: whole versions at once; then what was acknowledged, and nothing to do a second time."""
        out = [f"before recovery: {w}" for w in self.natively(None)]
        if (status := forked(self.place, self.recover)) != 0:
            return [*out, f"recovery: status {status}: {self.said()}"]
        out += [f"after recovery: {w}" for w in self.natively("closed")]
        out += self.litter()
        before = self.fingerprint()
        if (status := forked(self.place, self.recover)) != 0:
            return [*out, f"second recovery: status {status}: {self.said()}"]
        if (after := self.fingerprint()) != before:
            out.append(f"second recovery changed {before} to {after}")
        return out

    # ---- the ways to go wrong ----

    def count(self) -> list[str]:
        """The calls of the scenario when nothing goes wrong, which is looked at, too."""
        calls = Calls()
        names = self.place.top / "calls"
        self.place.make(self.template)

        def run() -> None:
            self.write(calls)
            names.write_text("\n".join(calls.names))

        status = forked(self.place, run)
        if status:
            raise AssertionError(f"{self.scenario.name} fails by itself: status {status}: {self.said()}")
        wrong = self.check_recovery() + self.natively("closed", every=True)
        if wrong:
            raise AssertionError(f"{self.scenario.name} goes wrong by itself: {wrong}")
        return names.read_text().splitlines()

    def kills(self, outcome: Outcome, stride: int, offset: int) -> None:
        """T7: at every call, before and after it."""
        calls = len(self.count())
        for point in range(offset % stride, 2 * calls + 40, stride):
            at, after = divmod(point, 2)
            self.place.make(self.template)
            status = forked(self.place, lambda: self.write(KillAt(at, after=bool(after))))  # noqa: B023 - run at once
            if status == 0:  # threads of the engine make a few calls more or fewer
                if at >= calls:
                    break
                continue
            where = f"{self.target.name}/{self.scenario.name}, killed {'after' if after else 'before'} call {at}"
            if status != KILLED:
                outcome.add(where, [f"status {status}: {self.said()}"])
                continue
            outcome.add(where, self.check_recovery())

    def failures(self, outcome: Outcome, stride: int, offset: int) -> None:
        """T10: each call fails, once and for ever, with one of the errors it may meet; writes are cut short."""
        names = self.count()
        points = list(self._faults(names))
        for where, hook in points[offset % stride :: stride]:
            self.place.make(self.template)
            where = f"{self.target.name}/{self.scenario.name}, {where}"
            status = forked(self.place, lambda: self._write_stubbornly(hook))  # noqa: B023 - run at once
            if status:
                outcome.add(where, [f"status {status}: {self.said()}"])
                continue
            reasons = [f"before recovery: {w}" for w in self.natively("published")]
            outcome.add(where, reasons + self.check_recovery())

    def _faults(self, names: list[str]) -> Iterator[tuple[str, Calls]]:
        for at, name in enumerate(names):
            if name in NEVER_FAIL:
                continue
            errors = ERRORS.get(name, (5,))
            for for_ever in (False, True):
                number = errors[(at + for_ever) % len(errors)]
                description = (
                    f"{name} (call {at}) fails {'for ever' if for_ever else 'once'} with {os.strerror(number)}"
                )
                yield description, FailAt(at, number, for_ever=for_ever)
            if name in ("write", "pwrite", "copy_file_range"):
                yield f"{name} (call {at}) and all after it are short", ShortenAt(at)

    def _run_stubbornly(self, files: TreeFiles, heal: Callable[[], None], log: Log) -> bool:
        stubborn: Any = Stubborn(files, heal)
        try:
            self.scenario.run(Session(self.target, stubborn, log, self.place.store))
        except OSError:
            if not files.read_only:  # if it is, it says so, and only mounting anew helps
                raise
        return True

    def _write_stubbornly(self, hook: Calls) -> None:
        """Go on after errors as a patient user does: try again, then do something about the disk, try again."""
        log = Log(self.place.log)

        def heal() -> None:
            if isinstance(hook, FailAt):
                hook.heal()

        is_written = False
        with hooked(hook):
            for last in (False, False, True):
                try:
                    with self.engine.open(self.target, self.place.store, self.place.journal) as files:
                        is_written = self._run_stubbornly(files, heal, log)
                    break
                except OSError:  # of opening, which is tried again, or of closing, which has told it then
                    if is_written:
                        break
                    if last or self.place.log.stat().st_size > 0:
                        raise
                    heal()


def _is(at: int, number: int, name: str) -> bool:
    return number == at


class PowerTrial(Trial):
    """T9a: what is found after power losses at every moment of a scenario. All of it in a process of its own."""

    every = 1
    """1: try all states of the disk; N: only every N-th one."""

    def losses(self, outcome: Outcome, more: int, seed: int) -> None:
        """`more` states at random after each call, beside the extremes."""
        self.count()
        self._forked(outcome, f"{self.target.name}/{self.scenario.name}", lambda _, __: False, more, seed)

    def lying_syncs(self, outcome: Outcome, more: int, seed: int) -> None:
        """T11: an fsync fails, and the kernel takes the pages for clean. Each in turn, once."""
        names = self.count()
        for at, name in enumerate(names):
            if name in SYNCS:
                where = f"{self.target.name}/{self.scenario.name}, {name} (call {at}) fails"
                self._forked(outcome, where, partial(_is, at), more, seed + at, marks_only=True)

    def _forked(
        self,
        outcome: Outcome,
        where: str,
        failing: Callable[[int, str], bool],
        more: int,
        seed: int,
        *,
        marks_only: bool = False,
    ) -> None:
        told = self.place.top / "outcome"
        self.place.make(self.template)

        def run() -> None:
            inner = Outcome()
            self._lose(inner, where, failing, more, seed, marks_only=marks_only)
            told.write_text(json.dumps([inner.points, inner.wrong[:20]]))

        status = forked(self.place, run, 600)
        if status:
            outcome.add(where, [f"status {status}: {self.said()}"])
            return
        points, wrong = json.loads(told.read_text())
        outcome.points += points
        outcome.wrong += wrong

    def _lose(
        self,
        outcome: Outcome,
        where: str,
        failing: Callable[[int, str], bool],
        more: int,
        seed: int,
        *,
        marks_only: bool,
    ) -> None:
        recorder = Recorder([self.place.store, self.place.journal], failing=failing)
        log = Log(self.place.log, recorder.mark)
        with hooked(recorder), self.engine.open(self.target, self.place.store, self.place.journal) as files:
            stubborn: Any = Stubborn(files, lambda: None)
            self.scenario.run(Session(self.target, stubborn, log, self.place.store))
        shutil.rmtree(self.place.store)  # what comes back lies where it lay: a journal knows its source by the path
        shutil.rmtree(self.place.journal, ignore_errors=True)  # removed by a clean end
        states = walk_states(recorder, more=more, seed=seed, marks_only=marks_only)
        for lines, state in islice(states, seed % self.every, None, self.every):
            inodes = state.write({str(path): path for path in (self.place.store, self.place.journal)})
            self.place.log.write_text("".join(f"{line}\n" for line in lines))
            description = f"{where}: power loss after {len(lines)} notes: {state.what}"
            outcome.add(description, self._found({real: recorder.inodes[number] for real, number in inodes.items()}))
            shutil.rmtree(self.place.store)
            shutil.rmtree(self.place.journal, ignore_errors=True)  # removed by a clean end
            if len(outcome.wrong) > 10:
                break

    def _found(self, inodes: Mapping[int, int]) -> list[str]:
        with numbered(inodes):
            try:
                with self.engine.open(self.target, self.place.store, self.place.journal) as files:
                    wrong = [f"seen: {w}" for w in self.history().wrong(self.seen(files.read), "synced")]
                    files.publish()
            except Exception:  # noqa: BLE001 - whatever recovery says of a disk that lost power
                return [f"recovery: {traceback.format_exc()[-3000:]}"]
        # What is left beside a shard goes when somebody writes there again; after a power loss there may be nothing to
        # write.
        return wrong + self.natively("synced")


@contextmanager
def numbered(inodes: Mapping[int, int]) -> Iterator[None]:
    """The writers see files under the inode numbers that they had before the power loss."""

    class Seen:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def fstat(self, fd: int) -> os.stat_result:
            return renumbered(os.fstat(fd))

        def stat(self, *args: Any, **kwargs: Any) -> os.stat_result:
            return renumbered(os.stat(*args, **kwargs))

    def renumbered(info: os.stat_result) -> os.stat_result:
        if info.st_ino not in inodes:
            return info
        _, parts = cast("tuple[Any, Any]", info.__reduce__())
        values, more = parts
        return os.stat_result((values[0], inodes[info.st_ino], *values[2:]), more)

    modules = [vars(module) for module in (local, files, in_place, replace)]
    for module in modules:
        module["os"] = Seen()
    try:
        yield
    finally:
        for module in modules:
            module["os"] = os


class Stubborn:
    """`TreeFiles` of which every call that fails is tried again twice, then once more when the cause is gone."""

    def __init__(self, files: object, heal: Callable[[], None]) -> None:
        self._files, self._heal = files, heal

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._files, name)

        def call(*args: object, **kwargs: object) -> object:
            for attempt in range(6):
                try:
                    return function(*args, **kwargs)
                except FileNotFoundError:
                    if attempt and name in ("unlink", "rename"):
                        return None  # it was done the last time, although it failed
                    raise
                except FileExistsError:
                    if attempt and name == "link":
                        return None
                    raise
                except OSError:
                    if attempt == 5:
                        raise
                    if attempt >= 1:
                        self._heal()
            return None

        return call


@contextmanager
def workplace() -> Iterator[Path]:
    """A directory in memory, if there is room."""
    base = SHM if os.access(SHM, os.W_OK) else None
    top = Path(tempfile.mkdtemp(prefix="shardfs-crash-", dir=base))
    try:
        yield top
    finally:
        shutil.rmtree(top, ignore_errors=True)


def run(arguments: argparse.Namespace, scenarios: list[str]) -> Outcome:
    """All of it, in this process and its children."""
    outcome = Outcome()
    formats()  # imports them, or each child does
    end = time.monotonic() + arguments.seconds
    target, engine = {**TARGETS, **LAYOUTS}[arguments.target], ENGINES[arguments.engine]
    with workplace() as top, Oracle() as oracle:
        for name in scenarios:
            if SCENARIOS[name].documents and target.name in LAYOUTS:
                continue
            trial = PowerTrial(target, SCENARIOS[name], engine, top, oracle)
            trial.every = arguments.every
            if time.monotonic() > end:
                outcome.wrong.append(f"no time left for {name}")
                break
            match arguments.how:
                case "kill":
                    trial.kills(outcome, arguments.stride, arguments.seed)
                case "fail":
                    trial.failures(outcome, arguments.stride, arguments.seed)
                case "power":
                    trial.losses(outcome, arguments.stride, arguments.seed)
                case "sync":
                    trial.lying_syncs(outcome, arguments.stride, arguments.seed)
    return outcome


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("how", choices=["kill", "fail", "power", "sync"])
    parser.add_argument("target", choices=sorted({**TARGETS, **LAYOUTS}))
    parser.add_argument("engine", choices=sorted(ENGINES))
    parser.add_argument("scenarios", nargs="*")
    parser.add_argument(
        "--stride",
        type=int,
        default=1,
        help="only every so many-th point; power, sync: so many random states after each call",
    )
    parser.add_argument("--every", type=int, default=1, help="power, sync: only every so many-th state of the disk")
    parser.add_argument("--seed", type=int, default=0, help="which of them")
    parser.add_argument("--seconds", type=float, default=3600)
    given = parser.parse_args()
    names = given.scenarios or sorted(SCENARIOS)
    result = run(given, names)
    print(json.dumps({"points": result.points, "wrong": result.wrong[:20], "failures": len(result.wrong)}))
