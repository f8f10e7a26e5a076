"""Programs that test file systems: fio, which finds again what it wrote (T14), and stress-ng (T15)."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests.conftest import daemon_pid
from tests.mount.programs import attempt, run
from tests.write.mounts import client, succeeded, writable
from tests.write.oracle import Oracle
from tests.write.scale import times
from tests.write.targets import TARGETS

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.fuse, pytest.mark.interop, pytest.mark.slow, pytest.mark.timeout(300 + 60 * times())]

TARGET = TARGETS["zarr_end"]
JOBS = 4


def needed(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"no {program}")


def fio(directory: Path, engine: str, *options: str) -> None:
    """Each job has files of its own, which are chunks. What it wrote is read again and compared."""
    command = ["fio", "--thread=0", "--fallocate=none", "--bs=4k,4k", "--bsrange=4k-64k", "--rw=randwrite"]
    command += ["--verify=crc32c", "--verify_fatal=1", f"--ioengine={engine}", f"--size={times()}M", "--minimal"]
    per_job = len(TARGET.chunks) // JOBS
    for job in range(JOBS):
        files = [str(directory / TARGET.path(number)) for number in range(job * per_job, (job + 1) * per_job)]
        command += [f"--name=job{job}", f"--filename={':'.join(files)}"]
    completed = attempt(*command[:10], *options, *command[10:], timeout=60 + 60 * times(), cwd=directory.parent.parent)
    assert completed.returncode == 0, completed.stdout[-2000:] + completed.stderr[-2000:]


@pytest.mark.parametrize("engine", ["psync", "mmap"])
def test_fio_finds_what_it_wrote(engine: str, tmp_path: Path) -> None:
    needed("fio")
    (tmp_path / "store").mkdir()
    TARGET.create(tmp_path / "store")
    with writable(tmp_path / "store", tmp_path, "-o", "idle=0.2,age=1") as mount:
        mount.mount()
        for row in range(4):
            (mount.path / f"c/{row}").mkdir(parents=True, exist_ok=True)
        fio(mount.path, engine)
        completed = mount.umount()
        assert completed.returncode == 0, completed.stderr
        mount.mount()
        fio(mount.path, engine, "--verify_only")
        assert mount.umount().returncode == 0


def test_stress_beside_chunks_that_are_written(tmp_path: Path) -> None:
    needed("stress-ng")
    store, log = tmp_path / "store", tmp_path / "log"
    (store / "array").mkdir(parents=True)
    (store / "notes").mkdir()
    TARGET.create(store / "array")
    with writable(store, tmp_path, "-o", "idle=0.2,age=1") as mount, Oracle() as oracle:
        mount.mount()
        seconds = 3 * times()
        stressors = ["hdd", "rename", "dentry", "dir", "flock", "mmap", "utime"]
        words = [word for name in stressors for word in (f"--{name}", "1")]
        bounds = ["--hdd-bytes", "4m", "--mmap-bytes", "1m", "--cpu", "1", "--vm", "1", "--vm-bytes", "32m"]
        with client("write_tokens", "direct", mount.path / "array", TARGET.name, log, 0, 1, 10 * times()) as writer:
            run(
                "stress-ng", *words, *bounds, "--temp-path", mount.path / "notes", "--timeout", f"{seconds}s", "-q",
                timeout=60 + 10 * seconds,
            )  # fmt: skip
            succeeded([writer], 60 + 10 * seconds)
        assert daemon_pid(mount.path) == mount.pid
        completed = mount.umount()
        assert completed.returncode == 0, completed.stderr
        assert oracle.wrong(TARGET, store / "array", log, {}, "closed", list(TARGET.readers)) == []
        assert list((store / "notes").iterdir()) == []
