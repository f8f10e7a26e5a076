"""Cases of what names stand for, and of directories."""

from __future__ import annotations

import errno
import gzip
import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tests.write.semantics.cases import NEW, RW, STORED, R, W, case, fails, same, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.write.semantics.cases import Place

PARTIAL = "c/1/0.0123456789abcdef0123456789abcdef.partial"


def with_n(document: Any, n: int) -> Any:
    return {**document, "attributes": {"n": n}}


# ---- chunks


@case("chunks/one that is only opened and described anew leaves its shard alone")
def _(x: Place) -> None:
    shard = x.source("c/0/0")
    with x.opened("c/0/0", RW):
        pass
    x.chmod("c/0/0", 0o600)
    x.utime("c/0/0", 5)
    x.publish()
    same((x.get("c/0/0"), x.source("c/0/0")), (STORED, shard))


@case("chunks/a published one is in a shard, and the old bytes are where they were")
def _(x: Place) -> None:
    shard = x.source("c/0/0") or b""
    x.put("c/0/0", b"new!")
    same(x.source("c/0/0"), shard)
    x.publish()
    new = x.source("c/0/0") or b""
    same((new[: len(shard)], b"new!" in new[len(shard) :]), (shard, True))
    same([x.get(f"c/{i}/{j}") for i in (0, 1) for j in (0, 1)], [b"new!", *3 * [STORED]])


@case("chunks/a new shard")
def _(x: Place) -> None:
    same(x.source("c/1/1"), None)
    x.put("c/3/3", b"abcd")
    x.publish()
    same((x.source("c/1/1") or b"")[:4], b"abcd")
    same((x.get("c/3/3"), x.names("c/3"), x.names("c/2")), (b"abcd", ["3"], []))


@case("chunks/a complete shard is published by itself")
def _(x: Place) -> None:
    for i in (2, 3):
        for j in (2, 3):
            x.put(f"c/{i}/{j}", b"abcd")
    until(lambda: x.source("c/1/1") is not None)


@case("chunks/the last one takes its shard along")
def _(x: Place) -> None:
    for i in (0, 1):
        for j in (0, 1):
            x.unlink(f"c/{i}/{j}")
    same([x.names(f"c/{i}") for i in range(4)], [[], [], [], []])
    x.publish()
    same(x.source("c/0/0"), None)
    same([x.names(f"c/{i}") for i in range(4)], [[], [], [], []])


@case("chunks/one that is removed before it was published leaves nothing")
def _(x: Place) -> None:
    x.put("c/3/3", b"abcd")
    x.unlink("c/3/3")
    x.publish()
    same((x.source("c/1/1"), x.exists("c/3/3")), (None, False))


@case("chunks/one that is removed while it is published stays removed")
def _(x: Place) -> None:
    for n in range(20):
        x.put("c/3/3", b"%04d" % n)
        x.publish("c/3/3") if n % 2 else None
        x.unlink("c/3/3")
        same(x.exists("c/3/3"), False)
    x.publish()
    same((x.source("c/1/1"), x.exists("c/3/3")), (None, False))


@case("chunks/one of no bytes is shown, and not published")
def _(x: Place) -> None:
    shard = x.source("c/0/0")
    for name in ("c/3/3", "c/0/0"):
        x.put(name, b"")
        same((x.get(name), x.stat(name).st_size), (b"", 0))
    with suppress(OSError):
        x.publish()
    same((x.source("c/0/0"), x.source("c/1/1")), (shard, None))
    same((x.get("c/3/3"), x.get("c/0/0")), (b"", b""))
    x.put("c/0/0", b"abcd")
    x.unlink("c/3/3")
    x.publish()
    same((x.get("c/0/0"), x.exists("c/3/3")), (b"abcd", False))


@case("chunks/all of a shard in one directory of names")
def _(x: Place) -> None:
    for i in range(4):
        for j in range(4):
            x.put(f"c/{i}/{j}", b"%d%d.." % (i, j))
    same([x.names(f"c/{i}") for i in range(4)], 4 * [["0", "1", "2", "3"]])
    x.publish()
    same([x.names(f"c/{i}") for i in range(4)], 4 * [["0", "1", "2", "3"]])
    same([x.get(f"c/{i}/{j}") for i in range(4) for j in range(4)], [b"%d%d.." % divmod(n, 4) for n in range(16)])


@case("chunks/names that no chunk has are other files")
def _(x: Place) -> None:
    for name in ("c/0/00", "c/0/-1", "c/0/0x", "c/0/1e", "c/notes"):
        x.put(name, b"text")
        same((x.source(name), x.get(name)), (b"text", b"text"))


