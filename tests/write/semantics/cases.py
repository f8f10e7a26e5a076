"""How cases are written down and run; the sources that they are run on."""

from __future__ import annotations

import errno
import json
import os
import re
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests import data_blosc2, data_n5, handmade

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tests.write.semantics.calls import Calls

R, W, RW = os.O_RDONLY, os.O_WRONLY, os.O_RDWR
NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC

STORED = bytes(range(4))
"""What the chunks of an array hold at first."""


class Place:
    """The array of a case.

    `at` is its path. `source` gives the bytes of a file of the source, or None; it is what others see.
    """

    def __init__(self, calls: Calls, at: str, source: Callable[[str], bytes | None]) -> None:
        self.calls, self.at, self._source = calls, at, source

    def path(self, name: str) -> str:
        return f"{self.at}/{name}" if name else self.at

    def source(self, name: str) -> bytes | None:
        return self._source(self.path(name))

    @contextmanager
    def opened(self, name: str, flags: int = R, mode: int = 0o644) -> Iterator[int]:
        fd = self.calls.open(self.path(name), flags, mode)
        try:
            yield fd
        except BaseException:
            try:
                self.calls.close(fd)
            except OSError as e:
                print(e)
            raise
        self.calls.close(fd)

    def put(self, name: str, data: bytes) -> None:
        with self.opened(name, NEW) as fd:
            self.calls.write(fd, data)

    def get(self, name: str) -> bytes:
        with self.opened(name) as fd:
            return self.calls.pread(fd, 1 << 20, 0)

    def json(self, name: str = "zarr.json") -> Any:
        return json.loads(self.get(name))

    def put_json(self, document: Any, name: str = "zarr.json") -> None:
        self.put(name, json.dumps(document).encode())

    def names(self, name: str = "") -> list[str]:
        return sorted(self.calls.listdir(self.path(name)))

    def exists(self, name: str) -> bool:
        try:
            self.calls.lstat(self.path(name))
        except FileNotFoundError:
            return False
        return True

    def stat(self, name: str) -> os.stat_result:
        return self.calls.lstat(self.path(name))

    def rename(self, old: str, new: str) -> None:
        self.calls.rename(self.path(old), self.path(new))

    def link(self, old: str, new: str) -> None:
        self.calls.link(self.path(old), self.path(new))

    def unlink(self, name: str) -> None:
        self.calls.unlink(self.path(name))

    def mkdir(self, name: str) -> None:
        self.calls.mkdir(self.path(name))

    def rmdir(self, name: str) -> None:
        self.calls.rmdir(self.path(name))

    def truncate(self, name: str, size: int) -> None:
        self.calls.truncate(self.path(name), size)

    def chmod(self, name: str, mode: int) -> None:
        self.calls.chmod(self.path(name), mode)

    def utime(self, name: str, ns: int) -> None:
        self.calls.utime(self.path(name), ns=(ns, ns))

    def publish(self, name: str = "") -> None:
        self.calls.setxattr(self.path(name), "user.shardfs.flush", b"20")

    def xattr(self, name: str, key: str) -> bytes:
        return self.calls.getxattr(self.path(name), f"user.shardfs.{key}")


@dataclass(frozen=True)
class Case:
    """`source`: which of `SOURCES` it runs on; `kernel`: whether it needs one, `local`: or a local source."""

    run: Callable[[Place], None]
    source: str
    kernel: bool
    local: bool


CASES: dict[str, Case] = {}


def case(
    name: str, *, source: str = "zarr", kernel: bool = False, local: bool = False
) -> Callable[[Callable[[Place], None]], Callable[[Place], None]]:
    """Register a case."""

    def register(function: Callable[[Place], None]) -> Callable[[Place], None]:
        if name in CASES:
            raise ValueError(f"two cases {name}")
        CASES[name] = Case(function, source, kernel, local or kernel)
        return function

    return register


def fails(number: int | Sequence[int], call: Callable[..., object], *args: Any, **options: Any) -> None:
    """The call must fail with this errno, or one of these."""
    wanted = [number] if isinstance(number, int) else list(number)
    names = " or ".join(errno.errorcode[n] for n in wanted)
    try:
        call(*args, **options)
    except OSError as e:
        if e.errno not in wanted:
            raise AssertionError(f"{e}, not {names}") from e
        return
    raise AssertionError(f"success, not {names}")


