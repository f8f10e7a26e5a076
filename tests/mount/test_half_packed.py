"""Mounts of a source during a job in place: each state, and a job that goes on under the mount."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tensorstore as ts
import zarr

from shardfs.storage.pack_state import SHARDED, STATE
from tests.conftest import MOUNT_SECONDS, MountFailed, _run, mount_entry, read_with
from tests.datasets import ROOT, ramp, same
from tests.jobs.packing import pack_in_place, unpack_in_place
from tests.mount.programs import shardfs
from tests.vfs.half_packed import DOCUMENTS, Job, files, shown
from tests.vfs.test_half_packed import job as job
from tests.vfs.test_half_packed import write_zarr
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conftest import Mounted
    from tests.datasets import Dataset

pytestmark = pytest.mark.fuse

SOON = ("-o", "index_ttl=0.05")
"""Lets neither the kernel nor the daemon keep for long what they know."""


def write(tree: dict[str, bytes], to: Path) -> Path:
    for name, data in tree.items():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_bytes(data)
    return to


@contextmanager
def compared(mount: Path, expected: Path, tmp_path: Path) -> Iterator[None]:
    """Compare the trees again and again."""
    stop = tmp_path / "stop"
    command = [sys.executable, "-m", "tests.clients.compare_trees", *map(str, (mount, expected, stop))]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as client:
        try:
            yield
        finally:
            stop.touch()
            out, problem = client.communicate(timeout=100)
    assert client.returncode == 0, problem
    assert json.loads(out) >= 2


@pytest.mark.parametrize("direction", ["packing", "unpacking"])
def test_a_mount_shows_the_same_files_in_every_state(direction: str, job: Job, mounted: Mounted) -> None:
    wanted, states = shown(job.sharded), getattr(job, direction)()
    next(states)
    with mounted(job.root, *SOON) as mount:
        for state in states:
            if direction == "unpacking" and state.endswith("is back"):
                break
            assert files(mount) == wanted, state
        list(states)
        found = files(mount)
        assert {n: d for n, d in found.items() if Path(n).name not in DOCUMENTS} == {
            n: d for n, d in wanted.items() if Path(n).name not in DOCUMENTS
        }


STATES = ["begun", "made", "half of the files", "at its place", "back"]


@pytest.mark.interop
@pytest.mark.parametrize("at", STATES)
def test_other_libraries_read_the_whole_array(
    at: str, dataset: Callable[[str, str], Dataset], mounted: Mounted, tmp_path: Path
) -> None:
    root = tmp_path / "zarr3"
    root.mkdir()
    zarrs = Job.of(write_zarr(root / "plain", 3), root, chunks_per_shard=(2, 2))
    given = dataset("precomputed", "index_raw_data_raw")
    volume = Job.of(given.twin, tmp_path / "precomputed", chunks_per_shard=(2, 2, 1))
    for half in (zarrs, volume):
        next(islice((state for state in half.packing() if at in state), int(at not in ("begun", "back")), None))
    data = np.asarray(zarr.open_group(zarrs.plain, mode="r")["flat"])
    with mounted(zarrs.root) as mount:
        for name in ("flat", "nested"):
            assert same(np.asarray(zarr.open_group(mount, mode="r")[name]), data)
            spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{mount / name}/"}}
            assert same(np.asarray(ts.open(spec).result().read().result()), data)
    with mounted(zarrs.root, "--layout", "n5") as mount:
        spec = {"driver": "n5", "kvstore": {"driver": "file", "path": f"{mount / 'flat'}/"}}
        assert same(np.asarray(ts.open(spec).result().read().result()).T, data)
    with mounted(volume.root) as mount:
        assert same(read_with("tensorstore", given, mount), given.array)


# ---- with a real job


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Two arrays with 256 chunks each, of which one is missing."""
    group = zarr.open_group(tmp_path / "plain", mode="w", zarr_format=3)
    keys: Any = {"nested": {"name": "default"}, "flat": {"name": "v2", "separator": "."}}
    for name, encoding in keys.items():
        array = group.create_array(name, shape=(64, 64), chunks=(4, 4), dtype="<u2", chunk_key_encoding=encoding)
        array[:] = ramp((64, 64))
        array[:4, :4] = 0
    return shutil.copytree(tmp_path / "plain", tmp_path / "source")


