"""What POSIX says, and random operations, on real mounts: chunks, and files that are passed through to the source."""

from __future__ import annotations

import json
import shutil
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.conftest import _run, need_fuse
from tests.write.mounts import client, program, succeeded, writable
from tests.write.scale import times

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

    from tests.write.mounts import WritableMount

pytestmark = [pytest.mark.fuse, pytest.mark.interop]

COUNT, CHUNK = 1000, 32


def random_operations(path: Path, seed: int, number: int, *more: str) -> None:
    """On one file; `SHARDFS_TORTURE=N` does N times as many."""
    much = ["--seed", str(seed), "--operations", str(number * times())]
    program("fsx", path, *much, *more, timeout=240 * times())


def shell(script: str, directory: Path) -> subprocess.CompletedProcess[str]:
    run = _run(["bash", "-euc", script], 60, cwd=directory)
    assert run.returncode == 0, run.stdout + run.stderr
    return run


def content(directory: Path) -> dict[str, Any]:
    """Names, bytes and modes, asked for by another process."""
    ask = """if 1:
        import hashlib, json, os, sys
        told = {}
        for at, directories, files in os.walk(sys.argv[1]):
            for name in directories + files:
                path = os.path.join(at, name)
                found = os.lstat(path)
                data = hashlib.sha256(open(path, "rb").read()).hexdigest() if name in files else None
                told[os.path.relpath(path, sys.argv[1])] = data, oct(found.st_mode)
        print(json.dumps(told))
    """
    run = _run([sys.executable, "-c", ask, directory], 60)
    assert run.returncode == 0, run.stderr
    told: dict[str, Any] = json.loads(run.stdout)
    return told


SOURCE = """
umask 022
mkdir -p source/deep/er source/empty
for i in $(seq 40); do head -c $((i * 4099)) /dev/zero | tr '\\0' "\\\\$((i % 8))" > source/deep/$i; done
seq 20000 > source/text
echo one > source/deep/er/one
chmod 640 source/text; chmod 500 source/deep/er
touch -d 2001-02-03T04:05:06.789 source/text source/deep/er
"""

SCRIPTS = {
    "cp -a": "cp -a source copy; cp -a source/text copy/text2; cp --reflink=auto source/deep/7 copy/seven",
    "cp over": "cp -a source copy; cp source/deep/1 copy/deep/40; cp --remove-destination source/text copy/deep/2",
    "mv": "cp -a source copy; mv copy/deep copy/moved; mv copy/moved/1 copy/2; mv -f copy/2 copy/moved/3; mv copy new",
    "mv -n": "cp -a source copy; mv -n copy/deep/1 copy/deep/2; mv -u copy/deep/3 copy/deep/4 || true",
    "install": "install -D -m 751 source/text a/b/text; install -d -m 700 c",
    "tar": "tar -cf all.tar source; mkdir out; tar -xpf all.tar -C out; tar -rf all.tar -C out source/text; rm all.tar",
    "dd": "dd if=source/text of=a bs=777 conv=fsync; dd if=source/text of=a bs=100 seek=30 count=7 conv=notrunc;"
    "dd if=source/deep/9 of=a oflag=append conv=notrunc bs=5000; dd if=source/text of=b bs=4096 oflag=direct count=3",
    "append": "for i in $(seq 50); do echo $i >> log; done; seq 5 >> source/text; exec 3>>log; echo x >&3; echo y >&3",
    "truncate": "cp -r source c; truncate -s 10 c/text; truncate -s +5000 c/text; truncate -s 0 c/deep/3; : > c/deep/4",
    "sed -i": "cp -r source c; sed -i s/1/one/ c/text; sed -i.bak 2d c/text; perl -pi -e s/2/two/ c/text",
    "sort -o": "sort -rn source/text -o sorted; sort -n sorted -o sorted; split -l 3000 source/text part-",
    "patch": "cp source/text a; sed s/7/seven/ a > b; diff -u a b > d || true; patch -s a d; cmp a b; rm -f d a.orig",
    "rm -r": "cp -a source copy; chmod 700 copy/deep/er; rm -r copy; mkdir -p copy/x; rmdir copy/x copy; ! ls copy",
    "find -delete": "cp -r source c; find c -name '*[13]' -delete; find c -type d -empty -delete; find c -newer c | wc",
    "git": "git init -q r; cp source/text r; cd r; git add .; git -c user.name=a -c user.email=b commit -qm x;"
    "seq 9 >> text; git stash -q 2> /dev/null || true; git gc -q; git fsck --strict; cp text ..; cd ..; rm -rf r",
    "touch": "touch new; touch -d 2020-01-01 source/text; touch -r source/text new; mkdir -m 711 d; chmod a+x new",
    "ln": "ln source/text l; rm source/text; ln source/deep/1 m; rm source/deep/1; mv m source/deep/1",
    "python": f'{sys.executable} -c \'import shutil, tempfile, os; shutil.copytree("source", "c");'
    ' t = tempfile.NamedTemporaryFile(dir=".", delete=False); t.write(b"x" * 70000); t.close();'
    ' os.replace(t.name, "t");'
    ' shutil.rmtree("c/empty"); shutil.move("c", "e")\'',
}


