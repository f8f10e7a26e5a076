"""T3 for layouts: random sequences of what programs do with an array that is stored in another format.

The model knows the elements of each chunk. After each step the chunks are decoded as a program of the layout's format
does it; after each publish the source is read without shardfs.
"""

from __future__ import annotations

import errno
import gzip
import json
import shutil
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numcodecs
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests import data_n5, handmade
from tests.datasets import CRC, GZIP, LITTLE
from tests.write.engines import TreeFiles, mounted
from tests.write.model import WritingMachine
from tests.write.targets import n5_blocks, read_tensorstore

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.write.tokens import Array, Coords

TURNED: Any = {"name": "transpose", "configuration": {"order": [1, 0]}}
INDEX = data_n5.Index()


@dataclass(frozen=True)
class Pair:
    """An array of uint16 in chunks of 2, four of them in a shard along each axis, in a layout.

    Args:
        at: the directory in which the layout shows the array.
        most: the largest shape. Volumes keep the number of bits of the ids of their chunks.
        step: the array grows by multiples of it.
        create: writes the documents of the source.
        stored: the elements in the source, of the present shape.
    """

    layout: str
    at: str
    shape: Coords
    most: Coords
    step: int
    create: Callable[[Path], None]
    stored: Callable[[Path, Coords], Array]

    @property
    def document(self) -> str:
        return self.at + {"zarr2": ".zarray", "n5": "attributes.json"}[self.layout]

    def path(self, cell: Coords) -> str:
        return self.at + "/".join(map(str, cell if self.layout == "zarr2" else cell[::-1]))

    def resized(self, document: bytes, shape: Coords) -> bytes:
        doc = json.loads(document)
        return json.dumps(doc | ({"shape": shape} if self.layout == "zarr2" else {"dimensions": shape[::-1]})).encode()

    def encoded(self, document: bytes, elements: Array, inside: Coords) -> bytes:
        """A chunk file with these elements, of which so many are in the array."""
        doc = json.loads(document)
        if self.layout == "n5":
            data = elements[tuple(map(slice, inside))].astype(">u2").tobytes()
            return data_n5.header(inside[::-1]) + (
                gzip.compress(data) if doc["compression"]["type"] == "gzip" else data
            )
        data = elements.astype(doc["dtype"]).tobytes(doc["order"])
        return data if doc["compressor"] is None else bytes(numcodecs.get_codec(doc["compressor"]).encode(data))

    def decoded(self, document: bytes, data: bytes, inside: Coords) -> Array:
        """The elements in the array."""
        doc, shape = json.loads(document), (2,) * len(self.shape)
        if self.layout == "n5":
            shape, start = tuple(np.frombuffer(data[4:], ">u4", len(shape))[::-1].tolist()), data_n5.header_size(data)
            data = gzip.decompress(data[start:]) if doc["compression"]["type"] == "gzip" else data[start:]
            values = np.frombuffer(data, ">u2").reshape(shape)
        else:
            data = data if doc["compressor"] is None else numcodecs.get_codec(doc["compressor"]).decode(data)
            values = np.frombuffer(data, doc["dtype"]).reshape(shape, order=doc["order"])
        return values[tuple(map(slice, inside))]


def _zarr3(codecs: list[Any]) -> Callable[[Path], None]:
    document = handmade.zarr_metadata((5, 7), (8, 8), (2, 2), data_type="uint16", codecs=codecs)
    return lambda root: handmade.write_json(root / "zarr.json", document)


def _n5(root: Path) -> None:
    codecs = [data_n5.sharding((2, 2), [{"name": "n5bytes"}, {"name": "gzip", "configuration": {"level": 1}}], INDEX)]
    handmade.write_json(root / "attributes.json", data_n5.attributes((7, 5), (8, 8), "uint16", codecs=codecs))


