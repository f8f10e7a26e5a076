"""Formats: what the documents of an ecosystem say. Parsing and printing only; nothing here reads anything.

A format is a module-level value with the attributes of `Format`; it is registered in `FORMATS`, in order of detection.
"""

from __future__ import annotations

import json
import math
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from shardfs.errors import CorruptShardError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardfs.create_rules import Rule, Sharding
    from shardfs.model import Blob, Coords, Dataset

MAX_DOCUMENT_BYTES = 64 << 20
MAX_CONTAINERS = 500_000
MAX_ITEMS = 1_000_000
"""A metadata document beyond these is taken for damage: parsing it could cost more memory than the mount may use."""

MAX_PRETTY = 64 << 10

T = TypeVar("T")


class System(NamedTuple):
    """A kind of sharded data, as docs/formats.md lists it.

    Args:
        format: what `info` calls it.
        found_by: the documents, or the form of a file.
        shown_as: what a mount holds instead.
        writers: programs of others that wrote such data in the tests, or what stands in for them.
        readers: programs of others that read it there, through a mount.
    """

    format: str
    name: str
    found_by: str
    shown_as: str
    writers: str
    readers: str


class Pairing(NamedTuple):
    """A kind of source in a layout, as docs/layouts.md lists it.

    Args:
        format: of the source, as `System` calls it.
        shown: what becomes of its chunks.
        readers: programs of others that read it in the tests through a mount, and know only the layout.
    """

    format: str
    shown: str
    readers: str


class Format(Protocol):
    """The source face of a format."""

    @property
    def systems(self) -> Sequence[System]:
        """What it knows, for people."""

    @property
    def documents(self) -> Sequence[str]:
        """The documents, by name, that `open` looks at."""

    def open(self, path: str, documents: Mapping[str, bytes]) -> Dataset | None:
        """What the documents found in directory `path` describe; None if they are not of this format.

        `path` is for messages. Raise CorruptShardError for a document that cannot be what it claims to be.
        """

    def may_hold(self, name: str) -> bool:
        """Whether a file of this name may be a dataset by itself. Such files are opened to see."""

    def open_file(self, path: str, blob: Blob) -> Dataset | None:
        """What the file describes, shown as a directory of its name; None if it is an ordinary file.

        Raise ValueError, with the reason, for a file that cannot be what it claims to be.
        """

    def describes(self, name: str) -> bool:
        """Whether a file of this name may be a document that `edit` and `shard` know what to do with."""

    def described_by(self, path: str, name: str) -> str:
        """The directory that the document `name` of the dataset in directory `path` tells about."""

    def references(self, path: str, name: str, new: bytes) -> Sequence[str]:
        """Documents of the source that `edit` needs to see besides those of its own directory, by path below it."""

    def shown(self, path: str, stored: Mapping[str, bytes], name: str) -> bytes | None:
        """The document `name` as a mount shows it, made of the documents in the source; None if there is none."""

    def edit(
        self, path: str, stored: Mapping[str, bytes], name: str, new: bytes, rule: Rule | None = None
    ) -> Mapping[str, bytes]:
        """What becomes of the source's documents when the shown document `name` is written anew.

        `path` is the directory, for messages and for rules; `stored` has its documents as they are in the source, and
        those of `references`, as far as they exist. What is new in the document (a scale) is sharded by `rule`. If the
        dataset is not sharded, or not there yet, the document becomes the source's as it is.

        Raise ValueError, with the reason, for what is no such document, for what chunks that are stored contradict
        (chunk shape, codecs, data type, names of chunks), and for a document of shards: chunks are written one by one.
        """

    def sharding(self, stored: Mapping[str, bytes]) -> Sharding | None:
        """What to remember when these documents are deleted, so that `shard` can make them anew; None if nothing."""

    def shard(self, path: str, name: str, new: bytes, sharding: Sharding | Rule) -> Mapping[str, bytes] | None:
        """The documents of a sharded dataset, made of that of a new one without shards.

        None if there is nothing to be sharded (a group). Raise ValueError, with the reason, if it cannot be, or is
        sharded already.
        """

    def chunk_like(self, name: str) -> bool:
        """Whether a path below a directory of this format could be a chunk's, whatever its documents say."""


