"""How many requests, and how many round trips in a row, the start of a mount and listings take."""

from __future__ import annotations

import json
import time
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

from shardfs.vfs import directories, discovery, nodes, source_datasets
from shardfs.vfs.tree import open_tree
from tests.data_layouts import write_zarr
from tests.datasets import LITTLE
from tests.mount.distant import serving
from tests.mount.programs import lines, run
from tests.write.object_store import Handler, Object, object_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tests.conftest import Mounted
    from tests.datasets import Dataset

pytestmark = [pytest.mark.fuse, pytest.mark.interop]

LATENCY_S = 0.1
"""Long, so that parallel requests begin before the first of them is answered, on a loaded machine as well."""

Row = dict[str, Any]


class Source(NamedTuple):
    """A remote source: its URL, the options of a mount, and the requests since the last call."""

    url: str
    options: Sequence[str]
    requests: Callable[[], list[Row]]


@contextmanager
def over_http(root: Path) -> Iterator[Source]:
    pytest.importorskip("aiohttp")
    with serving(root, 1e3 * LATENCY_S) as store:

        def requests() -> list[Row]:
            with urllib.request.urlopen(f"{store.url}/.requests") as answer:
                rows: list[Row] = json.load(answer)
            return [{**r, "method": "LIST" if r["path"].endswith("/") else r["method"]} for r in rows]

        yield Source(store.url, [], requests)


@contextmanager
def over_s3(root: Path) -> Iterator[Source]:
    pytest.importorskip("s3fs")
    rows: list[Row] = []

    class Slow(Handler):
        def answer(self) -> None:
            came, method = time.monotonic(), "LIST" if "list-type" in self.path else self.command
            time.sleep(LATENCY_S)
            # Noted before the client has the answer.
            rows.append({"came": came, "path": self.path, "method": method, "answered": time.monotonic(), "status": 0})
            super().answer()

        do_GET = do_HEAD = answer

    with object_store(Slow) as server:
        for path in root.rglob("*"):
            if path.is_file():
                server.objects[f"data/{path.relative_to(root)}"] = Object(path.read_bytes(), {})
        s3_options = server.options()
        words = {**{name: s3_options[name] for name in ("key", "secret")}, "client_kwargs.endpoint_url": server.url}

        def requests() -> list[Row]:
            log = rows[:]
            rows.clear()
            return log

        yield Source("s3://data", ["-o", ",".join(f"storage_option.{k}={v}" for k, v in words.items())], requests)


OVER = {"http": over_http, "s3": over_s3}


def rounds(requests: Sequence[Row]) -> int:
    """Return the length of the longest chain of requests of which each came after the answer to the one before."""
    depths: list[tuple[float, int]] = []  # when a request was answered, and its place in the chain
    for r in sorted(requests, key=lambda r: float(r["came"])):
        before = [depth for answered, depth in depths if answered <= r["came"]]
        depths.append((r["answered"], 1 + max(before, default=0)))
    return max((depth for _, depth in depths), default=0)


def fewest(limit: int, measure: Callable[[], int]) -> int:
    """The least that was measured until it was no more than `limit`: on a busy machine, requests that are sent together
    come one after the other, and what the kernel knows expires during a listing."""
    for _ in range(6):
        if (count := measure()) <= limit:
            break
    return count


@contextmanager
def started(over: str, served: Path, dataset: Dataset, mounted: Mounted) -> Iterator[tuple[Path, Source]]:
    """Mount a copy of a dataset."""
    if not served.exists():
        served.mkdir()
        run("cp", "-r", dataset.path, served / dataset.name)
    with OVER[over](served) as source, mounted(f"{source.url}/{dataset.name}", *source.options) as mount:
        yield mount, source


@pytest.mark.parametrize(
    ("over", "kind", "name", "chunk", "limit"),
    [
        ("http", "zarr3", "default", "c/1/1", 3),
        ("s3", "zarr3", "keys_default_dot", "c.1.1", 3),
        ("http", "zarr3", "keys_v2_dot", "1.1", 3),
        ("s3", "zarr3", "keys_v2_slash", "1/1", 3),
        ("http", "precomputed", "two_scales", "16_16_40/-2-0_1-3_0-2", 4),  # a shard has two levels of indices
        ("s3", "precomputed", "two_scales", "16_16_40/-2-0_1-3_0-2", 4),
    ],
)
def test_the_first_byte_takes_few_round_trips(
    over: str,
    kind: str,
    name: str,
    chunk: str,
    limit: int,
    dataset: Callable[[str, str], Dataset],
    mounted: Mounted,
    tmp_path: Path,
) -> None:
    """The documents, which are asked for together; the index, in one or two steps; and the chunk."""
    variant = dataset(kind, name)

    def measure() -> int:
        with started(over, tmp_path / "served", variant, mounted) as (mount, source):
            assert (mount / chunk).read_bytes() == (variant.twin / chunk).read_bytes()
            requests = source.requests()
        assert [r["method"] for r in requests] == ["GET"] * (7 + limit - 1)
        return rounds(requests)

    assert fewest(limit, measure) == limit