def same(actual: object, wanted: object) -> None:
    if actual != wanted:
        raise AssertionError(f"{actual!r}, not {wanted!r}")


def until(true: Callable[[], bool], seconds: float = 100) -> None:
    """Some things are answered before the mount is told of them: unmapping, the last close."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise AssertionError("not yet")
        time.sleep(0.01)


# ---- sources: the files of a directory


def _zarr() -> Mapping[str, bytes]:
    """8 x 8 in chunks of 2 x 2 and shards of 4 x 4. The first shard is there."""
    codecs = [{"name": "bytes"}]
    inner = {"chunk_shape": [2, 2], "codecs": codecs, "index_codecs": [*_LITTLE, {"name": "crc32c"}]}
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [8, 8],
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 4]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [{"name": "sharding_indexed", "configuration": {**inner, "index_location": "end"}}],
        "attributes": {"n": 0},
        "dimension_names": ["y", "x"],
    }
    shard = handmade.zarr_shard([STORED] * 4)
    return {"zarr.json": json.dumps(document).encode(), "c/0/0": shard, "README": b"read me"}


_LITTLE = [{"name": "bytes", "configuration": {"endian": "little"}}]


def _n5() -> Mapping[str, bytes]:
    """8 x 8 in blocks of 4 x 4, all in one shard; the first one is there."""
    index = data_n5.Index()
    codecs = [data_n5.sharding((4, 4), [{"name": "n5bytes"}], index)]
    document = data_n5.attributes((8, 8), (8, 8), "uint8", codecs=codecs)
    shard = data_n5.shard({(0, 0): data_n5.header((4, 4)) + bytes(range(16))}, (2, 2), index)
    return {"attributes.json": json.dumps(document).encode(), "0/0": shard}


def _precomputed() -> Mapping[str, bytes]:
    """4 x 4 x 4 in chunks of 2 x 2 x 2, all in one shard; the first one is there."""
    info = handmade.volume_info((4, 4, 4), (2, 2, 2), handmade.sharding())
    shard = handmade.uint64_shard([[handmade.Entry(0, bytes(8))], []])
    return {"info": json.dumps(info).encode(), "s/0.shard": shard, "README": b"read me"}


def _uneven() -> Mapping[str, bytes]:
    """A Blosc2 frame whose chunks differ in size, which cannot be written."""
    chunks = [data_blosc2.chunk(b"one"), data_blosc2.chunk(b"three")]
    return {"s.b2f": data_blosc2.frame(chunks, 0, nbytes=8), "README": b"read me"}


def _ids() -> Mapping[str, bytes]:
    """Skeletons, of which there is one."""
    info = {"@type": "neuroglancer_skeletons", "sharding": handmade.sharding(), "vertex_attributes": []}
    shard = handmade.uint64_shard([[], [handmade.Entry(7, b"seven")]])
    return {"info": json.dumps(info).encode(), "0.shard": shard}


SOURCES: dict[str, Callable[[], Mapping[str, bytes]]] = {
    "zarr": _zarr,
    "n5": _n5,
    "precomputed": _precomputed,
    "uneven": _uneven,
    "ids": _ids,
}


def directory_of(name: str) -> str:
    """Where the array of a case lies."""
    return re.sub(r"[^A-Za-z0-9]+", "-", name)


def files() -> dict[str, bytes]:
    """Of the source of all cases."""
    new_files = {kind: make() for kind, make in SOURCES.items()}
    below = {f"{directory_of(n)}/{path}": data for n, c in CASES.items() for path, data in new_files[c.source].items()}
    return {"zarr.json": b'{"zarr_format": 3, "node_type": "group", "attributes": {}}', **below}


def run(calls: Calls, source: Callable[[str], bytes | None], names: Iterable[str]) -> dict[str, str]:
    """What failed, and why."""
    failed = {}
    for name in names:
        case = CASES[name]
        try:
            case.run(Place(calls, directory_of(name), source))
        except (AssertionError, OSError, LookupError, ValueError) as e:
            where = traceback.extract_tb(e.__traceback__)
            lines = [f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in where if "semantics" in f.filename]
            failed[name] = f"{type(e).__name__}: {e} ({', '.join(lines[1:])})"
    return failed
