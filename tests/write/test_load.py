"""T14, T15: what other people's load generators find on a writable mount."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.conftest import _run, need_fuse
from tests.datasets import ROOT
from tests.write.mounts import writable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.write.mounts import WritableMount

pytestmark = [pytest.mark.fuse, pytest.mark.interop, pytest.mark.torture, pytest.mark.timeout(600)]

FILES, SIZE, JOBS = 64, 1 << 20, 4
"""Chunks, bytes of each, and processes that share them."""

STRESS_S = int(os.environ.get("SHARDFS_STRESS_SECONDS", "60"))


def need(program: str) -> str:
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"no {program} (apt-get install {program})")
    return found


@pytest.fixture
def rw(tmp_path: Path) -> Iterator[WritableMount]:
    """An array of 64 chunks of 1 MiB, in 4 shards, all written; and a directory that is none of it."""
    zarr = pytest.importorskip("zarr")
    need_fuse()
    source = tmp_path / "source"
    array = zarr.create_array(
        source / "a", shape=(FILES * SIZE,), shards=(FILES // 4 * SIZE,), chunks=(SIZE,), dtype="u1", compressors=None
    )
    array[:] = np.ones(FILES * SIZE, "u1")
    (source / "plain").mkdir()
    with writable(source, tmp_path, "--idle", "0.5", "--age", "2") as mount:
        mount.mount()
        yield mount


def fio(directory: Path, engine: str, *arguments: str) -> None:
    """Each process has files of its own: two that write the same bytes would find those of the other."""
    command = [need("fio"), "--output-format=json", "--thread=0", f"--ioengine={engine}", f"--directory={directory}"]
    command += ["--verify=crc32c", "--verify_fatal=1", "--verify_dump=0", "--fallocate=none", "--create_serialize=0"]
    command += ["--overwrite=1", "--rw=randwrite", "--bs=64k", "--randrepeat=1", "--random_generator=tausworthe64"]
    command += arguments
    each = FILES // JOBS
    for job in range(JOBS):
        names = ":".join(str(number) for number in range(job * each, (job + 1) * each))
        command += [f"--name=job{job}", f"--filename={names}", f"--size={each * SIZE}", f"--randseed={job + 1}"]
    run = _run(command, 300, cwd=directory.parents[2])
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    jobs = json.loads(run.stdout[run.stdout.index("{") :])["jobs"]
    assert [job["error"] for job in jobs] == [0] * JOBS
    assert sum(job["read"]["io_bytes"] for job in jobs) == FILES * SIZE


@pytest.mark.parametrize("engine", ["psync", "mmap"])
def test_fio_reads_what_it_wrote(engine: str, rw: WritableMount) -> None:
    """While publishing goes on; again behind a flush and another mount; and the chunks are in their shards."""
    fio(rw.path / "a" / "c", engine, "--do_verify=1")
    assert rw.flush(timeout=120).returncode == 0
    assert rw.umount(120).returncode == 0
    rw.mount()
    fio(rw.path / "a" / "c", engine, "--verify_only")
    shown = b"".join((rw.path / "a" / "c" / str(number)).read_bytes() for number in range(FILES))
    assert rw.umount(120).returncode == 0
    zarr = pytest.importorskip("zarr")
    assert zarr.open_array(rw.source / "a", mode="r")[:].tobytes() == shown


STRESSORS = ("hdd", "rename", "dentry", "dir", "flock", "mmap", "utime")  # dentry unlinks

WRITER = """
import os, sys, time
top, end, rounds = sys.argv[1], time.monotonic() + float(sys.argv[2]), 0
while time.monotonic() < end:
    rounds += 1
    for number in range(16):
        data = bytes([rounds % 251 + 1]) * (1 << 20)
        with open(f"{top}/{number}", "r+b") as file:
            file.write(data)
            os.fsync(file.fileno())
        with open(f"{top}/{number}", "rb") as file:
            assert file.read() == data, (rounds, number)
print(rounds)
"""


def test_stress_ng_beside_chunks(rw: WritableMount) -> None:
    """Files that are passed through, under all that stress-ng does to them, while chunks are written and published."""
    stress = [need("stress-ng"), "--temp-path", str(rw.path / "plain"), "--timeout", f"{STRESS_S}s", "--metrics-brief"]
    for stressor in STRESSORS:
        stress += [f"--{stressor}", "1"]
    stress += [
        "--hdd-bytes",
        "16m",
        "--mmap-file",
        "--mmap-bytes",
        "8m",
        "--cpu",
        "1",
        "--vm",
        "1",
        "--vm-bytes",
        "64m",
    ]
    writing = [sys.executable, "-c", WRITER, str(rw.path / "a" / "c"), str(STRESS_S)]
    with subprocess.Popen(writing, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as writer:
        try:
            run = _run(stress, STRESS_S + 120, cwd=rw.source.parent)
            said, errors = writer.communicate(timeout=250)
        finally:
            writer.kill()
    assert writer.returncode == 0, errors[-2000:]
    rounds = int(said)
    assert rounds > 0
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    os.kill(rw.pid, 0)
    assert rw.flush(timeout=120).returncode == 0
    assert rw.umount(120).returncode == 0
    found = pytest.importorskip("zarr").open_array(rw.source / "a", mode="r")[: 16 * SIZE]
    assert set(found.tolist()) == {rounds % 251 + 1}
    assert os.listdir(rw.source / "plain") == []
