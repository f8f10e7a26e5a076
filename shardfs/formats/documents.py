"""JSON documents of datasets: parsed with limits, printed, and their members checked."""

from __future__ import annotations

import hashlib
import json
import math
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from shardfs.model.bounded_json import load_json
from shardfs.model.errors import CorruptShardError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shardfs.model.values import Coords

MAX_DOCUMENT_BYTES = 64 << 20
"""Documents beyond this limit, and beyond those of `load_json`, count as damaged."""

MAX_PRETTY = 64 << 10

MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 1024
"""Limits of the names of files, and of the keys of S3."""

T = TypeVar("T")


def parse_json(path: str, name: str, raw: bytes) -> Any:
    """The parsed JSON document, with integers as `int`.

    Raise CorruptShardError, with the reason, for invalid JSON, duplicate names, or a document beyond the limits.
    """
    try:
        return load_json(raw, MAX_DOCUMENT_BYTES)
    except ValueError as e:
        raise CorruptShardError(path, name, f"cannot be read: {e}") from e


def parse_written(name: str, raw: bytes) -> dict[str, Any]:
    """The JSON object that a client writes. Raise ValueError, with the reason, for anything else."""
    try:
        doc = parse_json("", name, raw)
    except CorruptShardError as e:
        raise ValueError(f"{name}: {e.why}") from None
    if not isinstance(doc, dict):
        raise ValueError(f"{name}: should be an object, not {type(doc).__name__}")
    return doc


def require_same(written: Any, required: Any, member: str) -> None:
    """Raise ValueError if a written value differs from the value that the stored chunks need."""
    if written != required:
        raise ValueError(
            f"{member} is {required!r:.200} and cannot become {written!r:.200}: stored chunks depend on it; "
            "keep its value, or write a new array"
        )


def print_json(document: Any) -> bytes:
    """The document as JSON text, with members in their order. Raise ValueError if it is nested too deeply."""
    try:
        text = json.dumps(document, ensure_ascii=False)
        if len(text) <= MAX_PRETTY:  # indentation can enlarge a deep document a thousandfold
            text = json.dumps(document, indent=2, ensure_ascii=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return text.encode("utf-8", "backslashreplace") + b"\n"  # keeps a lone surrogate as its escape


def print_strict(document: Mapping[str, Any]) -> bytes:
    """The document of a layout as strict JSON text: NaN and infinities become strings, such as "NaN".

    Raise UnsupportedError if the document is nested too deeply.
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
    return named_number(value) if isinstance(value, float) else value


def named_number(value: float) -> float | str:
    """A finite number unchanged; else its name: "NaN", "Infinity" or "-Infinity"."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


# ---- members of documents ----

UNFIT = (ValueError, TypeError, KeyError, IndexError, OverflowError)
"""The exceptions that reading an invalid member can raise."""


def reason(error: Exception) -> str:
    """The text of one of the `UNFIT` exceptions, for messages."""
    return f"no member {error}" if isinstance(error, KeyError) else str(error)


def is_inner_path(value: Any) -> bool:
    """Whether a member of a document can be the path of a file that is not outside the directory of the document."""
    if not isinstance(value, str) or "\0" in value or ".." in value.split("/"):
        return False
    try:
        path = value.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can hold and no file name can
        return False
    return len(path) <= MAX_PATH_BYTES and all(len(name) <= MAX_NAME_BYTES for name in path.split(b"/"))


def intelligible(name: str, raw: bytes | None) -> dict[str, Any] | None:
    """The JSON object in `raw`; None for anything else, which the mount shows unchanged and clients can repair."""
    try:
        return None if raw is None else parse_written(name, raw)
    except ValueError:
        return None


def members(raw: bytes | None) -> dict[str, Any]:
    """The members of a document. A document that is no JSON object counts as one member."""
    doc = intelligible("", raw)
    return doc if doc is not None else {} if raw is None else {"the document": raw.decode(errors="replace")}


def shown_document(unshard: Callable[[T], tuple[Any, T] | None], doc: T) -> T | None:
    """The document that `unshard` returns; None for arrays that are not sharded or that it cannot translate.

    The mount shows the documents of these arrays unchanged. Opening the array reports why it cannot be translated.
    """
    with suppress(*UNFIT):
        if (unsharded := unshard(doc)) is not None:
            return unsharded[1]
    return None


def form_of(*parts: Any) -> str:
    """A digest of values from documents, for `Collection.form`. Raise ValueError if they are nested too deeply."""
    try:
        text = json.dumps(parts, sort_keys=True)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@contextmanager
def naming(document: str) -> Iterator[None]:
    """Turn exceptions of `UNFIT` into ValueErrors that name the document."""
    try:
        yield
    except UNFIT as e:
        raise ValueError(f"{document}: {reason(e)}") from e


def integer(value: Any, name: str, minimum: int) -> int:
    """The value if it is an integer from `minimum` to 2**63 - 1; else raise ValueError, with the reason."""
    if not _is_integer(value, minimum):
        raise ValueError(f"{name} should be an integer of at least {minimum}, not {value!r:.80}")
    return int(value)


def _is_integer(value: Any, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value < 2**63


def choice(value: Any, name: str, *allowed: str) -> Any:
    """The value if it is one of two allowed texts or more; else raise ValueError, with the reason."""
    if value not in allowed:
        raise ValueError(f"{name} should be {' or '.join(allowed)}, not {value!r:.80}")
    return value


def mapping(value: Any, name: str) -> dict[str, Any]:
    """The value if it is a JSON object; else raise ValueError, with the reason."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} should be an object, not {value!r:.80}")
    return value


def mapping_or_empty(value: Any) -> dict[str, Any]:
    """The value if it is a JSON object; else an empty one, for members that readers ignore if they are invalid."""
    return value if isinstance(value, dict) else {}


def listed(value: Any, name: str) -> list[Any]:
    """The value if it is a list; else raise ValueError, with the reason."""
    if not isinstance(value, list):
        raise ValueError(f"{name} should be a list, not {type(value).__name__}")
    return value


def integers(value: Any, name: str, minimum: int) -> Coords:
    """A list of integers, such as a shape, as a tuple. Raise ValueError, with the reason, for anything else."""
    for element in listed(value, name):
        if not _is_integer(element, minimum):
            raise ValueError(f"{name} should hold integers of at least {minimum}, not {element!r:.80}")
    return tuple(value)


def require_rank(value: Sequence[Any], rank: int, name: str) -> None:
    """Raise ValueError unless `value` has one item for each axis of the array."""
    if len(value) != rank:
        raise ValueError(f"{name} has {len(value)} axes, the array {rank}")
