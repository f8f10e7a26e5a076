"""A tree seen from outside: through `lookup`, `scan` and `read` alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from shardfs.vfs.inodes import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardfs.model.attributes import Attributes
    from shardfs.vfs.tree import Tree


class Listed(NamedTuple):
    name: bytes
    number: int
    directory: bool
    size: int
    mtime_ns: int
    cookie: int


def entries(tree: Tree, number: int, cookie: int = 0) -> Iterator[Listed]:
    """The entries of a directory, one by one."""
    for batch in tree.scan(number, cookie):
        columns = (batch.names, batch.numbers, batch.directories, batch.sizes, batch.mtimes_ns, batch.cookies)
        yield from (Listed(*row) for row in zip(*(c.tolist() for c in columns), strict=True))


def sizes(tree: Tree, number: int, path: str = "") -> Iterator[tuple[str, int]]:
    """The path of every file below a directory, and its size as listings tell it."""
    for e in entries(tree, number):
        name = f"{path}/{e.name.decode()}"
        if e.directory:
            yield from sizes(tree, e.number, name)
        else:
            yield name, e.size


def read_all(tree: Tree, attributes: Attributes) -> bytes:
    """A file in one read, checked against its size."""
    data = bytes(tree.read(attributes.number, 0, attributes.size + 1))
    if len(data) != attributes.size:
        raise AssertionError(f"{attributes.size} bytes told, {len(data)} read")
    return data


def walk(tree: Tree, number: int = ROOT, path: str = "") -> dict[str, bytes]:
    """Every file below a directory; what listing tells of each is checked against what looking it up tells."""
    out: dict[str, bytes] = {}
    cookie = 0
    listed = list(entries(tree, number))
    few = tree.small_listing(number, 64)
    if few is not None and few != listed:
        raise AssertionError(f"{path}: {few}, but {listed}")
    for e in listed:
        if e.cookie <= cookie:
            raise AssertionError(f"{path}: cookie {e.cookie} after {cookie}")
        cookie = e.cookie
        name = f"{path}/{e.name.decode()}" if path else e.name.decode()
        attributes = tree.lookup(number, e.name)
        if (attributes.number, attributes.directory) != (e.number, e.directory) or e.size not in (-1, attributes.size):
            raise AssertionError(f"{name}: listed as {e}, looked up as {attributes}")
        if tree.attributes(attributes.number)[:4] != attributes[:4]:
            raise AssertionError(f"{name}: {attributes}, but {tree.attributes(attributes.number)}")
        below = walk(tree, attributes.number, name) if attributes.directory else {name: read_all(tree, attributes)}
        if not out.keys().isdisjoint(below):
            raise AssertionError(f"{name} is listed twice")
        out |= below
    return out


def parsed(files: dict[str, bytes]) -> dict[str, Any]:
    """The same with metadata documents parsed."""
    return {n: json.loads(d) if n.rsplit("/", 1)[-1] in ("zarr.json", "info") else d for n, d in files.items()}
