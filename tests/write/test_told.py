"""The kernel remembers names and attributes for long: what changes without a request of its own must be told to it."""

from __future__ import annotations

import gzip
import json
import sys
from typing import TYPE_CHECKING

import pytest

from tests import handmade
from tests.conftest import _run
from tests.write.mounts import writable
from tests.write.semantics import cases

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.write.mounts import WritableMount

pytestmark = pytest.mark.fuse

CHUNK, STORED = "s/2-4_0-2_0-2", "s/0-2_0-2_0-2"


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[WritableMount]:
    """An array `a` and a volume `v`. Nothing is published before somebody asks."""
    files = {"zarr.json": b'{"zarr_format": 3, "node_type": "group", "attributes": {}}'}
    for name, kind in (("a", "zarr"), ("v", "precomputed")):
        files |= {f"{name}/{path}": data for path, data in cases.SOURCES[kind]().items()}
    handmade.write_files(tmp_path / "source", files)
    with writable(tmp_path / "source", tmp_path, "-o", "idle=1000,age=1000") as made:
        made.mount()
        yield made


def on(mount: WritableMount, program: str) -> str:
    """What a program prints that runs in the mount's directory."""
    run = _run([sys.executable, "-c", f"import errno, gzip, json, os, pathlib, shutil\n{program}"], 30, cwd=mount.path)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


COMPRESSED = """
path = pathlib.Path('v/{}')
gz = path.with_name(f'{{path.name}}.gz')
told = set()
for n in range(40):
    had, size = path.exists(), path.stat().st_size if path.exists() else 0
    data = b'%08d' % n
    with open(gz, 'wb') as file:
        file.write(gzip.compress(data))
        file.flush()
        listed = os.listdir(path.parent)
        told.add((gz.exists(), gz.name in listed, (path.name in listed) == had))
    assert path.read_bytes() == data, n
    listed = os.listdir(path.parent)
    told.add((gz.exists(), gz.name in listed, path.name in listed))
    if n % 2:
        path.unlink()
        assert not path.exists() and not gz.exists()
    elif n % 3 == 0:
        path.write_bytes(bytes(8))
    if n % 10 == 0:
        os.setxattr('v', 'user.shardfs.flush', b'')
print(sorted(told))
"""


@pytest.mark.parametrize("name", [CHUNK, STORED])
def test_a_compressed_chunk_is_the_chunk_when_close_returns(mount: WritableMount, name: str) -> None:
    """Although the kernel has just looked for both names: it may remember neither absent ones nor older bytes."""
    assert on(mount, COMPRESSED.format(name)) == "[(False, False, True), (True, True, True)]"
    assert mount.flush().returncode == 0


def test_a_compressed_chunk_replaces_one_that_the_kernel_has_read(mount: WritableMount) -> None:
    replace = f"""
path = pathlib.Path('v/{STORED}')
reader = open(path, 'rb', buffering=0)
print(reader.read())
for new in (b'abcdefgh', b'ABCDEFGH'):
    before = path.stat()
    pathlib.Path('v/{STORED}.gz').write_bytes(gzip.compress(new))
    print(path.read_bytes(), path.stat().st_ino == before.st_ino, path.stat().st_mtime_ns > before.st_mtime_ns)
"""
    view = "b'{}' True True"
    assert on(mount, replace) == "\n".join([str(bytes(8)), view.format("abcdefgh"), view.format("ABCDEFGH")])


def test_directories_that_an_array_gets_when_it_grows(mount: WritableMount) -> None:
    assert on(mount, "print(os.path.exists('a/c/7'), os.path.exists('a/c/7/7'))") == "False False"
    grow = "d = json.load(open('a/zarr.json')); d['shape'] = [16, 16]; json.dump(d, open('a/zarr.json', 'w'))"
    on(mount, grow)
    on(mount, "pathlib.Path('a/c/7').mkdir(parents=True, exist_ok=True); open('a/c/7/7', 'wb').write(b'abcd')")
    assert on(mount, "print(open('a/c/7/7', 'rb').read(), os.listdir('a/c/7'))") == "b'abcd' ['7']"
    assert mount.flush().returncode == 0
    assert (mount.source / "a/c/3/3").exists()


def test_a_document_of_another_shape_is_what_everybody_sees(mount: WritableMount) -> None:
    with open(mount.source / "a/zarr.json", "rb") as file:
        assert json.load(file)["shape"] == [8, 8]
    on(mount, "os.stat('a/zarr.json'); open('a/zarr.json').read()")
    change = "d = json.load(open('a/zarr.json')); d['shape'] = [9, 9]; open('a/z.partial', 'w').write(json.dumps(d))"
    on(mount, f"{change}; os.rename('a/z.partial', 'a/zarr.json')")
    assert on(mount, "print(json.load(open('a/zarr.json'))['shape'], os.path.exists('a/z.partial'))") == "[9, 9] False"


@pytest.mark.slow
@pytest.mark.parametrize("name", [CHUNK, STORED])
def test_compressed_chunks_after_a_crash(mount: WritableMount, name: str) -> None:
    look = "print([(n, pathlib.Path('v/s', n).read_bytes()) for n in sorted(os.listdir('v/s')) if '-' in n])"
    data = gzip.compress(b"abcdefgh", mtime=0)
    on(mount, f"pathlib.Path('v/{name}').write_bytes(b'12345678')")
    on(mount, f"pathlib.Path('v/{name}.gz').write_bytes({data!r})")
    before = on(mount, look)
    assert f"('{name[2:]}', b'abcdefgh')" in before
    assert ".gz" not in before
    mount.kill()
    mount.clear()
    mount.mount()
    assert on(mount, look) == before
    on(mount, f"os.unlink('v/{name}')")
    mount.kill()
    mount.clear()
    mount.mount()
    assert name[2:] not in on(mount, look)
    assert mount.flush().returncode == 0
    assert name[2:] not in on(mount, look)
    completed = mount.umount()
    assert (completed.returncode, completed.stderr) == (0, "")