def can_run(name: str) -> bool:
    """Whether the programs of a script are there."""
    needed = {"git": "git", "patch": "patch", "sed -i": "perl"}.get(name, "sh")
    return shutil.which(needed) is not None


@pytest.fixture
def rw(tmp_path: Path) -> Iterator[WritableMount]:
    """An array of which the first half is written, and a directory that is none of it."""
    zarr = pytest.importorskip("zarr")
    need_fuse()
    source = tmp_path / "source"
    array = zarr.create_array(
        source / "a", shape=(COUNT * CHUNK,), shards=(100 * CHUNK,), chunks=(CHUNK,), dtype="u2", compressors=None
    )
    array[: COUNT // 2 * CHUNK] = np.arange(1, COUNT // 2 * CHUNK + 1)
    (source / "plain").mkdir()
    with writable(source, tmp_path) as mount:
        mount.mount()
        yield mount


def posix(directory: Path) -> dict[str, str]:
    told = json.loads(program("posix", directory))
    assert told["ran"] > 70
    failed: dict[str, str] = told["failed"]
    return failed


def test_posix_cases_hold_on_a_plain_directory(plain: Path) -> None:
    assert posix(plain) == {}


def test_files_that_are_passed_through(rw: WritableMount) -> None:
    assert posix(rw.path / "plain") == {}


def test_open_flags(rw: WritableMount, plain: Path) -> None:
    actual, wanted = (json.loads(program("opening", directory)) for directory in (rw.path / "plain", plain))
    assert len(wanted) == 144
    assert actual == wanted


def test_random_operations_hold_on_a_plain_directory(plain: Path) -> None:
    random_operations(plain / "file", 4, 1000)


@pytest.mark.timeout(300 * times())
@pytest.mark.parametrize("path", ["a/c/7", "a/c/700", "plain/file"])
def test_random_operations(rw: WritableMount, path: str) -> None:
    random_operations(rw.path / path, 1, 3000)


@pytest.mark.slow
@pytest.mark.timeout(300 * times())
@pytest.mark.parametrize("path", ["a/c/7", "plain/file"])
def test_random_operations_with_publishing_between(rw: WritableMount, path: str) -> None:
    random_operations(rw.path / path, 2, 1500, "--fresh", f"{sys.executable} -m shardfs flush {rw.path}")


@pytest.mark.parametrize("place", ["plain", "a/c"])
@pytest.mark.parametrize("mode", ["os", "lockfile"])
def test_conditional_writes_of_tensorstore(rw: WritableMount, place: str, mode: str) -> None:
    """To keys that are no chunks: files of the source, and files that are kept for chunks to come."""
    with client("count_tensorstore", rw.path / place, "key", 4, 100, mode) as counting:
        assert succeeded([counting], 120) == [400]


@pytest.mark.slow
def test_tools_leave_what_they_leave_on_a_plain_directory(rw: WritableMount, plain: Path) -> None:
    shell(SOURCE, plain)
    for number, name in enumerate(filter(can_run, SCRIPTS)):
        mounted, wanted = rw.path / "plain" / str(number), plain / str(number)
        for directory in (mounted, wanted):
            directory.mkdir()
            shell(f"cp -a {plain}/source .", directory)
            shell(SCRIPTS[name], directory)
        assert content(mounted) == content(wanted), name
