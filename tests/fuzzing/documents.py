"""A document that is written is refused with ValueError, or what comes of it can be opened, edited and shown."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from shardfs.create_rules import Rule
from shardfs.errors import CorruptShardError, UnsupportedError
from shardfs.formats import format_of
from tests.fuzzing.inputs import Draw, bent
from tests.strategies import json_paths, json_values, replaced
from tests.write.bombs import PLAIN, SHARDED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FORMATS = {"zarr": "zarr3", "volume": "precomputed", "n5": "n5"}


def altered(draw: Draw, document: Any) -> bytes:
    """The document with other values in it, of any type; sometimes not even JSON."""
    for _ in range(draw.draw(st.integers(0, 3))):
        paths = json_paths(document)
        if not paths:
            break
        document = replaced(document, draw.draw(st.sampled_from(paths)), draw.draw(json_values))
    raw = json.dumps(document).encode()
    return bent(draw, raw) if draw.draw(st.integers(0, 4)) == 0 else raw


def written(draw: Draw) -> None:
    kind = draw.draw(st.sampled_from(sorted(FORMATS)))
    form, (name, sharded) = format_of(FORMATS[kind]), SHARDED[kind]
    raw = altered(draw, draw.draw(st.sampled_from((_shown(kind), PLAIN[kind][1], sharded))))
    stored = {name: json.dumps(sharded).encode()}
    makers: list[Callable[[], Mapping[str, bytes] | None]] = [
        lambda: form.edit("a", stored, name, raw),
        lambda: form.edit("a", {}, name, raw),
        lambda: form.shard("a", name, raw, Rule(FORMATS[kind])),
    ]
    for make in makers:
        try:
            documents = make()
        except (ValueError, UnsupportedError):
            continue
        if documents is not None:
            with suppress(CorruptShardError):
                form.open("a", documents)
    with suppress(ValueError):
        form.references("a", name, raw)
    again = form.sharding({name: raw})
    if again is not None:
        with suppress(ValueError):
            form.shard("a", name, json.dumps(PLAIN[kind][1]).encode(), again)


@cache
def _shown(kind: str) -> Any:
    name, sharded = SHARDED[kind]
    opened = format_of(FORMATS[kind]).open("a", {name: json.dumps(sharded).encode()})
    assert opened is not None
    return json.loads(opened.documents[name])
