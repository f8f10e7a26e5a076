"""Whether a metadata document is certainly not there, or cannot be read: `Store.documents`, which all readers call."""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import fsspec
import pytest

from shardfs.storage.open_store import open_store
from shardfs.storage.retry import RetryPolicy
from tests.mount.distant import s3_options, s3_server, serving
from tests.mount.programs import errno_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from shardfs.storage.store import Store as OpenedStore
    from tests.mount.distant import Store

NAMES, LIMIT = ["zarr.json", ".zarray", "info"], 100

DATA = b'{"zarr_format": 3}'


# ---- local sources


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def through_a_file(path: Path) -> None:
    path.symlink_to("../file/zarr.json")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def out_of_the_source(path: Path) -> None:
    (path.parents[2] / "outside").write_bytes(DATA)
    path.symlink_to("../../outside")


def directory(path: Path) -> None:
    path.mkdir()


def pipe(path: Path) -> None:
    os.mkfifo(path)


UNREADABLE: dict[Callable[[Path], None], int] = {
    dangling: errno.EIO, through_a_file: errno.EIO, loop: errno.ELOOP, out_of_the_source: errno.EACCES,
    directory: errno.EIO, pipe: errno.EACCES,
}  # fmt: skip


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source/b").mkdir(parents=True)
    (tmp_path / "source/file").write_bytes(b"")
    return tmp_path / "source"


@pytest.mark.parametrize("unreadable", UNREADABLE)
def test_what_cannot_be_read_is_an_error_with_its_path(unreadable: Callable[[Path], None], source: Path) -> None:
    unreadable(source / "b/zarr.json")
    with pytest.raises(OSError, match=r"b/zarr\.json") as caught:
        open_store(str(source)).documents("b", NAMES, LIMIT)
    assert caught.value.errno == UNREADABLE[unreadable]
    assert not isinstance(caught.value, FileNotFoundError | NotADirectoryError | IsADirectoryError)


@pytest.mark.parametrize("directory", ["b", "missing", "file", "file/below"])
def test_what_is_not_there_is_no_error(directory: str, source: Path) -> None:
    (source / "b/info").mkdir()  # a common name of directories
    assert open_store(str(source)).documents(directory, NAMES, LIMIT) == {}


def test_a_link_to_an_array_that_leads_nowhere_is_an_error(source: Path) -> None:
    (source / "c").symlink_to("file/c")
    assert errno_of(lambda: open_store(str(source)).documents("c", NAMES, LIMIT)) == errno.EIO


# ---- remote sources


def test_an_object_store_has_no_directories(tmp_path: Path) -> None:
    fsspec.filesystem("memory").pipe({f"/{tmp_path.name}/b/zarr.json/x": b"", f"/{tmp_path.name}/b/info": DATA})
    store = open_store(f"memory://{tmp_path.name}")
    assert store.documents("b", NAMES, LIMIT) == {"info": DATA}
    assert store.documents("missing", NAMES, LIMIT) == {}


@pytest.fixture(scope="module", params=["http", "s3"])
def remote(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Store, Callable[[], OpenedStore]]]:
    """A server with the documents `a/zarr.json` and `b/zarr.json`, and what opens the store."""
    pytest.importorskip("aiohttp")
    root = tmp_path_factory.mktemp("source")
    for name in "ab":
        (root / name).mkdir()
        (root / name / "zarr.json").write_bytes(DATA)
    options: dict[str, Any] = {}
    with ExitStack() as stack:
        origin = root if request.param == "http" else stack.enter_context(s3_server(root))
        server = stack.enter_context(serving(origin, 0))
        if request.param == "s3":
            options = s3_options(server.url)
        url = "s3://data" if request.param == "s3" else server.url
        yield server, partial(open_store, url, options, retry=RetryPolicy(2, 0))


FAILED = {errno.EIO, errno.ETIMEDOUT}
"""Errors for the status 500. s3fs repeats the request until the time-out."""

FAULTS: dict[str, tuple[dict[str, Any], set[int]]] = {
    "403": ({"kind": "status", "status": 403}, {errno.EACCES}),
    "404": ({"kind": "status", "status": 404}, set()),
    "500": ({"kind": "status", "status": 500}, FAILED),
    "silence": ({"kind": "hang"}, {errno.ETIMEDOUT}),
}


@pytest.mark.s3
@pytest.mark.parametrize("fault", FAULTS)
def test_only_404_says_that_a_document_is_not_there(
    fault: str, remote: tuple[Store, Callable[[], OpenedStore]]
) -> None:
    (server, opened), (answer, numbers) = remote, FAULTS[fault]
    store = opened()
    assert store.documents("a", ["zarr.json", ".zarray"], LIMIT) == {"zarr.json": DATA}
    server.fail({"path": "/b/zarr.json", **answer})
    try:
        if not numbers:
            assert store.documents("b", ["zarr.json", ".zarray"], LIMIT) == {}
        else:
            with pytest.raises(OSError, match=r"/b\b") as caught:
                store.documents("b", ["zarr.json", ".zarray"], LIMIT)
            assert caught.value.errno in numbers
    finally:
        server.fail()


@pytest.mark.s3
def test_a_server_that_denies_what_is_not_there_is_asked_again_after_an_error(
    remote: tuple[Store, Callable[[], OpenedStore]],
) -> None:
    """A name that cannot exist is asked for once: the answer says what 403 means. An error is no answer."""
    server, opened = remote
    store = opened()
    denial = {"path": r"/b/|[0-9a-f]{32}", "kind": "status", "status": 403}
    assert store.documents("a", ["zarr.json"], LIMIT)
    try:
        server.fail({**denial, "path": "/b/"}, {**denial, "status": 500})
        assert errno_of(lambda: store.documents("b", ["zarr.json"], LIMIT)) in FAILED
        server.fail(denial)
        assert store.documents("b", ["zarr.json"], LIMIT) == {}
    finally:
        server.fail()
