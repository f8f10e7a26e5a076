"""A mount of type `fuse.shardfs` may be of another user or another version: its status may be anything."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from shardfs.daemon.mount_status import MAX_STATUS, parse_status
from tests.conftest import _run, mount_entry, need_fuse, unmount
from tests.datasets import ROOT
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import Mounted
    from tests.datasets import Dataset

LATENCY = {"count": 1, "mean": 0.1, "median_below": None, "p99_below": 0.5}

SOUND: dict[str, Any] = {
    "pid": 1,
    "layout": "native",
    "started": 1.5,
    "cpu": 0.5,
    "threads": 1,
    "uptime": 2,
    "resident_bytes": 3,
    "bytes_served": 4,
    "waiting": 0,
    "postponed": 0,
    "requests": {"READ": 1},
    "errors": {"READ": {"EIO": 2}},
    "latencies": {"READ": LATENCY},
    "caches": {"index": {"hits": 1, "misses": 2, "bytes": 3, "limit": 4}},
    "store": None,
    "writing": None,
    "further": [1, 2],
}

CHANGES: list[tuple[str, Any]] = [
    ("pid", "1"),
    ("pid", True),
    ("layout", None),
    ("uptime", float("nan")),
    ("uptime", float("inf")),
    ("resident_bytes", 10**400),
    ("requests", []),
    ("requests", {"READ": "many"}),
    ("errors", {"READ": 1}),
    ("latencies", {"READ": {}}),
    ("caches", {"index": None}),
    ("store", {}),
    ("store", "s3"),
    ("writing", []),
    ("writing", {"journal": 1}),
]


def test_a_sound_status() -> None:
    assert parse_status(json.dumps(SOUND).encode()) == SOUND


@pytest.mark.parametrize(("member", "value"), CHANGES)
def test_members_of_another_form(member: str, value: Any) -> None:
    document = copy.deepcopy(SOUND)
    document[member] = value
    assert parse_status(json.dumps(document).encode()) is None


@pytest.mark.parametrize("member", ["pid", "layout", "uptime", "errors", "latencies", "caches", "store", "writing"])
def test_a_member_that_commands_need_is_missing(member: str) -> None:
    document = {name: value for name, value in SOUND.items() if name != member}
    assert parse_status(json.dumps(document).encode()) is None


@pytest.mark.parametrize(
    "raw", [b"", b"null", b"[]", b"1", b"{}", b"[" * 100_000, b'{"a":' * 100_000, b" " * (MAX_STATUS + 1), b"\xff\xfe"]
)
def test_anything_else(raw: bytes) -> None:
    assert parse_status(raw) is None


@pytest.mark.fuse
def test_the_status_of_a_mount_is_sound(dataset: Any, mounted: Mounted) -> None:
    source: Dataset = dataset("zarr3", "default")
    with mounted(source.path) as mount:
        assert parse_status((mount / ".shardfs/status.json").read_bytes()) is not None


@contextmanager
def foreign(tmp_path: Path, status: bytes) -> Iterator[Path]:
    """A mount of another program that says that it is one of shardfs."""
    mountpoint, file = tmp_path / "mnt\x1b[31m\x07", tmp_path / "status"
    mountpoint.mkdir()
    file.write_bytes(status)
    command = [sys.executable, "-m", "tests.daemon.foreign_mount", str(mountpoint), str(file), "evil\x1b[31m\x9b"]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        wait_until(lambda: mount_entry(mountpoint) is not None)
        yield mountpoint
    finally:
        if mount_entry(mountpoint) is not None:
            unmount(mountpoint)
        process.wait(10)


@pytest.mark.fuse
@pytest.mark.parametrize(
    "status",
    [
        b"[1]",
        b'{"writing": {"journal": 5}, "pid": 1}',
        b"[" * 100_000,
        json.dumps({**SOUND, "layout": "\x1b[31mred\nforged: all data is published"}).encode(),
        json.dumps({**SOUND, "pid": -1}).encode(),
        json.dumps({**SOUND, "pid": 1 << 31}).encode(),
    ],
)
def test_commands_with_a_foreign_mount(status: bytes, tmp_path: Path) -> None:
    """They end without a traceback, show no control characters, and unmount it."""
    need_fuse()
    with foreign(tmp_path, status) as mountpoint:
        for words in (
            ["status"],
            ["status", str(mountpoint)],
            ["doctor"],
            ["umount", "--patient", "--timeout", "2", str(mountpoint)],
        ):
            completed = _run([sys.executable, "-m", "shardfs", *words], 250, cwd=ROOT)
            said = completed.stdout + completed.stderr
            assert "Traceback" not in said, said
            assert not {"\x1b", "\x07", "\x9b", "\r"} & set(said), repr(said)
            assert "\nforged" not in said
        assert mount_entry(mountpoint) is None
