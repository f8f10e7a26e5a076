"""Edits JSON documents member by member, and keeps all other bytes unchanged.

Numbers keep their digits, members keep their order, and the document keeps the formatting of its writer.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from json.decoder import JSONDecodeError
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Path: TypeAlias = "tuple[str | int, ...]"
"""The location of a value in a document: names of members and indices of list items. () is the whole document."""


class _Removed:
    """The type of `REMOVED`."""


REMOVED = _Removed()
"""Passed instead of a value to remove the member."""

_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


class _Member(NamedTuple):
    """The text range `start` to `stop` of an object's member, with its name, or of a list's item."""

    start: int
    value: int
    stop: int


def changed(raw: bytes, values: Mapping[Path, Any]) -> bytes:
    """The document with these values at these paths. New members follow the other members of their object.

    No path may be below another path. Raise ValueError if the document is not JSON, or if a path does not exist; only
    the last step of a path may name a new member.
    """
    text = raw.decode(json.detect_encoding(raw), "surrogatepass")
    edits: list[tuple[int, int, str]] = []
    try:
        _collect(text, _skip(text, 0), {path: value for path, value in values.items()}, edits)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    for start, stop, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[stop:]
    return text.encode("utf-8", "surrogatepass")


def _collect(text: str, at: int, values: Mapping[Path, Any], edits: list[tuple[int, int, str]]) -> None:
    """Append to `edits` the replacements (start, stop, new text) for the value that begins at `at`."""
    if () in values:
        edits.append((at, _end(text, at), _printed(values[()], text, at)))
        return
    members = _members(text, at)
    below: dict[str | int, dict[Path, Any]] = {}
    for (name, *rest), value in values.items():
        below.setdefault(name, {})[tuple(rest)] = value
    gone = {name for name, inner in below.items() if isinstance(inner.get(()), _Removed)}
    if found := gone & members.keys():
        edits += _removals(members, found)
    new: dict[str, Any] = {}
    for name in (name for name in below if name not in gone):
        if name in members:
            _collect(text, members[name].value, below[name], edits)
        elif isinstance(name, str) and text[at] == "{" and () in below[name]:
            new[name] = below[name][()]
        else:
            raise ValueError(f"there is no {name!r:.80} to change")
    if new:
        edits.append(_addition(text, at, [m for n, m in members.items() if n not in gone], new))


def _members(text: str, at: int) -> dict[str | int, _Member]:
    """The members of an object or the items of a list, in order. Raise ValueError for any other value."""
    if text[at : at + 1] not in ("{", "["):
        raise ValueError("should be an object or a list")
    is_object, found, at = text[at] == "{", dict[str | int, _Member](), _skip(text, at + 1)
    while text[at] not in "}]":
        start, name = at, len(found)
        if is_object:
            name, at = _DECODER.raw_decode(text, at)
            at = _skip(text, _skip(text, at) + 1)
        stop = _end(text, at)
        found[name] = _Member(start, at, stop)
        at = _skip(text, stop)
        at = _skip(text, at + 1) if text[at] == "," else at
    return found


def _removals(members: Mapping[str | int, _Member], gone: set[str | int]) -> list[tuple[int, int, str]]:
    """The edits that remove members, each with the comma after it, or with the comma before it if no member follows."""
    names = list(members)
    stays = [name for name in names if name not in gone]
    behind = members[stays[-1]].stop if stays else members[names[0]].start
    tail = names[names.index(stays[-1]) + 1 :] if stays else names
    edits = [(behind, members[tail[-1]].stop, "")] if tail else []
    inside = ((members[n].start, members[after].start) for n, after in pairwise(names) if n in gone and n not in tail)
    return edits + [(start, stop, "") for start, stop in inside]


def _addition(text: str, at: int, members: Sequence[_Member], new: Mapping[str, Any]) -> tuple[int, int, str]:
    """The edit that adds members after the existing ones."""
    like = members[-1].start if members else at
    space = text[len(text[:like].rstrip(" \t\n\r")) : like] if members else ""
    printed = f",{space or ' '}".join(f"{json.dumps(name)}: {_printed(v, text, like)}" for name, v in new.items())
    if not members:
        return at + 1, at + 1, printed
    return members[-1].stop, members[-1].stop, f",{space or ' '}{printed}"


def _printed(value: Any, text: str, at: int) -> str:
    """A new value as JSON text, indented as the line where it is inserted."""
    line = text[text.rfind("\n", 0, at) + 1 : at]
    indent = line[: len(line) - len(line.lstrip(" \t"))]
    if "\n" not in text[:at]:
        return json.dumps(value, ensure_ascii=False)
    return json.dumps(value, indent=2, ensure_ascii=False).replace("\n", "\n" + indent)


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match is not None else at


def _end(text: str, at: int) -> int:
    try:
        return _DECODER.raw_decode(text, at)[1]
    except JSONDecodeError as e:
        raise ValueError(str(e)) from None


# ---- versions of a document ----


def alike(a: Any, b: Any) -> bool:
    """Whether two values are equal as JSON. The order of members is ignored, but 1, 1.0 and true differ."""
    if isinstance(a, _Removed) or isinstance(b, _Removed):
        return a is b
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def differences(old: Any, new: Any) -> dict[Path, Any]:
    """The values with which `changed` turns the document `old` into the document `new`.

    Differing lists are replaced as a whole.
    """
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return {} if alike(old, new) else {(): new}
    out: dict[Path, Any] = {(name,): REMOVED for name in old if name not in new}
    for name, value in new.items():
        out |= {(name, *path): v for path, v in differences(old.get(name, REMOVED), value).items()}
    return out


def merged(base: bytes, ours: bytes, theirs: bytes) -> tuple[bytes, list[Path]]:
    """The three-way merge: the text of `ours` with the changes from `base` to `theirs`, and the conflicting paths.

    At conflicting paths, the result has the values of `ours`. Raise ValueError if one of the documents is not JSON.
    """
    overlaps: list[Path] = []
    try:
        doc = json.loads(ours)
        wanted = _merged(json.loads(base), doc, json.loads(theirs), (), overlaps)
        return changed(ours, differences(doc, wanted)), overlaps
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _merged(base: Any, ours: Any, theirs: Any, at: Path, overlaps: list[Path]) -> Any:
    if alike(ours, theirs) or alike(base, theirs):
        return ours
    if alike(base, ours):
        return theirs
    if not (isinstance(ours, dict) and isinstance(theirs, dict)):
        overlaps.append(at)
        return ours
    base = base if isinstance(base, dict) else {}
    found = {
        name: _merged(
            base.get(name, REMOVED), ours.get(name, REMOVED), theirs.get(name, REMOVED), (*at, name), overlaps
        )
        for name in {**ours, **theirs}
    }
    return {name: value for name, value in found.items() if value is not REMOVED}
