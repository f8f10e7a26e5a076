"""Kills (T7), errors (T10), power losses (T9a) and lying disks (T11) at every call of every scenario.

The quick tests try a part of the points, another one for each target; `test_every_call`, marked `torture`, tries all.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import pytest

from tests import conftest
from tests.datasets import ROOT
from tests.write.engines import ENGINES
from tests.write.targets import LAYOUTS, TARGETS

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

ARRAYS = [name for name in TARGETS if name != "zarr_one_shard"]  # which is for many writers

IN_PLACE = ["precomputed", "precomputed_gzip"]
"""Shards that can be changed where they lie."""

REPLACING = ["overwrite_twice", "two_shards", "delete_one", "renamed"]
"""What happens to shards that exist."""

SOME = ["come_and_go", "delete_shard", "document", "first_chunk", "locked", "renamed"]


def outcome(how: str, target: str, engine: str, *more: str, timeout: float) -> int:
    """How many points were tried; none must have gone wrong."""
    command = [sys.executable, "-m", "tests.write.crash", how, target, engine, *more]
    run = conftest._run(command, timeout, cwd=ROOT)
    assert run.returncode == 0, run.stderr[-3000:]
    document = json.loads(run.stdout)
    assert document["wrong"] == [], f"{document['failures']} of {document['points']} points: " + "\n".join(
        document["wrong"][:5]
    )
    return int(document["points"])


def test_a_kill_between_a_close_and_the_release_that_follows_it(tmp_path: Path) -> None:
    """The kernel asks for the release when close has returned already."""
    target, store, journal = TARGETS["zarr_end"], tmp_path / "store", tmp_path / "journal"
    store.mkdir()
    target.create(store)
    journal.mkdir(mode=0o700)
    path, data = target.path(0), target.shown(1)
    with ENGINES["whole"].open(target, store, journal) as files:
        _, handle = files.tree.create(*files._parent(path, make=True), os.O_WRONLY | os.O_CREAT, 0o644)
        files.tree.write(handle, 0, memoryview(data))
        files.tree.flush(handle)
        files.die()
    with ENGINES["whole"].open(target, store, journal) as files:
        assert files.read(path) == data


QUICK = ["zarr_end", "precomputed", "n5"]


@pytest.mark.every_case
@pytest.mark.parametrize(
    "target", [pytest.param(name, marks=() if name in QUICK else pytest.mark.torture) for name in ARRAYS]
)
def test_a_kill_at_some_calls(target: str) -> None:
    scenarios, stride = ([], 193) if target == "zarr_end" else (SOME, 89)
    seed = ARRAYS.index(target)
    assert outcome("kill", target, "whole", *scenarios, f"--stride={stride}", f"--seed={seed}", timeout=280) > 5


THROUGH_LAYOUTS = [
    ("kill", "zstd_as_zarr2", *SOME, "--stride=61"),
    ("kill", "big_as_n5", *SOME, "--stride=61"),
    ("kill", "turned_as_n5", *SOME, "--stride=61"),
    ("power", "turned_as_n5", "locked", "renamed", "--stride=0", "--every=5"),
    pytest.param(("power", "zstd_as_zarr2", "locked", "renamed", "--stride=0"), marks=pytest.mark.torture),
    pytest.param(("power", "big_as_n5", "locked", "renamed", "--stride=0"), marks=pytest.mark.torture),
    pytest.param(("fail", "turned_as_n5", *SOME, "--stride=29"), marks=pytest.mark.torture),
]


@pytest.mark.parametrize("words", THROUGH_LAYOUTS)
def test_chunks_that_are_written_through_layouts(words: tuple[str, ...]) -> None:
    how, target, *more = words
    assert outcome(how, target, "whole", *more, timeout=280) > 5


@pytest.mark.parametrize("target", ["zarr_end", pytest.param("precomputed", marks=pytest.mark.torture)])
def test_errors_of_some_calls(target: str) -> None:
    assert outcome("fail", target, "whole", *SOME, "--stride=67", timeout=280) > 5


@pytest.mark.parametrize("target", ["zarr_end", pytest.param("precomputed", marks=pytest.mark.torture)])
def test_power_losses(target: str) -> None:
    assert outcome("power", target, "whole", *SOME, "--stride=0", "--every=12", timeout=280) > 5


def test_an_fsync_that_fails_and_is_believed_later() -> None:
    """Every fsync of both scenarios fails once."""
    assert outcome("sync", "zarr_end", "whole", "locked", "renamed", "--stride=0", "--every=12", timeout=280) > 5


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("how", "more"),
    [
        ("kill", (*REPLACING, "--stride=43")),
        ("power", ("overwrite_twice", "renamed", "--stride=3", "--every=9")),
        ("sync", ("overwrite_twice", "--stride=0", "--every=9")),
        pytest.param("fail", (*REPLACING, "--stride=19"), marks=pytest.mark.torture),
    ],
)
def test_shards_that_are_changed_where_they_lie(how: str, more: tuple[str, ...]) -> None:
    target = IN_PLACE[how == "kill"]
    assert outcome(how, target, "in_place", *more, timeout=280) > 5


EVERYTHING = [
    *((name, "whole") for name in [*ARRAYS, *LAYOUTS]),
    *((name, "in_place") for name in IN_PLACE),
]


@pytest.mark.torture
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("target", "engine"), EVERYTHING)
@pytest.mark.parametrize(("how", "stride"), [("kill", 1), ("fail", 1), ("power", 6), ("sync", 1)])
def test_every_call(how: str, stride: int, target: str, engine: str) -> None:
    assert outcome(how, target, engine, f"--stride={stride}", timeout=3500) > 100
