"""The costs of `pack`, as counts of calls, requests and bytes; progress; and work on a Dask cluster."""

from __future__ import annotations

import gc
import json
import os
import pty
import random
import signal
import subprocess
import sys
import threading
import tracemalloc
import urllib.request
from collections import Counter
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from shardfs.cli import commands, printing
from shardfs.jobs import opened_files, pack_arrays
from shardfs.jobs.pack import PackRun
from shardfs.jobs.pack_job import PackJob
from shardfs.jobs.shared_work import JobSource
from shardfs.model.blobs import FilePart
from shardfs.model.changes import FIRST
from shardfs.storage import syscalls
from tests.jobs.dask_cluster import Cluster, cluster, started, wait_for_chunks
from tests.jobs.packing import pack
from tests.jobs.test_pack import files, problems
from tests.mount.distant import serving
from tests.waiting import read_terminal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardfs.model.blobs import Bytes

__all__ = ["cluster", "started"]  # fixtures


def plain(root: Path, rows: int, columns: int, size: int = 16) -> str:
    """An unsharded Zarr v3 array of `rows` directories with `columns` chunk files each."""
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [rows, columns * size],
        "data_type": "uint8",
        "fill_value": 0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, size]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": [{"name": "bytes"}],
        "attributes": {},
    }
    noise = random.Random(rows * columns).randbytes(size + columns)
    for row in range(rows):
        (root / "c" / str(row)).mkdir(parents=True)
        for column in range(columns):
            (root / "c" / str(row) / str(column)).write_bytes(noise[column : column + size])
    (root / "zarr.json").write_text(json.dumps(document))
    return str(root)


def job(source: str, target: Path, *per_shard: int) -> PackJob:
    return PackJob(JobSource.from_url(source), JobSource.from_url(str(target)), per_shard)


