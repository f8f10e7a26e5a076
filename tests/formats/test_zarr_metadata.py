"""Data types, fill values and codec chains of Zarr."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from zarr.core.dtype import get_data_type_from_json

from shardfs.formats import zarr_metadata
from shardfs.model.arrays import ChunkEncoding, Codec
from tests.data_layouts import element


@pytest.mark.parametrize("name", zarr_metadata.NUMBERS)
def test_data_types_are_numpy_s(name: str) -> None:
    assert zarr_metadata.numpy_type(name) == np.dtype(name).str
    assert zarr_metadata.name_of(np.dtype(name).str) == name
    assert zarr_metadata.name_of(np.dtype(name).newbyteorder(">").str) == name


@given(st.sampled_from(("float16", "float32", "float64")), st.data())
def test_bits_of_floats_are_what_zarr_python_takes_them_for(name: str, data: st.DataObject) -> None:
    dtype = np.dtype(name)
    bits = data.draw(st.integers(0, 256**dtype.itemsize - 1))
    text = f"0x{bits:0{2 * dtype.itemsize}x}"
    wanted = get_data_type_from_json(name, zarr_format=3).from_json_scalar(text, zarr_format=3)
    fill = zarr_metadata.fill_value(text, dtype.str)
    assert element(fill, dtype).tobytes() == np.asarray(wanted, dtype).tobytes() or np.isnan(wanted)
    assert (fill == "NaN") == bool(np.isnan(wanted))


@pytest.mark.parametrize(
    ("value", "data_type"),
    [
        (-1, "|u1"), (256, "|u1"), (1.5, "<i4"), ("NaN", "<i4"), (True, "<i4"), ("x", "<f4"), ("0x00", "<f4"),
        ("0xzz", "<f2"), (True, "<f8"), (10**400, "<f8"), ([1], "<c8"), ([1, "x"], "<c8"), (2, "|b1"), ("", "|b1"),
        (3, "|O"), ([], "<f4"), ({}, "|u1"),
    ],
)  # fmt: skip
def test_what_is_no_fill_value(value: Any, data_type: str) -> None:
    with pytest.raises(ValueError, match=r"fill_value|base 16"):
        zarr_metadata.fill_value(value, data_type)


def test_chains() -> None:
    little, big = {"endian": "little"}, {"endian": "big"}
    cases: list[tuple[list[tuple[str, dict[str, Any]]], ChunkEncoding]] = [
        ([("bytes", little)], ChunkEncoding("<u2", (0, 1, 2))),
        ([("endian", big)], ChunkEncoding(">u2", (0, 1, 2))),
        (
            [("transpose", {"order": [2, 0, 1]}), ("transpose", {"order": [1, 0, 2]}), ("bytes", big)],
            ChunkEncoding(">u2", (0, 2, 1)),
        ),
        ([("transpose", {"order": "F"}), ("bytes", little)], ChunkEncoding("<u2", (2, 1, 0))),
        ([("bitround", {"keepbits": 3}), ("bytes", little)], ChunkEncoding("<u2", (0, 1, 2))),
        (
            [("bytes", little), ("numcodecs.zstd", {"level": 1}), ("crc32c", {})],
            ChunkEncoding("<u2", (0, 1, 2), codecs=(Codec("zstd", {"level": 1}), Codec("crc32c"))),
        ),
        (
            [("bytes", little), ("numcodecs.blosc", {"shuffle": 2})],
            ChunkEncoding("<u2", (0, 1, 2), codecs=(Codec("blosc", {"shuffle": "bitshuffle"}),)),
        ),
    ]
    for chain, wanted in cases:
        assert zarr_metadata.chunk_encoding("<u2", 3, chain) == wanted
    bad: list[list[tuple[str, dict[str, Any]]]] = [
        [],
        [("transpose", {"order": [0, 0, 1]}), ("bytes", little)],
        [("transpose", {"order": [2, 0, 1]})],
        [("transpose", {}), ("bytes", little)],
    ]
    for chain in bad:
        with pytest.raises(ValueError, match=r"codecs|permutation"):
            zarr_metadata.chunk_encoding("<u2", 3, chain)


def test_strings_of_any_length(tmp_path: Any) -> None:
    """They are made by a codec that both versions have."""
    from shardfs.vfs.tree import open_tree
    from tests.handmade import write_files
    from tests.suites.walking import walk

    data = np.array([["a", "µm", ""], ["longer text", "b", "c"]], dtype=np.dtypes.StringDType())
    zarr_array = zarr.create_array(
        tmp_path / "a", shape=(2, 3), chunks=(1, 2), shards=(2, 4), dtype=str, fill_value="none"
    )
    zarr_array[...] = data
    write_files(tmp_path / "shown", walk(open_tree(str(tmp_path / "a"), layout="zarr2")))
    array_shown = zarr.open_array(tmp_path / "shown", mode="r", zarr_format=2)
    assert np.asarray(array_shown[...]).tolist() == data.tolist()
    assert array_shown.fill_value == "none"
