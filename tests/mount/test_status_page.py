"""`shardfs status --watch`, and the status page in a browser."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from shardfs.cli import status_watch
from shardfs.daemon import health
from shardfs.daemon.asking import Mount, MountState
from shardfs.daemon.health import MountsReport, MountView
from tests.mount.programs import shardfs
from tests.waiting import read_terminal, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import Mounted
    from tests.datasets import Dataset

    Get = Callable[[str, str], Dataset]

fuse = pytest.mark.fuse

HOSTILE = "<img src=x onerror=document.title='run'>"


@pytest.fixture
def source(dataset: Get) -> Path:
    return dataset("zarr3", "zarr_python").path


@pytest.fixture(scope="module")
def browser() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if (found := shutil.which(name)) is not None:
            return found
    pytest.skip("no chromium")


def address_of(mount: Path) -> str:
    found: str = json.loads((mount / ".shardfs/status.json").read_text())["metrics_addr"]
    return found


@fuse
def test_the_page_shows_mounts_and_their_problems(browser: str, source: Path, mounted: Mounted, tmp_path: Path) -> None:
    strange = tmp_path / HOSTILE.replace("/", "")
    shutil.copytree(source, strange)
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}"]
    with mounted(strange, "-o", "metrics_addr=127.0.0.1:0") as mount, mounted(source, "--rw") as other:
        (mount / "zarr.json").read_bytes()
        os.kill(json.loads((other / ".shardfs/status.json").read_text())["pid"], signal.SIGKILL)
        url = f"http://{address_of(mount)}/"
        wait_until(lambda: b'"dead"' in urllib.request.urlopen(url + "mounts.json", timeout=250).read())
        command = [browser, *flags, "--virtual-time-budget=5000", "--dump-dom", url]
        text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=250).stdout
        shardfs("umount", "--lazy", other)
    assert f"<h2>{mount}</h2>" in text
    assert "layout native" in text
    assert "problems: none" not in text
    assert f"shardfs umount --lazy {other}" in text
    assert "&lt;img src=x" in text
    assert "<title>shardfs</title>" in text


@fuse
def test_the_page_loads_nothing_from_elsewhere(source: Path, mounted: Mounted) -> None:
    with (
        mounted(source, "-o", "metrics_addr=127.0.0.1:0") as mount,
        urllib.request.urlopen(f"http://{address_of(mount)}/", timeout=250) as answer,
    ):
        text, policy = answer.read().decode(), answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert not re.search(r"https?:|\bsrc=|\bhref=|@import|url\(", text)


def test_the_mounts_are_asked_for_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def mount_views() -> list[MountView]:
        asked.append(now)
        return []

    monkeypatch.setattr(health, "mount_views", mount_views)
    now = 100.0
    monkeypatch.setattr("shardfs.daemon.health.time.monotonic", lambda: now)
    report = MountsReport()
    assert [report.as_json() for _ in range(5)] == [b"[]"] * 5
    assert len(asked) == 1
    now += 2
    report.as_json()
    assert len(asked) == 2


@fuse
def test_watching_in_a_terminal(source: Path, mounted: Mounted) -> None:
    with mounted(source) as mount:
        command = [sys.executable, "-m", "shardfs", "status", "--watch", str(mount)]
        main, terminal = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "400", "LINES": "40"}
        with subprocess.Popen(command, stdout=terminal, stderr=terminal, stdin=terminal, env=environment) as process:
            os.close(terminal)
            seen = b""
            while os.fsencode(mount.name) not in seen:
                seen += os.read(main, 1 << 16)
            process.send_signal(signal.SIGINT)
            read_terminal(main)  # a full terminal would stop the program
            assert process.wait(30) == 0
        os.close(main)
    assert b"requests" in seen


def test_watching_needs_a_terminal() -> None:
    done = shardfs("status", "--watch")
    assert (done.returncode, "terminal" in done.stderr) == (2, True), done.stderr
    assert shardfs("status", "--watch", "--json").returncode == 2


def snapshot(uptime: float, **members: Any) -> dict[str, Any]:
    caches = {"index": {"hits": 9, "misses": 1}, "chunk": {"hits": 0, "misses": 0}}
    mine = {"started": 1.0, "uptime": uptime, "bytes_served": 0, "requests": {}, "caches": caches, "store": None}
    return {**mine, "writing": None, "resident_bytes": 1 << 20, **members}


def test_what_is_watched() -> None:
    before = snapshot(10, bytes_served=1 << 20, requests={"read": 10})
    now = snapshot(12, bytes_served=5 << 20, requests={"read": 30})
    dead = Mount("/mnt/\x1b[31mold", "x", MountState.DEAD, None)
    views = [
        MountView(Mount("/mnt/a", "x", MountState.ANSWERS, now), []),
        MountView(dead, [*health.examine_mount(dead)]),
    ]
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(status_watch.shown(views, {"/mnt/a": before}))
    text = console.export_text()
    assert re.search(r"/mnt/a +2\.0 MiB/s +10/s +90\.0 % +- ", text), text
    assert "\x1b" not in text
    assert "shardfs umount --lazy" in text
