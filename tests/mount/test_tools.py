"""Programs that know nothing of arrays, on real mounts: what they see is what they see in the unsharded twin."""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import tensorstore as ts

from tests import handmade
from tests.datasets import read_tree
from tests.mount.programs import attempt, copy_tree, errno_of, lines, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conftest import FuseRequests, Mounted
    from tests.datasets import Dataset

    Get = Callable[[str, str], Dataset]

pytestmark = pytest.mark.fuse


def need(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"no {program}")


def files(root: Path) -> list[str]:
    """Names of regular files below `root`."""
    return lines("find", ".", "-type", "f", cwd=root)


def is_document(name: str) -> bool:
    return name.rsplit("/", 1)[-1] in ("zarr.json", "info")


def chunks(root: Path) -> list[str]:
    """All files but metadata documents, whose spaces depend on the writer."""
    return [name for name in files(root) if not is_document(name)]


DENSE = [
    ("zarr3", "zarr_python"),
    ("zarr3", "nested_three"),
    ("zarr3", "keys_v2_dot"),
    ("zarr3", "group_consolidated"),
    ("zarr3", "gzip_after_zstd_inside"),
    ("precomputed", "index_gzip_data_gzip"),
    ("precomputed", "both_scales_sharded"),
    ("precomputed", "two_scales"),
]
SPARSE = [("zarr3", "sparse"), ("zarr3", "nested_sparse"), ("precomputed", "sparse_murmur")]


@pytest.fixture(params=[*DENSE, *SPARSE], ids="-".join)
def variant(request: pytest.FixtureRequest, dataset: Get) -> Dataset:
    return dataset(*request.param)


# ------------------------------------------------------------------------------------- what is read of a tree


def test_names_sizes_and_bytes(variant: Dataset, mounted: Mounted) -> None:
    twin = variant.twin
    with mounted(variant.path) as mount:
        assert files(mount) == files(twin)
        names = chunks(twin)

        sizes = ["-type", "f", "-not", "-name", "zarr.json", "-not", "-name", "info", "-printf", r"%P %s\n"]
        assert lines("find", ".", *sizes, cwd=mount) == lines("find", ".", *sizes, cwd=twin)
        assert lines("md5sum", *names, cwd=mount) == lines("md5sum", *names, cwd=twin)
        # Directories without a chunk are there on a mount only.
        told = attempt("diff", "-r", "-x", "zarr.json", "-x", "info", mount, twin).stdout.splitlines()
        assert [line for line in told if not line.startswith(f"Only in {mount}")] == []
        if variant.name not in {name for _, name in SPARSE}:
            assert told == []
        assert read_tree(mount) == read_tree(twin)


def test_ls(dataset: Get, mounted: Mounted) -> None:
    variant = dataset("zarr3", "group")
    with mounted(variant.path) as mount:
        assert lines("ls", "-A", cwd=mount) == sorted([".hidden", "README.md", "labels", "raw", "tables", "zarr.json"])
        # Recursively: the same directories with the same names in them.
        assert run("ls", "-AR1", cwd=mount) == run("ls", "-AR1", cwd=variant.twin)
        long = [line.split() for line in run("ls", "-lR", cwd=mount).splitlines() if line.startswith(("-", "d"))]
        assert {words[0] for words in long} == {"-r--r--r--", "dr-xr-xr-x"}
        # Unsorted, as a program sees it that does not look at all of it first.
        assert lines("ls", "-f", cwd=mount / "labels/cells/c/0") == sorted([".", "..", "0", "1", "2", "3"])


