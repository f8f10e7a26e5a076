"""What writers of shards do to an array of one shard; `scripts/torture --writers [NAME...]` runs it.

Each program writes natively, to the same array without shards, and through a mount with `--rw`. Three scenarios:

parallel  four processes write 16 of the 64 chunks each, once
kill      one process writes chunk after chunk, and gets kill -9 at a random time
reader    one process writes chunk after chunk, and another one of the same program reads

acquire-zarr only appends: it writes plane after plane, and gets kill -9. tensorstore reads all chunks at last.

Each count is a line of JSON in --out. `--table FILE` prints such a file as tables in Markdown.

SHARDFS_WRITERS_PYTHON  a Python with zarr-python, tensorstore, z5py, zarrs and acquire-zarr (default: this one)
SHARDFS_CV_PYTHON       a Python with CloudVolume (default: .venv-cv/bin/python)
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorstore as ts
from shard_writer import CHUNKS, DTYPE, PROGRAMS, SIDE, token_of

from tests.write.history import History

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
PYTHON = os.environ.get("SHARDFS_WRITERS_PYTHON", sys.executable)
CV_PYTHON = os.environ.get("SHARDFS_CV_PYTHON", str(ROOT / ".venv-cv/bin/python"))
SHARDFS = [sys.executable, "-m", "shardfs"]
PLACES = ("native", "files", "shardfs")
WRITERS, PATIENCE = 4, 20.0
ALL = list(range(CHUNKS))


# ---- arrays


def spec(program: str, path: Path) -> dict[str, Any]:
    driver = "neuroglancer_precomputed" if program in ("tensorstore precomputed", "CloudVolume") else "zarr3"
    return {"driver": driver, "kvstore": {"driver": "file", "path": f"{path}/"}}


def schema(driver: str, *, sharded: bool) -> dict[str, Any]:
    plane = [1, SIDE, SIDE]
    if driver == "zarr3":
        little = {"name": "bytes", "configuration": {"endian": "little"}}
        inside = {"chunk_shape": plane, "codecs": [little], "index_codecs": [little, {"name": "crc32c"}]}
        codecs = [{"name": "sharding_indexed", "configuration": inside}] if sharded else [little]
        chunks = {"name": "regular", "configuration": {"chunk_shape": [CHUNKS, SIDE, SIDE] if sharded else plane}}
        shape = [CHUNKS, SIDE, SIDE]
        return {"metadata": {"shape": shape, "data_type": "uint32", "chunk_grid": chunks, "codecs": codecs}}
    one_shard = {"@type": "neuroglancer_uint64_sharded_v1", "hash": "identity"}
    one_shard |= {"preshift_bits": 0, "minishard_bits": 0, "shard_bits": 0}
    scale = {"size": [SIDE, SIDE, CHUNKS], "chunk_size": [SIDE, SIDE, 1], "encoding": "raw", "key": "1_1_1"}
    scale |= {"resolution": [1, 1, 1]} | ({"sharding": one_shard} if sharded else {})
    return {"multiscale_metadata": {"type": "image", "data_type": "uint32", "num_channels": 1}, "scale_metadata": scale}


def planes(array: Any, driver: str) -> Any:
    return array if driver == "zarr3" else array[..., 0].T


def create(program: str, path: Path, *, sharded: bool) -> None:
    """An array whose chunks have the tokens of round 1; z5py needs a group around it."""
    shutil.rmtree(path.parent, ignore_errors=True)
    path.parent.mkdir(parents=True)
    (path.parent / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    wanted = spec(program, path)
    array = ts.open({**wanted, **schema(wanted["driver"], sharded=sharded)}, create=True).result()
    tokens = np.arange(CHUNKS, 2 * CHUNKS, dtype=DTYPE).reshape(-1, 1, 1)
    planes(array, wanted["driver"]).write(np.broadcast_to(tokens, (CHUNKS, SIDE, SIDE))).result()


def tokens_in(program: str, path: Path) -> dict[int, int | str | None]:
    """The token of each chunk: None if it is absent, `mixed` or the name of an error if it has none."""
    wanted = spec(program, path)
    try:
        array = planes(ts.open(wanted).result(), wanted["driver"])
    except Exception as error:  # noqa: BLE001 - whatever the library raises
        return dict.fromkeys(ALL, type(error).__name__)
    tokens: dict[int, int | str | None] = {}
    for number in ALL:
        try:
            token = token_of(np.asarray(array[number : number + 1].read().result()))
            tokens[number] = "mixed" if token is None else token or None
        except Exception as error:  # noqa: BLE001 - whatever the library raises
            tokens[number] = type(error).__name__
    return tokens


class Place:
    """Where a program writes: an array in a directory of its own, perhaps on a mount."""

    def __init__(self, program: str, place: str, top: Path) -> None:
        self.program, self.place, self.top = program, place, top
        self.source = top / "source/array"
        self.log = (top / "umount.log").open("a")
        self.path = top / "mnt/array" if place == "shardfs" else self.source

    @contextmanager
    def ready(self, counts: Counter[str]) -> Iterator[None]:
        """The array is there within the block, and natively complete behind it, unless `counts` says otherwise."""
        create(self.program, self.source, sharded=self.place != "files")
        if self.place != "shardfs":
            yield
            return
        mountpoint = self.path.parent
        mountpoint.mkdir(exist_ok=True)
        options = ["--rw", "-o", f"journal={self.top}/journals"]
        subprocess.run([*SHARDFS, "mount", *options, str(self.source.parent), str(mountpoint)], check=True, cwd=ROOT)
        try:
            yield
        finally:
            begin = time.monotonic()
            umount = [*SHARDFS, "umount", str(mountpoint)]
            status = subprocess.run(umount, check=False, cwd=ROOT, stderr=self.log).returncode
            counts[f"umount exits with {status}"] += status != 0
            counts["umount milliseconds"] += round(1000 * (time.monotonic() - begin))

    def left_behind(self) -> list[str]:
        """Files that are neither a document nor a chunk nor a shard."""
        names = (p.name for p in self.source.rglob("*") if p.is_file())
        documents = {"zarr.json", "info", "provenance", "0.shard"}
        return sorted(n for n in names if n not in documents and not n.isdigit() and not n.startswith(f"0-{SIDE}_"))


# ---- processes


class Server:
    """scripts/shard_writer.py, which forks a process for each command."""

    def __init__(self, program: str, scratch: Path) -> None:
        self._scratch, self._count = scratch, 0
        command = [CV_PYTHON if program == "CloudVolume" else PYTHON, str(ROOT / "scripts/shard_writer.py"), program]
        self._errors = (scratch / "errors").open("w")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, cwd=scratch
        )
        if self._line() != "ready":
            raise RuntimeError((scratch / "errors").read_text().strip().splitlines()[-1])

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def start(self, do: str, path: Path, *arguments: Any) -> Worker:
        assert self.process.stdin is not None
        self._count += 1
        log = self._scratch / f"log{self._count}"
        command = {"do": do, "path": str(path), "arguments": arguments, "log": str(log)}
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return Worker(int(self._line()), log)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.kill()
        self.process.wait(10)
        self._errors.close()


class Worker:
    """One forked process, and its log."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid, self._log = pid, log

    def lines(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []

    def wait(self, seconds: float) -> str:
        """The last line of the log, or `hangs`."""
        stop = time.monotonic() + seconds
        while time.monotonic() < stop:
            lines = self.lines()
            if lines and lines[-1].startswith(("end", "error")):
                return lines[-1]
            time.sleep(0.01)
        self.kill()
        return "hangs"

    def wait_for_ack(self, seconds: float) -> str:
        """The first line that says `ack`, or how the process ended before; `hangs` if neither came."""
        stop = time.monotonic() + seconds
        while time.monotonic() < stop:
            for line in self.lines():
                if line.startswith(("ack", "error")):
                    return line
            time.sleep(0.002)
        return "hangs"

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        while Path(f"/proc/{self.pid}").exists():
            time.sleep(0.001)


# ---- scenarios


def judge(program: str, path: Path, lines: list[str], counts: Counter[str]) -> None:
    """Count the chunks that are lost, mixed or not readable. `lines` are those of all logs since the array was new."""
    tokens = tokens_in(program, path)
    history = History(dict(zip(ALL, range(CHUNKS, 2 * CHUNKS), strict=True)), CHUNKS).read(lines)
    for number, token in tokens.items():
        counts["chunks"] += 1
        if isinstance(token, str):
            counts["mixed" if token == "mixed" else "unreadable"] += 1
        elif token not in history.allowed(number, "closed"):
            counts["lost"] += 1


def parallel(server: Server, place: Place, seconds: float) -> Counter[str]:
    """Four processes at once, each array once; until `seconds` have passed or ten arrays are written."""
    counts, stop = Counter[str](), time.monotonic() + seconds
    while counts["runs"] < 10 and time.monotonic() < stop:
        counts["runs"] += 1
        with place.ready(counts):
            begin = time.monotonic()
            workers = [server.start("write", place.path, ALL[n::WRITERS], 2, 1) for n in range(WRITERS)]
            ends = [worker.wait(3 * PATIENCE) for worker in workers]
            counts["milliseconds"] += round(1000 * (time.monotonic() - begin))
            counts.update(f"writer: {end}" for end in ends if end != "end")
        judge(place.program, place.source, [line for worker in workers for line in worker.lines()], counts)
        counts.update(f"left: {name.rpartition('.')[2]}" for name in place.left_behind())
    return counts


def kill(server: Server, place: Place, seconds: float) -> Counter[str]:
    """Kills until `seconds` have passed, 30 at most. An array with a fault is replaced by a new one."""
    counts, chance, stop = Counter[str](), random.Random(place.program), time.monotonic() + seconds
    while counts["kills"] < 30 and time.monotonic() < stop:
        lines: list[str] = []
        with place.ready(counts):
            faults, round_ = 0, 2
            while not faults and counts["kills"] < 30 and time.monotonic() < stop:
                order = chance.sample(ALL, CHUNKS)
                worker = server.start("write", place.path, order, round_, 1000)
                round_ += 1000
                first = worker.wait_for_ack(PATIENCE)
                time.sleep(chance.uniform(0, 0.1))
                worker.kill()
                if not first.startswith("ack"):
                    counts[f"next writer: {first}"] += 1
                    break
                counts["kills"] += 1
                lines += worker.lines()
                probe = Counter[str]()
                judge(place.program, place.path, lines, probe)
                faults = probe["lost"] + probe["mixed"] + probe["unreadable"]
                counts["kills with a fault"] += faults > 0
                counts += probe
        if place.place == "shardfs":
            after = Counter[str]()
            judge(place.program, place.source, lines, after)
            counts.update({f"at last {kind}": n for kind, n in after.items() if kind != "chunks"})
        counts.update(f"left: {name.rpartition('.')[2]}" for name in place.left_behind())
    return counts


def reader(server: Server, place: Place, seconds: float) -> Counter[str]:
    """One writer of all chunks, and a reader of chunks at random."""
    counts = Counter[str]()
    with place.ready(counts):
        writer = server.start("write", place.path, ALL, 2, 10**6)
        first = writer.wait_for_ack(PATIENCE)
        if not first.startswith("ack"):
            counts[f"writer: {first}"] += 1
        else:
            beside = server.start("read", place.path, seconds, 1)
            if (end := beside.wait(seconds + 3 * PATIENCE)) == "end":
                counts.update(json.loads(beside.lines()[-2]))
            else:
                counts[f"reader: {end}"] += 1
            counts["writes"] = sum(line.startswith("ack") for line in writer.lines())
        writer.kill()
    return counts


def append(server: Server, place: Place, seconds: float) -> Counter[str]:
    """A stream of planes is killed, ten times; the planes that were appended, and those of them that are there."""
    counts, chance = Counter[str](), random.Random(place.program)
    for _ in range(10):
        shutil.rmtree(place.source.parent, ignore_errors=True)
        place.source.parent.mkdir(parents=True)
        worker = server.start("write", place.source, ALL, 1, 1)
        worker.wait_for_ack(PATIENCE)
        time.sleep(chance.uniform(0.05, 0.3))
        worker.kill()
        counts["kills"] += 1
        counts["planes"] += sum(line.startswith("ack") for line in worker.lines())
        tokens = tokens_in(place.program, place.source)
        counts["readable"] += sum(token == CHUNKS + number for number, token in tokens.items())
    return counts


SCENARIOS = {"parallel": (parallel, 20.0), "kill": (kill, 25.0), "reader": (reader, 8.0)}


def run(programs: list[str], places: list[str], scenarios: list[str], out: Path) -> None:
    """Each program, place and scenario; `out` gets one line of JSON for each."""
    for program in programs:
        with tempfile.TemporaryDirectory(prefix="writers-") as directory:
            top = Path(directory)
            try:
                server = Server(program, top)
            except RuntimeError as error:
                print(f"{program}: {error}", flush=True)
                continue
            appends = program == "acquire-zarr"
            pairs = [("native", "kill")] if appends else list(itertools.product(places, scenarios))
            try:
                for place, scenario in pairs:
                    scene, seconds = (append, 0.0) if appends else SCENARIOS[scenario]
                    here = top / place / scenario
                    here.mkdir(parents=True)
                    counts = scene(server, Place(program, place, here), seconds)
                    entry = {"program": program, "place": place, "scenario": scenario, "counts": dict(+counts)}
                    print(json.dumps(entry), flush=True)
                    with out.open("a") as file:
                        file.write(json.dumps(entry) + "\n")
            finally:
                server.end()


# ---- the tables


def tables(lines: list[str]) -> str:
    """A table for each scenario: a row for each program, a column for each place."""
    counts: dict[tuple[str, str, str], Counter[str]] = {}
    for entry in map(json.loads, lines):
        counts[entry["scenario"], entry["program"], entry["place"]] = Counter(entry["counts"])
    text = []
    for scenario, cell in {"parallel": parallel_cell, "kill": kill_cell, "reader": reader_cell}.items():
        text += ["", f"| {scenario} | shards | plain files | shards through shardfs |", "|---|---|---|---|"]
        for program in dict.fromkeys(program for name, program, _ in counts if name == scenario):
            here = (counts.get((scenario, program, place)) for place in PLACES)
            text.append(f"| {' | '.join([program, *('-' if c is None else cell(c) for c in here)])} |")
    return "\n".join(text)


def parallel_cell(counts: Counter[str]) -> str:
    bad = sum(counts[kind] for kind in ("lost", "mixed", "unreadable"))
    failed = sum(n for kind, n in counts.items() if kind.startswith("writer: "))
    errors = f", {failed} of {WRITERS * counts['runs']} writers raised an error" if failed else ""
    return f"{bad} of {counts['chunks']}{errors}"


def kill_cell(counts: Counter[str]) -> str:
    if "planes" in counts:
        return f"{counts['planes'] - counts['readable']} of {counts['planes']} planes lost"
    blocked = sum(n for kind, n in counts.items() if kind.startswith("next writer: "))
    left = "".join(f", leaves `*.{kind[6:]}`" for kind in counts if kind.startswith("left: "))
    hangs = f", hung writers after it: {blocked}" if blocked else ""
    return f"{counts['kills with a fault']} of {counts['kills']}{hangs}{left}"


def reader_cell(counts: Counter[str]) -> str:
    kinds = ("error ", "mixed", "absent", "of another", "older")
    return f"{sum(n for kind, n in counts.items() if kind.startswith(kinds))} of {counts['reads']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"of {', '.join(PROGRAMS)}")
    parser.add_argument("--place", action="append", choices=PLACES)
    parser.add_argument("--scenario", action="append", choices=SCENARIOS)
    parser.add_argument("--out", type=Path, default=Path("writers.jsonl"), help="where each count is appended")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the counts in a file")
    args = parser.parse_args()
    if args.table:
        print(tables(args.table.read_text().splitlines()))
        return
    run(args.programs or list(PROGRAMS), args.place or list(PLACES), args.scenario or list(SCENARIOS), args.out)


if __name__ == "__main__":
    main()
