"""Real programs create, change and replace arrays on a mount; others read natively what is in the source then."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tensorstore as ts
import zarr

from tests.clients.create_anew import DATA, SEGMENTS
from tests.conftest import need_fuse
from tests.datasets import ROOT, client_python
from tests.write.mounts import WritableMount, writable

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.fuse, pytest.mark.interop, pytest.mark.slow]

READ_N5 = """
import sys
import tensorstore as ts
spec = {"driver": "n5", "kvstore": {"driver": "file", "path": sys.argv[1]}}
print(ts.open(spec).result().read().result().sum(dtype="u8"))
"""

PYTHONS = {
    "zarr2": "zarr2",
    "omezarr": "zarr2",
    "bigendian": "zarr2",
    "n5store": "zarr2",
    "draft": "zarr2",
    "xarray": "zarr2",
    "cloudvolume": "cv",
    "skeletons": "cv",
}


def create(mount: WritableMount, tool: str) -> None:
    """All of it, and unmount."""
    name: Any = PYTHONS.get(tool)
    python = sys.executable if name is None else str(client_python(name))
    mount.mount()
    command = [python, "-W", "ignore", "-m", "tests.clients.create_anew", tool, str(mount.path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    completed = mount.umount()
    assert completed.returncode == 0, completed.stderr


def as_zarr3(path: Path) -> Any:
    return ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}).result()


@pytest.mark.parametrize("tool", ["zarr3", "tensorstore"])
@pytest.mark.parametrize("rule", ["", "zarr3:chunks_per_shard=4x4"])
def test_arrays_of_zarr(tmp_path: Path, tool: str, rule: str) -> None:
    need_fuse()
    source = tmp_path / "source"
    group = zarr.create_group(source)
    for name in ("old", "anew"):
        array = group.create_array(name, shape=DATA.shape, chunks=(10, 10), shards=(40, 40), dtype="uint16")
        array[:] = DATA
    with writable(source, tmp_path, *(["--create", rule] if rule else [])) as mount:
        create(mount, tool)
    grown = np.zeros((100, 100), "uint16")
    grown[:70, :90], grown[70:90, :90], grown[90:] = DATA, 1, 7
    for name, wanted, shards in (
        ("new/x", DATA, (40, 40) if rule else None), ("old", grown, (40, 40)), ("anew", DATA + 1, (40, 40))
    ):  # fmt: skip
        array = zarr.open_array(source / name, mode="r")
        assert (array.shards, array.chunks) == (shards, (10, 10))
        np.testing.assert_array_equal(array[:], wanted)
        np.testing.assert_array_equal(as_zarr3(source / name).read().result(), wanted)
    if tool == "zarr3":
        members = zarr.open_consolidated(source)
        assert dict(members.attrs) == {"k": 2}
        for name in ("new/x", "old", "anew"):
            member = members[name]
            assert isinstance(member, zarr.Array)
            assert member.metadata.to_dict() == zarr.open_array(source / name, mode="r").metadata.to_dict()
    assert not (source / "sharded" / "zarr.json").exists()


REPLACE = """
import sys
import tensorstore as ts
for shape in ([33, 17, 5], [33]):
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": sys.argv[1]}}
    layout = ts.ChunkLayout(chunk_shape=[8] * len(shape))
    array = ts.open(spec, dtype=ts.int32, shape=shape, chunk_layout=layout, create=True, delete_existing=True).result()
    array[...] = len(shape)