def test_find_by_size_and_kind(dataset: Get, mounted: Mounted) -> None:
    variant = dataset("zarr3", "zarr_python")
    with mounted(variant.path) as mount:
        # 4 x 4 x 4 float32 and what zstd adds or takes
        sizes = sorted({path.stat().st_size for path in variant.twin.rglob("c/*/*/*")})
        middle = sizes[len(sizes) // 2]
        for test in (f"-{middle}c", f"{middle}c", f"+{middle}c"):
            kind = ["-type", "f", "-not", "-name", "zarr.json", "-size", test]
            assert lines("find", ".", *kind, cwd=mount) == lines("find", ".", *kind, cwd=variant.twin)
        assert lines("find", ".", "-type", "d", cwd=mount) == lines("find", ".", "-type", "d", cwd=variant.twin)
        assert lines("find", ".", "-type", "l", "-o", "-type", "p", cwd=mount) == []
        assert lines("find", ".", "-empty", cwd=mount) == []


def test_du_and_blocks(dataset: Get, mounted: Mounted) -> None:
    variant = dataset("precomputed", "index_raw_data_gzip")
    with mounted(variant.path) as mount:
        names = chunks(variant.twin)
        assert lines("du", "-b", *names, cwd=mount) == lines("du", "-b", *names, cwd=variant.twin)
        for name in names:
            attributes = os.stat(mount / name)
            assert attributes.st_blocks == -(-attributes.st_size // 512)
        total = sum(os.stat(mount / name).st_blocks for name in files(mount))
        assert int(run("du", "-s", "-B512", mount).split()[0]) == total


def test_copies(variant: Dataset, mounted: Mounted, tmp_path: Path) -> None:
    need("rsync")
    with mounted(variant.path) as mount:
        copies = [tmp_path / name for name in ("cp-r", "cp-a", "rsync", "tar")]
        run("cp", "-r", mount, copies[0])
        run("cp", "-a", mount, copies[1])
        run("rsync", "-a", f"{mount}/", copies[2])
        copies[3].mkdir()
        run("sh", "-c", 'tar -C "$0" -cf - . | tar -C "$1" -xf -', mount, copies[3])
        tree_files = read_tree(mount)
        times = {name: os.stat(mount / name).st_mtime for name in files(mount)}
        # What is up to date need not be read: names, sizes and times are enough for rsync.
        assert run("rsync", "-a", "--itemize-changes", f"{mount}/", copies[2]) == ""
    assert tree_files == read_tree(variant.twin)
    for copy in copies:
        assert read_tree(copy) == tree_files
    for copy in copies[1:]:
        # tar has whole seconds.
        assert {name: int(os.stat(copy / name).st_mtime) for name in times} == {n: int(t) for n, t in times.items()}
    for copy in copies:
        run("chmod", "-R", "u+w", copy)  # directories came read-only


def test_cat_dd_and_parts_of_files(dataset: Get, mounted: Mounted) -> None:
    variant = dataset("zarr3", "zarr_python")
    name = "c/1/2/0"
    whole = (variant.twin / name).read_bytes()
    with mounted(variant.path) as mount:
        path = mount / name
        assert hashlib.md5(whole).hexdigest() == run("md5sum", path).split()[0]
        assert run("sh", "-c", 'cat "$0" | wc -c', path).strip() == str(len(whole))
        assert run("sh", "-c", 'dd if="$0" bs=1 skip=7 count=20 status=none | od -An -v -tu1', path).split() == [
            str(octet) for octet in whole[7:27]
        ]
        assert run("sh", "-c", 'tail -c 5 "$0" | od -An -tu1', path).split() == [str(octet) for octet in whole[-5:]]
        with open(path, "rb", buffering=0) as file:
            for offset, size in ((0, 1), (3, 10), (len(whole) - 4, 100), (len(whole), 5), (len(whole) + 9, 5)):
                assert os.pread(file.fileno(), size, offset) == whole[offset : offset + size]
            assert file.seek(-6, os.SEEK_END) == len(whole) - 6
            assert file.read() == whole[-6:]


def test_memory_maps(dataset: Get, mounted: Mounted) -> None:
    variant = dataset("zarr3", "default")
    twin = np.fromfile(variant.twin / "c/1/2", "u2")
    with mounted(variant.path) as mount:
        mapped = np.memmap(mount / "c/1/2", "u2", mode="r")
        assert np.array_equal(mapped, twin)
        with open(mount / "c/1/2", "rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE) as private:
            private[0:2] = b"\xff\xff"  # in this process only
            assert np.array_equal(mapped, twin)
        del mapped


# ------------------------------------------------------------------------------------------------- attributes


@pytest.fixture
def dated(dataset: Get, tmp_path: Path) -> Path:
    """A copy of a dataset whose shards and documents have times of their own."""
    path = copy_tree(dataset("zarr3", "zarr_python").path, tmp_path / "dated")
    for number, file in enumerate(sorted(path.rglob("*"))):
        if file.is_file():
            os.utime(file, ns=(0, 1_600_000_000_123_456_789 + number * 10**12))
    return path


def test_times_are_those_of_the_shards(dated: Path, mounted: Mounted) -> None:
    with mounted(dated) as mount:
        assert os.stat(mount / "zarr.json").st_mtime_ns == os.stat(dated / "zarr.json").st_mtime_ns
        # Shards of 16 x 16 x 8 in chunks of 4 x 4 x 4; the array has 30 x 20 x 10.
        for name in files(mount):
            if not is_document(name):
                x, y, z = map(int, name.removeprefix("./c/").split("/"))
                shard = dated / f"c/{x // 4}/{y // 4}/{z // 2}"
                assert os.stat(mount / name).st_mtime_ns == os.stat(shard).st_mtime_ns
        newer = lines("find", "c", "-type", "f", "-newer", dated / "c/1/0/0", cwd=mount)
        later = [(x, y, z) for x in range(4, 8) for y in range(5) for z in range(3) if y > 3 or z > 1]
        assert newer == sorted(f"c/{x}/{y}/{z}" for x, y, z in later)
        seconds = 1_600_000_000 + 1000 * sorted(dated.rglob("*")).index(dated / "c/0/0/0")
        assert run("stat", "-c", "%F %s %Y %a", mount / "c/3/3/1").split()[-2:] == [str(seconds), "444"]


def test_inode_numbers_outlive_the_caches_of_the_kernel(dated: Path, mounted: Mounted) -> None:
    drop = Path("/proc/sys/vm/drop_caches")
    if not os.access(drop, os.W_OK):
        pytest.skip("dropping caches needs root")
    with mounted(dated) as mount:
        before = lines("find", ".", "-printf", r"%i %P\n", cwd=mount)
        drop.write_text("2")
        assert lines("find", ".", "-printf", r"%i %P\n", cwd=mount) == before
        drop.write_text("2")
        looked_up = {f"{os.stat(path).st_ino} {path.relative_to(mount)}" for path in mount.rglob("*")}
        assert looked_up == {line for line in before if not line.endswith(" ")}
    numbers = [line.split()[0] for line in before]
    assert len(set(numbers)) == len(numbers)
    # What `readdir` tells is what `stat` tells; else programs that compare both believe in a mountpoint.
    with mounted(dated) as mount, os.scandir(mount / "c/0/0") as entries:
        assert all(entry.inode() == os.stat(entry.path).st_ino for entry in entries)


def test_extended_attributes_tell_where_the_bytes_lie(dataset: Get, mounted: Mounted) -> None:
    need("getfattr")
    variant = dataset("zarr3", "nested_three")
    with mounted(variant.path) as mount:
        for name in chunks(variant.twin)[:20]:
            told = dict(
                line.removeprefix("user.shardfs.").split("=", 1)
                for line in run("getfattr", "-d", "--absolute-names", mount / name).splitlines()
                if line.startswith("user.shardfs.")
            )
            assert sorted(told) == ["codecs", "nbytes", "offset", "shard"]
            shard, offset, size = (json.loads(told[key]) for key in ("shard", "offset", "nbytes"))
            content = (variant.path / shard.split("[")[0]).read_bytes()[int(offset) : int(offset) + int(size)]
            assert content == (variant.twin / name).read_bytes()
        assert json.loads(told["codecs"]) == "bytes,gzip"
        unknown = attempt("getfattr", "-n", "user.other", mount / name)
        assert unknown.returncode != 0
        assert "No such attribute" in unknown.stderr
        assert errno_of(lambda: os.getxattr(mount / name, "security.selinux")) in (errno.ENOTSUP, errno.ENODATA)


def test_df_tells_of_the_source(dated: Path, mounted: Mounted) -> None:
    with mounted(dated) as mount:
        for columns in ("size", "itotal"):
            told = ["df", "-B1", f"--output={columns}"]
            assert run(*told, mount) == run(*told, dated)
        words = run("df", "-T", mount).splitlines()[-1].split()
        assert words[:2] == [str(dated), "fuse.shardfs"]
        assert words[-1] == str(mount)


# ---------------------------------------------------------------------------------------------- what is refused


def test_every_change_is_refused(dated: Path, mounted: Mounted, tmp_path: Path) -> None:
    with mounted(dated) as mount:
        chunk, document, directory = mount / "c/0/0/0", mount / "zarr.json", mount / "c/0"
        before = read_tree(mount)
        commands: list[list[str | Path]] = [
            ["touch", mount / "new"],
            ["touch", chunk],
            ["touch", document],
            ["rm", "-f", chunk],
            ["rm", "-rf", mount / "c"],
            ["mkdir", mount / "d"],
            ["rmdir", directory],
            ["chmod", "600", chunk],
            ["chown", "1:1", chunk],
            ["mv", chunk, mount / "c/0/0/moved"],
            ["ln", chunk, mount / "hard"],
            ["ln", "-s", chunk, mount / "soft"],
            ["mkfifo", mount / "fifo"],
            ["truncate", "-s", "0", chunk],
            ["cp", document, mount / "copy.json"],
            ["sh", "-c", 'echo x >> "$0"', chunk],
            ["sh", "-c", 'echo x > "$0"', mount / "new"],
            ["dd", "if=/dev/zero", f"of={chunk}", "bs=1", "count=1", "conv=notrunc"],
        ]
        for command in commands:
            refused = attempt(*command)
            assert refused.returncode != 0, command
            assert "Read-only file system" in refused.stderr, (command, refused.stderr)
        calls: dict[str, Callable[[], object]] = {
            "O_RDWR": lambda: os.open(chunk, os.O_RDWR),
            "O_CREAT": lambda: os.open(mount / "new", os.O_CREAT | os.O_RDONLY),
            "O_TMPFILE": lambda: os.open(mount, os.O_TMPFILE | os.O_RDWR),
            "rename": lambda: os.rename(document, mount / "other"),
            "setxattr": lambda: os.setxattr(chunk, "user.x", b""),
            "removexattr": lambda: os.removexattr(chunk, "user.shardfs.shard"),
            "utime": lambda: os.utime(chunk),
            "mknod": lambda: os.mknod(mount / "node"),
        }
        assert {name: errno_of(call) for name, call in calls.items()} == dict.fromkeys(calls, errno.EROFS)
        assert read_tree(mount) == before


def test_chunks_that_do_not_exist(dataset: Get, mounted: Mounted) -> None:
    for kind, name in SPARSE:
        variant = dataset(kind, name)
        chunk_names = {name.removeprefix("./") for name in files(variant.twin)}
        # Of the whole grid, all that the twin has not.
        if kind == "zarr3":
            grid = {f"c/{y}/{x}" for y in range(12) for x in range(12)}
        else:
            spans = [[f"{2 * i}-{min(2 * i + 2, n)}" for i in range(-(-n // 2))] for n in (21, 13, 9)]
            scale = next(path.name for path in variant.twin.iterdir() if path.is_dir())
            grid = {f"{scale}/{x}_{y}_{z}" for x in spans[0] for y in spans[1] for z in spans[2]}
        assert len(grid & chunk_names) > 1
        with mounted(variant.path) as mount:
            errors = {path: errno_of((mount / path).stat) for path in grid}
            assert errors == {path: None if path in chunk_names else errno.ENOENT for path in grid}
            for odd in ("c/00/0", "c/0/0/0", "c/-1/0", "c/0/99999999999999999999", "c/0/ 0", "c/0/0x", "x", "0/0"):
                if odd not in chunk_names:
                    assert errno_of((mount / odd).stat) in (errno.ENOENT, errno.ENOTDIR)


def test_foreign_files_pass_through(dataset: Get, mounted: Mounted) -> None:
    for kind, name in (("zarr3", "group"), ("precomputed", "two_scales")):
        variant = dataset(kind, name)
        assert variant.foreign
        with mounted(variant.path) as mount:
            for path in variant.foreign:
                assert (mount / path).read_bytes() == (variant.path / path).read_bytes()
                assert os.stat(mount / path).st_mtime_ns == os.stat(variant.path / path).st_mtime_ns
                assert (mount / path).name in os.listdir((mount / path).parent)


# ------------------------------------------------------------------------------------------------------ damage

DAMAGED = [
    "zarr_wrong_checksum",
    "zarr_truncated",
    "zarr_truncated_start",
    "zarr_range_past_end",
    "zarr_nested_inner_damage",
    "zarr_zero_byte_shard",
    "zarr_garbage_without_checksum",
    "volume_chunk_past_end",
    "volume_index_past_end",
    "volume_data_gzip_damaged",
    "volume_index_not_gzip",
    "volume_zero_byte_shard",
]


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_fails_the_copy_and_stays_where_it_is(name: str, mounted: Mounted, tmp_path: Path) -> None:
    need("rsync")
    case = handmade.CASES[name](tmp_path / "case")
    with mounted(case.path) as mount:
        for path in case.bad:
            assert (mount / path).is_file()
            assert errno_of((mount / path).read_bytes) == errno.EIO
        copy = tmp_path / "copy"
        failed = attempt("rsync", "-a", f"{mount}/", copy)
        assert failed.returncode != 0
        assert "Input/output error" in failed.stderr
        contents = {str(path.relative_to(copy)): path.read_bytes() for path in copy.rglob("*") if path.is_file()}
        assert {path: content for path, content in contents.items() if not is_document(path)} == dict(case.good)

        copy = tmp_path / "second"
        failed = attempt("cp", "-r", mount, copy)
        assert failed.returncode != 0
        assert "Input/output error" in failed.stderr
        contents = {str(path.relative_to(copy)): path.read_bytes() for path in copy.rglob("*") if path.is_file()}
        # cp makes the new file before it reads the old one.
        good = {path: content for path, content in contents.items() if not is_document(path) and content}
        assert good == dict(case.good)
    run("chmod", "-R", "u+w", tmp_path)


# --------------------------------------------------------------------------------------- requests of the kernel


def read(path: Path) -> bytes:
    """As a program in C does: Python's own buffered files ask of each whether it is a terminal."""
    with path.open("rb", buffering=0) as file:
        return file.read()


SIZES = {"small": 16 << 10, "middle": 64 << 10, "large": 128 << 10}


@pytest.fixture(scope="module")
def squares(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Arrays of 8 x 8 chunks in 4 shards, with chunks of 16, 64 and 128 KiB, the last row of shards missing."""
    root = tmp_path_factory.mktemp("squares")
    handmade.write_json(root / "zarr.json", handmade.group_document())
    for name, size in SIZES.items():
        codec = {
            "name": "sharding_indexed",
            "configuration": {
                "chunk_shape": [1, size],
                "codecs": [{"name": "bytes"}],
                "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
            },
        }
        metadata = {
            "shape": [16, 8 * size],
            "data_type": "uint8",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 4 * size]}},
            "codecs": [codec],
            "fill_value": 0,
        }
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{root / name}/"}, "metadata": metadata}
        values = np.random.default_rng(3).integers(1, 255, (8, 8 * size), dtype=np.uint8)
        ts.open(spec, create=True).result()[:8].write(values).result()
    return root


@pytest.fixture
def warm(squares: Path, mounted: Mounted) -> Iterator[Path]:
    """A mount whose kernel has learned that files and directories are opened without asking."""
    with mounted(squares) as mount:
        (mount / "zarr.json").read_bytes()
        os.listdir(mount)
        os.stat(mount / "small/c/7/7")
        yield mount


@pytest.mark.parametrize("name", SIZES)
def test_requests_to_read_a_chunk(name: str, warm: Path, fuse_requests: FuseRequests) -> None:
    array = warm / name
    os.stat(array / "c")
    with fuse_requests(warm) as first:
        data = read(array / "c/2/1")
    assert len(data) == SIZES[name]
    assert first == {"LOOKUP": 2, "READ": 1}  # "2" and "1": the rest is known
    with fuse_requests(warm) as neighbour:
        read(array / "c/2/2")
    assert neighbour == {"LOOKUP": 1, "READ": 1}
    with fuse_requests(warm) as second:
        assert read(array / "c/2/1") == data
        os.stat(array / "c/2/2")
    assert second == {}


def test_requests_to_read_from_the_root(squares: Path, mounted: Mounted, fuse_requests: FuseRequests) -> None:
    with mounted(squares) as mount:
        (mount / "zarr.json").read_bytes()
        with fuse_requests(mount) as counts:
            read(mount / "small/c/0/0")
    assert counts == {"LOOKUP": 4, "READ": 1}


def test_a_chunk_that_is_missing_is_asked_for_once(warm: Path, fuse_requests: FuseRequests) -> None:
    os.stat(warm / "small/c/1/1")
    os.stat(warm / "small/c/9")
    with fuse_requests(warm) as counts:
        for _ in range(3):
            assert not (warm / "small/c/9/0").exists()
            assert errno_of(lambda: os.open(warm / "small/c/9/0", os.O_RDONLY)) == errno.ENOENT
    assert counts == {"LOOKUP": 1}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories of 900 chunks: one row of a Zarr array, and all of one with flat names."""
    root = tmp_path_factory.mktemp("wide")
    handmade.write_json(root / "zarr.json", handmade.group_document())
    for name, encoding in (("rows", "/"), ("flat", ".")):
        document = handmade.zarr_metadata((2, 450), (2, 30), (1, 1), separator=encoding)
        if name == "rows":
            document = handmade.zarr_metadata((2, 900), (2, 30), (1, 1), separator=encoding)
        handmade.write_json(root / name / "zarr.json", document)
        columns = document["shape"][1]
        for shard in range(columns // 30):
            data = handmade.zarr_shard([bytes([1 + slot]) for slot in range(60)])
            handmade.write_files(root / name, {f"c{encoding}0{encoding}{shard}": data})
    return root


LISTINGS = {
    "ls -l": ["ls", "-l"],
    "ls -f": ["ls", "-f"],
    "find -size": ["find", ".", "-size", "+2c"],
    "find -type": ["find", ".", "-type", "l"],
    "du": ["du", "-a"],
}


@pytest.mark.parametrize("place", ["rows/c/1", "flat"])
@pytest.mark.parametrize("command", LISTINGS)
def test_a_listing_asks_nothing_for_each_entry(
    command: str, place: str, wide: Path, mounted: Mounted, fuse_requests: FuseRequests
) -> None:
    with mounted(wide) as mount:
        os.stat(mount / place)
        with fuse_requests(mount) as first:
            run(*LISTINGS[command], cwd=mount / place)
        # 900 entries of some 160 bytes: a page of a listing holds 4 KiB to 128 KiB of them.
        assert first.total() < 60, first
        assert first["READDIR"] + first["READDIRPLUS"] > 0
        assert first["LOOKUP"] + first["GETATTR"] + first["GETXATTR"] + first["LISTXATTR"] < 12, first
        with fuse_requests(mount) as second:
            run(*LISTINGS[command], cwd=mount / place)
            names = os.listdir(mount / place)
            for name in names[::50]:
                os.stat(mount / place / name)
        assert len(names) >= 900
        assert second["LOOKUP"] + second["GETATTR"] + second["GETXATTR"] + second["LISTXATTR"] < 12, second
        if command in ("ls -l", "find -size", "du"):
            assert second["LOOKUP"] == 0


def test_modes(dataset: Get, mounted: Mounted) -> None:
    with mounted(dataset("zarr3", "default").path) as mount:
        assert stat.filemode(os.stat(mount).st_mode) == "dr-xr-xr-x"
        assert stat.filemode(os.stat(mount / "c/0/0").st_mode) == "-r--r--r--"
        assert os.stat(mount / "c/0/0").st_uid == os.getuid()
