"""Compare reads through a mount of shardfs with the best possible reads on this machine, in one run:

plain     the same chunks as plain files
least     the smallest FUSE daemon that can serve them (least_fuse.c): its cost is the cost of FUSE
shardfs   `shardfs mount` without options

`direct_io`, `no poll` and `small cache` are shardfs with -o direct_io, poll_us=0 and index_cache=4M.

    python scripts/bench_read.py [--quick] [--only reads,lists,copies,arrays,start,requests] [--json]

All contestants take turns within each repetition. A ratio is the median of the ratios of the repetitions. The ratio of
the best repetitions follows; it is more accurate on a shared machine. This is no test: missed goals are printed, but do
not change the exit code. Requires numpy, tensorstore and zarr (`pip install -e '.[test]'`), a FUSE mount, and gcc and
libfuse3-dev for `least`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_lib import (
    ENVIRONMENT,
    HERE,
    Calm,
    Data,
    DataSet,
    Mount,
    adopt_daemons,
    client,
    on_cpus,
    prefault,
    resident_mib,
    tracer,
    warm,
    write_for_requests,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bench_lib import Tracer

# ---- contestants and goals ----

PLAIN, LEAST, SHARDFS, DIRECT_IO, NO_POLL, SHARDS = "plain", "least", "shardfs", "direct_io", "no poll", "own reading"
SMALL_CACHE = "small cache"
OPTIONS = {
    SHARDFS: [],
    DIRECT_IO: ["-o", "direct_io"],
    NO_POLL: ["-o", "poll_us=0"],
    SMALL_CACHE: ["-o", "index_cache=4M"],
}
COMPARED = (PLAIN, LEAST, SHARDFS)
YARDSTICKS = (PLAIN, LEAST, SHARDS)
FASTER = ("MB/s", "/s")  # units where more is better

CUBE = (4, 4, 4)
READ = {
    "16 KiB": DataSet("read-16k", (16, 16, 32), (16, 32, 32), CUBE),
    "64 KiB": DataSet("read-64k", (16, 16, 16), (32, 32, 64), CUBE),
    "1 MiB": DataSet("read-1m", (8, 8, 8), (64, 128, 128), CUBE),
}
READ_QUICK = {
    "16 KiB": DataSet("quick-16k", (8, 16, 16), (16, 32, 32), CUBE),
    "64 KiB": DataSet("quick-64k", (8, 8, 16), (32, 32, 64), CUBE),
    "1 MiB": DataSet("quick-1m", (4, 4, 8), (64, 128, 128), CUBE),
}
FLAT = [DataSet("flat-20k", (20_000,), (64,), (500,)), DataSet("flat-200k", (200_000,), (64,), (500,))]
START = [
    DataSet("start-1e4", (32, 32, 16), (2, 2, 4), (16, 16, 16), twin=False),
    DataSet("start-1e5", (48, 48, 48), (2, 2, 4), (16, 16, 16), twin=False),
    DataSet("start-1e6", (112, 96, 96), (2, 2, 4), (16, 16, 16), twin=False),
    DataSet("start-1e7", (224, 208, 224), (2, 2, 4), (16, 16, 16), twin=False),
]
NAMES = DataSet("names-2e6", (1 << 21,), (16,), (4096,), twin=False)
NAMES_QUICK = DataSet("names-1e6", (1 << 20,), (16,), (4096,), twin=False)
LIMIT = 2048  # chunks that one process reads


@dataclass(frozen=True)
class Goal:
    """A bound for a figure (`against` is empty), or for its ratio to that of another contestant."""

    against: str
    bound: float
    at_least: bool = False

    def met(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.bound:g}{' x ' + self.against if self.against else ''}"


FIRST, SECOND, BEYOND = Goal(LEAST, 1.2), Goal(LEAST, 1.1), Goal(LEAST, 1.0)


@dataclass
class Row:
    """One measure of one contestant: a value for each repetition."""

    section: str
    measure: str
    contestant: str
    unit: str
    values: list[float] = field(default_factory=list)
    goals: tuple[Goal, ...] = ()
    note: str = ""


class Report:
    """The measured values. Rows of the same section and measure are compared."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str, str], Row] = {}

    def put(self, section: str, measure: str, contestant: str, unit: str, value: float, *goals: Goal) -> Row:
        """Add a row. Only shardfs has goals; goals of other contestants are dropped."""
        row = self.rows.get((section, measure, contestant))
        if row is None:
            row = Row(section, measure, contestant, unit, goals=() if contestant in YARDSTICKS else goals)
            self.rows[section, measure, contestant] = row
        row.values.append(value)
        return row

    def ratio(self, row: Row, against: str) -> float:
        """The median over the repetitions; NaN if the other contestant was not measured."""
        other = self.rows.get((row.section, row.measure, against))
        if other is None or len(other.values) != len(row.values) or not all(other.values):
            return nan
        return statistics.median(a / b for a, b in zip(row.values, other.values, strict=True))

    def best(self, row: Row, against: str) -> float:
        """The ratio of the best repetitions, which other processes disturbed least; NaN as in `ratio`."""
        other = self.rows.get((row.section, row.measure, against))
        choose = max if row.unit in FASTER else min
        if other is None or not all(other.values):
            return nan
        return choose(row.values) / choose(other.values)

    def judged(self, row: Row, goal: Goal) -> tuple[float, str]:
        value = self.ratio(row, goal.against) if goal.against else statistics.median(row.values)
        return value, "?" if value != value else "met" if goal.met(value) else "NOT MET"

    def print_table(self, section: str) -> None:
        rows = [row for row in self.rows.values() if row.section == section]
        if not rows:
            return
        wide = max(len(row.measure) for row in rows)
        print(f"\n== {section}\n\n{'':{wide}} {'':12} {'median':>14} {'x plain':>8} {'x least':>8} {'(best)':>8}  goal")
        for row in rows:
            figure = f"{_short(statistics.median(row.values))} {row.unit}"
            ratios = [_short(self.ratio(row, against)) for against in (PLAIN, LEAST)]
            ratios.append(_short(self.best(row, LEAST)))
            judged = [(goal, *self.judged(row, goal)) for goal in row.goals]
            goals = [f"{goal}: {_short(value)} {word}" for goal, value, word in judged]
            cells = (
                f"{row.measure:{wide}} {row.contestant:12} {figure:>14} {ratios[0]:>8} {ratios[1]:>8} {ratios[2]:>8}"
            )
            print(f"{cells}  {'; '.join([*goals, row.note])}".rstrip("; "))

    def as_json(self) -> dict[str, Any]:
        return {"machine": machine(), "rows": [self._as_json(row) for row in self.rows.values()]}

    def _as_json(self, row: Row) -> dict[str, Any]:
        goals = [{"goal": str(g), "met": self.judged(row, g)[1] == "met"} for g in row.goals]
        ratios = {f"x {name}": _finite(self.ratio(row, name)) for name in (PLAIN, LEAST)}
        ratios["best x least"] = _finite(self.best(row, LEAST))
        median = statistics.median(row.values)
        return {**row.__dict__, "values": row.values, "median": median, **ratios, "goals": goals}


