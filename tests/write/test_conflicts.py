"""Somebody else writes to the source: while we have a chunk in the journal, and between a crash and the next mount.

The default is that the first one wins: ours stays in the journal and says ESTALE. What was not touched is added.
"""

from __future__ import annotations

import json
import shutil
import time
from typing import TYPE_CHECKING, Any

import google_crc32c
import pytest

from shardfs.model.errors import CorruptShardError
from tests.conftest import need_fuse
from tests.waiting import wait_until
from tests.write.faults import Args, Frozen, Function, hooked
from tests.write.mounts import writable
from tests.write.places import NEW, OLD, THEIRS, Place
from tests.write.targets import LAYOUTS, TARGETS, Target

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardfs.write.publish_shard import DirtyShard
    from tests.write.engines import TreeFiles


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


@pytest.mark.parametrize("place", ["zarr_end", "zarr_gzip_after"], indirect=True)
def test_a_chunk_that_is_renamed_is_removed_only_if_it_is_unchanged(place: Place) -> None:
    ours, other = same_shard(place.target)
    with place.mount() as files:
        files.rename(place.target.path(ours), place.target.path(other))
        place.write_theirs(ours)
        with pytest.raises(OSError, match="the stored chunk was changed"):
            files.publish()
    assert place.tokens()[ours] == place.held[ours]


def test_another_writer_is_noticed_although_its_chunk_has_the_same_checksum(tmp_path: Path) -> None:
    """Both chunks end in their own CRC-32C, as the chunk codec writes them."""
    target = TARGETS["zarr_crc"]
    assert google_crc32c.value(target.shown(OLD)) == google_crc32c.value(target.shown(NEW))
    place = Place(target, tmp_path)
    for number, key in ((0, "theirs"), (1, "ours")):
        with place.mount() as files:
            place.write(files, number)
            if key == "theirs":
                place.write_theirs(number)
                with pytest.raises(OSError, match="the stored chunk was changed"):
                    files.publish()
        assert place.tokens()[number] == (THEIRS if key == "theirs" else NEW) + number


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
        with pytest.raises(OSError, match="the stored chunk"):
            pending.flush(timeout=60)
        tried, publish = list[str](), pending.publisher.publish

        def noted(shard: DirtyShard) -> None:
            tried.append(shard.key)
            publish(shard)

        pending.publisher.publish = noted  # type: ignore[method-assign]
        time.sleep(0.5)
        assert len(tried) < 10
        pending.drain("", timeout=60)
    assert place.tokens() == place.held


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
    assert place.tokens() == {**place.held, ours: NEW + ours}


def test_an_index_that_another_program_has_made_unreadable_ends_a_publish(tmp_path: Path) -> None:
    """It has changed how indices are stored: what is read as entries are ranges of terabytes."""
    target = LAYOUTS["big_as_n5"]
    place = Place(target, tmp_path)

    def stored_with(index_codecs: list[str]) -> None:
        codecs = [{"name": name, "configuration": {"endian": "little"}} for name in index_codecs[:1]]
        document = json.loads((place.store / "zarr.json").read_text())
        document["codecs"][0]["configuration"]["index_codecs"] = [*codecs, *({"name": n} for n in index_codecs[1:])]
        shutil.rmtree(place.store / "c")
        (place.store / "zarr.json").write_text(json.dumps(document))
        target.fill(place.store, target.array(place.held))

    stored_with(["bytes"])
    with place.mount() as files:
        place.write(files, 0)
        stored_with(["bytes", "crc32c"])
        with pytest.raises((OSError, CorruptShardError)):
            files.tree.pending.flush(timeout=30)
    assert place.tokens() == place.held


@pytest.mark.fuse
@pytest.mark.parametrize("place", ["zarr_end", "zarr_zstd"], indirect=True)
def test_a_mount_shows_what_another_program_writes_later(place: Place, tmp_path: Path) -> None:
    """The kernel drops the bytes and the size that it has cached."""
    need_fuse()
    with writable(place.store, tmp_path / "mount", "-o", "index_ttl=0.2,idle=600,age=600") as mount:
        mount.mount()
        path, unsharded = mount.path / place.target.path(0), place.target.shown
        path.write_bytes(unsharded(NEW))
        place.held[0] = NEW
        assert mount.flush().returncode == 0
        assert path.read_bytes() == unsharded(NEW)
        place.write_theirs(0)
        wait_until(lambda: path.read_bytes() == unsharded(THEIRS), 30)
        assert path.stat().st_size == len(unsharded(THEIRS))
        assert mount.umount().returncode == 0
    place.natively()
