"""Chunks written in the encoding that each layout chooses, for arrays in any stored encoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfs.formats import zarr3_view
from shardfs.formats.bcolz import view as bcolz
from shardfs.formats.n5 import view as n5
from shardfs.formats.zarr2 import view as zarr2
from shardfs.model.arrays import Array, ChunkEncoding
from shardfs.model.errors import UnsupportedError
from tests.codecs.chunk_model import Case, cases
from tests.codecs.test_store import check_round_trip

if TYPE_CHECKING:
    from collections.abc import Callable


def _precomputed(array: Array) -> ChunkEncoding:
    """As shown for an image with the array's axes: channels last or first, then x fastest."""
    data_type = np.dtype(array.data_type.replace("b", "u")).newbyteorder("<").str
    return ChunkEncoding(data_type, tuple(range(len(array.shape))), clipped=True)


LAYOUTS: dict[str, Callable[[Array], ChunkEncoding]] = {
    "zarr2": zarr2.shown_encoding,
    "zarr3": zarr3_view.shown_encoding,
    "n5": n5.shown_encoding,
    "precomputed": _precomputed,
    "bcolz": bcolz.shown_encoding,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@given(case=cases(), draw=st.data())
def test_what_a_client_of_a_layout_writes_is_stored(layout: str, case: Case, draw: st.DataObject) -> None:
    try:
        case.shown = LAYOUTS[layout](case.array)
    except UnsupportedError:
        return
    check_round_trip(case, draw)
