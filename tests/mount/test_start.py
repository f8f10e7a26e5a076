"""Which modules a mount has imported at the first byte of a chunk. Those that take long are imported later or never."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.conftest import need_fuse
from tests.mount.distant import serving
from tests.mount.processes import end
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.datasets import Dataset

pytestmark = [pytest.mark.fuse]

NETWORK = {"aiohttp", "asyncio", "fsspec", "html.parser", "http.client", "ssl", "urllib.request"}
"""Modules of clients, which take more than half as long as all that a local mount imports."""

JOURNAL = {"shardfs.write.journal", "shardfs.write.recover"}


@contextmanager
def importing(source: str, mount: Path, log: Path, **variables: str) -> Iterator[Callable[[], set[str]]]:
    """Mount a source, and yield a function that returns the modules that the mount has imported."""
    need_fuse()
    mount.mkdir()
    command = [sys.executable, "-X", "importtime", "-m", "shardfs", "mount", "--foreground", source, str(mount)]
    with (
        log.open("wb") as errors,
        subprocess.Popen(command, stdout=errors, stderr=errors, env=os.environ | variables) as process,
    ):
        try:
            wait_until(lambda: process.poll() is not None or os.path.ismount(mount))
            yield lambda: set(re.findall(r"^import time: +\d+ \| +\d+ \| +(\S+)$", log.read_text(), re.MULTILINE))
        finally:
            end(process)


def test_a_local_mount_imports_no_client(dataset: Callable[[str, str], Dataset], tmp_path: Path) -> None:
    variant = dataset("zarr3", "default")
    with importing(str(variant.path), tmp_path / "mount", tmp_path / "log") as imported:
        assert (tmp_path / "mount/c/1/1").read_bytes() == (variant.twin / "c/1/1").read_bytes()
        modules = imported()
    assert "shardfs.vfs.tree" in modules
    assert not modules & (NETWORK | JOURNAL | {"obstore", "shardfs.storage.remote"})


@pytest.mark.parametrize("kind", ["http", "s3", "gs"])
def test_a_distant_mount_imports_only_obstore(
    kind: str, dataset: Callable[[str, str], Dataset], tmp_path: Path
) -> None:
    for package in ("obstore", {"http": "aiohttp", "s3": "s3fs", "gs": "gcsfs"}[kind]):
        pytest.importorskip(package)
    variant = dataset("zarr3", "default")
    variables = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_CONFIG_FILE": "/x"}
    variables["AWS_SHARED_CREDENTIALS_FILE"] = "/x"
    with serving(variant.path.parent, 1) as store:
        url = f"{store.url}/{variant.path.name}"
        if kind != "http":
            url = f"{kind}://{variant.path.name}"
            storage_options = {"endpoint_url": store.url} | ({"token": "anon"} if kind == "gs" else {})
            variables["SHARDFS_STORAGE_OPTIONS"] = json.dumps(storage_options)
        with importing(url, tmp_path / "mount", tmp_path / "log", **variables) as imported:
            assert (tmp_path / "mount/c/1/1").read_bytes() == (variant.twin / "c/1/1").read_bytes()
            modules = imported()
            assert "obstore" in modules
            assert not modules & (NETWORK | JOURNAL | {"botocore", "s3fs", "gcsfs"})
            if kind == "http":
                assert sorted(os.listdir(tmp_path / "mount/c")) == sorted(os.listdir(variant.twin / "c"))
                assert imported() >= NETWORK, "a listing needs them"
