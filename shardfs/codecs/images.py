"""The voxel encodings of precomputed volumes: from bytes to elements, and back if the encoding is lossless. Pure.

Sources: https://github.com/google/neuroglancer/blob/master/src/datasource/precomputed/volume.md, and cloud-volume for
encodings that this page lacks. Optional libraries do the work (the extras `images` and `codecs`). No header decides how
much memory is allocated: the shape in it is checked first, or a sandbox process with a limit decodes the chunk.
"""

from __future__ import annotations

import importlib
import io
import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardfs.codecs.sandbox import SANDBOXES, Crash
from shardfs.codecs.zlib_streams import MAX_DECODED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from shardfs.model.values import Coords

    Elements = npt.NDArray[Any]

PREFIX = "precomputed."
"""Prefix of the encodings' names as serializers (`arrays.ChunkEncoding`): other formats may use the same names."""

RANK = 4
"""Axes of a chunk with several channels; channels are the first axis."""

SLAB = 1 << 18
"""Voxels of a compressed segmentation that are decoded at once, or one block if that is larger."""

MAX_BLOCK = 1 << 24
"""Most voxels of one block of a compressed segmentation."""


class ImageShape(NamedTuple):
    """The shape and data type of a chunk, and the parameters of its encoding."""

    channels: int
    z: int
    y: int
    x: int
    dtype: np.dtype[Any]
    configuration: Mapping[str, Any]

    @property
    def voxels(self) -> int:
        """The number of voxels of one channel."""
        return self.z * self.y * self.x

    def require(self, in_header: Coords, wanted: Coords) -> None:
        """Raise ValueError if the shape in a header is not the wanted one."""
        if in_header != wanted:
            raise ValueError(f"{' x '.join(map(str, wanted))} elements expected, its header says {in_header}")


class Encoding(NamedTuple):
    """A decoder, an encoder, and what they support.

    Args:
        encode: makes a chunk of elements (c, z, y, x); None if the encoding is lossy. fpzip counts as lossy: the
            library changes some random elements, and writes beyond its buffer.
        types: supported element types, in numpy's notation without byte order.
        channels: supported numbers of channels.
        module: the module that decodes; in a sandbox process if it is one of `SANDBOXES`.
        package: the name under which pip installs the module.
    """

    decode: Callable[[Any, bytes, ImageShape], Elements]
    encode: Callable[[Any, Elements, Mapping[str, Any]], bytes] | None
    types: Sequence[str]
    channels: Sequence[int]
    module: str
    package: str


def encoding_of(name: str, dtype: npt.DTypeLike, channels: int) -> Encoding | None:
    """The decoder and encoder for chunks of this encoding; None if shardfs does not know the encoding.

    The data type or the number of channels may be unsupported, or the module not installed: see `lacking`.
    """
    if name == "png" and np.dtype(dtype).itemsize > 1 and channels > 1:
        # Pillow would truncate such elements to 8 bits.
        return Encoding(_png_deep, _to_png_deep, ("u2",), tuple(MODES), "imagecodecs", "imagecodecs")
    return ENCODINGS.get(name)


def lacking(name: str, dtype: npt.DTypeLike, channels: int) -> str:
    """Why this installation cannot decode chunks of this encoding; "" if it can."""
    encoding = encoding_of(name, dtype, channels)
    if encoding is None:
        return f"encoding {name!r:.80} is unknown"
    if np.dtype(dtype).str[1:] not in encoding.types or channels not in encoding.channels:
        return f"encoding {name!r} cannot hold {channels} channels of {np.dtype(dtype).name}"
    try:
        importlib.import_module(encoding.module)
    except ImportError:
        return f"encoding {name!r} needs {encoding.package}: pip install {encoding.package}"
    return ""


def decode(name: str, data: bytes, shape: Coords, dtype: np.dtype[Any], configuration: Mapping[str, Any]) -> Elements:
    """Return the elements of a chunk of shape (c, z, y, x) or (z, y, x), as a read-only array where possible.

    Raise ValueError, with the reason, if that fails.
    """
    encoding = encoding_of(name, dtype, _channels(shape))
    if encoding is None:
        raise ValueError(f"encoding {name!r:.80} is unknown")
    if encoding.module not in SANDBOXES:
        return decode_here(name, data, shape, dtype, configuration)
    nbytes, arguments = math.prod(shape) * dtype.itemsize, {"shape": shape, "dtype": dtype.str}
    decoded = _in_sandbox(decode_sandboxed, data, name, nbytes, **arguments, configuration=dict(configuration))
    if len(decoded) != nbytes:
        raise ValueError(f"{name}: {nbytes} bytes expected, {len(decoded)} found after decoding")
    return np.frombuffer(decoded, dtype).reshape(shape)