# ---- counts


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, *names: str) -> Iterator[Counter[str]]:
    """Count the calls of these functions of `os`, and all changes of the disk as `syscalls.NAME`."""
    counts = Counter[str]()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    def hook(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        counts[f"syscalls.{name}"] += 1
        return function(*args)

    gc.collect()  # files that earlier tests have left open are closed before
    with monkeypatch.context() as patch:
        for name in names:
            patch.setattr(os, name, counting(name, getattr(os, name)))
        patch.setattr(syscalls, "hook", hook)
        yield counts


READING = ("open", "fstat", "stat", "read", "pread", "preadv", "readlink", "close", "lseek")


@pytest.mark.parametrize(("by_kernel", "reading"), [(False, {"pread": 1}), (True, {"syscalls.copy_file_range": 1})])
def test_a_chunk_file_costs_four_system_calls(
    by_kernel: bool, reading: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_kernel:
        monkeypatch.setattr(opened_files, "COPIED_SIZE", 1)
    call_counts = []
    for columns in (10, 30):
        source = plain(tmp_path / f"source{columns}", 10, columns)
        with counted(monkeypatch, *READING) as counts:
            assert problems(pack(source, str(tmp_path / f"target{columns}"), chunks_per_shard=(10, 40))) == []
        call_counts.append(counts)
    assert call_counts[1] - call_counts[0] == Counter(
        {name: 200 * n for name, n in {"open": 1, "fstat": 1, "close": 1, **reading}.items()}
    )


def test_files_that_were_opened_in_vain_do_not_use_up_the_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of a remote disk that is opened ahead when the file before it cannot be read."""
    monkeypatch.setattr(opened_files, "COPIED_SIZE", 1)
    only = threading.Semaphore(1)
    monkeypatch.setattr(opened_files, "_descriptors", lambda: only)
    run = PackRun(job(plain(tmp_path / "source", 1, 4), tmp_path / "target", 1, 2))

    def content() -> Bytes:
        return opened_files.OpenedFile.from_key(run._opened, "c/0/0").content

    in_vain = opened_files.OpenedFile.from_key(run._opened, "c/0/0")
    assert isinstance(content(), bytes), "no descriptor is free, so the file is read"
    del in_vain
    assert isinstance(content(), FilePart)


def test_a_shard_and_its_note_cost_two_syncs_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync_counts = []
    for columns in (20, 60):
        source = plain(tmp_path / f"source{columns}", 1, columns)
        with counted(monkeypatch) as counts:
            list(pack(source, str(tmp_path / f"target{columns}"), chunks_per_shard=(1, 2)))
        sync_counts.append({name: n for name, n in counts.items() if "sync" in name})
    more = {name: n - sync_counts[0][name] for name, n in sync_counts[1].items()}
    assert more == {"syscalls.fsync": 40, "syscalls.fsync_directory": 40}


def test_a_large_file_of_a_remote_source_is_read_in_pieces(tmp_path: Path) -> None:
    """As a chunk, and as another file that is copied. Memory holds a few pieces, not the file."""
    pytest.importorskip("obstore")
    piece = FIRST.stop
    source = Path(plain(tmp_path / "source" / "a", 1, 2))
    for path, size in ((source / "c" / "0" / "0", 2 * piece + 1), (source / "notes", 6 * piece)):
        path.write_bytes(random.Random(size).randbytes(size))
    with serving(tmp_path / "source") as server:
        tracemalloc.start()
        list(pack(f"{server.url}/a", str(tmp_path / "target"), chunks_per_shard=(1, 2)))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        with urllib.request.urlopen(f"{server.url}/.requests") as answer:
            sent = [(r["path"], r["bytes"]) for r in json.load(answer) if r["method"] == "GET" and r["bytes"]]
    assert (tmp_path / "target" / "notes").read_bytes() == (source / "notes").read_bytes()
    assert [n for path, n in sent if path == "/a/notes"] == [piece] * 6
    assert peak < 4 * piece
    assert [n for path, n in sent if path == "/a/c/0/0"] == [piece, piece, 1]


def test_chunks_that_are_converted_are_in_memory_once(tmp_path: Path) -> None:
    """N5 blocks have a header before the data. The bytes of a chunk file are dropped when its block is made."""
    source = plain(tmp_path / "source", 1, 64, 128 << 10)
    tracemalloc.start()
    assert problems(pack(source, str(tmp_path / "target"), chunks_per_shard=(64, 1), format="n5")) == []
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 << 20


def test_a_chunk_of_a_remote_source_costs_one_request(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    plain(tmp_path / "source" / "a", 3, 40)
    (tmp_path / "source" / "a" / "c" / "0" / "0").write_bytes(b"")
    with serving(tmp_path / "source") as server:
        problem_list = problems(pack(f"{server.url}/a", str(tmp_path / "target"), chunks_per_shard=(2, 30)))
        requests = [r["path"] for r in server.requests()]
    assert [(p.path, p.damaged) for p in problem_list] == [("c/0/0", False)]
    assert len(requests) == len(set(requests)) == 119  # the empty file has no bytes
    list(pack(str(tmp_path / "source" / "a"), str(tmp_path / "local"), chunks_per_shard=(2, 30)))
    assert files(tmp_path / "target") == files(tmp_path / "local")


def test_memory_while_listing_is_eight_bytes_for_each_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_arrays, "BLOCK", 64)
    peaks: list[int] = []
    for columns in (100, 100, 600):  # the first run loads modules and fills caches
        source = plain(tmp_path / f"source{len(peaks)}", 10, columns)
        opened = job(source, tmp_path / "target", 10, 100).opened()
        tracemalloc.start()
        try:
            survey = opened.survey()
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert sum(len(chunks) for _, chunks in survey.plans[0]) == 10 * columns
    assert (peaks[2] - peaks[1]) / 5000 < 11, peaks


def test_memory_of_a_job_is_independent_of_the_number_of_shards(tmp_path: Path) -> None:
    peaks: list[int] = []
    for rows in (5, 5, 30):
        source = plain(tmp_path / f"source{len(peaks)}", rows, 200)
        work = PackRun(job(source, tmp_path / f"target{len(peaks)}", 1, 200))
        tracemalloc.start()
        try:
            assert sum(report.files for n, report in enumerate(work.run()) if n % 20 or gc.collect() >= 0) == rows * 200
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert (peaks[2] - peaks[1]) / 5000 < 8, peaks


def test_chunks_of_grids_beyond_64_bits_are_grouped_like_others(tmp_path: Path) -> None:
    document = json.loads(Path(plain(tmp_path / "a", 3, 5), "zarr.json").read_text())
    document["shape"] = [1 << 40, 5 << 20]
    document["chunk_grid"]["configuration"]["chunk_shape"] = [1, 16]
    (tmp_path / "a" / "zarr.json").write_text(json.dumps(document))
    (tmp_path / "a" / "c" / str((1 << 40) - 1)).mkdir()
    (tmp_path / "a" / "c" / str((1 << 40) - 1) / "7").write_bytes(b"the last one....")
    opened = job(str(tmp_path / "a"), tmp_path / "b", 2, 2).opened()
    (plan,) = opened.survey().plans
    names = [{plan.array.file(number) for number in chunks.tolist()} for _, chunks in plan]
    assert {frozenset(group) for group in names} == {
        frozenset({f"c/{y}/{x}" for y in range(top, min(top + 2, 3)) for x in range(left, min(left + 2, 5))})
        for top in (0, 2)
        for left in (0, 2, 4)
    } | {frozenset({f"c/{(1 << 40) - 1}/7"})}


# ---- sharing the work out


def test_the_same_shard_made_twice_at_the_same_time(tmp_path: Path) -> None:
    source = plain(tmp_path / "source", 8, 20)
    list(pack(source, str(tmp_path / "alone"), chunks_per_shard=(2, 10)))
    works = [PackRun(job(source, tmp_path / "target", 2, 10)) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        reports = list(threads.map(lambda work: list(work.run()), works))
    assert [problems(found) for found in reports] == [[], [], [], []]
    assert files(tmp_path / "target") == files(tmp_path / "alone")


class Cancelling(Executor):
    """Does two tasks, and then gives up, as an executor on a Dask cluster does without a scheduler."""

    submitted = 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.submitted += 1
        future: Future[Any] = Future()
        if self.submitted > 2:
            future.cancel()
            future.set_running_or_notify_cancel()
        else:
            future.set_result(fn(*args, **kwargs))
        return future


def test_an_executor_that_gives_up_ends_the_job(tmp_path: Path) -> None:
    source, target = plain(tmp_path / "source", 8, 4), tmp_path / "target"
    with pytest.raises(ConnectionAbortedError, match="given up all tasks") as error:
        list(pack(source, str(target), chunks_per_shard=(1, 4), executor=Cancelling()))
    assert isinstance(error.value.__cause__, CancelledError)
    assert not (target / "zarr.json").exists()
    assert problems(pack(source, str(target), chunks_per_shard=(1, 4))) == []
    list(pack(source, str(tmp_path / "alone"), chunks_per_shard=(1, 4)))
    assert files(target) == files(tmp_path / "alone")


@pytest.mark.interop
@pytest.mark.slow
def test_a_killed_worker_of_a_dask_cluster(
    cluster: Cluster, tmp_path: Path, started: Callable[..., subprocess.Popen[str]]
) -> None:
    source, target = plain(tmp_path / "source", 20, 100), tmp_path / "target"
    list(pack(source, str(tmp_path / "alone"), chunks_per_shard=(1, 10)))
    process = started("pack", source, str(target), "--chunks-per-shard", "1,10", "--dask", str(cluster.file))
    wait_for_chunks(process, target, 3)
    assert process.poll() is None, process.communicate()
    cluster.workers[0].send_signal(signal.SIGKILL)
    out, err = process.communicate(timeout=250)
    assert (process.returncode, out.split(" (")[0]) == (0, "2,000 files become 200"), err
    tree_files = {
        name: data for name, data in files(target).items() if not name.endswith(".tmp")
    }  # the killed worker's
    assert tree_files == files(tmp_path / "alone")


@pytest.mark.interop
@pytest.mark.slow
def test_a_lost_scheduler_of_a_dask_cluster(
    cluster: Cluster, tmp_path: Path, started: Callable[..., subprocess.Popen[str]]
) -> None:
    source, target = plain(tmp_path / "source", 20, 200), tmp_path / "target"
    list(pack(source, str(tmp_path / "alone"), chunks_per_shard=(1, 10)))
    command = ("pack", source, str(target), "--chunks-per-shard", "1,10")
    process = started(*command, "--dask", str(cluster.file), connect_s=10)
    wait_for_chunks(process, target, 3)
    assert process.poll() is None, process.communicate()
    cluster.scheduler.send_signal(signal.SIGKILL)
    out, err = process.communicate(timeout=250)
    assert (process.returncode, out) == (3, "")
    assert "shardfs: the executor has given up all tasks, as when the scheduler" in err
    assert not (target / "zarr.json").exists()
    again = started(*command)
    assert again.communicate(timeout=250)[0].startswith("4,000 files become 400")
    assert files(target) == files(tmp_path / "alone")


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "missing.json", "", "dead.json"])
def test_a_dask_address_at_which_no_scheduler_answers(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: Callable[..., subprocess.Popen[str]]
) -> None:
    pytest.importorskip("distributed")
    (tmp_path / "dead.json").write_text(json.dumps({"type": "Scheduler", "address": "tcp://127.0.0.1:9"}))
    monkeypatch.chdir(tmp_path)
    process = started("pack", plain(tmp_path / "source", 2, 2), "target", "--dask", address, connect_s=1)
    out, err = process.communicate(timeout=250)
    assert (process.returncode, out) == (3, "")
    assert "no Dask scheduler can be reached" in err
    assert not (tmp_path / "target").exists()


# ---- progress


def test_lines_of_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = plain(tmp_path / "source", 4, 4, 1024)
    command = ["pack", source, str(tmp_path / "target"), "--chunks-per-shard", "1,4"]
    monkeypatch.setattr(printing, "LINES_S", 0)
    completed = CliRunner().invoke(commands, command, standalone_mode=False)
    lines = completed.stderr.splitlines()
    assert [line.split(",")[0] for line in lines[-4:]] == [f"{n} of 16 files" for n in (4, 8, 12, 16)]
    assert "16 of 16 files, 16.0 KiB, " in lines[-1]
    assert lines[-1].endswith("/s, 0:00:00 left")
    monkeypatch.setattr(printing, "LINES_S", 60)
    command[2] = str(tmp_path / "second")
    assert CliRunner().invoke(commands, command, standalone_mode=False).stderr == ""


def test_a_bar_on_a_terminal(tmp_path: Path) -> None:
    source = plain(tmp_path / "source", 4, 4)
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "shardfs", "pack", source, str(tmp_path / "target")]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=env) as process:
        os.close(slave)
        screen = read_terminal(master)
        assert process.wait(60) == 0
    os.close(master)
    assert "━".encode() in screen
    assert b"16 of 16 files, 256 B, " in screen
    assert b"16 files become 1" in screen
