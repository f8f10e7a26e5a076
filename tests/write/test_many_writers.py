"""Through a mount: many writers of one shard (T6), a daemon that is killed (T8), readers beside it (T22).

`SHARDFS_TORTURE=N` does N times as much.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from contextlib import ExitStack
from itertools import count
from typing import TYPE_CHECKING

import pytest

from tests.conftest import client_python
from tests.waiting import wait_until
from tests.write.mounts import WritableMount, client, succeeded, writable
from tests.write.oracle import Oracle
from tests.write.scale import times
from tests.write.targets import LAYOUTS, TARGETS, Target

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.fuse, pytest.mark.interop, pytest.mark.slow]


def made(target: Target, root: Path, tokens: dict[int, int]) -> Path:
    """The array, natively; z5py wants a group around it."""
    root.mkdir(parents=True)
    (root / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    array = root / "array"
    array.mkdir()
    target.create(array)
    if tokens:
        target.fill(array, target.array(tokens))
    return array


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    with Oracle() as found:
        yield found


# ------------------------------------------------------------------------------------------------------------ T6


@pytest.mark.timeout(300 + 60 * times())
@pytest.mark.parametrize("tool", ["zarr", "tensorstore", "z5"])
def test_no_chunk_is_lost_between_writers_of_one_shard(tool: str, tmp_path: Path, oracle: Oracle) -> None:
    target = TARGETS["zarr_one_shard"]
    quick = {"zarr": (2,), "tensorstore": (4,), "z5": (8,)}[tool]
    for turn, writers in enumerate(quick if times() == 1 else (2, 4, 8) * times()):
        top = tmp_path / str(turn)
        array, log = made(target, top / "store", {}), top / "log"
        with writable(top / "store", top, "-o", "idle=0.05") as mount, ExitStack() as stack:
            mount.mount()
            arguments = (tool, mount.path / "array", target.name, log)
            processes = [
                stack.enter_context(client("write_tokens", *arguments, writer, writers, 2)) for writer in range(writers)
            ]
            succeeded(processes, 200)
            completed = mount.umount()
            assert completed.returncode == 0, completed.stderr
        assert oracle.wrong(target, array, log, {}, "closed", list(target.readers)) == []
        file_names = sorted(str(p.relative_to(array)) for p in array.rglob("*") if p.is_file())
        assert file_names == ["c/0/0", "zarr.json"]


@pytest.mark.timeout(360)
def test_no_chunk_is_lost_between_tools_that_write_one_shard_through_a_layout(tmp_path: Path, oracle: Oracle) -> None:
    """Neighbours are chunks of different tools."""
    target = LAYOUTS["one_shard_as_zarr2"]
    array, log, tools = made(target, tmp_path / "store", {}), tmp_path / "log", ("zarr", "tensorstore", "direct")
    with writable(tmp_path / "store", tmp_path, "-o", "idle=0.05,layout=zarr2") as mount, ExitStack() as stack:
        mount.mount()
        arguments = (mount.path / "array", target.name, log)
        succeeded(
            [stack.enter_context(client("write_tokens", t, *arguments, i, len(tools), 2)) for i, t in enumerate(tools)],
            200,
        )
        completed = mount.umount()
        assert completed.returncode == 0, completed.stderr
    assert oracle.wrong(target, array, log, {}, "closed", list(target.readers)) == []


# ------------------------------------------------------------------------------------------------------------ T8


@pytest.mark.timeout(300 + 200 * times())
@pytest.mark.parametrize("name", ["zarr_end", "precomputed_gzip"])
def test_what_close_acknowledged_survives_the_death_of_the_daemon(name: str, tmp_path: Path, oracle: Oracle) -> None:
    target, chance = TARGETS[name], random.Random(name)
    tokens = {number: 100 + number for number in range(0, len(target.chunks), 2)}
    array, log = made(target, tmp_path / "store", tokens), tmp_path / "log"
    log.touch()
    with (
        writable(tmp_path / "store", tmp_path, "-o", "idle=0.01,age=0.1") as mount,
        client("hammer", mount.path / "array", name, log, 4) as hammer,
    ):
        for cycle in count():
            if cycle >= 3 * times() and acknowledged(log) > 30:  # a slow machine needs longer for so many
                break
            mount.mount()
            errors = _hammered(hammer, mount, chance.uniform(0.02, 0.4))
            assert not set(errors) - {"ENOTCONN", "ECONNABORTED", "EIO"}, errors
            mount.clear()
            assert oracle.wrong(target, array, log, tokens, None) == [], f"natively, after kill {cycle}"
            if cycle % 3 == 1:
                mount.mount()
                completed = mount.umount()
                assert completed.returncode == 0, completed.stderr
                assert oracle.wrong(target, array, log, tokens, "closed") == [], f"after kill {cycle}"
        mount.mount()
        assert mount.umount().returncode == 0
    assert oracle.wrong(target, array, log, tokens, "closed", [r for r in target.readers if r != "cloudvolume"]) == []
    assert not [p for p in array.rglob("*") if ".tmp" in p.name]


def acknowledged(log: Path) -> int:
    return sum(line.startswith("ack") for line in log.read_text().splitlines())


def _hammered(hammer: subprocess.Popen[str], mount: WritableMount, seconds: float) -> dict[str, int]:
    """Writers at work until the daemon is killed; the errors that ended them."""
    assert hammer.stdin is not None
    assert hammer.stdout is not None
    hammer.stdin.write("go\n")
    hammer.stdin.flush()
    time.sleep(seconds)
    mount.kill()
    watchdog = threading.Timer(20, mount.clear)
    watchdog.start()
    try:
        errors: dict[str, int] = json.loads(hammer.stdout.readline())
    finally:
        watchdog.cancel()
    return errors


# ----------------------------------------------------------------------------------------------------------- T22


@pytest.mark.timeout(300 + 30 * times())
@pytest.mark.parametrize(
    ("name", "tools", "inplace"),
    [
        pytest.param("zarr_end", ["zarr", "zarr3"], "never", marks=pytest.mark.torture),
        ("zarr_start", ["zarr", "zarr3"], "never"),
        ("precomputed", ["neuroglancer_precomputed", "cloudvolume"], "never"),
        ("precomputed", ["neuroglancer_precomputed", "cloudvolume"], "uint64"),
        pytest.param("zarr_end", ["z5"], "never", marks=pytest.mark.torture),
        pytest.param("zarr_nested", ["zarr", "zarr3"], "never", marks=pytest.mark.torture),
        pytest.param(
            "precomputed_gzip", ["neuroglancer_precomputed", "cloudvolume"], "never", marks=pytest.mark.torture
        ),
        pytest.param(
            "precomputed_gzip", ["neuroglancer_precomputed", "cloudvolume"], "uint64", marks=pytest.mark.torture
        ),
    ],
)
def test_native_readers_see_whole_versions_during_publishes(
    name: str, tools: list[str], inplace: str, tmp_path: Path, oracle: Oracle
) -> None:
    target = TARGETS[name]
    tokens = {number: 100 + number for number in range(len(target.chunks))}
    array, log = made(target, tmp_path / "store", tokens), tmp_path / "log"
    before = {path: path.stat().st_ino for path in array.rglob("*.shard")}
    seconds = 1 if times() == 1 else 3 * times()
    options = f"idle=0,age=0.01,inplace={inplace}"
    with writable(tmp_path / "store", tmp_path, "-o", options) as mount, ExitStack() as stack:
        mount.mount()
        writer = stack.enter_context(client("write_tokens", "direct", mount.path / "array", name, log, 0, 1, 10**6))
        wait_until(lambda: log.exists() and acknowledged(log), 60)
        grid, chunk = json.dumps(target.grid), json.dumps(target.chunk)
        readers = [
            stack.enter_context(
                client(
                    "read_tokens",
                    tool,
                    array,
                    grid,
                    chunk,
                    seconds,
                    seed,
                    python=client_python("cv") if tool == "cloudvolume" else sys.executable,
                )
            )
            for seed, tool in enumerate(tools)
        ]
        reports = succeeded(readers, seconds + 200)
        assert writer.poll() is None, writer.communicate()[1]
        wait_until(lambda: acknowledged(log) > 10, 60)
        writer.terminate()  # not in the middle of a chunk, which would be left empty, and never be published
        assert writer.wait(60) == 0
        assert mount.umount().returncode == 0
    assert [f["wrong"] for f in reports] == [[] for _ in reports]
    assert oracle.wrong(target, array, log, tokens, "closed") == []
    if inplace == "uint64":
        assert before == {path: path.stat().st_ino for path in array.rglob("*.shard")}


# ------------------------------------------------------------------------------------------------------------ T5


@pytest.mark.timeout(300 + 20 * times())
@pytest.mark.parametrize("lock", ["os", "lockfile"])
def test_compare_and_swap_counts_exactly(lock: str, tmp_path: Path) -> None:
    """tensorstore tells versions of a file by its inode number and time; four of its threads increment one number."""
    made(TARGETS["zarr_end"], tmp_path / "store", {})
    with writable(tmp_path / "store", tmp_path, "-o", "idle=0.01,age=0.1") as mount:
        mount.mount()
        with client("count_tensorstore", mount.path / "array/c/0", "0", 4, 25 * times(), lock) as counting:
            assert succeeded([counting], 60 + 20 * times()) == [100 * times()]
        assert mount.umount().returncode == 0
