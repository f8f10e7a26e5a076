"""Mounts of stores that throttle, cut, reset, hang, ignore ranges, or replace an object in the middle of a stream.

Every byte is right or the read fails with a documented errno. After the fault everything is read. `mounted` asserts
that the mount ends. No time is measured.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests import data_blosc2, handmade
from tests.mount.distant import in_words, s3_options, s3_server, serving
from tests.mount.programs import errno_of
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.conftest import Mounted
    from tests.mount.distant import Store

pytestmark = [pytest.mark.fuse, pytest.mark.interop, pytest.mark.slow]

GRID, SHARD = (4, 4, 8), (2, 4, 4)
"""Chunks of the array, and chunks of a shard."""

NBYTES = 16**3
ALL = list(itertools.product(*map(range, GRID)))
DOCUMENTED = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT}
WRONG = -1
LATENCY_MS = 2


def chunk(coords: Sequence[int], version: int = 0) -> bytes:
    return np.random.default_rng([version, *coords]).bytes(NBYTES)


def write(root: Path, version: int = 0, **how: Any) -> None:
    """Write the array, each shard by one rename. The chunks have no checksums: only versions show that one is torn."""
    shape, shard = ([16 * n for n in numbers] for numbers in (GRID, SHARD))
    handmade.write_json(root / "zarr.json", handmade.zarr_metadata(shape, shard, (16, 16, 16)))
    for corner in itertools.product(*(range(0, n, s) for n, s in zip(GRID, SHARD, strict=True))):
        members = itertools.product(*(range(c, c + s) for c, s in zip(corner, SHARD, strict=True)))
        data = handmade.zarr_shard([chunk(coords, version) for coords in members], **how)
        path = root / "c" / "/".join(str(c // s) for c, s in zip(corner, SHARD, strict=True))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".new").write_bytes(data)
        os.utime(path.with_suffix(".new"), (10**9 + version, 10**9 + version))  # HTTP has whole seconds
        path.with_suffix(".new").rename(path)


def outcome(mount: Path, coords: Sequence[int], versions: Sequence[int] = (0,)) -> int:
    """Return the errno of reading a chunk; 0 if it is that of one of the versions, WRONG for other bytes."""
    try:
        content = (mount / "c" / "/".join(map(str, coords))).read_bytes()
    except OSError as e:
        return e.errno or WRONG
    return 0 if content in [chunk(coords, version) for version in versions] else WRONG


def read_all(mount: Path, versions: Sequence[int] = (0,), chunks: Sequence[Sequence[int]] = ALL) -> set[int]:
    """Read chunks with several threads, and some of them at random with another one. Return the outcomes."""
    at_random = random.Random(1).sample(chunks, len(chunks) // 4)
    with ThreadPoolExecutor(5) as pool:
        one = pool.submit(lambda: {outcome(mount, coords, versions) for coords in at_random})
        return set(pool.map(lambda coords: outcome(mount, coords, versions), chunks)) | one.result()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("distant")
    write(root / "a")
    return root


@pytest.fixture(scope="module")
def store(root: Path) -> Iterator[Store]:
    pytest.importorskip("aiohttp")
    with serving(root, LATENCY_MS) as store:
        yield store


@pytest.fixture(scope="module")
def s3_store(root: Path) -> Iterator[Store]:
    with s3_server(root) as url, serving(url, LATENCY_MS) as store:
        yield store


@contextmanager
def mounted_store(store: Store, mounted: Mounted, *words: str, s3: bool = False) -> Iterator[Path]:
    options = [*words, *(in_words(s3_options(store.url)) if s3 else [])]
    try:
        with mounted("s3://data/a" if s3 else f"{store.url}/a", *options) as mount:
            yield mount
    finally:
        store.fail()


SLOW_DOWN = "<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
RETRIED: dict[str, dict[str, Any]] = {
    "429": {"kind": "status", "status": 429, "share": 0.2},
    "503, Retry-After": {"kind": "status", "headers": {"Retry-After": "1"}, "share": 0.2},
    "SlowDown for a while": {"kind": "status", "body": SLOW_DOWN, "times": 6},
    "reset": {"kind": "reset", "share": 0.2},
    "cut": {"kind": "cut", "share": 0.2},
}
"""Faults of which a reader notices nothing, because requests are sent again."""

HARMLESS: dict[str, dict[str, Any]] = {
    "whole objects": {"kind": "whole"},
    "weak ETags": {"kind": "weak"},
    "no ETags": {"kind": "untagged"},
}
FATAL: dict[str, dict[str, Any]] = {
    "503": {"kind": "status"},
    "429": {"kind": "status", "status": 429, "headers": {"Retry-After": "1"}},
    "reset": {"kind": "reset"},
    "cut": {"kind": "cut"},
    "short": {"kind": "short"},
    "some short": {"kind": "short", "share": 0.3},
    "hang": {"kind": "hang"},
    "some hang": {"kind": "hang", "share": 0.1},
    "stall": {"kind": "stall"},
}
"""Faults of which a reader may notice something. Those that hit all requests fail the reads."""


@pytest.mark.parametrize("name", [*RETRIED, *HARMLESS])
def test_no_reader_notices(name: str, store: Store, mounted: Mounted) -> None:
    with mounted_store(store, mounted, "-o", "store_timeout=20,store_retries=8") as mount:
        store.fail({"path": "/c/", **{**RETRIED, **HARMLESS}[name]})
        assert read_all(mount) == {0}


@pytest.mark.s3
@pytest.mark.parametrize("name", ["503, Retry-After", "SlowDown for a while", "cut"])
def test_no_reader_notices_on_s3(name: str, s3_store: Store, mounted: Mounted) -> None:
    with mounted_store(s3_store, mounted, "-o", "store_timeout=20,store_retries=8", s3=True) as mount:
        s3_store.fail({"path": "/c/", **RETRIED[name]})
        assert read_all(mount) == {0}


def fail_and_recover(store: Store, mount: Path, name: str) -> None:
    assert outcome(mount, ALL[0]) == 0
    store.fail({"path": "/c/", **FATAL[name]})
    outcomes = read_all(mount, chunks=ALL[:20])
    assert outcomes <= DOCUMENTED | {0}
    assert name.startswith("some") or outcomes & DOCUMENTED
    store.fail()
    wait_until(lambda: read_all(mount) == {0}, 60)


@pytest.mark.parametrize("name", FATAL)
def test_reads_fail_and_recover(name: str, store: Store, mounted: Mounted) -> None:
    with mounted_store(store, mounted, "-o", "store_timeout=1,store_retries=1") as mount:
        fail_and_recover(store, mount, name)


@pytest.mark.s3
@pytest.mark.parametrize("name", ["503", "hang", "stall"])
def test_reads_fail_and_recover_on_s3(name: str, s3_store: Store, mounted: Mounted) -> None:
    with mounted_store(s3_store, mounted, "-o", "store_timeout=3,store_retries=1", s3=True) as mount:
        fail_and_recover(s3_store, mount, name)


@pytest.mark.parametrize("kind", ["status", "reset", "cut", "short", "hang", "stall"])
def test_what_is_fetched_ahead_may_fail(kind: str, store: Store, mounted: Mounted) -> None:
    """Every request for more than one chunk fails. Readers ask for one chunk each."""
    with mounted_store(store, mounted, "-o", "store_timeout=4,store_retries=1") as mount:
        store.requests()
        store.fail({"kind": kind, "path": "/c/", "longer": NBYTES})
        assert read_all(mount) == {0}
        assert any(r["stop"] - r["start"] > NBYTES for r in store.requests()) == (kind != "status")


def test_a_chunk_that_hangs_does_not_block_the_names_beside_it(store: Store, mounted: Mounted) -> None:
    """Both chunks are in one directory of the mount, and in two shards."""
    with mounted_store(store, mounted, "-o", "store_timeout=5,store_retries=0,prefetch=0") as mount:
        store.fail({"kind": "hang", "path": "/c/0/0/0$"})
        with ThreadPoolExecutor(1) as pool:
            hangs = pool.submit(outcome, mount, (0, 0, 0))
            wait_until(lambda: json.loads((mount / ".shardfs/status.json").read_text())["store"]["waiting"])
            assert outcome(mount, (0, 0, SHARD[2])) == 0
            assert not hangs.done()
        assert hangs.result() == errno.ETIMEDOUT


@pytest.mark.parametrize(
    ("kind", "index_ttl", "gap"),
    [
        ("strong", "1", b""),
        ("strong", "1", bytes(100)),
        ("strong", "forever", bytes(100)),
        ("weak", "1", b""),
        ("untagged", "1", bytes(100)),
    ],
    ids=lambda value: value if isinstance(value, str) else "other size" if value else "same size",
)
def test_shards_that_are_replaced_in_the_middle_of_a_stream(
    kind: str, index_ttl: str, gap: bytes, mounted: Mounted, tmp_path: Path
) -> None:
    """With strong ETags, each chunk is that of one version or the other. `index_ttl` bounds how long the old are shown.

    All chunks have one size: the kernel caches sizes as long as the index.
    """
    pytest.importorskip("aiohttp")
    write(tmp_path / "served/a")
    with serving(tmp_path / "served", LATENCY_MS) as store:
        store.fail({"kind": kind})
        with mounted_store(store, mounted, "-o", f"index_ttl={index_ttl}") as mount:
            assert {outcome(mount, coords) for coords in ALL[: len(ALL) // 3]} == {0}
            write(tmp_path / "served/a", 1, backwards=True, gap=gap)
            outcomes = read_all(mount, (0, 1))
            assert kind != "strong" or outcomes <= {0, errno.ESTALE}
            if index_ttl != "forever":
                wait_until(lambda: read_all(mount, (1,)) == {0})


@pytest.mark.parametrize("sizes", [(100, 200), (200, 100)], ids=["longer", "shorter"])
def test_chunks_that_change_their_size_are_not_cut(sizes: tuple[int, int], mounted: Mounted, tmp_path: Path) -> None:
    """One read fails: that which notices. From then on the kernel asks for the sizes again."""
    pytest.importorskip("aiohttp")
    root = tmp_path / "served/a"
    versions = [[bytes([100 * version + i]) * sizes[version] for i in range(16)] for version in (0, 1)]
    handmade.write_json(root / "zarr.json", handmade.zarr_metadata((16,), (16,), (1,)))
    handmade.write_files(root, {"c/0": handmade.zarr_shard(versions[0])})
    with serving(tmp_path / "served", LATENCY_MS) as store, mounted(f"{store.url}/a", "-o", "prefetch=0") as mount:
        paths = [mount / f"c/{i}" for i in range(16)]
        assert {path.stat().st_size for path in paths} == {sizes[0]}
        assert paths[0].read_bytes() == versions[0][0]
        handmade.write_files(root, {"new": handmade.zarr_shard(versions[1])})
        (root / "new").rename(root / "c/0")
        assert paths[0].read_bytes() == versions[0][0]  # from the page cache
        assert errno_of(paths[1].read_bytes) == errno.ESTALE
        assert [path.read_bytes() for path in paths] == versions[1]
        assert {path.stat().st_size for path in paths} == {sizes[1]}


@pytest.mark.parametrize("kind", ["status", "short", "hang"])
def test_a_container_that_was_not_reached_is_a_directory_later(kind: str, mounted: Mounted, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    write(tmp_path / "served/a")
    frame = data_blosc2.frame([data_blosc2.chunk(bytes([i]) * 16) for i in range(3)], 16)
    (tmp_path / "served/x.b2nd").write_bytes(frame)
    with serving(tmp_path / "served", LATENCY_MS) as store:
        store.fail({"kind": kind, "path": "b2nd"})
        with mounted(store.url, "-o", "store_timeout=1,store_retries=0") as mount:
            assert sorted(os.listdir(mount)) == ["a", "x.b2nd"]
            assert errno_of((mount / "x.b2nd").stat) in DOCUMENTED
            store.fail()
            wait_until((mount / "x.b2nd/00000001.chunk").is_file)
            assert (mount / "x.b2nd/00000001.chunk").read_bytes() == data_blosc2.chunk(b"\1" * 16)
