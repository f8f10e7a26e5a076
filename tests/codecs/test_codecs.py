"""Bytes-to-bytes codecs: what one side writes, the other reads; `test_bad_input` has what is damaged."""

from __future__ import annotations

import bz2
import gzip
import lzma
import time
from typing import TYPE_CHECKING, Any

import numcodecs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfs.codecs import decoders, encoders, zlib_streams
from shardfs.model.arrays import Codec
from tests.codecs.chunk_model import streamed_zstd
from tests.data_n5 import lz4_blocks
from tests.limits import usual_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

CONFIGURATIONS: list[tuple[str, dict[str, Any]]] = [
    ("crc32c", {}),
    ("gzip", {"level": 1}),
    ("zstd", {"level": 3, "checksum": True}),
    ("blosc", {"cname": "zstd", "clevel": 5, "shuffle": "bitshuffle", "typesize": 4, "blocksize": 0}),
    ("numcodecs.bz2", {"level": 9}),
    ("numcodecs.lzma", {}),
    ("numcodecs.lzma", {"format": 1, "check": -1, "preset": 9, "filters": None}),
    ("numcodecs.lzma", {"format": 3, "check": 0, "filters": [{"id": 33, "preset": 1}]}),
    ("numcodecs.zlib", {"level": 4}),
    ("numcodecs.lz4", {"acceleration": 2}),
    ("numcodecs.shuffle", {"elementsize": 4}),
    ("numcodecs.crc32", {}),
    ("numcodecs.adler32", {}),
    ("numcodecs.fletcher32", {}),
]


@pytest.mark.parametrize(("name", "configuration"), CONFIGURATIONS, ids=lambda c: c if isinstance(c, str) else "")
@given(st.binary(min_size=1, max_size=75).map(lambda items: 4 * items))  # whole items, as chunks are
def test_encoding_is_the_inverse_of_decoding(name: str, configuration: dict[str, Any], data: bytes) -> None:
    codec = [Codec(name, configuration)]
    assert decoders.decode(codec, encoders.encode(codec, data)) == data


@pytest.mark.parametrize("name", ["bz2", "lzma", "zlib", "lz4"])
@given(data=st.binary(min_size=1, max_size=300))
def test_numcodecs_reads_and_writes_the_same(name: str, data: bytes) -> None:
    theirs, ours = numcodecs.get_codec({"id": name}), [Codec(f"numcodecs.{name}")]
    assert bytes(theirs.decode(encoders.encode(ours, data))) == data
    assert decoders.decode(ours, bytes(theirs.encode(data))) == data


@given(st.binary(max_size=300), st.integers(1, 100))
def test_the_lz4_of_java(data: bytes, size: int) -> None:
    assert decoders.decode([Codec("n5.lz4")], lz4_blocks(data, size)) == data


def test_every_codec_that_is_encoded_is_decoded() -> None:
    assert encoders.ENCODERS.keys() <= decoders.DECODERS.keys()
    assert {name for name, _ in CONFIGURATIONS} == encoders.ENCODERS.keys()


@given(st.lists(st.binary(max_size=9000), min_size=1, max_size=5), st.sampled_from([0, 9]))
def test_members_of_gzip_follow_each_other(members: list[bytes], level: int) -> None:
    """Also such as are longer than what is given to their decoder at first."""
    assert zlib_streams.gunzip(b"".join(gzip.compress(data, level) for data in members)) == b"".join(members)


def test_a_member_of_gzip_behind_a_large_one() -> None:
    large = bytes(2 * zlib_streams.PIECE + 1)
    assert zlib_streams.gunzip(gzip.compress(large, 1) + gzip.compress(b"end")) == large + b"end"


@pytest.mark.parametrize("pack", [bz2.compress, lzma.compress])
@given(streams=st.lists(st.binary(max_size=9000), min_size=1, max_size=5))
def test_streams_follow_each_other(pack: Callable[[bytes], bytes], streams: list[bytes]) -> None:
    codec = [Codec("numcodecs.bz2" if pack is bz2.compress else "numcodecs.lzma")]
    assert decoders.decode(codec, b"".join(map(pack, streams))) == b"".join(streams)


def test_very_many_streams_of_lzma() -> None:
    data = lzma.compress(b"") * 400_000
    start_s = time.process_time()
    assert decoders.decode([Codec("numcodecs.lzma")], data) == b""
    assert usual_seconds(time.process_time() - start_s) < 6


def test_very_many_members_of_gzip() -> None:
    data = gzip.compress(b"") * 400_000
    start_s = time.process_time()
    assert zlib_streams.gunzip(data) == b""
    assert usual_seconds(time.process_time() - start_s) < 3


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 40])
def test_zstd_frames_without_size_are_decoded(data: bytes) -> None:
    """Streaming writers do not know the size when they write the header."""
    assert decoders.decode((Codec("zstd"),), streamed_zstd(data)) == data
    assert decoders.decode((Codec("zstd"),), streamed_zstd(data), len(data)) == data
    around = (Codec("gzip"), Codec("zstd"))
    assert decoders.decode(around, streamed_zstd(gzip.compress(data)), len(data)) == data


@pytest.mark.parametrize("blocks", [1100, 1])
def test_zstd_frames_without_size_are_bounded(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block of one repeated byte takes four bytes and is decoded to 128 KiB."""
    if blocks == 1:
        monkeypatch.setattr(decoders, "MAX_DECODED", (128 << 10) - 1)
    head = b"\x28\xb5\x2f\xfd\x00\x58"
    frame = head + b"".join(
        ((128 << 10) << 3 | 2 | (i == blocks - 1)).to_bytes(3, "little") + b"a" for i in range(blocks)
    )
    with pytest.raises(ValueError, match="decoded to at most"):
        decoders.decode((Codec("zstd"),), frame)


def test_any_exception_of_blosc2_is_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some damaged chunks make python-blosc2 raise SystemError."""
    blosc2 = pytest.importorskip("blosc2")

    def fail(_: bytes) -> bytes:
        raise SystemError("returned NULL without setting an exception")

    monkeypatch.setattr(blosc2, "decompress2", fail)
    with pytest.raises(ValueError, match="its index cannot be decoded: returned NULL"):
        decoders.blosc2_index(bytes(blosc2.compress2(bytes(64), typesize=8)))