@case("chunks/where they lie is told")
def _(x: Place) -> None:
    same(x.xattr("c/0/0", "shard"), f"{x.at}/c/0/0".encode())
    same(x.xattr("c/0/1", "offset"), b"4")
    same(x.xattr("c/0/1", "nbytes"), b"4")


# ---- orphans


@case("orphans/one outside the grid becomes a chunk when the array grows")
def _(x: Place) -> None:
    x.put("c/0/5", b"abcd")
    same(x.xattr("c/0/5", "state"), b"orphan")
    x.publish()
    same(x.source("c/0/2"), None)
    x.put_json({**x.json(), "shape": [8, 12]})
    same((x.xattr("c/0/5", "state"), x.get("c/0/5")), (b"journaled", b"abcd"))
    x.publish()
    same(((x.source("c/0/2") or b"")[:4], x.get("c/0/5")), (b"abcd", b"abcd"))


@case("orphans/a directory of rows outside the grid")
def _(x: Place) -> None:
    x.mkdir("c/7")
    x.put("c/7/0", b"abcd")
    same((x.names("c/7"), x.get("c/7/0")), (["0"], b"abcd"))
    fails(errno.ENOTEMPTY, x.rmdir, "c/7")
    x.put_json({**x.json(), "shape": [16, 8]})
    x.publish()
    same(((x.source("c/3/0") or b"")[:4], x.names("c/7"), x.get("c/7/0")), (b"abcd", ["0"], b"abcd"))


@case("orphans/a probe as vim makes it")
def _(x: Place) -> None:
    with x.opened("c/0/4913", W | os.O_CREAT | os.O_EXCL) as fd:
        x.calls.write(fd, b"")
    x.unlink("c/0/4913")
    same(x.exists("c/0/4913"), False)


@case("orphans/chunks before their document, as cp makes them")
def _(x: Place) -> None:
    document = x.json()
    x.unlink("zarr.json")
    x.put("c/3/3", b"abcd")
    same((x.get("c/3/3"), x.get("c/0/0")), (b"abcd", STORED))
    x.put_json(document)
    x.publish()
    same(((x.source("c/1/1") or b"")[:4], x.get("c/3/3")), (b"abcd", b"abcd"))


# ---- shrinking: P8


@case("shrinking/chunks outside can be read and removed, and stay removed when the array grows")
def _(x: Place) -> None:
    document = x.json()
    x.names("c/1")
    x.put_json({**document, "shape": [2, 2]})
    for name in ("c/0/1", "c/1/0"):
        same(x.get(name), STORED)
        x.unlink(name)
        same(x.exists(name), False)
    x.put_json(document)
    same([x.exists(f"c/{i}/{j}") for i in (0, 1) for j in (0, 1)], [True, False, False, True])
    x.publish()
    same([x.exists(f"c/{i}/{j}") for i in (0, 1) for j in (0, 1)], [True, False, False, True])


@case("shrinking/removed, published, and grown")
def _(x: Place) -> None:
    document = x.json()
    x.put_json({**document, "shape": [2, 2]})
    for name in ("c/0/1", "c/1/0", "c/1/1"):
        x.unlink(name)
    x.publish()
    x.put_json(document)
    same([x.exists(f"c/{i}/{j}") for i in (0, 1) for j in (0, 1)], [True, False, False, False])
    x.put("c/1/1", b"abcd")
    x.publish()
    same((x.get("c/1/1"), x.exists("c/0/1"), x.get("c/0/0")), (b"abcd", False, STORED))


@case("shrinking/what was written before goes along, and what is pending is removed")
def _(x: Place) -> None:
    document = x.json()
    x.put("c/3/3", b"abcd")
    x.put("c/0/1", b"efgh")
    x.put_json({**document, "shape": [2, 2]})
    same((x.get("c/3/3"), x.get("c/0/1")), (b"abcd", b"efgh"))
    x.unlink("c/3/3")
    x.unlink("c/0/1")
    x.put_json(document)
    same((x.exists("c/3/3"), x.exists("c/0/1")), (False, False))
    x.publish()
    same((x.exists("c/3/3"), x.exists("c/0/1"), x.source("c/1/1")), (False, False, None))


# ---- scratch


