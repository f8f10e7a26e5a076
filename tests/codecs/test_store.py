"""Chunks that clients write in the shown encoding, turned into stored ones. The model of chunks is the client."""

from __future__ import annotations

import gzip
import io
import math
import zlib
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfs.codecs import encoded_chunks
from shardfs.codecs.transcode import Transcoder, transcoder
from shardfs.model.arrays import Array, ChunkEncoding, Codec
from shardfs.model.errors import UnsupportedError
from tests.codecs.chunk_model import (
    PACK,
    Case,
    alike,
    array,
    block,
    cases,
    coords_of,
    fill_of,
    inside,
    laid_out,
    plain,
    streamed_zstd,
    taken_in,
    written,
)

GZIP, ZSTD, BLOSC, CRC = (plain(codecs=(Codec(name),)) for name in ("gzip", "zstd", "blosc", "crc32c"))


def check_round_trip(case: Case, draw: st.DataObject) -> None:
    """A client writes a chunk in the shown encoding, then reads it back; another one reads the stored chunk."""
    transform = transcoder(case.array, case.shown)
    if transform is None:
        return
    cell = draw.draw(st.sampled_from(case.cells()))
    coords, part = coords_of(case.array, cell), case.data[case.box(cell)]
    data = written(case, cell, draw)
    stored_chunk = transform.store(coords, data)
    elements = taken_in(
        stored_chunk, case.array.encoding, part.shape if case.array.encoding.clipped else case.array.chunk
    )
    assert alike(inside(elements, part), part)
    shown_chunk = bytes(transform.show(coords, stored_chunk))
    assert shown_chunk == data or not transform.is_exact(coords, data)
    listed = transform.sizes(np.array([coords], np.uint64), np.array([len(stored_chunk)], np.int64))[0]
    assert listed in (-1, len(shown_chunk))
    again = taken_in(shown_chunk, case.shown, part.shape if case.shown.clipped else case.array.chunk)
    assert alike(inside(again, part), part)


@given(cases(), st.data())
def test_every_encoding_written_as_every_other(case: Case, draw: st.DataObject) -> None:
    check_round_trip(case, draw)


@given(cases(), st.data())
def test_a_clipped_chunk_is_padded_with_the_fill_value(case: Case, draw: st.DataObject) -> None:
    case.array = replace(case.array, encoding=replace(case.array.encoding, clipped=False))
    case.shown = replace(case.shown, clipped=True)
    cell = draw.draw(st.sampled_from(case.cells()))
    part = case.data[case.box(cell)]
    transform = transcoder(case.array, case.shown)
    assert transform is not None
    stored_chunk = transform.store(coords_of(case.array, cell), laid_out(part, case.shown))
    elements = taken_in(stored_chunk, case.array.encoding, case.array.chunk)
    assert alike(elements, case.padded(cell, fill_of(case.array.fill_value)))


@given(cases(), st.data())
def test_what_is_shown_can_be_written_back(case: Case, draw: st.DataObject) -> None:
    transform = transcoder(case.array, case.shown)
    if transform is None:
        return
    cell = draw.draw(st.sampled_from(case.cells()))
    coords = coords_of(case.array, cell)
    shown_chunk = bytes(transform.show(coords, case.stored(cell)))
    assert bytes(transform.show(coords, transform.store(coords, shown_chunk))) == shown_chunk


@given(cases(), st.data())
def test_damage_is_refused_or_gives_a_chunk_of_the_right_size(case: Case, draw: st.DataObject) -> None:
    transform = transcoder(case.array, case.shown)
    if transform is None:
        return
    cell = draw.draw(st.sampled_from(case.cells()))
    damaged = bytearray(written(case, cell, draw))
    for _ in range(draw.draw(st.integers(0, 3))):
        damaged[draw.draw(st.integers(0, len(damaged) - 1))] = draw.draw(st.integers(0, 255))
    del damaged[draw.draw(st.integers(0, len(damaged))) :]
    coords = coords_of(case.array, cell)
    with suppress(ValueError):
        stored_chunk = transform.store(coords, bytes(damaged))
        if transform.name == "decoded" or not case.shown.codecs:
            transform.show(coords, stored_chunk)


