"""Somebody else writes to the source: while we have a chunk in the journal, and between a crash and the next mount.

The default is that the first one wins: ours stays in the journal and says ESTALE. What was not touched is added.
"""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING, Any

import pytest

from shardfs.write.publishing import Publishing
from tests.write.faults import Args, Frozen, Function, hooked
from tests.write.places import NEW, Place
from tests.write.targets import LAYOUTS, TARGETS, Target

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardfs.write.publishing import DirtyShard
    from tests.write.engines import TreeFiles

NAMES = ["zarr_end", "zarr_start", "zarr_nested", "precomputed", "precomputed_gzip", "n5", "turned_as_n5"]
"""Not those with codecs around whole shards: in there a chunk that stays where it is looks unchanged."""


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place({**TARGETS, **LAYOUTS}[request.param], tmp_path)


def killed(place: Place, run: Callable[[TreeFiles], None]) -> None:
    """What `run` does, and then nothing reaches the disk any more."""
    with place.mount() as files:
        run(files)
        files.die()


class SlipIn(Frozen):
    """Right before the first exchange somebody else is there; right after it nothing reaches the disk any more."""

    def __init__(self, theirs: Callable[[], None]) -> None:
        super().__init__()
        self._theirs, self._over = theirs, False

    def do(self, number: int, name: str, function: Function, args: Args) -> Any:
        if name == "exchange" and not self._over:
            self._theirs()
            function(*args)
            self._over = True
        return super().do(number, name, function, args) if self._over else function(*args)


def same_shard(target: Target) -> tuple[int, int]:
    first, second, *_ = next(iter(target.shards().values()))
    return first, second


@pytest.mark.parametrize("place", NAMES, indirect=True)
def test_theirs_stays_and_ours_says_so(place: Place) -> None:
    ours, _ = same_shard(place.target)
    with place.mount() as files:
        place.write(files, ours)
        place.write_theirs(ours)
        with pytest.raises(OSError, match="the stored chunk was at") as caught:
            files.publish()
        assert caught.value.errno == errno.ESTALE
        assert files.read(place.target.path(ours)) == place.target.shown(NEW + ours)
    assert place.found() == place.held


@pytest.mark.parametrize("place", ["zarr_end", "precomputed"], indirect=True)
def test_ours_wins_if_asked_and_the_log_says_so(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    ours, _ = same_shard(place.target)
    with place.mount(Publishing(idle_s=1e9, age_s=1e9, conflict="ours")) as files:
        place.write(files, ours)
        place.write_theirs(ours)
        files.publish()
    assert place.found() == place.held | {ours: NEW + ours}
    assert f"replaces 1 chunk of its version, first {place.target.path(ours)}" in caplog.text


@pytest.mark.parametrize("place", ["zarr_end", "precomputed"], indirect=True)
def test_a_full_shard_of_nothing_but_conflicts_is_left_alone(place: Place) -> None:
    """Full shards are published at once; but this one would be again and again, and who waits would wait for ever."""
    members = next(iter(place.target.shards().values()))
    with place.mount() as files:
        pending = files.tree.pending
        is_held, pending.shards.is_held = pending.shards.is_held, lambda path: True
        for number in members:
            place.write(files, number)
        for number in members:
            place.write_theirs(number)
        pending.shards.is_held = is_held
        with pytest.raises(OSError, match="the stored chunk was at"):
            pending.flush(timeout=60)
        tried, publish = list[str](), pending.publisher.publish

        def noted(shard: DirtyShard) -> None:
            tried.append(shard.key)
            publish(shard)

        pending.publisher.publish = noted  # type: ignore[method-assign]
        time.sleep(0.5)
        assert len(tried) < 10
        pending.drain("", timeout=60)
    assert place.found() == place.held


@pytest.mark.parametrize("place", NAMES, indirect=True)
def test_an_old_journal_does_not_overwrite_what_is_newer(place: Place) -> None:
    ours, _ = same_shard(place.target)
    killed(place, lambda files: place.write(files, ours))
    place.write_theirs(ours)
    with place.mount() as files:
        with pytest.raises(OSError, match="the stored chunk was at") as caught:
            files.publish()
        assert caught.value.errno == errno.ESTALE
        assert files.read(place.target.path(ours)) == place.target.shown(NEW + ours)
    assert place.found() == place.held


@pytest.mark.parametrize("place", ["zarr_end", "n5"], indirect=True)
@pytest.mark.parametrize("crash", [False, True])
def test_what_both_wrote_side_by_side_is_there(place: Place, crash: bool) -> None:
    """Their chunk is as long as the one before, so that no other has moved."""
    ours, theirs = same_shard(place.target)
    if crash:
        killed(place, lambda files: place.write(files, ours))
        place.write_theirs(theirs)
    with place.mount() as files:
        if not crash:
            place.write(files, ours)
            place.write_theirs(theirs)
        files.publish()
    assert place.found() == {**place.held, ours: NEW + ours}


@pytest.mark.parametrize("place", [*NAMES, "zarr_gzip_after"], indirect=True)
def test_after_a_crash_ours_is_published_if_nobody_else_was_there(place: Place) -> None:
    ours, other = same_shard(place.target)

    def run(files: TreeFiles) -> None:
        place.write(files, ours)
        files.unlink(place.target.path(other))

    killed(place, run)
    with place.mount() as files:
        files.publish()
    assert place.found() == {**place.held, ours: NEW + ours, other: None}


@pytest.mark.parametrize("place", ["zarr_end"], indirect=True)
def test_theirs_comes_back_after_a_crash_with_it_in_hand(place: Place) -> None:
    """They came between the last look at the shard and the exchange: their version has our temporary name then."""
    ours, theirs = same_shard(place.target)

    def run(files: TreeFiles) -> None:
        place.write(files, ours)
        with hooked(SlipIn(lambda: place.write_theirs(theirs))), pytest.raises(OSError, match="error"):
            files.publish()

    killed(place, run)
    with place.mount() as files:
        files.publish()
    assert place.found() == {**place.held, ours: NEW + ours}