@case("scratch/all names that tools give their temporary files")
def _(x: Place) -> None:
    names = [
        "0.0.0123456789abcdef.partial", "0.__lock", "0_0123456789abcdef.__lock", "0#1", ".0.AbC012", "0.tmp",
        "0.part", "tmpabcdefgh", "sedAbCdEf", ".0.swp", ".0.swx", "0~", ".0.un~", ".goutputstream-ABCDEF",
    ]  # fmt: skip
    for name in names:
        x.put(f"c/0/{name}", b"x")
        same(x.xattr(f"c/0/{name}", "state"), b"scratch")
        same(x.source(f"c/0/{name}"), None)
    same(x.names("c/0"), sorted([*names, "0", "1"]))
    for name in names:
        x.unlink(f"c/0/{name}")
    same(x.names("c/0"), ["0", "1"])


@case("scratch/beside the document, too")
def _(x: Place) -> None:
    x.put("zarr.0123456789abcdef0123456789abcdef.partial", x.get("zarr.json"))
    same(x.xattr("zarr.0123456789abcdef0123456789abcdef.partial", "state"), b"scratch")
    x.rename("zarr.0123456789abcdef0123456789abcdef.partial", "zarr.json")
    same("zarr.0123456789abcdef0123456789abcdef.partial" in x.names(), False)


@case("scratch/renamed onto a chunk, an orphan, another file, a document")
def _(x: Place) -> None:
    document = x.get("zarr.json")
    for name, data in (("c/0/0", b"abcd"), ("c/0/9", b"efgh"), ("notes", b"text"), ("zarr.json", document)):
        x.put(PARTIAL, data)
        x.rename(PARTIAL, name)
        same((x.get(name), x.exists(PARTIAL)), (data, False))
    same(x.source("notes"), b"text")
    x.publish()
    same(b"abcd" in (x.source("c/0/0") or b""), True)


@case("scratch/linked onto each of them")
def _(x: Place) -> None:
    document = x.get("zarr.json")
    x.unlink("c/0/0")
    x.unlink("zarr.json")
    for name, data in (("c/0/0", b"abcd"), ("c/0/9", b"efgh"), ("notes", b"text"), ("zarr.json", document)):
        x.put(PARTIAL, data)
        x.link(PARTIAL, name)
        fails(errno.EEXIST, x.link, PARTIAL, name)
        x.unlink(PARTIAL)
        same((x.get(name), x.exists(PARTIAL)), (data, False))
    x.publish()
    same(b"abcd" in (x.source("c/0/0") or b""), True)


@case("scratch/a chunk renamed to it leaves its shard")
def _(x: Place) -> None:
    x.rename("c/0/0", PARTIAL)
    same((x.exists("c/0/0"), x.get(PARTIAL)), (False, STORED))
    x.publish()
    same((x.exists("c/0/0"), x.get(PARTIAL)), (False, STORED))
    x.rename(PARTIAL, "c/3/3")
    x.publish()
    same((x.get("c/3/3"), (x.source("c/1/1") or b"")[:4]), (STORED, STORED))


@case("scratch/a hidden directory, as rsync makes it")
def _(x: Place) -> None:
    x.mkdir("c/0/.~tmp~")
    x.put("c/0/.~tmp~/0", b"abcd")
    same((x.names("c/0/.~tmp~"), x.get("c/0/.~tmp~/0")), (["0"], b"abcd"))
    fails(errno.ENOTEMPTY, x.rmdir, "c/0/.~tmp~")
    x.rename("c/0/.~tmp~/0", "c/0/0")
    same((x.get("c/0/0"), x.names("c/0/.~tmp~")), (b"abcd", []))
    x.rmdir("c/0/.~tmp~")
    same((x.exists("c/0/.~tmp~"), x.source("c/0/.~tmp~")), (False, None))


@case("scratch/a directory in a hidden one")
def _(x: Place) -> None:
    x.mkdir("c/0/.cache")
    x.mkdir("c/0/.cache/deep")
    x.put("c/0/.cache/deep/0", b"x")
    same((x.get("c/0/.cache/deep/0"), x.xattr("c/0/.cache/deep/0", "state")), (b"x", b"scratch"))
    x.unlink("c/0/.cache/deep/0")
    x.rmdir("c/0/.cache/deep")
    x.rmdir("c/0/.cache")


# ---- documents