# ---- single properties


@pytest.mark.parametrize("shown_encoding", [plain(), GZIP, ZSTD, BLOSC, plain(clipped=True, frame="n5")])
@pytest.mark.parametrize("codecs", [(), ("zstd",), ("gzip", "crc32c")])
def test_bytes_that_cannot_be_a_chunk_are_refused(shown_encoding: ChunkEncoding, codecs: tuple[str, ...]) -> None:
    stored_encoding = plain(codecs=tuple(map(Codec, codecs)), clipped=True, frame="bcolz")
    transform = Transcoder(array(stored_encoding), shown_encoding)
    good = laid_out(block(), shown_encoding)
    transform.store((0, 0), good)
    wrong = [b"", b"x", good[1:], laid_out(block((1, 4)), shown_encoding), laid_out(block((3, 4)), shown_encoding)]
    wrong += (
        [] if shown_encoding == ZSTD else [good[:-1]]
    )  # a frame has its size at the beginning; native layouts look no further
    for bad in wrong if shown_encoding == plain() else [*wrong, bytes(len(good))]:
        with pytest.raises(ValueError, match=r"\w"):
            transform.store((0, 0), bad)


@pytest.mark.parametrize("name", ["gzip", "zstd", "blosc"])
def test_a_payload_that_passes_is_not_decoded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not one that is too large, or of too few bytes: its header has the decoded size."""
    codec = Codec(name)
    transform = Transcoder(array(plain(codecs=(codec, Codec("crc32c")))), plain(codecs=(codec,), frame="bcolz"))
    assert transform.unwritable is None
    packed = laid_out(block(), plain(codecs=(codec,), frame="bcolz"))
    monkeypatch.setattr(encoded_chunks, "decode", None)
    assert transform.store((0, 0), packed) == PACK["crc32c"](packed[16:])


@pytest.mark.parametrize("parts", [(8, 8), (0, 16), (16, 0), (4, 4, 8)])
@pytest.mark.parametrize("codec", ["gzip", "numcodecs.zlib"])
def test_gzip_of_several_members(codec: str, parts: tuple[int, ...]) -> None:
    transform = Transcoder(array(plain(codecs=(Codec(codec), Codec("crc32c")))), GZIP)
    data, members, at = block().tobytes(), [], 0
    for n in parts:
        members.append(gzip.compress(data[at : at + n]))
        at += n
    stored_chunk = transform.store((0, 0), b"".join(members))
    assert gzip.decompress(transform.show((0, 0), stored_chunk)) == data
    with pytest.raises(ValueError, match=r"16|beyond"):
        transform.store((0, 0), b"".join(members) + gzip.compress(b"more"))
    with pytest.raises(ValueError, match="16"):
        transform.store(
            (0, 0), members[-1] if len(members[-1]) > 20 and parts[-1] not in (0, 16) else gzip.compress(b"")
        )


def test_gzip_is_stored_as_zlib_without_being_compressed_again() -> None:
    transform = Transcoder(array(plain(codecs=(Codec("numcodecs.zlib", {"level": 1}),))), GZIP)
    data = block().tobytes()
    packed, named = gzip.compress(data, 9), io.BytesIO()
    stored_chunk = transform.store((0, 0), packed)
    assert stored_chunk[2:-4] == packed[10:-8]
    assert zlib.decompress(stored_chunk) == data
    with gzip.GzipFile("name", "wb", fileobj=named) as file:
        file.write(data)
    assert zlib.decompress(transform.store((0, 0), named.getvalue())) == data
    for damaged in (packed[:-1], packed[:-8] + bytes(8), packed + b"x", packed[:12] + b"\xff" * 4 + packed[16:]):
        with pytest.raises(ValueError, match=r"gzip|decoding|too early"):
            transform.store((0, 0), damaged)


def test_zstd_frames_without_a_size() -> None:
    transform = Transcoder(array(plain(codecs=(Codec("zstd"), Codec("crc32c")))), ZSTD)
    data = block().tobytes()
    assert transform.store((0, 0), streamed_zstd(data)) == PACK["crc32c"](streamed_zstd(data))
    for wrong in (data[1:], data + b"x"):
        with pytest.raises(ValueError, match=r"zstd|expected"):
            transform.store((0, 0), streamed_zstd(wrong))


def test_a_shown_checksum_is_verified() -> None:
    transform = Transcoder(array(plain()), CRC)
    good = laid_out(block(), CRC)
    assert transform.store((0, 0), good) == good[:-4]
    with pytest.raises(ValueError, match="crc32c"):
        transform.store((0, 0), bytes(4) + good[4:])


@pytest.mark.parametrize(
    "stored_encoding", [plain(), plain(clipped=True), ZSTD, plain(">u2", clipped=True, frame="n5")]
)
def test_blocks_of_n5_at_the_edge_may_be_full_or_clipped_but_no_smaller(stored_encoding: ChunkEncoding) -> None:
    """The array of 5 x 4 has one row in its last chunk."""
    shown_encoding = plain(">u2", clipped=True, frame="n5")
    transform = transcoder(array(stored_encoding), shown_encoding) or Transcoder(array(stored_encoding), shown_encoding)
    row = block((1, 4))
    for data in (row, np.pad(row, ((0, 1), (0, 0)), constant_values=9)):
        stored_chunk = transform.store((2, 0), laid_out(data, shown_encoding))
        if stored_encoding.clipped or stored_encoding.codecs:
            assert (
                bytes(transform.show((2, 0), stored_chunk)) == laid_out(row, shown_encoding)
                or stored_encoding.frame == "n5"
            )
    for small in (block((1, 3)), block((0, 4))):
        with pytest.raises(ValueError, match="too small"):
            transform.store((2, 0), laid_out(small, shown_encoding))
    with pytest.raises(ValueError, match="too small"):
        transform.store((0, 0), laid_out(row, shown_encoding))


def test_what_cannot_be_encoded_has_a_reason() -> None:
    for codec in (Codec("n5.lz4"), Codec("numcodecs.zlib")):
        transform = Transcoder(array(plain(codecs=(codec,))), plain(">u2"))
        if codec.name == "n5.lz4":
            assert "n5.lz4" in str(transform.unwritable)
            with pytest.raises(UnsupportedError, match=r"n5\.lz4"):
                transform.store((0, 0), laid_out(block(), plain(">u2")))
        else:
            assert transform.unwritable is None
    passing = Transcoder(
        array(plain(codecs=(Codec("example.pack"), Codec("crc32c")))), plain(codecs=(Codec("example.pack"),))
    )
    assert passing.unwritable is None
    assert passing.store((0, 0), b"anything") == PACK["crc32c"](b"anything")


@pytest.mark.parametrize("codecs", [(), ("zstd",)])
@pytest.mark.parametrize("frame", ["none", "n5"])
def test_numbers_are_stored_as_bools_only_if_they_are_bools(codecs: tuple[str, ...], frame: Any) -> None:
    """N5 and precomputed volumes have no bools."""
    around = tuple(map(Codec, codecs))
    transform = Transcoder(array(plain("|b1", codecs=around)), plain("|u1", codecs=around, frame=frame))
    data = block(data_type="|u1")
    stored_chunk = transform.store((0, 0), laid_out(data % 2, plain("|u1", codecs=around, frame=frame)))
    assert np.array_equal(taken_in(stored_chunk, plain("|b1", codecs=around), (2, 4)), (data % 2).astype(bool))
    with pytest.raises(ValueError, match="0 or 1"):
        transform.store((0, 0), laid_out(data, plain("|u1", codecs=around, frame=frame)))


@pytest.mark.parametrize(("stored_type", "shown_type", "fill"), [("<U3", ">U3", "ab"), ("|S3", "|S3", "YWI=")])
def test_strings_of_fixed_length(stored_type: str, shown_type: str, fill: str) -> None:
    one = Array((3,), (2,), stored_type, plain(stored_type, 1, codecs=(Codec("zstd"),)), (0,), fill)
    transform = Transcoder(one, plain(shown_type, 1, clipped=True))
    for cell, names in ((0, ["x", "yyy"]), (1, ["z"])):
        chunk = np.array(names, shown_type).tobytes()
        stored_chunk = transform.store((cell,), chunk)
        assert transform.show((cell,), stored_chunk) == chunk
    assert taken_in(stored_chunk, one.encoding, (2,)).tolist() == np.array(["z", "ab"], stored_type).tolist()


def test_strings_pass() -> None:
    strings = ChunkEncoding("|O", (0,), serializer=Codec("vlen-utf8"), codecs=(Codec("zstd"),))
    one = Array((3,), (2,), "|O", replace(strings, codecs=(Codec("zstd"), Codec("crc32c"))), (0,), "")
    transform = Transcoder(one, strings)
    assert transform.unwritable is None
    chunk = PACK["zstd"](b"\2\0\0\0\1\0\0\0a\1\0\0\0b")
    assert transform.show((0,), transform.store((0,), chunk)) == chunk


@pytest.mark.parametrize("name", ["gzip", "zstd", "blosc", "numcodecs.zlib", "numcodecs.bz2", "numcodecs.lz4"])
def test_a_small_chunk_that_grows(name: str) -> None:
    transform = Transcoder(array(plain(">u2")), plain(codecs=(Codec(name),)))
    with pytest.raises(ValueError, match=r"grows beyond 16|chunk of 16|frame of 16|too large"):
        transform.store((0, 0), PACK[name](bytes(1 << 20)))


# ---- images: the real decoder reads what is stored


def image(serializer: str, data_type: str, shape: tuple[int, ...], **configuration: Any) -> Array:
    encoding = ChunkEncoding(
        data_type, tuple(range(len(shape))), clipped=True, serializer=Codec(f"precomputed.{serializer}", configuration)
    )
    chunk = tuple(max(1, n - 1) for n in shape[-3:])
    return Array(shape, (*shape[:-3], *chunk), data_type, encoding, tuple(range(len(shape))))


@pytest.mark.parametrize(
    ("serializer", "data_type", "channels"),
    [("png", t, c) for t in ("|u1", "<u2") for c in (0, 1, 2, 3, 4)]
    + [(s, t, 0) for s in ("compresso", "crackle") for t in ("|u1", "<u4", "<u8", "<i4")]
    + [("compressed_segmentation", t, c) for t in ("<u4", "<u8") for c in (0, 1, 2)],
)
def test_lossless_images_are_encoded(serializer: str, data_type: str, channels: int) -> None:
    one = image(serializer, data_type, (*([channels] if channels else []), 5, 7, 9), block_size=[4, 3, 2])
    rank = len(one.shape)
    shown_encoding = ChunkEncoding(np.dtype(data_type).newbyteorder(">").str, tuple(range(rank))[::-1])
    transform = Transcoder(one, shown_encoding)
    assert transform.unwritable is None
    values = (np.arange(math.prod(one.chunk)) ** 2 % 251).astype(data_type).reshape(one.chunk)
    for data in (values, values // 50, values * 0):
        for corner in (0, 1):
            coords = (0,) * (rank - 3) + (corner,) * 3
            stored_chunk = transform.store(coords, laid_out(data, shown_encoding))
            z, y, x = ((4, 6, 8), (1, 1, 1))[corner]
            part = data[..., :z, :y, :x]
            elements = taken_in(bytes(transform.show(coords, stored_chunk)), shown_encoding, one.chunk)
            assert np.array_equal(inside(elements, part), part)


@pytest.mark.parametrize(
    ("serializer", "data_type"), [("jpeg", "|u1"), ("jxl", "|u1"), ("kempressed", "<f4"), ("fpzip", "<f4")]
)
def test_lossy_images_are_not(serializer: str, data_type: str) -> None:
    one = image(serializer, data_type, (1, 5, 7, 9))
    transform = Transcoder(one, ChunkEncoding(data_type, (0, 1, 2, 3)))
    assert transform.unwritable == f"chunks cannot be written: encoding {serializer!r} is lossy"
