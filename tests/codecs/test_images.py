"""Encodings of voxels: decoded as by the libraries that wrote them, and nothing is believed that a header says."""

from __future__ import annotations

import io
import math
import struct
import sys
import zlib
from typing import TYPE_CHECKING, Any

import compresso
import crackle
import fpzip
import imagecodecs
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from shardfs.codecs import images
from shardfs.codecs.sandbox import SANDBOXES, Crash

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.datasets import Array as Data

_BLOCK = {"block_size": [8, 4, 2]}


def _decode(name: str, data: bytes, like: Data, configuration: Any = None) -> Data:
    return images.decode(name, data, like.shape, like.dtype, configuration or {})


def _by_tensorstore(path: Path, data: Data, encoding: str, **scale: Any) -> tuple[bytes, Data]:
    """The only chunk of a volume of this (c, z, y, x), and what tensorstore reads of it.

    Where the encoding is lossless, tensorstore reads the same from a chunk that shardfs encodes.
    """
    spec = {
        "driver": "neuroglancer_precomputed",
        "kvstore": {"driver": "file", "path": f"{path}/"},
        "multiscale_metadata": {"data_type": data.dtype.name, "num_channels": data.shape[0], "type": "image"},
        "scale_metadata": {
            "size": data.shape[:0:-1],
            "chunk_size": data.shape[:0:-1],
            "encoding": encoding,
            "resolution": [1, 1, 1],
            **scale,
        },
    }
    store = ts.open(spec, create=True).result()
    store.write(data.T).result()
    (chunk,) = (file for file in path.rglob("*-*_*-*_*-*"))
    written, read = chunk.read_bytes(), np.asarray(store.read().result()).T
    if not images.is_lossy(encoding):
        block = scale.get("compressed_segmentation_block_size")
        chunk.write_bytes(images.encode(encoding, data, {"block_size": block}))
        np.testing.assert_array_equal(np.asarray(store.read().result()).T, read)
    return written, read


def _smooth(shape: Sequence[int], dtype: str) -> Data:
    """Something as images are."""
    grid = np.indices(shape).sum(axis=0)
    waves: Data = (60 + 50 * np.sin(grid / 5)).astype(dtype)
    return waves


@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg(channels: int, tmp_path: Path) -> None:
    data = _smooth((channels, 5, 17, 23), "uint8")
    chunk, read = _by_tensorstore(tmp_path, data, "jpeg", jpeg_quality=80)
    np.testing.assert_array_equal(_decode("jpeg", chunk, data), read)
    assert not np.array_equal(read, data)


@pytest.mark.parametrize(("dtype", "channels"), [(t, c) for t in ("uint8", "uint16") for c in (1, 2, 3, 4)])
def test_png(dtype: str, channels: int, tmp_path: Path) -> None:
    data = (np.arange(channels * 5 * 7 * 9) * 257).astype(dtype).reshape(channels, 5, 7, 9)
    chunk, read = _by_tensorstore(tmp_path, data, "png")
    np.testing.assert_array_equal(read, data)
    np.testing.assert_array_equal(_decode("png", chunk, data), data)


@given(st.data())
def test_compressed_segmentation(tmp_path_factory: pytest.TempPathFactory, draw: st.DataObject) -> None:
    shape = [draw.draw(st.integers(1, n)) for n in (2, 9, 11, 20)]
    dtype = draw.draw(st.sampled_from(("uint32", "uint64")))
    block = [draw.draw(st.integers(1, 9)) for _ in range(3)]
    kinds = draw.draw(st.sampled_from((1, 2, 3, 17, 300)))
    rng = np.random.default_rng(draw.draw(st.integers(0, 99)))
    ids = rng.integers(0, np.iinfo(dtype).max, kinds, dtype, endpoint=True)
    data = ids[rng.integers(0, kinds, shape)]
    path = tmp_path_factory.mktemp("cseg")
    if math.prod(shape) == 0 or not data.any():
        return  # nothing is stored
    chunk, read = _by_tensorstore(path, data, "compressed_segmentation", compressed_segmentation_block_size=block)
    np.testing.assert_array_equal(read, data)
    np.testing.assert_array_equal(_decode("compressed_segmentation", chunk, data, {"block_size": block}), data)