def refused(x: Place, data: bytes, name: str = "zarr.json") -> None:
    """EINVAL when it is closed, and by rename and link; nothing has changed."""
    content, source_content = x.get(name), x.source(name)

    def written() -> None:
        with x.opened(name, NEW) as fd:
            x.calls.write(fd, data)

    fails(errno.EINVAL, written)
    until(lambda: x.get(name) == content)
    same((x.source(name), x.stat(name).st_size), (source_content, len(content)))
    x.put(PARTIAL, data)
    fails(errno.EINVAL, x.rename, PARTIAL, name)
    same((x.get(name), x.source(name), x.get(PARTIAL)), (content, source_content, data))
    same((x.get("c/0/0"), x.names("c/0")), (STORED, ["0", "1"]))


def _documents() -> Iterable[tuple[str, Callable[[bytes, Any], bytes | Any]]]:
    yield "no JSON", lambda raw, _: raw.replace(b"{", b"[")
    yield "cut off", lambda raw, _: raw[: len(raw) // 2]
    yield "empty", lambda _raw, _: b""
    yield "no object", lambda _raw, _: b"[]"
    yield "other chunks", lambda _, d: {
        **d, "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 4]}},
    }  # fmt: skip
    yield "another data type", lambda _, d: {**d, "data_type": "uint16"}
    yield "another rank", lambda _, d: {**d, "shape": [8, 8, 8]}
    yield "other codecs", lambda _, d: {**d, "codecs": [{"name": "bytes"}, {"name": "gzip"}]}
    yield "other keys", lambda _, d: {**d, "chunk_key_encoding": {"name": "v2"}}
    yield "no shape", lambda _, d: {k: v for k, v in d.items() if k != "shape"}


def _register_documents() -> None:
    for name, change in _documents():

        @case(f"documents/refused: {name}")
        def _(x: Place, change: Callable[[bytes, Any], Any] = change) -> None:
            new_documents = change(x.get("zarr.json"), x.json())
            refused(x, new_documents if isinstance(new_documents, bytes) else json.dumps(new_documents).encode())


_register_documents()


@case("documents/one that is refused is not shown, though it is as long as the old one")
def _(x: Place) -> None:
    content = x.get("zarr.json")

    def written() -> None:
        with x.opened("zarr.json", RW) as fd:
            x.calls.pwrite(fd, b"!", 0)
            same(x.get("zarr.json")[:1], b"!")
            x.stat("zarr.json")

    fails(errno.EINVAL, written)
    until(lambda: x.get("zarr.json") == content)


@case("documents/bytes are kept, and what is stored is that of a sharded array")
def _(x: Place) -> None:
    text = json.dumps(with_n(x.json(), 5), indent=7).encode()
    x.put("zarr.json", text)
    same(x.get("zarr.json"), text)
    source_document = json.loads(x.source("zarr.json") or b"")
    same((source_document["attributes"], source_document["codecs"][0]["name"]), ({"n": 5}, "sharding_indexed"))
    same(source_document["chunk_grid"]["configuration"]["chunk_shape"], [4, 4])
    same(x.get("c/0/0"), STORED)


@case("documents/attributes, names, units, fill value and shape may change, and more is kept")
def _(x: Place) -> None:
    more = {"attributes": {"unit": "mm"}, "dimension_names": ["a", None], "fill_value": 3, "shape": [6, 10]}
    x.put_json({**x.json(), **more, "other": {"must_understand": False, "x": 1}})
    source_document = json.loads(x.source("zarr.json") or b"")
    same({name: source_document[name] for name in more}, more)
    same(source_document["other"], {"must_understand": False, "x": 1})
    same(x.json()["shape"], [6, 10])


@case("documents/chunks of before are published first")
def _(x: Place) -> None:
    x.put("c/3/3", b"abcd")
    x.put_json(with_n(x.json(), 1))
    same((x.source("c/1/1") or b"")[:4], b"abcd")


@case("documents/removed, the sharding is remembered")
def _(x: Place) -> None:
    document, source_document = x.json(), json.loads(x.source("zarr.json") or b"")
    x.unlink("zarr.json")
    same((x.exists("zarr.json"), x.source("zarr.json")), (False, None))
    x.put_json({**document, "shape": [4, 4]})
    same(json.loads(x.source("zarr.json") or b"")["codecs"], source_document["codecs"])
    same((x.get("c/0/0"), x.source("c/0/0") is not None), (STORED, True))


@case("documents/removed, and written by rename with others chunks: not sharded")
def _(x: Place) -> None:
    document = x.json()
    for i in (0, 1):
        for j in (0, 1):
            x.unlink(f"c/{i}/{j}")
    x.unlink("zarr.json")
    document |= {
        "data_type": "float32",
        "fill_value": 0.0,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
    }
    x.put_json(document)
    same(json.loads(x.source("zarr.json") or b"")["data_type"], "float32")
    for directory in ("c", "c/0"):
        with suppress(FileExistsError):
            x.mkdir(directory)
    x.put("c/0/0", b"x" * 16)
    x.publish()
    same(x.get("c/0/0"), b"x" * 16)


@case("documents/an array is removed as a whole, and made again")
def _(x: Place) -> None:
    document = x.json()
    for i in (0, 1):
        for j in (0, 1):
            x.unlink(f"c/{i}/{j}")
    for i in range(4):
        x.rmdir(f"c/{i}")
    x.rmdir("c")
    x.unlink("README")
    x.unlink("zarr.json")
    x.rmdir("")
    same(x.exists(""), False)
    x.mkdir("")
    same(x.names(), [])
    x.put_json(document)
    same(json.loads(x.source("zarr.json") or b"")["codecs"][0]["name"], "sharding_indexed")
    for directory in ("c", "c/3"):
        with suppress(FileExistsError):
            x.mkdir(directory)
    x.put("c/3/3", b"abcd")
    x.publish()
    same((x.get("c/3/3"), (x.source("c/1/1") or b"")[:4], x.exists("c/0/0")), (b"abcd", b"abcd", False))


# ---- hidden names


@case("hidden/names of shardfs's own")
def _(x: Place) -> None:
    for name in (".shardfs", ".shardfs-0123456789abcdef.tmp", "c/.shardfs.lock", "c/0/.shardfs-x"):
        fails(errno.EPERM, x.calls.open, x.path(name), NEW)
        fails(errno.EPERM, x.mkdir, name)
        fails(errno.EPERM, x.rename, "README", name)
        fails(errno.EPERM, x.link, "README", name)
        fails(errno.ENOENT, x.unlink, name)
    same(x.get("README"), b"read me")


@case("hidden/a shard of a volume", source="precomputed")
def _(x: Place) -> None:
    shard = next(name for name in ("s/0.shard", "s/00.shard") if x.source(name) is not None)
    same((x.exists(shard), [n for n in x.names("s") if "shard" in n]), (False, []))
    fails(errno.EPERM, x.calls.open, x.path(shard), NEW)
    fails(errno.EPERM, x.mkdir, shard)
    fails(errno.EPERM, x.rename, "README", shard)
    fails(errno.EPERM, x.link, "README", shard)
    fails(errno.ENOENT, x.calls.open, x.path(shard), R)
    fails(errno.ENOENT, x.unlink, shard)


# ---- directories


@case("directories/those of the grid are there")
def _(x: Place) -> None:
    same((x.names("c"), x.names("c/2")), (["0", "1", "2", "3"], []))
    for name in ("c", "c/0", "c/3"):
        fails(errno.EEXIST, x.mkdir, name)


@case("directories/removed ones are gone until somebody makes them")
def _(x: Place) -> None:
    fails(errno.ENOTEMPTY, x.rmdir, "c/0")
    fails(errno.ENOTEMPTY, x.rmdir, "c")
    x.rmdir("c/3")
    same((x.exists("c/3"), x.names("c")), (False, ["0", "1", "2"]))
    fails(errno.ENOENT, x.rmdir, "c/3")
    fails(errno.ENOENT, x.calls.open, x.path("c/3/3"), NEW)
    x.mkdir("c/3")
    x.put("c/3/3", b"abcd")
    same((x.get("c/3/3"), x.names("c")), (b"abcd", ["0", "1", "2", "3"]))


@case("directories/not empty while a chunk, an orphan, a scratch or another file is in them")
def _(x: Place) -> None:
    for name in ("3", "9", "x.partial", "notes"):
        x.put(f"c/2/{name}", b"abcd")
        fails(errno.ENOTEMPTY, x.rmdir, "c/2")
        x.unlink(f"c/2/{name}")
    x.rmdir("c/2")


@case("directories/not empty while a published chunk is in them")
def _(x: Place) -> None:
    x.put("c/2/3", b"abcd")
    x.publish()
    fails(errno.ENOTEMPTY, x.rmdir, "c/2")
    x.unlink("c/2/3")
    x.rmdir("c/2")
    x.publish()
    same(x.exists("c/2"), False)


@case("directories/others are the source's", local=True)
def _(x: Place) -> None:
    x.mkdir("more")
    x.mkdir("more/deep")
    x.put("more/deep/file", b"text")
    same((x.source("more/deep/file"), x.names("more")), (b"text", ["deep"]))
    fails(errno.ENOTEMPTY, x.rmdir, "more")
    x.rename("more", "other")
    same((x.source("other/deep/file"), x.exists("more"), x.get("other/deep/file")), (b"text", False, b"text"))
    x.unlink("other/deep/file")
    x.rmdir("other/deep")
    x.rmdir("other")
    same(x.exists("other"), False)


@case("directories/one among chunks that is no row is the source's")
def _(x: Place) -> None:
    x.mkdir("c/2/notes")
    x.put("c/2/notes/file", b"text")
    same((x.source("c/2/notes/file"), x.names("c/2"), x.names("c/2/notes")), (b"text", ["notes"], ["file"]))
    x.unlink("c/2/notes/file")
    x.rmdir("c/2/notes")
    same(x.names("c/2"), [])


@case("directories/rows cannot be renamed: EXDEV")
def _(x: Place) -> None:
    for old, new in (("c/0", "c/9"), ("c", "d"), ("c/0", "row")):
        fails(errno.EXDEV, x.rename, old, new)
    x.mkdir("row")
    fails(errno.EXDEV, x.rename, "row", "c/8")
    same((x.get("c/0/0"), x.names("c/0")), (STORED, ["0", "1"]))


@case("directories/no other one takes the place of shards: EXDEV", local=True)
def _(x: Place) -> None:
    x.mkdir("more")
    x.put("more/0", b"text")
    fails(errno.EXDEV, x.rename, "more", "c")
    for row in x.names("c"):
        for name in x.names(f"c/{row}"):
            x.unlink(f"c/{row}/{name}")
        x.rmdir(f"c/{row}")
    x.rmdir("c")
    fails(errno.EXDEV, x.rename, "more", "c")
    fails(errno.EPERM, x.rename, "more", ".shardfs-more")
    same((x.exists("c"), x.get("more/0")), (False, b"text"))


@case("directories/an array can be renamed as a whole, with what is pending", local=True)
def _(x: Place) -> None:
    x.mkdir("below")
    for name in ("zarr.json", "README"):
        x.put(f"below/{name}", x.get(name))
    target = f"{x.at}-moved"
    x.put("c/3/3", b"abcd")
    x.calls.rename(x.path(""), target)
    try:
        same(x.exists(""), False)
        fd = x.calls.open(f"{target}/c/3/3", R)
        same(x.calls.pread(fd, 10, 0), b"abcd")
        x.calls.close(fd)
        fd = x.calls.open(f"{target}/c/0/0", NEW)
        x.calls.write(fd, b"efgh")
        x.calls.close(fd)
    finally:
        x.calls.rename(target, x.path(""))
    same((x.get("c/0/0"), x.get("c/3/3"), x.get("c/1/1")), (b"efgh", b"abcd", STORED))


@case("directories/neither opened for writing, nor cut, unlinked or linked")
def _(x: Place) -> None:
    x.mkdir("more")
    for name in ("c", "c/0", "more", ""):
        fails(errno.EISDIR, x.calls.open, x.path(name), W)
        fails([errno.EISDIR, errno.EEXIST], x.calls.open, x.path(name), NEW)
        fails(errno.EISDIR, x.truncate, name, 0)
        fails(errno.EISDIR, x.unlink, name)
        fails(errno.EPERM, x.link, name, "linked")
        fails([errno.EISDIR, errno.ENOTEMPTY], x.rename, "README", name)


@case("directories/modes and times are accepted")
def _(x: Place) -> None:
    x.mkdir("more")
    for name in ("c", "c/0", "more", ""):
        x.chmod(name, 0o700)
        same(x.stat(name).st_mode & 0o777, 0o700)
        x.utime(name, 1_000_000_000)


@case("directories/the mount itself cannot be removed or renamed", kernel=True)
def _(x: Place) -> None:
    fails(errno.EBUSY, os.rmdir, os.getcwd())
    fails([errno.EBUSY, errno.EXDEV], os.rename, os.getcwd(), f"{x.at}/root")


@case("directories/synced", kernel=True)
def _(x: Place) -> None:
    x.put("c/3/3", b"abcd")
    x.mkdir("more")
    for name in ("", "c", "c/3", "more"):
        fd = os.open(x.path(name), R | os.O_DIRECTORY)
        os.fsync(fd)
        os.fdatasync(fd)
        os.close(fd)


@case("directories/a listing is that of when it began", kernel=True)
def _(x: Place) -> None:
    for n in range(2, 40):
        x.put(f"c/2/x{n}.partial", b"x")
    with os.scandir(x.path("c/2")) as entries:
        first = next(entries).name
        for n in range(2, 40):
            x.unlink(f"c/2/x{n}.partial")
        x.put("c/2/2", b"abcd")
        entry_names = [entry.name for entry in entries]
    same(sorted([first, *entry_names]), sorted(f"x{n}.partial" for n in range(2, 40)))
    same(x.names("c/2"), ["2"])


@case("directories/what is removed or written during a listing is so afterwards", kernel=True)
def _(x: Place) -> None:
    for n in range(4):
        x.put(f"c/3/{n}", b"abcd")
    with os.scandir(x.path("c/3")) as entries:
        next(entries)
        x.unlink("c/3/0")
        x.unlink("c/3/1")
        x.put("c/3/2", b"longer")
        list(entries)
    same([x.exists(f"c/3/{n}") for n in range(4)], [False, False, True, True])
    same((x.stat("c/3/2").st_size, x.get("c/3/2")), (6, b"longer"))


@case("directories/what an array has to say", kernel=True)
def _(x: Place) -> None:
    x.put("c/0/0", b"abcd")
    same(x.xattr("", "dirty"), b"1")
    x.publish()
    same(x.xattr("", "dirty"), b"0")
    same((int(x.xattr("", "live")), int(x.xattr("", "dead")) > 0), (16, True))


@case("the file system/has room", kernel=True)
def _(x: Place) -> None:
    filesystem = os.statvfs(x.path(""))
    same((filesystem.f_bavail > 0, filesystem.f_namemax), (True, 255))


# ---- other formats


@case("n5/chunks, attributes and scratch", source="n5")
def _(x: Place) -> None:
    document = x.json("attributes.json")
    block = x.get("0/0")
    x.put("0/1.0123456789abcdef0123456789abcdef.partial", block)
    x.rename("0/1.0123456789abcdef0123456789abcdef.partial", "1/1")
    x.put("attributes.json.0123456789abcdef0123456789abcdef.partial", x.get("attributes.json"))
    x.rename("attributes.json.0123456789abcdef0123456789abcdef.partial", "attributes.json")
    x.put_json({**document, "units": ["nm", "nm"]}, "attributes.json")
    x.publish()
    same((x.get("1/1"), x.json("attributes.json")["units"]), (block, ["nm", "nm"]))
    for change in ({"dataType": "uint64"}, {"blockSize": [1, 1]}):
        fails(errno.EINVAL, x.put_json, {**document, **change}, "attributes.json")
        until(lambda: x.exists("attributes.json"))
    same(x.json("attributes.json")["units"], ["nm", "nm"])
    fails(errno.EINVAL, x.publish)  # until the document is written again
    x.put_json(document, "attributes.json")
    x.unlink("1/1")
    x.publish()
    same(x.exists("1/1"), False)


A, B = "s/0-2_0-2_0-2", "s/2-4_0-2_0-2"


def listed(x: Place, prefix: str) -> list[str]:
    """Chunks of the scale; its directory may be gone with the last one, if the store has none that are empty."""
    return [n for n in x.names("s") if "-" in n and n.startswith(prefix)] if x.exists("s") else []


@case("volumes/chunks and info", source="precomputed")
def _(x: Place) -> None:
    info = x.json("info")
    x.put(B, b"abcdefgh")
    x.publish()
    same((x.get(A), x.get(B)), (bytes(8), b"abcdefgh"))
    same(listed(x, ""), [A[2:], B[2:]])
    fails(errno.EINVAL, x.put_json, {**info, "data_type": "uint64"}, "info")
    x.put_json({**info, "mesh": "mesh"}, "info")
    same(x.json("info")["mesh"], "mesh")
    x.unlink(A)
    x.publish()
    same(listed(x, ""), [B[2:]])


@case("volumes/a chunk that the array cannot hold: EINVAL", source="precomputed")
def _(x: Place) -> None:
    def written() -> None:
        with x.opened(f"{B}.gz", NEW) as fd:
            x.calls.write(fd, b"no gzip")

    fails(errno.EINVAL, written)
    until(lambda: not x.exists(f"{B}.gz"))


@case("volumes/a compressed chunk is the chunk from its close on", source="precomputed")
def _(x: Place) -> None:
    for name, before in ((A, [A[2:]]), (B, [])):
        same(x.exists(name), bool(before))
        with x.opened(f"{name}.gz", NEW) as fd:
            x.calls.write(fd, gzip.compress(b"abcdefgh"))
            same(listed(x, name[2:]), [*before, f"{name[2:]}.gz"])
        same((x.get(name), listed(x, name[2:]), x.exists(f"{name}.gz")), (b"abcdefgh", [name[2:]], False))
        fails(errno.ENOENT, x.unlink, f"{name}.gz")
        x.publish()
        same((x.get(name), listed(x, name[2:])), (b"abcdefgh", [name[2:]]))
        x.unlink(name)
        x.publish()
        same(listed(x, name[2:]), [])


@case("volumes/a plain chunk takes the place of a compressed one", source="precomputed")
def _(x: Place) -> None:
    for number in range(4):
        x.put(f"{B}.gz", gzip.compress(b"%08d" % number))
        same(x.get(B), b"%08d" % number)
        x.put(B, b"ABCDEFGH")
        same((x.get(B), x.exists(f"{B}.gz")), (b"ABCDEFGH", False))
    x.publish()
    same(x.get(B), b"ABCDEFGH")


@case("volumes/a compressed chunk is synced", source="precomputed")
def _(x: Place) -> None:
    """A reader of the chunk that has it open sees the new bytes, as after any overwrite."""
    with x.opened(A) as reader, x.opened(f"{A}.gz", NEW) as fd:
        fails(errno.EINVAL, x.calls.fsync, fd)
        x.calls.write(fd, gzip.compress(b"abcdefgh"))
        x.calls.fsync(fd)
        same((x.get(A), x.exists(f"{A}.gz"), x.calls.pread(reader, 9, 0)), (b"abcdefgh", True, b"abcdefgh"))
    same((x.get(A), x.exists(f"{A}.gz")), (b"abcdefgh", False))


@case("volumes/a compressed chunk is removed, renamed or linked", source="precomputed")
def _(x: Place) -> None:
    data = gzip.compress(b"abcdefgh")
    with x.opened(f"{A}.gz", NEW) as fd:
        x.calls.write(fd, data)
        x.unlink(f"{A}.gz")
    same((x.get(A), x.exists(f"{A}.gz")), (bytes(8), False))
    x.put("s/x.partial", data)
    fails(errno.EPERM, x.link, "s/x.partial", f"{A}.gz")
    x.rename("s/x.partial", f"{A}.gz")
    same((x.get(A), x.exists(f"{A}.gz"), x.exists("s/x.partial")), (b"abcdefgh", False, False))
    x.put("s/x.partial", data[:-1])
    fails(errno.EINVAL, x.rename, "s/x.partial", f"{B}.gz")
    same((x.get("s/x.partial"), x.exists(B), x.exists(f"{B}.gz")), (data[:-1], False, False))
    x.unlink("s/x.partial")
    x.publish()
    same(x.get(A), b"abcdefgh")


@case("objects/by id", source="ids")
def _(x: Place) -> None:
    same(x.names(), sorted(["info", "7"]))
    x.put("9", b"nine")
    x.put("18446744073709551615", b"most")
    x.put("7", b"seven, anew")
    x.publish()
    same([x.get(n) for n in ("7", "9", "18446744073709551615")], [b"seven, anew", b"nine", b"most"])
    x.unlink("7")
    x.unlink("18446744073709551615")
    same((x.exists("7"), x.exists("18446744073709551615"), x.names()), (False, False, ["9", "info"]))
    x.publish()
    same((x.exists("7"), x.exists("18446744073709551615"), x.names()), (False, False, ["9", "info"]))


@case("objects/one of no bytes", source="ids")
def _(x: Place) -> None:
    x.put("9", b"")
    x.publish()
    same((x.get("9"), x.exists("9")), (b"", True))


# ---- what cannot be written


@case("read-only/a format that cannot be written: EROFS", source="uneven")
def _(x: Place) -> None:
    name = "s.b2f/00000000.chunk"
    content = x.names("s.b2f")
    original = x.get(name)
    for flags in (W, RW, NEW, W | os.O_APPEND):
        fails(errno.EROFS, x.calls.open, x.path(name), flags)
    fails(errno.EROFS, x.truncate, name, 0)
    fails(errno.EROFS, x.unlink, name)
    fails(errno.EROFS, x.rename, name, "README2")
    x.put("x.partial", b"x")
    fails(errno.EROFS, x.rename, "x.partial", name)
    fails(errno.EROFS, x.calls.open, x.path("s.b2f/00000002.chunk"), NEW)
    fails([errno.EROFS, errno.EEXIST], x.link, "x.partial", name)
    same((x.get(name), x.names("s.b2f")), (original, content))
