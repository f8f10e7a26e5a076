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


def test_a_chunk_that_was_missing_is_found_when_its_compressed_form_is_published(mount: WritableMount) -> None:
    missing = f"print(os.path.exists('v/{CHUNK}'), os.path.exists('v/{CHUNK}.gz'))"
    assert on(mount, missing) == "False False"
    on(mount, f"pathlib.Path('v/{CHUNK}.gz').write_bytes(gzip.compress(b'abcdefgh'))")
    read = f"print(pathlib.Path('v/{CHUNK}').read_bytes(), sorted(n for n in os.listdir('v/s') if '-' in n))"
    assert on(mount, read) == f"b'abcdefgh' {[STORED[2:], f'{CHUNK[2:]}.gz']}"
    assert mount.flush().returncode == 0
    assert on(mount, read) == f"b'abcdefgh' {[STORED[2:], CHUNK[2:]]}"
    assert on(mount, missing) == "True False"


def test_a_stored_chunk_gives_way_to_its_compressed_form(mount: WritableMount) -> None:
    read = f"print(pathlib.Path('v/{STORED}').read_bytes(), sorted(n for n in os.listdir('v/s') if '-' in n))"
    assert on(mount, read) == f"{bytes(8)!r} {[STORED[2:]]}"
    on(mount, f"pathlib.Path('v/{STORED}.gz').write_bytes(gzip.compress(b'abcdefgh'))")
    assert on(mount, read) == f"b'abcdefgh' {[f'{STORED[2:]}.gz']}"
    on(mount, f"pathlib.Path('v/{STORED}.gz').write_bytes(gzip.compress(b'ABCDEFGHI'[:8]))")
    assert on(mount, read) == f"b'ABCDEFGH' {[f'{STORED[2:]}.gz']}"
    assert mount.flush().returncode == 0
    assert on(mount, read) == f"b'ABCDEFGH' {[STORED[2:]]}"
    on(mount, f"os.unlink('v/{STORED}')")
    assert on(mount, f"print(os.path.exists('v/{STORED}'), os.path.exists('v/{STORED}.gz'))") == "False False"


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


@pytest.mark.parametrize("name", [CHUNK, STORED])
def test_compressed_chunks_after_a_crash(mount: WritableMount, name: str) -> None:
    look = "print([(n, len(pathlib.Path('v/s', n).read_bytes())) for n in sorted(os.listdir('v/s')) if '-' in n])"
    data = gzip.compress(b"abcdefgh", mtime=0)
    on(mount, f"pathlib.Path('v/{name}').write_bytes(b'12345678')")
    on(mount, f"pathlib.Path('v/{name}.gz').write_bytes({data!r})")
    before = on(mount, look)
    assert f"('{name[2:]}.gz', {len(data)})" in before
    assert f"('{name[2:]}', " not in before
    mount.kill()
    mount.clear()
    mount.mount()
    assert on(mount, look) == before
    on(mount, f"os.unlink('v/{name}.gz')")
    mount.kill()
    mount.clear()
    mount.mount()
    assert name[2:] not in on(mount, look)
    assert mount.flush().returncode == 0
    assert name[2:] not in on(mount, look)
    done = mount.umount()
    assert (done.returncode, done.stderr) == (0, "")
