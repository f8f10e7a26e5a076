"""The status page in a browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import urllib.request
from typing import TYPE_CHECKING

import pytest

from shardfs.daemon import health
from shardfs.daemon.health import MountsReport
from tests.mount.programs import shardfs
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardfs.daemon.asking import Mount
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
        if (program := shutil.which(name)) is not None:
            return program
    pytest.skip("no chromium")


def address_of(mount: Path) -> str:
    address: str = json.loads((mount / ".shardfs/status.json").read_text())["metrics_addr"]
    return address


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
    times: list[float] = []

    def mounts() -> list[Mount]:
        times.append(now)
        return []

    monkeypatch.setattr(health, "mounts", mounts)
    now = 100.0
    monkeypatch.setattr("shardfs.daemon.health.time.monotonic", lambda: now)
    report = MountsReport()
    assert [report.as_json() for _ in range(5)] == [b"[]"] * 5
    assert len(times) == 1
    now += 2
    report.as_json()
    assert len(times) == 2
