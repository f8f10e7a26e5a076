"""Libraries and programs write through a mount; then they and others read the source, without shardfs (T2)."""

from __future__ import annotations

import json
import re
import shutil
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shardfs.jobs.shared_work import JobSource, verify
from tests import data_bcolz, data_blosc2, data_n5, data_precomputed_ids, handmade
from tests.clients import read_n5, read_tensorstore, read_zarr3
from tests.conftest import _run, client_python, run_client
from tests.write.mounts import writable
from tests.write.targets import n5_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.datasets import Array

pytestmark = [pytest.mark.fuse, pytest.mark.interop]

torture = pytest.mark.torture
LEFT = re.compile(r".*(\.partial|\.__lock|\.tmp|\.part|~|\.sw.|#\d+)|\.shardfs.*|sed.{6}|4913")


def through(source: Path, top: Path, client: str, *arguments: str, create: str = "", python: Path | str = "") -> Any:
    """What a client that has written through a mount of `source` expects to be there; nothing else may be left."""
    options = ["--create", create] if create else []
    with writable(source, top, "-o", "idle=0.2", *options) as mount:
        mount.mount()
        run_client(client, *arguments, mount.path, top / "expected.npz", python=python or sys.executable, timeout=250)
        completed = mount.umount()
    assert (completed.returncode, completed.stderr) == (0, "")
    assert [str(p) for p in source.rglob("*") if LEFT.fullmatch(p.name)] == []
    assert [f for report in verify(JobSource.from_url(str(source)), deep=True) for f in report.findings] == []
    with np.load(top / "expected.npz") as found:
        return dict(found)


def same(actual: Array, wanted: Array, label: str) -> None:
    np.testing.assert_array_equal(actual.reshape(wanted.shape), wanted, err_msg=label)


def read_zarr_natively(source: Path, expected: Mapping[str, Array], *, with_tensorstore: bool = True) -> None:
    for path, wanted in expected.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            same(read_zarr3.read(str(source / path), ""), wanted, path)
        if with_tensorstore and (source / path / "zarr.json").exists():
            assert "sharding_indexed" in (source / path / "zarr.json").read_text()
            same(read_tensorstore.read("zarr3", str(source / path), None), wanted, path)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.mkdir()
    return path


# ---- libraries