def _in_sandbox(function: Callable[..., Any], data: Any, name: str, limit: int, **arguments: Any) -> bytearray:
    """Call a function in a sandbox process. Raise ValueError if it crashes, or returns more than `limit` bytes."""
    encoding = ENCODINGS[name]
    try:
        return SANDBOXES[encoding.module].call(function, data, {"name": name, **arguments}, limit)
    except Crash as e:
        raise ValueError(f"{name}: {encoding.package} crashes on it ({e})") from None


def decode_sandboxed(
    data: bytearray, name: str, shape: Sequence[int], dtype: str, configuration: Mapping[str, Any]
) -> memoryview:
    """`decode_here`, which `_in_sandbox` calls in a sandbox process: the elements in C order."""
    elements = decode_here(name, bytes(data), tuple(shape), np.dtype(dtype), configuration)
    return np.ascontiguousarray(elements).reshape(-1).view(np.uint8).data


def encode_sandboxed(
    data: bytearray, name: str, shape: Sequence[int], dtype: str, configuration: Mapping[str, Any]
) -> bytes:
    """`encode_here`, which `_in_sandbox` calls in a sandbox process, of elements in C order."""
    return encode_here(name, np.frombuffer(data, dtype).reshape(shape), configuration)


def is_lossy(name: str) -> bool:
    """Whether decoding may not return exactly the encoded elements, so that `encode` refuses."""
    return name in ENCODINGS and ENCODINGS[name].encode is None


def encode(name: str, elements: Elements, configuration: Mapping[str, Any]) -> bytes:
    """Encode a chunk of shape (c, z, y, x) or (z, y, x). Raise ValueError, with the reason, if that fails."""
    encoding = encoding_of(name, elements.dtype, _channels(elements.shape))
    if encoding is None or encoding.encode is None:
        raise ValueError(f"encoding {name!r:.80} is lossy or unknown")
    if encoding.module not in SANDBOXES:
        return encode_here(name, elements, configuration)
    arguments = {"shape": elements.shape, "dtype": elements.dtype.str, "configuration": dict(configuration)}
    return bytes(_in_sandbox(encode_sandboxed, elements.tobytes(), name, MAX_DECODED, **arguments))


def encode_here(name: str, elements: Elements, configuration: Mapping[str, Any]) -> bytes:
    """`encode` in this process. What a library encodes that may crash is decoded again, and compared.

    Raise ValueError, with the reason, if that fails, also if the encoding is lossy.
    """
    encoding = encoding_of(name, elements.dtype, _channels(elements.shape)) or ENCODINGS[name]
    if encoding.encode is None:
        raise ValueError(f"{name}: lossy")
    try:
        library = importlib.import_module(encoding.module)
        data = bytes(encoding.encode(library, elements.reshape(-1, *elements.shape[-3:]), configuration))
    except Exception as e:  # each library raises its own exception
        raise ValueError(f"{name}: {type(e).__name__}: {e}") from e
    if encoding.module in SANDBOXES:
        again = decode_here(name, data, elements.shape, elements.dtype, configuration)
        if again.tobytes() != elements.tobytes():
            raise ValueError(f"{name}: {encoding.package} does not encode these elements without loss")
    return data


def _channels(shape: Coords) -> int:
    return shape[0] if len(shape) == RANK else 1


def decode_here(
    name: str, data: bytes, shape: Coords, dtype: np.dtype[Any], configuration: Mapping[str, Any]
) -> Elements:
    """`decode` in this process, which damaged data may crash (`SANDBOXES`). Raise ValueError as `decode`."""
    channels, (z, y, x) = _channels(shape), shape[-3:]
    encoding = encoding_of(name, dtype, channels) or ENCODINGS[name]
    chunk = ImageShape(channels, z, y, x, dtype, configuration)
    try:
        elements = encoding.decode(importlib.import_module(encoding.module), data, chunk)
    except ValueError:
        raise
    except Exception as e:  # each library raises its own exception for damaged input
        raise ValueError(f"{name}: {type(e).__name__}: {e}") from e
    if elements.size != math.prod(shape):
        raise ValueError(f"{name}: {math.prod(shape)} elements expected, {elements.size} found")
    return elements.reshape(shape).astype(dtype, copy=False)


