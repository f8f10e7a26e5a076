"""Transcoding against the model of encoded chunks."""

from __future__ import annotations

import gzip
import struct
import zlib
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfs.codecs.encoders import encode
from shardfs.codecs.transcode import FillValue, Transcoder, transcoder
from shardfs.codecs.zlib_streams import MAX_DECODED
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
    laid_out,
    plain,
    streamed_zstd,
    taken_in,
)

# ---- any encoding shown as any other


@given(cases())
def test_every_encoding_as_every_other(case: Case) -> None:
    array, shown_encoding = case.array, case.shown
    transform = transcoder(array, shown_encoding)
    fill = fill_of(array.fill_value)
    for cell in case.cells():
        stored_chunk, coords = case.stored(cell), coords_of(array, cell)
        chunk = stored_chunk if transform is None else bytes(transform.show(coords, stored_chunk))
        inside = case.data[case.box(cell)]
        shape = inside.shape if shown_encoding.clipped else array.chunk
        elements = taken_in(chunk, shown_encoding, shape)
        assert alike(elements[tuple(slice(0, n) for n in inside.shape)], inside)
        if array.encoding.clipped and not shown_encoding.clipped:
            assert alike(elements, case.padded(cell, fill))
        if transform is not None:
            told = transform.sizes(np.array([coords], np.uint64), np.array([len(stored_chunk)], np.int64))
            assert told[0] in (-1, len(chunk))
            if not [c for c in shown_encoding.codecs if c.name != "crc32c"]:
                assert told[0] == len(chunk), "known by arithmetic"


@given(cases())
def test_chunks_that_are_not_stored(case: Case) -> None:
    array, shown_encoding = case.array, case.shown
    filler, fill = FillValue(array, shown_encoding), fill_of(array.fill_value)
    for cell in case.cells():
        coords = coords_of(array, cell)
        chunk = filler.show(coords)
        shape = case.data[case.box(cell)].shape if shown_encoding.clipped else array.chunk
        assert alike(taken_in(chunk, shown_encoding, shape), np.full(shape, fill, case.data.dtype))
        assert filler.sizes(np.array([coords], np.uint64))[0] in (-1, len(chunk))


