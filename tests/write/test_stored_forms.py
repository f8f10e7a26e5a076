"""Whether a stored chunk is still the one that a program has written over, in each stored form and kind of store."""

from __future__ import annotations

import errno
import re
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import fsspec
import numpy as np
import pytest

from shardfs.fsspec_fs.filesystem import ShardFileSystem
from shardfs.model.blobs import whole
from shardfs.shards.byte_layouts.sharding_indexed import ShardingIndexed
from shardfs.shards.byte_layouts.superchunk import Pack
from shardfs.shards.byte_layouts.uint64_sharded import Uint64Sharded
from shardfs.vfs.tree import open_tree
from shardfs.write.publish_shard import Job
from shardfs.write.tree import WriteTree
from tests import data_bcolz, handmade, handmade_ids
from tests.suites.walking import walk
from tests.write.targets import TARGETS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.write.object_store import Server
    from tests.write.targets import Target

pytestmark = [pytest.mark.s3, pytest.mark.interop]

NOT_KNOWN = "earlier bytes are not known"


class Form(NamedTuple):
    """An array or a set of files with two chunks in one shard.

    `fill` writes it natively to an empty directory, given a number for each of the two. `names` are the chunks' names.
    """

    fill: Callable[[Path, int, int], None]
    names: tuple[str, str]

    def files(self, path: Path, ours: int, theirs: int) -> dict[str, bytes]:
        """Return the stored files of the dataset with these numbers."""
        path.mkdir()
        self.fill(path, ours, theirs)
        return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def _grid(target: Target) -> Form:
    members = next(iter(target.shards().values()))

    def fill(path: Path, ours: int, theirs: int) -> None:
        target.create(path)
        numbers = {number: 100 + number for number in range(len(target.chunks))}
        target.fill(path, target.array(numbers | {members[0]: ours, members[1]: theirs}))

    return Form(fill, (target.path(members[0]), target.path(members[1])))


def _superchunks(path: Path, ours: int, theirs: int) -> None:
    data_bcolz.write_array(path, np.repeat(np.array([ours, theirs, 7], "<i8"), 8), 8, 3)


def _meshes(path: Path, ours: int, theirs: int) -> None:
    """The manifest of both is the same, and is what the shard's index has an entry of."""
    handmade.write_json(path / "info", {**handmade_ids.MESHES, "sharding": handmade.sharding()})
    meshes = {n: (b"%04d" % number, handmade_ids.manifest([[4]])) for n, number in ((0, ours), (2, theirs))}
    handmade.write_files(path, {"0.shard": handmade_ids.mesh_shard([meshes, {}])})


GRIDS = [
    "zarr_end", "zarr_start", "zarr_zstd", "zarr_crc", "zarr_nested", "zarr_gzip_after", "zarr_crc_after",
    "precomputed", "precomputed_gzip", "n5", "n5_start",
]  # fmt: skip
FORMS = {name: _grid(TARGETS[name]) for name in GRIDS} | {
    "bcolz": Form(_superchunks, ("data/__0.blp", "data/__1.blp")),
    "mesh": Form(_meshes, ("0", "2")),
}


ON_S3 = ["zarr_end", "zarr_gzip_after", "precomputed_gzip", "mesh"]
CASES = [
    *((kind, form) for kind in ("local", "memory") for form in FORMS),
    *(("s3", form) for form in ON_S3),
]


@dataclass
class Source:
    """A dataset in a store, that other programs write without shardfs.

    `reads_bases`: writing over a chunk reads its stored bytes.
    """

    url: str
    options: dict[str, object]
    top: Path
    form: Form
    reads_bases: bool

    def __post_init__(self) -> None:
        self._store, self._root = fsspec.core.url_to_fs(self.url, **self.options)
        self._count = 0

    def put(self, ours: int, theirs: int) -> None:
        """Replace all files whose bytes are other ones then."""
        for name, data in self._filled(ours, theirs).items():
            path = f"{self._root}/{name}"
            if not self._store.exists(path) or self._store.cat_file(path) != data:
                self._store.makedirs(path.rpartition("/")[0], exist_ok=True)
                new = f"{path}.new" if self.url.startswith("/") else path
                self._store.pipe_file(new, data)
                if new != path:
                    Path(new).rename(path)

    def shown(self, ours: int, theirs: int) -> tuple[bytes, bytes]:
        """Return the bytes of both chunks on a mount."""
        self._filled(ours, theirs)
        chunks = walk(open_tree(str(self.top / str(self._count))))
        return chunks[self.form.names[0]], chunks[self.form.names[1]]

    def stored(self) -> tuple[bytes, bytes]:
        """Return the bytes of both chunks on a new mount of the store."""
        fs = ShardFileSystem(source=self.url, storage_options=self.options, skip_instance_cache=True)
        return fs.cat_file(self.form.names[0]), fs.cat_file(self.form.names[1])

    def _filled(self, ours: int, theirs: int) -> dict[str, bytes]:
        self._count += 1
        return self.form.files(self.top / str(self._count), ours, theirs)

    @contextmanager
    def mount(self, **more: str) -> Iterator[ShardFileSystem]:
        words = {"journal": str(self.top / "journals"), "idle": "3600", "age": "3600", **more}
        fs = ShardFileSystem(
            source=self.url, storage_options=self.options, rw=True, write_options=words, skip_instance_cache=True
        )
        try:
            yield fs
        finally:
            fs.close(1)