# ---- pictures: any width and height with the right number of pixels; the channels of a pixel are adjacent


def _of_pixels(pixels: Elements, chunk: ImageShape) -> Elements:
    if pixels.dtype != chunk.dtype or pixels.size != chunk.voxels * chunk.channels:
        raise ValueError(f"{chunk[:4]} {chunk.dtype} expected, the picture has {pixels.shape} {pixels.dtype}")
    return pixels.reshape(chunk.voxels, chunk.channels).T


MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
"""Pillow's modes by the number of 8-bit channels. The only 16-bit mode of Pillow is gray."""


def _pillow(pillow: Any, data: bytes, chunk: ImageShape) -> Elements:
    with pillow.open(io.BytesIO(data), formats=["JPEG", "PNG"]) as picture:
        chunk.require((picture.width * picture.height,), (chunk.voxels,))
        wanted = MODES.get(chunk.channels) if chunk.dtype.itemsize == 1 else "I;16"
        if picture.mode != wanted:
            raise ValueError(f"a picture of Pillow's mode {wanted} expected, found {picture.mode}")
        return _of_pixels(np.asarray(picture), chunk)


def _png_deep(imagecodecs: Any, data: bytes, chunk: ImageShape) -> Elements:
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))  # IHDR is the first PNG chunk
    chunk.require((width * height,), (chunk.voxels,))
    return _of_pixels(imagecodecs.png_decode(data), chunk)


def _pixels(elements: Elements) -> Elements:
    """A picture of (height, width, channels), in which the planes of z are one below the other."""
    channels, z, y, x = elements.shape
    return np.ascontiguousarray(elements.reshape(channels, -1).T).reshape(z * y, x, channels)


def _to_png(pillow: Any, elements: Elements, _: Mapping[str, Any]) -> bytes:
    pixels, out = _pixels(elements), io.BytesIO()
    pillow.fromarray(pixels[..., 0] if len(elements) == 1 else pixels).save(out, "PNG")
    return out.getvalue()


def _to_png_deep(imagecodecs: Any, elements: Elements, _: Mapping[str, Any]) -> bytes:
    return bytes(imagecodecs.png_encode(_pixels(elements)))


def _jxl(jpegxl: Any, data: bytes, chunk: ImageShape) -> Elements:
    return _of_pixels(jpegxl.jpegxl_decode(data, index=0, numthreads=1), chunk)


# ---- segmentations


def _compressed_segmentation(_: Any, data: bytes, chunk: ImageShape) -> Elements:
    """See https://github.com/google/neuroglancer/blob/master/src/sliceview/compressed_segmentation/README.md"""
    if len(data) % 4 or len(data) < 4 * chunk.channels or chunk.dtype.itemsize not in (4, 8):
        raise ValueError(f"{len(data)} bytes of {chunk.dtype} cannot be a compressed segmentation")
    words = np.frombuffer(data, "<u4")
    block = tuple(chunk.configuration["block_size"])
    out = np.empty((chunk.channels, chunk.z, chunk.y, chunk.x), chunk.dtype)
    for c in range(chunk.channels):
        _Blocks(words[words.item(c) :], block[::-1], out[c]).decode()
    return out


