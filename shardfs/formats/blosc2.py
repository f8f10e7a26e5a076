"""Blosc2: contiguous frames, also with arrays in them, shown as sparse frames. python-blosc2 opens both kinds.

https://github.com/Blosc/c-blosc2: README_CFRAME_FORMAT.rst, README_SFRAME_FORMAT.rst and README_B2ND_METALAYER.rst
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from shardfs.codecs.checks import Chain
from shardfs.formats.format import Format
from shardfs.model.arrays import Codec
from shardfs.model.collection import Collection, Facts, Layer
from shardfs.model.dataset import Dataset
from shardfs.model.grid import NumberedNames
from shardfs.shards.byte_layouts.blosc2_frame import Frame, Frames, is_contiguous, is_same_sparse, read_head

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardfs.formats.json_text import Path
    from shardfs.model.blobs import Blob
    from shardfs.model.values import Coords

INDEX = "chunks.b2frame"

STORE = ".b2d"
"""The suffix of directories with a tree or a table, whose readers need contiguous frames."""


class Blosc2(Format):
    """The format of Blosc2 contiguous frames."""

    documents = ()
    dataset_formats = ("blosc2",)

    def may_hold(self, name: str) -> bool:
        return name.endswith((".b2nd", ".b2frame", ".b2f")) and name != INDEX

    def open_file(self, path: str, blob: Blob) -> Dataset | None:
        if any(part.endswith(STORE) for part in path.split("/")[:-1]):
            return None
        head = read_head(blob)
        if not is_contiguous(head):
            return None
        frame = Frame(blob, head)
        chunks = len(frame.offsets)
        collection = Collection(
            format="blosc2",
            path="",
            names=NumberedNames(chunks, b"", b".chunk", digits=8),
            layers=(Layer(Frames(chunks, even=bool(frame.header.chunk_bytes) or not chunks)),),
            codecs=("blosc2",),
            facts=_facts(frame),
            check=Chain((Codec("blosc2"),)),
        )
        return Dataset("blosc2", (collection,), {INDEX: frame.sparse()}, closed=True)

    def describes(self, name: str) -> bool:
        return name == INDEX

    def differences(self, old: bytes, new: bytes) -> Mapping[Path, Any]:
        return {} if is_same_sparse(old, new) else {("header, index or trailer",): new}


def _facts(frame: Frame) -> Facts:
    header = frame.header
    array = _array(frame.metalayer(b"b2nd") or b"")
    if array is not None:
        return Facts(array[0], array[1], None, array[2], "contiguous frame")
    items, per_chunk = header.nbytes // header.typesize, header.chunk_bytes // header.typesize
    return Facts((items,), (per_chunk,), None, f"{header.typesize} bytes", "contiguous frame")


def _array(layer: bytes) -> tuple[Coords, Coords, str] | None:
    """The shape, chunk shape and data type from the `b2nd` metalayer, which is in msgpack; None for another form."""
    try:
        fields, rank = layer[0] & 15, layer[2]
        chunks_at = 3 + 1 + 9 * rank
        type_at = chunks_at + 2 * (1 + 5 * rank)
        shape = struct.unpack_from(">" + "xq" * rank, layer, 4)
        chunk_shape = struct.unpack_from(">" + "xi" * rank, layer, chunks_at + 1)
        if fields < 7:
            return shape, chunk_shape, "unknown"
        (size,) = struct.unpack_from(">I", layer, type_at + 2)
        return shape, chunk_shape, layer[type_at + 6 : type_at + 6 + size].decode("utf-8", "replace")
    except (IndexError, struct.error):
        return None


BLOSC2 = Blosc2()
