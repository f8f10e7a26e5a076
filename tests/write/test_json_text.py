"""JSON documents changed member by member."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfs.formats.json_text import REMOVED, alike, changed, differences, rebased
from shardfs.model.bounded_json import MAX_ITEMS

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.text(max_size=2), VALUES, max_size=5)
LOOKS: list[dict[str, Any]] = [{}, {"indent": 2}, {"indent": "\t"}, {"separators": (",", ":")}, {"ensure_ascii": False}]


@given(OBJECTS, st.dictionaries(st.text(max_size=2), VALUES | st.just(REMOVED), max_size=4), st.sampled_from(LOOKS))
def test_it_is_what_an_object_becomes_by_assignment(document: dict[str, Any], new: Any, look: dict[str, Any]) -> None:
    raw = json.dumps(document, **look).encode("utf-8", "surrogatepass")
    wanted = dict(document)
    for name, value in new.items():
        if value is REMOVED:
            wanted.pop(name, None)
        else:
            wanted[name] = value
    parsed_document = json.loads(
        changed(
            raw, {(name,): value for name, value in new.items() if value is not REMOVED or name in wanted | document}
        )
    )
    assert parsed_document == wanted
    assert list(parsed_document) == list(wanted)


def test_all_other_bytes_stay() -> None:
    raw = b'\n{ "a" :1.000,"b":[1E400, {"c":\t-0 , "d" : "\\u00e9"}],\n  "e":{}}\n\n'
    new_documents = changed(raw, {("b", 1, "c"): [2], ("e", "f"): None})
    assert new_documents == b'\n{ "a" :1.000,"b":[1E400, {"c":\t[\n  2\n] , "d" : "\\u00e9"}],\n  "e":{"f": null}}\n\n'
    assert changed(raw, {}) == raw


def test_it_looks_like_the_rest() -> None:
    raw = json.dumps({"a": {"b": 1, "c": 2}}, indent=4).encode()
    new_documents = changed(raw, {("a", "d"): [1], ("a", "b"): {"x": 0}})
    assert [line.strip() for line in new_documents.decode().splitlines()] == [
        "{", '"a": {', '"b": {', '"x": 0', "},", '"c": 2,', '"d": [', "1", "]", "}", "}",
    ]  # fmt: skip
    assert b'\n        "d": [\n          1\n        ]' in new_documents


@pytest.mark.parametrize("path", [("z", "y"), ("a", 1), ("b", "c"), ("a", "x")])
def test_a_path_that_leads_nowhere_is_an_error(path: tuple[str | int, ...]) -> None:
    with pytest.raises(ValueError, match=r"there is no|should be an object"):
        changed(b'{"a": [1], "b": 2}', {path: 3})


# ---- versions of a document

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2) | st.floats(0, 2) | st.text("ab", max_size=1),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("abc", min_size=1, max_size=1), inner),
    max_leaves=8,
)
SMALL = st.dictionaries(st.text("abcd", min_size=1, max_size=1), JSON, max_size=4)


@given(SMALL, SMALL)
def test_differences_turn_one_document_into_the_other(old: Any, new: Any) -> None:
    new_documents = changed(json.dumps(old).encode(), differences(old, new))
    assert alike(json.loads(new_documents), new)


@pytest.mark.parametrize(
    "bad", [b'{"a": 1, "a": 2}', b"[" + b"0," * (MAX_ITEMS + 1) + b"0]", b"[" * 200_000 + b"]" * 200_000]
)
@pytest.mark.parametrize("place", range(3))
def test_a_document_beyond_the_limits_is_not_rebased(bad: bytes, place: int) -> None:
    versions = [b"{}"] * 3
    versions[place] = bad
    with pytest.raises(ValueError, match=r"twice|too many|too deeply"):
        rebased(*versions)