class Fixed:
    """The part of `Format` that is the same for all of which no documents can be written."""

    def open(self, path: str, documents: Mapping[str, bytes]) -> Dataset | None:
        return None

    def shown(self, path: str, stored: Mapping[str, bytes], name: str) -> bytes | None:
        try:
            found = self.open(path, stored)
        except CorruptShardError:
            found = None
        return stored.get(name) if found is None else found.documents.get(name, stored.get(name))

    def describes(self, name: str) -> bool:
        return False

    def described_by(self, path: str, name: str) -> str:
        return path

    def references(self, path: str, name: str, new: bytes) -> Sequence[str]:
        return ()

    def edit(
        self, path: str, stored: Mapping[str, bytes], name: str, new: bytes, rule: Rule | None = None
    ) -> Mapping[str, bytes]:
        raise ValueError("the documents of this format cannot be changed through a mount")

    def sharding(self, stored: Mapping[str, bytes]) -> Sharding | None:
        return None

    def shard(self, path: str, name: str, new: bytes, sharding: Sharding | Rule) -> Mapping[str, bytes] | None:
        return None

    def chunk_like(self, name: str) -> bool:
        return False


class OfDocuments(Fixed):
    """The part of `Format` that is the same for all that are found by documents, and never in a single file."""

    documents: Sequence[str] = ()

    def describes(self, name: str) -> bool:
        return name in self.documents

    def may_hold(self, name: str) -> bool:
        return False

    def open_file(self, path: str, blob: Blob) -> None:
        return None


class View(Protocol):
    """The layout face of a format: how it would show datasets of any other."""

    @property
    def name(self) -> str:
        """As `--layout` calls it."""

    @property
    def pairings(self) -> Sequence[Pairing]:
        """What it shows, for people."""

    @property
    def renames(self) -> bool:
        """Whether images are shown under names of its own, so that it must know what else there is."""

    def children(self, dataset: Dataset) -> Sequence[str]:
        """Directories below of which `show` needs to know the datasets, as paths relative to the dataset's."""

    def show(self, path: str, dataset: Dataset | None, children: Mapping[str, Dataset]) -> Dataset:
        """A directory in this layout: other documents, names and transforms, and nothing of the source's form.

        `dataset` is None for a directory that no format knows, above datasets. `path` is for messages. Raise
        UnsupportedError, with the reason, for what cannot be expressed.
        """