def _short(value: float) -> str:
    if value != value:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value >= 10 else f"{value:.2f}"


def _finite(value: float) -> float | None:
    return None if value != value else round(value, 3)


def machine() -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


# ---- mounting, waiting, taking turns ----


class Bench:
    """The contestants on this machine, and the report."""

    def __init__(self, work: Path, data: Data, *, quick: bool, repetitions: int, calm_s: float) -> None:
        self.work, self.data, self.quick = work, data, quick
        self.repetitions = repetitions or (3 if quick else 5)
        self.report, self.calm = Report(), Calm(calm_s)
        self.mountpoint = work / "mnt"
        self.mountpoint.mkdir()
        self.least = compile_least(work / "least_fuse")

    def turns(self, names: Sequence[str], repetitions: int = 0) -> Iterator[str]:
        """Yield each contestant once per repetition. Each repetition starts with another contestant."""
        able = [name for name in names if name != LEAST or self.least]
        for i in range(repetitions or self.repetitions):
            k = i % len(able)
            yield from able[k:] + able[:k]

    @contextlib.contextmanager
    def mounted(self, name: str, of: DataSet, cpus: set[int] | None = None) -> Iterator[tuple[Path, Mount | None]]:
        """Context manager for a fresh mount at a quiet moment, with its source in the page cache. Yields the root."""
        self.data.need(of)
        form = {PLAIN: "plain", SHARDS: "sharded"}.get(name)
        warm(self.data.path(of, form or "sharded"))
        if form:
            self.calm.wait()
            with on_cpus(cpus):
                yield self.data.path(of, form), None
            return
        self.calm.wait()
        with on_cpus(cpus):
            mount = Mount(self._command(name, of), self.mountpoint, "zarr.json", stays=name == LEAST)
            try:
                yield mount.root, mount
            finally:
                mount.close()

    def _command(self, name: str, of: DataSet) -> list[str]:
        if name == LEAST:
            return [str(self.least), str(self.data.path(of, "table")), str(self.mountpoint)]
        return shardfs("mount", str(self.data.path(of, "sharded")), str(self.mountpoint), *OPTIONS[name])


