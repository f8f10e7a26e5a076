"""JSON documents of datasets: parsed with limits, printed, and their members checked."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, TypeVar

from shardfs.model.errors import CorruptShardError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardfs.model.values import Coords

MAX_DOCUMENT_BYTES = 64 << 20

MAX_CONTAINERS = 500_000

MAX_ITEMS = 1_000_000
"""A metadata document beyond these is taken for damage: parsing it could cost more memory than the mount may use."""

MAX_PRETTY = 64 << 10

T = TypeVar("T")


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