def start(root: Path, tmp_path: Path, command: str = "pack") -> Path:
    """Pack or unpack some shards of 4 chunks. Returns what a mount should show."""
    chunks = {name: data for name, data in files(root).items() if Path(name).name not in DOCUMENTS}
    if command == "unpack":
        list(pack_in_place(str(root), chunks_per_shard=(2, 2)))
        reports: Any = unpack_in_place(str(root))
    else:
        reports = pack_in_place(str(root), chunks_per_shard=(2, 2))
    next(islice(reports, 9, None))
    reports.close()
    wanted = shown(root)
    assert {name: data for name, data in wanted.items() if Path(name).name not in DOCUMENTS} == chunks
    return write(wanted, tmp_path / "wanted")


@pytest.mark.parametrize("options", [(), SOON], ids=["cached", "anew"])
@pytest.mark.parametrize("command", ["pack", "pack --abort", "unpack", "unpack --abort"])
def test_the_job_goes_on_under_a_mount(
    command: str, options: tuple[str, ...], large: Path, mounted: Mounted, tmp_path: Path
) -> None:
    verb, *abort = command.split()
    before, wanted = files(large), start(large, tmp_path, verb)
    with mounted(large, *options) as mount, compared(mount, wanted, tmp_path):
        done = shardfs(verb, "--in-place", large, *abort)
        assert done.returncode == 0, done.stderr
    after = files(large)
    assert (set(after) == set(before)) == (command in ("pack --abort", "unpack"))


def test_a_job_is_killed_and_turned_round_under_a_mount(large: Path, mounted: Mounted, tmp_path: Path) -> None:
    wanted = start(large, tmp_path)

    def finished() -> int:
        return sum(path.name not in DOCUMENTS for path in (large / SHARDED).rglob("*") if path.is_file())

    with mounted(large, *SOON) as mount, compared(mount, wanted, tmp_path):
        for abort in (False, True, False, True):
            before, how = finished(), ["--abort"] if abort else []
            job = subprocess.Popen([sys.executable, "-m", "shardfs", "pack", "--in-place", large, *how], cwd=ROOT)
            wait_until(lambda n=before: abs(finished() - n) >= 3)  # type: ignore[misc]
            job.kill()
            job.wait()
        done = shardfs("pack", "--in-place", large)
        assert done.returncode == 0, done.stderr


def test_a_mount_beside_the_beginning_of_a_job_is_refused(large: Path, tmp_path: Path) -> None:
    """The job has looked for mounts after this one has opened the source, and before it is there."""
    program = f"""\
import sys
from shardfs.cli import run
from shardfs.daemon import mount
from shardfs.storage.pack_state import PACK, PackState, Stage
attach = mount._attach
def begun(*arguments):
    open({str(large / STATE)!r}, "wb").write(PackState(PACK, PACK, Stage.BEGUN, [], [], {{}}).raw())
    return attach(*arguments)
mount._attach = begun
sys.exit(run(sys.argv[1:]))
"""
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    command = [sys.executable, "-c", program, "mount", str(large), str(mountpoint), "--layout", "zarr2"]
    done = _run(command, MOUNT_SECONDS, cwd=ROOT)
    assert done.returncode == 4
    assert "shardfs pack --in-place begins here" in done.stderr
    assert mount_entry(mountpoint) is None


def test_a_writable_mount_is_refused(large: Path, mounted: Mounted, tmp_path: Path) -> None:
    start(large, tmp_path)
    with pytest.raises(MountFailed, match="end it with shardfs pack --in-place"), mounted(large, "--rw"):
        pass