def test_compressed_segmentation_of_many_slabs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = (np.indices((1, 40, 30, 20)).sum(axis=0) // 7).astype("uint64") << 33
    chunk, _ = _by_tensorstore(tmp_path, data, "compressed_segmentation", compressed_segmentation_block_size=[8, 8, 8])
    monkeypatch.setattr(images, "SLAB", 2000)
    np.testing.assert_array_equal(_decode("compressed_segmentation", chunk, data, {"block_size": [8, 8, 8]}), data)


_LABELS = (np.indices((6, 13, 20)).sum(axis=0) // 9).astype("uint32")  # z, y, x
_FLOATS = np.sin(np.arange(2 * 3 * 4 * 5, dtype="float32")).reshape(2, 3, 4, 5)  # c, z, y, x


def test_labels_of_compresso_and_crackle() -> None:
    for dtype in ("uint8", "uint32", "uint64"):
        labels = _LABELS.astype(dtype)
        assert np.array_equal(_decode("compresso", compresso.compress(np.asfortranarray(labels.T)), labels), labels)
        assert np.array_equal(_decode("crackle", crackle.compress(np.asfortranarray(labels.T)), labels), labels)
        assert np.array_equal(compresso.decompress(images.encode("compresso", labels, {})), labels.T)
        assert np.array_equal(crackle.decompress(images.encode("crackle", labels, {})), labels.T)


def test_fpzip_and_kempressed() -> None:
    data = fpzip.compress(np.asfortranarray(_FLOATS.T), order="F")
    np.testing.assert_array_equal(_decode("fpzip", data, _FLOATS), _FLOATS)
    with pytest.raises(ValueError, match="lossy"):
        images.encode("fpzip", _FLOATS, {})
    swapped = np.asfortranarray(2 + np.swapaxes(_FLOATS.T, 2, 3))
    data = fpzip.compress(swapped, order="F")
    expected = np.swapaxes(fpzip.decompress(data, order="F"), 3, 2) - 2.0
    np.testing.assert_array_equal(_decode("kempressed", data, _FLOATS), expected.T)


def test_what_a_library_changes_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    other = compresso.compress(np.asfortranarray(_LABELS.T + 1))
    monkeypatch.setattr(compresso, "compress", lambda labels: other)
    with pytest.raises(ValueError, match="without loss"):
        images.encode_here("compresso", _LABELS, {})


@pytest.mark.parametrize("channels", [1, 3])
def test_jxl(channels: int) -> None:
    data = _smooth((channels, 5, 16, 24), "uint8")
    pixels = np.moveaxis(data.reshape(channels, 80, 24), 0, -1)
    kind = "RGB" if channels == 3 else "GRAY"
    chunk = imagecodecs.jpegxl_encode(pixels if channels == 3 else pixels[..., 0], photometric=kind, lossless=True)
    np.testing.assert_array_equal(_decode("jxl", bytes(chunk), data), data)


# ---------------------------------------------------------------------------------------------------- what is hostile


def _png_header(width: int, height: int) -> bytes:
    def part(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + part(b"IDAT", zlib.compress(b"")) + part(b"IEND", b"")


def _saved(kind: str, pixels: Data) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


_SMALL: dict[str, tuple[bytes, Data, Any]] = {
    "jpeg": (_saved("JPEG", np.zeros((8, 12), "uint8")), np.zeros((2, 4, 12), "uint8"), None),
    "png": (_saved("PNG", np.zeros((8, 12), "uint8")), np.zeros((2, 4, 12), "uint8"), None),
    "jxl": (bytes(imagecodecs.jpegxl_encode(np.zeros((8, 12), "uint8"))), np.zeros((2, 4, 12), "uint8"), None),
    "compresso": (compresso.compress(np.asfortranarray(_LABELS.T)), _LABELS, None),
    "crackle": (crackle.compress(np.asfortranarray(_LABELS.T)), _LABELS, None),
    "fpzip": (fpzip.compress(np.asfortranarray(_FLOATS.T), order="F"), _FLOATS, None),
    "kempressed": (fpzip.compress(np.swapaxes(_FLOATS.T, 2, 3), order="F"), _FLOATS, None),
    "compressed_segmentation": (
        np.array([1, 2 | 1 << 24, 4, 7, 9, 0b1001], "<u4").tobytes(),
        np.array([[[9, 7, 7, 9]]], "uint32"),
        {"block_size": [4, 1, 1]},
    ),
}


@pytest.mark.parametrize("name", sorted(_SMALL))
def test_a_chunk_of_another_shape_is_refused_by_its_header(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, like, configuration = _SMALL[name]
    assert images.decode(name, data, like.shape, like.dtype, configuration or {}).shape == like.shape
    if name == "compressed_segmentation":
        return  # it has no header
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", _fail)
    with pytest.raises(ValueError, match="expected"):
        images.decode(name, data, (*like.shape[:-1], like.shape[-1] + 1), like.dtype, {})


def _fail(*_: Any, **__: Any) -> None:
    raise AssertionError("it is decoded")


@pytest.mark.parametrize("name", sorted(_SMALL))
def test_damaged_chunks_are_refused_or_decoded_to_the_same_shape(name: str) -> None:
    data, like, configuration = _SMALL[name]
    for cut in (0, 1, 3, 4, 8, len(data) // 2, len(data) - 1):
        _attempt(name, data[:cut], like, configuration)
    rng = np.random.default_rng(1)
    for _ in range(12 if images.ENCODINGS[name].module in SANDBOXES else 200):  # it takes a while to start again
        damaged = bytearray(data)
        damaged[rng.integers(len(data))] ^= 1 << rng.integers(8)
        _attempt(name, bytes(damaged), like, configuration)


def _attempt(name: str, data: bytes, like: Data, configuration: Any) -> None:
    try:
        elements = images.decode(name, data, like.shape, like.dtype, configuration or {})
    except ValueError:
        return
    assert (elements.shape, elements.dtype) == (like.shape, like.dtype)


def test_a_library_that_crashes_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    data, like, _ = _SMALL["compresso"]
    np.testing.assert_array_equal(_decode("compresso", data, like), like)

    def crash(*_: Any) -> None:
        raise Crash("status -11")

    monkeypatch.setattr(SANDBOXES["compresso"], "call", crash)
    with pytest.raises(ValueError, match="compresso: compresso crashes on it"):
        _decode("compresso", data, like)


@pytest.mark.parametrize("name", ["jxl", "fpzip"])
def test_a_header_does_not_decide_how_much_memory_is_allocated(name: str) -> None:
    """A sound chunk of 320 MiB, where one of 64 elements is expected, is never decoded to the end."""
    if name == "jxl":
        data = bytes(imagecodecs.jpegxl_encode(np.zeros((320 << 10, 1 << 10), "uint8"), effort=1))
    else:
        data = fpzip.compress(np.zeros((1024, 1024, 80), "float32", order="F"), order="F")
    with pytest.raises(ValueError, match=name) as refused:
        images.decode(name, data, (4, 4, 4), np.dtype("uint8" if name == "jxl" else "float32"), {})
    assert "expected" not in str(refused.value)


@pytest.mark.parametrize("size", [(2**31 - 1, 2**31 - 1), (0, 0), (1, 2**20)])
def test_pictures_of_any_size_are_refused(size: tuple[int, int]) -> None:
    for dtype, shape in (("uint8", (4, 4, 4)), ("uint16", (3, 4, 4, 4))):
        with pytest.raises(ValueError, match=r"png|expected"):
            images.decode("png", _png_header(*size), shape, np.dtype(dtype), {})


@pytest.mark.parametrize("block", [[0x7FFFFFFF] * 3, [2**40, 1, 1], [2**25, 1, 1]])
def test_blocks_of_any_size_are_refused(block: list[int]) -> None:
    with pytest.raises(ValueError, match="more than the limit of"):
        images.decode("compressed_segmentation", bytes(64), (4, 4, 4), np.dtype("uint32"), {"block_size": block})
    with pytest.raises(ValueError, match="more than the limit of"):
        images.encode("compressed_segmentation", np.zeros((4, 4, 4), "uint32"), {"block_size": block})


@pytest.mark.parametrize(
    ("name", "dtype", "channels", "why"),
    [
        ("jpeg", "uint8", 3, ""),
        ("jpeg", "uint8", 2, "encoding 'jpeg' cannot hold 2 channels of uint8"),
        ("jpeg", "uint16", 1, "encoding 'jpeg' cannot hold 1 channels of uint16"),
        ("png", "uint16", 3, ""),
        ("png", "float32", 1, "encoding 'png' cannot hold 1 channels of float32"),
        ("compresso", "uint64", 2, "encoding 'compresso' cannot hold 2 channels of uint64"),
        ("zfpc", "float32", 1, "encoding 'zfpc' is unknown"),
    ],
)
def test_what_cannot_be_decoded_is_known_beforehand(name: str, dtype: str, channels: int, why: str) -> None:
    assert images.lacking(name, dtype, channels) == why


@pytest.mark.parametrize(
    ("name", "module", "dtype", "channels", "why"),
    [
        ("png", "PIL.Image", "uint16", 1, "encoding 'png' needs Pillow: pip install Pillow"),
        ("crackle", "crackle", "uint8", 1, "encoding 'crackle' needs crackle-codec: pip install crackle-codec"),
        ("png", "imagecodecs", "uint16", 2, "encoding 'png' needs imagecodecs: pip install imagecodecs"),
    ],
)
def test_what_is_not_installed_is_named(
    name: str, module: str, dtype: str, channels: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert images.lacking(name, dtype, channels) == why