@given(cases(), st.data())
def test_damage_is_told_or_has_the_size_that_was_told(case: Case, data: st.DataObject) -> None:
    transform = transcoder(case.array, case.shown)
    if transform is None:
        return
    cell = data.draw(st.sampled_from(case.cells()))
    damaged = bytearray(case.stored(cell))
    for _ in range(data.draw(st.integers(0, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    del damaged[data.draw(st.integers(0, len(damaged))) :]
    coords = coords_of(case.array, cell)
    told = transform.sizes(np.array([coords], np.uint64), np.array([len(damaged)], np.int64))[0]
    assert told >= -1
    with suppress(ValueError):
        assert told in (-1, len(transform.show(coords, bytes(damaged))))


@given(cases())
def test_the_same_is_no_work(case: Case) -> None:
    assert transcoder(case.array, case.array.encoding) is None


# ---- single properties


@pytest.mark.parametrize(
    ("stored_encoding", "shown_encoding"),
    [
        (plain(codecs=(Codec("zstd"), Codec("crc32c"))), plain(codecs=(Codec("zstd"),))),
        (plain(codecs=(Codec("zstd"),)), plain(codecs=(Codec("zstd"),), frame="n5")),
        (plain("|b1", codecs=(Codec("gzip"),)), plain("|u1", codecs=(Codec("gzip"),), frame="n5")),
        (plain(frame="bcolz", codecs=(Codec("blosc"),)), plain(codecs=(Codec("blosc", {"cname": "lz4"}),))),
    ],
)
def test_a_payload_that_is_the_same_passes(stored_encoding: ChunkEncoding, shown_encoding: ChunkEncoding) -> None:
    transform = transcoder(array(stored_encoding), shown_encoding)
    assert isinstance(transform, Transcoder)
    assert transform.name == "reframed"
    chunk = laid_out(block(data_type=stored_encoding.data_type), stored_encoding)
    shown_chunk = bytes(transform.show((0, 0), chunk))
    assert transform.sizes(np.array([[0, 0]], np.uint64), np.array([len(chunk)])) == [len(shown_chunk)]
    payload = laid_out(block(data_type=stored_encoding.data_type), replace(shown_encoding, frame="none"))
    assert shown_chunk.endswith(payload)


def test_axes_of_one_element_do_not_count() -> None:
    """Wherever they stand, nothing moves."""
    stored_encoding = ChunkEncoding("<u2", (2, 0, 1), codecs=(Codec("zstd"),))
    one = Array((3, 4, 5), (2, 1, 1), "<u2", stored_encoding, (0, 1, 2))
    assert transcoder(one, ChunkEncoding("<u2", (0, 1, 2), codecs=(Codec("zstd"),))) is None
    assert transcoder(replace(one, chunk=(2, 1, 2)), ChunkEncoding("<u2", (0, 1, 2))) is not None


def test_parameters_matter_where_decoding_needs_them() -> None:
    def shuffled(size: int) -> ChunkEncoding:
        return plain(codecs=(Codec("numcodecs.shuffle", {"elementsize": size}),))

    assert transcoder(array(shuffled(2)), shuffled(2)) is None
    assert transcoder(array(shuffled(2)), plain()) is not None
    transform = transcoder(array(shuffled(2)), shuffled(4))
    assert transform is not None
    assert transform.name == "decoded"


@given(st.integers(1, 300))
def test_zstd_frames_that_do_not_tell_their_size(n: int) -> None:
    stored_encoding = plain("<u2", 1, codecs=(Codec("zstd"),))
    one = array(stored_encoding, (n,), (n,))
    transform = Transcoder(one, plain(">u2", 1))
    values = block((n,))
    assert transform.show((0,), streamed_zstd(values.tobytes())) == values.astype(">u2").tobytes()
    for wrong in (values[1:], np.append(values, 1)):
        with pytest.raises(ValueError, match=r"zstd|expected"):
            transform.show((0,), streamed_zstd(wrong.astype("<u2").tobytes()))


def test_a_block_of_n5_tells_its_shape() -> None:
    """Whatever the edge of the array would make it."""
    stored_encoding = plain(">u2", clipped=True, frame="n5")
    transform = Transcoder(array(stored_encoding), plain())
    whole, cut = block((2, 4), ">u2"), block((1, 3), ">u2")
    for cell in ((0, 0), (2, 0)):
        assert transform.show(cell, laid_out(whole, stored_encoding)) == whole.astype("<u2").tobytes()
        padded = np.zeros((2, 4), "<u2")
        padded[:1, :3] = cut
        assert transform.show(cell, laid_out(cut, stored_encoding)) == padded.tobytes()
    for bad in (
        b"",
        b"\0\3" + laid_out(whole, stored_encoding)[2:],
        laid_out(block((3, 4), ">u2"), stored_encoding),
        b"\0\0\0\3" + bytes(60),
    ):
        with pytest.raises(ValueError, match="block"):
            transform.show((0, 0), bad)


def test_a_block_of_variable_length_is_one_of_its_elements() -> None:
    stored_encoding = plain(">u2", clipped=True, frame="n5")
    whole = block((2, 4), ">u2")
    chunk = struct.pack(">HHIII", 1, 2, 4, 2, 8) + whole.tobytes()
    assert Transcoder(array(stored_encoding), plain()).show((0, 0), chunk) == whole.astype("<u2").tobytes()
    with pytest.raises(ValueError, match="variable"):
        Transcoder(array(stored_encoding), plain()).show((0, 0), struct.pack(">HHIII", 1, 2, 4, 2, 3) + whole.tobytes())


def test_a_small_block_inside_cannot_be_shown_at_a_size_it_has_not() -> None:
    """Its size was told without reading it: every other block there is whole."""
    stored_encoding = plain(">u2", clipped=True, frame="n5", codecs=(Codec("gzip"),))
    transform = Transcoder(array(stored_encoding), plain(">u2", codecs=(Codec("gzip"),)))
    with pytest.raises(ValueError, match="stored before the array grew"):
        transform.show((0, 0), laid_out(block((1, 1), ">u2"), stored_encoding))


def test_zlib_is_shown_as_gzip_without_being_compressed_again() -> None:
    zipped = zlib.compress(bytes(range(16)), 9)
    stored_encoding, shown_encoding = (
        plain(codecs=(Codec("numcodecs.zlib"), Codec("crc32c"))),
        plain(codecs=(Codec("gzip"),)),
    )
    transform = transcoder(array(stored_encoding), shown_encoding)
    assert transform is not None
    chunk = encode([Codec("crc32c")], zipped)
    (size,) = transform.sizes(np.zeros((1, 2), np.uint64), np.array([len(chunk)], np.int64))
    shown_chunk = bytes(transform.show((0, 0), chunk))
    assert (len(shown_chunk), gzip.decompress(shown_chunk), shown_chunk[10:-8]) == (
        size,
        bytes(range(16)),
        zipped[2:-4],
    )
    for damaged in (zipped[:-1], zipped + b"more", zipped[:-1] + b"x", b"", b"x", zlib.compress(bytes(1 << 20))):
        with pytest.raises(ValueError, match=r"zlib|stream ends too early|expected|beyond|cannot be a chunk of"):
            transform.show((0, 0), encode([Codec("crc32c")], damaged))


def test_what_cannot_be_undone_is_refused_at_once() -> None:
    for stored_encoding in (plain(codecs=(Codec("example.pack"),)), plain(serializer=Codec("example.image"))):
        with pytest.raises(UnsupportedError, match=r"example\..* must be undone"):
            transcoder(array(stored_encoding), plain(">u2"))
    unknown = plain(codecs=(Codec("example.pack"), Codec("crc32c")))
    assert transcoder(array(unknown), plain(codecs=(Codec("example.pack"),))) is not None, "only the sum is cut"


def test_large_chunks_are_not_made() -> None:
    huge = (1 << 20, 1 << 20)
    stored_encoding = plain(codecs=(Codec("gzip"),), clipped=True)
    for make in (
        lambda: transcoder(array(stored_encoding, huge, huge), plain()),
        lambda: FillValue(array(stored_encoding, huge, huge), plain()),
    ):
        with pytest.raises(UnsupportedError, match="limit"):
            make()
    n5 = plain(">u2", codecs=(Codec("gzip"),), clipped=True, frame="n5")
    transform = transcoder(array(n5, huge, huge), plain(">u2", codecs=(Codec("gzip"),)))
    assert transform is not None, "blocks pass"
    with pytest.raises(ValueError, match="limit"):
        transform.show((0, 0), laid_out(block((1, 1), ">u2"), n5))


@pytest.mark.parametrize("name", ["gzip", "zstd", "numcodecs.bz2", "numcodecs.zlib", "numcodecs.lz4", "blosc"])
def test_a_small_chunk_that_grows(name: str) -> None:
    """It is stopped at the size that a chunk of this array has, not at the largest of all."""
    stored_encoding = plain(codecs=(Codec(name),))
    with pytest.raises(ValueError, match=r"grows beyond 16|chunk of 16|frame of 16|too large"):
        Transcoder(array(stored_encoding), plain(">u2")).show((0, 0), PACK[name](bytes(1 << 20)))
    assert MAX_DECODED > 1 << 20


def test_a_blosc_chunk_that_says_more_than_it_has() -> None:
    packed = PACK["blosc"](bytes(range(16)))
    with pytest.raises(ValueError, match="Blosc"):
        Transcoder(array(plain(codecs=(Codec("blosc"),))), plain(">u2")).show((0, 0), packed[:-1])