def parse_json(path: str, name: str, raw: bytes) -> Any:
    """Exact JSON: integers stay integers, duplicate names are refused. Raise CorruptShardError with the reason."""
    try:
        if len(raw) > MAX_DOCUMENT_BYTES:
            raise ValueError(f"more than {MAX_DOCUMENT_BYTES} bytes")
        if raw.count(b"{") + raw.count(b"[") > MAX_CONTAINERS or raw.count(b",") > MAX_ITEMS:
            raise ValueError("too many members")
        return json.loads(raw, object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise CorruptShardError(path, name, "nested too deeply") from None
    except ValueError as e:
        raise CorruptShardError(path, name, f"cannot be read: {e}") from e


def parse_written(name: str, raw: bytes) -> dict[str, Any]:
    """A document that somebody writes, which must be an object. Raise ValueError with the reason."""
    try:
        doc = parse_json("", name, raw)
    except CorruptShardError as e:
        raise ValueError(f"{name}: {e.why}") from None
    if not isinstance(doc, dict):
        raise ValueError(f"{name}: should be an object, not {type(doc).__name__}")
    return doc


def require_same(found: Any, stored: Any, what: str) -> None:
    """Raise ValueError if a document that is written says something else than chunks that are stored."""
    if found != stored:
        raise ValueError(f"{what} is {stored!r:.200} and cannot become {found!r:.200}: chunks are stored so")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a member occurs twice")
    return out


def print_json(document: Any) -> bytes:
    """The document as a file, members in their order. Raise ValueError if it is nested too deeply."""
    try:
        text = json.dumps(document, ensure_ascii=False)
        if len(text) <= MAX_PRETTY:  # indentation can make a large, deep document a thousand times as large
            text = json.dumps(document, indent=2, ensure_ascii=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return text.encode("utf-8", "backslashreplace") + b"\n"  # half a surrogate pair stays the escape that it was


def print_strict(document: Mapping[str, Any]) -> bytes:
    """`print_json` of what a layout shows, without the numbers that JSON does not have: they are named instead.

    Raise UnsupportedError if it is nested too deeply.
    """
    try:
        return print_json(_named_numbers(document))
    except (ValueError, RecursionError):
        raise UnsupportedError("its attributes are nested too deeply") from None


def _named_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _named_numbers(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [_named_numbers(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


# ---- members of documents ----

UNFIT = (ValueError, TypeError, KeyError, IndexError, OverflowError)
"""What reading a member that is not as it should be raises."""


def reason(error: Exception) -> str:
    """Of one of `UNFIT`, for people."""
    return f"no member {error}" if isinstance(error, KeyError) else str(error)


def intelligible(name: str, raw: bytes | None) -> dict[str, Any] | None:
    """As `parse_written`; None for what is none: it is shown as it is, and may be mended."""
    try:
        return None if raw is None else parse_written(name, raw)
    except ValueError:
        return None


def unsharded(unshard: Callable[[dict[str, Any]], T | None], doc: dict[str, Any] | None) -> T | None:
    """What `unshard` makes of a document of shards; None for any other, and for one that cannot be made out: those are
    shown as they are stored."""
    try:
        return None if doc is None else unshard(doc)
    except UNFIT:
        return None


def integer(value: Any, name: str, least: int) -> int:
    """A number of elements or the like. Raise ValueError, with the reason, for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise ValueError(f"{name} should hold integers of at least {least}, not {value!r:.80}")
    return value


def listed(value: Any, name: str) -> list[Any]:
    """Raise ValueError, with the reason, for what is no list."""
    if not isinstance(value, list):
        raise ValueError(f"{name} should be a list, not {type(value).__name__}")
    return value


def integers(value: Any, name: str, least: int) -> Coords:
    """A list of `integer`: a shape."""
    return tuple(integer(v, name, least) for v in listed(value, name))


def require_rank(value: Sequence[Any], rank: int, name: str) -> None:
    """Raise ValueError unless there is one item for each axis of the array."""
    if len(value) != rank:
        raise ValueError(f"{name} has {len(value)} axes, the array {rank}")


@cache
def formats() -> Sequence[Format]:
    """All formats, in the order in which a directory is asked for them."""
    from shardfs.formats.bcolz import BCOLZ
    from shardfs.formats.blosc2 import BLOSC2
    from shardfs.formats.n5 import N5
    from shardfs.formats.precomputed import PRECOMPUTED
    from shardfs.formats.zarr3 import ZARR3
    from shardfs.formats.zarr_transformer import ZARR_TRANSFORMER

    return (ZARR3, ZARR_TRANSFORMER, PRECOMPUTED, N5, BCOLZ, BLOSC2)


def format_of(name: str) -> Format:
    """The format of datasets that `Dataset.format` calls so. Raise KeyError if there is none."""
    return {system.format: f for f in formats() for system in f.systems}[name]


def as_markdown() -> str:
    """The table of docs/formats.md."""
    head = "| system | recognised by | shown as | written by | read by |\n|---|---|---|---|---|\n"
    rows = (system for f in formats() for system in f.systems)
    return head + "".join(f"| {' | '.join(system[1:])} |\n" for system in rows)


def layouts_as_markdown() -> str:
    """The table of docs/layouts.md."""
    head = "| source | layout | chunks | read by |\n|---|---|---|---|\n"
    found = {(p.format, view.name): p for view in views().values() for p in view.pairings}
    rows = []
    for name in dict.fromkeys(system.format for f in formats() for system in f.systems):
        for layout in views():
            pairing = found.get((name, layout), Pairing(name, "refused", ""))
            rows.append(f"| {name} | {layout} | {pairing.shown} | {pairing.readers} |\n")
    return head + "".join(rows)


@cache
def sources() -> Sequence[Format]:
    """Those, and what the native layout has no need to look for: layouts show it as it is, or describe it."""
    from shardfs.formats.bcolz import BCOLZ, BCOLZ_SOURCE
    from shardfs.formats.zarr2 import ZARR2

    return (*(BCOLZ_SOURCE if f is BCOLZ else f for f in formats()), ZARR2)


@cache
def views() -> Mapping[str, View]:
    """All layouts but the native one, by name."""
    from shardfs.formats.bcolz import BCOLZ
    from shardfs.formats.n5 import N5
    from shardfs.formats.precomputed import PRECOMPUTED
    from shardfs.formats.zarr2 import ZARR2
    from shardfs.formats.zarr3_view import ZARR3_VIEW

    found: Sequence[View] = (ZARR2, ZARR3_VIEW, N5, PRECOMPUTED, BCOLZ)
    return {view.name: view for view in found}
