"""A source can be listed, read, told about and verified, whatever is wrong in it, and nobody is told what is not so.

Sources are small and sound at first: some as the suites make them up, some as other libraries wrote them. Then their
documents say something else, and bytes of their shards are others.
"""

from __future__ import annotations

import io
import json
import math
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache, partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import strategies as st

from shardfs import cli
from shardfs.config.options import LAYOUTS
from shardfs.jobs.maps import chunk_map
from shardfs.storage.cache import ByteLRU
from shardfs.storage.local import LocalStore
from shardfs.vfs.discovery import Datasets
from shardfs.vfs.tree import Tree
from tests import data_bcolz, data_blosc2, data_n5, handmade, strategies
from tests import datasets as written
from tests.formats import test_bcolz, test_blosc2, test_n5, test_zarr_transformer
from tests.fuzzing.documents import altered
from tests.fuzzing.inputs import DECLARED, Draw, bent, with_other_numbers
from tests.jobs.test_verify import verified
from tests.suites.view import files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.suites import Sparse

Files = dict[str, bytes]

PIECE, MOST_READ, MOST_FILES = 1 << 20, 32 << 20, 60


def damaged(kind: str) -> Callable[[Draw], None]:
    """The target for sources of one kind."""

    def target(draw: Draw) -> None:
        made_up = SAMPLES[kind].map(lambda sparse: dict(sparse.stored))
        files = draw.draw(st.sampled_from(samples) | made_up if (samples := _written(kind)) else made_up)
        for _ in range(draw.draw(st.integers(0, 3))):
            name = draw.draw(st.sampled_from(sorted(files)))
            files = {**files, name: _changed(draw, files[name])}
        layout = draw.draw(st.just("native") | st.sampled_from(LAYOUTS))
        with TemporaryDirectory() as top:
            handmade.write_files(Path(top), files)
            _use(Path(top), layout, skip=draw.draw(st.booleans()))
            if draw.draw(st.integers(0, 7)) == 0:
                _use_verbs(top, layout, sorted(files))

    return target


def _changed(draw: Draw, data: bytes) -> bytes:
    with suppress(ValueError):  # bytes that are no text are no document
        return altered(draw, json.loads(data))
    return draw.draw(st.sampled_from((bent, with_other_numbers)))(draw, data)


def _use(path: Path, layout: str, *, skip: bool) -> None:
    tree = Tree(
        Datasets(LocalStore(str(path)), ByteLRU(1 << 20), ByteLRU(1 << 20), math.inf, layout, skip_unsupported=skip)
    )
    for step in (tree.survey.require_dataset, partial(_read_all, tree), partial(_tell_all, tree)):
        with suppress(*DECLARED):
            step()
    with suppress(*DECLARED):
        verified(tree, deep=True)


def _read_all(tree: Tree) -> None:
    for name in islice(files(tree), MOST_FILES):
        with suppress(*DECLARED):
            attributes = tree.resolve(name)
            for offset in range(0, min(attributes.size, MOST_READ), PIECE):
                size = min(attributes.size - offset, PIECE)
                assert len(tree.read(attributes.number, offset, PIECE)) == size
            tree.xattrs(attributes.number)
            tree.locate(name)


def _tell_all(tree: Tree) -> None:
    tree.problems()
    for collection in tree.collections():
        with suppress(*DECLARED):
            chunk_map(collection, 8, 8)
    list(tree.survey.summaries())


def _use_verbs(top: str, layout: str, names: list[str]) -> None:
    """What is wrong is told in one line, and not by a traceback."""
    out, err = io.TextIOWrapper(io.BytesIO()), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        cli.run(["ls", top, "-l", "--layout", layout])
        cli.run(["cat", top, *names, "--layout", layout])
        cli.run(["info", top, "--json"])
        cli.run(["verify", top, "--deep", "--json"])
    out.flush()
    told = out.buffer
    assert isinstance(told, io.BytesIO)
    assert "Traceback" not in err.getvalue(), err.getvalue()
    assert b'"kind": "task"' not in told.getvalue(), told.getvalue()


# ---- sound sources ----

SAMPLES: dict[str, st.SearchStrategy[Sparse]] = {
    "zarr": strategies.sparse_arrays(),
    "draft": test_zarr_transformer.sparse_hierarchies(),
    "n5": test_n5.sparse_n5(),
    "volume": strategies.sparse_volumes(),
    "ids": strategies.sparse_skeletons() | strategies.sparse_meshes() | strategies.sparse_annotations(),
    "bcolz": test_bcolz.superchunks() | test_bcolz.packs(),
    "blosc2": test_blosc2.frames(),
}

_ZARR = (
    "sparse",
    "dtype_float16",
    "members",
    "gzip_after",
    "zstd_crc32c_after",
    "nested_crc32c_after_both",
    "gzip_after_index_start",
    "nested_gzip_after_inner",
    "rectilinear",
    "group",
    "group_consolidated",
    "ome_pyramid",
)
_VOLUMES = ("identity", "murmur", "index_gzip_data_gzip", "channels_3", "jpeg", "png_16", "sparse", "two_scales")
_FRAMES = [name for name in data_blosc2.WRITERS if name != "changed.b2frame"]  # of 300 chunks
_PACKS = Path(__file__).parents[1] / "golden" / "bloscpack"


@cache
def _written(kind: str) -> list[Files]:
    """Sources as libraries write them."""
    with TemporaryDirectory() as directory:
        return list(_write(kind, Path(directory)))


def _write(kind: str, top: Path) -> Iterator[Files]:
    if kind == "zarr":
        for name in _ZARR:
            yield _files(written.ZARR3[name](top / name).path)
    elif kind == "volume":
        for name in _VOLUMES:
            yield _files(written.PRECOMPUTED[name](top / name).path)
    elif kind == "n5":
        for name, variant in data_n5.VARIANTS.items():
            yield _files(variant.write(top / name, name).path)
    elif kind == "bcolz":
        yield from ({path.name: path.read_bytes()} for path in sorted(_PACKS.glob("*.blp")))
        for checksum, as_json in ((1, False), (6, True)):
            place, array = top / f"{checksum}", np.arange(40, dtype=">u4").reshape(20, 2)
            how = data_bcolz.Superchunk(checksum=checksum)
            data_bcolz.write_array(place, array, 4, 3, how, attributes='{"a": 1}', as_json=as_json)
            yield _files(place)
    elif kind == "blosc2":
        for name in _FRAMES:
            data_blosc2.WRITERS[name](top / name, True)
            yield {name: (top / name).read_bytes()}


def _files(path: Path) -> Files:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}
