"""Mounts to write to.

Whoever writes is a program of its own, so that no test waits for its own mount.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from tests.write.object_store import object_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.write.object_store import Server


@pytest.fixture(autouse=True)
def no_publisher_left_behind() -> Iterator[None]:
    """Fail a test that leaves a thread that publishes: it tries again for ever, also while later tests count calls."""
    before = {*threading.enumerate()}  # also those of fixtures that outlive the test
    yield
    thread_names = [t.name for t in threading.enumerate() if t not in before and t.name.startswith("shardfs-publish")]
    assert not thread_names, "the test should close its writable tree"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A directory of the local disk, to compare with."""
    path = tmp_path / "plain"
    path.mkdir()
    return path


@pytest.fixture(scope="module")
def moto_url() -> Iterator[str]:
    """The address of moto's S3, without buckets."""
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(scope="module")
def one_server() -> Iterator[Server]:
    """An S3 server for all tests of a module."""
    pytest.importorskip("s3fs")
    with object_store() as server:
        yield server


@pytest.fixture
def server(one_server: Server) -> Iterator[Server]:
    """An empty S3 server."""
    one_server.reset()
    yield one_server
    one_server.reset()