def shardfs(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "shardfs", *arguments]


def compile_least(target: Path) -> Path | None:
    source = str(HERE / "least_fuse.c")
    flags = ["pkg-config", "--cflags", "--libs", "fuse3"]
    try:
        found = subprocess.run(flags, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
        subprocess.run(["gcc", "-O2", "-Wall", source, "-o", str(target), *found], check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        say("`least` is skipped because it cannot be compiled. On Debian: apt install gcc pkg-config libfuse3-dev")
        return None
    return target


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- reads ----


def reads(bench: Bench) -> None:
    """Read chunks by key, in random order."""
    one = {max(os.sched_getaffinity(0))}
    modes = [(1, one), (1, None), (8, None)] if bench.quick else [(1, one), (1, None), (8, one), (8, None)]
    for (size, of), (processes, cpus) in itertools.product((READ_QUICK if bench.quick else READ).items(), modes):
        names = [*COMPARED, *([DIRECT_IO] if size == "1 MiB" else [] if cpus else [NO_POLL])]
        mode = f"{processes} process{'es' if processes > 1 else ''}, {'one CPU' if cpus else 'free'}"
        for name in bench.turns(names):
            first, second = read_once(bench, name, of, processes, cpus)
            goal = BEYOND if name == SHARDFS and processes == 1 and not cpus else FIRST
            bench.report.put("reads", f"{size}, {mode}, first", name, "us", first, goal)
            cached = [] if name == DIRECT_IO else [SECOND]
            bench.report.put("reads", f"{size}, {mode}, second", name, "us", second, *cached)


def read_once(bench: Bench, name: str, of: DataSet, processes: int, cpus: set[int] | None) -> tuple[float, float]:
    """Microseconds per chunk in the first and in the second pass over a fresh mount."""
    chunks = of.count if processes > 1 else min(of.count, LIMIT)
    with bench.mounted(name, of, cpus) as (root, _):
        prefault(chunks * of.chunk_bytes * 5 // 4)
        found = client("read", root, ",".join(map(str, of.grid)), chunks, processes)
    if found["bytes"] != [chunks * of.chunk_bytes] * 2:
        raise RuntimeError(f"{name} gave {found['bytes']} bytes instead of twice {chunks * of.chunk_bytes}")
    first, second = found["us"]
    return first, second


# ---- lists ----

LISTINGS: dict[str, Callable[[Path], Sequence[str]]] = {
    "ls -l": lambda root: ["ls", "-lR", str(root)],
    "find -size": lambda root: ["find", str(root), "-size", "+0"],
    "du": lambda root: ["du", "-s", str(root)],
}


def lists(bench: Bench) -> None:
    nested = (READ_QUICK if bench.quick else READ)["64 KiB"]
    for of in [*FLAT[: 1 if bench.quick else None], nested]:
        where = f"{of.count:,} chunks, {'flat' if len(of.grid) == 1 else 'nested'}"
        repetitions = 3 if of.count > 100_000 else 0
        for command in ["scandir", *LISTINGS]:
            for name in bench.turns(COMPARED, repetitions):
                list_once(bench, name, of, command, where)
    names_of_one_directory(bench)


def list_once(bench: Bench, name: str, of: DataSet, command: str, where: str) -> None:
    with bench.mounted(name, of) as (root, _):
        prefault(1500 * of.count + (64 << 20))
        for again, goal in (("first", Goal(LEAST, 1.2)), ("second", Goal(PLAIN, 1.0))):
            seconds = walk(root / "c", of) if command == "scandir" else run_time(LISTINGS[command](root / "c"))
            measure = f"{command}, {where}, {again}"
            bench.report.put("lists", measure, name, "ms", seconds * 1e3, *([] if command == "scandir" else [goal]))


def walk(top: Path, of: DataSet) -> float:
    """Seconds to list all names."""
    began, names, left = time.perf_counter(), 0, [str(top)]
    while left:
        with os.scandir(left.pop()) as entries:
            for entry in entries:
                names += 1
                if entry.is_dir(follow_symlinks=False):
                    left.append(entry.path)
    if names < of.count:
        raise RuntimeError(f"{top} shows {names} entries instead of {of.count}")
    return time.perf_counter() - began


def run_time(command: Sequence[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    return time.perf_counter() - began


def names_of_one_directory(bench: Bench) -> None:
    of = NAMES_QUICK if bench.quick else NAMES
    where, fast, flat = f"{of.count:,} names", Goal("", 300_000, at_least=True), Goal("", 16)
    for name in bench.turns([LEAST, SHARDFS, SMALL_CACHE], 2):  # index_cache limits the memory for indices
        with bench.mounted(name, of) as (root, mount):
            prefault(1200 * of.count)
            before = resident_mib(mount.pids) if mount else 0
            speed = of.count / walk(root / "c", of)
            grown = resident_mib(mount.pids) - before if mount else 0
        bench.report.put("lists", f"scandir, {where}", name, "/s", speed, fast)
        bench.report.put(
            "lists", f"scandir, {where}, daemon grows", name, "MiB", grown, *([flat] if name == SMALL_CACHE else [])
        )
    for _ in range(2):
        bench.calm.wait()
        found = client("scan", bench.data.path(of, "sharded"))
        bench.report.put("lists", f"Tree.scan, {where}", SHARDFS, "/s", found["names"] / found["s"], fast)
        bench.report.put("lists", f"Tree.scan, {where}, grows", SHARDFS, "MiB", found["grown_mib"], flat)
        seconds = run_time(shardfs("ls", str(bench.data.path(of, "sharded")), "c"))
        bench.report.put("lists", f"shardfs ls, {where}", SHARDFS, "/s", of.count / seconds, fast)


# ---- copies ----


def copies(bench: Bench) -> None:
    """Copy chunks to memory, so that no disk is measured."""
    of = (READ_QUICK if bench.quick else READ)["64 KiB"]
    shm = Path("/dev/shm")
    roomy = shm.is_dir() and shutil.disk_usage(shm).free > 2 * of.bytes
    for tool in ("cp -r", "rsync -a", "tar"):
        if not shutil.which(tool.split()[0]):
            say(f"{tool} is left out: it is not installed")
            continue
        for name in bench.turns(COMPARED):
            with (
                tempfile.TemporaryDirectory(dir=shm if roomy else bench.work) as target,
                bench.mounted(name, of) as (root, _),
            ):
                prefault(of.bytes * 5 // 2)
                seconds = pack(root) if tool == "tar" else run_time([*tool.split(), f"{root}/.", f"{target}/out"])
                check_copies(Path(target), of, tool)
            bench.report.put("copies", f"{tool}, {of.count:,} x 64 KiB", name, "s", seconds, Goal(LEAST, 1.2))


def pack(root: Path) -> float:
    """Run tar through a pipe: tar reads no files if its output is /dev/null."""
    began = time.perf_counter()
    with subprocess.Popen(["tar", "cf", "-", "-C", str(root), "."], stdout=subprocess.PIPE) as tar:
        subprocess.run(["cat"], stdin=tar.stdout, stdout=subprocess.DEVNULL, check=True)
    if tar.returncode:
        raise RuntimeError(f"tar: exit code {tar.returncode}")
    return time.perf_counter() - began


def check_copies(target: Path, of: DataSet, tool: str) -> None:
    sizes = [path.stat().st_size for path in (target / "out" / "c").rglob("*") if path.is_file()]
    if tool != "tar" and (len(sizes), sum(sizes)) != (of.count, of.bytes):
        raise RuntimeError(f"{tool} copied {len(sizes)} of {of.count} chunks, {sum(sizes)} of {of.bytes} bytes")


# ---- arrays ----


def arrays(bench: Bench) -> None:
    """Read a whole array with libraries that can also read the shards directly."""
    of = (READ_QUICK if bench.quick else READ)["64 KiB"]
    goals = {
        "tensorstore": (Goal(PLAIN, 0.9, at_least=True), Goal(SHARDS, 0.75, at_least=True)),
        "zarr-python": (Goal(PLAIN, 0.95, at_least=True),),
    }
    for library, wanted in goals.items():
        sums = set()
        for name in bench.turns([*COMPARED, NO_POLL, SHARDS]):
            with bench.mounted(name, of) as (root, _):
                prefault(of.bytes * 5 // 2)
                found = client("array", library, root)
            sums.add(found["sum"])
            speed = of.bytes / found["s"] / 1e6
            bench.report.put("arrays", f"{library}, whole array", name, "MB/s", speed, *wanted)
        if len(sums) > 1:
            raise RuntimeError(f"{library} read different arrays")


# ---- start ----


def start(bench: Bench) -> None:
    """Measure the time from the start of the command to the first byte of a chunk, then the daemon's memory."""
    bench.data.need(START[0])
    with bench.mounted(SHARDFS, START[0]):  # the first run of a program compiles its bytecode
        pass
    for of in START[: 2 if bench.quick else None]:
        bench.data.need(of)
        for name in bench.turns([SHARDFS]):
            bench.calm.wait()
            first = "/".join(["c", *["0"] * len(of.grid)])
            mount = Mount(bench._command(name, of), bench.mountpoint, first, stays=False)
            try:
                early = resident_mib(mount.pids)
                read_some(mount.root, of, 1000)
                late = resident_mib(mount.pids)
            finally:
                mount.close()
            where = f"{of.count:,} chunks"
            bench.report.put("start", f"first byte, {where}", name, "s", mount.ready_s, Goal("", 0.5))
            bench.report.put("start", f"resident after it, {where}", name, "MiB", early, Goal("", 120))
            bench.report.put("start", f"resident after 1,000 chunks, {where}", name, "MiB", late, Goal("", 120))


def read_some(root: Path, of: DataSet, chunks: int) -> None:
    """Read chunks that are far apart, so that nearly each is in another shard."""
    step = of.count // chunks
    for i in range(chunks):
        key, rest = [], i * step
        for n in reversed(of.grid):
            rest, k = divmod(rest, n)
            key.append(str(k))
        if len((root / "c" / "/".join(reversed(key))).read_bytes()) != of.chunk_bytes:
            raise RuntimeError(f"chunk {key} has the wrong size")


# ---- requests ----

STORE_GOALS = {
    "zarr3, cold index": 2,
    "zarr3, warm index": 1,
    "zarr3, missing chunk, warm index": 0,
    "zarr3, 8 neighbours, warm index": 1,
    "precomputed, cold index": 3,
    "precomputed, warm index": 1,
}


def requests(bench: Bench) -> None:
    store_requests(bench)
    if os.getuid():
        say("FUSE requests are not counted: that needs root")
        return
    of = READ_QUICK["64 KiB"]
    with tracer(bench.work / "tracing") as counter:
        for name in bench.turns([LEAST, SHARDFS], 1):
            with bench.mounted(name, of) as (root, _):
                fuse_requests(bench, counter, name, of, root)


def store_requests(bench: Bench) -> None:
    found = client("requests", *write_for_requests(bench.work))
    for case, asked in found.items():
        goal = Goal("", STORE_GOALS[case])
        row = bench.report.put("requests", f"to the store: {case}", SHARDFS, "", len(asked), goal)
        row.note = " ".join(asked)


def fuse_requests(bench: Bench, counter: Tracer, name: str, of: DataSet, root: Path) -> None:
    chunks = 256
    reading = [root, ",".join(map(str, of.grid)), chunks, 1]
    twice = counter.count(root, lambda: client("read", *reading))
    again = counter.count(root, lambda: client("read", *reading))
    listing = counter.count(root, lambda: run_time(["ls", "-lR", str(root / "c")]))
    for what, asked, per, bound in (
        ("a chunk of 64 KiB, first pass", twice, chunks, Goal(LEAST, 1.0)),
        ("a chunk of 64 KiB, second pass", again, chunks, Goal("", 0.01)),
        ("an entry of ls -lR", listing, of.count, Goal(LEAST, 1.1)),
    ):
        row = bench.report.put("requests", f"FUSE: {what}", name, "", sum(asked.values()) / per, bound)
        row.note = ", ".join(f"{kind} {n / per:.3g}" for kind, n in sorted(asked.items()))


# ---- the command ----

SECTIONS: dict[str, Callable[[Bench], None]] = {
    "reads": reads,
    "lists": lists,
    "copies": copies,
    "arrays": arrays,
    "start": start,
    "requests": requests,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less data and fewer repetitions: a few minutes")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--json", action="store_true", help="one JSON object in one line instead of tables")
    parser.add_argument("--data", type=Path, help="directory for the data sets (default: a temporary one)")
    parser.add_argument("--keep", action="store_true", help="keep the data sets; another run with --data uses them")
    parser.add_argument("--repetitions", type=int, default=0, help="default: 5, or 3 if --quick")
    parser.add_argument("--calm", type=float, default=120, help="seconds to wait, in all, for other load to pause")
    found = parser.parse_args()
    found.only = [name.strip() for name in found.only.split(",") if name.strip()]
    if unknown := set(found.only) - set(SECTIONS):
        parser.error(f"--only: there is no {', '.join(sorted(unknown))}")
    return found


def main() -> None:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    adopt_daemons()
    with tempfile.TemporaryDirectory(prefix="shardfs-bench-", ignore_cleanup_errors=True) as temporary:
        work = Path(temporary).resolve()
        data = Data(args.data or (Path(tempfile.mkdtemp(prefix="shardfs-data-")) if args.keep else work / "data"))
        bench = Bench(work, data, quick=args.quick, repetitions=args.repetitions, calm_s=args.calm)
        try:
            for name in args.only:
                say(f"{time.strftime('%H:%M:%S')} {name}")
                try:
                    SECTIONS[name](bench)
                finally:
                    if not args.json:
                        bench.report.print_table(name)
        finally:
            finish(bench, keep=args.keep)
        if args.json:
            print(json.dumps(bench.report.as_json()))


def finish(bench: Bench, *, keep: bool) -> None:
    if keep:
        say(f"the data sets are in {bench.data.home}")
    else:
        bench.data.remove()
    say(f"{bench.calm.disturbed} of {bench.calm.asked} measurements began while others used the CPUs")


if __name__ == "__main__":
    main()