def test_zarr_python_3(source: Path, tmp_path: Path) -> None:
    expected = through(source, tmp_path, "through_zarr3", create="zarr3:chunks_per_shard=2x2")
    read_zarr_natively(source, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same(read_zarr3.read(str(source / "g"), "a/b"), expected["g/a/b"], "consolidated")


@torture
def test_zarr_python_2_with_the_draft(source: Path, tmp_path: Path) -> None:
    python, out = client_python("zarr2"), tmp_path / "read.npy"
    expected = through(
        source, tmp_path, "through_zarr_draft", "draft", create="zarr3-draft:chunks_per_shard=2x2", python=python
    )
    for path, wanted in expected.items():
        run_client("read_zarr_draft", source, out, "--member", path, "--sharding", python=python)
        same(np.load(out), wanted, path)


MODES = ("os", "lockfile", "none", "non_atomic")


@pytest.mark.parametrize("mode", ["os", *(pytest.param(m, marks=torture) for m in MODES[1:])])
def test_tensorstore_zarr(mode: str, source: Path, tmp_path: Path) -> None:
    expected = through(
        source, tmp_path, "through_tensorstore", "zarr3", mode, create="zarr3:chunks_per_shard=2x2,index_location=start"
    )
    read_zarr_natively(source, expected)


@torture
@pytest.mark.parametrize("mode", MODES)
def test_tensorstore_volumes(mode: str, source: Path, tmp_path: Path) -> None:
    create = "precomputed:shard_bits=1,hash=murmurhash3_x86_128,data_encoding=gzip"
    expected = through(source, tmp_path, "through_tensorstore", "neuroglancer_precomputed", mode, create=create)
    read_volume_natively(source, expected, tmp_path)


def read_volume_natively(source: Path, expected: Mapping[str, Array], top: Path) -> None:
    for path, wanted in expected.items():
        assert json.loads((source / path / "info").read_text())["scales"][0]["sharding"]
        same(read_tensorstore.read("neuroglancer_precomputed", str(source / path), 0), wanted, path)
        out = top / "read.npy"
        run_client("read_cloudvolume", source / path, out, "--fill-missing", python=client_python("cv"))
        same(np.load(out), wanted, path)


@torture
@pytest.mark.parametrize("mode", MODES)
def test_tensorstore_n5(mode: str, source: Path, tmp_path: Path) -> None:
    expected = through(source, tmp_path, "through_tensorstore", "n5", mode, create="n5:chunks_per_shard=2x2")
    read_n5_natively(source, expected, tmp_path, x_first=True)


def test_z5py(source: Path, tmp_path: Path) -> None:
    expected = through(source, tmp_path, "through_z5", create="n5:chunks_per_shard=2x2")
    read_n5_natively(source, expected, tmp_path, x_first=False)


@torture
def test_zarr_python_2_with_n5(source: Path, tmp_path: Path) -> None:
    create = "n5:chunks_per_shard=2x2,index_location=start"
    expected = through(source, tmp_path, "through_zarr_draft", "n5", create=create, python=client_python("zarr2"))
    read_n5_natively(source, expected, tmp_path, x_first=False)


def read_n5_natively(source: Path, expected: Mapping[str, Array], top: Path, *, x_first: bool) -> None:
    """No Python library reads shards in N5: they are taken apart, and the blocks read by two libraries."""
    for path, wanted in expected.items():
        document = json.loads((source / path / "attributes.json").read_text())
        how = document["codecs"][0]["configuration"]
        block = how["chunk_shape"][::-1]
        per = tuple(s // b for s, b in zip(document["blockSize"], block, strict=True))
        compression = {"type": "raw"}
        if len(how["codecs"]) > 1:
            compression = {"type": how["codecs"][1]["name"], **how["codecs"][1].get("configuration", {})}
        plain = top / "plain" / path
        members = {"dataType": document["dataType"], "compression": compression}
        for above in list(plain.parents)[: len(Path(path).parts)]:
            handmade.write_json(above / "attributes.json", {"n5": "4.0.0"})
        handmade.write_json(
            plain / "attributes.json", {"dimensions": document["dimensions"], "blockSize": block, **members}
        )
        index = data_n5.Index(location=how["index_location"])
        for shard in (p for p in (source / path).rglob("*") if p.name.isdigit() and p.is_file()):
            at = tuple(map(int, shard.relative_to(source / path).parts))
            for local, data in n5_blocks(shard.read_bytes(), per, index).items():
                place = [a * n + i for a, n, i in zip(at, per, local, strict=True)]
                handmade.write_files(plain, {data_n5.key(place): data})
        for client in ("tensorstore", "z5"):
            values = read_n5.read(client, str(top / "plain"), path)
            same(values if x_first else values.T, wanted, f"{client} {path}")


@pytest.mark.parametrize("kind", ["volume_gz", pytest.param("volume", marks=torture)])
def test_cloudvolume(kind: str, source: Path, tmp_path: Path) -> None:
    """Compressed chunks are written, read and deleted while they are published one after the other."""
    python = client_python("cv")
    create = "precomputed:shard_bits=1,minishard_bits=1,minishard_index_encoding=gzip"
    expected = through(source, tmp_path, "through_cloudvolume", kind, create=create, python=python)
    read_volume_natively(source, expected, tmp_path)
    assert "nobody@example.org" in (source / "v/provenance").read_text()


def test_igneous(source: Path, tmp_path: Path) -> None:
    """The smaller scale is written and read in compressed chunks, beside the one from which it is made."""
    python, create = client_python("cv"), "precomputed:shard_bits=1"
    (small,) = through(source, tmp_path, "through_igneous", create=create, python=python).values()
    for scale, wanted in enumerate((small.repeat(2, 0).repeat(2, 1), small)):
        same(read_tensorstore.read("neuroglancer_precomputed", str(source / "v"), scale), wanted, str(scale))
    assert {p.suffix for p in source.glob("v/*_*_*/*")} == {".shard"}


@torture
@pytest.mark.parametrize("name", ["igneous_murmur", "igneous_identity"])
def test_cloudvolume_skeletons_and_meshes(name: str, tmp_path: Path) -> None:
    """Skeletons, and fragments with their manifests, are uploaded under other labels, and the former deleted."""
    from tests.clients.through_cloudvolume import LABELS

    written = data_precomputed_ids.DATASETS[name](tmp_path)
    expected = through(written.path, tmp_path, "through_cloudvolume", "ids", python=client_python("cv"))
    labels = json.dumps([label + 1 for label in LABELS])
    out = tmp_path / "read.npy"
    run_client("read_cloudvolume_ids", written.path, out, labels, python=client_python("cv"))
    same(np.load(out), expected["ids"], "ids")


@torture
def test_bcolz(source: Path, tmp_path: Path) -> None:
    """In place: arrays of superchunks, and bloscpack's own files, which it reads again."""
    python, out = client_python("bcolz"), tmp_path / "read.npy"
    data = np.arange(300, dtype="<i4").reshape(100, 3)
    data_bcolz.write_array(source / "super", data, 7, 4, data_bcolz.Superchunk(checksum=2))
    for name in ("array-1d", "array-2d"):
        shutil.copy(Path(__file__).parents[1] / f"golden/bloscpack/{name}.blp", source)
    expected = through(source, tmp_path, "through_bcolz", python=python)
    for name in ("array-1d.blp", "array-2d.blp"):
        run_client("read_bloscpack", source / name, out, python=python)
        assert np.load(out).tobytes() == expected[name].tobytes()
    decoded_bytes = b"".join(data_bcolz.decoded(source / f"super/data/__{i}__.bin") for i in range(1, 5))
    assert decoded_bytes == expected["super"].tobytes()


def test_blosc2(source: Path, tmp_path: Path) -> None:
    """In place: chunks that grow, and one that becomes zeros."""
    out = tmp_path / "read.npy"
    data_blosc2.WRITERS["ramp.b2nd"](source / "ramp.b2nd", True)
    expected = through(source, tmp_path, "through_blosc2")
    run_client("read_blosc2", source / "ramp.b2nd", out)
    same(np.load(out), expected["ramp.b2nd"], "ramp.b2nd")


# ---- programs

DATA = np.arange(24 * 20, dtype="u2").reshape(24, 20) + 1


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """An array without shards, in a group."""
    import zarr

    path = tmp_path / "plain"
    group = zarr.open_group(path, mode="w", attributes={"of": "all"})
    group.create_array("a", data=DATA, chunks=(3, 4), attributes={"unit": "mm"})
    (path / "notes").mkdir()
    (path / "notes/text").write_text("some text\n")
    return path


def _replaced(data: Array) -> Array:
    data = data.copy()
    data[:3, :4] = data[3:6, 4:8]
    return data


SCRIPTS: dict[str, tuple[str, Callable[[Array], Array]]] = {
    "cp": ("cp -r $PLAIN/. .; cp a/c/1/1 a/c/0/0", _replaced),
    "cp -a": ("cp -a $PLAIN/. .; cp --remove-destination a/c/1/1 a/c/0/0", _replaced),
    "mv": ("cp -r $PLAIN/. .; cp a/c/1/1 x; mv x a/c/0/0; mv a b; mv b a; mv notes n; mv n notes", _replaced),
    "dd": (
        "cp -r $PLAIN/. .; dd if=a/c/1/1 of=a/c/0/0 bs=7 conv=fsync;"
        "dd if=a/c/0/0 of=a/c/0/0 bs=5 skip=2 seek=2 count=1 conv=notrunc",
        _replaced,
    ),
    "tar": ("tar -C $PLAIN -cf - . | tar xpf -; tar -C $PLAIN -cf all.tar a/c/1; tar xf all.tar; rm all.tar", np.copy),
    "install": ("cp -r $PLAIN/. .; install -m 640 a/c/1/1 a/c/0/0", _replaced),
    "sed": (
        "cp -r $PLAIN/. .; sed -i s/mm/nm/ a/zarr.json; sed -i.bak s/all/many/ zarr.json; rm zarr.json.bak",
        np.copy,
    ),
    "vim": (
        "cp -r $PLAIN/. .; HOME=$PWD vim -es -u NONE -N -c 'set swapfile' -c '%s/mm/nm/' -c wq a/zarr.json;"
        "HOME=$PWD vim -es -u NONE -N -c 'set backupcopy=yes backup' -c '%s/some/more/' -c wq notes/text;"
        "rm -f notes/*~",
        np.copy,
    ),
    "find -delete": ("cp -r $PLAIN/. .; find a -type f -path '*/c/7/*' -delete; rmdir a/c/7", lambda a: _cut(a)),
}


def _cut(data: Array) -> Array:
    data = data.copy()
    data[21:] = 0
    return data


def shell(script: str, directory: Path, plain: Path) -> str:
    run = _run(["env", f"PLAIN={plain}", "bash", "-euc", f"umask 022; {script}"], 60, cwd=directory)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.parametrize("name", ["cp", *(pytest.param(name, marks=torture) for name in SCRIPTS if name != "cp")])
def test_programs(name: str, source: Path, plain: Path, tmp_path: Path) -> None:
    if shutil.which(name.split(maxsplit=1)[0]) is None:
        pytest.skip(f"no {name}")
    script, change = SCRIPTS[name]
    with writable(source, tmp_path, "--create", "zarr3:chunks_per_shard=4x4") as mount:
        mount.mount()
        shell(script, mount.path, plain)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run_client("read_zarr3", mount.path, tmp_path / "read.npy", "--member", "a")
        same(np.load(tmp_path / "read.npy"), change(DATA), "on the mount")
        completed = mount.umount()
    assert (completed.returncode, completed.stderr) == (0, "")
    assert [str(p) for p in source.rglob("*") if LEFT.fullmatch(p.name)] == []
    read_zarr_natively(source, {"a": change(DATA)})
    if name in ("sed", "vim"):
        assert json.loads((source / "a/zarr.json").read_text())["attributes"] == {"unit": "nm"}


RSYNC = ["-a", "-a --inplace", "-a --delay-updates", "-aW --checksum", "-a --partial"]


@pytest.mark.parametrize("options", ["-a", *(pytest.param(o, marks=torture) for o in RSYNC[1:])])
def test_rsync_moves_nothing_the_second_time(options: str, source: Path, plain: Path, tmp_path: Path) -> None:
    if shutil.which("rsync") is None:
        pytest.skip("no rsync")
    command = f"rsync {options} --itemize-changes $PLAIN/ ."
    with writable(source, tmp_path, "-o", "idle=1000,age=1000", "--create", "zarr3:chunks_per_shard=4x4") as mount:
        mount.mount()
        assert shell(command, mount.path, plain)
        assert shell(command, mount.path, plain) == ""
        assert mount.flush().returncode == 0
        assert shell(command, mount.path, plain) == ""
        # rsync compares sizes and whole seconds: without `touch`, a change within the second of creation is not seen.
        shell("echo more >> notes/text; cp a/c/1/1 a/c/0/0; touch -d @1 a/c/0/0; rm -r a/c/7", plain, plain)
        assert len(shell(f"{command} --delete", mount.path, plain).splitlines()) > 3
        assert shell(f"{command} --delete", mount.path, plain) == ""
        completed = mount.umount()
    assert (completed.returncode, completed.stderr) == (0, "")
    assert [str(p) for p in source.rglob("*") if LEFT.fullmatch(p.name)] == []
    read_zarr_natively(source, {"a": _cut(_replaced(DATA))})
    assert (source / "notes/text").read_text() == "some text\nmore\n"