@pytest.mark.parametrize(("over", "name"), [("http", "group"), ("s3", "group_consolidated")])
def test_directories_on_the_way_to_a_chunk_cost_nothing(
    over: str, name: str, dataset: Callable[[str, str], Dataset], mounted: Mounted, tmp_path: Path
) -> None:
    """The mount has read the documents of the group's arrays, because it looked for one that has shards."""
    variant, chunk = dataset("zarr3", name), "labels/cells/c/0/0"
    with started(over, tmp_path / "served", variant, mounted) as (mount, source):
        source.requests()
        assert (mount / chunk).read_bytes() == (variant.twin / chunk).read_bytes()
        requests = source.requests()
    assert [r["method"] for r in requests] == ["GET", "GET"]


SHARDS = 32


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`square`: 2 x 2 shards of 4 x 4 x 4 chunks each; `wide`: a row of many shards of two chunks each."""
    root = tmp_path_factory.mktemp("arrays")
    write_zarr(root / "square", np.ones((8, 16, 16), np.uint16), (2, 2, 2), [LITTLE], shard=(8, 8, 8))
    write_zarr(root / "wide", np.ones((4, 4 * SHARDS), np.uint16), (2, 2), [LITTLE], shard=(2, 4))
    return root


@contextmanager
def listed(over: str, root: Path, name: str, mounted: Mounted, *options: str) -> Iterator[tuple[Path, Source]]:
    """Mount an array."""
    with OVER[over](root) as source, mounted(f"{source.url}/{name}", *source.options, *options) as mount:
        source.requests()
        yield mount, source


@pytest.mark.parametrize("over", OVER)
def test_a_listing_asks_for_each_shard_and_directory_once(over: str, arrays: Path, mounted: Mounted) -> None:
    with listed(over, arrays, "square", mounted) as (mount, source):
        listing = lines("ls", "-lR", mount / "c")
        requests = source.requests()
    assert sum(line.startswith("-") for line in listing) == 4 * 8 * 8
    assert [r["status"] for r in requests if r["status"] == 404] == []
    assert sum(r["method"] == "LIST" for r in requests) == 4  # c, c/0, c/0/0 and c/0/1
    assert sum(r["method"] == "GET" for r in requests) == 4
    assert len(requests) <= 8


@pytest.mark.parametrize("over", OVER)
def test_the_indices_of_a_row_are_loaded_together(over: str, arrays: Path, mounted: Mounted) -> None:

    def measure() -> int:
        with listed(over, arrays, "wide", mounted) as (mount, source):
            assert len(lines("ls", "-l", mount / "c/0")) == 2 * SHARDS + 1
            requests = source.requests()
        assert sum(r["method"] == "GET" for r in requests) == SHARDS
        return rounds(requests)

    assert fewest(6, measure) <= 6


@pytest.mark.parametrize("options", ["index_cache=1k", "index_ttl=1", "prefetch=0"])
def test_nothing_is_loaded_twice_where_nothing_stays_cached(options: str, arrays: Path, mounted: Mounted) -> None:
    """With `index_ttl=1`, indices expire during the listing; the kernel has the listed names for a second after it."""

    def measure() -> int:
        with listed("http", arrays, "wide", mounted, "-o", options) as (mount, source):
            assert len(lines("ls", "-l", mount / "c/0")) == 2 * SHARDS + 1
            return sum(r["method"] == "GET" and "/c/" in r["path"] for r in source.requests())

    assert fewest(SHARDS + 2, measure) <= SHARDS + 2


def test_lookups_after_a_long_listing_wait_for_no_document(arrays: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel got with the listing could expire meanwhile, and each name would cost a shard index."""
    pytest.importorskip("aiohttp")
    now = 0.0
    for module in (directories, discovery, nodes, source_datasets):
        monkeypatch.setattr(module, "monotonic", lambda: now)
    with over_http(arrays) as store:
        tree = open_tree(f"{store.url}/wide", index_ttl_s=0.001)
        row = tree.resolve("c/0").number
        for listing in (lambda: tree.small_listing(row, 100), lambda: list(tree.scan(row))):
            now += 10  # as if the listing had taken so long
            store.requests()
            assert listing()
            assert sum("zarr.json" in r["path"] for r in store.requests()) == 1
            assert tree.resolve("c/0").number == row
            assert store.requests() == []


def test_a_broken_shard_harms_no_other(arrays: Path, mounted: Mounted, tmp_path: Path) -> None:
    run("cp", "-r", arrays / "wide", tmp_path / "wide")
    shard = tmp_path / "wide/c/0/7"
    shard.write_bytes(shard.read_bytes()[:-1])
    with listed("http", tmp_path, "wide", mounted) as (mount, _):
        names = lines("ls", "-U", mount / "c/0")
        assert sorted(map(int, names)) == list(range(2 * SHARDS))
        sound = [name for name in names if int(name) // 2 != 7]
        assert all((mount / "c/0" / name).stat().st_size == 8 for name in sound)


@pytest.mark.parametrize("name", ["empty_axis", "keys_v2_dot"])
def test_a_listing_of_an_array_that_is_empty_or_flat(
    name: str, dataset: Callable[[str, str], Dataset], mounted: Mounted, tmp_path: Path
) -> None:
    variant = dataset("zarr3", name)
    with started("http", tmp_path / "served", variant, mounted) as (mount, _):
        listing, expected = (lines("find", top, "-type", "f", "-printf", r"%P\n") for top in (mount, variant.twin))
    assert sorted(listing) == sorted(expected)
