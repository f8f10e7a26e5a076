"""Edits JSON documents member by member, and keeps all other bytes unchanged.

Numbers keep their digits, members keep their order, and the document keeps the formatting of its writer.
"""

from __future__ import annotations

import itertools
import json
import re
from json.decoder import JSONDecodeError
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from shardfs.formats.documents import MAX_DOCUMENT_BYTES
from shardfs.model.bounded_json import load_json

if TYPE_CHECKING:
    from collections.abc import Mapping

Path: TypeAlias = "tuple[str | int, ...]"
"""The location of a value in a document: names of members and indices of list items. () is the whole document."""


REMOVED: Final = object()
"""Passed instead of a value to remove the member."""

_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


def changed(raw: bytes, values: Mapping[Path, Any]) -> bytes:
    """The document with these values at these paths. New members follow the other members of their object.

    No path may be below another path. Raise ValueError if the document is not JSON, or if a path does not exist; only
    the last step of a path may name a new member.
    """
    text = raw.decode(json.detect_encoding(raw), "surrogatepass")
    start = _skip(text, 0)
    try:
        new, stop = _rewritten(text, start, values)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return (text[:start] + new + text[stop:]).encode("utf-8", "surrogatepass")


def _rewritten(text: str, start: int, values: Mapping[Path, Any]) -> tuple[str, int]:
    """The new text of the value that begins at `start`, and where its old text ends."""
    if () in values:
        return _printed(values[()], text, start), _end(text, start)
    if text[start : start + 1] not in ("{", "["):
        raise ValueError("should be an object or a list")
    below: dict[str | int, dict[Path, Any]] = {}
    for (step, *steps), value in values.items():
        below.setdefault(step, {})[tuple(steps)] = value
    texts: list[str] = []  # the text of each member that stays, with the space before it
    names: list[str | int] = []
    space, like, at = "", start, start + 1
    while not text.startswith(("}", "]"), member := _skip(text, at)):
        name, value_at = _name(text, member) if text[start] == "{" else (len(names), member)
        inner = below.get(name, {})
        new, stop = _rewritten(text, value_at, inner) if inner and not _removes(inner) else ("", _end(text, value_at))
        names.append(name)
        comma = _skip(text, stop)
        ends = not text.startswith(",", comma)
        if not _removes(inner):
            texts.append(text[at:value_at] + (new or text[value_at:stop]) + ("" if ends else text[stop:comma]))
            space, like = text[at:member], member
        at = stop if ends else comma + 1
    for added in [name for name in below if name not in names and not _removes(below[name])]:
        if text[start] == "[" or not isinstance(added, str) or () not in below[added]:
            raise ValueError(f"there is no {added!r:.80} to change")
        printed = f"{json.dumps(added)}: {_printed(below[added][()], text, like)}"
        texts.append((space or " ") + printed if texts else printed)
    return text[start] + ",".join(texts) + text[at : member + 1], member + 1


def _name(text: str, at: int) -> tuple[str, int]:
    """The name of the member that begins at `at`, and where its value begins."""
    name, stop = _DECODER.raw_decode(text, at)
    return name, _skip(text, _skip(text, stop) + 1)


def _removes(values: Mapping[Path, Any]) -> bool:
    return values.get(()) is REMOVED


def _printed(value: Any, text: str, at: int) -> str:
    """A new value as JSON text, indented as the line where it is inserted."""
    if "\n" not in text[:at]:
        return json.dumps(value, ensure_ascii=False)
    line = text[text.rfind("\n", 0, at) + 1 : at]
    indent = line[: len(line) - len(line.lstrip(" \t"))]
    return json.dumps(value, indent=2, ensure_ascii=False).replace("\n", "\n" + indent)


def _skip(text: str, at: int) -> int:
    """The position of the first character from `at` on that is not white space."""
    match = _SPACE.match(text, at)
    return match.end() if match is not None else at


def _end(text: str, at: int) -> int:
    try:
        return _DECODER.raw_decode(text, at)[1]
    except JSONDecodeError as e:
        raise ValueError(str(e)) from None


# ---- versions of a document ----


def alike(a: Any, b: Any) -> bool:
    """Whether two values are equal as JSON. The order of members is ignored, but 1, 1.0 and true differ.

    `REMOVED`, which stands for no value, is alike only to itself.
    """
    if a is REMOVED or b is REMOVED:
        return a is b
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def with_additions(written: Any, before: Any, shown_doc: Any) -> Any:
    """The written value, with the members that `shown_doc` has in addition to `before`, in nested objects, too."""
    if not (isinstance(written, dict) and isinstance(shown_doc, dict)):
        return written
    old = before if isinstance(before, dict) else {}
    merged = {name: with_additions(value, old.get(name), shown_doc.get(name)) for name, value in written.items()}
    return {name: value for name, value in shown_doc.items() if name not in old} | merged


def differences(old: Any, new: Any) -> dict[Path, Any]:
    """The values, by their paths, with which `changed` turns the document `old` into `new`; {} if they are alike.

    A member that `new` lacks has the value `REMOVED`; lists of different lengths are replaced as a whole.
    """
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return {} if alike(old, new) else {(): new}
    out: dict[Path, Any] = {(name,): REMOVED for name in old if name not in new}
    for name, value in new.items():
        out |= {(name, *path): v for path, v in differences(old.get(name, REMOVED), value).items()}
    return out


def rebased(base: bytes, new: bytes, theirs: bytes) -> bytes:
    """The text of `theirs` with the changes from `base` to `new`. Where `theirs` has changed, too, `new` wins.

    Raise ValueError if one of the documents is not JSON, or is beyond the limits of `load_json`.
    """
    before, after, present = (load_json(raw, MAX_DOCUMENT_BYTES) for raw in (base, new, theirs))
    try:
        return changed(theirs, differences(present, _rebased(before, after, present)))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _rebased(base: Any, new: Any, theirs: Any) -> Any:
    if alike(base, new):
        return theirs
    versions = base, new, theirs
    if all(isinstance(v, dict) for v in versions):
        values = ((n, _rebased(*(v.get(n, REMOVED) for v in versions))) for n in {**theirs, **new})
        return {name: value for name, value in values if value is not REMOVED}
    if all(isinstance(v, list) for v in versions) and len(base) == len(new) <= len(theirs):
        items = itertools.zip_longest(*versions, fillvalue=REMOVED)
        return [_rebased(*triple) for triple in items]
    return new