@pytest.fixture
def source(kind: str, form: str, tmp_path: Path, server: Server) -> Source:
    """A source of this form, whose chunks have the numbers 1 and 2."""
    url, options = str(tmp_path / "source"), dict[str, object]()
    (tmp_path / "source").mkdir()
    if kind == "memory":
        url, options = f"memory://{re.sub(r'[^a-z0-9]', '', str(tmp_path))}", {"skip_instance_cache": True}
    if kind == "s3":
        url, options = "s3://data/root", server.options()
    new_files = Source(url, options, tmp_path, FORMS[form], kind == "local")
    new_files.put(1, 2)
    return new_files


def _refused(fs: ShardFileSystem) -> str:
    with pytest.raises(OSError, match="the stored chunk") as caught:
        fs.publish(timeout=30)
    assert caught.value.errno == errno.ESTALE
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:Combining a `sharding_indexed` codec")
@pytest.mark.parametrize(("kind", "form"), CASES)
def test_another_programs_version_of_the_chunk_stays(source: Source) -> None:
    """It has the size of the former version, and is where that was."""
    ours = source.form.names[0]
    with source.mount() as fs:
        fs.pipe_file(ours, source.shown(5, 2)[0])
        source.put(6, 2)
        _refused(fs)
        assert fs.cat_file(ours) == source.shown(5, 2)[0]
    assert source.stored() == source.shown(6, 2)


@pytest.mark.filterwarnings("ignore:Combining a `sharding_indexed` codec")
@pytest.mark.parametrize(("kind", "form"), CASES)
def test_what_is_not_known_is_not_unchanged(source: Source) -> None:
    """Another program has changed the other chunk of the shard."""
    ours = source.form.names[0]
    with source.mount() as fs:
        fs.pipe_file(ours, source.shown(5, 2)[0])
        source.put(1, 6)
        if source.reads_bases:
            fs.publish(timeout=120)
        else:
            assert NOT_KNOWN in _refused(fs)
    assert source.stored() == source.shown(5 if source.reads_bases else 1, 6)


@pytest.mark.filterwarnings("ignore:Combining a `sharding_indexed` codec")
@pytest.mark.parametrize(("kind", "form"), CASES)
def test_a_version_that_this_mount_has_published_is_known(source: Source) -> None:
    """Then only a program that writes the same chunk is in conflict."""
    ours = source.form.names[0]
    with source.mount() as fs:
        fs.pipe_file(ours, source.shown(4, 2)[0])
        with _written_meanwhile(fs, ours, source.shown(5, 2)[0]):
            _publish(fs)
        source.put(4, 6)
        fs.publish(timeout=120)
    assert source.stored() == source.shown(5, 6)


@pytest.mark.filterwarnings("ignore:Combining a `sharding_indexed` codec")
@pytest.mark.parametrize(("kind", "form"), CASES)
@pytest.mark.parametrize("step", ["plan", "begun", "done"])
def test_a_publish_of_this_mount_is_no_other_program(source: Source, step: str) -> None:
    """A program writes over the other chunk while the shard is being replaced."""
    ours, other = source.form.names
    new = source.shown(5, 6)
    with source.mount() as fs:
        fs.pipe_file(ours, new[0])
        with _written_meanwhile(fs, other, new[1], step):
            _publish(fs)
        fs.publish(timeout=120)
    assert source.stored() == new


@pytest.mark.filterwarnings("ignore:Combining a `sharding_indexed` codec")
@pytest.mark.parametrize(
    ("kind", "form"), [("local", form) for form in ("zarr_end", "zarr_start", "zarr_nested", "precomputed", "bcolz")]
)
def test_a_publish_decodes_each_index_once(source: Source, form: str) -> None:
    """Those of the old shard and of the new one, even if the publish compares chunks and measures the shard."""
    decoded = Counter[tuple[int, bytes]]()
    with source.mount(compact="eager") as fs:
        fs.pipe_file(source.form.names[0], source.shown(5, 2)[0])
        source.put(1, 6)
        with pytest.MonkeyPatch.context() as patch:
            for layout in (ShardingIndexed, Uint64Sharded):
                patch.setattr(layout, "decode_page", _counted(layout.decode_page, decoded))
            patch.setattr(Pack, "walk", _counted(Pack.walk, decoded))
            _publish(fs)
    assert source.stored() == source.shown(5, 6)
    # also an inner index of each version; and the other minishard of the old shard, to measure it
    assert list(decoded.values()) == [1] * {"zarr_nested": 4, "precomputed": 3}.get(form, 2)


def _counted(decode: Callable[..., object], decoded: Counter[tuple[int, bytes]]) -> Callable[..., object]:
    """The function, which notes the bytes of each index."""

    def counted(layout: object, *args: Any) -> object:
        decoded[id(layout), args[-1] if isinstance(args[-1], bytes) else whole(args[-1])] += 1
        return decode(layout, *args)

    return counted


def _publish(fs: ShardFileSystem) -> None:
    assert isinstance(fs.tree, WriteTree)
    (shard,) = fs.tree.pending.shards
    fs.tree.pending.publisher.publish(shard)


@contextmanager
def _written_meanwhile(fs: ShardFileSystem, path: str, data: bytes, step: str = "begun") -> Iterator[None]:
    """Write a chunk after this step of the next publish."""
    written = list[str]()

    def change(self: Job, *args: object) -> object:
        out = original(self, *args)
        if not written:
            written.append(path)
            fs.pipe_file(path, data)
        return out

    original = getattr(Job, step)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, step, change)
        yield
    assert written
