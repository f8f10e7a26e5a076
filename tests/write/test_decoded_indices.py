"""A publish decodes each shard index once, although it also compares chunks and measures the shard."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from shardfs.model.blobs import whole
from shardfs.shards.byte_layouts.sharding_indexed import ShardingIndexed
from shardfs.shards.byte_layouts.superchunk import Pack
from shardfs.shards.byte_layouts.uint64_sharded import Uint64Sharded
from tests.promises.axes import Cell
from tests.promises.place import Place
from tests.promises.stores import Disk

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

INDICES = {"zarr_end": 2, "zarr_start": 2, "zarr_nested": 4, "precomputed": 3, "bcolz": 2}
"""Of the old shard and of the new one; also inner ones, and that of the other minishard of the old shard."""


@pytest.mark.parametrize("form", INDICES)
def test_a_publish_decodes_each_index_once(form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cell = Cell("", "disk", form, "native", "replaces")
    place = Place(cell, Disk(tmp_path / "source"), tmp_path, caplog)
    decoded = Counter[tuple[int, bytes]]()

    def counted(decode: Callable[..., object]) -> Callable[..., object]:
        def count(layout: object, *args: Any) -> object:
            decoded[id(layout), args[-1] if isinstance(args[-1], bytes) else whole(args[-1])] += 1
            return decode(layout, *args)

        return count

    with place.mount(compact="eager") as fs:
        place.write_accepted(fs, place.first)
        place.theirs(place.second)
        with pytest.MonkeyPatch.context() as patch:
            for layout in (ShardingIndexed, Uint64Sharded):
                patch.setattr(layout, "decode_page", counted(layout.decode_page))
            patch.setattr(Pack, "walk", counted(Pack.walk))
            place.publish_closed(fs)
    place.check()
    assert list(decoded.values()) == [1] * INDICES[form]