class _Blocks:
    """Decoder for one channel of a compressed segmentation.

    The header has two words for each block: the position of its table of values with the number of bits of each index
    into the table, and the position of these indices. Positions count words. Blocks, and indices in a block, are in C
    order of (z, y, x). Blocks at the edge are stored in full. All blocks with the same number of bits are decoded at
    once, up to `SLAB` voxels.
    """

    def __init__(self, words: npt.NDArray[np.uint32], block: Coords, out: Elements) -> None:
        self._words = words
        self._block = block
        self._out = out
        self._voxels = math.prod(block)
        self._wide = out.dtype.itemsize // 4
        self._grid = tuple(-(-n // b) for n, b in zip(out.shape, block, strict=True))
        count = math.prod(self._grid)
        if self._voxels > MAX_BLOCK:
            raise ValueError(f"a block size of {block[::-1]} is more than the limit of {MAX_BLOCK} voxels")
        if len(words) < 2 * count:
            raise ValueError(f"{len(words)} words are too few for a compressed segmentation of {count} blocks")
        head = words[: 2 * count].astype(np.int64)
        self._tables = head[::2] & 0xFFFFFF
        self._bits = head[::2] >> 24
        self._indices = head[1::2]

    def decode(self) -> None:
        step = max(1, SLAB // self._voxels)
        for bits in np.unique(self._bits).tolist():
            if bits not in (0, 1, 2, 4, 8, 16, 32):
                raise ValueError(f"a block of a compressed segmentation has indices of {bits} bits")
            same_bits = np.flatnonzero(self._bits == bits)
            for start in range(0, len(same_bits), step):
                blocks = same_bits[start : start + step]
                self._fill(blocks, self._values(blocks, self._index(blocks, bits)))

    def _index(self, blocks: npt.NDArray[np.int64], bits: int) -> npt.NDArray[np.uint32]:
        """Indices into the tables, for all voxels of the blocks; with 0 bits one index for each block."""
        if not bits:
            return np.zeros((len(blocks), 1), np.uint32)
        per = 32 // bits
        length = -(-self._voxels // per)
        words = self._take(self._indices[blocks], length)
        shifts = np.arange(per, dtype=np.uint32) * np.uint32(bits)
        index: npt.NDArray[np.uint32] = words[:, :, None] >> shifts & np.uint32((1 << bits) - 1)
        return index.reshape(len(blocks), length * per)[:, : self._voxels]

    def _values(self, blocks: npt.NDArray[np.int64], index: npt.NDArray[np.uint32]) -> Elements:
        at = self._tables[blocks][:, None] + self._wide * index.astype(np.int64)
        self._require(int(at.max()) + self._wide)
        values: Elements = self._words[at]
        if self._wide == 2:
            values = values | self._words[at + 1].astype(np.uint64) << np.uint64(32)
        return values

    def _fill(self, blocks: npt.NDArray[np.int64], values: Elements) -> None:
        shape = self._block if values.shape[1] > 1 or self._voxels == 1 else (1, 1, 1)
        corners = np.stack(np.unravel_index(blocks, self._grid), axis=1) * self._block
        for (z, y, x), part in zip(corners.tolist(), values.reshape(-1, *shape), strict=True):
            inside = self._out[z : z + self._block[0], y : y + self._block[1], x : x + self._block[2]]
            inside[...] = part[: inside.shape[0], : inside.shape[1], : inside.shape[2]]

    def _take(self, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.uint32]:
        self._require(int(starts.max()) + length)
        words: npt.NDArray[np.uint32] = self._words[starts[:, None] + np.arange(length)]
        return words

    def _require(self, end: int) -> None:
        if end > len(self._words):
            raise ValueError(
                f"a block ends at word {end}, but the compressed segmentation has {len(self._words)} words"
            )


def _to_compressed_segmentation(_: Any, elements: Elements, configuration: Mapping[str, Any]) -> bytes:
    block = tuple(configuration["block_size"])[::-1]
    if math.prod(block) > MAX_BLOCK:
        raise ValueError(f"a block size of {block[::-1]} is more than the limit of {MAX_BLOCK} voxels")
    channels = [_segmented(channel, block) for channel in elements]
    starts = np.cumsum([len(channels), *map(len, channels[:-1])]).astype("<u4")
    return b"".join(part.tobytes() for part in (starts, *channels))


def _segmented(channel: Elements, block: Coords) -> npt.NDArray[np.uint32]:
    """The words of one channel; see `_Blocks`. Blocks with the same values share a table."""
    corners = list(itertools.product(*(range(0, n, b) for n, b in zip(channel.shape, block, strict=True))))
    head = np.zeros((len(corners), 2), "<u4")
    words, end, tables = [head.reshape(-1)], head.size, dict[bytes, int]()
    for i, (z, y, x) in enumerate(corners):
        inside = channel[z : z + block[0], y : y + block[1], x : x + block[2]]
        values, index = np.unique(inside, return_inverse=True)
        bits = next(b for b in (0, 1, 2, 4, 8, 16, 32) if len(values) <= 1 << b)
        table = values.astype(values.dtype.newbyteorder("<")).tobytes()
        parts = [_packed(index.reshape(inside.shape), block, bits)] if bits else []
        if table not in tables:
            tables[table] = end + sum(map(len, parts))
            parts.append(np.frombuffer(table, "<u4"))
        if tables[table] >= 1 << 24 or end > MAX_DECODED // 4:
            raise ValueError("too many different values for a compressed segmentation")
        head[i] = tables[table] | bits << 24, end
        words += parts
        end += sum(map(len, parts))
    return np.concatenate(words)


def _packed(index: npt.NDArray[np.intp], block: Coords, bits: int) -> npt.NDArray[np.uint32]:
    """The indices of a block, in full also at the edge, with `bits` bits each."""
    per, voxels = 32 // bits, math.prod(block)
    full = np.zeros(block, "<u4")
    full[tuple(map(slice, index.shape))] = index
    padded = np.zeros(-(-voxels // per) * per, "<u4")
    padded[:voxels] = full.reshape(-1)
    shifts = np.arange(per, dtype=np.uint32) * np.uint32(bits)
    packed: npt.NDArray[np.uint32] = np.bitwise_or.reduce(padded.reshape(-1, per) << shifts, axis=1)
    return packed


def _labels(library: Any, data: bytes, chunk: ImageShape) -> Elements:
    """Decode compresso and crackle."""
    header = library.header(data)
    fields = header if isinstance(header, dict) else vars(header)
    chunk.require(tuple(int(fields[axis]) for axis in ("sx", "sy", "sz")), (chunk.x, chunk.y, chunk.z * chunk.channels))
    return np.asarray(library.decompress(data)).T


def _to_labels(library: Any, elements: Elements, _: Mapping[str, Any]) -> bytes:
    labels = elements[0].T  # Fortran order, as the libraries prefer
    return bytes(library.compress(labels.view(f"u{labels.itemsize}")))


# ---- floating point


def _fpzip(fpzip: Any, data: bytes, chunk: ImageShape) -> Elements:
    return _floats(fpzip, data, (chunk.x, chunk.y, chunk.z, chunk.channels)).T


def _kempressed(fpzip: Any, data: bytes, chunk: ImageShape) -> Elements:
    """Decode cloud-volume's variant of fpzip: channels are before z, and 2 is added to each value."""
    elements = _floats(fpzip, data, (chunk.x, chunk.y, chunk.channels, chunk.z))
    return np.swapaxes(elements, 2, 3).T - np.float32(2)


def _floats(fpzip: Any, data: bytes, shape: Coords) -> Elements:
    """Decode elements in Fortran order.

    Zeros are appended, since the library reads until it has all elements. No element takes more than 8 bytes.
    """
    elements = np.asarray(fpzip.decompress(data + bytes(8 * math.prod(shape) + 64), order="F"))
    if elements.shape != shape:
        raise ValueError(f"{shape} elements expected, its header says {elements.shape}")
    return elements


INTEGERS = ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8")
ANY, ONE = range(1, 1 << 16), (1,)

ENCODINGS: Mapping[str, Encoding] = {
    "jpeg": Encoding(_pillow, None, ("u1",), (1, 3), "PIL.Image", "Pillow"),
    "png": Encoding(_pillow, _to_png, ("u1", "u2"), tuple(MODES), "PIL.Image", "Pillow"),
    "compressed_segmentation": Encoding(
        _compressed_segmentation, _to_compressed_segmentation, ("u4", "u8"), ANY, "numpy", "numpy"
    ),
    "jxl": Encoding(_jxl, None, ("u1", "u2"), (1, 3), "imagecodecs._jpegxl", "imagecodecs"),
    "compresso": Encoding(_labels, _to_labels, INTEGERS, ONE, "compresso", "compresso"),
    "crackle": Encoding(_labels, _to_labels, INTEGERS, ONE, "crackle", "crackle-codec"),
    "fpzip": Encoding(_fpzip, None, ("f4",), ANY, "fpzip", "fpzip"),
    "kempressed": Encoding(_kempressed, None, ("f4",), ANY, "fpzip", "fpzip"),
}