def _n5_elements(root: Path, shape: Coords) -> Array:
    out = np.zeros([n + 8 for n in shape], "u2")
    for shard in product(*(range(-(-n // 8)) for n in shape[::-1])):
        path = root / data_n5.key(shard)
        for local, block in (n5_blocks(path.read_bytes(), (4, 4), INDEX) if path.exists() else {}).items():
            values = np.frombuffer(gzip.decompress(block[data_n5.header_size(block) :]), ">u2")
            size = tuple(np.frombuffer(block[4:], ">u4", 2)[::-1].tolist())
            y, x = (8 * s + 2 * i for s, i in zip(shard[::-1], local[::-1], strict=True))
            out[y : y + size[0], x : x + size[1]] = values.reshape(size)
    return out[tuple(map(slice, shape))]


def _precomputed(root: Path) -> None:
    scale: dict[str, Any] = {
        "key": "s",
        "size": [7, 6, 4],
        "chunk_sizes": [[2, 2, 2]],
        "voxel_offset": [0, 0, 0],
        "encoding": "raw",
    }
    scale |= {"resolution": [8, 8, 40], "sharding": handmade.sharding(preshift=1, minishard=1, shard=1)}
    info = {"@type": "neuroglancer_multiscale_volume", "type": "image", "data_type": "uint16", "num_channels": 1}
    handmade.write_json(root / "info", {**info, "scales": [scale]})


def _by_tensorstore(driver: str) -> Callable[[Path, Coords], Array]:
    def read(root: Path, shape: Coords) -> Array:
        values = read_tensorstore(driver, root)
        return values if driver == "zarr3" else values[..., 0].T

    return read


def _plane(layout: str, create: Callable[[Path], None], read_stored: Callable[[Path, Coords], Array]) -> Pair:
    return Pair(layout, "", (5, 7), (9, 9), 1, create, read_stored)


def _volume(layout: str, at: str) -> Pair:
    return Pair(layout, at, (4, 6, 7), (4, 8, 7), 2, _precomputed, _by_tensorstore("neuroglancer_precomputed"))


PAIRS = {
    "zarr3 as zarr2": _plane("zarr2", _zarr3([LITTLE, GZIP, CRC]), _by_tensorstore("zarr3")),
    "decoded zarr3 as zarr2": _plane("zarr2", _zarr3([TURNED, LITTLE, GZIP, GZIP]), _by_tensorstore("zarr3")),
    "zarr3 as n5": _plane("n5", _zarr3([LITTLE, GZIP]), _by_tensorstore("zarr3")),
    "n5 as zarr2": _plane("zarr2", _n5, _n5_elements),
    "precomputed as zarr2": _volume("zarr2", "s/"),
    "precomputed as n5": _volume("n5", "s0/"),
}


class LayoutMachine(RuleBasedStateMachine):
    """One pair."""

    pair: Pair

    def __init__(self) -> None:
        super().__init__()
        self.top = Path(tempfile.mkdtemp(prefix="shardfs-model-", dir=WritingMachine.place))
        self.store, self.shape = self.top / "store", self.pair.shape
        self.pair.create(self.store)
        self.chunks: dict[Coords, Array] = {}
        self.stack = ExitStack()
        self._mount()

    def _mount(self) -> None:
        self.files: TreeFiles = self.stack.enter_context(mounted(self.store, self.top / "journal", self.pair.layout))

    def teardown(self) -> None:
        with suppress(OSError):
            self.files.die()
        self.stack.close()
        shutil.rmtree(self.top, ignore_errors=True)

    def _cells(self) -> list[Coords]:
        return list(product(*(range(-(-n // 2)) for n in self.shape)))

    def _inside(self, cell: Coords) -> Coords:
        return tuple(min(2, n - 2 * i) for i, n in zip(cell, self.shape, strict=True))

    def _document(self) -> bytes:
        values = self.files.read(self.pair.document)
        assert values is not None
        return values

    def _made(self, cell: Coords, value: int) -> tuple[Array, bytes]:
        """Elements, with zeros behind the edge of the array, and their file."""
        inside = self._inside(cell)
        elements = np.zeros((2,) * len(cell), "u2")
        elements[tuple(map(slice, inside))] = value + np.arange(np.prod(inside)).reshape(inside)
        return elements, self.pair.encoded(self._document(), elements, inside)

    # ---- what programs do ----

    @rule(data=st.data(), value=st.integers(1, 60_000), first=st.booleans())
    def write(self, data: st.DataObject, value: int, first: bool) -> None:
        cell = data.draw(st.sampled_from(self._cells()))
        elements, raw = self._made(cell, value)
        if first:  # truncated, closed, and opened again
            self.files.write(self.pair.path(cell), b"")
        self.files.write(self.pair.path(cell), raw)
        self.chunks[cell] = elements

    @rule(data=st.data(), value=st.integers(1, 60_000))
    def write_under_another_name(self, data: st.DataObject, value: int) -> None:
        cell = data.draw(st.sampled_from(self._cells()))
        elements, raw = self._made(cell, value)
        scratch = f"{self.pair.path(cell)}.partial"
        self.files.write(scratch, raw)
        self.files.rename(scratch, self.pair.path(cell))
        self.chunks[cell] = elements

    @rule(data=st.data(), wrong=st.sampled_from([b"x", b"\0" * 100, b"\x1f\x8b"]))
    def write_what_is_no_chunk(self, data: st.DataObject, wrong: bytes) -> None:
        path = self.pair.path(data.draw(st.sampled_from(self._cells())))
        with pytest.raises(OSError, match=r".+") as caught:
            self.files.write(path, wrong)
        assert caught.value.errno == errno.EINVAL

    @precondition(lambda self: self.chunks)
    @rule(data=st.data())
    def unlink(self, data: st.DataObject) -> None:
        cell = data.draw(st.sampled_from(sorted(self.chunks)))
        self.files.unlink(self.pair.path(cell))
        del self.chunks[cell]

    @precondition(lambda self: self.chunks)
    @rule(data=st.data())
    def rename(self, data: st.DataObject) -> None:
        """Between chunks with as many elements in the array, or the file would not fit."""
        old = data.draw(st.sampled_from(sorted(self.chunks)))
        new = data.draw(st.sampled_from([c for c in self._cells() if self._inside(c) == self._inside(old)]))
        self.files.rename(self.pair.path(old), self.pair.path(new))
        self.chunks[new] = self.chunks.pop(old)

    @rule(more=st.lists(st.integers(0, 3), min_size=3, max_size=3))
    def grow(self, more: list[int]) -> None:
        step = self.pair.step
        shape = tuple(min(n + step * m, most) for n, m, most in zip(self.shape, more, self.pair.most, strict=False))
        self.files.write(self.pair.document, self.pair.resized(self._document(), shape))
        self.shape = shape

    # ---- how mounts come and go ----

    @rule()
    def publish(self) -> None:
        self.files.publish()
        expected = np.zeros([n + 2 for n in self.shape], "u2")
        for cell, elements in self.chunks.items():
            expected[tuple(slice(2 * i, 2 * i + 2) for i in cell)] = elements
        values = self.pair.stored(self.store, self.shape)
        np.testing.assert_array_equal(values, expected[tuple(map(slice, self.shape))])

    @rule()
    def crash(self) -> None:
        self.files.die()
        self._mount()

    @rule()
    def mount_anew(self) -> None:
        self.stack.close()
        self._mount()

    # ---- what must hold ----

    @invariant()
    def all_is_shown(self) -> None:
        document = self._document()
        for cell in self._cells():
            path = self.pair.path(cell)
            raw, expected = self._read(path), self.chunks.get(cell)
            if expected is None:
                assert raw is None, path
                continue
            assert raw is not None, path
            assert self.files.tree.resolve(path).size == len(raw), path
            inside = self._inside(cell)
            np.testing.assert_array_equal(
                self.pair.decoded(document, raw, inside), expected[tuple(map(slice, inside))], path
            )

    def _read(self, path: str) -> bytes | None:
        """A block of N5 that was stored before the array grew may have to be opened again (docs/layouts.md)."""
        try:
            return self.files.read(path)
        except OSError as e:
            if e.errno != errno.ESTALE:
                raise
            return self.files.read(path)