assert (array.read().result() == 1).all()
"""


def test_tensorstore_replaces_an_array_by_one_of_other_axes(tmp_path: Path) -> None:
    """It leaves the array's own directory: the new shards may be called as directories of the old ones were."""
    need_fuse()
    source = tmp_path / "source"
    source.mkdir()
    with writable(source, tmp_path, "--create", "zarr3") as mount:
        mount.mount()
        command = [sys.executable, "-c", REPLACE, f"{mount.path}/a/"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
        assert run.returncode == 0, run.stderr[-3000:]
        assert mount.umount().returncode == 0
    array = zarr.open_array(source / "a", mode="r")
    assert array.shards == (32,)
    np.testing.assert_array_equal(array[:], np.ones(33, "int32"))


@pytest.mark.parametrize("tool", ["z5py", "n5store"])
def test_datasets_of_n5(tmp_path: Path, tool: str) -> None:
    """No library of Python reads sharded N5: the blocks are compared with those written without shards."""
    need_fuse()
    source = tmp_path / "source"
    source.mkdir()
    with writable(source, tmp_path, "--create", "n5:chunks_per_shard=4x2") as mount:
        create(mount, tool)
        shards = {p.relative_to(source / "f.n5" / "x").as_posix() for p in (source / "f.n5" / "x").glob("*/*")}
        assert shards == {f"{x}/{y}" for x in range(3) for y in range(4)}
        mount.mount()
        command = [sys.executable, "-c", READ_N5, f"{mount.path}/f.n5/x/"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
        assert int(run.stdout) == int(DATA.sum(dtype="u8"))
        assert mount.umount().returncode == 0


def unsharded(path: Path) -> None:
    """A group with consolidated metadata of two arrays, a volume, and a dataset of N5."""
    group = zarr.create_group(path)
    for name, keys in (("a", "default"), ("g/b", "v2")):
        encoding: Any = {"name": keys, "separator": "/"}
        array = group.create_array(
            name, shape=DATA.shape, chunks=(10, 10), dtype="uint16", chunk_key_encoding=encoding, attributes={"k": 1}
        )
        array[:] = DATA
    zarr.consolidate_metadata(path)
    scale = {"size": [*DATA.shape, 1], "chunk_size": [10, 10, 1], "encoding": "raw", "resolution": [1, 1, 1]}
    multiscale = {"data_type": "uint16", "num_channels": 1, "type": "image"}
    spec: Any = {"driver": "neuroglancer_precomputed", "kvstore": {"driver": "file", "path": f"{path}/v/"}}
    spec |= {"multiscale_metadata": multiscale, "scale_metadata": scale, "create": True}
    ts.open(spec).result().write(DATA[:, :, None, None]).result()
    metadata = {"dimensions": DATA.shape, "blockSize": [10, 10], "dataType": "uint16", "compression": {"type": "raw"}}
    spec = {"driver": "n5", "kvstore": {"driver": "file", "path": f"{path}/n/"}, "metadata": metadata, "create": True}
    ts.open(spec).result().write(DATA).result()


@pytest.mark.filterwarnings("ignore:Object at [nv] is not recognized")
@pytest.mark.parametrize(
    "command",
    ["cp -r", "documents first", *(pytest.param(c, marks=pytest.mark.torture) for c in ("rsync -a", "documents last"))],
)
def test_copies_of_arrays_are_sharded(tmp_path: Path, command: str) -> None:
    """Whatever is copied first: chunks wait for their document, groups are put right when the arrays come."""
    need_fuse()
    source, plain, rules = tmp_path / "source", tmp_path / "plain", "zarr3:chunks_per_shard=4x4;precomputed;n5"
    source.mkdir()
    unsharded(plain)
    with writable(source, tmp_path, "--create", rules) as mount:
        mount.mount()
        commands = {
            "documents last": "rsync -a --exclude zarr.json --exclude info --exclude attributes.json {0}/ {1}/"
            " && rsync -a {0}/ {1}/",
            "documents first": "rsync -a --include */ --include zarr.json --include info --include attributes.json"
            " --exclude * {0}/ {1}/ && rsync -a {0}/ {1}/",
        }
        script = "set -f; " + commands.get(command, command + " {0}/. {1}/").format(plain, mount.path)
        for line in (script, f"diff -r {plain} {mount.path}"):
            run = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=250, check=False)
            assert (run.returncode, run.stderr) == (0, ""), line
        assert mount.umount().returncode == 0
        assert len([p for p in source.rglob("*") if p.is_file()]) == 3 + 2 + 2 * 6 + 1 + 1 + 4
        mount.mount()
        run = subprocess.run(
            f"diff -r -x zarr.json -x info -x attributes.json {plain} {mount.path}", shell=True, capture_output=True,
            text=True, timeout=250, check=False,
        )  # fmt: skip
        assert (run.returncode, run.stdout) == (0, "")
        assert mount.umount().returncode == 0
    members = zarr.open_consolidated(source)
    for name in ("a", "g/b"):
        array = members[name]
        assert isinstance(array, zarr.Array)
        assert (array.shards, dict(array.attrs)) == ((40, 40), {"k": 1})
        np.testing.assert_array_equal(array[:], DATA)
    volume: Any = {"driver": "neuroglancer_precomputed", "kvstore": {"driver": "file", "path": f"{source}/v/"}}
    np.testing.assert_array_equal(ts.open(volume).result().read().result()[..., 0, 0], DATA)


def test_arrays_of_the_draft(tmp_path: Path) -> None:
    need_fuse()
    source = tmp_path / "source"
    source.mkdir()
    with writable(source, tmp_path, "--create", "zarr3-draft:chunks_per_shard=4x4") as mount:
        create(mount, "draft")
    shards = {p.relative_to(source / "h/data/root/g/x").as_posix() for p in (source / "h/data/root/g/x").glob("*/*")}
    assert shards == {f"c{y}/{x}" for y in range(2) for x in range(3)}
    program = (
        "import sys; from tests.clients.zarr_draft import zarr_of_the_draft; z = zarr_of_the_draft(sharding=True);"
        "a = z.api.open(z.Store(sys.argv[1]), path='g/x', mode='r', zarr_version=3);"
        "print(int(a[:].sum(dtype='u8')), a.attrs['k'])"
    )
    command = [str(client_python("zarr2")), "-W", "ignore", "-c", program, str(source / "h")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=True)
    assert run.stdout.split() == [str(DATA.sum(dtype="u8") + 10 * 90 * 5), "1"]


def test_volumes_of_cloud_volume(tmp_path: Path) -> None:
    need_fuse()
    source = tmp_path / "source"
    source.mkdir()
    with writable(source, tmp_path, "--create", "precomputed:chunks_per_shard=16") as mount:
        create(mount, "cloudvolume")
    for index, wanted in enumerate((DATA, DATA[::2, ::2])):
        spec = {"driver": "neuroglancer_precomputed", "kvstore": {"driver": "file", "path": f"{source}/v/"}}
        volume = ts.open({**spec, "scale_index": index}).result()
        np.testing.assert_array_equal(volume.read().result()[..., 0, 0], wanted)
    assert all(p.suffix == ".shard" for p in (source / "v" / "1_1_1").iterdir())
    assert all(p.suffix == ".shard" for p in (source / "v" / "2_2_1").iterdir())
    native = "import sys; from cloudvolume import CloudVolume as C; print(int(C(sys.argv[1], progress=False)[:].sum()))"
    command = [str(client_python("cv")), "-W", "ignore", "-c", native, f"file://{source}/v"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
    assert int(run.stdout) == int(DATA.sum(dtype="u8"))


def test_skeletons_of_cloud_volume(tmp_path: Path) -> None:
    """They are sharded if somebody says into how many; cloud-volume names them `.gz`."""
    need_fuse()
    source = tmp_path / "source"
    source.mkdir()
    with writable(source, tmp_path, "--create", "**/skeletons=precomputed:minishard_bits=1,shard_bits=1") as mount:
        create(mount, "skeletons")
    assert {p.name for p in (source / "v" / "skeletons").iterdir()} == {"info", "0.shard", "1.shard"}
    native = (
        "import sys; from cloudvolume import CloudVolume as C; v = C(sys.argv[1], progress=False);"
        "print([int(v.skeleton.get(int(s)).vertices[0, 0]) for s in sys.argv[2:]])"
    )
    command = [str(client_python("cv")), "-W", "ignore", "-c", native, f"file://{source}/v", *map(str, SEGMENTS)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
    assert run.stdout.split("\n")[0] == str([s % 1000 for s in SEGMENTS])
